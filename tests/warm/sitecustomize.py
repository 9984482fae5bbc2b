"""In a command that `starting.py` started: its first fork server is the process that waits to be that."""

import json
import os
import socket
from collections.abc import Sequence
from multiprocessing import util


def offer(descriptor: int, pid: int) -> None:
    """Has a process that waits at a socket run the next fork server's program, in place of a new one."""
    os.set_inheritable(descriptor, False)
    waiting = socket.socket(fileno=descriptor)
    start = util.spawnv_passfds

    def spawn(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in arguments[-1]:
            return int(start(path, arguments, descriptors))
        util.spawnv_passfds = start
        asked = {"program": arguments[-1], "descriptors": descriptors, "environ": {**os.environ}}
        with waiting:
            socket.send_fds(waiting, [json.dumps(asked).encode()], descriptors)
        return pid

    util.spawnv_passfds = spawn


if "WARM_FORK_SERVER" in os.environ:
    offer(*map(int, os.environ.pop("WARM_FORK_SERVER").split()))

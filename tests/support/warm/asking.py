"""Runs commands that train nothing in forks of a process that has imported what they import, most of their time.

The code of `python -m pipeline` runs from its first line to its exit code, in a process of its own with the folder, the
environment, the arguments and the module path of one that was started. What is imported already is not imported again.
"""

import contextlib
import gc
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from warm.running import path_of_all, run, take_streams

SUPPORT = Path(__file__).resolve().parents[1]
# Bytes of a command's arguments and environment.
LARGEST = 1 << 17


class Asking:
    """The process that has all imported, as the tests see it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from warm import asking; asking.serve({theirs.fileno()})"],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (SUPPORT, SUPPORT.parents[1])))},
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
            )

    def ask(
        self, arguments: Sequence[str], folder: Path, environ: Mapping[str, str], module: str, timeout: float
    ) -> tuple[int, str, str]:
        """The exit code, stdout and stderr of `python -m module arguments`. Raises `TimeoutError`."""
        asked = {"module": module, "arguments": arguments, "folder": str(folder), "environ": {**environ}}
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            self._socket.settimeout(timeout)
            socket.send_fds(self._socket, [json.dumps(asked).encode()], (out.fileno(), err.fileno()))
            code = int(self._socket.recv(LARGEST))
            for written in (out, err):
                written.seek(0)
            return code, out.read(), err.read()

    def close(self) -> None:
        """Ends it."""
        self._socket.close()
        self._process.wait()


def serve(descriptor: int) -> None:
    """Imports what commands do, and runs them, one after the other, until the tests have ended."""
    compose_once()
    path = path_of_all()
    tests = socket.socket(fileno=descriptor)
    while True:
        asked, streams, _, _ = socket.recv_fds(tests, LARGEST, 2)
        if not asked:
            return
        pid = os.fork()
        if not pid:
            tests.close()
            _run(streams=streams, path=path, **json.loads(asked))
        for stream in streams:
            os.close(stream)
        _, status = os.waitpid(pid, 0)
        tests.send(str(os.waitstatus_to_exitcode(status)).encode())


def compose_once() -> None:
    """What the first command of a process pays for: imports, the grammar of overrides, Hydra's search for plugins."""
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton

    from pipeline.commands import train
    from pipeline.config import config

    # What a command imports once it runs or reports something.
    from pipeline.driver import parallel, predicting, supervisor, takeover  # noqa: F401
    from pipeline.views import report  # noqa: F401

    config.OverridesParser.create().parse_overrides(["a=1", "+b={c: [1, x.y]}", "~c", "d='e'", "f=g,h"])
    with contextlib.redirect_stdout(io.StringIO()):
        train.main(["--cfg=job"])
    # Each looks anew for the plugins on its own path.
    del Singleton._instances[Plugins]
    # Memory that a fork looks through for garbage is copied for it.
    gc.freeze()


def _run(
    module: str, arguments: Sequence[str], folder: str, environ: Mapping[str, str], streams: Sequence[int],
    path: Sequence[str],
) -> NoReturn:  # fmt: skip
    take_streams(streams, 1)
    os.chdir(folder)
    run(module, arguments, environ, path)

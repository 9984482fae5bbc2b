"""Starts commands beside a fork server that has TensorFlow imported already, which takes most of a short run.

One process imports what a fork server does. For each command it forks two: one becomes the command by exec, the other,
its child, waits. Once the command would start `multiprocessing`'s fork server (`sitecustomize.py`), that child gets the
program, the descriptors and the environment, and runs it. The command is started as any other, and its fork server's
parent, signals and end are as ever; the import's time is not.
"""

import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from pipeline.launch.signals import CONDUCTOR, PR_SET_PDEATHSIG, PREEMPTING, die_with_conductor

TESTS = Path(__file__).resolve().parents[1]
# linux/sched.h: the child is one of the caller's parent.
CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
# Bytes of a command line and its environment.
LARGEST = 1 << 17
# Beyond any descriptor that a command passes to its fork server.
BEYOND = 512


class Warm:
    """The process that has TensorFlow imported, as the tests see it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            path = os.pathsep.join(map(str, (TESTS, TESTS.parent)))
            given = {"PYTHONPATH": path, CONDUCTOR: str(os.getpid())}
            as_ever = {"TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow"}
            # Arrow's allocator has a thread, which no process that is forked has.
            as_ever["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from warm import starting; starting.serve({theirs.fileno()})"],
                env=os.environ | given | as_ever,
                pass_fds=[theirs.fileno()],
            )

    def start(self, arguments: Sequence[str], folder: str, environ: Mapping[str, str], streams: Sequence[int]) -> int:
        """Starts a command on three streams, as a child of this process; its id."""
        asked = {"arguments": arguments, "folder": folder, "environ": {**environ}}
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(asked).encode()], streams)
            return int(self._socket.recv(LARGEST))

    def close(self) -> None:
        """Ends it."""
        self._socket.close()
        self._process.wait()


class Command(subprocess.Popen[str]):
    """A command that was started so. In all else it is a process as any other."""

    def __init__(self, warm: Warm, arguments: Sequence[str], folder: Path, environ: Mapping[str, str]) -> None:
        self._warm = warm
        super().__init__(arguments, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def _execute_child(self, *given: Any) -> None:
        arguments, folder, environ, out, err = given[0], given[5], given[6], given[13], given[15]
        try:
            self.pid = self._warm.start(arguments, os.fspath(folder), environ, (0, out, err))
            self._child_created = True
        finally:
            os.close(out)
            os.close(err)


def serve(descriptor: int) -> None:
    """Imports what a fork server does, and starts commands until the tests have ended."""
    from pipeline.launch import preload  # noqa: F401

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end_threads()
    libc = ctypes.PyDLL(None)
    # It ends with its socket: the thread that it was started in may end before.
    libc.prctl(PR_SET_PDEATHSIG, 0)
    tests = socket.socket(fileno=descriptor)
    while True:
        asked, streams, _, _ = socket.recv_fds(tests, LARGEST, 3)
        if not asked:
            return
        pid = libc.syscall(SYS_CLONE[os.uname().machine], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if not pid:
            tests.detach()
            _become(streams=streams, **json.loads(asked))
        for stream in streams:
            os.close(stream)
        tests.send(str(pid).encode())


def _end_threads(patience: float = 10.0) -> None:
    """Waits until this process has one thread: a clone has the locks that others hold, and nobody to open them."""
    # Before a fork OpenBLAS ends its threads, which it starts again when it needs them.
    os.waitpid(os.fork() or os._exit(0), 0)
    until = time.monotonic() + patience
    while len(threads := os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > until:
            names = [Path(f"/proc/self/task/{thread}/comm").read_text().strip() for thread in threads]
            raise RuntimeError(f"Expected to import TensorFlow without starting a thread, received {names}.")
        time.sleep(0.01)


def _become(arguments: Sequence[str], folder: str, environ: Mapping[str, str], streams: Sequence[int]) -> NoReturn:
    """Makes this process the command, and a child of it what its fork server will be."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    offered, waiting = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if not pid:
        offered.close()
        _wait(waiting)
    os.set_inheritable(offered.fileno(), True)
    # What a fork server ignores, a command that a person starts does not.
    for number in PREEMPTING:
        signal.signal(number, signal.SIG_DFL)
    os.execve(arguments[0], arguments, {**environ, "WARM_FORK_SERVER": f"{offered.fileno()} {pid}"})


def _wait(command: socket.socket) -> NoReturn:
    """Waits until the command would start its fork server, and is that."""
    import numpy as np

    os.environ[CONDUCTOR] = str(os.getppid())
    die_with_conductor()
    told, descriptors, _, _ = socket.recv_fds(command, LARGEST, 8)
    if not told:
        os._exit(0)
    asked = json.loads(told)
    command.detach()
    kept = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, BEYOND) for descriptor in descriptors]
    os.closerange(3, BEYOND)
    for descriptor, number in zip(kept, asked["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(asked["environ"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # It was seeded as it was imported, for all commands alike.
    np.random.seed()
    sys.argv = ["-c"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(asked["program"], vars(main))
    sys.exit()

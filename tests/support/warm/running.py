"""Runs `python -m MODULE` in a process that was forked, from its first line to its exit code, as if it were started.

The folder, the environment, the arguments, the module path and the streams are those of a process that was started.
What is imported already is not imported again.
"""

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

SUPPORT = Path(__file__).resolve().parents[1]
# Bytes of a command line and its environment.
LARGEST = 1 << 17


class Forking:
    """A process that has all imported and makes forks of itself, as the tests see it; `module` has its `serve`."""

    def __init__(self, module: str, **environ: str) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(map(str, (SUPPORT, SUPPORT.parents[1])))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"from warm import {module}; {module}.serve({theirs.fileno()})"],
                env=os.environ | {"PYTHONPATH": path} | environ,
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
            )

    def asked(self, streams: Sequence[int], **asked: object) -> int:
        """Has it make a fork that takes some streams; returns its answer."""
        socket.send_fds(self.socket, [json.dumps(asked).encode()], streams)
        return int(self.socket.recv(LARGEST))

    def close(self) -> None:
        """Ends it."""
        self.socket.close()
        self._process.wait()


def serve(
    descriptor: int,
    streams: int,
    fork: Callable[[], int],
    become: Callable[..., NoReturn],
    answer: Callable[[int], int],
) -> None:
    """Forks what `become` makes of what is asked, and answers by its process, until the tests have ended."""
    tests = socket.socket(fileno=descriptor)
    while True:
        asked, taken, _, _ = socket.recv_fds(tests, LARGEST, streams)
        if not asked:
            return
        pid = fork()
        if not pid:
            tests.close()
            become(streams=taken, **json.loads(asked))
        for stream in taken:
            os.close(stream)
        tests.send(str(answer(pid)).encode())


def path_of_all() -> list[str]:
    """The module path without the folder and what PYTHONPATH names, which each command has of its own."""
    return sys.path[1 + len(os.environ["PYTHONPATH"].split(os.pathsep)) :]


def take_streams(streams: Sequence[int], first: int) -> None:
    """Makes descriptors this process's streams, from `first` on."""
    for number, stream in enumerate(streams, first):
        os.dup2(stream, number)
        os.close(stream)


def run(program: str, arguments: Sequence[str], environ: Mapping[str, str], path: Sequence[str]) -> NoReturn:
    """Runs the module or file in the folder that this process is in, and ends with its exit code."""
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:] = [os.getcwd(), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    sys.argv[:] = [program, *arguments]
    # Those that Python made when it started know of other files.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 0
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = _code(ended)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    _end(code)


def _end(code: int) -> NoReturn:
    """Ends as Python does, but for taking apart all that was imported, which takes long."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    os._exit(code)


def _code(ended: SystemExit) -> int:
    if ended.code is None or isinstance(ended.code, int):
        return ended.code or 0
    print(ended.code, file=sys.stderr)
    return 1

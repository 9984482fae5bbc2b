"""Starts commands that have imported all, beside a fork server that has TensorFlow, and scripts that have TensorFlow.

One process imports what a command does, then what a fork server does. For each command it forks one that becomes the
command, without what the fork server has, and that forks another, which waits. Once the command would start
`multiprocessing`'s fork server, the one that waits gets the program, the descriptors and the environment, and runs it.
The folder, the environment, the arguments, the module path, the streams, the fork server's parent, signals and end are
as ever: the same code, processes and words. The imports' time is not.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from pipeline.launch.signals import DRIVER_PID, PR_SET_PDEATHSIG, PREEMPTING, die_with_driver

# linux/sched.h: the child is one of the caller's parent.
CLONE_PARENT = 0x8000
SYS_CLONE = {"x86_64": 56, "aarch64": 220}
# Beyond any descriptor that a command passes to its fork server.
BEYOND = 512
# Bytes of a command line and its environment.
LARGEST = 1 << 17
SUPPORT = Path(__file__).resolve().parent


class Warm:
    """The process of which commands are forks, as the tests see it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environ = {
            "PYTHONPATH": os.pathsep.join(map(str, (SUPPORT, SUPPORT.parents[1]))), "TF_CPP_MIN_LOG_LEVEL": "2",
            "KERAS_BACKEND": "tensorflow", DRIVER_PID: str(os.getpid()),
            # Arrow's allocator has a thread, which no process that is forked has.
            "JE_ARROW_MALLOC_CONF": "background_thread:false",
        }  # fmt: skip
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"import warm_start; warm_start.serve({theirs.fileno()})"],
                env=os.environ | environ,
                pass_fds=[theirs.fileno()],
                stdout=subprocess.DEVNULL,
            )

    def start(self, arguments: Sequence[str], folder: str, environ: Mapping[str, str], streams: Sequence[int]) -> int:
        """Starts a command on three streams, as a child of this process; its id."""
        with self._lock:
            command = {"arguments": arguments, "folder": folder, "environ": {**environ}}
            socket.send_fds(self._socket, [json.dumps(command).encode()], streams)
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
    """Imports what commands and fork servers do, and starts commands until the tests have ended."""
    compose_once()
    # Without the folder and what PYTHONPATH names, which each command has of its own.
    path, theirs = sys.path[1 + len(os.environ["PYTHONPATH"].split(os.pathsep)) :], Imported()
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _end_threads()
    libc = ctypes.PyDLL(None)
    # It ends with its socket: the thread that it was started in may end before.
    libc.prctl(PR_SET_PDEATHSIG, 0)
    tests = socket.socket(fileno=descriptor)
    while True:
        command, streams, _, _ = socket.recv_fds(tests, LARGEST, 3)
        if not command:
            return
        pid = libc.syscall(SYS_CLONE[os.uname().machine], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
        if not pid:
            tests.close()
            _become(streams=streams, path=path, theirs=theirs, **json.loads(command))
        for stream in streams:
            os.close(stream)
        tests.send(str(pid).encode())


def compose_once() -> None:
    """What the first command of a process pays for: imports, the grammar of overrides, Hydra's search for plugins."""
    gc.disable()
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton

    from pipeline.commands import running as commands  # noqa: F401
    from pipeline.commands import train
    from pipeline.config import config

    # What a command imports once it runs or reports something.
    from pipeline.driver import forecast, parallel, resume, supervisor  # noqa: F401
    from pipeline.views import report  # noqa: F401
    from pipeline.views.terminal import live  # noqa: F401

    config.OverridesParser.create().parse_overrides(["a=1", "+b={c: [1, x.y]}", "~c", "d='e'", "f=g,h"])
    with contextlib.redirect_stdout(io.StringIO()):
        train.main(["--cfg=job"])
    # Each looks anew for the plugins on its own path.
    del Singleton._instances[Plugins]
    # Memory that a fork looks through for garbage is copied for it.
    gc.freeze()
    gc.enable()


class Imported:
    """What a fork server has imported, told from what a command has; imports it."""

    def __init__(self) -> None:
        self._modules, self._handlers, self._filters = set(sys.modules), logging.root.handlers[:], warnings.filters[:]
        self._at_exit, register = list[Callable[..., object]](), atexit.register
        # What is forgotten is not to be taken apart.
        self._forgotten = list[ModuleType]()

        def noted(function: Callable[..., object], *given: Any, **named: Any) -> Callable[..., object]:
            self._at_exit.append(function)
            return register(function, *given, **named)

        atexit.register = noted
        try:
            from pipeline.launch import preload  # noqa: F401
        finally:
            atexit.register = register

    def forget_end(self) -> None:
        """Makes this process one that ends otherwise than the fork server, and ignores no signal that that does."""
        for function in self._at_exit:
            atexit.unregister(function)
        for number in PREEMPTING:
            signal.signal(number, signal.SIG_DFL)

    def forget_others(self) -> None:
        """Makes this process one that has imported neither TensorFlow nor what is ours and not a command's."""
        for name in set(sys.modules) - self._modules:
            if name.partition(".")[0] in ("tensorflow", "keras", "pipeline"):
                self._forgotten.append(sys.modules.pop(name))
        logging.root.handlers[:], warnings.filters[:] = self._handlers, self._filters


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


def _become(
    arguments: Sequence[str], folder: str, environ: Mapping[str, str], streams: Sequence[int], path: Sequence[str],
    theirs: Imported,
) -> NoReturn:  # fmt: skip
    """Makes this process the script, or the command, and a child of that what its fork server will be."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(folder)
    os.closerange(3, BEYOND)
    _, program, *rest = arguments
    if program == "-m":
        offered, waiting = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not (pid := os.fork()):
            offered.close()
            _wait(waiting)
        waiting.close()
        _offer(offered, pid)
        theirs.forget_others()
        program, *rest = rest
    theirs.forget_end()
    _run(program, rest, environ, path)


def _offer(waiting: socket.socket, pid: int) -> None:
    """Has the process that waits run the next fork server's program, in place of a new one."""
    start = util.spawnv_passfds

    def spawn(path: str, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in arguments[-1]:
            return int(start(path, arguments, descriptors))
        util.spawnv_passfds = start
        server = {"program": arguments[-1], "descriptors": descriptors, "environ": {**os.environ}}
        with waiting:
            socket.send_fds(waiting, [json.dumps(server).encode()], descriptors)
        return pid

    util.spawnv_passfds = spawn


def _wait(command: socket.socket) -> NoReturn:
    """Waits until the command would start its fork server, and is that."""
    import numpy as np

    os.environ[DRIVER_PID] = str(os.getppid())
    die_with_driver()
    text, descriptors, _, _ = socket.recv_fds(command, LARGEST, 8)
    if not text:
        os._exit(0)
    server = json.loads(text)
    command.detach()
    copies = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, BEYOND) for descriptor in descriptors]
    os.closerange(3, BEYOND)
    for descriptor, number in zip(copies, server["descriptors"], strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(server["environ"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # It was seeded as it was imported, for all commands alike.
    np.random.seed()
    sys.argv = ["-c"]
    main = sys.modules["__main__"] = ModuleType("__main__")
    exec(server["program"], vars(main))
    sys.exit()


def _run(program: str, arguments: Sequence[str], environ: Mapping[str, str], path: Sequence[str]) -> NoReturn:
    """Runs a module or file in the folder that this process is in, and ends as Python does, with its exit code."""
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
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    # All but taking apart all that was imported, which takes long.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 120
    os._exit(code)

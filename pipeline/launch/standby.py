"""A fork server that outlives its command, for the next one: it has TensorFlow imported and not yet used.

It serves commands of one owner, in one environment: the same Python, packages, code, variables and limits; another
command starts its own. It ends once no command has used it for `launch.keep`. Its lock is held as long as it lives,
however it ends; the file's time of change is when it may end.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import resource
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker, spawn, util
from pathlib import Path
from socket import AF_UNIX, socket
from typing import Any

from pipeline.launch import LaunchError
from pipeline.launch.signals import DRIVER_PID

PRELOAD = ["pipeline.launch.preload"]
SECONDS = {"s": 1, "m": 60, "h": 3600}
# Variables that no process computes by: a command in another terminal has others.
INDIFFERENT = re.compile(
    "_|DRIVER_PID|PWD|OLDPWD|SHLVL|TERM.*|COLORTERM|COLUMNS|LINES|WINDOWID|DISPLAY|STY|TMUX.*|SSH_.*|VTE_.*|XDG_SESSION.*"
    "|DBUS_.*|PS1|PROMPT.*".replace("DRIVER_PID", DRIVER_PID)
)
# Of an address, including its end (unix(7), `sun_path`).
PATH_BYTES = 108
# Until a server that another command has just begun to start has its socket.
BIND_SECONDS, LOOK_SECONDS = 1.0, 0.02
PID_DIGITS = 10
# Between two looks at processes that a server without a command still has.
EXPIRE_SECONDS = 2.0


def seconds_of(age: str) -> int:
    """An age in seconds. Raises `LaunchError`."""
    if (match := re.fullmatch(r"([1-9]\d{0,3})([smh])", age)) is None:
        raise LaunchError("launch.keep to be a time, as 90s, 10m or 1h", age or "nothing", "launch.keep=10m")
    return int(match[1]) * SECONDS[match[2]]


def folder() -> Path:
    """The folder of this user's servers, which nobody else can open. Raises `LaunchError`."""
    path = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"pipeline-{os.getuid()}"
    where = "XDG_RUNTIME_DIR=.., or without launch.keep"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise LaunchError(f"to be able to make the folder {path}, for launch.keep", error.strerror, where) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise LaunchError(f"{path} to be a folder that only you can open, for launch.keep", "another", where)
    if len(os.fsencode(path)) + 22 > PATH_BYTES:
        raise LaunchError("a short path for a socket, for launch.keep", path, "XDG_RUNTIME_DIR=/tmp")
    return path


class Standby:
    """The server of this environment, found or started once it is needed, in place of the command's own."""

    def __init__(self, seconds: int) -> None:
        self._seconds, self._folder = seconds, folder()
        self._name: str | None = None
        # The address and the pipe of the server that it takes the place of.
        self._before: tuple[Any, Any] | None = None

    def ensure(self) -> None:
        """Has processes start from it; it is started unless it lives. For `ForkServer.ensure_running`."""
        resource_tracker.ensure_running()
        self._name = self._name or _environment()
        address = self._folder / f"{self._name}.s"
        with _opened(self._folder / f"{self._name}.lock") as lock:
            while not _claimed(lock):
                # A server that is stopped would have commands wait.
                if not (pid := _pid(lock)) or state_of(pid) not in ("T", "t"):
                    until = time.monotonic() + BIND_SECONDS
                    while not address.exists() and time.monotonic() < until:
                        time.sleep(LOOK_SECONDS)
                    break
                os.kill(pid, signal.SIGKILL)
                time.sleep(LOOK_SECONDS)
            else:
                os.pwrite(lock, b"%*d" % (PID_DIGITS, _start(address, lock)), 0)
            self._extend(lock)
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        if self._before is None:
            self._before = server._forkserver_address, server._forkserver_alive_fd
            # Processes get the writing end; nobody reads at the other one.
            unread, server._forkserver_alive_fd = os.pipe()
            os.close(unread)
        server.ensure_running, server._forkserver_address = self.ensure, str(address)

    def close(self) -> None:
        """Leaves the server, for as long as is configured from now on."""
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        if self._before is None:
            return
        del server.ensure_running
        os.close(server._forkserver_alive_fd)
        (server._forkserver_address, server._forkserver_alive_fd), self._before = self._before, None
        with _opened(self._folder / f"{self._name}.lock") as lock:
            self._extend(lock)

    def _extend(self, lock: int) -> None:
        ends = max(time.time() + self._seconds, os.fstat(lock).st_mtime)
        os.utime(lock, (ends, ends))


def servers() -> Iterator[tuple[int, float]]:
    """This user's servers that live: the process of each, and when it ends if no command uses it until then."""
    with contextlib.suppress(LaunchError):
        for path in sorted(folder().glob("*.lock")):
            with _opened(path) as lock:
                if not _claimed(lock) and (pid := _pid(lock)):
                    yield pid, os.fstat(lock).st_mtime


def serve(listener: int, lock: int, address: str, preload: list[str]) -> None:
    """Forks processes as they are requested, until it is time to end."""
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
    os.environ.pop(DRIVER_PID, None)

    def expire(number: int, frame: object) -> None:
        left = os.fstat(lock).st_mtime - time.time()
        if left <= 0 and not children(os.getpid()):
            with contextlib.suppress(OSError):
                os.unlink(address)
            os._exit(0)
        signal.setitimer(signal.ITIMER_REAL, left if left > 0 else EXPIRE_SECONDS)

    def leave() -> None:
        # The lock is the server's alone.
        os.close(lock)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)

    os.register_at_fork(after_in_child=leave)
    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, EXPIRE_SECONDS)
    # Of this pipe it has both ends: it ends by itself.
    alive, _ = os.pipe()
    forkserver.main(listener, alive, preload)  # type: ignore[attr-defined]


def _start(address: Path, lock: int) -> int:
    address.unlink(missing_ok=True)
    with socket(AF_UNIX) as listener:
        listener.bind(str(address))
        os.chmod(address, 0o600)
        listener.listen()
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from pipeline.launch import standby; "
            f"standby.serve({listener.fileno()}, {lock}, {str(address)!r}, {PRELOAD!r})"
        )
        arguments = [spawn.get_executable(), *util._args_from_interpreter_flags(), "-c", code]  # type: ignore[attr-defined]
        return int(util.spawnv_passfds(os.fsencode(arguments[0]), arguments, [listener.fileno(), lock]))  # type: ignore[attr-defined]


def _environment() -> str:
    """A name for all that processes get from their server: where it differs, another one is needed."""
    places = [Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    values = (
        (sys.executable, sys.version, sys.path, util._args_from_interpreter_flags()),  # type: ignore[attr-defined]
        # An installation that changes packages changes their folder.
        [(str(path), path.stat().st_mtime_ns) for path in places if path.is_dir()],
        sorted((str(path), path.lstat().st_mtime_ns) for path in Path(__file__).parents[1].rglob("*.py")),
        sorted((name, value) for name, value in os.environ.items() if not INDIFFERENT.fullmatch(name)),
        (os.getgroups(), os.getpriority(os.PRIO_PROCESS, 0), sorted(os.sched_getaffinity(0))),
        [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        [os.readlink(path) for path in sorted(Path("/proc/self/ns").glob("*"))],
        Path("/proc/self/cgroup").read_text(),
        re.findall("^Umask.*$", Path("/proc/self/status").read_text(), re.M),
    )
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield lock
    finally:
        os.close(lock)


def _claimed(lock: int) -> bool:
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _pid(lock: int) -> int:
    """The server's process; 0 where it has only begun to start, and what is noted is an earlier one's."""
    pid = int(os.pread(lock, PID_DIGITS, 0) or 0)
    with contextlib.suppress(OSError):
        return pid if b"standby.serve" in Path(f"/proc/{pid}/cmdline").read_bytes() else 0
    return 0


def state_of(pid: int | None) -> str:
    """The state letter that Linux gives a process: R, S, T for stopped, Z; empty where it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def children(pid: int) -> list[object]:
    """The processes that a server has, while commands use it."""
    import psutil

    with contextlib.suppress(psutil.Error):
        return [*psutil.Process(pid).children()]
    return []

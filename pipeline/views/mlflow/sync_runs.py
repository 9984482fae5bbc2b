"""Turns the folders of runs into MLflow runs that hold all of their logs: later, by `sync`, or a little behind them.

    python -m pipeline.views.mlflow.sync_runs DRIVER < NAMES

is the follower of the driver with the process number DRIVER, which appends folders to the file NAMES, each with a NUL
behind it. A folder is followed from then on; one that is named again is waited for. Once an empty name is in the file,
or the driver is gone, the follower sends what is left, ends as KILLED the runs that nobody will end, and exits.
"""

import contextlib
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import psutil

from pipeline.errors import UserError
from pipeline.record import log
from pipeline.record.events import Run
from pipeline.record.files import DELETED, LOG, TRACKING, TrackingStore, read_tracking, trains_on
from pipeline.views.mlflow.copies import Copy, Deleted
from pipeline.views.mlflow.stores import prepare, reason, sqlite_path, unreachable, without_password

# Between the first two attempts at a store that fails; then twice that each time, for a follower at most so long.
RETRY_SECONDS, RETRY_SECONDS_MOST = 1.0, 30.0
LOOK_SECONDS = 0.1  # between a follower's looks at the names and what is due
FIRST_SECONDS, NEXT_SECONDS = 0.3, 2.0  # between two looks at a log before its run exists in MLflow, and after
LAST_SECONDS = 120  # for one run, once the driver is gone: then the process ends, whatever it is doing
NICENESS = 10  # how much nicer than the driver the follower is, except while someone waits for it
NAME_BYTES = 1 << 20


def sync(folders: Sequence[Path], output_dir: Path, uri: str | None, say: Callable[[str], None]) -> bool:
    """Sends what the store of each run below `folders`, or `uri`, does not hold yet; True if everything was sent."""
    counts, failed, untracked = Counter[bool | None](), dict[str, str](), list[Path]()
    for folder in chain.from_iterable(map(_run_folders, folders or [output_dir])):
        store = read_tracking(folder).store or TrackingStore()
        if uri is not None and without_password(uri) != store.uri:
            path = sqlite_path(uri)
            store = replace(store, artifacts=(path.parent / "mlartifacts").as_uri() if path else None)
        if uri or store.uri:
            counts[_sync_one(Copy(folder, replace(store, uri=uri or store.uri)), failed, say)] += 1
        else:
            untracked.append(folder)
    say(f"Runs sent: {counts[True]}; nothing new: {counts[None]}; not sent: {counts[False]}.")
    if untracked:
        say(f"Runs without tracking: {len(untracked)}. Try uri={local_uri(output_dir)} for a local store.")
    # A run that was asked for by name is not sent by skipping it.
    return not counts[False] and not set(untracked) & set(folders)


def _run_folders(root: Path) -> Iterator[Path]:
    """Yields the folders of runs at and below `root`, but not the copies of their logs among MLflow's artifacts."""
    for folder in [root] if (root / LOG).exists() else sorted(path.parent for path in root.rglob(LOG)):
        is_run = folder == root or (folder / TRACKING).exists()
        first = None if is_run else next((event for event, _ in log.read(folder / LOG)), None)
        if is_run or (isinstance(first, Run) and Path(first.folder or "").name == folder.name):
            yield folder


def local_uri(output_dir: Path) -> str:
    """The store of runs below `output_dir` where no other is named."""
    return f"sqlite:///{output_dir.resolve() / 'mlflow.db'}"


def _sync_one(
    copy: Copy, failed: dict[str, str], say: Callable[[str], None], gone: int | None = None, time_ms: int | None = None
) -> bool | None:
    """True: sent something; None: there was nothing to send; False: could not. `failed` has stores that are down.

    The driver with the process number `gone` writes no more.
    """
    uri = copy.uri
    try:
        if not copy.lock():
            say(f"{copy.folder}: another process is sending it now.")
            return None
        if copy.complete and uri not in failed:
            # A store that was thrown away is filled again; one that cannot be asked is believed.
            try:
                copy.verify()
            except Exception as error:
                if unreachable(error):
                    failed[uri] = reason(error, uri)
        if copy.complete:
            return None
        if uri in failed:
            raise UserError(failed[uri])
        path = sqlite_path(uri)
        if path and not path.parent.is_dir():
            raise UserError(f"a folder {path.parent} for the store", "none", "uri=..")
        about = _bring_up(copy, gone, time_ms)
        if copy.sent or about:
            say(f"{copy.folder}: {copy.sent} event{'s' * (copy.sent != 1)} sent, run {copy.copied.run_id}.{about}")
        return True if copy.sent else None
    except Deleted as error:
        say(f"{copy.folder}: left alone. {error}")
        return None
    except Exception as error:
        problem = reason(error, uri)
        if unreachable(error):
            failed[uri] = problem
        say(f"{copy.folder}: not sent. {problem}")
        return False
    finally:
        copy.release()


def _bring_up(copy: Copy, gone: int | None, time_ms: int | None) -> str:
    """Sends all that a log holds, and ends the run as KILLED where nobody will; returns what to tell of that."""
    while _patiently(copy.advance):
        pass
    driver = copy.state.driver
    if driver is None or copy.complete or copy.state.ended:
        return ""
    if gone is None or driver.pid != gone:
        if driver.host != os.uname().nodename or driver.pid is None:
            return f" It has no end, and only {driver.host} knows whether it still runs: sync there."
        if _lives(driver.pid, driver.time):
            return " It still runs."
    if trains_on(copy.folder, time.time()):
        return f" It trains on without a driver: python -m pipeline attach {copy.folder} takes its place."
    _patiently(lambda: copy.kill(time_ms))
    return " It has no end and its process is gone: set to KILLED."


def _lives(pid: int, event_time: float) -> bool:
    with contextlib.suppress(psutil.Error, ValueError):
        process = psutil.Process(pid)
        # A process that began later only has the same number; a minute is for a clock that was set meanwhile.
        began_before = process.create_time() < event_time + 60
        return began_before and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    return False


def _patiently(do: Callable[[], bool | None]) -> bool | None:
    """Tries three times where trying again may help: a locked database, a server that is busy."""
    for attempt in range(2):
        try:
            return do()
        except Exception as error:
            if isinstance(error, UserError) or unreachable(error):
                raise
            time.sleep(RETRY_SECONDS * 2**attempt)
    return do()


def main() -> None:
    """Follows until the driver ends it, or is gone."""
    # Not the parent: of a driver that is gone already that is another.
    driver, first_niceness = int(sys.argv[1]), os.getpriority(os.PRIO_PROCESS, 0)
    prepare(os.environ)
    # Ctrl-C and a scheduler's signals are for the driver, whose end this process then sees.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # While TensorFlow is imported too, and nothing is measured; a failure is reported when MLflow is needed. None of it
    # is garbage, which to look for would take a fifth of the time.
    gc.disable()
    with contextlib.suppress(Exception):
        import mlflow.tracking  # noqa: F401
    gc.freeze()
    gc.enable()
    follower, offset, niceness, is_over = LogFollower(), 0, first_niceness, False
    while not is_over:
        is_over = os.getppid() != driver
        # The driver writes at the file's own position, which this leaves alone.
        names = os.pread(sys.stdin.fileno(), NAME_BYTES, offset).split(b"\0")[:-1]
        offset += sum(len(name) + 1 for name in names)
        is_over = is_over or b"" in names
        for name in filter(None, names):
            follower.name(Path(os.fsdecode(name)))
        if niceness != (niceness := first_niceness + (0 if is_over or follower.is_waited_for else NICENESS)):
            # Where Linux schedules sessions as groups, niceness counts only within a session, and the group's niceness
            # against others (sched(7), "The autogroup feature"): without it, half of a core was gone from training.
            # The group's can be taken back by anyone, a process's own only with privileges.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, niceness)
            with contextlib.suppress(OSError):
                Path("/proc/self/autogroup").write_text(str(niceness))
        if not (is_over or follower.turn()):
            time.sleep(LOOK_SECONDS)
    follower.end(driver, round(1000 * time.time()))
    sys.stdout.flush()
    sys.stderr.flush()
    # The driver waits for this process's end: to take all of MLflow apart takes a tenth of a second.
    os._exit(0)


class LogFollower:
    """Sends the logs that it was named, a little behind their writers, and notes in their folders how that goes."""

    def __init__(self) -> None:
        self._copies: dict[Path, Copy] = {}

    @property
    def is_waited_for(self) -> bool:
        """True while the driver waits for a log."""
        return any(copy.is_waited_for for copy in self._copies.values())

    def name(self, folder: Path) -> None:
        """Follows the log in `folder` from now on; one that it follows already is sent at once."""
        if copy := self._copies.get(folder):
            copy.due, copy.retry_seconds, copy.is_waited_for = 0.0, 0.0, True
            return
        copy = Copy(folder, read_tracking(folder).store or TrackingStore())
        if not copy.complete:
            self._copies[folder] = copy

    def turn(self) -> bool:
        """Sends a stretch of each log that is due; False where there was nothing to send."""
        now = time.monotonic()
        due = [copy for copy in self._copies.values() if copy.due <= now]
        return sum(map(self._advance, sorted(due, key=lambda copy: not copy.is_waited_for))) > 0

    def end(self, driver: int, time_ms: int) -> None:
        """Sends what is left, then ends as KILLED every run that nobody will end now that `driver` is gone."""
        failed: dict[str, str] = {}
        for copy in self._copies.values():
            signal.alarm(LAST_SECONDS)
            _sync_one(copy, failed, partial(print, file=sys.stderr), driver, time_ms)
            signal.alarm(0)

    def _advance(self, copy: Copy) -> bool:
        """Brings one copy forward; True where there may be more to send."""
        before, problem, more, deleted = copy.copied.problem, None, False, dict[str, str]()
        try:
            more = copy.lock() and copy.advance(patient=not copy.is_waited_for)
            wait = 0.0 if more else NEXT_SECONDS if copy.copied.run_id else FIRST_SECONDS
            copy.retry_seconds, copy.is_waited_for = 0.0, copy.is_waited_for and copy.behind()
        except Deleted as error:
            problem, wait, deleted = str(error), 0.0, {"closed": DELETED}
        except Exception as error:
            problem, wait = reason(error, copy.uri), copy.retry_seconds or RETRY_SECONDS
            copy.retry_seconds = min(RETRY_SECONDS_MOST, 2 * wait)
        copy.due = time.monotonic() + wait
        if problem != before:
            with contextlib.suppress(OSError):
                copy.note(problem=problem, **deleted)
            print(f"{copy.folder}: {problem or 'the store answers again'}", file=sys.stderr, flush=True)
        if deleted or copy.complete:
            copy.release()
            del self._copies[copy.folder]
        return more


if __name__ == "__main__":
    main()

"""The follower: a process that sends the logs of the runs that its driver names, a little behind their writers.

    python -m pipeline.views.mlflow.follow < NAMES

NAMES is a file that the driver appends folders to, each with a NUL behind it. A folder is followed from then on; one
that is named again is waited for. Once an empty name is in the file, or the driver is gone, the follower sends what is
left, ends as KILLED the runs that nobody will end, and exits.
"""

import contextlib
import gc
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.record.tracking import TrackingStore, recall
from pipeline.views.mlflow.copies import Copy, Deleted
from pipeline.views.mlflow.stores import prepare, reason, unreachable
from pipeline.views.mlflow.sync_runs import bring_up

# Between two looks at the names and what is due.
LOOK_SECONDS = 0.1
# Between two looks at a log before its run exists in MLflow, and after.
FIRST_SECONDS, NEXT_SECONDS = 0.3, 2.0
# Between attempts at a store that fails: at first, and at most.
RETRY_SECONDS, RETRY_SECONDS_MOST = 1.0, 30.0
# For one run, once the driver is gone: then the process ends, whatever it is doing.
LAST_SECONDS = 120
# How much nicer than the driver the follower is, except while someone waits for it.
NICENESS = 10
NAME_BYTES = 1 << 20


def main() -> None:
    """Follows until the driver ends it, or is gone."""
    driver, first_niceness = os.getppid(), os.getpriority(os.PRIO_PROCESS, 0)
    prepare(os.environ)
    # Ctrl-C and a scheduler's signals are for the driver, whose end this process then sees.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # While TensorFlow is imported too, and nothing is measured; a failure is reported when MLflow is needed.
    # None of it is garbage, which to look for would take a fifth of the time.
    gc.disable()
    with contextlib.suppress(Exception):
        import mlflow.tracking  # noqa: F401
    gc.freeze()
    gc.enable()
    follower, names, offset, niceness = LogFollower(), list[bytes](), 0, first_niceness
    while os.getppid() == driver and b"" not in names:
        # The driver writes at the file's own position, which this leaves alone.
        names = os.pread(sys.stdin.fileno(), NAME_BYTES, offset).split(b"\0")[:-1]
        offset += sum(len(name) + 1 for name in names)
        for name in filter(None, names):
            follower.name(Path(os.fsdecode(name)))
        if niceness != (niceness := first_niceness + (0 if follower.is_waited_for else NICENESS)):
            _set_niceness(niceness)
        if not follower.turn():
            time.sleep(LOOK_SECONDS)
    _set_niceness(first_niceness)
    follower.end(driver, round(1000 * time.time()))
    # The driver waits for this process's end, which would look for garbage in all of MLflow once more.
    gc.freeze()


@dataclass
class FollowedLog:
    """One log that the follower looks after: when it is due, and the seconds until the next attempt if that fails."""

    copy: Copy
    uri: str
    due: float = 0.0
    retry_seconds: float = RETRY_SECONDS
    is_waited_for: bool = False
    problem: str | None = None


class LogFollower:
    """Sends the logs that it was named, a little behind their writers, and notes in their folders how that goes."""

    def __init__(self) -> None:
        self._runs: dict[Path, FollowedLog] = {}

    @property
    def is_waited_for(self) -> bool:
        """True while the driver waits for a log."""
        return any(run.is_waited_for for run in self._runs.values())

    def name(self, folder: Path) -> None:
        """Follows the log in `folder` from now on; one that it follows already is sent at once."""
        if run := self._runs.get(folder):
            run.due, run.retry_seconds, run.is_waited_for = 0.0, RETRY_SECONDS, True
            return
        store = recall(folder).store or TrackingStore()
        run = FollowedLog(Copy(folder, store), str(store.uri))
        if not run.copy.closed or run.copy.behind():
            self._runs[folder] = run

    def turn(self) -> bool:
        """Sends a stretch of each log that is due; False where there was nothing to send."""
        now = time.monotonic()
        due = [run for run in self._runs.values() if run.due <= now]
        due.sort(key=lambda run: not run.is_waited_for)
        return sum(self._advance(run) for run in due) > 0

    def end(self, driver: int, time_ms: int) -> None:
        """Sends what is left, then ends as KILLED in MLflow every run that nobody will end now that `driver` is gone.

        That is neither what another driver has taken over meanwhile, nor what trains on without one.
        """
        unreachable_uris = set[str]()
        for run in self._runs.values():
            signal.alarm(LAST_SECONDS)
            try:
                if run.uri not in unreachable_uris and run.copy.lock():
                    bring_up(run.copy, driver, time_ms)
            except Exception as error:
                unreachable_uris |= {run.uri} if unreachable(error) else set()
                print(f"{run.copy.folder}: not sent: {reason(error, run.uri)}", file=sys.stderr)
            finally:
                signal.alarm(0)
                run.copy.release()

    def _advance(self, run: FollowedLog) -> bool:
        """Brings one copy forward; True where there may be more to send."""
        copy, problem, more, deleted = run.copy, None, False, False
        try:
            more = copy.lock() and copy.advance(patient=not run.is_waited_for)
            run.retry_seconds = RETRY_SECONDS
            wait = 0.0 if more else NEXT_SECONDS if copy.run_id else FIRST_SECONDS
            run.is_waited_for = run.is_waited_for and copy.behind()
        except Deleted as error:
            problem, wait, deleted = str(error), 0.0, True
        except Exception as error:
            problem, wait = reason(error, run.uri), run.retry_seconds
            run.retry_seconds = min(RETRY_SECONDS_MOST, 2 * wait)
        run.due = time.monotonic() + wait
        if problem != run.problem:
            run.problem = problem
            with contextlib.suppress(OSError):
                copy.note(problem, deleted)
            print(f"{copy.folder}: {problem or 'the store answers again'}", file=sys.stderr, flush=True)
        if deleted or (copy.closed and not copy.behind()):
            copy.release()
            del self._runs[copy.folder]
        return more


def _set_niceness(niceness: int) -> None:
    # Where Linux schedules sessions as groups, niceness counts only within a session, and the group's niceness
    # against others (sched(7), "The autogroup feature"): without it, half of a core was gone from training. The
    # group's can be taken back by anyone, a process's own only with privileges.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))


if __name__ == "__main__":
    main()

"""Turns commands on standard input into logs that are followed: sent to MLflow a little behind their writers.

This is the follower's process; it leaves starting it to `pipeline.views.mlflow.tracker`, and one log to `copies`.
"""

import contextlib
import dataclasses
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline.record import codec, kept
from pipeline.record.events import Attached, Resumed
from pipeline.record.tracking import Store
from pipeline.views.mlflow.copies import Copy, Deleted
from pipeline.views.mlflow.patience import Patience
from pipeline.views.mlflow.state import remember
from pipeline.views.mlflow.stores import logged_in, reason

# How often, in seconds, a log is looked at before its run exists in MLflow, and after.
FIRST_SECONDS, NEXT_SECONDS = 0.3, 2.0
# Between attempts at a store that fails: at first, at most, and while someone waits.
RETRY_SECONDS, RETRY_SECONDS_MOST, RETRY_SECONDS_WAITED_FOR = 1.0, 30.0, 0.3
# After the conductor is gone, without getting on: for sending what is left, and until the process ends whatever it is
# doing.
LAST_SECONDS, HARD_SECONDS = 10.0, 20.0
# How much nicer than the conductor the follower is, except while someone waits for it.
NICENESS = 10


def follow(commands: IO[bytes], tell: Callable[[dict[str, object]], None]) -> None:
    """Obeys the commands, JSON lines, until they end; then ends what is left to end.

    Commands: {"follow": folder, "store": {...}}, {"hurry": seconds} and {"drain": seconds, "id": any}. What it tells:
    {"run", "run_id"} once a run exists, {"run", "error"} when a store fails or answers again, and {"drained",
    "error", "id"}.
    """
    inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(commands, inbox), daemon=True).start()
    follower, conductor = Follower(tell), os.getppid()
    # The conductor is gone when its end of the pipe closes, or when this process has another parent: what the
    # conductor forked may hold the pipe open.
    while os.getppid() == conductor:
        with contextlib.suppress(queue.Empty):
            command = inbox.get(timeout=FIRST_SECONDS)
            if command is None:
                break
            if "follow" in command:
                follower.add(Path(command["follow"]), codec.from_plain(Store, command["store"]))
            # Training is over, and someone waits.
            if "hurry" in command:
                with niceness(-NICENESS):
                    follower.hurry(float(command["hurry"]), lambda: not inbox.empty())
            if "drain" in command:
                with niceness(-NICENESS):
                    drained, error = follower.drain(float(command["drain"]), lambda: not inbox.empty())
                tell({"drained": drained, "error": error, "id": command.get("id")})
        follower.turn(lambda: not inbox.empty())
    threading.Thread(target=_exit_once_over, args=(Patience(HARD_SECONDS, time.process_time),), daemon=True).start()
    with niceness(-NICENESS):
        follower.end(round(1000 * time.time()), conductor)


@contextlib.contextmanager
def niceness(more: int) -> Iterator[None]:
    """Inside, this process leaves the cores to others, as far as `more` says and it may change that."""
    kept = os.getpriority(os.PRIO_PROCESS, 0)
    _set_niceness(kept + more)
    try:
        yield
    finally:
        _set_niceness(kept)


@dataclass
class Followed:
    """One log that the follower looks after. `given_up`: still tried, but nobody waits for it any more."""

    copy: Copy
    uri: str
    due: float = 0.0
    told: bool = False
    given_up: bool = False
    error: str | None = None


class Follower:
    """Sends the logs it was given, a little behind their writers; tells how that goes."""

    def __init__(self, tell: Callable[[dict[str, object]], None]) -> None:
        self._tell = tell
        self._runs: list[Followed] = []
        self._retry_at, self._retry_seconds = 0.0, RETRY_SECONDS

    def add(self, folder: Path, store: Store) -> None:
        """Follows the log in `folder` from now on."""
        if any(run.copy.folder == folder for run in self._runs):
            return
        uri = logged_in(str(store.uri), os.environ)
        store = dataclasses.replace(store, uri=uri)
        with contextlib.suppress(OSError):
            remember(folder, store)
        self._runs.append(Followed(Copy(folder, store), uri))

    def turn(self, stop: Callable[[], bool], waited_for: bool = False) -> None:
        """Sends what is due, or everything where someone waits for it."""
        for run in list(self._runs):
            now = time.monotonic()
            if stop() or (now < self._retry_at and not waited_for):
                return
            if (waited_for or run.due <= now) and not self._advance(run, stop, patient=not waited_for):
                # The others come first next time.
                self._runs.append(self._runs.pop(self._runs.index(run)))
                self._retry_at = time.monotonic() + self._retry_seconds
                self._retry_seconds = min(RETRY_SECONDS_MOST, 2 * self._retry_seconds)
                return

    def hurry(self, seconds: float, impatient: Callable[[], bool]) -> None:
        """Sends what there is once, in which runs that do not exist yet come to, or what is wrong is told."""
        self.turn(self._over(seconds, impatient), waited_for=True)

    def drain(self, seconds: float, impatient: Callable[[], bool]) -> tuple[bool, str | None]:
        """Sends all there is now, until that has not got on for `seconds`; returns (done, what was wrong)."""
        asked, stop = [run for run in self._runs if not run.given_up], self._over(seconds, impatient)
        while True:
            self.turn(stop, waited_for=True)
            behind = [run for run in asked if run in self._runs and run.copy.behind()]
            if not behind or stop():
                break
            time.sleep(RETRY_SECONDS_WAITED_FOR)
        for run in behind:
            run.given_up = True
        errors = [run.error for run in asked if run.error]
        return not behind and not errors, errors[0] if errors else None

    def end(self, time_ms: int, conductor: int | None = None) -> None:
        """Sends what is left, then ends as KILLED in MLflow every run that nobody will end any more.

        Not what another command than the `conductor` of that number has taken over meanwhile, nor what trains on.
        """
        for run in self._runs:
            run.given_up = run.given_up and run.copy.has_ended()
        if not all(run.given_up for run in self._runs):
            self.drain(LAST_SECONDS, lambda: False)
        for run in self._runs:
            wrote = run.copy.seen.conductor
            taken = conductor is not None and isinstance(wrote, Attached | Resumed) and wrote.pid != conductor
            if taken or kept.trains_on(run.copy.folder, time.time()):
                continue
            if not run.copy.has_ended() and run.copy.lock():
                try:
                    run.copy.kill(time_ms)
                except Exception as error:
                    print(f"{run.copy.folder}: not set to KILLED: {reason(error, run.uri)}", file=sys.stderr)

    def _over(self, seconds: float, impatient: Callable[[], bool]) -> Callable[[], bool]:
        """Tells whether what is done now is to be given up."""
        patience = Patience(seconds, time.process_time)
        return lambda: impatient() or patience.is_over(any(run.error for run in self._runs))

    def _advance(self, run: Followed, stop: Callable[[], bool], patient: bool) -> bool:
        """Brings one copy forward; False where that failed and is worth trying again."""
        problem, again = None, False
        try:
            if run.copy.lock():
                run.copy.catch_up(stop, patient)
                self._retry_seconds = RETRY_SECONDS
        except Deleted as error:
            problem = str(error)
            self._drop(run)
        except Exception as error:
            problem, again = reason(error, run.uri), True
        run.due = time.monotonic() + (NEXT_SECONDS if run.copy.run_id else FIRST_SECONDS)
        if run.copy.run_id and not run.told:
            run.told = True
            self._tell({"run": str(run.copy.folder), "run_id": run.copy.run_id})
        if problem != run.error:
            run.error = problem
            self._tell({"run": str(run.copy.folder), "error": problem})
            print(f"{run.copy.folder}: {problem or 'the store answers again'}", file=sys.stderr, flush=True)
        if run.copy.closed:
            self._drop(run)
        return not again

    def _drop(self, run: Followed) -> None:
        run.copy.release()
        if run in self._runs:
            self._runs.remove(run)


def _listen(commands: IO[bytes], inbox: "queue.SimpleQueue[dict[str, Any] | None]") -> None:
    for line in commands:
        with contextlib.suppress(ValueError):
            command = json.loads(line)
            if isinstance(command, dict):
                inbox.put(command)
    inbox.put(None)


def _exit_once_over(patience: Patience) -> None:
    while not patience.is_over():
        time.sleep(FIRST_SECONDS)
    os._exit(1)


def _set_niceness(niceness: int) -> None:
    # Where Linux schedules sessions as groups, niceness counts only within a session, and the group's niceness
    # against others (sched(7), "The autogroup feature"): without it, half of a core was gone from training. The
    # group's can be taken back by anyone, a process's own only with privileges.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(niceness))

"""A run: its folder, its plan, its log, and its state, which the log rebuilds."""

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pipeline.analyze import measure
from pipeline.driver import run_folders
from pipeline.driver.run_folders import EVENTS, PLAN, Lock
from pipeline.driver.timing import Measurements
from pipeline.errors import UserError
from pipeline.plan import plan as plans
from pipeline.plan.plan import Plan
from pipeline.record import events, log, results
from pipeline.record.findings import Check, Pace

ENDED = {"PREEMPTED": "preempted", "FAILED": "failed", "KILLED": "interrupted", "FINISHED": "finished"}


class Run:
    """One run: `plan` has the values of its plan as they were written, all else is a fold over its log."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.plan: Mapping[str, Any] = {}
        self.is_new = True
        # The log has events, and says as what the last command ended, if it says so.
        self.began = False
        self.ended: str | None = None
        # The last step and epoch that the log tells of, and the step and the folder of the last checkpoint.
        self.step, self.epoch = 0, 0
        self.saved_step: int | None = None
        self.saved_in: str | None = None
        self.check: Check | None = None
        self.profile: Pace | None = None
        # Does XLA compile the steps, and how many times as fast that was, as first chosen.
        self.xla: bool | None = None
        self.xla_speedup: float | None = None
        self.goodput = measure.Goodput()
        # Why all processes were started again, each time.
        self.restarts: list[str] = []
        # Measurements by group, repeat and rank.
        self._repeats: dict[str, dict[int, dict[int, events.Measured]]] = {"point": {}, "baseline": {}}
        self._lock: Lock | None = None
        self._log: log.EventLog

    @classmethod
    def from_log(cls, folder: Path) -> "Run":
        """Rebuilds a run from its folder; resume, takeover and tests start here."""
        run = cls(folder)
        run.is_new, run.plan = False, log.read_whole(folder / PLAN)
        for event, _ in log.read(folder / EVENTS):
            run.apply(event)
        return run

    @classmethod
    def locked(cls, folder: Path) -> "Run":
        """The same, once no other command can work on it. Raises `OSError` if one does."""
        lock = Lock(folder)
        run = cls.from_log(folder)
        run._lock = lock
        return run

    @classmethod
    def without_driver(cls, folder: Path, try_this: str) -> "Run":
        """The same. Raises `UserError`, with what to do instead, if one does."""
        try:
            return cls.locked(folder)
        except BlockingIOError:
            received = f"{log.from_here(folder)}, on which one still works"
            raise UserError("a run whose driver is gone", received, try_this) from None
        except OSError as error:
            expected = f"to be able to write {log.from_here(folder)}"
            raise UserError(expected, error.strerror, "as the user who has begun it, or resume=never") from None

    @property
    def status(self) -> str:
        """The way its last command ended, in words; "killed" if the log does not say."""
        return ENDED.get(str(self.ended), "killed")

    def apply(self, event: events.Event) -> None:
        """Takes in the next event of the log."""
        self.began, self.ended = True, event.status if isinstance(event, events.Ended) else None
        self.goodput.note(event)
        match event:
            case events.Restarted(text=text):
                self.restarts.append(text)
            case events.Profiled(values=profile):
                self.profile = profile
            case events.Measured(group=str(group)):
                self._repeats.setdefault(group, {}).setdefault(event.repeat, {})[event.rank] = event
            case _ if not event.of_point:
                pass
            case events.Steps(step=step):
                self.step = max(self.step, step)
            case events.Epoch(epoch=epoch):
                self.epoch = max(self.epoch, epoch)
            case events.Checkpoint(step=step, path=path):
                self.saved_step, self.saved_in = step, path.rpartition("/")[0]
            case events.Checked(values=check, rank=0):
                self.check = check
            case events.Built(xla=bool(xla), rank=0) if self.xla is None:
                self.xla, self.xla_speedup = xla, event.xla_speedup

    def missed(self, unheard: events.Unheard) -> list[events.Event]:
        """The events among those of earlier processes that the log lacks, as no driver has heard them."""
        return [
            msgspec.structs.replace(event, group="point", rank=0)
            for event in map(log.from_plain, unheard.events)
            if (isinstance(event, events.Steps) and event.step > self.step)
            or (isinstance(event, events.Epoch) and event.epoch > self.epoch)
        ]

    def measured(self, plan: Plan, baseline: Plan | None) -> Measurements:
        """Its measurements, as far as they hold for the plan that resumes it."""
        restarts = self.restarts
        measured = Measurements(step=self.step, check=self.check, notes=list(restarts), restarts=len(restarts))
        same = plans.identity(self.plan) == plans.identity(json.loads(plan.to_json()))
        same = same and plans.from_values(self.plan).collective == plan.collective
        # Timings of another machine do not hold for this one.
        if same and self.plan.get("machine") == plan.hardware.machine:
            measured.point = self._whole_repeats("point", plan.leaders)
            measured.baseline = self._whole_repeats("baseline", baseline.leaders if baseline else (0,))
            measured.profile = self.profile
        return measured

    def timed(self, *groups: str) -> list[events.Event]:
        """The events of what some groups have measured, in their order."""
        repeats = [by_rank for group in groups for by_rank in self._repeats[group].values()]
        return sorted((event for by_rank in repeats for event in by_rank.values()), key=lambda event: event.time)

    def first_event(
        self, name: str, experiment: str, params: dict[str, object], tags: dict[str, object]
    ) -> events.Event:
        """The event that the run begins, or that this command resumes it."""
        pid, host, now = os.getpid(), os.uname().nodename, time.time()
        if self.began:
            return events.Resumed(params, tags, pid, host, time=now)
        key, folder = uuid.uuid4().hex, str(self.folder)
        return events.Run(key, name, folder, experiment, params, tags, pid, host, events.VERSION, time=now)

    def begin(self, plan: Plan, output: Path) -> None:
        """Writes its plan, and opens its log. Raises `OSError` if another command works on it."""
        self._lock = self._lock or Lock(self.folder)
        with suppress(OSError):
            (self.folder / results.FILE).unlink()
        log.write_whole(self.folder / PLAN, plan.to_json())
        run_folders.note(self.folder, plan, output)
        self.open()

    def open(self) -> None:
        """Opens its log, to append to it."""
        self._log = log.EventLog(self.folder / EVENTS)

    def append(self, event: events.Event) -> None:
        """Writes an event to the log, and takes it in."""
        self._log.append(event)
        self.apply(event)

    def close(self) -> None:
        """Closes its log. Raises `OSError` if that cannot be written."""
        self._log.close()

    def release(self) -> None:
        """Lets other commands work on it."""
        if self._lock is not None:
            self._lock.release()

    def _whole_repeats(self, group: str, ranks: Sequence[int]) -> list[measure.Repeat]:
        """The repeats, from the first on, that every process of a group has measured."""
        by_repeat, repeats = self._repeats[group], list[measure.Repeat]()
        while by_repeat.get(len(repeats), {}).keys() >= set(ranks):
            repeats.append(measure.slowest(by_repeat[len(repeats)]))
        return repeats

"""Adds to a run's result its id in MLflow, and what MLflow lacks of it.

Waits as long as MLflow gets on, which beside much else may take longer than the training.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from pipeline.launch.signals import Interrupted
from pipeline.record.results import Result
from pipeline.run.views import Tracking

# Before the terminal says why it waits; at most for a run that a signal has ended, and after a second one.
SAY_SECONDS, HURRIED_SECONDS, AT_ONCE_SECONDS = 5.0, 3.0, 0.2

Answer = TypeVar("Answer")


@dataclass
class Tracked:
    """Waits for MLflow to have the run in a folder, until it has not got on for so many seconds.

    It waits only a moment if the command ends, as `hurried` says. A signal that comes meanwhile is kept in
    `interrupted`, for the caller to raise once the result is written.
    """

    tracker: Tracking
    folder: Path
    seconds: float
    say: Callable[[str], None]
    hurried: Callable[[], bool]
    at_once: bool = False
    interrupted: Interrupted | None = None
    _said: bool = False

    def named(self, result: Result) -> Result:
        """The result with the run's id in MLflow, as soon as it has one."""
        seconds = 0.0 if self.hurried() else self.seconds
        return _with(result, mlflow_run_id=self._waited(lambda waits: self.tracker.run_id(self.folder, seconds, waits)))

    def sent(self, result: Result) -> Result:
        """The result with what MLflow lacks, and what to type, once the log has ended."""
        seconds = min(self.seconds, self._limit()) if self.hurried() else self.seconds
        drained, problem = self._waited(lambda waits: self.tracker.drain(seconds, waits)) or (False, None)
        run_id = result.tracked.mlflow_run_id or self.tracker.run_id(self.folder, 0.0)
        if drained:
            return _with(result, mlflow_run_id=run_id)
        note = (
            f"MLflow does not hold all of it yet{f' ({problem})' if problem else ''}. "
            f"`python -m pipeline sync {self.folder}` sends the rest."
        )
        return _with(result, mlflow_run_id=run_id, tracking_note=note)

    def _limit(self) -> float:
        return AT_ONCE_SECONDS if self.at_once else HURRIED_SECONDS

    def _waited(self, ask: Callable[[Callable[[], bool]], Answer]) -> Answer | None:
        """The answer; None if a signal has come meanwhile."""
        began = time.monotonic()

        def waits() -> bool:
            waited = time.monotonic() - began
            if waited > SAY_SECONDS and not self._said:
                self._said = True
                self.say("Waiting for MLflow to take all of it. Ctrl-C leaves the rest to `python -m pipeline sync`.")
            return waited < self._limit() or not self.hurried()

        try:
            return ask(waits)
        except Interrupted as interrupted:
            self.interrupted, self.at_once = interrupted, True
            self.hurried = lambda: True
            return None


def _with(result: Result, **values: str | None) -> Result:
    return replace(result, tracked=replace(result.tracked, **values))

"""Waits, at the end of a command, until MLflow holds its runs, and notes in their results what it lacks by then.

No run waits for it: the tracker sends a log while the next run trains.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pipeline.launch.signals import Interrupted
from pipeline.record import results
from pipeline.record.log import from_here
from pipeline.record.results import Tracked
from pipeline.run.views import Tracking

# Before the terminal says why it waits.
SAY_SECONDS = 1.0
WAITING = "Uploading to MLflow (Ctrl-C to skip; `python -m pipeline sync` uploads later)."


class Uploads:
    """Folders whose logs a tracker sends, each with the seconds to wait for it while it does not get on."""

    def __init__(self) -> None:
        self._pending: dict[Path, float] = {}
        # Folders that MLflow lacks something of, and what was wrong.
        self._unsent: dict[Path, str | None] = {}

    def add(self, folder: Path, seconds: float) -> None:
        """Has a folder's log, which has ended, waited for later."""
        self._pending[folder] = seconds

    def note(self, tracker: Tracking) -> None:
        """Notes the ids of runs that MLflow holds by now, the first ones first. Waits for nothing."""
        while folder := next(iter(self._pending), None):
            sent, _ = tracker.drain(folder, 0.0)
            if not sent:
                return
            del self._pending[folder]
            _write(folder, tracker.run_id(folder, 0.0), None)

    def settle(
        self, tracker: Tracking, say: Callable[[str], None], limit: Callable[[], float]
    ) -> tuple[str | None, Interrupted | None]:
        """Waits `limit` seconds in all at most: (what MLflow lacks and what to type, the signal that ended the wait).

        Without that, MLflow holds everything.
        """
        began, told, interrupted = time.monotonic(), False, None

        def waits() -> bool:
            nonlocal told
            waited = time.monotonic() - began
            if waited > SAY_SECONDS and not told:
                told = True
                say(WAITING)
            return waited < limit()

        while folder := next(iter(self._pending), None):
            # Once one was waited for in vain, the others are only looked at.
            seconds = 0.0 if self._unsent else min(self._pending[folder], limit())
            try:
                sent, problem = tracker.drain(folder, seconds, waits)
            except Interrupted as signalled:
                interrupted, limit = signalled, lambda: 0.0
                continue
            del self._pending[folder]
            if not sent:
                self._unsent[folder] = problem
            _write(folder, tracker.run_id(folder, 0.0), None if sent else _lacks({folder: problem}))
        return _lacks(self._unsent) if self._unsent else None, interrupted


def _write(folder: Path, run_id: str | None, note: str | None) -> None:
    """Notes in a run's result its id in MLflow, and what is missing there; a command that resumes it has deleted it."""
    result = results.read(folder)
    if result is not None and result.tracked != Tracked(run_id, note):
        with suppress(OSError):
            results.write(folder, replace(result, tracked=Tracked(run_id, note)))


def _lacks(unsent: dict[Path, str | None]) -> str:
    """Says what MLflow lacks of some folders, and how to send it."""
    problem = next(filter(None, unsent.values()), None)
    folder = Path(os.path.commonpath([folder.resolve() for folder in unsent]))
    runs = f"all of {len(unsent)} runs" if len(unsent) > 1 else "all of it"
    return (
        f"MLflow does not hold {runs} yet{f' ({problem})' if problem else ''}. "
        f"`python -m pipeline sync {from_here(folder)}` sends the rest."
    )

"""Writes into a run's folder what the next driver goes on from, if it has to take over.

The measurements since the attempt began are in the event log; those before stand in `attempt.json`.
"""

from dataclasses import dataclass, field
from pathlib import Path

from pipeline.record import kept
from pipeline.record.commands import Resume
from pipeline.record.log import from_here, read_json, write_json
from pipeline.record.results import Baseline
from pipeline.run.timing import Measured

FILE = "attempt.json"


@dataclass(frozen=True)
class Attempt:
    """One attempt, from the first process to the last: its plan as JSON, when it began, what was measured before.

    `resume`: the checkpoint that it resumes from. `restarts`: how many of the `launch.max_restarts` are used up;
    `failed`: the log of the process that failed last.
    """

    plan: str
    began: float
    measured: Measured
    resume: Resume | None = None
    restarts: int = 0
    failed: str | None = None


@dataclass(frozen=True)
class Handover:
    """A run under way: its config as YAML, what was typed and where, its attempt, and the log's size when that began.

    `baseline` is the plan of one device, as JSON, and `known` what an earlier run measured of it; `ask_size`: the
    model's size was not known.
    """

    config: str
    attempt: Attempt
    offset: int
    directory: str
    overrides: list[str] = field(default_factory=list)
    baseline: str | None = None
    known: Baseline | None = None
    ask_size: bool = False

    @classmethod
    def read(cls, folder: Path) -> "Handover | None":
        """That of the run in a folder; None if its processes end with their driver."""
        return read_json(cls, folder / FILE)

    def write(self, folder: Path) -> None:
        """Writes it, before the attempt starts any process. Raises `OSError`."""
        write_json(folder / FILE, self)


def forget(folder: Path) -> None:
    """Deletes what the next driver would go by: the run is over."""
    kept.forget(folder)
    (folder / FILE).unlink(missing_ok=True)


def how(folder: Path) -> str:
    """Says how to take over from a driver that has left."""
    return f"`python -m pipeline attach {from_here(folder)}` takes this command's place."

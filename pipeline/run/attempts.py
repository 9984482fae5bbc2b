"""What a run's folder says of the attempt that is under way, for another command to go on with it.

What has been measured since the attempt began is in the event log; what was known before stands here.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.plan.plan import Plan, from_json
from pipeline.record import kept, plain
from pipeline.record.baselines import Baseline
from pipeline.record.commands import Resume
from pipeline.record.log import read_made, write_whole
from pipeline.run.timing import Measured

FILE, LOG = "attempt.json", "events.jsonl"


@dataclass(frozen=True)
class Attempt:
    """One path from the first process to the last: its plan as JSON, when it began, and what was known by then.

    `resume`: from which checkpoint it goes on. `restarts`: how often all processes were started again, of those that
    `launch.max_restarts` allows; `failed`: the log of the process that had failed last.
    """

    plan: str
    began: float
    measured: Measured
    resume: Resume | None = None
    restarts: int = 0
    failed: str | None = None

    def planned(self) -> Plan:
        """Its plan."""
        return from_json(self.plan)


@dataclass(frozen=True)
class UnderWay:
    """A run: its config as YAML, what was typed, and in which folder; its attempt, which the log tells of from byte
    `offset` on.

    `baseline` is the plan of one device, as JSON, and `known` what was measured of it before; `ask_size`: the size of
    the model was not known.
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
    def read(cls, folder: Path) -> "UnderWay | None":
        """That of the run in a folder; None where no processes outlive their conductor."""
        return read_made(cls, folder / FILE)

    def write(self, folder: Path) -> None:
        """Notes it, before any process of the attempt is started. Raises `OSError`."""
        write_whole(folder / FILE, json.dumps(plain.fields_of(self), indent=2))


def forget(folder: Path) -> None:
    """Notes that nothing is under way any more."""
    kept.forget(folder)
    (folder / FILE).unlink(missing_ok=True)

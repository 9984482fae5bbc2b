"""Predictions as `predictions.jsonl` has them, a line each, and as `result.json` has them once a run scored them."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.record import codec, log
from pipeline.record.codec import MismatchError

# In the output folder.
FILE = "predictions.jsonl"


@dataclass(frozen=True)
class FittedOn:
    """The runs that a prediction was fitted on, what they were of, and how many others were left out.

    `timed_step_seconds` is how long a step of one worker took that was timed for it, if one was.
    """

    runs: int
    left_out: int = 0
    strategies: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    workers: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()
    replica_batches: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    machine: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    timed_step_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The predicted examples per second of a plan, their interval, and when and for what they were predicted.

    `correction` is what a fit was multiplied by, since runs and earlier predictions were off, and `unsure` how sure it
    was, as a standard deviation of the logarithm; None of versions that did not tell.
    """

    time: float | None = None
    examples_per_second: float
    low: float
    high: float
    confidence: float | None = None
    strategy: str | None = None
    workers: int | None = None
    parameters: int | None = None
    fitted_on: FittedOn | None = None
    correction: float = 1.0
    unsure: float | None = None


@dataclass(frozen=True, kw_only=True)
class PredictionLine(Predicted):
    """A line of predictions.jsonl: `identity` names the plan that it is of, see `step_model.identity`."""

    identity: str


@dataclass(frozen=True, kw_only=True)
class Scored(Predicted):
    """A prediction of a run that has `measured` so many examples per second.

    `error` is predicted over measured, less 1; `held` says whether the interval holds what was measured.
    """

    measured: float | None = None
    error: float
    held: bool


def append(output: Path, line: PredictionLine) -> None:
    """Keeps a prediction, to be scored by a run that comes after it."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / FILE).open("ab") as lines:
        lines.write(codec.to_json(line) + b"\n")


def read(output: Path) -> list[PredictionLine]:
    """The predictions that were made, oldest first."""
    lines: list[PredictionLine] = []
    for values, _ in log.objects(output / FILE):
        with suppress(MismatchError):
            lines.append(codec.from_plain(PredictionLine, values))
    return lines

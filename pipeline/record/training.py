"""What processes tell while they train and time it: steps, epochs, repeats, checkpoints and the end."""

from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.record import plain
from pipeline.record.told import Told


@dataclass(frozen=True)
class Calibrated(Told):
    """Process: how long a step takes, after tracing."""

    step_seconds: float = 0.0


class TimedCall(NamedTuple):
    """A call of the compiled loop."""

    steps: int
    seconds: float


class CoreTime(NamedTuple):
    """Seconds that `cores` of a machine (its boot's id) were busy, and in which they computed for the process."""

    machine: str
    cores: list[int]
    busy_seconds: float
    own_seconds: float


@dataclass(frozen=True)
class Measured(Told):
    """Process: one timed repeat. `examples` are those of all replicas.

    Of the `seconds`, `input_seconds` were spent waiting for batches, by each worker of an asynchronous training, else
    by the process. `core_time` is that of the cores it may use, where Linux tells it.
    """

    repeat: int
    examples: float
    seconds: float
    steps: int = 0
    calls: list[TimedCall] = field(default_factory=list)
    input_seconds: list[float] = field(default_factory=list)
    core_time: CoreTime | None = plain.if_told()


@dataclass(frozen=True)
class Checkpoint(Told):
    """Chief: one was written."""

    step: int
    path: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Left(Told):
    """Process: has left for a scheduler, after the checkpoint of `step`; the chief says whether it was written."""

    step: int | None = None
    written: bool | None = plain.if_told()


@dataclass(frozen=True)
class Steps(Told):
    """Chief: one call of the training loop. `losses` are one a step, the last of them at `step`, counted from 1.

    `metrics` run over the epoch; `examples` and `seconds` are of the call.
    """

    step: int
    losses: list[float]
    epoch: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    examples: float | None = None
    seconds: float | None = None
    learning_rate: float | None = None


@dataclass(frozen=True)
class Epoch(Told):
    """Chief: the end of an epoch, counted from 1, at `step`, after validation."""

    epoch: int
    step: int = 0
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    val_loss: float | None = None
    val_metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None


# A trained model, or the weights of one that cannot be saved whole, in the run's folder.
MODEL, WEIGHTS = "model.keras", "model.weights.h5"
# What a language model wrote at the end of its training, beside it.
SAMPLE = "sample.txt"


@dataclass(frozen=True)
class Saved(Told):
    """Chief: the path of the trained model, relative to the run's folder."""

    path: str


@dataclass(frozen=True)
class Finished(Told):
    """Process: training is over, with a hash of the weights of each of its replicas.

    The chief adds what training came to, which callback ended it early (`stopped_by`, at the step `stopped_at`), the
    epoch whose weights one has put back, `sent_bytes` that a replica sends in a step for its gradients, and of an
    asynchronous training staleness in updates, and whose its steps were.
    """

    weights: list[str] = field(default_factory=list)
    epochs: int | None = plain.if_told()
    loss: float | None = plain.if_told()
    metrics: dict[str, float] | None = plain.if_told()
    val_loss: float | None = plain.if_told()
    val_metrics: dict[str, float] | None = plain.if_told()
    staleness_mean: float | None = plain.if_told()
    staleness_max: int | None = plain.if_told()
    steps: int | None = plain.if_told()
    examples: int | None = plain.if_told()
    updates: int | None = plain.if_told()
    worker_steps: list[int] | None = plain.if_told()
    sent_bytes: int | None = plain.if_told()
    stopped_by: str | None = plain.if_told()
    stopped_at: int | None = plain.if_told()
    restored_epoch: int | None = plain.if_told()


@dataclass(frozen=True)
class Beat(Told):
    """Process: it lives. By itself: how often it got on, and the seconds of cores that it has used, or waited for while
    others had them. In training: `step`, or steps of the validation that are done.
    """

    progress: int | None = plain.if_told()
    cpu_seconds: float | None = plain.if_told()
    step: int | None = plain.if_told()
    validated: int | None = plain.if_told()

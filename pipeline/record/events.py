"""The events of a run, a class a kind: one JSON object a line of the log; those of `PASSING` only reach the driver.

Optional fields have defaults so that older logs and other engines still parse.
"""

from typing import Any, Literal, NamedTuple, get_args

from msgspec import Struct, field

from pipeline.plan.size import Size
from pipeline.record.findings import Check, Explanation, Pace

# Parts of a step that are left out when it is timed.
SwitchedOff = Literal["everything", "no input", "no statistics", "no step", "no communication"]
# The version of the lines; those of 0.1.0 have none.
VERSION = 2
# In the run's folder: a trained model, weights of one that cannot be saved whole, a text that a language model wrote.
MODEL, WEIGHTS, SAMPLE = "model.keras", "model.weights.h5", "sample.txt"


class EventBase(Struct, frozen=True, kw_only=True, tag_field="event", tag=str.lower):
    """The fields of every event. `time` is in seconds since 1970, 0 until whoever passes it on sets it.

    `group` is "point" for the run's own processes, "baseline" for the one-device comparison, None for the driver.
    """

    time: float = 0.0
    group: str | None = None
    rank: int = 0

    @property
    def kind(self) -> str:
        """The kind, as a line names it."""
        return str(self.__struct_config__.tag)

    @property
    def of_point(self) -> bool:
        """True if it is of the run itself, not of its baseline."""
        return self.group in (None, "point")


class Run(EventBase, frozen=True):
    """Driver: a run begins. `key` is unique for ever; `params` and `tags` are those of MLflow."""

    key: str = ""
    name: str = ""
    folder: str = ""
    experiment: str = ""
    params: dict[str, object] = field(default_factory=dict)
    tags: dict[str, object] = field(default_factory=dict)
    pid: int | None = None
    host: str | None = None
    version: int = 0


class Resumed(EventBase, frozen=True):
    """Driver: another command resumes the run."""

    params: dict[str, object] = field(default_factory=dict)
    tags: dict[str, object] = field(default_factory=dict)
    pid: int | None = None
    host: str | None = None


class Attached(EventBase, frozen=True):
    """Driver: it takes over from one that is gone, whose processes live on."""

    pid: int | None = None
    host: str | None = None


class Started(EventBase, frozen=True):
    """Driver: a process was started, on the `host` of that number."""

    pid: int | None = None
    role: str = ""
    host: int = 0


class Joined(EventBase, frozen=True):
    """Process: it has its devices and strategy. `versions` are those of the libraries that compute."""

    devices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


class Lost(Struct, frozen=True):
    """Broken examples: so many from number `first` on. See `pipeline.data.examples.Broken`."""

    path: str | None
    first: int
    examples: int
    name: str
    why: str
    stop: int | None = None


class Loaded(EventBase, frozen=True):
    """Process: it has its data. By part: whether it is sharded, the number of examples here, and those broken."""

    sharded: dict[str, bool]
    examples: dict[str, int]
    broken: dict[str, list[Lost]] = field(default_factory=dict)


class Built(EventBase, frozen=True):
    """Process: it has its model, for inputs of a shape and dtype; `notes` and `xla` are those for the result."""

    parameters: int | None = None
    state_bytes: int | None = None
    normalizations: int = 0
    input_shape: object = None
    input_dtype: object = None
    num_classes: int | None = None
    train_examples: int | None = None
    validation_examples: int | None = None
    validation_steps: int | None = None
    steps_per_epoch: int | None = None
    epochs: int | None = None
    data_digest: str | None = None
    notes: list[str] | None = None
    xla: bool | None = None
    xla_speedup: float | None = None
    seconds_compiling: float | None = None


class Checked(EventBase, frozen=True):
    """Process: the check of all replicas against one device; the first process's counts."""

    values: Check


class Sized(EventBase, frozen=True):
    """Process: the size of the model, or why it cannot be known."""

    size: Size | None = None
    error: str | None = None


class Profiling(EventBase, frozen=True):
    """Process: timings before training: `step_seconds` of "model" or "input", roughly, then pieces of them."""

    what: Literal["model", "input"]
    step_seconds: float | None = None
    examples: list[float] | None = None
    seconds: list[float] | None = None


class Profiled(EventBase, frozen=True):
    """Driver: which of input and model sets the pace."""

    values: Pace


class Calibrated(EventBase, frozen=True):
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


class Measured(EventBase, frozen=True):
    """Process: one timed repeat of all replicas' examples, in which it waited `input_seconds` for batches."""

    repeat: int
    examples: float
    seconds: float
    steps: int = 0
    calls: list[TimedCall] = field(default_factory=list)
    input_seconds: list[float] = field(default_factory=list)
    core_time: CoreTime | None = None


class Steps(EventBase, frozen=True):
    """Chief: one call of the training loop, a loss a step up to `step`, from 1, and metrics since the epoch began."""

    step: int
    losses: list[float]
    epoch: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    examples: float | None = None
    seconds: float | None = None
    learning_rate: float | None = None


class Epoch(EventBase, frozen=True):
    """Chief: the end of an epoch, counted from 1, at `step`, after validation."""

    epoch: int
    step: int = 0
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    val_loss: float | None = None
    val_metrics: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None


class Restored(EventBase, frozen=True):
    """Chief: training resumes from `step`; `found` says whether there was a checkpoint."""

    step: int = 0
    found: bool = False


class Unheard(EventBase, frozen=True):
    """Chief or agent: steps and epochs of earlier processes, of which the driver logs those that the log lacks."""

    events: tuple[dict[str, Any], ...]


class Restarted(EventBase, frozen=True):
    """Driver: all processes are started again, for the reason in `text`."""

    text: str
    workers: int | None = None
    processes: int = 1
    leaders: int = 1


class Checkpoint(EventBase, frozen=True):
    """Chief: a checkpoint was written."""

    step: int
    path: str = ""
    seconds: float = 0.0


class Left(EventBase, frozen=True):
    """Process: it leaves for a scheduler, after the checkpoint of `step`; the chief says whether it was written."""

    step: int | None = None
    written: bool | None = None


class Signalled(EventBase, frozen=True):
    """Process: got a scheduler's signal. Driver: got a Ctrl-C, upon which processes write a checkpoint and leave."""

    signal: int


class System(EventBase, frozen=True):
    """First process of each host: its load, in percent and GiB."""

    host: str
    values: dict[str, float]


class Warned(EventBase, frozen=True, tag="warning"):
    """Anyone: something that a user should know."""

    text: str = ""


class Saved(EventBase, frozen=True):
    """Chief: the path of the trained model, relative to the run's folder."""

    path: str


class Finished(EventBase, frozen=True):
    """Process: training is over, with a hash of the weights of each of its replicas, and the chief with the results."""

    weights: list[str] = field(default_factory=list)
    epochs: int | None = None
    loss: float | None = None
    metrics: dict[str, float] | None = None
    val_loss: float | None = None
    val_metrics: dict[str, float] | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    steps: int | None = None
    examples: int | None = None
    updates: int | None = None
    worker_steps: list[int] | None = None
    sent_bytes: int | None = None
    stopped_by: str | None = None
    stopped_at: int | None = None
    restored_epoch: int | None = None


class Failed(EventBase, frozen=True):
    """Process: `error` is one line for a user. `peer`: it only lost its peers. `diverged`: training has."""

    error: str = ""
    peer: bool = False
    diverged: bool = False


class TimedReplica(NamedTuple):
    """The seconds of a step of the replica of that number."""

    replica: int
    seconds: float


class Explaining(EventBase, frozen=True):
    """Process: steps timed after training, with parts switched off; "no step" are the seconds of a call."""

    what: SwitchedOff
    examples: float | None = None
    seconds: float | None = None
    replicas: list[TimedReplica] | None = None


class Explained(EventBase, frozen=True):
    """Driver: where the lost efficiency went."""

    values: Explanation


class Result(EventBase, frozen=True):
    """Driver: the whole of result.json."""

    values: dict[str, Any] = field(default_factory=dict)


class Report(EventBase, frozen=True):
    """Driver: of a sweep, in a log of its own; `files` are paths in its folder, by the artifacts' folder."""

    files: dict[str, list[str]] = field(default_factory=dict)
    tags: dict[str, str | None] = field(default_factory=dict)
    text: str = ""


class Ended(EventBase, frozen=True):
    """Driver: FINISHED, FAILED, KILLED or PREEMPTED; the last line, unless another command resumes the run."""

    status: str
    error: str | None = None


class Beat(EventBase, frozen=True):
    """Process: a heartbeat, with its progress and seconds of cores; in training `step`, or steps validated."""

    progress: int | None = None
    cpu_seconds: float | None = None
    step: int | None = None
    validated: int | None = None


class Stopped(EventBase, frozen=True):
    """Driver: a process is stopped, by a signal."""


class Unreachable(EventBase, frozen=True):
    """Driver: the host of a process was silent for so many seconds, or has forgotten the process (None)."""

    name: str
    seconds: float | None = None


class Exited(EventBase, frozen=True):
    """Driver: a process has ended, by a signal where `code` is below 0."""

    code: int | None = None


class Unknown(EventBase, frozen=True):
    """An event of an unknown kind, or with odd fields: all values of its line, as read."""

    name: str
    values: dict[str, object]


Event = (
    Run | Resumed | Attached | Started | Joined | Loaded | Built | Checked | Sized | Profiling | Profiled | Calibrated
    | Measured | Restored | Checkpoint | Restarted | Left | Signalled | Steps | Epoch | System | Warned | Saved | Failed
    | Finished | Explaining | Explained | Result | Report | Ended | Beat | Stopped | Unreachable | Exited | Unheard
    | Unknown
)  # fmt: skip

KINDS: dict[str, type[Event]] = {str(one.__struct_config__.tag): one for one in get_args(Event) if one is not Unknown}
PASSING = (Beat, Stopped, Unreachable, Exited, Unheard)

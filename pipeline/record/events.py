"""What a run tells: a class a kind, written and read here alone, one JSON object a line.

A line has `time`, `event` (the kind), where a process told it `group` and `rank`, and the fields of the class. What
no other part of the program goes by has a default, so that lines of earlier versions and of other engines need not have
it; what a later version adds to a kind is passed over. `pipeline.record.log` keeps the lines, but for those of
`PASSING`, which reach the conductor alone.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Self, get_args

from pipeline.plan import size as sizes
from pipeline.plan.size import Size
from pipeline.record import plain
from pipeline.record.check import Check
from pipeline.record.plain import MismatchError
from pipeline.record.profile import Explanation, Profile
from pipeline.record.told import Told as Told
from pipeline.record.told import stamped as stamped
from pipeline.record.told import to_line as to_line
from pipeline.record.told import to_plain as to_plain
from pipeline.record.training import Beat as Beat
from pipeline.record.training import Calibrated as Calibrated
from pipeline.record.training import Checkpoint as Checkpoint
from pipeline.record.training import Epoch as Epoch
from pipeline.record.training import Finished as Finished
from pipeline.record.training import Left as Left
from pipeline.record.training import Measured as Measured
from pipeline.record.training import Saved as Saved
from pipeline.record.training import Steps as Steps
from pipeline.record.training import TimedCall as TimedCall

# What is left out of steps that are timed.
SwitchedOff = Literal["everything", "no input", "no statistics", "no step", "no communication"]
# Of the lines; those of 0.1.0 have none.
VERSION = 1


@dataclass(frozen=True)
class Run(Told):
    """Conductor: a run begins. `key` is unique for ever; `params` and `tags` are those of MLflow."""

    key: str = ""
    name: str = ""
    folder: str = ""
    experiment: str = ""
    params: dict[str, object] = field(default_factory=dict)
    tags: dict[str, object] = field(default_factory=dict)
    pid: int | None = None
    host: str | None = None
    version: int = 0


@dataclass(frozen=True)
class Resumed(Told):
    """Conductor: another command goes on with the run."""

    params: dict[str, object] = field(default_factory=dict)
    tags: dict[str, object] = field(default_factory=dict)
    pid: int | None = None
    host: str | None = None


@dataclass(frozen=True)
class Attached(Told):
    """Conductor: it takes the place of one that is gone, whose processes go on."""

    pid: int | None = None
    host: str | None = None


@dataclass(frozen=True)
class Started(Told):
    """Conductor: a process was started, on the `host` of that number."""

    pid: int | None = None
    role: str = ""
    host: int = 0


@dataclass(frozen=True)
class Joined(Told):
    """Process: it has its devices and strategy. `versions` are those of what computes."""

    devices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Lost:
    """Examples that are broken: so many from number `first` on. See `pipeline.data.examples.Broken`."""

    path: str | None
    first: int
    examples: int
    name: str
    why: str
    stop: int | None = None


@dataclass(frozen=True)
class Loaded(Told):
    """Process: it has its data. By part: was it sharded, how many examples are here, and what it found broken."""

    sharded: dict[str, bool]
    examples: dict[str, int]
    broken: dict[str, list[Lost]] = field(default_factory=dict)


@dataclass(frozen=True)
class Built(Told):
    """Process: it has its model. Shape and dtype are of one example's input, which may be nested.

    `notes` are what the result is to say of data and model, where there is something.
    """

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
    notes: list[str] | None = plain.if_told()


@dataclass(frozen=True)
class Checked(Told):
    """Process: what came of comparing all replicas with one device; what the first process told counts."""

    values: Check


@dataclass(frozen=True)
class Sized(Told):
    """Process: how large the model is, where that was not known, or why that cannot be told."""

    size: Size | None = None
    error: str | None = plain.if_told()

    def own(self) -> dict[str, object]:
        """An error, or the fields of the size among those of the event."""
        return {"error": self.error} if self.size is None else sizes.to_plain(self.size)

    @classmethod
    def made_of(cls, values: Mapping[str, object]) -> Self:
        """The size of the fields among those of the event."""
        known = {name: value for name, value in values.items() if name in Size.__dataclass_fields__}
        made = plain.made_of(cls, {name: value for name, value in values.items() if name not in known})
        if made.error is not None:
            return made
        try:
            return replace(made, size=sizes.from_plain(known))
        except (KeyError, TypeError, ValueError) as error:
            raise MismatchError(str(error)) from None


@dataclass(frozen=True)
class Profiling(Told):
    """Process: what it timed before training: `step_seconds` of "model" or "input", roughly, then pieces of them."""

    what: Literal["model", "input"]
    step_seconds: float | None = plain.if_told()
    examples: list[float] | None = plain.if_told()
    seconds: list[float] | None = plain.if_told()


@dataclass(frozen=True)
class Profiled(Told):
    """Conductor: what that comes to."""

    values: Profile


@dataclass(frozen=True)
class Restored(Told):
    """Chief: training goes on from `step`; was there a checkpoint?

    Before it is logged, `told` has what training told last before the checkpoint, of which what no conductor has heard
    is logged in its place.
    """

    step: int = 0
    found: bool = False
    told: tuple[Told, ...] = ()

    @classmethod
    def made_of(cls, values: Mapping[str, object]) -> Self:
        """Its events are read as lines are."""
        told = plain.read(list[dict[str, object]], values.get("told", []))
        made = plain.made_of(cls, {name: value for name, value in values.items() if name != "told"})
        return replace(made, told=tuple(from_plain(event) for event in told))

    def own(self) -> dict[str, object]:
        """Its events are written as lines are."""
        told = {"told": [to_plain(event) for event in self.told]} if self.told else {}
        return {"step": self.step, "found": self.found, **told}


@dataclass(frozen=True)
class Restarted(Told):
    """Conductor: all processes are started again, for the reason in `text`."""

    text: str
    workers: int | None = None
    processes: int = 1
    leaders: int = 1


@dataclass(frozen=True)
class Signalled(Told):
    """Process: got a scheduler's signal. Conductor: got a Ctrl-C, upon which processes write a checkpoint and leave."""

    signal: int


@dataclass(frozen=True)
class System(Told):
    """First process of each host: the load of the host, in percent and GiB."""

    host: str
    values: dict[str, float]


@dataclass(frozen=True)
class Warned(Told):
    """Anyone: something that a person should know."""

    kind = "warning"
    text: str = ""


@dataclass(frozen=True)
class Failed(Told):
    """Process: `error` is one line for a person. `peer`: it only lost its peers. `diverged`: training has."""

    error: str = ""
    peer: bool = False
    diverged: bool = False


class TimedReplica(NamedTuple):
    """The seconds of a step of the replica of that number."""

    replica: int
    seconds: float


@dataclass(frozen=True)
class Explaining(Told):
    """Process: steps timed after training, with parts switched off.

    "no step" has the seconds of a call, "no communication" those of a step by replica, the others examples and seconds.
    """

    what: SwitchedOff
    examples: float | None = plain.if_told()
    seconds: float | None = plain.if_told()
    replicas: list[TimedReplica] | None = plain.if_told()


@dataclass(frozen=True)
class Explained(Told):
    """Conductor: what that comes to."""

    values: Explanation


@dataclass(frozen=True)
class Result(Told):
    """Conductor: the whole of result.json."""

    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Report(Told):
    """Conductor: of a sweep, in a log of its own; `files` are paths in the sweep's folder, by the artifacts' folder.

    What earlier versions told besides, the best point's numbers, is passed over.
    """

    files: dict[str, list[str]] = field(default_factory=dict)
    tags: dict[str, str | None] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class Ended(Told):
    """Conductor: FINISHED, FAILED, KILLED or PREEMPTED; the last line, unless another command goes on with the run."""

    status: str
    error: str | None = None


@dataclass(frozen=True)
class Stopped(Told):
    """Conductor: a process is stopped, by a signal."""


@dataclass(frozen=True)
class Unreachable(Told):
    """Conductor: the host of a process was not heard of for so many seconds, or has forgotten the process (None)."""

    name: str
    seconds: float | None = None


@dataclass(frozen=True)
class Exited(Told):
    """Conductor: a process has ended, by a signal where `code` is below 0."""

    code: int | None = None


@dataclass(frozen=True)
class Unknown(Told):
    """A kind that is not here, or one whose fields are not what they should be: all values of its line, as read."""

    name: str
    values: dict[str, object]

    def own(self) -> dict[str, object]:
        """Its values as they were read."""
        return {"event": self.name} | {name: plain.to_plain(value) for name, value in self.values.items()}


Event = (
    Run | Resumed | Attached | Started | Joined | Loaded | Built | Checked | Sized | Profiling | Profiled | Calibrated
    | Measured | Restored | Checkpoint | Restarted | Left | Signalled | Steps | Epoch | System | Warned | Saved | Failed
    | Finished | Explaining | Explained | Result | Report | Ended | Beat | Stopped | Unreachable | Exited | Unknown
)  # fmt: skip

KINDS: dict[str, type[Event]] = {made.kind: made for made in get_args(Event) if made is not Unknown}
# Kinds that only the conductor needs.
PASSING = (Beat, Stopped, Unreachable, Exited)


def from_plain(values: Mapping[str, object]) -> Event:
    """The event whose line has these values; `Unknown` where no class has such ones."""
    name = values.get("event")
    if isinstance(name, str) and name in KINDS:
        with suppress(MismatchError):
            return KINDS[name].made_of(values)
    by: dict[str, Any] = {}
    for part, kind in (("time", float), ("group", str), ("rank", int)):
        with suppress(MismatchError):
            by |= {part: plain.read(kind, values[part])} if part in values else {}
    return Unknown(str(name or ""), dict(values), **by)


def from_line(line: bytes) -> Event | None:
    """The event of a line; None where it holds no JSON object."""
    with suppress(ValueError):
        values = json.loads(line)
        if isinstance(values, dict):
            return from_plain(values)
    return None

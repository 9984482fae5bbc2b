"""The commands that the driver gives processes, a class a command with the event that responds to it."""

import json
from typing import Any, Generic, Literal, Never, TypeVar, get_args

from msgspec import Struct, field

import pipeline.record as record
from pipeline.record import events

# The checkpoint that training resumes from: the last good one; with "back", later ones are removed.
Resume = Literal["last", "back"]
Response = TypeVar("Response", bound=events.EventBase, covariant=True)


class Command(Struct, Generic[Response], frozen=True, tag_field="do", tag=str.lower):
    """One of those below."""

    @classmethod
    def response_type(cls) -> type[Response]:
        """Returns the event that responds to it; `Never` where none does."""
        return get_args(cls.__orig_bases__[0])[0]  # type: ignore[attr-defined, no-any-return]

    def to_json(self) -> str:
        """Returns the command as JSON text, its name under `do`."""
        return record.to_json(self).decode()


class Load(Command[events.Loaded], frozen=True):
    """Make the data, and look for what is broken in it; `folder` is the run's."""

    folder: str


class Drop(Command[events.Loaded], frozen=True):
    """Leave out the examples that any process has found broken: by the rank that found them, and by part."""

    broken: dict[str, dict[str, list[events.Lost]]]


class Build(Command[events.Built], frozen=True):
    """Make the model, on data whose shards have so many examples; where it resumes, the chief emits `restored` too."""

    train_counts: list[int]
    validation_counts: list[int]
    resume: Resume | None = None


class Check(Command[events.Checked], frozen=True):
    """Before training, compare all replicas with one device on a small batch."""


class MeasureSize(Command[events.Sized], frozen=True, tag="size"):
    """Measure the size of the model; compiles the step, if it was not yet."""


class Profile(Command[events.Profiling], frozen=True):
    """Before training, time the "model" or the "input" alone: a few steps, or `steps`."""

    what: Literal["model", "input"]
    steps: int | None = None


class Begin(Command[Never], frozen=True):
    """Begin training: from here on steps are those of the training while it lasts, before that for nothing but time."""


class Calibrate(Command[events.Calibrated], frozen=True):
    """Trace the step, and time a few: one call of so many, or enough that a call's length can be chosen."""

    steps_per_call: int | None


class Measure(Command[events.Measured], frozen=True):
    """Time at least `steps` steps after `warmup_steps`, in whole calls."""

    repeat: int
    warmup_steps: int
    steps: int
    steps_per_call: int


class Train(Command[events.Finished], frozen=True):
    """Train to the end, and save into `folder`; the chief emits `saved` as well."""

    steps_per_call: int
    folder: str


class Explain(Command[events.Explaining], frozen=True):
    """Once training is over, or in a baseline: time steps, or what is left of them where a part is switched off.

    Of "no step" that is one call; of "no communication" steps of `replicas`, for at least `seconds`.
    """

    what: events.SwitchedOff
    steps_per_call: int
    warmup_steps: int = 0
    steps: int = 0
    replicas: list[int] = field(default_factory=list)
    seconds: float = 0.0


class Leave(Command[Never], frozen=True):
    """Write a checkpoint as soon as all agree to, emit `left`, and do nothing more. It is heard at once."""


class Exit(Command[Never], frozen=True):
    """End with 0."""


COMMANDS: dict[str, type[Command[Any]]] = {str(kind.__struct_config__.tag): kind for kind in Command.__subclasses__()}


def from_json(text: str | bytes) -> Command[events.EventBase]:
    """Returns the command that `Command.to_json` wrote."""
    values = json.loads(text)
    return record.from_plain(COMMANDS[values["do"]], values)

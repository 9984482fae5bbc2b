"""What the conductor has processes do: a class a command, written and read here alone.

`Command[Loaded]` is one that a process answers with the event `Loaded` when it has done it; nothing answers the others.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Generic, Literal, Never, TypeVar, get_args

from pipeline.record import plain
from pipeline.record.events import (
    Built,
    Calibrated,
    Checked,
    Explaining,
    Finished,
    Loaded,
    Lost,
    Measured,
    Profiling,
    Sized,
    SwitchedOff,
    Told,
)

# Which checkpoint training goes on from, see `Build`.
Resume = Literal["last", "back"]
Answer = TypeVar("Answer", bound=Told, covariant=True)


@dataclass(frozen=True)
class Command(Generic[Answer]):
    """One of those below."""

    @classmethod
    def answered_by(cls) -> type[Answer]:
        """The event that answers it; `Never` where none does."""
        ((told,),) = map(get_args, cls.__orig_bases__)  # type: ignore[attr-defined]
        made: type[Answer] = told
        return made

    def to_json(self) -> str:
        """The command as JSON text, its name under `do`."""
        return json.dumps({"do": type(self).__name__.lower()} | asdict(self))


@dataclass(frozen=True)
class Load(Command[Loaded]):
    """Make the data, and look for what is broken in it; `folder` is the run's."""

    folder: str


@dataclass(frozen=True)
class Drop(Command[Loaded]):
    """Leave out what any process has found broken: by the rank that found it, and by part."""

    broken: dict[str, dict[str, list[Lost]]]


@dataclass(frozen=True)
class Build(Command[Built]):
    """Make the model, on data of which each shard has the given number of examples.

    With `resume` "last", training will go on from the last good checkpoint; with "back", later ones are removed. The
    chief then tells `restored` as well.
    """

    train_counts: list[int]
    validation_counts: list[int]
    resume: Resume | None = None


@dataclass(frozen=True)
class Check(Command[Checked]):
    """Before training, compare what all replicas make of a small batch with what one device makes of it."""


@dataclass(frozen=True)
class Size(Command[Sized]):
    """Tell how large the model is; for that the step is compiled, if it was not yet."""


@dataclass(frozen=True)
class Profile(Command[Profiling]):
    """Before training, time the "model" or the "input" alone: a few steps, or `steps`."""

    what: Literal["model", "input"]
    steps: int | None = None


@dataclass(frozen=True)
class Begin(Command[Never]):
    """Begin training: from here on steps are those of the training while it lasts, before that for nothing but time."""


@dataclass(frozen=True)
class Calibrate(Command[Calibrated]):
    """Trace the step, and time a few: one call of so many, or enough that a call's length can be chosen."""

    steps_per_call: int | None


@dataclass(frozen=True)
class Measure(Command[Measured]):
    """Time at least `steps` steps after `warmup_steps`, in whole calls."""

    repeat: int
    warmup_steps: int
    steps: int
    steps_per_call: int


@dataclass(frozen=True)
class Train(Command[Finished]):
    """Train to the end, and save into `folder`; the chief tells `saved` as well."""

    steps_per_call: int
    folder: str


@dataclass(frozen=True)
class Explain(Command[Explaining]):
    """Once training is over, or in a baseline: time steps, or what is left of them where a part is switched off.

    Of "everything", "no input" and "no statistics" as many steps as `Measure` would; of "no step" one call; of "no
    communication" those of `replicas`, for at least `seconds`.
    """

    what: SwitchedOff
    steps_per_call: int
    warmup_steps: int = 0
    steps: int = 0
    replicas: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Leave(Command[Never]):
    """Write a checkpoint as soon as all agree to, tell `left`, and do nothing more. It is heard at once."""


@dataclass(frozen=True)
class Exit(Command[Never]):
    """End with 0."""


COMMANDS: dict[str, type[Command[Any]]] = {made.__name__.lower(): made for made in Command.__subclasses__()}


def from_json(text: str | bytes) -> Command[Told]:
    """The command that `Command.to_json` wrote."""
    values = json.loads(text)
    return plain.made_of(COMMANDS[values.pop("do")], values)

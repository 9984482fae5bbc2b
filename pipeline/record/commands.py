"""What the conductor has processes do: a class a command, written and read here alone.

`answer` is the kind of the event that a process tells when it has done it; nothing answers the others.
"""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

# Which checkpoint training goes on from, see `Build`.
Resume = Literal["last", "back"]
Explained = Literal["everything", "no input", "no statistics", "no step", "no communication"]
# What is broken in the data, by part, as `loaded` tells it, by the rank that found it.
Broken = dict[str, dict[str, list[dict[str, Any]]]]


@dataclass(frozen=True)
class Command:
    """One of those below."""

    answer: ClassVar[str] = ""

    def to_json(self) -> str:
        """The command as JSON text, its name under `do`."""
        return json.dumps({"do": type(self).__name__.lower()} | asdict(self))


@dataclass(frozen=True)
class Load(Command):
    """Make the data, and look for what is broken in it; `folder` is the run's."""

    answer = "loaded"
    folder: str


@dataclass(frozen=True)
class Drop(Command):
    """Leave out what any process has found broken."""

    answer = "loaded"
    broken: Broken


@dataclass(frozen=True)
class Build(Command):
    """Make the model, on data of which each shard has the given number of examples.

    With `resume` "last", training will go on from the last good checkpoint; with "back", later ones are removed. The
    chief then tells `restored` as well.
    """

    answer = "built"
    train_counts: list[int]
    validation_counts: list[int]
    resume: Resume | None = None


@dataclass(frozen=True)
class Size(Command):
    """Tell how large the model is; for that the step is compiled, if it was not yet."""

    answer = "sized"


@dataclass(frozen=True)
class Profile(Command):
    """Before training, time the "model" or the "input" alone: a few steps, or `steps`; or the input's "stages"."""

    answer = "profiling"
    what: Literal["model", "input", "stages"]
    steps: int | None = None


@dataclass(frozen=True)
class Begin(Command):
    """Begin training: from here on steps are those of the training while it lasts, before that for nothing but time."""


@dataclass(frozen=True)
class Calibrate(Command):
    """Trace the step, and time a few: one call of so many, or enough that a call's length can be chosen."""

    answer = "calibrated"
    steps_per_call: int | None


@dataclass(frozen=True)
class Measure(Command):
    """Time at least `steps` steps after `warmup_steps`, in whole calls."""

    answer = "measured"
    repeat: int
    warmup_steps: int
    steps: int
    steps_per_call: int


@dataclass(frozen=True)
class Train(Command):
    """Train to the end, and save into `folder`; the chief tells `saved` as well."""

    answer = "finished"
    steps_per_call: int
    folder: str


@dataclass(frozen=True)
class Explain(Command):
    """Once training is over, or in a baseline: time steps, or what is left of them where a part is switched off.

    Of "everything", "no input" and "no statistics" as many steps as `Measure` would; of "no step" one call; of "no
    communication" those of `replicas`, for at least `seconds`.
    """

    answer = "explaining"
    what: Explained
    steps_per_call: int
    warmup_steps: int = 0
    steps: int = 0
    replicas: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Leave(Command):
    """Write a checkpoint as soon as all agree to, tell `left`, and do nothing more. It is heard at once."""


@dataclass(frozen=True)
class Exit(Command):
    """End with 0."""


COMMANDS = {made.__name__.lower(): made for made in Command.__subclasses__()}


def from_json(text: str | bytes) -> Command:
    """The command that `Command.to_json` wrote."""
    values = json.loads(text)
    made: Command = COMMANDS[values.pop("do")](**values)
    return made

"""Has a field say, beside its definition, what it takes part in, so that nobody keeps lists of fields elsewhere."""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

SAYS, KEY = "part of", "key"


class Part(Enum):
    """What a field of a plan, or of a config, takes part in."""

    # What a run was asked to do: two with the same are the same run, and one can go on where the other was ended.
    # Where it runs, and how it is watched and saved, is not of it.
    IDENTITY = "identity"
    # Which numbers a training computes, whatever devices it is laid over: what a resumed run must keep.
    TRAINING = "training"
    # What decides speed under every strategy alike: speeds of runs that differ in it are not compared.
    COMPARABILITY = "comparability"
    # What the throughput of the one device depends on that a run is compared with.
    BASELINE = "baseline"
    # What the time of a step depends on, beside the numbers that a model of it has: workers, batch, size, links.
    STEP_TIME = "step time"
    # What a prediction is made for, beside what the time of a step depends on.
    PREDICTION = "prediction"
    # What the size of a model depends on.
    SIZE = "size"
    # What MLflow shows as a run's parameters.
    PARAMETER = "parameter"
    # What makes a point of a sweep another one.
    POINT = "point"


def part_of(*parts: Part, key: str | None = None, **how: Any) -> Any:
    """A dataclass field that takes part in `parts`, or in none. `how` is what `dataclasses.field` takes.

    `key` is what a person types to set it, where that is not its group and name.
    """
    return dataclasses.field(metadata={SAYS: frozenset(parts), KEY: key}, **how)


def silent(kind: type) -> list[str]:
    """The fields of a dataclass that do not say what they take part in.

    >>> @dataclasses.dataclass
    ... class Batch:
    ...     size: int = part_of(Part.IDENTITY)
    ...     color: str
    >>> silent(Batch)
    ['color']
    """
    return [field.name for field in dataclasses.fields(kind) if SAYS not in field.metadata]


def fields_of(kind: type, part: Part) -> tuple[str, ...]:
    """The fields of a dataclass that take part in something, in the order of their definitions."""
    return tuple(field.name for field in dataclasses.fields(kind) if part in field.metadata.get(SAYS, ()))


def key_of(kind: type, name: str, group: str) -> str:
    """What a person types to set a field of a dataclass: `group` and its name, unless it says otherwise."""
    said = {field.name: field.metadata.get(KEY) for field in dataclasses.fields(kind)}
    return said[name] or f"{group}.{name}"


def facts(kind: type, part: Part, values: Mapping[str, Any]) -> dict[str, Any]:
    """Of the values of a dataclass as JSON has them, those that take part in something.

    What an earlier version did not write has its default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    known = {name: values.get(name, defaults[name]) for name in fields_of(kind, part)}
    return {name: value for name, value in known.items() if value is not dataclasses.MISSING}


def asked(config: Any, part: Part, inherited: bool = False) -> dict[str, Any]:
    """Of the values of nested dataclasses, those that take part in something.

    What a field does not say of itself holds for it as for the one that it is in.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        takes_part = part in field.metadata[SAYS] if SAYS in field.metadata else inherited
        if dataclasses.is_dataclass(value):
            inner = asked(value, part, takes_part)
            found |= {field.name: inner} if inner else {}
        elif takes_part:
            found[field.name] = value
    return found

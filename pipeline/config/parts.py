"""Has a field say, beside its definition, what it takes part in, so that nobody keeps lists of fields elsewhere."""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SAYS, KEY, NAME = "part of", "key", "name"

Made = TypeVar("Made", bound="DataclassInstance")
Kind = type["DataclassInstance"]
Field = dataclasses.Field[object]


class Part(Enum):
    """What a field of a plan, or of a config, takes part in."""

    # What a run was asked to do: two with the same are the same run, and one can go on where the other was ended.
    # Where it runs, and how it is watched and saved, is not of it.
    IDENTITY = "identity"
    # Which numbers a training computes, whatever devices it is laid over: what a resumed run must keep.
    TRAINING = "training"
    # What decides speed under every strategy and engine alike: speeds of runs that differ in it are not compared.
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


def part_of(*parts: Part, key: str | None = None, name: str | None = None, **how: object) -> Any:
    """A dataclass field that takes part in `parts`, or in none. `how` is what `dataclasses.field` takes.

    `key` is what a person types to set it, where that is not its group and name; `name` what it is called in files.
    """
    return dataclasses.field(metadata={SAYS: frozenset(parts), KEY: key, NAME: name}, **how)  # type: ignore[call-overload]


@cache
def leaves(kind: Kind) -> dict[str, Field]:
    """The fields of a dataclass and of those in it, by what they are called in files. One that says is taken whole."""
    found: dict[str, Field] = {}
    for field in dataclasses.fields(kind):
        if inner := _inner(field):
            found |= leaves(inner)
        else:
            found[field.metadata.get(NAME) or field.name] = field
    return found


def flat(made: "DataclassInstance", part: Part | None = None) -> dict[str, object]:
    """The values of nested dataclasses by what they are called in files; of those that take part in `part`, if given.

    >>> @dataclasses.dataclass
    ... class Inner:
    ...     size: int = part_of(Part.IDENTITY, name="inner_size")
    >>> @dataclasses.dataclass
    ... class Outer:
    ...     inner: Inner
    ...     notes: str = part_of()
    >>> flat(Outer(Inner(3), "none")), flat(Outer(Inner(3), "none"), Part.IDENTITY)
    ({'inner_size': 3, 'notes': 'none'}, {'inner_size': 3})
    >>> unflat(Outer, {"inner_size": 3, "notes": "none", "version": 2})
    Outer(inner=Inner(size=3), notes='none')
    """
    found: dict[str, object] = {}
    for field in dataclasses.fields(made):
        value = getattr(made, field.name)
        if SAYS not in field.metadata and dataclasses.is_dataclass(value) and not isinstance(value, type):
            found |= flat(value, part)
        elif part is None or part in field.metadata.get(SAYS, ()):
            found[field.metadata.get(NAME) or field.name] = value
    return found


def unflat(kind: type[Made], values: Mapping[str, object]) -> Made:
    """The nested dataclasses that `flat` took apart. What `values` lack has its default; what nobody knows is left."""
    given: dict[str, object] = {}
    for field in dataclasses.fields(kind):
        name = field.metadata.get(NAME) or field.name
        if inner := _inner(field):
            given[field.name] = unflat(inner, values)
        elif name in values:
            given[field.name] = values[name]
    return kind(**given)


def _inner(field: Field) -> "Kind | None":
    """The dataclass that a field holds, where it is not taken whole."""
    kind = field.type
    return kind if SAYS not in field.metadata and isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def fields_of(kind: Kind, part: Part) -> tuple[str, ...]:
    """What those fields are called in files that take part in something, in the order of their definitions."""
    return tuple(name for name, field in leaves(kind).items() if part in field.metadata.get(SAYS, ()))


def key_of(kind: Kind, name: str, group: str) -> str:
    """What a person types to set a field: `group` and its name, unless it says otherwise."""
    return leaves(kind)[name].metadata.get(KEY) or f"{group}.{name}"


def facts(kind: Kind, part: Part, values: Mapping[str, object]) -> dict[str, object]:
    """Of values as `flat` makes them, those that take part in something.

    What an earlier version did not write has its default.
    """
    defaults = {name: field.default for name, field in leaves(kind).items()}
    known = {name: values.get(name, defaults[name]) for name in fields_of(kind, part)}
    return {name: value for name, value in known.items() if value is not dataclasses.MISSING}


def asked(config: "DataclassInstance", part: Part, inherited: bool = False) -> dict[str, object]:
    """Of the values of nested dataclasses, those that take part in something.

    What a field does not say of itself holds for it as for the one that it is in.
    """
    found: dict[str, object] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        takes_part = part in field.metadata[SAYS] if SAYS in field.metadata else inherited
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = asked(value, part, takes_part)
            found |= {field.name: inner} if inner else {}
        elif takes_part:
            found[field.name] = value
    return found

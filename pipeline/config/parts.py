"""Marks a field, beside its definition, with what it takes part in, so that no list of fields is kept elsewhere."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SAYS, KEY, NAME, LEAST, USUAL = "part of", "key", "name", "least", "usual"
# The least number above 0.
ABOVE_ZERO = math.ulp(0.0)

Made = TypeVar("Made", bound="DataclassInstance")
Kind = type["DataclassInstance"]
Field = dataclasses.Field[object]


class Part(Enum):
    """The uses that a field of a plan, or of a config, takes part in."""

    # The work of a run: two with the same are the same run, and one can resume the other. Where it runs, and how it is
    # watched and saved, is no part of it.
    IDENTITY = "identity"
    # The numbers that a training computes, on whatever devices: a resumed run must keep them.
    TRAINING = "training"
    # Decides speed under every strategy and engine alike: speeds of runs that differ in it are not compared.
    COMPARABILITY = "comparability"
    # Decides the throughput of the one device that a run is compared with.
    BASELINE = "baseline"
    # Decides the time of a step, beside the numbers of its model: workers, batch, size, links.
    STEP_TIME = "step time"
    # Names a prediction, beside what decides the time of a step.
    PREDICTION = "prediction"
    # Decides the size of a model.
    SIZE = "size"
    # Is one of the run's parameters in MLflow.
    PARAMETER = "parameter"
    # Tells the points of a sweep apart.
    POINT = "point"


def part_of(*parts: Part, key: str | None = None, name: str | None = None, **how: object) -> Any:
    """A dataclass field that takes part in `parts`, or in none. `how` is what `dataclasses.field` takes.

    `key` is typed to set it, if that is not its group and name; `name` is its name in files, if that is another.
    """
    return dataclasses.field(metadata={SAYS: frozenset(parts), KEY: key, NAME: name}, **how)  # type: ignore[call-overload]


def number(
    least: float | None = None,
    default: float | None = None,
    usual: float | None = None,
    parts: Sequence[Part] | None = None,
) -> Any:
    """A dataclass field of a number of at least `least`; `usual` is one to type where the default is null.

    Without `parts` it takes part in what its container does.
    """
    marks: dict[str, object] = {} if parts is None else {SAYS: frozenset(parts)}
    return dataclasses.field(default=default, metadata={LEAST: least, USUAL: usual} | marks)


@cache
def places(kind: Kind, prefix: str = "") -> dict[str, Field]:
    """The fields of a dataclass and of those in it, by their dotted keys; one that holds fields comes before these."""
    fields: dict[str, Field] = {}
    for field in dataclasses.fields(kind):
        fields[f"{prefix}{field.name}"] = field
        if isinstance(field.type, type) and dataclasses.is_dataclass(field.type):
            fields |= places(field.type, f"{prefix}{field.name}.")
    return fields


@cache
def leaves(kind: Kind) -> dict[str, Field]:
    """The fields of a dataclass and of those in it, by their names in files. A marked one is taken whole."""
    fields: dict[str, Field] = {}
    for field in dataclasses.fields(kind):
        if inner := _inner(field):
            fields |= leaves(inner)
        else:
            fields[field.metadata.get(NAME) or field.name] = field
    return fields


def flat(nested: "DataclassInstance", part: Part | None = None) -> dict[str, object]:
    """The values of nested dataclasses by their names in files; with `part`, those that take part in it.

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
    values: dict[str, object] = {}
    for field in dataclasses.fields(nested):
        value = getattr(nested, field.name)
        if SAYS not in field.metadata and dataclasses.is_dataclass(value) and not isinstance(value, type):
            values |= flat(value, part)
        elif part is None or part in field.metadata.get(SAYS, ()):
            values[field.metadata.get(NAME) or field.name] = value
    return values


def unflat(kind: type[Made], values: Mapping[str, object]) -> Made:
    """The nested dataclasses that `flat` took apart. Missing values have their defaults; unknown ones are ignored."""
    arguments: dict[str, object] = {}
    for field in dataclasses.fields(kind):
        name = field.metadata.get(NAME) or field.name
        if inner := _inner(field):
            arguments[field.name] = unflat(inner, values)
        elif name in values:
            arguments[field.name] = values[name]
    return kind(**arguments)


def _inner(field: Field) -> "Kind | None":
    kind = field.type
    return kind if SAYS not in field.metadata and isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


def fields_of(kind: Kind, part: Part) -> tuple[str, ...]:
    """The names in files of the fields that take part in something, in the order of their definitions."""
    return tuple(name for name, field in leaves(kind).items() if part in field.metadata.get(SAYS, ()))


def key_of(kind: Kind, name: str, group: str) -> str:
    """The key that sets a field: `group` and its name, unless it has one of its own."""
    return leaves(kind)[name].metadata.get(KEY) or f"{group}.{name}"


def facts(kind: Kind, part: Part, values: Mapping[str, object]) -> dict[str, object]:
    """Those of `flat` values that take part in something. A value that an earlier version lacks has its default."""
    present = {name: values.get(name, leaves(kind)[name].default) for name in fields_of(kind, part)}
    return {name: value for name, value in present.items() if value is not dataclasses.MISSING}


def asked(config: "DataclassInstance", part: Part, inherited: bool = False) -> dict[str, object]:
    """The values of nested dataclasses that take part in something. An unmarked field inherits its container's."""
    nested: dict[str, object] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        takes_part = part in field.metadata[SAYS] if SAYS in field.metadata else inherited
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            inner = asked(value, part, takes_part)
            nested |= {field.name: inner} if inner else {}
        elif takes_part:
            # As a text that does not change where a value is written otherwise.
            nested[field.name] = f"{type(value).__name__}.{value.name}" if isinstance(value, Enum) else value
    return nested

"""Marks a field, beside its definition, with what it takes part in, so that no list of fields is kept elsewhere."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SAYS, KEY, NAME, LEAST, USUAL = "part of", "key", "name", "least", "usual"
# The least number above 0.
ABOVE_ZERO = math.ulp(0.0)

T = TypeVar("T")
Made = TypeVar("Made", bound="DataclassInstance")
Kind = type["DataclassInstance"]
Field = dataclasses.Field[object]
_ONE_AT_A_TIME = Lock()


def typed(values: object, kind: type[T]) -> T:
    """A value of a type from JSON's. In one thread at a time: msgspec crashes where two are the first to use a type."""
    with _ONE_AT_A_TIME:
        return msgspec.convert(values, kind)


class Part(Enum):
    """The uses that a field of a plan, or of a config, takes part in."""

    # The work of a run, by which another one resumes it; not where it runs, nor how it is watched and saved.
    IDENTITY = "identity"
    TRAINING = "training"  # the numbers that a training computes, on whatever devices: a resumed run keeps them
    COMPARABILITY = "comparability"  # speed under every strategy and engine alike: what differs is not compared
    BASELINE = "baseline"  # the throughput of the one device that a run is compared with
    STEP_TIME = "step time"  # the time of a step, beside its model's numbers: workers, batch, size, links
    PREDICTION = "prediction"  # names a prediction, beside what decides the time of a step
    SIZE = "size"  # the size of a model
    PARAMETER = "parameter"  # one of the run's parameters in MLflow
    POINT = "point"  # tells the points of a sweep apart


def part_of(*parts: Part, key: str | None = None, name: str | None = None, **how: object) -> Any:
    """A dataclass field that takes part in `parts`, set by another `key` than its group's, named otherwise in files."""
    return dataclasses.field(metadata={SAYS: frozenset(parts), KEY: key, NAME: name}, **how)  # type: ignore[call-overload]


def number(
    least: float | None = None,
    default: float | None = None,
    usual: float | None = None,
    parts: Sequence[Part] | None = None,
) -> Any:
    """A dataclass field of a number of at least `least`; `usual` is one to type where the default is null."""
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


def _inner(field: Field) -> "Kind | None":
    """The dataclass that a field holds; None for a value, and for a marked field, which is taken whole."""
    kind = field.type
    return kind if SAYS not in field.metadata and isinstance(kind, type) and dataclasses.is_dataclass(kind) else None


@cache
def leaves(kind: Kind, part: Part | None = None) -> dict[str, Field]:
    """The fields of a dataclass and of those in it, by their names in files; those that take part in `part`, if any."""
    fields: dict[str, Field] = {}
    for field in dataclasses.fields(kind):
        if inner := _inner(field):
            fields |= leaves(inner, part)
        elif part is None or part in field.metadata.get(SAYS, ()):
            fields[field.metadata.get(NAME) or field.name] = field
    return fields


def flat(nested: "DataclassInstance", part: Part | None = None) -> dict[str, object]:
    """The values of nested dataclasses by their names in files; with `part`, those that take part in it."""
    values: dict[str, object] = {}
    for field in dataclasses.fields(nested):
        value = getattr(nested, field.name)
        values |= flat(value, part) if _inner(field) else {field.metadata.get(NAME) or field.name: value}
    return {name: values[name] for name in leaves(type(nested), part)}


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

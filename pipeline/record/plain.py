"""Turns dataclasses into plain values, those that JSON has, and plain values back into dataclasses, by their types.

A dataclass becomes an object with its fields as keys, a named tuple a list. Numbers that JSON lacks (NaN, infinity)
become null. Where a number is expected, null is read as NaN; so is, among numbers by name such as metrics, whatever is
none: an odd one does not hide the others.
"""

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeGuard, TypeVar, Union, get_args, get_origin, get_type_hints

Made = TypeVar("Made")
LEFT_OUT = "left out"


class MismatchError(ValueError):
    """A plain value that is not of the type that is expected."""


def if_told() -> Any:
    """A field, None by default, that plain values are without where it is None."""
    return dataclasses.field(default=None, metadata={LEFT_OUT: True})


def to_plain(value: object) -> object:
    """The value as JSON has it.

    >>> to_plain({"loss": float("nan"), "shape": (2, 3)})
    {'loss': None, 'shape': [2, 3]}
    """
    if isinstance(value, Mapping):
        return {key: to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return fields_of(value) if dataclasses.is_dataclass(value) else value


def fields_of(made: object, without: frozenset[str] = frozenset()) -> dict[str, object]:
    """A dataclass's fields as plain values, but for some."""
    found = {
        field.name: (getattr(made, field.name), LEFT_OUT in field.metadata)
        for field in dataclasses.fields(made)  # type: ignore[arg-type]
        if field.name not in without
    }
    return {name: to_plain(value) for name, (value, left_out) in found.items() if not left_out or value is not None}


def made_of(kind: type[Made], values: Mapping[str, object]) -> Made:
    """The dataclass that `fields_of` gave these values of. Raises `MismatchError`.

    What is missing has its default, and what a later version adds is passed over.
    """
    hints = _hints(kind)  # type: ignore[arg-type]
    try:
        return kind(**{name: read(hints[name], value) for name, value in values.items() if name in hints})
    except TypeError as error:
        raise MismatchError(str(error)) from None


def read(kind: object, value: object) -> Any:
    """What `to_plain` made this value of, which was of a type. Raises `MismatchError`.

    >>> read(dict[str, list[float]], {"seconds": [1, None]})
    {'seconds': [1.0, nan]}
    """
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _one_of(inner, value)
    if origin is list and isinstance(value, list):
        return [read(inner[0], item) for item in value]
    if kind == dict[str, float] and isinstance(value, Mapping):
        return {str(key): _as_float(item) if _is_number(item) else math.nan for key, item in value.items()}
    if origin is dict and isinstance(value, Mapping):
        return {read(inner[0], key): read(inner[1], item) for key, item in value.items()}
    if kind is float and value is None:
        return math.nan
    if kind is float and _is_number(value):
        return _as_float(value)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return made_of(kind, value)
    if isinstance(kind, type) and issubclass(kind, tuple) and isinstance(value, list):
        return _named_tuple(kind, value)
    if kind in (object, Any) or kind is type(value) or (origin is Literal and value in inner):
        return value
    raise MismatchError(f"Expected {kind}, received {value!r:.80}.")


def _one_of(kinds: tuple[object, ...], value: object) -> Any:
    if value is None and NoneType in kinds:
        return None
    for kind in kinds:
        try:
            return read(kind, value)
        except MismatchError as error:
            problem = error
    raise problem


def _named_tuple(kind: type[tuple[object, ...]], values: list[object]) -> tuple[object, ...]:
    hints = _hints(kind)
    if len(hints) != len(values):
        raise MismatchError(f"Expected {', '.join(hints)}, received {len(values)} values.")
    return kind(*(read(hint, value) for hint, value in zip(hints.values(), values, strict=True)))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        # As JSON's 1e400 is read.
        return math.inf if value > 0 else -math.inf


@cache
def _hints(kind: Any) -> dict[str, object]:
    """The types of a class's fields, by name, without what belongs to the class itself."""
    names = kind._fields if issubclass(kind, tuple) else [field.name for field in dataclasses.fields(kind)]
    hints = get_type_hints(kind)
    return {name: hints[name] for name in names}

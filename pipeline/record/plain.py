"""Turns dataclasses into plain values, those that JSON has, and plain values back into dataclasses, by their types.

A dataclass becomes an object with its fields as keys, a named tuple a list. Numbers that JSON lacks (NaN, infinity)
become null. Where a number is expected, null is read as NaN; so is, among numbers by name such as metrics, whatever is
none: an odd one does not hide the others.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import cache, partial
from numbers import Integral, Real
from pathlib import PurePath
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Made = TypeVar("Made")
Read = Callable[[object], Any]
LEFT_OUT = "left out"


class MismatchError(ValueError):
    """A plain value that is not of the type that is expected."""


def if_told() -> Any:
    """A field, None by default, that plain values are without where it is None."""
    return dataclasses.field(default=None, metadata={LEFT_OUT: True})


def to_plain(value: object) -> object:
    """The value as JSON has it: a path as its text, one of an enumeration as its value, NumPy's numbers as Python's.

    Raises `TypeError` for what is none of these.

    >>> to_plain({"loss": float("nan"), "shape": (2, 3), "folder": PurePath("outputs")})
    {'loss': None, 'shape': [2, 3], 'folder': 'outputs'}
    """
    if value is None or type(value) in (str, int, bool):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    if dataclasses.is_dataclass(value):
        return fields_of(value)
    if isinstance(value, Enum):
        return to_plain(value.value)
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else to_plain(float(value))
    raise TypeError(f"Expected a value that JSON has, received {value!r:.80}, a {type(value).__name__}.")


def fields_of(made: object, without: frozenset[str] = frozenset()) -> dict[str, object]:
    """A dataclass's fields as plain values, but for some."""
    values = [(name, getattr(made, name), left_out) for name, left_out in _fields(made) if name not in without]
    return {name: to_plain(value) for name, value, left_out in values if not left_out or value is not None}


def made_of(kind: Callable[..., Made], values: Mapping[str, object]) -> Made:
    """The dataclass that `fields_of` gave these values of. Raises `MismatchError`.

    What is missing has its default, and what a later version adds is passed over.
    """
    made: Made = _reader(kind)(dict(values))
    return made


def read(kind: object, value: object) -> Any:
    """What `to_plain` made this value of, which was of a type. Raises `MismatchError`.

    >>> read(dict[str, list[float]], {"seconds": [1, None]})
    {'seconds': [1.0, nan]}
    """
    return _reader(kind)(value)


@cache
def _reader(kind: Any) -> Read:
    """What reads a value of a type: found once, since a run tells hundreds of events a second."""
    origin, given = get_origin(kind), get_args(kind)
    inner = [] if origin is Literal else [_reader(one) for one in given if one is not Ellipsis]
    if kind in (object, Any):
        return lambda value: value
    if kind is float:
        return _number
    if kind == dict[str, float]:
        return lambda value: {name: _as_float(item) for name, item in _expect(dict, value).items()}
    if origin in (Union, UnionType):
        return partial(_one_of, NoneType in given, inner)
    if origin is Literal:
        return partial(_choice, given)
    if origin is list:
        return lambda value: [inner[0](item) for item in _expect(list, value)]
    if origin is dict:
        return lambda value: {inner[0](key): inner[1](item) for key, item in _expect(dict, value).items()}
    if origin is tuple:
        return lambda value: tuple(inner[0](item) for item in _expect(list, value))
    if issubclass(kind, tuple):
        return partial(_named_tuple, kind, [_reader(hint) for hint in _hints(kind, kind._fields)])
    if hasattr(kind, "__dataclass_fields__"):
        names = [name for name, _ in _fields(kind)]
        return partial(_dataclass, kind, dict(zip(names, map(_reader, _hints(kind, names)), strict=True)))
    return partial(_exactly, kind)


def _dataclass(kind: Callable[..., object], readers: Mapping[str, Read], values: object) -> object:
    given = _expect(dict, values)
    try:
        return kind(**{name: readers[name](value) for name, value in given.items() if name in readers})
    except TypeError as error:
        raise MismatchError(str(error)) from None


def _named_tuple(kind: Callable[..., object], readers: Sequence[Read], values: object) -> object:
    given = _expect(list, values)
    if len(given) != len(readers):
        raise MismatchError(f"Expected {len(readers)} values, received {len(given)}.")
    return kind(*(reader(value) for reader, value in zip(readers, given, strict=True)))


def _one_of(optional: bool, readers: Sequence[Read], value: object) -> object:
    if value is None and optional:
        return None
    for reader in readers:
        with suppress(MismatchError):
            return reader(value)
    raise MismatchError(f"Expected one of several types, received {value!r:.80}.")


def _choice(choices: Sequence[object], value: object) -> object:
    if value not in choices:
        raise MismatchError(f"Expected one of {choices}, received {value!r:.80}.")
    return value


def _exactly(kind: type, value: object) -> object:
    # True is no whole number.
    if type(value) is not kind:
        raise MismatchError(f"Expected {kind.__name__}, received {value!r:.80}.")
    return value


def _expect(kind: type[Made], value: object) -> Made:
    if not isinstance(value, kind):
        raise MismatchError(f"Expected {kind.__name__}, received {value!r:.80}.")
    return value


def _number(value: object) -> float:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise MismatchError(f"Expected a number, received {value!r:.80}.")
    return _as_float(value)


def _as_float(value: object) -> float:
    """A number; NaN where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        # As JSON's 1e400 is read.
        return math.inf if value > 0 else -math.inf


def _fields(made: object) -> list[tuple[str, bool]]:
    """The fields of a dataclass, or of one: the name, and is it left out where it is None?"""
    return [(field.name, LEFT_OUT in field.metadata) for field in dataclasses.fields(made)]  # type: ignore[arg-type]


def _hints(kind: Any, names: Sequence[str]) -> list[object]:
    hints = get_type_hints(kind)
    return [hints[name] for name in names]

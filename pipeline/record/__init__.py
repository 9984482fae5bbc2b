"""Turns typed values (dataclasses, Structs, named tuples) into JSON and back, by msgspec.

JSON has no NaN and no infinity: both become null, and null is read as NaN where a number is expected.
"""

import json
import math
from numbers import Integral, Real
from pathlib import PurePath
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from pipeline.config.parts import typed

T = TypeVar("T")
# JSON that is not of the type that is expected.
MismatchError = msgspec.ValidationError


def to_json(value: object) -> bytes:
    """The value as JSON: a path as its text, NumPy's numbers as Python's. Raises `TypeError` for what JSON lacks.

    >>> to_json({"loss": float("nan"), "shape": (2, 3), "folder": PurePath("outputs")})
    b'{"loss":null,"shape":[2,3],"folder":"outputs"}'
    """
    try:
        return _ENCODER.encode(value)
    except UnicodeEncodeError:
        # A path may hold bytes that no encoding has, which only Python's own JSON escapes.
        return json.dumps(msgspec.to_builtins(value, enc_hook=_plain)).encode()


def to_plain(value: object) -> Any:
    """The value as JSON has it, in Python's lists and dictionaries."""
    return json.loads(to_json(value))


def from_plain(kind: type[T], values: object) -> T:
    """The value of a type that `to_plain` took apart. Raises `MismatchError`.

    >>> from_plain(dict[str, list[float]], {"seconds": [1, None]})
    {'seconds': [1.0, nan]}
    """
    try:
        return typed(values, kind)
    except MismatchError:
        return typed(_with_nan(kind, values), kind)


def _with_nan(kind: Any, value: Any) -> Any:
    """The value with NaN for each null where the type expects a number, and for all that is odd among named numbers."""
    inner = get_args(kind)
    if kind is float:
        if type(value) is int and abs(value) > 1e308:
            # No float holds it: JSON's 1e400 is infinity as well.
            return math.inf if value > 0 else -math.inf
        return math.nan if value is None else value
    if isinstance(kind, UnionType):
        return None if value is None else _with_nan(inner[0], value)
    if isinstance(value, list) and get_origin(kind) in (list, tuple):
        return [_with_nan(inner[0], item) for item in value]
    if isinstance(value, dict) and get_origin(kind) is dict:
        items = {name: _with_nan(inner[1], item) for name, item in value.items()}
        odd = {name: math.nan for name, item in items.items() if type(item) not in (int, float)}
        return items | odd if inner[1] is float else items
    if isinstance(value, dict) and hasattr(kind, "__annotations__"):
        hints = get_type_hints(kind)
        return {name: _with_nan(hints[name], item) for name, item in value.items() if name in hints}
    return value


def _plain(value: object) -> object:
    """The JSON value of a type that msgspec does not know."""
    if isinstance(value, str | PurePath):
        return str(value)
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise TypeError(f"Expected a value that JSON has, received {value!r:.80}, a {type(value).__name__}.")


_ENCODER = msgspec.json.Encoder(enc_hook=_plain)

"""Takes values of JSON as the types that they are to have; what is odd is taken for unknown, never for an error."""

import dataclasses
import math
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

# A number that may be infinite, or none at all: what a training that diverged came to.
Loss = Annotated[float, "not always finite"]


def read_as(kind: Any, value: object) -> Any:
    """`value` as `kind`, a type of a dataclass's field or a dataclass; None where it is no such thing.

    Of a sequence or a mapping, what is odd in it is left out.

    >>> read_as(int | None, 2.0), read_as(float | None, "?"), read_as(bool, 1), read_as(tuple[str, ...], ["a", None])
    (2, None, None, ('a',))
    """
    if kind is object:
        return value
    if get_origin(kind) in (UnionType, Union):
        parts = (read_as(part, value) for part in get_args(kind) if part is not NoneType)
        return next((part for part in parts if part is not None), None)
    if dataclasses.is_dataclass(kind):
        return _made(kind, value)
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list | tuple) else ()
        return tuple(read for item in items if (read := read_as(get_args(kind)[0], item)) is not None)
    if get_origin(kind) is Mapping:
        if not isinstance(value, Mapping):
            return None
        found = {str(name): read_as(get_args(kind)[1], inner) for name, inner in value.items()}
        return {name: inner for name, inner in found.items() if inner is not None or get_args(kind)[1] is object}
    if kind is Loss:
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None
    return _scalar(kind, value)


def _made(kind: Any, value: object) -> Any:
    """The dataclass that a mapping holds the fields of; None where one is missing that has no default."""
    if not isinstance(value, Mapping):
        return None
    given = {
        field.name: read
        for field in dataclasses.fields(kind)
        if field.name in value and (read := read_as(field.type, value[field.name])) is not None
    }
    needed = (
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    return kind(**given) if given.keys() >= set(needed) else None


def _scalar(kind: Any, value: object) -> Any:
    if kind not in (int, float):
        return value if isinstance(value, kind) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value) if kind is int else value

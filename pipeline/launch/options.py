"""Reads `cluster.options` into a dataclass whose fields are the keys that a kind of cluster has."""

import dataclasses
import difflib
import json
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pipeline.config.schema import ClusterConfig
from pipeline.launch.errors import LaunchError
from pipeline.record import plain

Made = TypeVar("Made")
WORDS = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    NoneType: "null",
}


def options_of(config: ClusterConfig, kind: Callable[[], Made]) -> Made:
    """The options of a config; one that is not given has its field's default. Raises `LaunchError`.

    >>> @dataclasses.dataclass
    ... class Options:
    ...     timeout: float = 60.0
    >>> options_of(ClusterConfig("mine", options={"timeout": 5}), Options)
    Options(timeout=5.0)
    >>> options_of(ClusterConfig("mine", options={"timeout": "soon"}), Options)
    Traceback (most recent call last):
    pipeline.launch.errors.LaunchError: Expected cluster.options.timeout to be a number, received soon. \
Try cluster.options.timeout=60.0.
    """
    usual: Any = kind()
    names = [field.name for field in dataclasses.fields(usual)]
    for key, value in config.options.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, 1) or names[:1]
            raise LaunchError(
                f"an option of cluster={config.name} ({', '.join(names)})",
                key,
                f"cluster.options.{near[0]}, as in conf/cluster/{config.name}.yaml",
            )
        try:
            plain.made_of(kind, {key: value})
        except plain.MismatchError:
            default = json.dumps(getattr(usual, key)).replace('"', "")
            raise LaunchError(
                f"cluster.options.{key} to be {_words(get_type_hints(type(usual))[key])}",
                value,
                f"cluster.options.{key}={default}",
            ) from None
    return plain.made_of(kind, config.options)


def _words(hint: Any) -> str:
    """What a value of a type is, in words.

    >>> _words(float | None), _words(list[str])
    ('a number or null', 'a list')
    """
    if isinstance(hint, UnionType):
        return " or ".join(map(_words, get_args(hint)))
    return WORDS.get(get_origin(hint) or hint, "keys with values")

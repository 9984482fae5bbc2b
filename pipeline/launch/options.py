"""Reads `cluster.options` into a dataclass whose fields are the keys that a kind of cluster has, with their limits."""

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from pipeline.config.schema import ClusterConfig
from pipeline.launch import LaunchError

Kind = TypeVar("Kind")
WORDS = {
    float: "a number",
    int: "a whole number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    NoneType: "null",
}


def option(expected: str, example: str, pattern: str | None = None, **limits: Any) -> Meta:
    """The limits of an option's values, which `expected` says in words; `example` is a value to type.

    `pattern` is one of the whole text; `limits` are those of `msgspec.Meta`.
    """
    whole = None if pattern is None else rf"^(?:{pattern})\Z"
    return Meta(description=expected, examples=[example], pattern=whole, **limits)


def options_of(config: ClusterConfig, kind: Callable[[], Kind]) -> Kind:
    """The options of a config, the others with their defaults. Raises `LaunchError` for the first that is wrong.

    >>> @dataclasses.dataclass
    ... class Waits:
    ...     timeout: float = 60.0
    ...     hosts: Annotated[int, option("1 or more hosts", "2", ge=1)] = 1
    >>> options_of(ClusterConfig("mine", options={"timeout": 5}), Waits)
    Waits(timeout=5.0, hosts=1)
    >>> options_of(ClusterConfig("mine", options={"timeout": "soon"}), Waits)
    Traceback (most recent call last):
    pipeline.launch.LaunchError: Expected cluster.options.timeout to be a number, received soon. \
Try cluster.options.timeout=60.0.
    >>> options_of(ClusterConfig("mine", options={"hosts": 0}), Waits)
    Traceback (most recent call last):
    pipeline.launch.LaunchError: Expected cluster.options.hosts to be 1 or more hosts, received 0. \
Try cluster.options.hosts=2.
    """
    defaults: Any = kind()
    names = [field.name for field in dataclasses.fields(defaults)]
    for key, value in config.options.items():
        if key not in names:
            near = difflib.get_close_matches(key, names, 1) or names[:1]
            raise LaunchError(
                f"an option of cluster={config.name} ({', '.join(names)})",
                key,
                f"cluster.options.{near[0]}, as in conf/cluster/{config.name}.yaml",
            )
        try:
            _convert({key: value}, kind)
        except msgspec.ValidationError:
            expected, example = _words(get_type_hints(type(defaults), include_extras=True)[key])
            example = example or json.dumps(getattr(defaults, key)).replace('"', "")
            raise LaunchError(
                f"cluster.options.{key} to be {expected}", _shown(value), f"cluster.options.{key}={example}"
            ) from None
    return _convert(config.options, kind)


def _convert(values: Mapping[str, object], kind: Callable[[], Kind]) -> Kind:
    options: Kind = msgspec.convert(values, kind)  # type: ignore[arg-type]
    return options


def _words(hint: Any) -> tuple[str, str]:
    """What a value of a type is, in words, and an example where the type has one.

    >>> _words(float | None), _words(list[str]), _words(Annotated[int, option("1 or more", "2", ge=1)] | None)
    (('a number or null', ''), ('a list', ''), ('1 or more', '2'))
    """
    if get_origin(hint) is Annotated:
        limits = hint.__metadata__[0]
        return (limits.description, limits.examples[0]) if limits.examples else _words(hint.__origin__)
    if get_origin(hint) in (UnionType, Union):
        parts = [_words(part) for part in get_args(hint)]
        with_example = [part for part in parts if part[1]]
        return with_example[0] if with_example else (" or ".join(words for words, _ in parts), "")
    return WORDS.get(get_origin(hint) or hint, "keys with values"), ""


def _shown(value: object) -> str:
    if value in ("", None):
        return "nothing"
    return str(value) if str(value).isprintable() else repr(value)

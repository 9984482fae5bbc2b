"""Turns YAML and the command line into a typed config, and a composition error into one clear message."""

import dataclasses
import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)

from pipeline.schema import Config

SCHEMA = "schema"


class ConfigError(ValueError):
    """A config that is not what the schema allows: the message says what was expected, received and what to type."""


def folder() -> Path:
    """Where the choices are: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).resolve().parent
    inside = here / "conf"
    return inside if inside.is_dir() else here.parent / "conf"


def register() -> None:
    """Makes the schema known to Hydra, which then checks every key and type while composing."""
    ConfigStore.instance().store(name=SCHEMA, node=Config)


def typed(composed: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """The composed config as plain objects, checked once more: `+key=value` gets past Hydra. Raises `ConfigError`.

    Where `overrides` name another function for a choice, as in `model.build._target_=my_package.my_model`, the
    choice's own arguments, facts and name do not hold for it and are left behind.
    """
    try:
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        assert isinstance(plain, dict)
        for group in ("strategy", "model", "data"):
            _leave_behind(plain[group], _typed_in(group, overrides))
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, Config)
    return config


def _typed_in(group: str, overrides: Sequence[str]) -> set[str]:
    """The keys under `group` that a person typed, dotted and without the group.

    >>> sorted(_typed_in("model", ["model.build._target_=a.b", "+model.build.width=3", "train.epochs=1"]))
    ['build._target_', 'build.width']
    """
    found: set[str] = set()
    for each in OverridesParser.create().parse_overrides(list(overrides)):
        if each.key_or_group.startswith(f"{group}.") and not each.is_delete():
            key, value = each.key_or_group.removeprefix(f"{group}."), each.value()
            found |= {f"{key}.{inner}" for inner in value} if isinstance(value, dict) else {key}
    return found


def _leave_behind(choice: dict[str, Any], kept: set[str]) -> None:
    target = choice.get("build", {}).get("_target_")
    if "build._target_" not in kept:
        return
    choice["build"] = {
        key: value for key, value in choice["build"].items() if key == "_target_" or f"build.{key}" in kept
    }
    facts = ("num_classes", "input_shape", "train_examples", "validation_examples")
    choice |= {fact: None for fact in facts if fact in choice and fact not in kept}
    if "name" not in kept:
        choice["name"] = str(target).rpartition(".")[2]


def explain(error: Exception) -> str:
    """What is wrong with a config, in words for the person who typed it."""
    cause = next((each for each in _chain(error) if isinstance(each, OmegaConfBaseException)), error)
    if isinstance(error, MissingConfigException):
        return _missing_choice(error)
    if isinstance(error, OverrideParseException):
        return f"Expected key=value or group=choice, received {error.override!r}. Try quoting it: '{error.override}'."
    if isinstance(cause, ConfigKeyError) or "not in struct" in str(error):
        return _unknown_key(str(error) if cause is error else f"{error}\n{cause}")
    if isinstance(cause, ValidationError):
        return _wrong_type(cause)
    if isinstance(cause, MissingMandatoryValue):
        key = getattr(cause, "full_key", None) or _first(r"Missing mandatory value: ([\w.]+)", str(cause))
        return f"Expected a value for {key}, received none. Try {key}=..."
    if isinstance(cause, InterpolationKeyError | InterpolationResolutionError):
        return f"Expected {cause.full_key} to refer to a key that exists, received: {_line(cause)}."
    text = _line(error)
    override = _first(r"Could not override '([^']+)'", text)
    if override:
        return _unknown_key(text)
    return text.rstrip(".") + ". Try `python -m pipeline --help` for the choices."


def is_ours(error: Exception) -> bool:
    """Is this what Hydra or OmegaConf raise for a config that cannot be composed?"""
    return isinstance(error, HydraException | OmegaConfBaseException)


def keys(node: Any = Config, prefix: str = "") -> Iterator[str]:
    """Every key of the schema, dotted."""
    for each in dataclasses.fields(node):
        default = each.default_factory if each.default_factory is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(default):
            yield from keys(default, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}"


def _missing_choice(error: MissingConfigException) -> str:
    text = str(error)
    name = error.missing_cfg_file or ""
    options = list(error.options or [])
    group, _, choice = name.rpartition("/")
    if not options or not group:
        return _line(error) + " Try `python -m pipeline --help` for the choices."
    near = (difflib.get_close_matches(choice, options, 1) or sorted(options))[0]
    del text
    return f"Expected {group} to be one of {', '.join(sorted(options))}, received {choice}. Try {group}={near}."


def _unknown_key(text: str) -> str:
    key = (
        _first(r"full_key: ([\w.\[\]]+)", text)
        or _first(r"Could not override '([^']+)'", text)
        or _first(r"Key '([^']+)'", text)
        or "a key"
    )
    near = difflib.get_close_matches(key, list(keys()), 1, 0.5)
    group = key.rpartition(".")[0]
    known = [each.rpartition(".")[2] for each in keys() if each.rpartition(".")[0] == group]
    there = f"a key of {group or 'the config'} ({', '.join(known)})" if known else "a key of the config"
    tail = f"Try {near[0]}." if near else "Try `python -m pipeline --help` for every key."
    return f"Expected {there}, received {key}. {tail}"


def _wrong_type(error: ValidationError) -> str:
    text = _line(error)
    key = getattr(error, "full_key", None) or _first(r"full_key: ([\w.\[\]]+)", str(error)) or "the value"
    wanted, received = _wanted(text), _received(text)
    return f"Expected {key} to be {wanted}, received {received}. Try `python -m pipeline --help` for its default."


def _wanted(text: str) -> str:
    options = _first(r"expected one of \[([^\]]+)\]", text)
    if options:
        return f"one of {options}"
    kind = _first(r"could not be converted to (\w+)", text) or _first(r"is not a subclass of (\w+)", text)
    names = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false", "String": "text"}
    if "is not Optional" in text or "is not optional" in text.lower():
        return "a value"
    return names.get(kind or "", f"of its type ({kind or text})")


def _received(text: str) -> str:
    return _first(r"[Vv]alue '([^']*)'", text) or ("null" if "None" in text else "something else")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found.group(1) if found else None


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

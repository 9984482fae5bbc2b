"""What is wrong with a config, in words: what was expected, what was received, what to type instead."""

import dataclasses
import difflib
import enum
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigKeyError,
    ConfigTypeError,
    InterpolationKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import MarkedYAMLError, YAMLError  # type: ignore[import-untyped]

from pipeline.config.errors import ConfigError
from pipeline.config.hydra_node import ALONE, not_alone
from pipeline.config.schema import Config

LISTS = (list[int], list[str])


# Hosts, where there are several, and the devices of each: 8gpu, 2x8gpu.
LAYOUT = re.compile(r"(?:([1-9]\d{0,4})x)?([1-9]\d{0,3})(cpu|gpu)$")


HELP = "Try `python -m pipeline --help` for the choices and keys."


PREPARE_HELP = "Try `python -m pipeline prepare --help` for the choices and keys."


def explain(error: Exception, schema: type = Config) -> str:
    """What is wrong with a config of a schema, in words for the person who typed it."""
    words = _explained(error, schema)
    return words if schema is Config else words.replace(HELP, PREPARE_HELP)


def _explained(error: Exception, schema: type) -> str:
    text = str(error)
    if isinstance(error, ConfigError):
        return text
    cause = next((each for each in _chain(error) if isinstance(each, OmegaConfBaseException)), error)
    missing = _first(r"Missing mandatory value: ([\w.]+)", f"{text} {cause}")
    if isinstance(error, YAMLError | UnicodeDecodeError):
        return _broken_yaml(error)
    if isinstance(error, MissingConfigException):
        return _missing_choice(error)
    if isinstance(error, OverrideParseException):
        return f"Expected key=value or group=choice, received {error.override}. Try {_repaired(error.override)}."
    if missing:
        full = getattr(cause, "full_key", None) or missing
        return _missing_value(full if full.endswith(missing) else missing)
    if isinstance(cause, ConfigKeyError) or "Could not override" in text:
        return _unknown_key(text if cause is error else f"{text}\n{cause}", schema)
    if isinstance(cause, ValidationError | ConfigTypeError):
        return _wrong_type(cause, text, schema)
    if isinstance(cause, InterpolationKeyError | InterpolationResolutionError):
        return _dangling(str(cause.full_key), _line(cause))
    why = "" if cause is error else f": {_line(cause)}"
    return _composition(text) or f"{_line(error).rstrip('.')}{why}. {HELP}"


def _dangling(key: str, why: str) -> str:
    """What is wrong with a value that refers to one that is not there.

    >>> _dangling("model.build.categories", "Interpolation key 'data.build.categories' not found")[-64:]
    'Try model.build.categories=..., or a choice of data that has it.'
    """
    group = _first(r"'(\w+)\.[\w.]+' not found", why)
    other = f", or a choice of {group} that has it" if group and group != key.split(".")[0] else ""
    return f"Expected {key} to refer to a value that exists, received: {why}. Try {key}=...{other}."


def is_ours(error: Exception) -> bool:
    """Is this what is raised for a config that cannot be composed? Hydra raises `ValueError`, too, and YAML its own."""
    if isinstance(error, ConfigError | HydraException | OmegaConfBaseException | YAMLError | UnicodeDecodeError):
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return isinstance(error, ValueError) and raised_in.startswith("hydra.")


def keys(node: Any = Config, prefix: str = "") -> Iterator[str]:
    """Every key of the schema, dotted."""
    for field in dataclasses.fields(node):
        default = field.default_factory if field.default_factory is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(default):
            yield from keys(default, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}"


def _missing_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or [])
    if group in [f"hydra/{name}" for name in ALONE]:
        return not_alone(group.removeprefix("hydra/"), choice)
    if not group:
        return f"Expected --config-name to be a config of this program, received {choice}. Try it without that option."
    if not options:
        return f"{_line(error).rstrip('.')}. {HELP}"
    near = (difflib.get_close_matches(choice, options, 1) or options)[0]
    layouts = ", or a layout such as 3gpu or 2x8gpu" if group == "hardware" else ""
    return f"Expected {group} to be one of {', '.join(options)}{layouts}, received {choice}. Try {group}={near}."


def _missing_value(key: str) -> str:
    group, _, name = key.rpartition(".")
    if name == "name":
        return f"Expected a choice of {group} that has a name, received none. Try {group}=..., or {key}=..."
    return f"Expected a value for {key}, received none. Try {key}=..."


def _broken_yaml(error: Exception) -> str:
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return f"Expected YAML files in UTF-8, received other bytes: {_line(error)}."
    mark = error.problem_mark
    return f"Expected YAML in {mark.name}, received in line {mark.line + 1}: {error.problem or _line(error)}."


def _repaired(override: str) -> str:
    """What was probably meant by an override that is none.

    >>> _repaired("train"), _repaired("train.epochs==3"), _repaired("a=[{b:")
    ('train=...', 'train.epochs=3', 'quotes around the whole of it')
    """
    if "=" not in override:
        return f"{override}=..."
    return override.replace("==", "=") if "==" in override else "quotes around the whole of it"


def _composition(text: str) -> str | None:
    """What Hydra says of an override as a whole, in our words; None for all else."""
    several = _first(r"(?:Ambiguous value for argument|Sweep parameters) '(.+)'", text)
    if several:
        return f"Expected one value, received {several}. Try -m {several} for a run with each."
    twice = _first(r"(\S+) appears more than once in the final defaults list", text) or _first(
        r"Multiple values for (\S+)\. To override", text
    )
    if twice:
        return f"Expected one choice of {twice}, received a second one with +{twice}. Try {twice}=... without the +."
    there = _first(r"already at '.*'\.\s+Either remove \+ prefix: '(.+)'", text)
    if there:
        return f"Expected + only before a key that is not there yet, received +{there}. Try {there}."
    deleted = _first(r"Could not delete from config. '([^']+)'", text)
    if deleted:
        return f"Expected ~ before a key or choice that has a value, received ~{deleted}. Try {deleted}=null."
    nowhere = _first(r"Could not delete '([^']*)'\. No match in the defaults list", text)
    if nowhere is not None:
        return f"Expected ~ before a key or choice that has a value, received ~{nowhere}. {HELP}"
    folder = _first(r"Additional config directory '([^']*)' not found", text)
    if folder is not None:
        return f"Expected --config-dir to be a folder, received {folder}. Try its path from here, or an absolute one."
    kind = _first(r"Config group override must be .* Got (\w+)", text)
    if kind:
        received = "null" if kind == "NoneType" else f"a value of type {kind}"
        return f"Expected the name of a choice after a group, received {received}. {HELP}"
    return None


def _unknown_key(text: str, schema: type) -> str:
    key = (
        _first(r"full_key: (\S+)", text)
        or _first(r"Could not override '([^']+)'", text)
        or _first(r"Key '([^']+)'", text)
        or "a key"
    )
    near = difflib.get_close_matches(key, list(keys(schema)), 1, 0.5)
    group = key.rpartition(".")[0]
    known = [key.rpartition(".")[2] for key in keys(schema) if key.rpartition(".")[0] == group]
    there = f"a key of {group or 'the config'} ({', '.join(known)})" if known else "a key of the config"
    # What is not there yet is added with +: a group that only a person's own folder has, a function's argument.
    added = _first(r"append to your (?:default list|config) use (.+)", text)
    if added and (".build." in key or ("default list" in text and schema is Config)):
        return f"Expected {there} that is there already, received {key}. Try {added}."
    tail = f"Try {near[0]}." if near else HELP
    return f"Expected {there}, received {key}. {tail}"


def _wrong_type(error: OmegaConfBaseException, text: str, schema: type) -> str:
    key = (error.full_key or _first(r"In '(\w+)/", text) or "the value").partition("[")[0]
    kind, default = schema_at(key, schema)
    usual = typeable(default)
    instead = HELP if usual is None else f"Try {key}={usual}."
    typed = _first(rf"Error merging override \+*{re.escape(key)}=(.*)", text)
    return f"Expected {key} to be {in_words(kind)}, received {_received(_line(error), typed)}. {instead}"


def _received(line: str, typed: str | None) -> str:
    """The value that was refused: as it was typed, or as OmegaConf's message has it."""
    if "not Optional" in line or typed == "null":
        return "null"
    found = _first(r"[Vv]alue '(.*?)'(?: of type| is not|, expected)", line) if typed is None else typed
    return "nothing" if found == "" else found or _first(r"(\w+) (?:is not a|to Dict)", line) or "something else"


def schema_at(key: str, schema: type = Config) -> tuple[Any, Any]:
    """(type, default) of a key of the schema.

    >>> schema_at("train.seed")
    (<class 'int'>, 0)
    """
    node: Any = schema
    found: tuple[Any, Any] = (None, "???")
    for name in key.split("."):
        fields = {field.name: field for field in dataclasses.fields(node)} if dataclasses.is_dataclass(node) else {}
        if name not in fields:
            return None, "???"
        each = fields[name]
        made = None if each.default_factory is dataclasses.MISSING else each.default_factory()
        node = typing.get_type_hints(node)[name]
        found = node, made if each.default is dataclasses.MISSING else each.default
    return found


def in_words(kind: Any) -> str:
    """A type of the schema, for a person.

    >>> in_words(int | None), in_words(list[int])
    ('a whole number or null', 'a list of whole numbers')
    """
    if isinstance(kind, types.UnionType):
        return " or ".join(in_words(argument) for argument in typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(each.name for each in kind)}"
    if dataclasses.is_dataclass(kind):
        return f"keys with values ({', '.join(field.name for field in dataclasses.fields(kind))})"
    words: Mapping[Any, str] = {
        int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null",
        list[int]: "a list of whole numbers", list[str]: "a list of names", list: "a list", dict: "keys with values",
    }  # fmt: skip
    return words.get(kind) or words.get(typing.get_origin(kind), "of another type")


def typeable(default: Any) -> str | None:
    """A default as a person types it; None where there is none that helps."""
    if isinstance(default, enum.Enum):
        return str(default.name)
    if default is None or isinstance(default, bool):
        return "null" if default is None else str(default).lower()
    return str(default) if isinstance(default, int | float | str | list) and default != "???" else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _first(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found.group(1) if found else None


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

"""What is wrong with a config, in words: what was expected, what was received, what to type instead."""

import dataclasses
import enum
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence

from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    ConfigTypeError,
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import MarkedYAMLError, YAMLError  # type: ignore[import-untyped]

from pipeline.config import shipped, targets
from pipeline.config.hydra_node import ALONE, not_alone
from pipeline.config.instead import chosen, find, groups_of, in_shell, keys, meant, meant_by_key, repaired, usual
from pipeline.config.near import near
from pipeline.config.schema import Config
from pipeline.errors import UserError

LISTS = (list[int], list[str])
HELP = "Try `python -m pipeline --help` for the choices and keys."
PREPARE_HELP = "Try `python -m pipeline prepare --help` for the choices and keys."


def explain(error: Exception, schema: type = Config, typed: Sequence[Override] = ()) -> str:
    """What is wrong with a config of a schema, in words for the person who typed the overrides `typed`."""
    words = _explained(error, schema, typed)
    return words if schema is Config else words.replace(HELP, PREPARE_HELP)


def _explained(error: Exception, schema: type, typed: Sequence[Override]) -> str:
    if isinstance(error, YAMLError | UnicodeDecodeError):
        return _broken_yaml(error)
    if isinstance(error, MissingConfigException):
        return _missing_choice(error)
    if isinstance(error, OverrideParseException):
        return (
            f"Expected key=value or group=choice, received {error.override}. Try {_repaired(error.override, schema)}."
        )
    cause = next((cause for cause in _chain(error) if isinstance(cause, OmegaConfBaseException)), None)
    # Hydra says of a file where it is, of an override what it is for.
    said, _, rest = str(error).partition(" ")
    place = rest.partition("'")[2].partition("'")[0] if said == "In" else None
    words = None if cause is None else _of_value(cause, schema, typed, place)
    if words is None and place is None:
        # Of two whose names Hydra's words hold, the longer one is meant.
        named = [override for override in typed if override.key_or_group in _line(error)]
        words = _misplaced(max(named, key=lambda override: len(override.key_or_group)), schema) if named else None
    return words or f"Expected a config that can be composed, received: {_line(cause or error).rstrip('.')}. {HELP}"


def _of_value(error: OmegaConfBaseException, schema: type, typed: Sequence[Override], place: str | None) -> str | None:
    """What is wrong with a value that OmegaConf's error names; `place` is the file that it is in, if known."""
    key = str(error.full_key or "").partition("[")[0]
    # Of a group and a key of it, the key is meant.
    meeting = [override for override in typed if _meet(override.key_or_group, key)]
    override = max(meeting, key=lambda override: len(override.key_or_group), default=None)
    match error:
        case MissingMandatoryValue() if key:
            return missing_value(key)
        case ConfigKeyError() | ConfigAttributeError():
            _, kind, _, rest = find(key, schema)
            # What is not there yet is added with +, as a function's argument.
            if override is not None and rest and not dataclasses.is_dataclass(kind):
                return _new_argument(error, override, schema)
            return unknown_key(key, schema)
        case ValidationError() | ConfigTypeError() if key:
            received = error.value if error.key is not None else "something else"
            if override is not None and override.key_or_group.startswith(key) and "${" not in str(override.input_line):
                whole = override.key_or_group != key or override.is_delete()
                received = override.input_line if whole else override.get_value_string()
            return wrong_type(key, received, schema)
        case InterpolationResolutionError():
            return _dangling(key, error)
        case GrammarParseError():
            return f"Expected ${{KEY}} in {key} to name another key, received {error.value}. Try {key}=..."
        case ValidationError() | ConfigTypeError() if place is not None:
            group = place.partition("/")[0]
            _, kind, _, rest = find(group, schema)
            expected = f"{group} to be {in_words(kind)}" if not rest else "keys with values as the schema has them"
            return f"Expected {expected}, received something else in {place}. {HELP}"
    return None


def _meet(one: str, other: str) -> bool:
    """Is one key the other, or in it?"""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _misplaced(override: Override, schema: type) -> str:
    """What is wrong with an override that Hydra has no place for."""
    key, line = override.get_key_element(), override.input_line
    bare = key.lstrip("+~")
    if override.is_delete():
        return f"Expected ~ before a key or choice that has a value, received {line}. Try without it."
    if override.is_add() or override.is_force_add():
        if "." not in bare and dataclasses.is_dataclass(find(bare, schema)[1]):
            return f"Expected one choice of {bare}, received a second one with {key}. Try {bare}=... without the +."
        return f"Expected + only before a key that is not there yet, received {line}. Try {str(line).lstrip('+')}."
    if schema is not Config:
        return unknown_key(bare, schema)  # a group of choices that it does without
    group, elsewhere, _ = bare.partition("@")
    instead = f"{group}={_value_of(override)}" if elsewhere else "without it" if key == "hydra" else f"+{line}"
    return f"Expected a choice that is there already, received {key or 'none'}. Try {instead}."


def _new_argument(error: OmegaConfBaseException, override: Override, schema: type) -> str:
    """What is wrong with an argument that a function has none of, or that its choice has not named yet.

    That it is new is said of one that the function may take alone.
    """
    key, line = override.key_or_group, override.input_line
    group, _, name = key.rpartition(".")
    node = error.parent_node
    there = [str(known) for known in node if known != "_target_"] if isinstance(node, DictConfig) else []
    if closest := near(name, there):
        instead = f"{group}.{closest[0]}={_value_of(override)}"
        return f"Expected a key of {group} ({', '.join(there)}), received {key}. Try {instead}."
    if isinstance(node, DictConfig) and targets.KEY in node:
        try:
            targets.check({targets.KEY: str(node[targets.KEY]), name: None}, group, search=sys.path)
        except UserError as refused:
            if key in str(refused):
                return str(refused)
    return f"Expected {_known(key, schema)} that is there already, received {key}. Try {in_shell(f'+{line}')}."


def unknown_key(key: str, schema: type, value: str | None = None) -> str:
    """What is wrong with a key that is none; `value` is what was typed after it, if anything was."""
    if closest := meant_by_key(key, schema, value):
        return f"Expected a key that exists, received {key}. Try {' or '.join(closest)}."
    known, _, _, rest = find(key, schema)
    page = HELP.replace("--help", f"--help {known}") if schema is Config and known in shipped.choices() else HELP
    return f"Expected {_known('.'.join(filter(None, (known, rest[0]))), schema)}, received {key}. {page}"


def _value_of(override: Override) -> str:
    return str(override.input_line).partition("=")[2]


def _known(key: str, schema: type) -> str:
    """The keys beside which `key` would stand, in words."""
    group = key.rpartition(".")[0]
    known = [name.rpartition(".")[2] for name in keys(schema) if name.rpartition(".")[0] == group]
    known += [] if group else groups_of(schema)
    return f"a key of {group or 'the config'} ({', '.join(known)})" if known else "a key of the config"


def wrong_type(key: str, received: object, schema: type) -> str:
    """What is wrong with a value that is not of its key's type: a text as it was typed, or what a file holds."""
    _, kind, _, rest = find(key, schema)
    shown = "null" if received is None else str(received).lower() if isinstance(received, bool) else received
    expected, values = ("of another type", ()) if rest else (in_words(kind), usual(key, schema, str(shown)))
    instead = ", or ".join(in_shell(f"{key}={value}") for value in values)
    return (
        f"Expected {key} to be {expected}, received {'nothing' if shown == '' else shown}. "
        f"{f'Try {instead}.' if instead else HELP}"
    )


def missing_value(key: str) -> str:
    """What is wrong with a key that has no value."""
    group, _, name = key.rpartition(".")
    if name == "name":
        return f"Expected a choice of {group} that has a name, received none. Try {group}=..., or {key}=..."
    return f"Expected a value for {key}, received none. Try {key}=..."


def _dangling(key: str, error: InterpolationResolutionError) -> str:
    """What is wrong with a value that refers to one that is not there."""
    other = ""
    if isinstance(error, InterpolationKeyError):
        parent = OmegaConf.to_container(error.parent_node, resolve=False)
        text = str(parent.get(error.key)) if isinstance(parent, dict) else ""
        group, dot, _ = text.rpartition("${")[2].partition(".")
        if dot and group != key.split(".")[0]:
            other = f", or a choice of {group} that has it"
    return f"Expected {key} to refer to a value that exists, received: {_line(error)}. Try {key}=...{other}."


def _missing_choice(error: MissingConfigException) -> str:
    missing = error.missing_cfg_file or ""
    # What is typed for a choice may be a path; only Hydra's own groups are in one.
    parts = missing.rpartition("/") if missing.startswith("hydra/") else missing.partition("/")
    group, choice = (parts[0], parts[2]) if parts[1] else ("", missing)
    options = sorted({*(error.options or []), *(shipped.LAYOUTS if group == "hardware" else ())})
    if group in [f"hydra/{name}" for name in ALONE]:
        return not_alone(group.removeprefix("hydra/"), choice)
    if not group:
        return f"Expected --config-name to be a config of this program, received {choice}. Try it without that option."
    if not options:
        return f"{_line(error).rstrip('.')}. {HELP}"
    layouts = ", or a layout such as 3gpu or 2x8gpu" if group == "hardware" else ""
    return (
        f"Expected {group} to be one of {', '.join(options)}{layouts}, received {choice}. "
        f"Try {chosen(group, choice, options)}."
    )


def _broken_yaml(error: Exception) -> str:
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return f"Expected YAML files in UTF-8, received other bytes: {_line(error)}. Try saving them as UTF-8."
    mark = error.problem_mark
    return f"Expected YAML in {mark.name}, received in line {mark.line + 1}: {error.problem or _line(error)}."


def _repaired(override: str, schema: type = Config) -> str:
    """What was probably meant by an override that is none.

    >>> _repaired("epochs"), _repaired("train.epochs==3"), _repaired("a=[{b:"), _repaired("data.path=a;b")
    ('train.epochs=2', 'train.epochs=3', 'quotes around the whole of it', '"data.path=\\\'a;b\\\'"')
    >>> _repaired("foo"), _repaired("data.input_shape=(8,8)"), _repaired("train.seed=choice()")
    ('`python -m pipeline --help`', "'data.input_shape=[8,8]'", 'train.seed=0')
    """
    key, equals, value = override.partition("=")
    if not equals:
        return meant(override, schema) or f"`{'python -m pipeline' + ' prepare' * (schema is not Config)} --help`"
    whole = all(value.count(one) == value.count(other) for one, other in ("[]", "{}", "()"))
    if not whole or (find(key, schema)[3] and "==" not in override):
        return "quotes around the whole of it"
    return repaired(key.strip(), value.strip("= "), schema)


def in_words(kind: object) -> str:
    """A type of the schema, for a person.

    >>> in_words(int | None), in_words(list[int])
    ('a whole number or null', 'a list of whole numbers')
    """
    if isinstance(kind, types.UnionType):
        return " or ".join(in_words(argument) for argument in typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(choice.name for choice in kind)}"
    if dataclasses.is_dataclass(kind):
        return f"keys with values ({', '.join(field.name for field in dataclasses.fields(kind))})"
    words: Mapping[object, str] = {
        int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null",
        list[int]: "a list of whole numbers", list[str]: "a list of names", list: "a list", dict: "keys with values",
    }  # fmt: skip
    return words.get(kind) or words.get(typing.get_origin(kind), "of another type")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

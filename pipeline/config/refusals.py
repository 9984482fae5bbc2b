"""Refuses overrides before Hydra composes, and turns what Hydra, OmegaConf and YAML raise into words of our own."""

import dataclasses
import enum
import json
import re
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

from pipeline.config import offered, targets
from pipeline.config.instead import (
    chosen,
    find,
    fitting,
    groups_of,
    in_shell,
    is_list,
    keys,
    meant,
    meant_by_key,
    misfit,
    repaired,
    usual,
)
from pipeline.config.offered import near
from pipeline.config.schema import NAMED, Config
from pipeline.errors import UserError, as_typed, first_line

LISTS = (list[int], list[str])
# A number written with a comma in each thousand.
THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
# Keys that a whole sweep has one value of.
WHOLE = ("sweep", "output_dir", "mode", "hydra")
# Hydra's parts that can only be its basic ones, and why.
ALONE = {
    "launcher": "points that run side by side spoil each other's timing",
    "sweeper": "all points are known before the first one runs",
}

# What Hydra's own part of a config may name, and where it names something, as JSON.
OF_HYDRA = re.compile(r"hydra\.|hydra_plugins\.|logging\.(Stream|File|Null)Handler$|colorlog\.ColoredFormatter$")
NAMES = re.compile(r'"(?:_target_|class|\(\))": "([^"]*)"')


def help_of(schema: type, place: str = "") -> str:
    """Returns the command whose page says more of a schema, or of a group of it."""
    return f"`python -m pipeline {'' if schema is Config else 'prepare '}--help{' ' * bool(place)}{place}`"


def refusal(error: Exception, schema: type = Config, typed: Sequence[Override] = ()) -> UserError:
    """Returns what is wrong with a config of a schema, for the person who typed the overrides `typed`."""
    if isinstance(error, YAMLError | UnicodeDecodeError):
        return _broken_yaml(error)
    if isinstance(error, MissingConfigException):
        return _missing_choice(error, schema)
    if isinstance(error, OverrideParseException):
        return UserError("key=value or group=choice", error.override, _repaired(error.override, schema))
    cause = next((cause for cause in _chain(error) if isinstance(cause, OmegaConfBaseException)), None)
    # Hydra says of a file where it is, of an override what it is for.
    first, _, rest = str(error).partition(" ")
    place = rest.partition("'")[2].partition("'")[0] if first == "In" else None
    group = "" if place is None else place.partition("/")[0]
    if f"@{group}." in str(error) or (group and cause is not None and find(str(cause.full_key), schema)[3] == [group]):
        return UserError(f"{place}.yaml to begin with the line `# @package _global_`", "another first line", "it there")
    refused = None if cause is None else _of_value(cause, schema, typed, place)
    if refused is None and place is None:
        # Of two whose names Hydra's words hold, the longer one is meant.
        named = [override for override in typed if override.key_or_group in first_line(error)]
        refused = _misplaced(max(named, key=lambda override: len(override.key_or_group)), schema) if named else None
    why = first_line(cause or error).rstrip(".")
    return refused or UserError("a config that can be composed", why, help_of(schema))


def _of_value(
    error: OmegaConfBaseException, schema: type, typed: Sequence[Override], place: str | None
) -> UserError | None:
    """Returns what is wrong with a value that OmegaConf's error names; `place` is the file that it is in, if known."""
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
            return _wrong_type(key, received, schema)
        case InterpolationResolutionError():
            return _dangling(key, error)
        case GrammarParseError():
            return UserError(f"${{KEY}} in {key} to name another key", error.value, f"{key}=..")
        case ValidationError() | ConfigTypeError() if place is not None:
            group = place.partition("/")[0]
            _, kind, _, rest = find(group, schema)
            expected = f"{group} to be {in_words(kind)}" if not rest else "keys with values as the schema has them"
            return UserError(expected, f"something else in {place}", help_of(schema))
    return None


def _meet(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _misplaced(override: Override, schema: type) -> UserError:
    key, line = override.get_key_element(), str(override.input_line)
    bare = key.lstrip("+~")
    if override.is_delete():
        return UserError("~ before a key or choice that has a value", line, "without it")
    if override.is_add() or override.is_force_add():
        if "." not in bare and dataclasses.is_dataclass(find(bare, schema)[1]):
            return UserError(f"one choice of {bare}", f"a second one with {key}", f"{bare}=... without the +")
        return UserError("+ only before a key that is not there yet", line, line.lstrip("+"))
    if schema is not Config:
        return unknown_key(bare, schema)  # a group of choices that it does without
    group, elsewhere, _ = bare.partition("@")
    instead = f"{group}={_value_of(override)}" if elsewhere else "without it" if key == "hydra" else f"+{line}"
    return UserError("a choice that is there already", key or "none", instead)


def _new_argument(error: OmegaConfBaseException, override: Override, schema: type) -> UserError:
    key, line = override.key_or_group, override.input_line
    group, dot, name = key.rpartition(".")
    if isinstance(override.value(), dict):
        instead = in_shell(f"+{line}") if dot else f"{error.full_key} left out, and +{error.full_key}=.. beside it"
        return UserError(f"+ before {error.full_key}, which is not there yet", line, instead)
    node = error.parent_node
    names = [str(name) for name in node if name != "_target_"] if isinstance(node, DictConfig) else []
    if closest := near(name, names):
        instead = f"{group}.{closest[0]}={_value_of(override)}"
        return UserError(f"a key of {group} ({', '.join(names)})", key, instead)
    if isinstance(node, DictConfig) and targets.KEY in node:
        try:
            targets.check({targets.KEY: str(node[targets.KEY]), name: None}, group, search=sys.path)
        except UserError as refused:
            if key in str(refused):
                return refused
    return UserError(f"{_beside(key, schema)} that is there already", key, in_shell(f"+{line}"))


def check_not_swept(overrides: Sequence[Override]) -> None:
    """Refuses several values where one run was asked for."""
    for override in overrides:
        if override.is_sweep_override():
            line, key = str(override.input_line), override.key_or_group
            value = line.partition("=")[2]
            one = f"{key}=[{value}]" if is_list(key) else f"{key}={value.replace(',', '')}"
            instead = f"{in_shell(one)}, or " if is_list(key) or THOUSANDS.fullmatch(value) else ""
            raise UserError("one value", line, f"{instead}-m {in_shell(line)} for a run with each")


def check_override(override: Override, schema: type, is_choice: bool) -> None:
    """Refuses a key that is not in the schema, a value of another type, and what can be no choice. Raises `UserError`.

    What depends on the files of choices, as the arguments of a function do, shows when it is composed.
    """
    key, line = override.key_or_group, str(override.input_line)
    if override.is_sweep_override() and key.replace("/", ".").split(".")[0] in WHOLE:
        raise UserError(f"one value of {key} for a whole sweep", line, "a command for each")
    _, kind, default, rest = find(key, schema)
    value = override.value()
    if override.is_delete():
        if not rest and key not in NAMED:
            # The schema would put its own defaults back, not those of conf/.
            holds, instead = "a value", f"{key}={'...' if default == '???' else as_typed(default)}"
            if dataclasses.is_dataclass(kind):
                holds, instead = "its keys", f"without it, or {key}.{dataclasses.fields(kind)[0].name}=... for a key"
            raise UserError(f"{key} to keep {holds}", f"~{key}", instead)
    elif is_choice:
        if not isinstance(value, str | list) and not override.is_sweep_override():
            instead = fitting(f"{key}={value}", schema) if key in offered.choices() else help_of(schema)
            raise UserError("the name of a choice after a group", as_typed(value), instead)
    elif rest and dataclasses.is_dataclass(kind) and key.split(".")[0] != "hydra":
        raise unknown_key(key, schema, line.partition("=")[2])
    elif rest or override.is_sweep_override() or "${" in line:
        return
    elif (error := misfit(key, value, schema)) is not None:
        raise refusal(error, schema, [override]) from error


def unknown_key(key: str, schema: type, value: str | None = None) -> UserError:
    """Returns what is wrong with a key that is none; `value` is what was typed after it, if anything was."""
    if closest := meant_by_key(key, schema, value):
        return UserError("a key that exists", key, " or ".join(closest))
    place, _, _, rest = find(key, schema)
    page = help_of(schema, place if schema is Config and place in offered.choices() else "")
    return UserError(_beside(".".join(filter(None, (place, rest[0]))), schema), key, page)


def _value_of(override: Override) -> str:
    return str(override.input_line).partition("=")[2]


def _beside(key: str, schema: type) -> str:
    group = key.rpartition(".")[0]
    names = [name.rpartition(".")[2] for name in keys(schema) if name.rpartition(".")[0] == group]
    names += [] if group else groups_of(schema)
    return f"a key of {group or 'the config'} ({', '.join(names)})" if names else "a key of the config"


def _wrong_type(key: str, received: object, schema: type) -> UserError:
    _, kind, _, rest = find(key, schema)
    shown = as_typed(received)
    expected, values = ("of another type", ()) if rest else (in_words(kind), usual(key, schema, shown))
    instead = ", or ".join(in_shell(f"{key}={value}") for value in values)
    return UserError(f"{key} to be {expected}", "nothing" if shown == "" else shown, instead or help_of(schema))


def check_hydra(hydra: DictConfig) -> None:
    """Refuses what Hydra would do in a job of its own: other classes, environment variables, launchers, sweepers."""
    for name in re.findall(NAMES, json.dumps(OmegaConf.to_container(hydra, resolve=False), default=str)):
        if not OF_HYDRA.match(name):
            raise UserError("nothing but Hydra's own classes in hydra", name, "without it")
    if hydra.job.env_set:
        received = f"hydra.job.env_set with {', '.join(map(str, hydra.job.env_set))}"
        raise UserError("environment variables to be set in the shell", received, "NAME=value before the command")
    for name in ALONE:
        node = hydra.get(name)
        target = node.get("_target_") if isinstance(node, DictConfig) else node
        if target != f"hydra._internal.core_plugins.basic_{name}.Basic{name.capitalize()}":
            choice = hydra.runtime.choices.get(f"hydra/{name}")
            raise not_alone(name, target if choice in (None, "basic") else choice)


def missing_value(key: str) -> UserError:
    """Returns what is wrong with a key that has no value."""
    group, _, name = key.rpartition(".")
    if name == "name":
        return UserError(f"a choice of {group} that has a name", "none", f"{group}=..., or {key}=..")
    return UserError(f"a value for {key}", "none", f"{key}=..")


def _dangling(key: str, error: InterpolationResolutionError) -> UserError:
    instead = f"{key}=.."
    if isinstance(error, InterpolationKeyError):
        parent = OmegaConf.to_container(error.parent_node, resolve=False)
        text = str(parent.get(error.key)) if isinstance(parent, dict) else ""
        group, dot, _ = text.rpartition("${")[2].partition(".")
        if dot and group != key.split(".")[0]:
            instead = f"{key}=..., or a choice of {group} that has it"
    return UserError(f"{key} to refer to a value that exists", first_line(error), instead)


def _missing_choice(error: MissingConfigException, schema: type) -> UserError:
    missing = error.missing_cfg_file or ""
    # What is typed for a choice may be a path; only Hydra's own groups are in one.
    parts = missing.rpartition("/") if missing.startswith("hydra/") else missing.partition("/")
    group, choice = (parts[0], parts[2]) if parts[1] else ("", missing)
    options = sorted({*(error.options or []), *(offered.LAYOUTS if group == "hardware" else ())})
    if group in [f"hydra/{name}" for name in ALONE]:
        return not_alone(group.removeprefix("hydra/"), choice)
    if not group:
        return UserError("--config-name to be a config of this program", choice, "it without that option")
    if not options:
        return UserError("choices that are there", first_line(error).rstrip("."), help_of(schema))
    layouts = ", or a layout such as 3gpu or 2x8gpu" if group == "hardware" else ""
    return UserError(f"{group} to be one of {', '.join(options)}{layouts}", choice, chosen(group, choice, options))


def not_alone(name: str, received: object) -> UserError:
    """Returns what is wrong with a launcher or sweeper of Hydra's that is not its basic one.

    >>> print(not_alone("sweeper", "optuna"))
    Expected hydra/sweeper=basic, since all points are known before the first one runs, received optuna. \
Try without it.
    """
    return UserError(f"hydra/{name}=basic, since {ALONE[name]}", as_typed(received), "without it")


def _broken_yaml(error: Exception) -> UserError:
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return UserError("YAML files in UTF-8", f"other bytes: {first_line(error)}", "saving them as UTF-8")
    mark = error.problem_mark
    place, problem = f"line {mark.line + 1}", error.problem or first_line(error)
    return UserError(f"YAML in {mark.name}", f"in {place}: {problem}", f"mending {place}")


def _repaired(override: str, schema: type = Config) -> str:
    """Returns what was probably meant by an override that is none.

    >>> _repaired("epochs"), _repaired("train.epochs==3"), _repaired("a=[{b:"), _repaired("data.path=a;b")
    ('train.epochs=2', 'train.epochs=3', 'quotes around the whole of it', '"data.path=\\\'a;b\\\'"')
    >>> _repaired("foo"), _repaired("data.input_shape=(8,8)"), _repaired("train.seed=choice()")
    ('`python -m pipeline --help`', "'data.input_shape=[8,8]'", 'train.seed=0')
    """
    key, equals, value = override.partition("=")
    if not equals:
        return meant(override, schema) or help_of(schema)
    whole = all(value.count(one) == value.count(other) for one, other in ("[]", "{}", "()"))
    if not whole or (find(key, schema)[3] and "==" not in override):
        return "quotes around the whole of it"
    return repaired(key.strip(), value.strip("= "), schema)


def in_words(kind: object) -> str:
    """Returns a type of the schema in words.

    >>> in_words(int | None), in_words(list[int])
    ('a whole number or null', 'a list of whole numbers')
    """
    if isinstance(kind, types.UnionType):
        return " or ".join(in_words(argument) for argument in typing.get_args(kind))
    if isinstance(kind, enum.EnumType):
        return f"one of {', '.join(kind.__members__)}"
    if dataclasses.is_dataclass(kind):
        return f"keys with values ({', '.join(field.name for field in dataclasses.fields(kind))})"
    words: Mapping[object, str] = {
        int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null",
        list[int]: "a list of whole numbers", list[str]: "a list of names", list: "a list", dict: "keys with values",
    }  # fmt: skip
    return words.get(kind) or words.get(typing.get_origin(kind), "a name, a list or keys with values")


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__

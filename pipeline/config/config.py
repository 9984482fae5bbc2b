"""Turns a composed config into a typed one, and what is wrong with one into words: ours, for what Hydra would raise."""

import dataclasses
import enum
import json
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, errors
from yaml import MarkedYAMLError, YAMLError  # type: ignore[import-untyped]

from pipeline.config import instead, offered, targets
from pipeline.config.offered import near
from pipeline.config.parts import places
from pipeline.config.schema import COMPOSED, NAMED, Config, PrepareConfig
from pipeline.errors import UserError, as_typed, first_line

# What the schemas are called where a config names them.
SCHEMAS: dict[type, str] = {Config: "schema", PrepareConfig: "prepare_schema"}
LISTS = (list[int], list[str])
# What a choice's file tells of its own function.
FACTS = ("num_classes", "input_shape", "train_examples", "validation_examples", "exchange")
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
WORDS: Mapping[object, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null",
    list[int]: "a list of whole numbers", list[str]: "a list of names", list: "a list", dict: "keys with values",
}  # fmt: skip

Typed = TypeVar("Typed", Config, PrepareConfig)


def register(devices: Callable[[], int] | None = None, schema: type[Config] | type[PrepareConfig] = Config) -> None:
    """Makes a schema known to Hydra, which then checks keys and types; `devices` counts this machine's, for a sweep."""
    store, name = ConfigStore.instance(), SCHEMAS[schema]
    # Made of hundreds of nodes: once in a process is enough.
    if f"{name}.yaml" not in store.repo:
        store.store(name=name, node=instead.blank(typing.cast("type", schema)))
    OmegaConf.register_new_resolver("either", lambda one, other: other if one is None else one, replace=True)
    OmegaConf.register_new_resolver("composed_in", lambda name: "" if name is None else f"{COMPOSED}/", replace=True)
    if devices is not None:

        def counts() -> str:
            """Numbers of workers to compare: powers of two, and the most there are."""
            most = devices()
            return ",".join(map(str, sorted({*(2**power for power in range(most.bit_length())), most})))

        OmegaConf.register_new_resolver("up_to_every_device", counts, replace=True)


def typed_as(schema: type[Typed], composed: DictConfig, overrides: Sequence[str] = ()) -> Typed:
    """The composed config as plain objects, checked once more: `+key=value` gets past Hydra. Raises `UserError`."""
    try:
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        assert isinstance(plain, dict)
        _leave_behind(plain, overrides)
        nodes = ConfigStore.instance().load(f"{SCHEMAS[schema]}.yaml").node
        config = OmegaConf.to_object(OmegaConf.unsafe_merge(nodes, plain))
    except errors.OmegaConfBaseException as error:
        raise refusal(error, schema) from error
    assert isinstance(config, schema)
    # Lists and mappings inside of a list of numbers or names, which OmegaConf lets through.
    field: dataclasses.Field[object]
    for key, field in places(typing.cast("type", schema)).items():
        for kind in (field.type, *typing.get_args(field.type)):
            value = attrgetter(key)(config) if kind in LISTS else None
            if not all(isinstance(item, typing.get_args(kind)) for item in value or ()):
                try_this = instead.in_shell(f"{key}={instead.usual(key, schema)[0]}")
                raise UserError(f"{key} to be {in_words(field.type)}", value, try_this)
    return config


@cache
def parsed(line: str, loader: ConfigLoader | None = None) -> Override:
    """Returns an override, parsed once for all runs of a sweep."""
    return OverridesParser.create(config_loader=loader).parse_overrides([line])[0]


def _leave_behind(config: dict[Any, Any], overrides: Sequence[str]) -> None:
    """Drops arguments, facts and name of a choice for which another function was typed, as model.build._target_=a.b."""
    changes = [override for override in map(parsed, overrides) if not override.is_delete()]
    keys = {key for override in changes for key in _keys(override.key_or_group, override.value())}
    for group in ("strategy", "model", "data"):
        choice = config.get(group, {})
        if f"{group}.build._target_" not in keys or not isinstance(build := choice.get("build"), dict):
            continue
        choice["build"] = {key: build[key] for key in build if key == "_target_" or f"{group}.build.{key}" in keys}
        left = dict.fromkeys(FACTS) | {"name": str(build.get("_target_")).rpartition(".")[2]}
        choice |= {key: left[key] for key in left if key in choice and f"{group}.{key}" not in keys}


def _keys(key: str, value: object) -> Iterator[str]:
    yield key
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _keys(f"{key}.{name}", inner)


def refusal(error: Exception, schema: type = Config, typed: Sequence[Override] = ()) -> UserError:
    """Returns what is wrong with a config of a schema, for the person who typed the overrides `typed`."""
    match error:
        case MarkedYAMLError(problem_mark=mark) if mark is not None:
            place, problem = f"line {mark.line + 1}", error.problem or first_line(error)
            return UserError(f"YAML in {mark.name}", f"in {place}: {problem}", f"mending {place}")
        case YAMLError() | UnicodeDecodeError():
            return UserError("YAML files in UTF-8", f"other bytes: {first_line(error)}", "saving them as UTF-8")
        case MissingConfigException():
            return _missing_choice(error, schema)
        case OverrideParseException(override=text):
            return UserError("key=value or group=choice", text, instead.repaired(text, schema) or _help_of(schema))
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, errors.OmegaConfBaseException):
        cause = cause.__cause__ or cause.__context__
    # Hydra says of a file where it is, of an override what it is for.
    located = re.match(r"In '(.*?)'", str(error))
    file, group = (located[1], located[1].partition("/")[0]) if located else (None, "")
    placed = group and cause is not None and instead.find(str(cause.full_key), schema)[3] == [group]
    if placed or f"@{group}." in str(error):
        return UserError(f"{file}.yaml to begin with the line `# @package _global_`", "another first line", "it there")
    # Of two whose names Hydra's words hold, the longer one is meant.
    named = [override for override in typed if override.key_or_group in first_line(error)]
    if cause is not None and (refused := _of_value(cause, schema, typed, file)):
        return refused
    if file is None and named:
        return _misplaced(max(named, key=lambda override: len(override.key_or_group)), schema)
    return UserError("a config that can be composed", first_line(cause or error).rstrip("."), _help_of(schema))


def _of_value(
    error: errors.OmegaConfBaseException, schema: type, typed: Sequence[Override], file: str | None
) -> UserError | None:
    """Returns what is wrong with a value that OmegaConf's error names, in a `file` if that is known."""
    key = str(error.full_key or "").partition("[")[0]
    # Of a group and a key of it, the key is meant.
    names = [(f"{override.key_or_group}.", override) for override in typed]
    meeting = [(name, override) for name, override in names if name.startswith(f"{key}.") or f"{key}.".startswith(name)]
    override = max(meeting, key=lambda each: len(each[0]), default=("", None))[1]
    _, kind, _, rest = instead.find(key, schema)
    match error:
        case errors.MissingMandatoryValue() if key:
            return missing_value(key, error.parent_node)
        case errors.ConfigKeyError() | errors.ConfigAttributeError():
            # What is not there yet is added with +, as a function's argument.
            if override is not None and rest and not dataclasses.is_dataclass(kind):
                return _new_argument(error, override, schema)
            return unknown_key(key, schema)
        case errors.ValidationError() | errors.ConfigTypeError() if key:
            received = error.value if error.key is not None else "something else"
            if override is not None and override.key_or_group.startswith(key) and "${" not in str(override.input_line):
                whole = override.key_or_group != key or override.is_delete()
                received = override.input_line if whole else override.get_value_string()
            shown = as_typed(received)
            values = () if rest else instead.usual(key, schema, shown)
            try_this = ", or ".join(instead.in_shell(f"{key}={value}") for value in values)
            expected = f"{key} to be {'of another type' if rest else in_words(kind)}"
            return UserError(expected, "nothing" if shown == "" else shown, try_this or _help_of(schema))
        case errors.InterpolationResolutionError():
            try_this = f"{key}=.."
            if isinstance(error, errors.InterpolationKeyError):
                parent = OmegaConf.to_container(error.parent_node, resolve=False)
                text = str(parent.get(error.key)) if isinstance(parent, dict) else ""
                group, dot, _ = text.rpartition("${")[2].partition(".")
                if dot and group != key.split(".")[0]:
                    try_this = f"{key}=..., or a choice of {group} that has it"
            return UserError(f"{key} to refer to a value that exists", first_line(error), try_this)
        case errors.GrammarParseError():
            return UserError(f"${{KEY}} in {key} to name another key", error.value, f"{key}=..")
        case errors.ValidationError() | errors.ConfigTypeError() if file is not None:
            group = file.partition("/")[0]
            _, kind, _, rest = instead.find(group, schema)
            expected = f"{group} to be {in_words(kind)}" if not rest else "keys with values as the schema has them"
            return UserError(expected, f"something else in {file}", _help_of(schema))
    return None


def _misplaced(override: Override, schema: type) -> UserError:
    key, line = override.get_key_element(), str(override.input_line)
    bare = key.lstrip("+~")
    if override.is_delete():
        return UserError("~ before a key or choice that has a value", line, "without it")
    if override.is_add() or override.is_force_add():
        if "." not in bare and dataclasses.is_dataclass(instead.find(bare, schema)[1]):
            return UserError(f"one choice of {bare}", f"a second one with {key}", f"{bare}=... without the +")
        return UserError("+ only before a key that is not there yet", line, line.lstrip("+"))
    if schema is not Config:
        return unknown_key(bare, schema)  # a group of choices that it does without
    group, elsewhere, _ = bare.partition("@")
    try_this = "without it" if key == "hydra" else f"{group}={line.partition('=')[2]}" if elsewhere else f"+{line}"
    return UserError("a choice that is there already", key or "none", try_this)


def _new_argument(error: errors.OmegaConfBaseException, override: Override, schema: type) -> UserError:
    key, line = override.key_or_group, str(override.input_line)
    group, dot, name = key.rpartition(".")
    if isinstance(override.value(), dict):
        absent = error.full_key
        try_this = instead.in_shell(f"+{line}") if dot else f"{absent} left out, and +{absent}=.. beside it"
        return UserError(f"+ before {absent}, which is not there yet", line, try_this)
    node = error.parent_node if isinstance(error.parent_node, DictConfig) else {}
    names = [str(name) for name in node if name != targets.KEY]
    if closest := near(name, names):
        try_this = f"{group}.{closest[0]}={line.partition('=')[2]}"
        return UserError(f"a key of {group} ({', '.join(names)})", key, try_this)
    if targets.KEY in node:
        try:
            targets.check({targets.KEY: str(node[targets.KEY]), name: None}, group, search=sys.path)
        except UserError as refused:
            if key in str(refused):
                return refused
    return UserError(f"{_beside(key, schema)} that is there already", key, instead.in_shell(f"+{line}"))


def check_not_swept(overrides: Sequence[Override]) -> None:
    """Refuses several values where one run was asked for."""
    for override in overrides:
        if override.is_sweep_override():
            line, key = str(override.input_line), override.key_or_group
            value = line.partition("=")[2]
            one = f"{key}=[{value}]" if instead.is_list(key) else f"{key}={value.replace(',', '')}"
            try_this = f"{instead.in_shell(one)}, or " if instead.is_list(key) or THOUSANDS.fullmatch(value) else ""
            raise UserError("one value", line, f"{try_this}-m {instead.in_shell(line)} for a run with each")


def check_override(override: Override, schema: type, is_choice: bool) -> None:
    """Refuses a key that is not in the schema, a value of another type, and what can be no choice."""
    key, line = override.key_or_group, str(override.input_line)
    if override.is_sweep_override() and key.replace("/", ".").split(".")[0] in WHOLE:
        raise UserError(f"one value of {key} for a whole sweep", line, "a command for each")
    _, kind, default, rest = instead.find(key, schema)
    value = override.value()
    if override.is_delete():
        if not rest and key not in NAMED:
            # The schema would put its own defaults back, not those of conf/.
            holds, try_this = "a value", f"{key}={'...' if default == '???' else as_typed(default)}"
            if dataclasses.is_dataclass(kind):
                holds, try_this = "its keys", f"without it, or {key}.{dataclasses.fields(kind)[0].name}=... for a key"
            raise UserError(f"{key} to keep {holds}", f"~{key}", try_this)
    elif is_choice:
        if not isinstance(value, str | list) and not override.is_sweep_override():
            try_this = instead.fitting(f"{key}={value}", schema) if key in offered.choices() else _help_of(schema)
            raise UserError("the name of a choice after a group", as_typed(value), try_this)
    elif rest and dataclasses.is_dataclass(kind) and key.split(".")[0] != "hydra":
        raise unknown_key(key, schema, line.partition("=")[2])
    # What depends on the files of choices, as the arguments of a function do, shows when it is composed.
    elif not (rest or override.is_sweep_override() or "${" in line) and (error := instead.misfit(key, value, schema)):
        raise refusal(error, schema, [override]) from error


def unknown_key(key: str, schema: type, value: str | None = None) -> UserError:
    """Returns what is wrong with a key that is none; `value` is what was typed after it, if anything was."""
    if closest := instead.meant_by_key(key, schema, value):
        return UserError("a key that exists", key, " or ".join(closest))
    place, _, _, rest = instead.find(key, schema)
    page = _help_of(schema, f" {place}" if schema is Config and place in offered.choices() else "")
    return UserError(_beside(".".join(filter(None, (place, rest[0]))), schema), key, page)


def _help_of(schema: type, group: str = "") -> str:
    return f"`python -m pipeline {'' if schema is Config else 'prepare '}--help{group}`"


def _beside(key: str, schema: type) -> str:
    group = key.rpartition(".")[0]
    names = [name.rpartition(".")[2] for name in instead.keys(schema) if name.rpartition(".")[0] == group]
    names += [] if group else instead.keys(schema, groups=True)
    return f"a key of {group or 'the config'} ({', '.join(names)})" if names else "a key of the config"


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
            raise _not_alone(name, target if choice in (None, "basic") else choice)


def missing_value(key: str, node: object = None) -> UserError:
    """Returns what is wrong with a key that has no value, in a node that its choice's file may leave open."""
    group, _, name = key.rpartition(".")
    if name != "name":
        return UserError(f"a value for {key}", "none", f"{key}=..")
    if isinstance(node, DictConfig) and node.get("build"):
        return UserError(f"{key}, which this choice of {group} leaves open", "none", f"{key}=NAME")
    return UserError(f"a choice of {group} that has a name", "none", f"{group}=..., or {key}=..")


def _missing_choice(error: MissingConfigException, schema: type) -> UserError:
    missing = error.missing_cfg_file or ""
    # What is typed for a choice may be a path; only Hydra's own groups are in one.
    parts = missing.rpartition("/") if missing.startswith("hydra/") else missing.partition("/")
    group, choice = (parts[0], parts[2]) if parts[1] else ("", missing)
    options = sorted({*(error.options or []), *(offered.LAYOUTS if group == "hardware" else ())})
    if group in [f"hydra/{name}" for name in ALONE]:
        return _not_alone(group.removeprefix("hydra/"), choice)
    if not group:
        return UserError("--config-name to be a config of this program", choice, "it without that option")
    if not options:
        return UserError("choices that are there", first_line(error).rstrip("."), _help_of(schema))
    layouts = ", or a layout such as 3gpu or 2x8gpu" if group == "hardware" else ""
    expected = f"{group} to be one of {', '.join(options)}{layouts}"
    return UserError(expected, choice, instead.chosen(group, choice, options))


def _not_alone(name: str, received: object) -> UserError:
    return UserError(f"hydra/{name}=basic, since {ALONE[name]}", as_typed(received), "without it")


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
    return WORDS.get(kind) or WORDS.get(typing.get_origin(kind), "a name, a list or keys with values")

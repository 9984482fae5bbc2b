"""Turns YAML and the command line into a typed config, and a composition error into one clear message."""

import dataclasses
import difflib
import enum
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    ConfigTypeError,
    InterpolationKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import MarkedYAMLError, YAMLError  # type: ignore[import-untyped]

from pipeline.config.schema import (
    COMPOSED,
    WITH_PASSWORD,
    Config,
    HardwareConfig,
    PrepareConfig,
    holds_password,
    wrong_name,
)

SCHEMA, PREPARE_SCHEMA = "schema", "prepare_schema"
# Groups whose choices have names.
NAMED = ("strategy", "hardware", "model", "data")
LISTS = (list[int], list[str])
# What Hydra may make by itself: its own parts, and what its logging is made of.
HYDRA_S_OWN = ("hydra.", "hydra_plugins.")
LOGGING = ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler", "colorlog.ColoredFormatter")
# Of Hydra's parts, those that only its basic one may be, and why.
ALONE = {
    "launcher": "points that run side by side spoil each other's timing",
    "sweeper": "all points are known before the first one runs",
}
# Hosts, where there are several, and the devices of each: 8gpu, 2x8gpu.
LAYOUT = re.compile(r"(?:([1-9]\d{0,4})x)?([1-9]\d{0,3})(cpu|gpu)$")
HELP = "Try `python -m pipeline --help` for the choices and keys."
PREPARE_HELP = "Try `python -m pipeline prepare --help` for the choices and keys."
Typed = TypeVar("Typed", Config, PrepareConfig)


class ConfigError(ValueError):
    """A config that is not what the schema allows: the message says what was expected, received and what to type."""


def folder() -> Path:
    """Where the choices are: beside the package in a checkout, inside it in a wheel."""
    here = Path(__file__).resolve().parents[1]
    inside = here / "conf"
    return inside if inside.is_dir() else here.parent / "conf"


def register(devices: Callable[[], int] | None = None) -> None:
    """Makes the schemas known to Hydra, which then checks every key and type while composing.

    `devices` counts those of this machine, for a sweep over them.
    """
    ConfigStore.instance().store(name=SCHEMA, node=Config)
    ConfigStore.instance().store(name=PREPARE_SCHEMA, node=PrepareConfig)
    OmegaConf.register_new_resolver("either", lambda one, other: other if one is None else one, replace=True)
    OmegaConf.register_new_resolver("composed_in", lambda name: "" if name is None else f"{COMPOSED}/", replace=True)
    if devices is not None:
        counts = partial(_up_to_every_device, devices)
        OmegaConf.register_new_resolver("up_to_every_device", counts, replace=True)


def counts_up_to(most: int) -> list[int]:
    """Numbers of workers to compare: powers of two, and the most there are.

    >>> counts_up_to(1), counts_up_to(6)
    ([1], [1, 2, 4, 6])
    """
    return sorted({*(2**power for power in range(most.bit_length())), most})


def _up_to_every_device(devices: Callable[[], int]) -> str:
    return ",".join(map(str, counts_up_to(devices())))


@contextmanager
def refused_unread() -> Iterator[None]:
    """Inside, Hydra refuses a config that would have it run code or write a password, before it does. `ConfigError`.

    Hydra calls functions that a config names for it, and writes the config into the run's folder, before it hands the
    config to the program. It composes each point of a sweep once: what cannot be composed is told then.
    """
    kept, kept_check = ConfigLoaderImpl.load_configuration, Sweeper.validate_batch_is_legal

    def load(
        loader: ConfigLoaderImpl, config_name: str | None, overrides: list[str], *given: Any, **named: Any
    ) -> DictConfig:
        _check_not_swept(overrides)
        _check_not_deleted(overrides, Config if config_name == "config" else PrepareConfig)
        try:
            composed = kept(loader, config_name, overrides, *given, **named)
        except MissingConfigException as error:
            _lay_out(error)
            composed = kept(loader, config_name, overrides, *given, **named)
        _name_by_choice(composed, loader.repository)
        plain = OmegaConf.to_container(composed, resolve=False)
        assert isinstance(plain, dict)
        check_hydra(plain.get("hydra"), "hydra")
        _check_alone(plain.get("hydra") or {})
        tracking = plain.get("tracking")
        if holds_password(tracking.get("uri") if isinstance(tracking, dict) else None):
            raise ConfigError(WITH_PASSWORD)
        _check_sweep_name(composed)
        return composed

    ConfigLoaderImpl.load_configuration = load  # type: ignore[method-assign, assignment]
    Sweeper.validate_batch_is_legal = lambda self, batch: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration = kept  # type: ignore[method-assign]
        Sweeper.validate_batch_is_legal = kept_check  # type: ignore[method-assign]


def _check_not_swept(overrides: Sequence[str]) -> None:
    """Refuses several values of what a sweep is as a whole."""
    for each in OverridesParser.create().parse_overrides(list(overrides)):
        if each.key_or_group.split(".")[0] in ("sweep", "output_dir", "mode") and each.is_sweep_override():
            raise ConfigError(
                f"Expected one value of {each.key_or_group} for a whole sweep, received {each.input_line}. "
                f"Try a command for each."
            )


def _check_not_deleted(overrides: Sequence[str], schema: type) -> None:
    """Refuses to delete what the schema would put back with its own defaults, not those of `conf/`."""
    for each in OverridesParser.create().parse_overrides(list(overrides)):
        key = each.key_or_group
        kind, default = _schema_at(key, schema)
        if not each.is_delete() or kind is None or key in NAMED:
            continue
        if dataclasses.is_dataclass(kind):
            first = dataclasses.fields(kind)[0].name
            raise ConfigError(
                f"Expected {key} to keep its keys, received ~{key}. "
                f"Try without it, or {key}.{first}=... for a key of it."
            )
        usual = _typeable(default)
        raise ConfigError(
            f"Expected {key} to keep a value, received ~{key}. Try {key}={'...' if usual is None else usual}."
        )


def _name_by_choice(composed: DictConfig, files: IConfigRepository) -> None:
    """Gives what was chosen without a name of its own that of the choice; a name that its file leaves open stays so."""
    choices = OmegaConf.select(composed, "hydra.runtime.choices") or {}
    for group in NAMED:
        node, choice = composed.get(group), choices.get(group)
        # Without a function it is no choice that could be made, but for hardware.
        if not isinstance(node, DictConfig) or not choice or not (group == "hardware" or node.get("build")):
            continue
        found = files.load_config(f"{group}/{choice}")
        says = found is not None and isinstance(found.config, DictConfig) and "name" in found.config.keys()  # noqa: SIM118 - `in` passes over "???"
        if not says and OmegaConf.is_missing(node, "name"):
            node.name = str(choice).rpartition("/")[2]


def _lay_out(missing: MissingConfigException) -> None:
    """Makes hardware that has no file but a layout for its name, such as 2x8gpu, known to Hydra; else raises."""
    group, _, name = (missing.missing_cfg_file or "").rpartition("/")
    found = LAYOUT.match(name) if group == "hardware" else None
    if found is None:
        raise missing
    hosts, devices, kind = found.groups()
    node = dataclasses.asdict(HardwareConfig(name, int(hosts or 1), int(devices))) | {"kind": kind}
    ConfigStore.instance().store(group="hardware", name=name, node=node)


def _check_sweep_name(composed: DictConfig) -> None:
    """Refuses a sweep's name that is none before Hydra makes its folder."""
    with suppress(OmegaConfBaseException):
        name = OmegaConf.select(composed, "sweep.name")
        if name is not None and (wrong := wrong_name(str(name))):
            raise ConfigError(wrong)


def check_hydra(node: Any, key: str) -> None:
    """Refuses functions that are not Hydra's in Hydra's own part of a config, and environment variables.

    >>> check_hydra({"_target_": "os.system"}, "hydra.callbacks.x")
    Traceback (most recent call last):
    pipeline.config.config.ConfigError: Expected hydra.callbacks.x._target_ to be one of Hydra's own, received \
os.system. Try without it.
    """
    if isinstance(node, list):
        for index, each in enumerate(node):
            check_hydra(each, f"{key}[{index}]")
    if not isinstance(node, dict):
        return
    for name, inner in node.items():
        own = str(inner).startswith(HYDRA_S_OWN) if name == "_target_" else inner in LOGGING
        if (name in ("_target_", "()") or (name == "class" and "logging" in key)) and not own:
            raise ConfigError(f"Expected {key}.{name} to be one of Hydra's own, received {inner}. Try without it.")
        if name == "env_set" and inner:
            raise ConfigError(
                f"Expected environment variables to be set in the shell, received {key}.env_set with "
                f"{', '.join(map(str, inner))}. Try NAME=value before the command."
            )
        check_hydra(inner, f"{key}.{name}")


def _check_alone(hydra: Mapping[str, Any]) -> None:
    """Refuses what would run the points of a sweep in another way than one after the other."""
    for name in ALONE:
        node = hydra.get(name)
        target = node.get("_target_") if isinstance(node, dict) else node
        if target != f"hydra._internal.core_plugins.basic_{name}.Basic{name.capitalize()}":
            choice = ((hydra.get("runtime") or {}).get("choices") or {}).get(f"hydra/{name}")
            raise ConfigError(_not_alone(name, target if choice in (None, "basic") else choice))


def _not_alone(name: str, received: Any) -> str:
    """What is wrong with a launcher or sweeper of Hydra's that is not its basic one.

    >>> _not_alone("sweeper", "optuna")
    'Expected hydra/sweeper=basic, since all points are known before the first one runs, received optuna. \
Try without it.'
    """
    named = "null" if received is None else received
    return f"Expected hydra/{name}=basic, since {ALONE[name]}, received {named}. Try without it."


def typed(composed: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """The composed config of a run, see `typed_as`. Raises `ConfigError`."""
    return typed_as(Config, composed, overrides)


def typed_as(schema: type[Typed], composed: DictConfig, overrides: Sequence[str] = ()) -> Typed:
    """The composed config as plain objects, checked once more: `+key=value` gets past Hydra. Raises `ConfigError`.

    Where `overrides` name another function for a choice, as in `model.build._target_=my_package.my_model`, the
    choice's own arguments, facts and name do not hold for it and are left behind.
    """
    _check_names(composed)
    try:
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        assert isinstance(plain, dict)
        for group in ("strategy", "model", "data"):
            if group in plain:
                _leave_behind(plain[group], _typed_in(group, overrides))
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), plain))
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error, schema)) from error
    assert isinstance(config, schema)
    _check_items(config)
    return config


def _check_names(composed: DictConfig) -> None:
    """Refuses a choice that leaves its name to whoever picks it, where it was not given."""
    for group in ("strategy", "model", "data"):
        choice = OmegaConf.to_container(composed, resolve=False).get(group)  # type: ignore[union-attr]
        if isinstance(choice, dict) and choice.get("name") == "???" and choice.get("build"):
            raise ConfigError(
                f"Expected {group}.name, which this choice of {group} leaves open, received none. "
                f"Try {group}.name=NAME."
            )


def _check_items(node: Any, prefix: str = "") -> None:
    """Refuses lists and mappings inside of a list of numbers or names, which OmegaConf lets through."""
    for name, kind in typing.get_type_hints(type(node)).items():
        value = getattr(node, name)
        if dataclasses.is_dataclass(kind):
            _check_items(value, f"{prefix}{name}.")
        for item in (each for one in (kind, *typing.get_args(kind)) if one in LISTS for each in typing.get_args(one)):
            if value is not None and not all(isinstance(each, item) for each in value):
                raise ConfigError(
                    f"Expected {prefix}{name} to be {_in_words(kind)}, received {value}. Try {prefix}{name}=null."
                )


def _typed_in(group: str, overrides: Sequence[str]) -> set[str]:
    """The keys under `group` that a person typed, dotted and without the group.

    >>> sorted(_typed_in("model", ["model.build._target_=a.b", "+model.build.width=3", "train.epochs=1"]))
    ['build._target_', 'build.width']
    >>> sorted(_typed_in("model", ["model={build: {_target_: a.b}}"]))
    ['build', 'build._target_']
    """
    found: set[str] = set()
    for each in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = each.key_or_group, each.value()
        if not each.is_delete() and (key.startswith(f"{group}.") or (key == group and isinstance(value, dict))):
            found |= {name.removeprefix(f"{group}.") for name in _paths(key, value) if name != group}
    return found


def _paths(key: str, value: Any) -> Iterator[str]:
    """`key`, and the dotted keys of all that is in it."""
    yield key
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _paths(f"{key}.{name}", inner)


def _leave_behind(choice: dict[str, Any], kept: set[str]) -> None:
    target = choice.get("build", {}).get("_target_")
    if "build._target_" not in kept:
        return
    choice["build"] = {
        key: value for key, value in choice["build"].items() if key == "_target_" or f"build.{key}" in kept
    }
    facts = ("num_classes", "input_shape", "train_examples", "validation_examples", "exchange")
    choice |= {fact: None for fact in facts if fact in choice and fact not in kept}
    if "name" not in kept:
        choice["name"] = str(target).rpartition(".")[2]


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
    for each in dataclasses.fields(node):
        default = each.default_factory if each.default_factory is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(default):
            yield from keys(default, f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}"


def _missing_choice(error: MissingConfigException) -> str:
    group, _, choice = (error.missing_cfg_file or "").rpartition("/")
    options = sorted(error.options or [])
    if group in [f"hydra/{name}" for name in ALONE]:
        return _not_alone(group.removeprefix("hydra/"), choice)
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
    known = [each.rpartition(".")[2] for each in keys(schema) if each.rpartition(".")[0] == group]
    there = f"a key of {group or 'the config'} ({', '.join(known)})" if known else "a key of the config"
    # What is not there yet is added with +: a group that only a person's own folder has, a function's argument.
    added = _first(r"append to your (?:default list|config) use (.+)", text)
    if added and (".build." in key or ("default list" in text and schema is Config)):
        return f"Expected {there} that is there already, received {key}. Try {added}."
    tail = f"Try {near[0]}." if near else HELP
    return f"Expected {there}, received {key}. {tail}"


def _wrong_type(error: OmegaConfBaseException, text: str, schema: type) -> str:
    key = (error.full_key or _first(r"In '(\w+)/", text) or "the value").partition("[")[0]
    kind, default = _schema_at(key, schema)
    usual = _typeable(default)
    instead = HELP if usual is None else f"Try {key}={usual}."
    typed = _first(rf"Error merging override \+*{re.escape(key)}=(.*)", text)
    return f"Expected {key} to be {_in_words(kind)}, received {_received(_line(error), typed)}. {instead}"


def _received(line: str, typed: str | None) -> str:
    """The value that was refused: as it was typed, or as OmegaConf's message has it."""
    if "not Optional" in line or typed == "null":
        return "null"
    found = _first(r"[Vv]alue '(.*?)'(?: of type| is not|, expected)", line) if typed is None else typed
    return "nothing" if found == "" else found or _first(r"(\w+) (?:is not a|to Dict)", line) or "something else"


def _schema_at(key: str, schema: type = Config) -> tuple[Any, Any]:
    """(type, default) of a key of the schema.

    >>> _schema_at("train.seed")
    (<class 'int'>, 0)
    """
    node: Any = schema
    found: tuple[Any, Any] = (None, "???")
    for name in key.split("."):
        fields = {each.name: each for each in dataclasses.fields(node)} if dataclasses.is_dataclass(node) else {}
        if name not in fields:
            return None, "???"
        each = fields[name]
        made = None if each.default_factory is dataclasses.MISSING else each.default_factory()
        node = typing.get_type_hints(node)[name]
        found = node, made if each.default is dataclasses.MISSING else each.default
    return found


def _in_words(kind: Any) -> str:
    """A type of the schema, for a person.

    >>> _in_words(int | None), _in_words(list[int])
    ('a whole number or null', 'a list of whole numbers')
    """
    if isinstance(kind, types.UnionType):
        return " or ".join(_in_words(each) for each in typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(each.name for each in kind)}"
    if dataclasses.is_dataclass(kind):
        return f"keys with values ({', '.join(each.name for each in dataclasses.fields(kind))})"
    words: Mapping[Any, str] = {
        int: "a whole number", float: "a number", bool: "true or false", str: "text", types.NoneType: "null",
        list[int]: "a list of whole numbers", list[str]: "a list of names", list: "a list", dict: "keys with values",
    }  # fmt: skip
    return words.get(kind) or words.get(typing.get_origin(kind), "of another type")


def _typeable(default: Any) -> str | None:
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

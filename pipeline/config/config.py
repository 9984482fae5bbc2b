"""Turns YAML and the command line into a typed config, and a composition error into one clear message."""

import dataclasses
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import IConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.errors import ConfigError
from pipeline.config.hydra_node import check_alone, check_hydra
from pipeline.config.messages import LAYOUT, LISTS, explain, in_words, schema_at, typeable
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


Typed = TypeVar("Typed", Config, PrepareConfig)


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
        check_alone(plain.get("hydra") or {})
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
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        if override.key_or_group.split(".")[0] in ("sweep", "output_dir", "mode") and override.is_sweep_override():
            raise ConfigError(
                f"Expected one value of {override.key_or_group} for a whole sweep, received {override.input_line}. "
                f"Try a command for each."
            )


def _check_not_deleted(overrides: Sequence[str], schema: type) -> None:
    """Refuses to delete what the schema would put back with its own defaults, not those of `conf/`."""
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.key_or_group
        kind, default = schema_at(key, schema)
        if not override.is_delete() or kind is None or key in NAMED:
            continue
        if dataclasses.is_dataclass(kind):
            first = dataclasses.fields(kind)[0].name
            raise ConfigError(
                f"Expected {key} to keep its keys, received ~{key}. "
                f"Try without it, or {key}.{first}=... for a key of it."
            )
        usual = typeable(default)
        raise ConfigError(
            f"Expected {key} to keep a value, received ~{key}. Try {key}={'...' if usual is None else usual}."
        )


def _name_by_choice(composed: DictConfig, files: IConfigRepository) -> None:
    """Gives what was chosen without a name of its own that of the choice; a name that its file leaves open stays so."""
    choices = OmegaConf.select(composed, "hydra.runtime.choices") or {}
    for group in NAMED:
        node, choice = composed.get(group), choices.get(group)
        if not isinstance(node, DictConfig) or not choice:
            continue
        found = files.load_config(f"{group}/{choice}")
        said = list(found.config.keys()) if found is not None and isinstance(found.config, DictConfig) else []
        # A file that says nothing is no choice that could be made, but for hardware.
        made = group == "hardware" or node.get("build") or said
        if made and "name" not in said and OmegaConf.is_missing(node, "name"):
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
        for item in (
            argument for one in (kind, *typing.get_args(kind)) if one in LISTS for argument in typing.get_args(one)
        ):
            if value is not None and not all(isinstance(each, item) for each in value):
                raise ConfigError(
                    f"Expected {prefix}{name} to be {in_words(kind)}, received {value}. Try {prefix}{name}=null."
                )


def _typed_in(group: str, overrides: Sequence[str]) -> set[str]:
    """The keys under `group` that a person typed, dotted and without the group.

    >>> sorted(_typed_in("model", ["model.build._target_=a.b", "+model.build.width=3", "train.epochs=1"]))
    ['build._target_', 'build.width']
    >>> sorted(_typed_in("model", ["model={build: {_target_: a.b}}"]))
    ['build', 'build._target_']
    """
    found: set[str] = set()
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key, value = override.key_or_group, override.value()
        if not override.is_delete() and (key.startswith(f"{group}.") or (key == group and isinstance(value, dict))):
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

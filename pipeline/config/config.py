"""Turns a composed config into a typed one."""

import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import TypeVar

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.instead import blank, in_shell, usual
from pipeline.config.parts import places
from pipeline.config.refusals import LISTS, in_words, refusal
from pipeline.config.schema import COMPOSED, Config, Json, PrepareConfig
from pipeline.errors import UserError

# What the schemas are called where a config names them.
SCHEMAS: dict[type, str] = {Config: "schema", PrepareConfig: "prepare_schema"}

Typed = TypeVar("Typed", Config, PrepareConfig)


def register(devices: Callable[[], int] | None = None, schema: type[Config] | type[PrepareConfig] = Config) -> None:
    """Makes a schema known to Hydra, which then checks keys and types; `devices` counts this machine's, for a sweep."""
    store, name = ConfigStore.instance(), SCHEMAS[schema]
    # Made of hundreds of nodes: once in a process is enough.
    if f"{name}.yaml" not in store.repo:
        store.store(name=name, node=blank(typing.cast("type", schema)))
    OmegaConf.register_new_resolver("either", lambda one, other: other if one is None else one, replace=True)
    OmegaConf.register_new_resolver("composed_in", lambda name: "" if name is None else f"{COMPOSED}/", replace=True)
    if devices is not None:
        OmegaConf.register_new_resolver(
            "up_to_every_device", lambda: ",".join(map(str, counts_up_to(devices()))), replace=True
        )


def counts_up_to(most: int) -> list[int]:
    """Numbers of workers to compare: powers of two, and the most there are.

    >>> counts_up_to(1), counts_up_to(6)
    ([1], [1, 2, 4, 6])
    """
    return sorted({*(2**power for power in range(most.bit_length())), most})


def typed(composed: DictConfig, overrides: Sequence[str] = ()) -> Config:
    """The composed config of a run, see `typed_as`. Raises `UserError`."""
    return typed_as(Config, composed, overrides)


def typed_as(schema: type[Typed], composed: DictConfig, overrides: Sequence[str] = ()) -> Typed:
    """The composed config as plain objects, checked once more: `+key=value` gets past Hydra. Raises `UserError`.

    Where `overrides` name another function for a choice, as in `model.build._target_=my_package.my_model`, the
    choice's own arguments, facts and name do not hold for it and are left behind.
    """
    _check_names(composed)
    try:
        plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        assert isinstance(plain, dict)
        typed = [parsed(line) for line in overrides]
        for group in ("strategy", "model", "data"):
            if group in plain:
                _leave_behind(plain[group], _typed_in(group, typed))
        nodes = ConfigStore.instance().load(f"{SCHEMAS[schema]}.yaml").node
        config = OmegaConf.to_object(OmegaConf.unsafe_merge(nodes, plain))
    except OmegaConfBaseException as error:
        raise refusal(error, schema) from error
    assert isinstance(config, schema)
    _check_items(config, schema)
    return config


@cache
def parsed(line: str, loader: ConfigLoader | None = None) -> Override:
    """Returns an override, parsed once for all runs of a sweep."""
    return OverridesParser.create(config_loader=loader).parse_overrides([line])[0]


def _check_names(composed: DictConfig) -> None:
    """Refuses a choice that leaves its name to whoever picks it, where it was not given."""
    plain = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(plain, dict)
    for group in ("strategy", "model", "data"):
        choice = plain.get(group)
        if isinstance(choice, dict) and choice.get("name") == "???" and choice.get("build"):
            raise UserError(f"{group}.name, which this choice of {group} leaves open", "none", f"{group}.name=NAME")


def _check_items(config: Config | PrepareConfig, schema: type) -> None:
    """Refuses lists and mappings inside of a list of numbers or names, which OmegaConf lets through."""
    for key, field in places(schema).items():
        value = attrgetter(key)(config)
        for kind in (field.type, *typing.get_args(field.type)):
            if kind in LISTS and value is not None:
                (item,) = typing.get_args(kind)
                if not all(isinstance(inner, item) for inner in value):
                    instead = in_shell(f"{key}={usual(key, schema)[0]}")
                    raise UserError(f"{key} to be {in_words(field.type)}", value, instead)


def _typed_in(group: str, overrides: Sequence[Override]) -> set[str]:
    """The keys under `group` that a person typed, dotted and without the group.

    >>> parse = OverridesParser.create().parse_overrides
    >>> sorted(_typed_in("model", parse(["model.build._target_=a.b", "+model.build.width=3", "train.epochs=1"])))
    ['build._target_', 'build.width']
    >>> sorted(_typed_in("model", parse(["model={build: {_target_: a.b}}"])))
    ['build', 'build._target_']
    """
    keys: set[str] = set()
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if not override.is_delete() and (key.startswith(f"{group}.") or (key == group and isinstance(value, dict))):
            keys |= {name.removeprefix(f"{group}.") for name in _paths(key, value) if name != group}
    return keys


def _paths(key: str, value: object) -> Iterator[str]:
    yield key
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _paths(f"{key}.{name}", inner)


def _leave_behind(choice: dict[str, Json], typed: set[str]) -> None:
    build = choice.get("build")
    if not isinstance(build, Mapping) or "build._target_" not in typed:
        return
    choice["build"] = {key: value for key, value in build.items() if key == "_target_" or f"build.{key}" in typed}
    facts = ("num_classes", "input_shape", "train_examples", "validation_examples", "exchange")
    choice |= {fact: None for fact in facts if fact in choice and fact not in typed}
    if "name" not in typed:
        choice["name"] = str(build.get("_target_")).rpartition(".")[2]

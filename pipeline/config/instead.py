"""Finds what may be typed, as it stands, in place of what is wrong: the key, choice or value probably meant."""

import copy
import dataclasses
import enum
import os
import re
import shlex
import sys
import types
import typing
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config import offered, targets
from pipeline.config.offered import elsewhere, near, near_keys
from pipeline.config.parts import USUAL, places
from pipeline.config.schema import Config
from pipeline.errors import UserError, as_typed

# Hosts, where there are several, and the devices of each: 8gpu, 2x8gpu.
LAYOUT = re.compile(r"(?:([1-9]\d{0,4})x)?([1-9]\d{0,3})(cpu|gpu)$")
# A whole number written as another, and the largest that is offered; words that may be the items of a list.
ROUND, MOST = re.compile(r"\d+(\.0*)?([eE]\+?\d{1,2})?"), 1e9
WORDS = re.compile(r"[\w.]+(,\s*[\w.]+)*")
# Options with a value, as they are typed.
WITH_VALUE = {
    "--config-path": "--config-dir=FOLDER", "--config-dir": "--config-dir=FOLDER",
    "--config-name": "--config-name=config", "--cfg": "--cfg job", "--info": "--info searchpath",
    "--package": "--cfg job --package train",
}  # fmt: skip
# Where the functions are that a key takes.
PACKAGES = {
    "train.optimizer": "keras.optimizers", "train.loss": "keras.losses", "train.metrics": "keras.metrics",
    "train.callbacks": "keras.callbacks",
}  # fmt: skip
# What reads files whose names end so.
READERS = {
    "csv": "csv", "tsv": "csv", "npz": "numpy", "npy": "numpy", "txt": "text", "tfrecord": "tfrecord",
    "tfrecords": "tfrecord",
}  # fmt: skip


def meant(word: str, schema: type = Config) -> str | None:
    """Returns the `key=value` or `group=choice` that a word alone was probably meant to be; None where there is none.

    >>> meant("workers"), meant("mirored"), meant("stratgy"), meant("train"), meant("resume_changs"), meant("foo")
    ('workers=2', 'strategy=mirrored', 'strategy=mirrored', 'train.epochs=2', 'resume_changes=VALUE', None)
    """
    groups, all_keys = keys(schema, groups=True), keys(schema)
    of_groups = {group: options for group, options in offered.choices().items() if group in groups or schema is Config}
    lines = {choice: f"{group}={choice}" for group, choices in of_groups.items() for choice in choices}
    lines |= {group: f"{group}={choice}" for group, choice in offered.defaults().items() if group in groups}
    closest = near(word, [*groups, *all_keys, *lines]) or near_keys(word, all_keys, 1)
    if not closest or closest[0] in lines:
        return lines[closest[0]] if closest else None
    key = next(key for key in all_keys if f"{key}.".startswith(f"{closest[0]}."))
    value = (usual(key, schema) or ("null",))[0]
    return f"{key}={'VALUE' if value in ('null', '[]') else value}"


def meant_by_key(key: str, schema: type = Config, value: str | None = None) -> list[str]:
    """Returns what a key that is none was probably meant to be, ready to be typed; without a value the keys alone.

    >>> meant_by_key("lr", value="0.1"), meant_by_key("train.epoch", value="1e2"), meant_by_key("gpus", value="2")
    (['train.learning_rate=0.1'], ['train.epochs=100'], ['hardware=2gpu'])
    >>> meant_by_key("train.epoch"), meant_by_key("zzz")
    (['train.epochs'], [])
    """
    names = [*keys(schema), *keys(schema, groups=True)]
    lines = [line for line in elsewhere(key.rpartition(".")[2], value or "") if line.partition("=")[0] in names]
    lines = lines or [f"{name}={value}" for name in near_keys(key, names)]
    return [line.partition("=")[0] for line in lines] if value is None else [fitting(line, schema) for line in lines]


def meant_by_option(arguments: Sequence[str], problem: str) -> str:
    """Returns what to type in place of an option that `problem` names: `key=value` where it is a key with dashes.

    >>> meant_by_option(["--batch-size", "8"], "unrecognized arguments: --batch-size"), meant_by_option(["--x"], "--x")
    ('train.global_batch=8', '`python -m pipeline --help`')
    """
    if forms := [form for option, form in WITH_VALUE.items() if option in problem]:
        return forms[0]
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        option, equals, value = argument.partition("=")
        if option.startswith("-") and option in problem:
            value = value if equals or following.startswith("-") or "=" in following else following
            key = option.strip("-").replace("-", "_")
            if not find(key)[3]:
                return fitting(f"{key}={value or (usual(key) or ('null',))[0]}")
            if closest := meant_by_key(key, value=value):
                return " or ".join(closest)
    return "`python -m pipeline --help`"


def chosen(group: str, choice: str, options: Sequence[str]) -> str:
    """Returns what was probably meant by a choice that is none: a function, the data at a path, or the nearest choice.

    >>> chosen("model", "mine:build", ["cnn"]), chosen("data", "~/a.csv", ["csv"]), chosen("tracking", "wandb", ["x"])
    ('model.build._target_=mine.build', "data=csv 'data.path=~/a.csv'", 'tracking=sqlite')
    """
    reader = READERS.get(choice.rpartition(".")[2].lower(), "images")
    if group == "data" and not choice.endswith(".py") and ("/" in choice or ("." in choice and reader != "images")):
        return f"data={reader} {in_shell(f'data.path={choice}')}"
    if group in ("model", "data", "strategy"):
        file = choice.removesuffix(".py").rpartition("/")[2].replace(":", ".")
        target = f"{file}.my_function" if choice.endswith(".py") else file
        if "." in target and all(part.isidentifier() for part in target.split(".")):
            return f"{group}.build._target_={target}"
    alone = [f"{choice}gpu"] if group == "hardware" and LAYOUT.match(f"{choice}gpu") else []
    closest = alone or near(choice, options) or [offered.defaults().get(group, options[0])]
    return f"{group}={closest[0]}"


def fitting(line: str, schema: type = Config, *others: str) -> str:
    """Returns `key=value` as it can be typed: as it is, as `others` are, or with a value that the key takes.

    >>> fitting("train.epochs=ten"), fitting("workers=1,2"), fitting("strategy=mirored"), fitting("resume=a b")
    ('train.epochs=2', '-m workers=1,2', 'strategy=mirrored', "'resume=a b'")
    """
    key, _, value = line.partition("=")
    if key in (choices := offered.choices()):
        is_choice = LAYOUT.match(value) if key == "hardware" else value in choices[key]
        return in_shell(line) if is_choice else chosen(key, value, choices[key])
    for form in (line, *others):
        with suppress(HydraException):
            override = OverridesParser.create().parse_override(form)
            if override.is_sweep_override():
                return f"-m {in_shell(form)}"
            if misfit(key, override.value(), schema) is None:
                return in_shell(form)
    return in_shell(f"{key}={(usual(key, schema, value) or ('null',))[0]}")


def repaired(override: str, schema: type = Config) -> str | None:
    """Returns what was probably meant by an override that Hydra's grammar does not take; None where nothing was.

    >>> repaired("epochs"), repaired("train.epochs==3"), repaired("a=[{b:"), repaired("data.path=a;b")
    ('train.epochs=2', 'train.epochs=3', 'quotes around the whole of it', '"data.path=\\\'a;b\\\'"')
    >>> repaired("foo"), repaired("data.input_shape=(8,8)"), repaired("train.seed=choice()")
    (None, "'data.input_shape=[8,8]'", 'train.seed=0')
    """
    key, equals, value = override.partition("=")
    if not equals:
        return meant(override, schema)
    whole = all(value.count(one) == value.count(other) for one, other in ("[]", "{}", "()"))
    if not whole or (find(key, schema)[3] and "==" not in override):
        return "quotes around the whole of it"
    key, value = key.strip(), os.path.expanduser(value.strip("= "))
    listed, called = is_list(key, schema), re.fullmatch(r"\[?([\w.]+)\(.*\)\]?", value)
    if called and key in PACKAGES:
        function = _written(called[1], PACKAGES[key])
        return in_shell(f"{key}=[{function}]" if listed else f"{key}={function}")
    return fitting(f"{key}={value}", schema, f"{key}=[{value.strip('()')}]" if listed else f"{key}='{value}'")


def usual(key: str, schema: type = Config, received: str = "") -> tuple[str, ...]:
    """Returns what may be typed in place of `received`: the value it is near to, the default, or an example of one."""
    place, kind, default, _ = find(key, schema)
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    names = [name for option in options if isinstance(option, enum.EnumType) for name in option.__members__]
    if closest := near(received, [*names, *(["true", "false"] if bool in options else [])]):
        return (closest[0],)
    if int in options and ROUND.fullmatch(received) and 0 < float(received) < MOST:
        return (f"{float(received):.0f}",)
    if is_list(key, schema) and (WORDS.fullmatch(received) or received.startswith("{_target_: ")):
        one = callback(received) if key == "train.callbacks" and received[0] != "{" else received
        if misfit(key, OmegaConf.create(f"[{one}]"), schema) is None:
            return (f"[{one}]",)
    if names and default is None:
        return names[0], "null"
    if default is None and (int in options or float in options):
        return str(places(schema)[place].metadata[USUAL] or (2 if int in options else 0.5)), "null"
    if typing.get_origin(kind) is dict:
        return ("{}",)
    return () if default == "???" or dataclasses.is_dataclass(default) else (as_typed(default),)


def callback(name: str = "") -> str:
    """Returns a callback's form in a config: the one that is named, or one that Keras has.

    >>> callback("keras.callbacks.TensorBoard"), callback("no_such_callback")
    ('{_target_: keras.callbacks.TensorBoard}', '{_target_: keras.callbacks.EarlyStopping}')
    """
    try:
        targets.check({targets.KEY: f"keras.callbacks.{name}"}, "train.callbacks", search=sys.path)
    except UserError:
        name = name if "." in name else "EarlyStopping"
    return _written(name, "keras.callbacks")


def _written(name: str, package: str) -> str:
    return f"{{{targets.KEY}: {name if '.' in name else f'{package}.{name}'}}}"


def in_shell(line: str) -> str:
    """Returns a part of a command as it is typed in a shell, in quotes where it needs them.

    >>> in_shell("workers=2"), in_shell("train.metrics=[accuracy]")
    ('workers=2', "'train.metrics=[accuracy]'")
    """
    return f'"{line}"' if "'" in line and not {*line} & {*'"$`\\!'} else shlex.quote(line)


def misfit(key: str, value: object, schema: type = Config) -> OmegaConfBaseException | None:
    """Returns OmegaConf's error about a value that is not of the type of its key; None for one that is."""
    kind = find(key, schema)[1]
    if bool in (kind, *typing.get_args(kind)) and isinstance(value, int) and value not in (0, 1):
        # OmegaConf takes any whole number but 0 for true, and no other number.
        value = float(value)
    try:
        OmegaConf.update(blank(schema, scratch=True), key, value, merge=True)
    except OmegaConfBaseException as error:
        return error
    return None


@cache
def blank(schema: type, scratch: bool = False) -> DictConfig:
    """Returns the config of a schema without an override, made once as that takes long; `scratch` may be changed."""
    config: DictConfig = copy.deepcopy(blank(schema)) if scratch else OmegaConf.structured(schema)
    return config


def is_list(key: str, schema: type = Config) -> bool:
    """True if a key holds a list."""
    kind = find(key, schema)[1]
    return any(typing.get_origin(one) is list for one in (kind, *typing.get_args(kind)))


def keys(schema: type = Config, groups: bool = False) -> list[str]:
    """Every key of the schema, dotted; with `groups` those that hold keys."""
    return [key for key, field in places(schema).items() if dataclasses.is_dataclass(field.type) == groups]


def find(key: str, schema: type = Config) -> tuple[str, object, object, list[str]]:
    """Returns how far a key leads into the schema: the part that is there, its type and default, the names after it.

    >>> find("train.seed"), find("train.seed.x")
    (('train.seed', <class 'int'>, 0, []), ('train.seed', <class 'int'>, 0, ['x']))
    """
    names = key.split(".")
    for count in range(len(names), 0, -1):
        if field := places(schema).get(place := ".".join(names[:count])):
            factory = field.default_factory
            default = field.default if factory is dataclasses.MISSING else factory()
            return place, field.type, default, names[count:]
    return "", schema, "???", names

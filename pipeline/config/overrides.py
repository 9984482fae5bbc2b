"""Refuses what is wrong with what was typed, as Hydra parses it, before anything is composed of it."""

import dataclasses
import re
from collections.abc import Callable, Sequence

from hydra.core.override_parser.types import Override

from pipeline.config import shipped
from pipeline.config.config import NAMED
from pipeline.config.instead import find, fitting, in_shell, is_list, misfit, typeable
from pipeline.config.messages import HELP, explain, unknown_key
from pipeline.errors import UserError

# A number written with a comma in each thousand.
THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
# What a sweep is as a whole.
WHOLE = ("sweep", "output_dir", "mode", "hydra")


def check_not_swept(overrides: Sequence[Override]) -> None:
    """Refuses several values where one run was asked for."""
    for override in overrides:
        if override.is_sweep_override():
            line, key = str(override.input_line), override.key_or_group
            value = line.partition("=")[2]
            one = f"{key}=[{value}]" if is_list(key) else f"{key}={value.replace(',', '')}"
            instead = f"{in_shell(one)}, or " if is_list(key) or THOUSANDS.fullmatch(value) else ""
            raise UserError("one value", line, f"{instead}-m {in_shell(line)} for a run with each")


def check_overrides(overrides: Sequence[Override], schema: type, is_group: Callable[[str], bool]) -> None:
    """Refuses keys that are not in the schema, values of another type, and what can be no choice. Raises `UserError`.

    What depends on the files of choices, as the arguments of a function do, shows when it is composed.
    """
    for override in overrides:
        key = override.key_or_group
        if override.is_sweep_override() and key.replace("/", ".").split(".")[0] in WHOLE:
            raise UserError(f"one value of {key} for a whole sweep", override.input_line, "a command for each")
        _, kind, default, rest = find(key, schema)
        value = override.value()
        if override.is_delete():
            if not rest and key not in NAMED:
                raise UserError(_kept(key, kind, default))
        elif is_group(key) and not isinstance(value, dict):
            if not isinstance(value, str | list) and not override.is_sweep_override():
                received = "null" if value is None else value
                instead = f"Try {fitting(f'{key}={value}', schema)}." if key in shipped.choices() else HELP
                raise UserError(f"Expected the name of a choice after a group, received {received}. {instead}")
        elif rest and dataclasses.is_dataclass(kind) and key.split(".")[0] != "hydra":
            raise UserError(unknown_key(key, schema, str(override.input_line).partition("=")[2]))
        elif rest or override.is_sweep_override() or "${" in str(override.input_line):
            continue
        elif (error := misfit(key, value, schema)) is not None:
            raise UserError(explain(error, schema, [override])) from error


def _kept(key: str, kind: object, default: object) -> str:
    """What is wrong with deleting what the schema would put back with its own defaults, not those of `conf/`."""
    if dataclasses.is_dataclass(kind):
        first = dataclasses.fields(kind)[0].name
        return (
            f"Expected {key} to keep its keys, received ~{key}. Try without it, or {key}.{first}=... for a key of it."
        )
    usual = typeable(default)
    return f"Expected {key} to keep a value, received ~{key}. Try {key}={'...' if usual is None else usual}."

"""Turns what was typed into options and overrides, and refuses what is wrong with them before Hydra composes."""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from typing import NoReturn

from hydra.core.override_parser.types import Override

from pipeline.config import shipped
from pipeline.config.config import NAMED
from pipeline.config.instead import find, fitting, in_shell, is_list, meant_by_key, misfit, usual
from pipeline.config.refusals import help_of, refusal, unknown_key
from pipeline.errors import UserError, as_typed

# Options with a value, as they are typed.
WITH_VALUE = {
    "--config-path": "--config-dir=FOLDER", "--config-dir": "--config-dir=FOLDER",
    "--config-name": "--config-name=config", "--cfg": "--cfg job", "--info": "--info searchpath",
    "--package": "--cfg job --package train",
}  # fmt: skip
# Options of which only one can be obeyed.
COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
# A number written with a comma in each thousand.
THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")
# Keys that a whole sweep has one value of.
WHOLE = ("sweep", "output_dir", "mode", "hydra")


class Parser(argparse.ArgumentParser):
    """Hydra's options and overrides, in any order."""

    def __init__(self) -> None:
        super().__init__(prog="python -m pipeline", add_help=False)
        self.add_argument("overrides", nargs="*", help="key=value and group=choice")
        for long, short, does in (
            ("--help", "-h", "This program's help"),
            ("--hydra-help", "", "This page"),
            ("--run", "-r", "One run"),
            ("--multirun", "-m", "A sweep: a run of each combination of values"),
            ("--resolve", "", "With --cfg: values in place of what refers to them"),
            ("--shell-completion", "-sc", "Hydra's own completion; see also --completion"),
        ):
            self.add_argument(*filter(None, (long, short)), action="store_true", help=does)
        self.add_argument("--cfg", "-c", choices=["job", "hydra", "all"], help="Prints the config in place of a run")
        self.add_argument("--package", "-p", help="With --cfg: the part of the config that is printed")
        self.add_argument("--config-path", "-cp", help="Folder of choices in place of this program's own")
        self.add_argument("--config-name", "-cn", help="Config to begin with, config.yaml by default")
        self.add_argument("--config-dir", "-cd", help="Folder of more choices")
        self.add_argument("--info", "-i", const="all", nargs="?", choices=INFO, help="What Hydra knows")

    def error(self, message: str) -> NoReturn:
        """Raises instead of ending the program."""
        raise argparse.ArgumentError(None, message)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Returns the options and overrides of a command line. Raises `UserError`.

    >>> options(["workers=2", "--config-dir", "mine", "model=own", "-m"]).overrides
    ['workers=2', 'model=own']
    >>> options(["--workers", "2"])
    Traceback (most recent call last):
    pipeline.errors.UserError: Expected options that exist, with their values, received unrecognized \
arguments: --workers. Try workers=2.
    """
    try:
        typed: argparse.Namespace = Parser().parse_intermixed_args(arguments)
    except argparse.ArgumentError as error:
        problem = error.message
        instead = _instead_of(arguments, problem)
        raise UserError("options that exist, with their values", problem, instead) from None
    if sum(getattr(typed, name) not in (False, None) for name in COMMANDS) > 1:
        raise UserError(f"one of --{', --'.join(COMMANDS)}", "several", "one of them")
    if typed.resolve and not typed.cfg:
        raise UserError("--resolve beside --cfg", "it alone", "--cfg job --resolve")
    return typed


def _instead_of(arguments: Sequence[str], problem: str) -> str:
    """Returns what to type in place of an option that is none: `key=value` where it is a key with dashes.

    >>> _instead_of(["--batch-size", "8"], "unrecognized arguments: --batch-size"), _instead_of(["--x"], "--x")
    ('train.global_batch=8', '`python -m pipeline --help`')
    """
    for option, text in WITH_VALUE.items():
        if option in problem:
            return text
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if not option.startswith("-") or option not in problem:
            continue
        following = "".join(arguments[place + 1 : place + 2])
        if not equals and not following.startswith("-") and "=" not in following:
            value = following
        key = option.strip("-").replace("-", "_")
        if not find(key)[3]:
            return fitting(f"{key}={value or (usual(key) or ('null',))[0]}")
        if closest := meant_by_key(key, value=value):
            return " or ".join(closest)
    return "`python -m pipeline --help`"


def where_configs_are(typed: argparse.Namespace) -> tuple[str, ...]:
    """Returns the options that say where configs are, to be typed again.

    >>> where_configs_are(options(["--config-dir", "mine", "model=own", "-m"]))
    ('--config-dir=mine',)
    """
    named = {name: getattr(typed, name) for name in ("config_path", "config_name", "config_dir")}
    return tuple(f"--{name.replace('_', '-')}={value}" for name, value in named.items() if value)


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
            instead = fitting(f"{key}={value}", schema) if key in shipped.choices() else help_of(schema)
            raise UserError("the name of a choice after a group", as_typed(value), instead)
    elif rest and dataclasses.is_dataclass(kind) and key.split(".")[0] != "hydra":
        raise unknown_key(key, schema, line.partition("=")[2])
    elif rest or override.is_sweep_override() or "${" in line:
        return
    elif (error := misfit(key, value, schema)) is not None:
        raise refusal(error, schema, [override]) from error

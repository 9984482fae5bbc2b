"""Turns options and overrides into composed configs, and runs them: `python -m pipeline [-m] key=value ...`.

What runs them is imported once they are composed, so that what is wrong with a config is said at once.
"""

import argparse
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from itertools import chain
from typing import NoReturn

from pipeline.config import config as configs
from pipeline.config.composing import Composer
from pipeline.config.instead import meant_by_option
from pipeline.config.schema import Config
from pipeline.errors import UserError, unwritten
from pipeline.plan.checks import check_ranges

# Options of which only one can be obeyed.
COMMANDS = ("run", "multirun", "cfg", "info", "shell_completion")
INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    if "--version" in arguments:
        from importlib import metadata

        try:
            version = metadata.version("distributed-keras-pipeline")
        except metadata.PackageNotFoundError:
            version = "(not installed)"
        print(f"pipeline {version}")
        return 0
    configs.register(_devices)
    try:
        typed = options(arguments)
        composer = Composer(typed.config_name or "config", Config, typed.config_dir, typed.config_path)
        if _shown(composer, typed):
            return 0
        points = composer.points(typed.overrides, typed.multirun, check_ranges)
        # A sweep takes longer: it is composed where signals are heeded.
        first = [] if typed.multirun else [next(points)]
    except (UserError, OSError) as error:
        return refused(error)
    from pipeline.commands.running import run_all

    named = {name: getattr(typed, f"config_{name}") for name in ("path", "name", "dir")}
    again = tuple(f"--config-{name}={value}" for name, value in named.items() if value)
    return run_all(chain(first, points), again)


def refused(error: Exception) -> int:
    """Says what is wrong with what was typed; returns the exit code. Raises what is no user's mistake."""
    from pipeline.views.terminal import say_error

    if isinstance(error, OSError):
        place = error.filename or "the output folder"
        error = UserError(f"to be able to write {place}", error.strerror or error, "output_dir=..")
    if not isinstance(error, UserError):
        raise error
    say_error(str(error))
    return 2


def _devices() -> int:
    # Only for a config that asks for it.
    from pipeline.driver.requests import devices

    return devices(os.environ)


def _shown(composer: Composer, typed: argparse.Namespace) -> bool:
    """Prints what was typed in place of a run, if anything was, and returns whether; ends where nobody reads on."""
    handler = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        if typed.help:
            from pipeline.commands import help as pages

            print(pages.text(composer, typed.overrides, shutil.get_terminal_size().columns), end="")
        shown = typed.help or composer.show(typed, Parser())
        sys.stdout.flush()
        return bool(shown)
    except OSError as error:
        raise unwritten(error) from error
    finally:
        signal.signal(signal.SIGPIPE, handler)


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

    >>> options(["--workers", "2"])
    Traceback (most recent call last):
    pipeline.errors.UserError: Expected options that exist, with their values, received unrecognized \
arguments: --workers. Try workers=2.
    """
    try:
        typed: argparse.Namespace = Parser().parse_intermixed_args(arguments)
    except argparse.ArgumentError as error:
        problem = error.message
        raise UserError("options that exist, with their values", problem, meant_by_option(arguments, problem)) from None
    if sum(getattr(typed, name) not in (False, None) for name in COMMANDS) > 1:
        raise UserError(f"one of --{', --'.join(COMMANDS)}", "several", "one of them")
    if typed.resolve and not typed.cfg:
        raise UserError("--resolve beside --cfg", "it alone", "--cfg job --resolve")
    return typed

"""Turns the command line of `python -m pipeline prepare` into a filled folder, and that into an exit code.

0: done, or all was there. 1: failed. 2: refused, and nothing was started. 128 + n: ended by signal n.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pipeline.data.errors import DataError
from pipeline.errors import UserError
from pipeline.launch import LaunchError, machine, signals
from pipeline.prepare import cluster, filling, settings
from pipeline.views import terminal as show
from pipeline.views.terminal.prepared import PrepareProgress, summary_lines


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipeline prepare", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    given, overrides = parser.parse_known_args(arguments)
    if given.help:
        print(settings.help_text(), end="")
        return 0
    wrong = [override for override in overrides if override.startswith("-")]
    if wrong:
        return _tell(f"Expected options that exist, received {wrong[0]}. Try --help.", 2)
    search = (os.getcwd(), *sys.path)
    try:
        config = settings.compose(overrides, given.config_dir)
        settings.check(config, search)
    except UserError as error:
        return _tell(str(error), 2)
    console = show.console_on(sys.stdout)
    start = partial(
        cluster.workers,
        config.processes or len(machine.usable_cores()),
        config.scheduler,
        Path(config.out or ""),
    )
    try:
        with signals.interrupt(), PrepareProgress(console) as progress:
            made = filling.prepare(config, search, start, progress)
    except signals.Interrupted as interrupted:
        return _tell(f"Ended by {interrupted}. The same command goes on.", 128 + interrupted.number)
    except (DataError, LaunchError) as error:
        return _tell(str(error), 1)
    except UserError as error:
        return _tell(str(error), 2)
    except OSError as error:
        return _tell(
            f"Expected to be able to write {error.filename or config.out}, received: {error.strerror or error}. "
            f"Try out=ANOTHER, or making space.",
            1,
        )
    for line in summary_lines(made.manifest, str(config.out), made.reused, made.seconds, made.seconds_shards):
        show.say(console, line)
    return 0


def _tell(message: str, code: int) -> int:
    show.say_error(message)
    return code

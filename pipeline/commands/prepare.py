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
from pipeline.launch import LaunchError, signals, this_machine
from pipeline.prepare import cluster, filling, settings
from pipeline.views import terminal as show
from pipeline.views.terminal.prepared import PrepareProgress, summary_lines


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipeline prepare", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    typed, overrides = parser.parse_known_args(arguments)
    if typed.help:
        print(settings.help_text(), end="")
        return 0
    wrong = [override for override in overrides if override.startswith("-")]
    if wrong:
        return _tell(UserError("options that exist", wrong[0], "--help"), 2)
    search = (os.getcwd(), *sys.path)
    try:
        config = settings.compose(overrides, typed.config_dir)
        settings.check(config, search)
    except UserError as error:
        return _tell(error, 2)
    console = show.console_on(sys.stdout)
    start = partial(
        cluster.workers,
        config.processes or len(this_machine.usable_cores()),
        config.scheduler,
        Path(config.out or ""),
    )
    try:
        with signals.interrupt(), PrepareProgress(console) as progress:
            prepared = filling.prepare(config, search, start, progress)
    except signals.Interrupted as interrupted:
        return _tell(f"Ended by {interrupted}. The same command goes on.", 128 + interrupted.number)
    except (DataError, LaunchError) as error:
        return _tell(error, 1)
    except UserError as error:
        return _tell(error, 2)
    except OSError as error:
        place, why = error.filename or config.out, error.strerror or error
        return _tell(UserError(f"to be able to write {place}", why, "out=ANOTHER, or making space"), 1)
    for line in summary_lines(
        prepared.manifest, str(config.out), prepared.reused, prepared.seconds, prepared.seconds_shards
    ):
        show.say(console, line)
    return 0


def _tell(message: object, code: int) -> int:
    show.say_error(str(message))
    return code

"""The command that writes a sweep's report again: `python -m pipeline report NAME [output_dir=outputs]`.

It prints the table, the verdict and where the report is. 0: written. 2: there is no such sweep, or no writing there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from pipeline.analyze.history import find_sweep
from pipeline.commands.verbs import OUTPUT_DIR, Key, Verb, Words
from pipeline.errors import UserError
from pipeline.run.views import Tracking
from pipeline.views import report
from pipeline.views import terminal as show
from pipeline.views.mlflow import Tracker

if TYPE_CHECKING:
    from rich.console import Console

# A report, and what to type where MLflow does not hold it yet.
Written: TypeAlias = "tuple[report.WrittenReport, str | None]"
VERB = Verb(
    "report",
    "NAME|FOLDER",
    "Writes the report of a sweep into its folder, and into MLflow if its runs are tracked.",
    (OUTPUT_DIR, Key("sweep", None, "the sweep's name or folder, also as the first word")),
    most=1,
)
# For MLflow to have it all; what is not there by then is sent by `python -m pipeline sync`.
DRAIN_SECONDS = 60.0


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    return VERB.run(arguments, _report)


def _report(typed: Words) -> int:
    output, name = Path(typed["output_dir"]), typed["sweep"] or "".join(typed.words)
    if typed.words and typed["sweep"]:
        raise UserError("one sweep", "two", VERB.usage)
    tracker = Tracker(os.environ, output / "tracker.log")
    try:
        folder = find_sweep(name, output, "sweep", "`python -m pipeline -m ...` first")
        written = write(folder, tracker, DRAIN_SECONDS)
    except OSError as error:
        show.say_error(f"The report cannot be written: {error}.")
        return 2
    finally:
        tracker.close(DRAIN_SECONDS)
    show_written(written, show.console_on(sys.stdout))
    return 0


def write(folder: Path, tracker: Tracking, seconds: float) -> Written:
    """Writes the report of the sweep in `folder`, and sends it to where the sweep's points are tracked.

    Raises `UserError` where there is no sweep, and `OSError` where the folder cannot be written to.
    """
    written = report.write(folder)
    store = report.store_of(written.sweep)
    if store is None:
        return written, None
    report.track(written.sweep.folder, written, tracker, store)
    return written, report.unsent(written.sweep.folder, tracker, seconds)


def show_written(written: Written, console: Console) -> None:
    """Shows a report: the table, the verdict, where it is, and what of it MLflow lacks."""
    text, unsent = written
    console.print(show.sweep_table(text.results))
    for line in text.shown():
        show.say(console, line)
    if unsent:
        show.say_error(unsent)

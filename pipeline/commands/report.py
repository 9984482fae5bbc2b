"""The command that writes a sweep's report again: `python -m pipeline report NAME [output_dir=outputs]`.

It prints the table, the verdict and where the report is. 0: written. 2: there is no such sweep, or no writing there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.analyze.history import find_sweep
from pipeline.commands.verbs import OUTPUT_DIR, Key, Verb, Words
from pipeline.driver.views import Tracking
from pipeline.errors import UserError
from pipeline.views import report
from pipeline.views import terminal as show
from pipeline.views.mlflow import Tracker

if TYPE_CHECKING:
    from rich.console import Console

VERB = Verb(
    "report",
    "NAME|FOLDER",
    "Writes the report of a sweep into its folder, and into MLflow if its runs are tracked.",
    (OUTPUT_DIR, Key("sweep", None, "the sweep's name or folder, also as the first word")),
    most=1,
)
# For MLflow to have it all; what is not there by then is sent by `python -m pipeline sync`.
DRAIN_SECONDS = 60.0


@VERB
def main(typed: Words) -> int:
    """Writes the report of a sweep."""
    output, name = Path(typed["output_dir"]), typed["sweep"] or "".join(typed.words)
    if typed.words and typed["sweep"]:
        raise UserError("one sweep", "two", VERB.usage)
    tracker = Tracker(os.environ, output / "tracker.log")
    try:
        folder = find_sweep(name, output, "sweep", "`python -m pipeline -m ...` first")
        written = report.write(folder)
        unsent = report.unsent(folder, tracker, DRAIN_SECONDS) if send(written, tracker) else None
    except OSError as error:
        show.say_error(f"The report cannot be written: {error}.")
        return 2
    finally:
        tracker.close(DRAIN_SECONDS)
    show_written(written, show.console_on(sys.stdout))
    if unsent:
        show.say_error(unsent)
    return 0


def send(written: report.WrittenReport, tracker: Tracking) -> Path | None:
    """Has a tracker send the report to where the sweep's points are tracked, and returns the folder of its log.

    None where they are tracked nowhere. Raises `OSError`.
    """
    store = report.store_of(written.sweep)
    if store is None:
        return None
    report.track(written.sweep.folder, report.with_ids(written), tracker, store)
    return written.sweep.folder.resolve() / report.FOLDER


def show_written(written: report.WrittenReport, console: Console) -> None:
    """Shows a report: the table, the verdict, and where it is."""
    console.print(show.sweep_table(written.results))
    for line in written.shown():
        show.say(console, line)

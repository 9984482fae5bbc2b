"""The command that writes a sweep's report again: `python -m pipeline report NAME [output_dir=outputs]`.

It prints the table, the verdict and where the report is. 0: written. 2: there is no such sweep, or no writing there.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.analyze.history import find_sweep
from pipeline.commands.verbs import OUTPUT_DIR, Key, Verb, Words
from pipeline.errors import UserError
from pipeline.views import report
from pipeline.views import terminal as show
from pipeline.views.mlflow import Tracker

VERB = Verb(
    "report",
    "NAME|FOLDER",
    "Writes the report of a sweep into its folder, and into MLflow where its points are tracked.",
    (OUTPUT_DIR, Key("sweep", None, "the sweep, in place of a word")),
    most=1,
)
# For MLflow to have it all; what is not there by then is sent by `python -m pipeline sync`.
DRAIN_SECONDS = 60.0


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    return VERB.run(arguments, _report)


def _report(typed: Words) -> int:
    console = show.console_on(sys.stdout)
    output, name = Path(typed["output_dir"]), typed["sweep"] or "".join(typed.words)
    if typed.words and typed["sweep"]:
        raise UserError("one sweep", "two", VERB.usage)
    try:
        written = report.write(find_sweep(name, output, "sweep", "`python -m pipeline -m ...` first"))
        problem = _track(written, output)
    except OSError as error:
        show.say_error(f"The report cannot be written: {error}.")
        return 2
    console.print(show.sweep_table(written.results))
    for line in written.shown():
        show.say(console, line)
    if problem:
        show.say_error(problem)
    return 0


def _track(written: report.WrittenReport, output: Path) -> str | None:
    """Sends the report to where the sweep's points are tracked; returns what went wrong."""
    store = report.store_of(written.sweep)
    if store is None:
        return None
    folder = written.sweep.folder
    tracker = Tracker(os.environ, output / "tracker.log")
    try:
        report.track(folder, written, tracker, store)
        return report.unsent(folder, tracker, DRAIN_SECONDS)
    finally:
        tracker.close(DRAIN_SECONDS)

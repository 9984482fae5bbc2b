"""The command that writes a sweep's report again: `python -m pipeline report NAME [output_dir=outputs]`.

It prints the table, the verdict and where the report is. 0: written. 2: there is no such sweep, or no writing there.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pipeline.analyze.history import HistoryError, find_sweep
from pipeline.views import report
from pipeline.views import terminal as show
from pipeline.views.mlflow import Tracker

USAGE = "python -m pipeline report NAME|FOLDER [output_dir=outputs]"
# For MLflow to have it all; what is not there by then is sent by `python -m pipeline sync`.
DRAIN_SECONDS = 60.0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(given):
        print(f"{USAGE}\n\nWrites the report of a sweep into its folder, and into MLflow where its points are tracked.")
        return 0
    console = show.console_on(sys.stdout)
    try:
        asked = _asked(given)
        output = Path(asked.get("output_dir", "outputs"))
        written = report.write(find_sweep(asked.get("sweep", ""), output, "sweep", "`python -m pipeline -m ...` first"))
        problem = _track(written, output)
    except (HistoryError, OSError) as error:
        said = error if isinstance(error, HistoryError) else f"The report cannot be written: {error}."
        print(show.error_text(str(said)), file=sys.stderr)
        return 2
    console.print(show.sweep_table(written.results))
    for line in written.shown():
        console.print(line, soft_wrap=True)
    if problem:
        print(show.error_text(problem), file=sys.stderr)
    return 0


def _asked(arguments: Sequence[str]) -> dict[str, str]:
    """The values by their keys. Raises `HistoryError`."""
    named = [argument if "=" in argument else f"sweep={argument}" for argument in arguments]
    asked = dict(argument.partition("=")[::2] for argument in named)
    for name in asked:
        if name not in ("sweep", "output_dir"):
            raise HistoryError(f"Expected sweep=... and output_dir=..., received {name}. Try {USAGE}.")
    return asked


def _track(written: report.Written, output: Path) -> str | None:
    """Sends the report to where the sweep's points are tracked; returns what went wrong."""
    store = report.store_of(written.sweep)
    if store is None:
        return None
    folder = written.sweep.folder
    tracker = Tracker(os.environ, output / "tracker.log")
    try:
        report.track(folder, written, tracker, store)
        drained, problem = tracker.drain(DRAIN_SECONDS)
    finally:
        tracker.close()
    if drained:
        return None
    return (
        f"MLflow does not hold the report yet{f' ({problem})' if problem else ''}. "
        f"`python -m pipeline sync {folder / report.FOLDER}` sends it."
    )

"""Says again what a run's lost efficiency was made of: `python -m pipeline explain RUN`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipeline.analyze.history import HistoryError, find, load
from pipeline.views import terminal as show
from pipeline.views.terminal.explained import explained_lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 0 told, 2 the run cannot be found, or was not explained."""
    parser = argparse.ArgumentParser(
        prog="python -m pipeline explain",
        description="Says what a run's lost efficiency was made of; with key=value in place of RUN, trains first.",
    )
    parser.add_argument("run", metavar="RUN", help="a folder, its name, or the first letters of an MLflow id")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="where to look: %(default)s")
    given = parser.parse_args(arguments)
    try:
        run = load(find(given.run, given.output_dir))
        lines = explained_lines(run.result.explained, run.result.speed.efficiency)
        if not lines:
            raise HistoryError(
                f"Expected a run that was explained, received {run.folder}, which was not. "
                f"Try python -m pipeline explain strategy=... to train and explain."
            )
    except HistoryError as error:
        print(show.error_text(str(error)), file=sys.stderr)
        return 2
    for line in lines:
        Console(highlight=False, markup=False).print(line, soft_wrap=True)
    return 0

"""Compares runs: what was asked for differently, what came out differently, and how sure that is.

    python -m pipeline compare RUN RUN [RUN ...]

A run is its folder, the folder's name, or its id in MLflow, of which the first letters are enough. It reads what runs
wrote and starts nothing. 0: compared. 2: a run cannot be found or read.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.analyze import comparable, verdict
from pipeline.analyze.history import HistoryError, Run, find, load
from pipeline.views import terminal as show

# What a plan holds that nobody asked for, or that follows from the rest.
OF_NO_INTEREST = ("processes", "notes", "machine", "rehearsal", "oversubscribed")
# Values of one training, of which there is one each, so that nothing can be said of how sure a difference is.
ONCE = ("loss", "val_loss", "metrics", "val_metrics", "seconds_startup", "seconds_training", "staleness_mean")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pipeline compare", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="a folder, its name, or the first letters of an MLflow id"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("outputs"), help="where to look: %(default)s")
    given = parser.parse_args(arguments)
    try:
        if len(given.runs) < 2:
            raise HistoryError(f"Expected two runs or more, received {len(given.runs)}. Try RUN RUN.")
        runs = [load(find(run, given.output_dir)) for run in given.runs]
    except HistoryError as error:
        print(show.error_text(str(error)), file=sys.stderr)
        return 2
    console = Console(highlight=False, markup=False)
    made = compared(runs)
    names, results = [run.folder.name for run in runs], [run.result for run in runs]
    marks = comparable.marks(runs)
    for line in show.compared_lines(names, results, marks, made.verdicts, made.unlike, made.settings, made.outcomes):
        console.print(line, soft_wrap=True)
    return 0


@dataclass(frozen=True)
class Compared:
    """What differs between runs: settings by dotted key, with a value for each run, and what they came to, likewise.

    `verdicts` says of each pair of runs which is faster, or that they tie. `unlike` says in what runs differ that makes
    their speeds say nothing of each other.
    """

    settings: tuple[tuple[str, tuple[Any, ...]], ...]
    outcomes: tuple[tuple[str, tuple[Any, ...]], ...]
    verdicts: tuple[str, ...]
    unlike: tuple[str, ...]


def compared(runs: Sequence[Run]) -> Compared:
    """What differs between `runs`."""
    flat = [dict(comparable.flat(_asked(run))) for run in runs]
    keys = list(dict.fromkeys(key for each in flat for key in each))
    settings = [(key, tuple(each.get(key) for each in flat)) for key in keys]
    outcomes = [dict(comparable.flat({name: run.result.get(name) for name in ONCE})) for run in runs]
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome))
    seen = verdict.spread(runs)
    unlike = tuple(
        dict.fromkeys(
            f"{f'{one} and {other}: ' * (len(runs) > 2)}{why}"
            for one, other in combinations(range(len(runs)), 2)
            for why in comparable.unlike(runs[one], runs[other])
        )
    )
    return Compared(
        tuple((key, values) for key, values in settings if len(set(map(repr, values))) > 1),
        tuple(
            (name, tuple(outcome.get(name) for outcome in outcomes))
            for name in names
            if any(outcome.get(name) is not None for outcome in outcomes)
        ),
        tuple(
            verdict.between(one, other, runs[one], runs[other], seen)
            for one, other in combinations(range(len(runs)), 2)
        ),
        unlike,
    )


def _asked(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.plan.items() if name not in OF_NO_INTEREST} | {
        "versions": run.result.get("versions")
    }

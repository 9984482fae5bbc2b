"""Compares runs: what was asked for differently, what came out differently, and how sure that is.

    python -m pipeline compare RUN RUN [RUN ...] [output_dir=outputs]

A run is its folder, the folder's name, or its id in MLflow, of which the first letters are enough. It reads what runs
wrote and starts nothing. 0: compared. 2: a run cannot be found or read.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from pipeline.analyze import comparable
from pipeline.analyze.compare import Judge
from pipeline.analyze.history import LoggedRun, find, load
from pipeline.commands.verbs import OUTPUT_DIR, Verb, Words
from pipeline.record.results import Result
from pipeline.views import terminal as show
from pipeline.views.terminal.verdict_text import pair_text, unlike_text

# What a plan holds that nobody asked for, or that follows from the rest.
OF_NO_INTEREST = ("version", "processes", "notes", "machine", "rehearsal", "oversubscribed")
# More words than anybody types.
MANY = 10_000
# Each run's own.
PLACES = ("checkpoint.folder", "checkpoint.before")


VERB = Verb(
    "compare",
    "RUN RUN [RUN ...]",
    "Shows which settings and results of runs differ, which run is faster, and how sure that is.\n"
    "A RUN is a folder, its name, or the first letters of an MLflow id.",
    (OUTPUT_DIR,),
    least=2,
    most=MANY,
)


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns the exit code."""
    return VERB.run(arguments, _compare)


def _compare(typed: Words) -> int:
    runs = [load(find(run, Path(typed["output_dir"]))) for run in typed.words]
    console = show.console_on(sys.stdout)
    differences = compared(runs)
    names, results = [run.folder.name for run in runs], [run.result for run in runs]
    marks = comparable.marks(runs)
    for line in show.compared_lines(
        names, results, marks, differences.verdicts, differences.unlike, differences.settings, differences.outcomes
    ):
        show.say(console, line)
    return 0


@dataclass(frozen=True)
class Compared:
    """Differences between runs: settings by dotted key, with a value for each run, and results, likewise.

    `verdicts` says of each pair of runs which is faster, or that they tie. `unlike` says in what runs differ that makes
    their speeds say nothing of each other.
    """

    settings: tuple[tuple[str, tuple[object, ...]], ...]
    outcomes: tuple[tuple[str, tuple[object, ...]], ...]
    verdicts: tuple[str, ...]
    unlike: tuple[str, ...]


def compared(runs: Sequence[LoggedRun]) -> Compared:
    """Returns what differs between `runs`."""
    flat = [dict(comparable.flat(_asked(run))) for run in runs]
    keys = list(dict.fromkeys(key for settings_of in flat for key in settings_of if key not in PLACES))
    settings = [(key, tuple(settings_of.get(key) for settings_of in flat)) for key in keys]
    outcomes = [dict(comparable.flat(_came_to(run.result))) for run in runs]
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome))
    judge, engines = Judge(runs), {place: mark.engine for place, mark in enumerate(comparable.marks(runs))}
    unlike = tuple(
        dict.fromkeys(
            f"{f'{one} and {other}: ' * (len(runs) > 2)}{unlike_text(why)}"
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
            pair_text(one, other, judge.between(runs[one], runs[other]), engines)
            for one, other in combinations(range(len(runs)), 2)
        ),
        unlike,
    )


def _asked(run: LoggedRun) -> dict[str, object]:
    settings = {name: value for name, value in run.settings.items() if name not in OF_NO_INTEREST}
    return settings | {"versions": run.result.environment.versions}


def _came_to(result: Result) -> dict[str, object]:
    """Values of one training, of which there is one each, so that nothing can be said of how sure a difference is."""
    training = result.training
    return {
        "stopped_by": training.stopped_by,
        "stopped_at": training.stopped_at,
        "loss": training.loss,
        "val_loss": training.val_loss,
        "metrics": training.metrics,
        "val_metrics": training.val_metrics,
        "seconds_startup": training.seconds_startup,
        "seconds_training": training.seconds_training,
        "staleness_mean": result.staleness.staleness_mean,
    }

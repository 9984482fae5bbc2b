"""Compares runs: what was asked for differently, what came out differently, and how sure that is.

    python -m pipeline compare RUN RUN [RUN ...] [output_dir=outputs]

A run is its folder, the folder's name, or its id in MLflow, of which the first letters are enough. It reads what runs
wrote and starts nothing. 0: compared. 2: a run cannot be found or read.
"""

import sys
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path

from pipeline.analyze import comparable
from pipeline.analyze.compare import Judge
from pipeline.analyze.history import LoggedRun, load
from pipeline.commands.verbs import OUTPUT_DIR, Verb, Words
from pipeline.config.parts import flat
from pipeline.driver.run_folders import find
from pipeline.views import terminal as show
from pipeline.views.terminal.verdict_text import Row, pair_text, unlike_text

# What a plan holds that nobody asked for, or that follows from the rest.
OF_NO_INTEREST = ("version", "processes", "notes", "machine", "rehearsal", "oversubscribed")
# Values of one training, of which there is one each, so that nothing can be said of how sure a difference is.
OUTCOMES = (
    "stopped_by", "stopped_at", "loss", "val_loss", "metrics", "val_metrics", "seconds_startup", "seconds_training",
    "staleness_mean",
)  # fmt: skip
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


@VERB
def main(typed: Words) -> int:
    """Shows what differs between runs."""
    runs = [load(find(run, Path(typed["output_dir"]))) for run in typed.words]
    console, marks = show.console_on(sys.stdout), comparable.marks(runs)
    names, results = [run.folder.name for run in runs], [run.result for run in runs]
    judge, engines = Judge(runs), {place: mark.engine for place, mark in enumerate(marks)}
    verdicts, unlike = list[str](), dict[str, None]()
    for one, other in combinations(range(len(runs)), 2):
        verdicts.append(pair_text(one, other, judge.between(runs[one], runs[other]), engines))
        both = f"{one} and {other}: " * (len(runs) > 2)
        unlike |= {f"{both}{unlike_text(why)}": None for why in comparable.unlike(runs[one], runs[other])}
    for line in show.compared_lines(names, results, marks, verdicts, [*unlike], settings_of(runs), outcomes_of(runs)):
        show.say(console, line)
    return 0


def settings_of(runs: Sequence[LoggedRun]) -> list[Row]:
    """The settings that runs differ in: by dotted key, the value of each."""
    rows = _rows([_asked(run) for run in runs])
    return [(key, values) for key, values in rows if key not in PLACES and len(set(map(repr, values))) > 1]


def outcomes_of(runs: Sequence[LoggedRun]) -> list[Row]:
    """The results of runs that any of them has: by name, the value of each."""
    return [
        row
        for row in _rows([{name: flat(run.result)[name] for name in OUTCOMES} for run in runs])
        if any(value is not None for value in row[1])
    ]


def _rows(values: Sequence[Mapping[str, object]]) -> list[Row]:
    """By dotted key, in the order in which they come, the values of each run; None where it has none."""
    dotted = [dict(comparable.flat(of_run)) for of_run in values]
    return [(key, tuple(of_run.get(key) for of_run in dotted)) for key in dict.fromkeys(chain(*dotted))]


def _asked(run: LoggedRun) -> dict[str, object]:
    settings = {name: value for name, value in run.settings.items() if name not in OF_NO_INTEREST}
    return settings | {"versions": run.result.environment.versions}

"""The verbs that read what runs wrote, and start none: `report`, `compare` and `explain`.

A run is its folder, the folder's name, or its id in MLflow, of which the first letters are enough.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from itertools import chain, combinations
from pathlib import Path

from pipeline.analyze import comparable
from pipeline.analyze.compare import Judge
from pipeline.analyze.history import LoggedRun, find_sweep, load
from pipeline.commands.verbs import MANY, OUTPUT_DIR, Key, Words, verb
from pipeline.config.parts import flat
from pipeline.driver import Tracking
from pipeline.driver.run_folders import find
from pipeline.driver.session import lacks
from pipeline.errors import UserError
from pipeline.record.files import read_tracking
from pipeline.views import report as reports
from pipeline.views import terminal as show
from pipeline.views.mlflow import Tracker
from pipeline.views.terminal.result import explained_lines
from pipeline.views.terminal.sweep_table import sweep_table
from pipeline.views.terminal.verdict_text import Row, compared_lines, pair_text, unlike_text

# What a plan holds that nobody asked for, or that follows from the rest.
OF_NO_INTEREST = ("version", "processes", "notes", "machine", "rehearsal", "oversubscribed")
# Values of one training, of which there is one each, so that nothing can be said of how sure a difference is.
OUTCOMES = (
    "stopped_by", "stopped_at", "loss", "val_loss", "metrics", "val_metrics", "seconds_startup", "seconds_training",
    "staleness_mean",
)  # fmt: skip
# Each run's own.
PLACES = ("checkpoint.folder", "checkpoint.before")
# For MLflow to have it all; what is not there by then is sent by `python -m pipeline sync`.
DRAIN_SECONDS = 60.0


@verb(
    "NAME|FOLDER",
    "Writes the report of a sweep into its folder, and into MLflow if its runs are tracked.",
    (OUTPUT_DIR, Key("sweep", None, "the sweep's name or folder, also as the first word")),
    most=1,
)
def report(typed: Words) -> int:
    """Writes the report of a sweep."""
    output, name = Path(typed["output_dir"]), typed["sweep"] or "".join(typed.words)
    if typed.words and typed["sweep"]:
        raise UserError("one sweep", "two", report.usage)
    tracker = Tracker(os.environ, output / "tracker.log")
    try:
        folder = find_sweep(name, output, "sweep", "`python -m pipeline -m ...` first")
        written = reports.write(folder)
        sent = send(written, tracker)
        drained, problem = tracker.drain(sent, DRAIN_SECONDS) if sent else (True, None)
    except OSError as error:
        show.say_error(f"The report cannot be written: {error}.")
        return 2
    finally:
        tracker.close(DRAIN_SECONDS)
    show_written(written)
    if sent and not drained:
        show.say_error(lacks({sent: problem}))
    return 0


def send(written: reports.WrittenReport, tracker: Tracking) -> Path | None:
    """Has a tracker send the report to the points' store; its log's folder, None without a store. Raises `OSError`."""
    stores = (read_tracking(point.folder).store for point in written.sweep.points)
    store = next((store for store in stores if store and store.uri), None)
    if store is None:
        return None
    reports.track(written.sweep.folder, reports.with_ids(written), tracker, store)
    return written.sweep.folder.resolve() / reports.FOLDER


def show_written(written: reports.WrittenReport) -> None:
    """Shows a report: the table, the verdict, and where it is."""
    console = show.console_on(sys.stdout)
    console.print(sweep_table(written.sweep.points))
    for line in written.shown():
        show.say(console, line)


@verb(
    "RUN RUN [RUN ...]",
    "Shows which settings and results of runs differ, which run is faster, and how sure that is.\n"
    "A RUN is a folder, its name, or the first letters of an MLflow id.",
    least=2,
    most=MANY,
)
def compare(typed: Words) -> int:
    """Shows what differs between runs."""
    runs = [load(find(run, Path(typed["output_dir"]))) for run in typed.words]
    console, marks = show.console_on(sys.stdout), comparable.marks(runs)
    judge, engines = Judge(runs), {place: mark.engine for place, mark in enumerate(marks)}
    verdicts, unlike = list[str](), dict[str, None]()
    for one, other in combinations(range(len(runs)), 2):
        verdicts.append(pair_text(one, other, judge.between(runs[one], runs[other]), engines))
        both = f"{one} and {other}: " * (len(runs) > 2)
        whys = comparable.unlike(runs[one], runs[other])
        unlike |= {f"Speeds are not comparable: {both}{unlike_text(why)}.": None for why in whys}
    tables = {"asked for": settings_of(runs), "results": outcomes_of(runs)}
    for line in compared_lines(runs, marks, [*verdicts, *unlike], tables):
        show.say(console, line)
    return 0


def settings_of(runs: Sequence[LoggedRun]) -> list[Row]:
    """The settings that runs differ in: by dotted key, the value of each."""
    asked = [{name: value for name, value in run.settings.items() if name not in OF_NO_INTEREST} for run in runs]
    versions = [{"versions": run.result.environment.versions} for run in runs]
    rows = _rows([one | other for one, other in zip(asked, versions, strict=True)])
    return [(key, values) for key, values in rows if key not in PLACES and len(set(map(repr, values))) > 1]


def outcomes_of(runs: Sequence[LoggedRun]) -> list[Row]:
    """The results of runs that any of them has: by name, the value of each."""
    rows = _rows([{name: flat(run.result)[name] for name in OUTCOMES} for run in runs])
    return [(name, values) for name, values in rows if any(value is not None for value in values)]


def _rows(values: Sequence[Mapping[str, object]]) -> list[Row]:
    """By dotted key, in the order in which they come, the values of each run; None where it has none."""
    dotted = [dict(comparable.flat(of_run)) for of_run in values]
    return [(key, tuple(of_run.get(key) for of_run in dotted)) for key in dict.fromkeys(chain(*dotted))]


@verb(
    "RUN",
    "Explains a run's lost efficiency; RUN is a folder, its name, or the first letters of an MLflow id.\n"
    "With key=value in place of RUN it trains first: python -m pipeline explain strategy=mirrored workers=2",
    least=1,
    most=1,
)
def explain(typed: Words) -> int:
    """Shows a run's lost efficiency. 0: shown. 2: the run cannot be found, or was not explained."""
    run = load(find(typed.words[0], Path(typed["output_dir"])))
    lines = explained_lines(run.result.explained, run.result.speed.efficiency)
    if not lines:
        instead = "python -m pipeline explain strategy=... to train and explain"
        raise UserError("a run that was explained", f"{run.folder}, which was not", instead)
    console = show.console_on(sys.stdout)
    for line in lines:
        show.say(console, line)
    return 0

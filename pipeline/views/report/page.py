"""Turns a sweep, its verdict and its figures into one page of HTML that asks no other host for anything."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.analyze import calibration, comparable
from pipeline.analyze.verdict import Verdict
from pipeline.views.report.canvas import Drawn, MissingFigure, css
from pipeline.views.report.figures import interval_name
from pipeline.views.report.gather import ReportedRun, ReportedSweep
from pipeline.views.report.sweep_facts import facts, next_command
from pipeline.views.terminal.prediction_text import score_text
from pipeline.views.terminal.sweep_table import noted
from pipeline.views.terminal.verdict_text import mark_texts, verdict_lines
from pipeline.views.terminal.words import (
    bare_times,
    clean,
    duration,
    figure,
    lines_of,
    percent,
    points_text,
    rate,
    span,
    times,
)

if TYPE_CHECKING:
    from markupsafe import Markup

TEMPLATE = Path(__file__).with_name("page.html.jinja")
MISSING = "–"
# Of a run's id in MLflow: enough to find it by.
ID_LETTERS = 8
# Kinds of columns, by their classes in the page.
NUMBER, LONG = "number", "long"
TERMS = {
    "examples/s": "Training examples per second over all workers, in steady state: the median of the repeats; under it "
    "its interval, the lowest and the highest of them.",
    "speedup": "Throughput over that of one device without a strategy: the median and the range over repeats taken in "
    "turn, or the widest possible range where the baseline was measured in another run.",
    "efficiency": "Speedup over the number of devices.",
    "input wait": "Share of the step time that was spent waiting for batches.",
    "faster, as fast, not known": "Points are judged by their speedups where each measured its baseline in turn, else "
    f"by throughput. As fast is shown: the ratio lies within {comparable.MARGIN:.0%}. What is too noisy to say is not "
    "known. Probably, very likely and almost certainly are odds of 80%, 95% and 99%.",
    "group": "Points whose speeds may be compared: same model, data, batch rule, scaling, precision, machine, versions "
    "and settings. A mark beside a point says in what it differs from group A.",
    "engine": "What trains: TensorFlow, JAX, or a package's own. Throughput compares across engines; a speedup is over "
    "one device under the same engine.",
    **{doubt: f"{why[0].upper()}{why[1:]}" for doubt, why in (comparable.DOUBTS | comparable.DISTURBED).items()},
    "time to accuracy": "Seconds of training until the best validation that every point reached. The fastest need "
    "not be the first there: a larger global batch takes fewer steps of an epoch.",
}
# Terms that are explained where they occur.
WHERE_USED = ("group", "engine", *comparable.DOUBTS, *comparable.DISTURBED)


@dataclass(frozen=True)
class Column:
    """A column of the table of points."""

    title: str
    kind: str = ""


@dataclass(frozen=True)
class Cell:
    """A cell: its text, its interval under it, and the mark of a speed that is not to be taken as it is."""

    text: str
    under: str = ""
    mark: str = ""
    kind: str = ""


def page(sweep: ReportedSweep, decided: Verdict, figures: Sequence[Drawn | MissingFigure]) -> str:
    """The page. All that people named or typed is escaped."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["breakable"] = _breakable
    template = environment.from_string(TEMPLATE.read_text())
    best = set(decided.best.places) if decided.best else set()
    columns = _columns(sweep)
    used = {doubt for point in sweep.measured for doubt in point.marks.doubts}
    used |= {"group"} if len(_groups(sweep)) > 1 else set()
    used |= {"engine"} if any(point.marks.engine for point in sweep.measured) else set()
    return template.render(
        name=sweep.name,
        about=_about(sweep),
        facts=facts(sweep),
        light=css(dark=False),
        dark=css(dark=True),
        intervals=interval_name(sweep),
        verdict=verdict_lines(decided),
        command=next_command(sweep, decided),
        advice=advice(sweep, decided),
        figures=[figure for figure in figures if isinstance(figure, Drawn)],
        left_out=[figure for figure in figures if isinstance(figure, MissingFigure)],
        columns=columns,
        rows=[{"best": point.place in best, "cells": _cells(point, sweep, columns)} for point in sweep.points],
        missing=missing(sweep),
        noted=noted((point.place, point.run) for point in sweep.points),
        differences=differences(sweep),
        score=score(sweep),
        terms=[(term, meaning) for term, meaning in TERMS.items() if term not in WHERE_USED or term in used],
    )


def advice(sweep: ReportedSweep, decided: Verdict) -> list[str]:
    """Returns the advice of explained points, the best point's first."""
    best = set(decided.best.places) if decided.best else set()
    places: dict[str, list[int]] = {}
    for point in sorted(sweep.measured, key=lambda point: point.place not in best):
        explained = point.result.explained
        if explained is not None and (text := clean(explained.advice)):
            places.setdefault(text, []).append(point.place)
    return [f"{points_text(numbers).capitalize()}: {text}" for text, numbers in places.items()]


def missing(sweep: ReportedSweep) -> list[str]:
    """Returns the points that were skipped, failed or never ran, and why."""
    places: dict[str, list[int]] = {}
    for point in sweep.missing:
        why = " ".join(lines_of(point.result.ending.error)) or "no reason was given"
        text = "not run yet" if point.status == "NOT RUN" else f"{point.status.lower()}: {why}"
        places.setdefault(text, []).append(point.place)
    return [f"{points_text(place).capitalize()} {text}" for text, place in places.items()]


def differences(sweep: ReportedSweep) -> list[str]:
    """In what the measured points differ that keeps their speeds from being compared."""
    measured = sweep.measured
    lines = [f"Group {letter}: {points_text(places)}." for letter, places in _groups(sweep).items()]
    for name, values in comparable.differences([point.run for point in measured]):
        groups = "; ".join(
            f"{value}: {points_text([measured[at].place for at in where])}" for value, where in values.items()
        )
        lines.append(f"{name} differs ({groups}).")
    return lines if len(lines) > 1 else []


def score(sweep: ReportedSweep) -> str:
    """Returns how good the predictions for these points were."""
    return score_text(calibration.score([point.result for point in sweep.measured]))


def own_overrides(point: ReportedRun, sweep: ReportedSweep) -> list[str]:
    """Returns the overrides of a point that not all points share; the command at the head of the page has the rest."""
    typed = [set(other.overrides) for other in sweep.points if other.overrides]
    shared = set.intersection(*typed) if len(typed) > 1 else set()
    return [override for override in point.overrides if override not in shared]


def _about(sweep: ReportedSweep) -> str:
    finished = sum(point.status == "FINISHED" for point in sweep.points)
    machines = sorted({clean(point.result.environment.machine) for point in sweep.measured} - {""})
    points = f"{finished} of {len(sweep.points)} points finished"
    return f"{points}, on {'; '.join(machines)}." if machines else f"{points}."


def _columns(sweep: ReportedSweep) -> list[Column]:
    several = len(_groups(sweep)) > 1
    learnt = sweep.target is not None
    return [
        Column("point", kind=NUMBER),
        Column("strategy"),
        Column("workers", kind=NUMBER),
        *[Column("group")] * several,
        Column("examples/s", kind=NUMBER),
        Column("speedup", kind=NUMBER),
        Column("efficiency", kind=NUMBER),
        Column("step ms", kind=NUMBER),
        Column("input wait", kind=NUMBER),
        *[Column(f"s to {sweep.metric} {figure(sweep.target or 0.0)}", kind=NUMBER)] * learnt,
        Column("status"),
        Column("overrides", kind=LONG),
        *[Column("MLflow run")] * any(point.result.tracked.mlflow_run_id for point in sweep.points),
    ]


def _cells(point: ReportedRun, sweep: ReportedSweep, columns: Sequence[Column]) -> list[Cell]:
    speed, workers, seconds = point.result.speed, point.result.layout.workers, sweep.seconds_to_target(point)
    mark = ", ".join(mark_texts(point.marks))
    texts = {
        "point": Cell(str(point.place)),
        "strategy": Cell(clean(point.result.choices.called) or MISSING),
        "workers": Cell(MISSING if workers is None else f"{workers:,}"),
        "group": Cell(point.group or MISSING),
        "examples/s": _figure(
            speed.examples_per_second,
            rate,
            span(speed.examples_per_second_low, speed.examples_per_second_high, rate, " to "),
            mark,
        ),
        "speedup": _figure(speed.speedup, times, span(speed.speedup_low, speed.speedup_high, bare_times, " to "), mark),
        "efficiency": _figure(comparable.efficiency_of(point.result), percent, mark=mark),
        "step ms": _figure(speed.step_ms_p50, rate),
        "input wait": _figure(point.result.input.wait, percent),
        "status": Cell(point.status),
        "overrides": Cell(" ".join(map(clean, own_overrides(point, sweep)))),
        "MLflow run": Cell(clean(point.result.tracked.mlflow_run_id)[:ID_LETTERS] or MISSING),
    }
    reached = Cell(MISSING if seconds is None else duration(seconds))
    cells = [texts.get(column.title, reached) for column in columns]
    return [Cell(cell.text, cell.under, cell.mark, column.kind) for cell, column in zip(cells, columns, strict=True)]


def _breakable(typed: str) -> Markup:
    """Returns typed text, escaped, that a line may break behind its = and commas."""
    from markupsafe import Markup

    return Markup("<wbr>").join(re.split(r"(?<=[,=])", typed))


def _figure(value: float | None, write: Callable[[float], str], under: str = "", mark: str = "") -> Cell:
    """The cell of a number; one that is not known has no mark."""
    return Cell(MISSING, under) if value is None else Cell(write(value), under, mark)


def _groups(sweep: ReportedSweep) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for point in sorted(sweep.measured, key=lambda point: point.group):
        groups.setdefault(point.group, []).append(point.place)
    return groups

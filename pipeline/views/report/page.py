"""Turns a sweep, its verdict and its figures into one page of HTML that asks no other host for anything.

Its head says what was run: of which model, on what, and how to run it again.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipeline.analyze import calibration, comparable
from pipeline.analyze.verdict import Use, Verdict
from pipeline.driver.tags import PROGRAM, command_of
from pipeline.record.results import IN_THIS_RUN
from pipeline.views.report.canvas import Drawn, MissingFigure, css
from pipeline.views.report.figures import interval_name
from pipeline.views.report.gather import ReportedRun, ReportedSweep
from pipeline.views.terminal.prediction_text import score_text
from pipeline.views.terminal.sweep_table import (
    OWN_BASELINE,
    difference_texts,
    engines_text,
    noted,
    reasons,
    shared_and_own,
)
from pipeline.views.terminal.verdict_text import mark_texts, verdict_lines
from pipeline.views.terminal.words import (
    by_points,
    clean,
    duration,
    figure,
    listed,
    or_missing,
    percent,
    plural,
    points_text,
    rate,
    span,
    speedup_span,
    throughput_span,
    times,
)

if TYPE_CHECKING:
    from markupsafe import Markup

TEMPLATE = Path(__file__).with_name("page.html.jinja")
MISSING = "–"
# Of a run's id in MLflow: enough to find it by.
ID_LETTERS = 8
# More would hide the page below them.
MOST_COMMANDS = 6
# Kinds of columns, by their classes in the page.
NUMBER, LONG = "number", "long"


class Cell(NamedTuple):
    """A cell: its text, the kind of its column, the interval under it, and the mark of a speed that is doubtful."""

    text: str
    kind: str = ""
    under: str = ""
    mark: str = ""


def page(sweep: ReportedSweep, decided: Verdict, figures: Sequence[Drawn | MissingFigure]) -> str:
    """The page. All that people named or typed is escaped."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["breakable"] = _breakable
    template = environment.from_string(TEMPLATE.read_text())
    best = set(decided.best.places) if decided.best else set()
    _, owns = shared_and_own(sweep.points)
    rows = {point.number: _cells(point, own, sweep) for point, own in zip(sweep.points, owns, strict=True)}
    doubts = {doubt for point in sweep.measured for doubt in point.marks.doubts}
    return template.render(
        name=sweep.name,
        about=_about(sweep),
        facts=facts(sweep),
        commands=typed_commands(sweep),
        light=css(dark=False),
        dark=css(dark=True),
        intervals=interval_name(sweep),
        verdict=verdict_lines(decided),
        command=next_command(sweep, decided),
        advice=advice(sweep, decided),
        figures=[figure for figure in figures if isinstance(figure, Drawn)],
        left_out=[figure for figure in figures if isinstance(figure, MissingFigure)],
        columns=rows[sweep.points[0].number].items(),
        rows=[{"best": place in best, "cells": cells.values()} for place, cells in rows.items()],
        missing=reasons(sweep.points),
        noted=noted(sweep.points),
        differences=differences(sweep),
        score=score(sweep),
        margin=comparable.MARGIN,
        groups=len(_groups(sweep)),
        engines=any(point.marks.engine for point in sweep.measured),
        doubts={doubt: why for doubt, why in (comparable.DOUBTS | comparable.DISTURBED).items() if doubt in doubts},
    )


def advice(sweep: ReportedSweep, decided: Verdict) -> list[str]:
    """Returns the advice of explained points, the best point's first."""
    best = set(decided.best.places) if decided.best else set()
    points = sorted(sweep.measured, key=lambda point: point.number not in best)
    explained = ((clean(point.result.explained.advice), point.number) for point in points if point.result.explained)
    return [f"{points}: {text}" for points, text in by_points(explained) if text]


def differences(sweep: ReportedSweep) -> list[str]:
    """In what the measured points differ that keeps their speeds from being compared."""
    lines = [f"Group {letter}: {points_text(places)}." for letter, places in _groups(sweep).items()]
    lines += [f"{text}." for text in difference_texts(sweep.measured)]
    return lines if len(lines) > 1 else []


def score(sweep: ReportedSweep) -> str:
    """Returns how good the predictions for these points were."""
    return score_text(calibration.score([point.result for point in sweep.measured]))


def _about(sweep: ReportedSweep) -> str:
    finished = sum(point.status == "FINISHED" for point in sweep.points)
    machines = sorted({clean(point.result.environment.machine) for point in sweep.measured} - {""})
    where = f", on {'; '.join(machines)}" if machines else ""
    return f"{finished} of {len(sweep.points)} points finished{where}."


def _cells(point: ReportedRun, own: Sequence[str], sweep: ReportedSweep) -> dict[str, Cell]:
    """Returns the cells of a point, by the titles of their columns; of those that no point of the sweep needs, none."""
    result, speed, mark = point.result, point.result.speed, ", ".join(mark_texts(point.marks))
    hidden = {
        "group": len(_groups(sweep)) < 2,
        "target": sweep.target is None,
        "MLflow run": not any(other.result.tracked.mlflow_run_id for other in sweep.points),
    }
    cells = {
        "point": Cell(str(point.number), NUMBER),
        "strategy": Cell(clean(result.choices.called) or MISSING),
        "workers": _figure(result.layout.workers, "{:,}".format),
        "group": Cell(point.group or MISSING),
        "examples/s": _figure(speed.examples_per_second, rate, throughput_span(speed), mark),
        "speedup": _figure(speed.speedup, times, speedup_span(speed), mark),
        "efficiency": _figure(comparable.efficiency_of(result), percent, mark=mark),
        "step ms": _figure(speed.step_ms_p50, rate),
        "input wait": _figure(result.input.wait, percent),
        "target": _figure(sweep.seconds_to_target(point), duration),
        "status": Cell(point.status),
        # The command at the head of the page has the rest.
        "overrides": Cell(" ".join(own), LONG),
        "MLflow run": Cell(clean(result.tracked.mlflow_run_id)[:ID_LETTERS] or MISSING),
    }
    titles = {"target": f"s to {sweep.metric} {figure(sweep.target or 0.0)}"}
    return {titles.get(name, name): cell for name, cell in cells.items() if not hidden.get(name)}


def _breakable(typed: str) -> Markup:
    """Returns typed text, escaped, that a line may break behind its = and commas."""
    from markupsafe import Markup

    return Markup("<wbr>").join(re.split(r"(?<=[,=])", typed))


def _figure(value: float | None, write: Callable[[float], str], under: str = "", mark: str = "") -> Cell:
    return Cell(or_missing(value, write, MISSING), NUMBER, under, "" if value is None else mark)


def _groups(sweep: ReportedSweep) -> dict[str, list[int]]:
    points = sorted(sweep.measured, key=lambda point: point.group)
    return comparable.grouped((point.group, point.number) for point in points)


def facts(sweep: ReportedSweep) -> dict[str, str]:
    """Returns the facts about a whole sweep that are known, under their names."""
    engines = engines_text(sweep.measured)
    each = partial(_once_or_each, sweep)
    texts = {
        "engines": engines and f"{engines}; {OWN_BASELINE}",
        "model": each(lambda point: _fact(point, "model", plural(point.result.training.parameters, "parameter"))),
        "data": each(lambda point: _fact(point, "data", plural(point.train_examples, "training example"))),
        "batch": each(_batch),
        "precision": each(lambda point: point.result.layout.precision),
        "baseline": _baseline(sweep),
        "intervals": _intervals(sweep),
        "versions": each(lambda point: listed(*map(" ".join, point.result.environment.versions.items()))),
        "commit": each(lambda point: point.began.tags.get("git_commit"))
        or "not known: no run was started in a folder of git",
    }
    return {name: text for name, text in texts.items() if text}


def typed_commands(sweep: ReportedSweep) -> list[str]:
    """Returns the commands that run all of a sweep again, the first of many."""
    overrides = [point.overrides for point in sweep.points if point.overrides]
    values = [*map(clean, commands(overrides, _options(sweep.points)))]
    more = len(values) - MOST_COMMANDS
    return values if more <= 0 else [*values[:MOST_COMMANDS], f"# and {more} more, by the overrides below"]


def commands(points: Sequence[Sequence[str]], options: Sequence[str] = ()) -> list[str]:
    """Returns the commands that run points with these overrides: one where they are all combinations of some values.

    >>> commands([["a=1", "b=[2, 3]"], ["a=4", "b=[2, 3]"]], ["--config-dir=mine"])
    ["python -m pipeline -m --config-dir=mine a=1,4 'b=[2, 3]'"]
    >>> commands([["a=1", "b=2"], ["a=2", "b=1"]])
    ['python -m pipeline -m a=1 b=2', 'python -m pipeline -m a=2 b=1']
    """
    distinct = list(dict.fromkeys(map(tuple, points)))
    rows = [dict(override.partition("=")[::2] for override in overrides) for overrides in distinct]
    keys = list(rows[0]) if rows else []
    values = {key: list(dict.fromkeys(row.get(key, "") for row in rows)) for key in keys}
    if rows and all(set(row) == set(keys) for row in rows) and prod(map(len, values.values())) == len(rows):
        distinct = [tuple(f"{key}={','.join(group)}" if any(group) else key for key, group in values.items())]
    return [shlex.join([*PROGRAM, "-m", *options, *overrides]) for overrides in distinct]


def next_command(sweep: ReportedSweep, decided: Verdict) -> str:
    """Returns what to type next, to train as the verdict says or measure more; "" where that takes several commands."""
    if decided.best is None:
        return ""
    options = _options(sweep.points)
    if decided.use is Use.NOT_KNOWN:
        often = f"sweep.repeats={max(3, len(decided.best.runs) + 2)}"
        overrides = [[*_but(point.overrides, "sweep.repeats"), often] for point in sweep.points if point.overrides]
        folder = commands(overrides, options)
        return folder[0] if len(folder) == 1 else ""
    best, (place, *_) = decided.best, decided.best.places
    typed = next((point.overrides for point in sweep.points if point.number == place), ())
    choices = best.result.choices
    of_best = {
        "backend": choices.backend, "strategy": choices.strategy, "workers": best.result.layout.workers,
        "model": choices.model, "data": choices.data,
    }  # fmt: skip
    typed = typed or tuple(f"{key}={value}" for key, value in of_best.items() if value is not None)
    if decided.use is Use.ONE_DEVICE and best.devices > 1:
        typed = (*_but(typed, "strategy", "workers"), "strategy=one_device", "workers=1")
    return command_of(typed, options)


def _but(overrides: Iterable[str], *keys: str) -> list[str]:
    overrides_list = [(override.lstrip("+~").partition("=")[0], override) for override in overrides]
    return [override for key, override in overrides_list if key.partition(".")[0] not in keys and key not in keys]


def _once_or_each(sweep: ReportedSweep, describe: Callable[[ReportedRun], object]) -> str:
    """Describes the measured points, or all if none is measured: once if the description is the same for each."""
    points = sweep.measured or sweep.points
    places = comparable.grouped((text, point.number) for point in points if (text := clean(describe(point))))
    if len(places) == 1:
        return next(iter(places))
    return "; ".join(f"{text} ({points_text(where)})" for text, where in places.items())


def _fact(point: ReportedRun, name: str, more: str) -> str | None:
    return (value := comparable.facts(point).get(name)) and listed(value, more)


def _batch(point: ReportedRun) -> str | None:
    layout = point.result.layout
    if layout.scaling == "strong" and layout.global_batch is not None:
        return f"{plural(layout.global_batch, 'example')} a step over all replicas, held fixed: strong scaling"
    if layout.replica_batch is None:
        return None
    held = ", held fixed: weak scaling" if layout.scaling == "weak" else ""
    return f"{plural(layout.replica_batch, 'example')} a step on each replica{held}"


def _baseline(sweep: ReportedSweep) -> str:
    speeds = {point.number: point.result.speed for point in sweep.measured}
    measured = [(point.marks.engine, point.result.speed.baseline_examples_per_second) for point in sweep.measured]
    by_engine = comparable.grouped((f"{clean(engine)} ".lstrip(), speed) for engine, speed in measured if speed)
    if not by_engine:
        return ""
    reached = " and ".join(
        f"{engine}{span(min(each), max(each), rate, ' to ') or rate(each[0])}" for engine, each in by_engine.items()
    )
    in_turn = [place for place, speed in speeds.items() if speed.baseline_source == IN_THIS_RUN]
    when = f"measured in turn with {points_text(in_turn)}" if in_turn else ""
    if not in_turn and any(speed.baseline_source for speed in speeds.values()):
        when = "measured in an earlier run"
    return listed(f"one device without a strategy: {reached} examples/s", when)


def _intervals(sweep: ReportedSweep) -> str:
    if not sweep.confidences:
        return ""
    counts = sorted({point.result.speed.repeats for point in sweep.measured if point.result.speed.repeats})
    repeats = f"{' or '.join(map(str, counts))} repeats" if counts else "the repeats"
    probable = " or ".join(map(percent, sweep.confidences))
    return f"from the lowest to the highest of {repeats}, which holds the true median with a probability of {probable}"


def _options(points: Iterable[ReportedRun]) -> list[str]:
    for point in points:
        if command := point.began.tags.get("command"):
            return [word for word in shlex.split(str(command)) if word.startswith("--")]
    return []

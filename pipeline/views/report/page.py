"""Turns a sweep, its verdict and its figures into one page of HTML that asks no other host for anything."""

import re
import shlex
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from pipeline.analyze import calibration, comparable
from pipeline.analyze.compare import Use, Verdict
from pipeline.driver.run import PROGRAM, command_of
from pipeline.record.results import IN_THIS_RUN
from pipeline.views.report.figures import Drawn, MissingFigure, css, interval_name
from pipeline.views.report.gather import ReportedRun, ReportedSweep
from pipeline.views.terminal import sweep_table, words
from pipeline.views.terminal.result import score_text
from pipeline.views.terminal.verdict_text import mark_texts, verdict_lines
from pipeline.views.terminal.words import clean, listed, percent, plural, points_text, rate, span

TEMPLATE = Path(__file__).with_name("page.html.jinja")
MISSING = "–"
ID_LETTERS = 8  # of a run's id in MLflow: enough to find it by
MOST_COMMANDS = 6  # more would hide the page below them


class Cell(NamedTuple):
    """A cell: its text, its column's class in the page, the interval under it, and the mark of a doubtful speed."""

    text: str
    kind: str = ""
    under: str = ""
    mark: str = ""


def page(sweep: ReportedSweep, decided: Verdict, figures: Sequence[Drawn | MissingFigure]) -> str:
    """The page. All that people named or typed is escaped."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    # Typed text, which a line may break behind its = and commas.
    environment.filters["breakable"] = lambda typed: Markup("<wbr>").join(re.split(r"(?<=[,=])", typed))
    template = environment.from_string(TEMPLATE.read_text())
    best = set(decided.best.places) if decided.best else set()
    owns = sweep_table.shared_and_own(sweep.points)[1]
    rows = {point.number: _cells(point, own, sweep) for point, own in zip(sweep.points, owns, strict=True)}
    doubts = {doubt for point in sweep.measured for doubt in point.marks.doubts}
    finished = sum(point.result.finished for point in sweep.points)
    machines = sorted({clean(point.result.machine) for point in sweep.measured} - {""})
    where = f", on {'; '.join(machines)}" * bool(machines)
    groups = comparable.grouped(sorted((point.group, point.number) for point in sweep.measured))
    differences = [f"Group {letter}: {points_text(places)}." for letter, places in groups.items()]
    differences += (f"{text}." for text in sweep_table.difference_texts(sweep.measured))
    return template.render(
        name=sweep.folder.name,
        about=f"{finished} of {len(sweep.points)} points finished{where}.",
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
        missing=sweep_table.reasons(sweep.points),
        noted=sweep_table.noted(sweep.points),
        differences=differences[1:] and differences,
        score=score(sweep),
        margin=comparable.MARGIN,
        groups=len(groups),
        engines=any(point.marks.engine for point in sweep.measured),
        doubts={doubt: why for doubt, why in (comparable.DOUBTS | comparable.DISTURBED).items() if doubt in doubts},
    )


def advice(sweep: ReportedSweep, decided: Verdict) -> list[str]:
    """Returns the advice of explained points, the best point's first."""
    best = set(decided.best.places) if decided.best else set()
    points = sorted(sweep.measured, key=lambda point: point.number not in best)
    explained = ((clean(point.result.explained.advice), point.number) for point in points if point.result.explained)
    return [f"{points}: {text}" for points, text in words.by_points(explained) if text]


def score(sweep: ReportedSweep) -> str:
    """Returns how good the predictions for these points were."""
    return score_text(calibration.score([point.result for point in sweep.measured]))


def _cells(point: ReportedRun, own: Sequence[str], sweep: ReportedSweep) -> dict[str, Cell]:
    """Returns the cells of a point, by the titles of their columns; of those that no point of the sweep needs, none."""
    result, speed, mark = point.result, point.result.speed, ", ".join(mark_texts(point.marks))
    target = f"s to {sweep.metric} {words.figure(sweep.target or 0.0)}"
    hidden = {
        "group": len({other.group for other in sweep.measured}) < 2,
        target: sweep.target is None,
        "MLflow run": not any(other.result.mlflow_run_id for other in sweep.points),
    }
    cells = {
        "point": Cell(str(point.number), "number"),
        "strategy": Cell(clean(result.choices.called) or MISSING),
        "workers": _figure(result.layout.workers, "{:,}".format),
        "group": Cell(point.group or MISSING),
        "examples/s": _figure(speed.examples_per_second, rate, words.throughput_span(speed), mark),
        "speedup": _figure(speed.speedup, words.times, words.speedup_span(speed), mark),
        "efficiency": _figure(comparable.efficiency_of(result), percent, mark=mark),
        "step ms": _figure(speed.step_ms_p50, rate),
        "input wait": _figure(result.input.wait, percent),
        target: _figure(sweep.seconds_to_target(point), words.duration),
        "status": Cell(clean(result.ending.status)),
        # The command at the head of the page has the rest.
        "overrides": Cell(" ".join(own), "long"),
        "MLflow run": Cell(clean(result.mlflow_run_id)[:ID_LETTERS] or MISSING),
    }
    return {title: cell for title, cell in cells.items() if not hidden.get(title)}


def _figure(value: float | None, write: Callable[[float], str], under: str = "", mark: str = "") -> Cell:
    return Cell(words.or_missing(value, write, MISSING), "number", under, "" if value is None else mark)


def facts(sweep: ReportedSweep) -> dict[str, str]:
    """Returns the facts about a whole sweep that are known, under their names."""

    def each(describe: Callable[[ReportedRun], object]) -> str:
        """Describes the measured points, or all if none is measured: once if it is the same for each."""
        points = sweep.measured or sweep.points
        places = comparable.grouped((text, point.number) for point in points if (text := clean(describe(point))))
        if len(places) == 1:
            return next(iter(places))
        return "; ".join(f"{text} ({points_text(where)})" for text, where in places.items())

    def fact(point: ReportedRun, name: str, more: str) -> str | None:
        return (value := comparable.facts(point).get(name)) and listed(value, more)

    engines, speeds = sweep_table.engines_text(sweep.measured), [point.result.speed for point in sweep.measured]
    by_engine = comparable.grouped(
        (f"{clean(point.marks.engine)} ".lstrip(), one)
        for point in sweep.measured
        if (one := point.result.speed.baseline_examples_per_second)
    )
    ones = (f"{name}{span(min(one), max(one), rate, ' to ') or rate(one[0])}" for name, one in by_engine.items())
    ranges = " and ".join(ones)
    in_turn = [point.number for point in sweep.measured if point.result.speed.baseline_source == IN_THIS_RUN]
    when = "measured in an earlier run" * any(speed.baseline_source for speed in speeds)
    if in_turn:
        when = f"measured in turn with {points_text(in_turn)}"
    counts = sorted({speed.repeats for speed in speeds if speed.repeats})
    repeats = f"from the lowest to the highest of {' or '.join(map(str, counts)) or 'the'} repeats"
    probable = " or ".join(map(percent, sweep.confidences))
    texts = {
        "engines": engines and f"{engines}; {sweep_table.OWN_BASELINE}",
        "model": each(lambda point: fact(point, "model", plural(point.result.training.parameters, "parameter"))),
        "data": each(lambda point: fact(point, "data", plural(point.train_examples, "training example"))),
        "batch": each(_batch),
        "precision": each(lambda point: point.result.layout.precision),
        "baseline": listed(f"one device without a strategy: {ranges} examples/s", when) if ranges else "",
        "intervals": probable and f"{repeats}, which holds the true median with a probability of {probable}",
        "versions": each(lambda point: listed(*map(" ".join, point.result.versions.items()))),
        "commit": each(lambda point: point.began.tags.get("git_commit"))
        or "not known: no run was started in a folder of git",
    }
    return {name: text for name, text in texts.items() if text}


def typed_commands(sweep: ReportedSweep) -> list[str]:
    """Returns the commands that run all of a sweep again, the first of many."""
    typed = [*map(clean, _commands([point.overrides for point in sweep.points if point.overrides], sweep))]
    more = len(typed) - MOST_COMMANDS
    return [*typed[:MOST_COMMANDS], *[f"# and {more} more, by the overrides below"] * (more > 0)]


def _commands(points: Sequence[Sequence[str]], sweep: ReportedSweep) -> list[str]:
    """The commands that run points with these overrides: one where they are all combinations of some values."""
    distinct = list(dict.fromkeys(map(tuple, points)))
    rows = [dict(override.partition("=")[::2] for override in overrides) for overrides in distinct]
    values = {key: list(dict.fromkeys(row.get(key, "") for row in rows)) for key in (rows[0] if rows else ())}
    if all(row.keys() == values.keys() for row in rows) and prod(map(len, values.values())) == len(rows):
        distinct = [tuple(f"{key}={','.join(group)}" if any(group) else key for key, group in values.items())]
    return [shlex.join([*PROGRAM, "-m", *_options(sweep), *overrides]) for overrides in distinct]


def next_command(sweep: ReportedSweep, decided: Verdict) -> str:
    """Returns what to type next, to train as the verdict says or measure more; "" where that takes several commands."""
    best = decided.best
    if best is None:
        return ""
    if decided.use is Use.NOT_KNOWN:
        often = f"sweep.repeats={max(3, len(best.runs) + 2)}"
        overrides = [[*_but(point.overrides, "sweep.repeats"), often] for point in sweep.points if point.overrides]
        several = _commands(overrides, sweep)
        return several[0] if len(several) == 1 else ""
    typed = next((point.overrides for point in sweep.points if point.number == best.places[0]), ())
    choices = best.result.choices
    of_best = {
        "backend": choices.backend, "strategy": choices.strategy, "workers": best.result.layout.workers,
        "model": choices.model, "data": choices.data,
    }  # fmt: skip
    typed = typed or tuple(f"{key}={value}" for key, value in of_best.items() if value is not None)
    if decided.use is Use.ONE_DEVICE and best.devices > 1:
        typed = (*_but(typed, "strategy", "workers"), "strategy=one_device", "workers=1")
    return command_of(typed, _options(sweep))


def _but(overrides: Sequence[str], *keys: str) -> list[str]:
    names = {override: override.lstrip("+~").partition("=")[0] for override in overrides}
    return [override for override, name in names.items() if not {name, name.partition(".")[0]} & {*keys}]


def _options(sweep: ReportedSweep) -> list[str]:
    typed = next((command for point in sweep.points if (command := point.began.tags.get("command"))), "")
    return [word for word in shlex.split(str(typed)) if word.startswith("--")]


def _batch(point: ReportedRun) -> str | None:
    layout = point.result.layout
    if layout.scaling == "strong" and layout.global_batch is not None:
        return f"{plural(layout.global_batch, 'example')} a step over all replicas, held fixed: strong scaling"
    held = ", held fixed: weak scaling" * (layout.scaling == "weak")
    each = plural(layout.replica_batch, "example")
    return f"{each} a step on each replica{held}" if each else None

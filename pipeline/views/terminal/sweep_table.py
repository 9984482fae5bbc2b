"""Turns a sweep's results into a table, what went wrong with any of them, and which cannot be compared."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pipeline.analyze import comparable
from pipeline.analyze.comparable import TOOK, WAITED
from pipeline.driver import Ahead, RunResult
from pipeline.record.results import Result
from pipeline.views.terminal.plan_text import planned_rows
from pipeline.views.terminal.prediction_text import outlook_lines, predicted_rows
from pipeline.views.terminal.result import STATUS_COLOURS, explained_line, profile_line
from pipeline.views.terminal.verdict_text import mark_texts
from pipeline.views.terminal.words import (
    MISSING,
    Fitted,
    brackets,
    by_points,
    cells,
    clean,
    columns,
    duration,
    figure,
    lines_of,
    listed,
    marks,
    number,
    or_missing,
    per_second,
    percent,
    plural,
    points_text,
    shortened,
    speedup_span,
    texts,
    throughput_span,
    times,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

HEADER = ("", "strategy", "workers", "examples/s", "speedup", "eff.", "val", "status")
RIGHT = (0, 2, 3, 4, 5, 6)  # columns of numbers
# Of a strategy, the narrower one where a row would not fit otherwise; the overrides under it have the whole name.
STRATEGY_WIDTHS, ROW_WIDTH = (16, 15), 80
# What a speedup is over, where points are of several engines.
OWN_BASELINE = "each speedup is over one device under the same engine"
# A row that begins with a point's number.
NUMBERED = re.compile(r" *\d+  ")


def sweep_table(points: Sequence[RunResult]) -> RenderableType:
    """The points under each other, and under them what a reader has to know to compare them."""
    if not points:
        return _lines(["No points."])
    results = [point.result for point in points]
    if any(result.ending.status == "PLANNED" for result in results):
        header, *planned = planned_rows(points)
        return _lines([*planned, "", *reasons(points)], header)
    if any(result.ending.status == "PREDICTED" for result in results):
        header, *predicted = predicted_rows(results)
        return _lines([*predicted, "", *outlook_lines(points), *reasons(points)], header)
    return Fitted(partial(_result_texts, points))


def _lines(lines: Sequence[str], header: str = "") -> Fitted:
    styled = [*[(header, "bold")] * bool(header), *((line, "") for line in lines)]
    return Fitted(lambda width: (text for line, style in styled for text in texts(line, width, style)))


def _result_texts(points: Sequence[RunResult], width: int) -> Iterator[Text]:
    """The points in rows, or, where the console is too narrow for these, in a few lines each; then what to know."""
    header, *rows = sweep_rows(points)
    stacked = max(map(len, (header, *filter(NUMBERED.match, rows)))) > width
    if stacked:
        rows = stacked_rows(points)
    else:
        yield from texts(header, width, style="bold")
    for row in rows:
        for text in texts(row, width):
            status = text.plain.rpartition(" ")[2]
            if status.isupper():
                text.stylize(STATUS_COLOURS.get(status, "yellow"), len(text) - len(status))
            yield text
    for line in ["", *_notes(points, stacked)]:
        yield from texts(line, width)


def sweep_rows(points: Sequence[RunResult]) -> list[str]:
    """A header, and for each point its numbers, under them intervals and marks, and what was typed for it alone."""
    results, count = [point.result for point in points], len(points)
    metric = _metric(results)
    for width in STRATEGY_WIDTHS:
        numbers = [_numbers(point, metric, width) for point in points]
        header, *lines = columns([HEADER, *numbers, *map(_intervals, results)], RIGHT)
        if max(map(len, lines)) <= ROW_WIDTH:
            break
    left = " " * header.index("strategy")
    rows = [header]
    for row, intervals, (doubts, *below) in zip(lines[:count], lines[count:], _remarks(points), strict=True):
        under = [f"{intervals}  {doubts}" if doubts else intervals, *(left + line for line in below)]
        rows += [row, *(line for line in under if line.strip())]
    return rows


def stacked_rows(points: Sequence[RunResult]) -> list[str]:
    """The same for a narrow console, without columns."""
    metric = _metric([point.result for point in points])
    left = " " * (max(len(str(point.number)) for point in points) + 2)
    rows = []
    for point, remarks in zip(points, _remarks(points), strict=True):
        result = point.result
        what = listed(clean(result.choices.called) or MISSING, plural(result.layout.workers, "worker"))
        rows.append(f"{point.number:>{len(left) - 2}}  {what}  {clean(result.ending.status) or MISSING}")
        rows += [left + line for line in (*_figures(result, metric), *remarks) if line]
    return rows


def _remarks(points: Sequence[RunResult]) -> Iterator[tuple[str, ...]]:
    """Yields the doubts about each point, what sets its pace, what it lost, and what was typed for it alone."""
    measured = _measured_runs(points)
    marks = dict(zip(measured, map(mark_texts, comparable.marks(list(measured.values()))), strict=True))
    for point, own in zip(points, shared_and_own(points)[1], strict=True):
        result, marked = point.result, marks.get(point.number, [])
        doubts = listed(*marked, "input-bound" * (result.input.bound is True))
        yield doubts, profile_line(result.profile), explained_line(result.explained), " ".join(own)


def _figures(result: Result, metric: str) -> list[str]:
    speed, value, waits = result.speed, _validation(result, metric), result.input.wait
    return [
        per_second(speed, brackets(throughput_span(speed, "-"))),
        "" if speed.speedup is None else f"{times(speed.speedup)}{brackets(speedup_span(speed, '-'))}",
        "" if (share := comparable.efficiency_of(result)) is None else f"efficiency {percent(share)}",
        "" if value is None else f"{metric} {figure(value)}",
        "" if waits is None else f"{percent(waits)} of the step time waiting for input",
    ]


def _notes(points: Sequence[RunResult], stacked: bool) -> list[str]:
    shared, engines = shared_and_own(points)[0], engines_text(points)
    return [
        *([f"All with {' '.join(shared)}."] if shared else []),
        *_legend([point.result for point in points], stacked),
        *reasons(points),
        *noted(points, (WAITED, TOOK)),
        *([f"Of different engines ({engines}): {OWN_BASELINE}."] if engines else []),
        *(f"Not comparable, since {text}." for text in difference_texts(points)),
    ]


def shared_and_own(points: Sequence[RunResult]) -> tuple[list[str], list[list[str]]]:
    """Returns the overrides of all points, and for each point those that not all share.

    >>> typed = (("data=digits", "workers=1"), ("data=digits", "workers=2"))
    >>> shared_and_own([RunResult(Result(), overrides=overrides) for overrides in typed])
    (['data=digits'], [['workers=1'], ['workers=2']])
    """
    typed = [list(map(clean, point.overrides)) for point in points]
    first, *others = list(filter(None, typed)) or [[]]
    shared = [line for line in first if others and all(line in other for other in others)]
    return shared, [[line for line in overrides if line not in shared] for overrides in typed]


def begins_line(ahead: Ahead) -> str:
    """Returns a line for a point that begins: its own overrides, and how far the sweep is.

    >>> points = tuple(RunResult(Result(), number=place, overrides=(f"workers={place + 1}",)) for place in range(3))
    >>> begins_line(Ahead(1, points, 65.0))
    '-- point 1: workers=2 (0 of 3 done, about 1 min 05 s left)'
    """
    owns = zip(ahead.points, shared_and_own(ahead.points)[1], strict=True)
    own = next(own for point, own in owns if point.number == ahead.number)
    left = "" if ahead.seconds_left is None else f"about {duration(ahead.seconds_left)} left"
    far = listed(f"{ahead.done} of {len(ahead.points)} done", left)
    return f"-- point {ahead.number}: {' '.join(own) or 'as all'} ({far})"


def came_to(result: Result, seconds: float | None = None) -> str:
    """Returns a result's status and figures, and the seconds that it took.

    >>> from pipeline.record.results import Ending, Layout, Speed
    >>> done = Result(Ending("FINISHED"), layout=Layout(workers=2), speed=Speed(2145.0, 1575.0, 2222.0, speedup=1.916))
    >>> came_to(done, 19.0)
    'FINISHED, 2,145 examples/s (1,575 to 2,222), 1.92x, 19 s'
    """
    speed, share = result.speed, comparable.efficiency_of(result)
    return listed(
        clean(result.ending.status) or "UNKNOWN",
        per_second(speed, brackets(throughput_span(speed)) + marks(result.layout)),
        "" if speed.speedup is None else times(speed.speedup),
        "" if share is None else f"efficiency {percent(share)}",
        *(f"val_{clean(name)} {figure(value)}" for name, value in [*result.training.val_metrics.items()][:1]),
        "" if seconds is None else duration(seconds),
    )


def _numbers(point: RunResult, metric: str, width: int) -> list[str]:
    strategy = shortened(clean(point.result.choices.called) or MISSING, width)
    value = or_missing(_validation(point.result, metric), figure)
    return cells(HEADER, point.result, {"": str(point.number), "strategy": strategy, "val": value})


def _intervals(result: Result) -> tuple[str, ...]:
    wait, speed = or_missing(result.input.wait, percent, ""), result.speed
    return ("", "", "", throughput_span(speed, "-"), speedup_span(speed, "-"), wait, "", "")


def _legend(results: Sequence[Result], stacked: bool) -> list[str]:
    measured, metric, lines = [result for result in results if _measured(result)], _metric(results), []
    if shares := {share for result in measured if (share := result.speed.interval_confidence)}:
        under = " or ".join(map(percent, sorted(shares)))
        lines.append(f"{'In brackets' if stacked else 'Under throughput and speedup'}: {under} intervals.")
    if not stacked and any(result.speed.efficiency is not None for result in results):
        lines.append("eff.: efficiency, speedup over the number of devices.")
    if not stacked and any(result.input.wait is not None for result in measured):
        lines.append("Under eff.: share of the step time that was spent waiting for input.")
    if any(result.input.bound is True for result in measured):
        lines.append("input-bound: a faster input would make it faster; data.profile=true says which part of it.")
    if any(result.explained for result in measured):
        shares_of = "as shares of a step's time, timed once more after training"
        lines.append(f"lost: to scaling, {shares_of}; eff. is of its first steps.")
    if metric and not stacked:
        lines.append(f"val: {metric} on the validation data.")
    doubts = {doubt for one in measured for doubt in (*comparable.doubts(one.layout), *comparable.disturbed(one))}
    remarks = comparable.DOUBTS | comparable.DISTURBED
    return [*lines, *(f"{doubt}: {why}" for doubt, why in remarks.items() if doubt in doubts)]


def reasons(points: Sequence[RunResult]) -> list[str]:
    """Returns the reasons why points did not finish; those with the same reason share a line."""
    whys = []
    for point in points:
        status = clean(point.result.ending.status) or "UNKNOWN"
        if status not in ("FINISHED", "PLANNED", "PREDICTED"):
            texts = lines_of(point.result.ending.error) or list(map(clean, point.result.notes))
            whys.append((f"{status.lower()}: {' '.join(texts) or 'no reason was given'}", point.number))
    return [f"{named} {why}" for named, why in by_points(whys)]


def noted(points: Sequence[RunResult], but: tuple[str, ...] = ()) -> list[str]:
    """Returns the notes of finished points, but for their plans' and those that begin with any of `but`."""
    notes = (
        (clean(note), point.number)
        for point in points
        if point.result.finished
        for note in point.result.notes
        if note not in (point.plan.notes if point.plan else ()) and not clean(note).startswith(but)
    )
    return [f"{points}: {note}" for points, note in by_points(notes)]


def engines_text(points: Sequence[RunResult]) -> str:
    """Returns the measured points of each engine; "" where all are of one."""
    measured = _measured_runs(points)
    engines, numbers = comparable.engines(list(measured.values())), list(measured)
    return "; ".join(f"{clean(name)}: {points_text([numbers[at] for at in where])}" for name, where in engines.items())


def difference_texts(points: Sequence[RunResult]) -> list[str]:
    """Returns in what points that were measured differ so that they cannot be compared, and which."""
    measured, texts = _measured_runs(points), []
    numbers = list(measured)
    for name, values in comparable.differences(list(measured.values())):
        having = {clean(value): points_text([numbers[at] for at in where]) for value, where in values.items()}
        texts.append(f"{name} differs ({'; '.join(f'{value}: {points}' for value, points in having.items())})")
    return texts


def _measured_runs(points: Sequence[RunResult]) -> dict[int, RunResult]:
    return {point.number: point for point in points if _measured(point.result)}


def _measured(result: Result) -> bool:
    return result.speed.examples_per_second is not None


def _metric(results: Sequence[Result]) -> str:
    for result in results:
        for name, value in result.training.val_metrics.items():
            if number(value) is not None:
                return clean(name)
    return "loss" if any(number(result.training.val_loss) is not None for result in results) else ""


def _validation(result: Result, metric: str) -> float | None:
    metrics = {clean(name): value for name, value in result.training.val_metrics.items()}
    return number(result.training.val_loss if metric == "loss" else metrics.get(metric))

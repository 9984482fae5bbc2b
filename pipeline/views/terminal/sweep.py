"""Turns a sweep's results into a table, what went wrong with any of them, and which cannot be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.analyze import comparable, history
from pipeline.analyze.comparable import WAITED
from pipeline.record.results import Result
from pipeline.run.views import PointResult
from pipeline.views.terminal.estimate import planned_rows
from pipeline.views.terminal.explained import explained_line
from pipeline.views.terminal.predict import outlook_lines, predicted_rows
from pipeline.views.terminal.profile import profile_line
from pipeline.views.terminal.result import STATUS_COLOURS
from pipeline.views.terminal.verdict import mark_texts
from pipeline.views.terminal.words import (
    bare_times,
    clean,
    columns,
    figure,
    lines_of,
    listed,
    number,
    percent,
    points_text,
    rate,
    span,
    times,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

HEADER = ("", "strategy", "workers", "examples/s", "speedup", "eff.", "val", "status")
RIGHT = (0, 2, 3, 4, 5, 6)  # columns of numbers
# Of a strategy, the narrower one where a row would not fit otherwise; the overrides under it have the whole name.
STRATEGY_WIDTHS, ROW_WIDTH = (16, 15), 80
MISSING = "-"


def sweep_table(points: Sequence[PointResult]) -> RenderableType:
    """The points under each other, and under them what a reader has to know to compare them."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    if not points:
        return Text("No points.")
    results = [point.result for point in points]
    if any(result.ending.status == "PLANNED" for result in results):
        header, *planned = planned_rows(points)
        return Group(Text(""), Text(header, style="bold"), *map(Text, [*planned, "", *_reasons(results)]))
    if any(result.ending.status == "PREDICTED" for result in results):
        header, *predicted = predicted_rows(results)
        below = [*predicted, "", *outlook_lines(points), *_reasons(results)]
        return Group(Text(""), Text(header, style="bold"), *map(Text, below))
    header, *rows = sweep_rows(points)
    shown: list[RenderableType] = [Text(header, style="bold")]
    for row in rows:
        text = Text(row.lstrip())
        status = row.rpartition(" ")[2]
        if status.isupper():
            text.stylize(STATUS_COLOURS.get(status, "yellow"), len(text) - len(status))
        # Indented as a block: a long line of overrides stays under its point when it wraps.
        shown.append(Padding(text, (0, 0, 0, len(row) - len(row.lstrip())), expand=False))
    return Group(*shown, Text(""), *map(Text, sweep_notes(points)))


def sweep_rows(points: Sequence[PointResult]) -> list[str]:
    """A header, and for each point its numbers, under them intervals and marks, and its overrides."""
    results = [point.result for point in points]
    metric = _metric(results)
    count = len(points)
    for width in STRATEGY_WIDTHS:
        numbers = [_numbers(place, result, metric, width) for place, result in enumerate(results)]
        header, *lines = columns([HEADER, *numbers, *map(_intervals, results)], RIGHT)
        if max(map(len, lines)) <= ROW_WIDTH:
            break
    rows = [header]
    left = " " * header.index("strategy")
    for point, line, intervals, marked in zip(points, lines[:count], lines[count:], _marks(points), strict=True):
        rows.append(line)
        result = point.result
        doubts = listed(marked, "input-bound" * (result.input.bound is True))
        below = f"{intervals}  {doubts}" if doubts else intervals
        overrides = left + " ".join(map(clean, point.overrides))
        said = (profile_line(result.profile), explained_line(result.explained))
        rows += [text for text in (below, *(f"{left}{line}" for line in said), overrides) if text.strip()]
    return rows


def sweep_notes(points: Sequence[PointResult]) -> list[str]:
    """What the columns mean, why points have no numbers, what runs noted, and which points cannot be compared."""
    results, runs = [point.result for point in points], _runs(points)
    return [*_legend(results), *_reasons(results), *noted(enumerate(runs), (WAITED,)), *_differences(runs)]


def _runs(points: Iterable[PointResult]) -> list[history.Run]:
    return [
        history.of(Path(point.folder), point.result) if point.folder else history.Run(Path(), point.result)
        for point in points
    ]


def _numbers(place: int, result: Result, metric: str, width: int) -> tuple[str, ...]:
    workers, value, speed = result.layout.workers, _validation(result, metric), result.speed
    strategy = clean(result.choices.strategy) or MISSING
    return (
        str(place),
        strategy if len(strategy) <= width else f"{strategy[: width - 2]}..",
        MISSING if workers is None else f"{workers:,}",
        MISSING if speed.examples_per_second is None else rate(speed.examples_per_second),
        MISSING if speed.speedup is None else times(speed.speedup),
        MISSING if speed.efficiency is None else percent(speed.efficiency),
        MISSING if value is None else figure(value),
        clean(result.ending.status) or MISSING,
    )


def _intervals(result: Result) -> tuple[str, ...]:
    """The cells under the numbers."""
    speed, wait = result.speed, result.input.wait
    throughput = span(speed.examples_per_second_low, speed.examples_per_second_high, rate, "-")
    speedup = span(speed.speedup_low, speed.speedup_high, bare_times, "-")
    return ("", "", "", throughput, speedup, "" if wait is None else percent(wait), "", "")


def _legend(results: Sequence[Result]) -> list[str]:
    """What the short names stand for, as far as the table has such numbers."""
    measured = [result for result in results if _measured(result)]
    metric = _metric(results)
    lines = []
    shares = {share for result in measured if (share := result.speed.interval_confidence)}
    if shares:
        under = " or ".join(map(percent, sorted(shares)))
        lines.append(f"Under throughput and speedup: {under} intervals.")
    if any(result.speed.efficiency is not None for result in results):
        lines.append("eff.: efficiency, speedup over the number of devices.")
    if any(result.input.wait is not None for result in measured):
        lines.append("Under eff.: share of the step time that was spent waiting for input.")
    if any(result.input.bound is True for result in measured):
        lines.append("input-bound: a faster input would make it faster; data.profile=true says which part of it.")
    if any(explained_line(result.explained) for result in measured):
        lines.append("lost: what efficiency lacks of 100%, and to what; shares of the step time.")
    if metric:
        lines.append(f"val: {metric} on the validation data.")
    doubts = {doubt for result in measured for doubt in comparable.doubts(result.layout)}
    return [*lines, *(f"{doubt}: {why}" for doubt, why in comparable.DOUBTS.items() if doubt in doubts)]


def _reasons(results: Sequence[Result]) -> list[str]:
    """Why points did not finish; those with the same reason share a line."""
    places: dict[tuple[str, str], list[int]] = {}
    for place, result in enumerate(results):
        status = clean(result.ending.status) or "UNKNOWN"
        if status not in ("FINISHED", "PLANNED", "PREDICTED"):
            said = lines_of(result.ending.error) or list(map(clean, result.notes))
            places.setdefault((status, " ".join(said) or "no reason was given"), []).append(place)
    return [f"{points_text(of).capitalize()} {status.lower()}: {reason}" for (status, reason), of in places.items()]


def noted(runs: Iterable[tuple[int, history.Run]], but: tuple[str, ...] = ()) -> list[str]:
    """What runs that finished noted, by their places, beside what plans say before they start.

    Notes that begin with any of `but` are left out.
    """
    places: dict[str, list[int]] = {}
    for place, run in runs:
        if run.result.finished:
            before = run.plan.notes if run.plan else ()
            for note in run.result.notes:
                if note not in before and not clean(note).startswith(but):
                    places.setdefault(clean(note), []).append(place)
    return [f"{points_text(place).capitalize()}: {note}" for note, place in places.items()]


def _differences(runs: Sequence[history.Run]) -> list[str]:
    """Which measured points cannot be compared, and in what they differ."""
    measured = [place for place, run in enumerate(runs) if _measured(run.result)]
    lines = []
    for name, places in comparable.differences([runs[place] for place in measured]):
        numbers = {clean(value): [measured[at] for at in where] for value, where in places.items()}
        told = "; ".join(f"{value}: {points_text(of)}" for value, of in numbers.items())
        lines.append(f"Not comparable, since {name} differs ({told}).")
    return lines


def _marks(of_points: Sequence[PointResult]) -> list[str]:
    """What is written beside the speed of each point; "" beside none."""
    measured = [place for place, point in enumerate(of_points) if _measured(point.result)]
    marks = comparable.marks(_runs(of_points[place] for place in measured))
    marked = {place: listed(*mark_texts(mark)) for place, mark in zip(measured, marks, strict=True)}
    return [marked.get(place, "") for place in range(len(of_points))]


def _measured(result: Result) -> bool:
    return result.speed.examples_per_second is not None


def _metric(results: Sequence[Result]) -> str:
    """The first metric that a point has on the validation data, or the loss where none has one."""
    for result in results:
        for name, value in result.training.val_metrics.items():
            if number(value) is not None:
                return clean(name)
    return "loss" if any(number(result.training.val_loss) is not None for result in results) else ""


def _validation(result: Result, metric: str) -> float | None:
    metrics = {clean(name): value for name, value in result.training.val_metrics.items()}
    return number(result.training.val_loss if metric == "loss" else metrics.get(metric))

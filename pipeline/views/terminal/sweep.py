"""Turns a sweep's results into a table, what went wrong with any of them, and which cannot be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.analyze import comparable, history
from pipeline.analyze.comparable import WAITED
from pipeline.views.terminal.estimate import planned_rows
from pipeline.views.terminal.explained import explained_line
from pipeline.views.terminal.predict import outlook_lines, predicted_rows
from pipeline.views.terminal.profile import profile_line
from pipeline.views.terminal.result import STATUS_COLOURS
from pipeline.views.terminal.words import (
    bare_times,
    clean,
    columns,
    entries,
    figure,
    items,
    lines_of,
    listed,
    number,
    percent,
    points,
    rate,
    span,
    times,
    whole,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

Result = Mapping[str, Any]

HEADER = ("", "strategy", "workers", "examples/s", "speedup", "eff.", "val", "status")
RIGHT = (0, 2, 3, 4, 5, 6)  # columns of numbers
# Of a strategy, the narrower one where a row would not fit otherwise; the overrides under it have the whole name.
STRATEGY_WIDTHS, ROW_WIDTH = (16, 15), 80
MISSING = "-"


def sweep_table(results: Sequence[Result]) -> RenderableType:
    """The points under each other, and under them what a reader has to know to compare them."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    if not results:
        return Text("No points.")
    if any(result.get("status") == "PLANNED" for result in results):
        header, *planned = planned_rows(results)
        return Group(Text(""), Text(header, style="bold"), *map(Text, [*planned, "", *_reasons(results)]))
    if any(result.get("status") == "PREDICTED" for result in results):
        header, *predicted = predicted_rows(results)
        return Group(
            Text(""),
            Text(header, style="bold"),
            *map(Text, [*predicted, "", *outlook_lines(results), *_reasons(results)]),
        )
    header, *rows = sweep_rows(results)
    shown: list[RenderableType] = [Text(header, style="bold")]
    for row in rows:
        text = Text(row.lstrip())
        status = row.rpartition(" ")[2]
        if status.isupper():
            text.stylize(STATUS_COLOURS.get(status, "yellow"), len(text) - len(status))
        # Indented as a block: a long line of overrides stays under its point when it wraps.
        shown.append(Padding(text, (0, 0, 0, len(row) - len(row.lstrip())), expand=False))
    return Group(*shown, Text(""), *map(Text, sweep_notes(results)))


def sweep_rows(results: Sequence[Result]) -> list[str]:
    """A header, and for each point its numbers, under them intervals and marks, and its overrides."""
    metric = _metric(results)
    count = len(results)
    for width in STRATEGY_WIDTHS:
        numbers = [_numbers(place, result, metric, width) for place, result in enumerate(results)]
        header, *lines = columns([HEADER, *numbers, *map(_intervals, results)], RIGHT)
        if max(map(len, lines)) <= ROW_WIDTH:
            break
    rows = [header]
    left = " " * header.index("strategy")
    for result, line, intervals, marked in zip(results, lines[:count], lines[count:], _marks(results), strict=True):
        rows.append(line)
        doubts = listed(marked, "input-bound" * (result.get("input_bound") is True))
        below = f"{intervals}  {doubts}" if doubts else intervals
        overrides = left + " ".join(clean(item) for item in items(result.get("overrides")))
        said = (profile_line(result.get("profile")), explained_line(result.get("explained")))
        rows += [text for text in (below, *(f"{left}{each}" for each in said), overrides) if text.strip()]
    return rows


def sweep_notes(results: Sequence[Result]) -> list[str]:
    """What the columns mean, why points have no numbers, what runs noted, and which points cannot be compared."""
    runs = list(map(history.of, results))
    return [*_legend(results), *_reasons(results), *noted(enumerate(runs), (WAITED,)), *_differences(runs)]


def _numbers(place: int, result: Result, metric: str, width: int) -> tuple[str, ...]:
    workers, value = whole(result.get("workers")), _validation(result, metric)
    speed, speedup, efficiency = (number(result.get(key)) for key in ("examples_per_second", "speedup", "efficiency"))
    strategy = clean(result.get("strategy")) or MISSING
    return (
        str(place),
        strategy if len(strategy) <= width else f"{strategy[: width - 2]}..",
        MISSING if workers is None else f"{workers:,}",
        MISSING if speed is None else rate(speed),
        MISSING if speedup is None else times(speedup),
        MISSING if efficiency is None else percent(efficiency),
        MISSING if value is None else figure(value),
        clean(result.get("status")) or MISSING,
    )


def _intervals(result: Result) -> tuple[str, ...]:
    """The cells under the numbers."""
    speed = span(result.get("examples_per_second_low"), result.get("examples_per_second_high"), rate, "-")
    speedup = span(result.get("speedup_low"), result.get("speedup_high"), bare_times, "-")
    wait = number(result.get("input_wait"))
    return ("", "", "", speed, speedup, "" if wait is None else percent(wait), "", "")


def _legend(results: Sequence[Result]) -> list[str]:
    """What the short names stand for, as far as the table has such numbers."""
    measured = [result for result in results if _measured(result)]
    metric = _metric(results)
    lines = []
    shares = {share for result in measured if (share := number(result.get("interval_confidence")))}
    if shares:
        under = " or ".join(map(percent, sorted(shares)))
        lines.append(f"Under throughput and speedup: {under} intervals.")
    if any(number(result.get("efficiency")) is not None for result in results):
        lines.append("eff.: efficiency, speedup over the number of devices.")
    if any(number(result.get("input_wait")) is not None for result in measured):
        lines.append("Under eff.: share of the step time that was spent waiting for input.")
    if any(result.get("input_bound") is True for result in measured):
        lines.append("input-bound: a faster input would make it faster; data.profile=true says which part of it.")
    if any(explained_line(result.get("explained")) for result in measured):
        lines.append("lost: what efficiency lacks of 100%, and to what; shares of the step time.")
    if metric:
        lines.append(f"val: {metric} on the validation data.")
    doubts = {doubt for result in measured for doubt in comparable.doubts(result)}
    return [*lines, *(f"{doubt}: {why}" for doubt, why in comparable.DOUBTS.items() if doubt in doubts)]


def _reasons(results: Sequence[Result]) -> list[str]:
    """Why points did not finish; those with the same reason share a line."""
    places: dict[tuple[str, str], list[int]] = {}
    for place, result in enumerate(results):
        status = clean(result.get("status")) or "UNKNOWN"
        if status not in ("FINISHED", "PLANNED", "PREDICTED"):
            said = lines_of(result.get("error")) or [clean(note) for note in items(result.get("notes"))]
            places.setdefault((status, " ".join(said) or "no reason was given"), []).append(place)
    return [f"{points(place).capitalize()} {status.lower()}: {reason}" for (status, reason), place in places.items()]


def noted(runs: Iterable[tuple[int, history.Run]], but: tuple[str, ...] = ()) -> list[str]:
    """What runs that finished noted, by their places, beside what plans say before they start.

    Notes that begin with any of `but` are left out.
    """
    places: dict[str, list[int]] = {}
    for place, run in runs:
        if run.result.get("status") == "FINISHED":
            before = items(run.plan.get("notes"))
            for note in items(run.result.get("notes")):
                if note not in before and not clean(note).startswith(but):
                    places.setdefault(clean(note), []).append(place)
    return [f"{points(place).capitalize()}: {note}" for note, place in places.items()]


def _differences(runs: Sequence[history.Run]) -> list[str]:
    """Which measured points cannot be compared, and in what they differ."""
    measured = [place for place, run in enumerate(runs) if _measured(run.result)]
    lines = []
    for name, places in comparable.differences([runs[place] for place in measured]):
        each = "; ".join(f"{clean(value)}: {points([measured[at] for at in where])}" for value, where in places.items())
        lines.append(f"Not comparable, since {name} differs ({each}).")
    return lines


def _marks(results: Sequence[Result]) -> list[str]:
    """What is written beside the speed of each point; "" beside none."""
    measured = [place for place, result in enumerate(results) if _measured(result)]
    told = comparable.marks([history.of(results[place]) for place in measured])
    marked = {place: listed(*event) for place, event in zip(measured, told, strict=True)}
    return [marked.get(place, "") for place in range(len(results))]


def _measured(result: Result) -> bool:
    return number(result.get("examples_per_second")) is not None


def _metric(results: Sequence[Result]) -> str:
    """The first metric that a point has on the validation data, or the loss where none has one."""
    for result in results:
        for name, value in entries(result.get("val_metrics")):
            if number(value) is not None:
                return name
    return "loss" if any(number(result.get("val_loss")) is not None for result in results) else ""


def _validation(result: Result, metric: str) -> float | None:
    metrics = dict(entries(result.get("val_metrics")))
    return number(result.get("val_loss") if metric == "loss" else metrics.get(metric))

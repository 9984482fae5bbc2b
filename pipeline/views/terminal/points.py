"""Turns the points of a sweep that is under way into lines: which one begins, what it came to, and the table so far."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.analyze import comparable
from pipeline.record.results import Result
from pipeline.run.views import Ahead, RunResult
from pipeline.views.terminal.words import brackets, clean, duration, figure, listed, marks, percent, rate, span, times

if TYPE_CHECKING:
    from rich.console import RenderableType

# Of keys that differ between points, as columns of the table that fills, and the letters of a value.
MOST_KEYS, MOST_LETTERS = 3, 16
# What a point that is under way, or still to come, has for a speed.
RUNNING, TO_COME = "running", "-"


def numbers_of(points: Sequence[RunResult]) -> list[int]:
    """The number of each point: its own, or its place where it has none."""
    return [place if point.number is None else point.number for place, point in enumerate(points)]


def shared_and_own(points: Sequence[RunResult]) -> tuple[list[str], list[list[str]]]:
    """What was typed for all points, and for each what was typed for it alone.

    >>> typed = (("data=digits", "workers=1"), ("data=digits", "workers=2"))
    >>> shared_and_own([RunResult(Result(), overrides=overrides) for overrides in typed])
    (['data=digits'], [['workers=1'], ['workers=2']])
    """
    typed = [list(map(clean, point.overrides)) for point in points]
    known = [overrides for overrides in typed if overrides]
    shared = [line for line in known[0] if all(line in other for other in known)] if len(known) > 1 else []
    return shared, [[line for line in overrides if line not in shared] for overrides in typed]


def begins_line(ahead: Ahead) -> str:
    """Which point begins, what it has of its own, and how far the sweep is.

    >>> points = tuple(RunResult(Result(), number=place, overrides=(f"workers={place + 1}",)) for place in range(3))
    >>> begins_line(Ahead(1, points, 65.0))
    '-- point 1: workers=2 (0 of 3 done, about 1 min 05 s left)'
    """
    numbers = numbers_of(ahead.points)
    own = shared_and_own(ahead.points)[1][numbers.index(ahead.number)]
    left = "" if ahead.seconds_left is None else f"about {duration(ahead.seconds_left)} left"
    far = listed(f"{ahead.done} of {len(ahead.points)} done", left)
    return f"-- point {ahead.number}: {' '.join(own) or 'as all'} ({far})"


def ended_line(point: RunResult, seconds: float | None = None) -> str:
    """What a point came to, in a line.

    >>> from pipeline.record.results import Choices, Ending, Layout, Speed
    >>> done = Result(Ending("FINISHED"), layout=Layout(workers=2), speed=Speed(2145.0, 1575.0, 2222.0, speedup=1.916))
    >>> ended_line(RunResult(done, number=3), 19.0)
    'point 3: FINISHED, 2,145 examples/s (1,575 to 2,222), 1.92x, 19 s'
    """
    result, speed = point.result, point.result.speed
    within = brackets(span(speed.examples_per_second_low, speed.examples_per_second_high, rate, " to "))
    marked, share = marks(result.layout), comparable.efficiency_of(result)
    values = listed(
        clean(result.ending.status) or "UNKNOWN",
        "" if speed.examples_per_second is None else f"{rate(speed.examples_per_second)} examples/s{within}{marked}",
        "" if speed.speedup is None else times(speed.speedup),
        "" if share is None else f"efficiency {percent(share)}",
        *(f"val_{clean(name)} {figure(value)}" for name, value in [*result.training.val_metrics.items()][:1]),
        "" if seconds is None else duration(seconds),
    )
    return f"point {point.number}: {values}"


def filling_table(ahead: Ahead, height: int, narrow: bool) -> RenderableType:
    """The points of a sweep in a row each: what they differ in, and their speeds as far as they have ended.

    Of more points than fit, those around the one that is under way.
    """
    from rich.table import Table
    from rich.text import Text

    numbers, values = numbers_of(ahead.points), _values(ahead.points)
    table = Table.grid(padding=(0, 1 if narrow else 2, 0, 0), pad_edge=False)
    names, speeds = list(values), ("ex/s" if narrow else "examples/s", "speedup")
    for name in ("", *names, *speeds):
        table.add_column(no_wrap=True, justify="left" if name in names else "right")
    table.add_row(*(Text(name, style="bold") for name in ("", *names, *speeds)))
    shown = max(1, height)
    current = numbers.index(ahead.number)
    first = max(0, min(current - shown // 2, len(numbers) - shown))
    for place in range(first, min(first + shown, len(numbers))):
        point = ahead.points[place]
        speed, speedup = _speeds(point.result, numbers[place] == ahead.number)
        style = "bold" if place == current else ""
        cells = [str(numbers[place]), *(values[name][place] for name in names), speed, speedup]
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def _speeds(result: Result, current: bool) -> tuple[str, str]:
    """Throughput and speedup, or in place of the first how it stands."""
    status, speed = clean(result.ending.status), result.speed
    if speed.examples_per_second is None:
        return (RUNNING if current else status or TO_COME), ""
    return rate(speed.examples_per_second), TO_COME if speed.speedup is None else times(speed.speedup)


def _values(points: Sequence[RunResult]) -> dict[str, list[str]]:
    """By the last name of each key that differs between points, the value that each of them has."""
    found: dict[str, list[str]] = {}
    for place, own in enumerate(shared_and_own(points)[1]):
        for line in own:
            key, _, value = line.lstrip("+").partition("=")
            short = value if len(value) <= MOST_LETTERS else f"{value[: MOST_LETTERS - 2]}.."
            found.setdefault(key.rpartition(".")[2], [TO_COME] * len(points))[place] = short
    return dict([*found.items()][:MOST_KEYS])

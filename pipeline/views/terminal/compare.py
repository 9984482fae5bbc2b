"""Turns what differs between runs into what a person reads."""

from collections.abc import Sequence

from pipeline.analyze.comparable import Marks
from pipeline.record.results import Result
from pipeline.views.terminal.verdict import mark_texts
from pipeline.views.terminal.words import (
    bare_times,
    brackets,
    clean,
    columns,
    figure,
    listed,
    rate,
    span,
    times,
)

HEADER = ("", "run", "strategy", "workers", "examples/s", "speedup", "status")
MISSING = "-"
# Of a value that is long, such as a list of arguments.
MOST_CHARACTERS = 40

Row = tuple[str, tuple[object, ...]]


def compared_lines(
    names: Sequence[str],
    results: Sequence[Result],
    marks: Sequence[Marks],
    verdicts: Sequence[str],
    unlike: Sequence[str],
    settings: Sequence[Row],
    outcomes: Sequence[Row],
) -> list[str]:
    """A row for each run, then who is faster, what was asked for differently, and what came out of each."""
    runs = zip(names, results, marks, strict=True)
    header, *rows = columns([HEADER, *(_row(place, *run) for place, run in enumerate(runs))], (0, 3))
    places = [str(place) for place in range(len(results))]
    lines = [header, *rows, "", *verdicts]
    lines += [f"The speeds say nothing of each other: {why}." for why in unlike]
    for title, body in (("asked for", settings), ("came to, one value of each run", outcomes)):
        if body:
            table = columns([(title, *places), *((key, *map(_value, values)) for key, values in body)], ())
            lines += ["", *table]
    return lines


def _row(place: int, name: str, result: Result, marks: Marks) -> tuple[str, ...]:
    speed, workers = result.speed, result.layout.workers
    marked = brackets(listed(*mark_texts(marks)))
    throughput = speedup = MISSING
    if speed.examples_per_second is not None:
        ends = span(speed.examples_per_second_low, speed.examples_per_second_high, rate, "-")
        throughput = f"{rate(speed.examples_per_second)}{brackets(ends)}{marked}"
    if speed.speedup is not None:
        ends = span(speed.speedup_low, speed.speedup_high, bare_times, "-")
        speedup = f"{times(speed.speedup)}{brackets(ends)}{marked}"
    return (
        str(place),
        clean(name),
        clean(result.choices.called) or MISSING,
        MISSING if workers is None else str(workers),
        throughput,
        speedup,
        clean(result.ending.status) or MISSING,
    )


def _value(value: object) -> str:
    """A value in a cell.

    >>> [_value(value) for value in (None, 0.94312, True, "x" * 50)]
    ['-', '0.9431', 'true', 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..']
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return figure(value)
    text = MISSING if value is None else clean(value) or str(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 2]}.."

"""Turns what differs between runs into what a person reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.views.terminal.words import (
    bare_times,
    brackets,
    clean,
    columns,
    figure,
    listed,
    number,
    rate,
    span,
    times,
)

HEADER = ("", "run", "strategy", "workers", "examples/s", "speedup", "status")
MISSING = "-"
# Of a value that is long, such as a list of arguments.
MOST_CHARACTERS = 40

Row = tuple[str, tuple[Any, ...]]


def compared_lines(
    names: Sequence[str],
    results: Sequence[Mapping[str, Any]],
    marks: Sequence[Sequence[str]],
    verdicts: Sequence[str],
    unlike: Sequence[str],
    settings: Sequence[Row],
    outcomes: Sequence[Row],
) -> list[str]:
    """A row for each run, then who is faster, what was asked for differently, and what came out of each."""
    header, *rows = columns(
        [HEADER, *(_row(*each) for each in enumerate(zip(names, results, marks, strict=True)))], (0, 3)
    )
    places = [str(place) for place in range(len(results))]
    lines = [header, *rows, "", *verdicts]
    lines += [f"The speeds say nothing of each other: {why}." for why in unlike]
    for title, body in (("asked for", settings), ("came to, one value of each run", outcomes)):
        if body:
            table = columns([(title, *places), *((key, *map(_value, values)) for key, values in body)], ())
            lines += ["", *table]
    return lines


def _row(place: int, run: tuple[str, Mapping[str, Any], Sequence[str]]) -> tuple[str, ...]:
    name, result, marks = run
    speed, speedup = number(result.get("examples_per_second")), number(result.get("speedup"))
    marked = brackets(listed(*marks))
    return (
        str(place),
        clean(name),
        clean(result.get("strategy")) or MISSING,
        clean(result.get("workers")) or MISSING,
        MISSING if speed is None else f"{rate(speed)}{_range(result, 'examples_per_second', rate)}{marked}",
        MISSING if speedup is None else f"{times(speedup)}{_range(result, 'speedup', bare_times)}{marked}",
        clean(result.get("status")) or MISSING,
    )


def _range(result: Mapping[str, Any], name: str, written: Any) -> str:
    return brackets(span(result.get(f"{name}_low"), result.get(f"{name}_high"), written, "-"))


def _value(value: Any) -> str:
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

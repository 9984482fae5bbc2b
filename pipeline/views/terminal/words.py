"""Numbers, words and lines as a person reads them on a console, broken to its width.

What is missing or odd becomes "" or None, never an error.
"""

import io
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, TextIO, TypeVar, cast

from pipeline.analyze.comparable import doubts, efficiency_of, grouped
from pipeline.record.log import AsFarAsItFits
from pipeline.record.results import Layout, Result, Speed

if TYPE_CHECKING:
    from rich.console import Console

Value = TypeVar("Value")
MISSING = "-"  # stands for what is not known
# A number stays beside its unit.
WORD = re.compile(r"\s*\S*\d (?:s|ms|min|h|B|KiB|MiB|GiB|examples/s)\b[^\s\w]*(?=\s|$)|\s*\S+")
CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")  # ECMA-48, 5.4
NO_WIDTH = 10_000  # wider than any line, so that a path on a pipe stays in one piece
# What a line is about, before what it says, as `plan       cnn on mnist5k`.
LABEL = re.compile(r"\w[\w ]{0,9}?\s{2,}(?=\S)")
COMMAND = "python -m pipeline "  # how a line begins that is to be typed


def rate(value: float) -> str:
    """A positive quantity in three or four digits, or all those before its point.

    >>> [rate(value) for value in (3412.4, 96.04, 3.207, 0.0312, 2_345_678.0)]
    ['3,412', '96.0', '3.21', '0.031', '2.346M']
    """
    if value >= 1e6:
        return f"{value / 1e6:,.3f}M"
    for least, digits in ((99.95, 0), (9.995, 1), (0.9995, 2), (0.001, 3)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.2g}"


def bare_times(value: float) -> str:
    """A speedup as an end of an interval, whose unit is plain."""
    return f"{value:.{(value < 9.995) + (value < 99.95)}f}"


def times(value: float) -> str:
    """A speedup."""
    return f"{bare_times(value)}x"


def percent(value: float) -> str:
    """A share."""
    return f"{value:.0%}" if abs(value) >= 0.0995 else f"{value:.1%}"


def figure(value: float) -> str:
    """A loss or a metric."""
    return f"{value:.4g}"


def duration(seconds: float) -> str:
    """Seconds in the units that a person would use.

    >>> [duration(seconds) for seconds in (4.23, 42.0, 185.0, 3720.0)]
    ['4.2 s', '42 s', '3 min 05 s', '1 h 02 min']
    """
    if not math.isfinite(seconds):
        return "-"
    if seconds < 9.95:
        return f"{max(0.0, seconds):.1f} s"
    minutes, left = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60:,} h {minutes % 60:02} min"
    return f"{minutes} min {left:02} s" if minutes else f"{left} s"


def plural(count: int | None, noun: str) -> str:
    """A count and its noun; empty where there is no count.

    >>> plural(1, "step"), plural(1_200, "process"), plural(None, "step")
    ('1 step', '1,200 processes', '')
    """
    if count is None:
        return ""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def spread(counts: Sequence[int], noun: str, none: str) -> str:
    """One count for all, or the least and the most; `none` where all are 0.

    >>> [spread(cores, "core", none="any core") for cores in ((1, 1), (1, 3), (0, 0))]
    ['1 core', '1 to 3 cores', 'any core']
    """
    low, high = min(counts), max(counts)
    return none if high == 0 else f"{low:,} to " * (low < high) + plural(high, noun)


def ranges(numbers: Sequence[int]) -> str:
    """Numbers with the consecutive ones drawn together.

    >>> ranges((0, 1, 2, 5, 7, 8))
    '0-2,5,7-8'
    """
    # The numbers of a run are as far from their places.
    runs = grouped((number - place, number) for place, number in enumerate(sorted(set(numbers))))
    return ",".join(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]) for run in runs.values())


def points_text(places: Sequence[int]) -> str:
    """Points of a sweep by their places."""
    return f"point{'s' * (len(places) > 1)} {ranges(places)}"


def span(low: float | None, high: float | None, write: Callable[[float], str], between: str) -> str:
    """An interval, where both its ends are known and differ: one repeat has none.

    >>> span(3301.2, 3502.4, rate, " to "), span(None, 3502.4, rate, " to "), span(2.0, 2.0, times, "-")
    ('3,301 to 3,502', '', '')
    """
    first, last = number(low), number(high)
    return "" if first is None or last is None or first == last else f"{write(first)}{between}{write(last)}"


def throughput_span(speed: Speed, between: str = " to ") -> str:
    """Returns the interval of a throughput, or ""."""
    return span(speed.examples_per_second_low, speed.examples_per_second_high, rate, between)


def per_second(speed: Speed, more: str = "") -> str:
    """Returns a throughput with its unit and what is said of it, or ""."""
    return "" if speed.examples_per_second is None else f"{rate(speed.examples_per_second)} examples/s{more}"


def speedup_span(speed: Speed, between: str = " to ") -> str:
    """Returns the interval of a speedup, or ""."""
    return span(speed.speedup_low, speed.speedup_high, bare_times, between)


def by_points(texts: Iterable[tuple[str, int]]) -> list[tuple[str, str]]:
    """Returns (points of a sweep, text) for each text, from its points."""
    return [(points_text(places).capitalize(), text) for text, places in grouped(texts).items()]


def or_missing(value: Value | None, write: Callable[[Value], str], missing: str = MISSING) -> str:
    """Returns the value as it is written, where it is known."""
    return missing if value is None else write(value)


def shortened(text: str, letters: int) -> str:
    """Returns a text in at most so many letters."""
    return text if len(text) <= letters else f"{text[: letters - 2]}.."


# What tables show of a result, by the names of their columns.
COLUMNS: dict[str, Callable[[Result], str]] = {
    "strategy": lambda result: clean(result.choices.called),
    "workers": lambda result: or_missing(result.layout.workers, "{:,}".format),
    "batch": lambda result: or_missing(result.layout.replica_batch, "{:,}".format),
    "examples/s": lambda result: or_missing(result.speed.examples_per_second, rate),
    "interval": lambda result: throughput_span(result.speed, "-"),
    "speedup": lambda result: or_missing(result.speed.speedup, times),
    "eff.": lambda result: or_missing(efficiency_of(result), percent),
    "to finish": lambda result: or_missing(result.cost.seconds_to_finish, duration),
    "cost": lambda result: or_missing(result.cost.cost_to_finish, rate),
    "energy": lambda result: or_missing(result.cost.energy_joules, lambda joules: f"{rate(joules / 3600)} Wh"),
    "status": lambda result: clean(result.ending.status),
}


def cells(header: Sequence[str], result: Result, others: Mapping[str, str]) -> list[str]:
    """Returns the cells of a result under a header: those of `COLUMNS`, and `others`."""
    return [others[name] if name in others else COLUMNS[name](result) or MISSING for name in header]


def marks(layout: Layout) -> str:
    """Returns the doubts that make a speedup less than it seems, to be written wherever one is shown."""
    return brackets(listed(*doubts(layout)))


def fitted(text: str, width: int, indent: int = 0) -> list[str]:
    """The text in lines of at most `width`, all but the first indented; a word that fits no line is broken at slashes.

    >>> fitted("plan       cnn on mnist5k, mirrored", 24, 8), fitted("see outputs/runs/2026_mirrored", 16)
    (['plan       cnn on', '        mnist5k,', '        mirrored'], ['see outputs/', 'runs/', '2026_mirrored'])
    """
    if len(text) <= width:
        return [text]
    lines, indent = [""], indent if indent <= width // 3 else 2
    for word in WORD.findall(text):
        for piece in [word] if len(word.strip()) <= width else re.findall(r"\s*[^/\s]*/?", word)[:-1]:
            if lines[-1] and len(lines[-1]) + len(piece) > width:
                lines.append(" " * max(0, min(indent, width - len(piece.lstrip()))) + piece.lstrip())
            else:
                lines[-1] += piece
    return lines


def labelled(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Returns (label, text) as lines whose texts stand under each other; nothing of an empty text."""
    lines = ((label, number, line) for label, text in rows for number, line in enumerate(text.splitlines()))
    return [f"{'' if number else label:<11}{line}" for label, number, line in lines]


def columns(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """The rows as lines, columns as wide as their widest cell and two spaces apart; `right` align right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    line = "  ".join(f"{{:{'<>'[place in right]}{width}}}" for place, width in enumerate(widths))
    return [line.format(*row).rstrip() for row in rows]


def listed(*parts: str) -> str:
    """The parts that say something, with commas between."""
    return ", ".join(part for part in parts if part)


def brackets(text: str) -> str:
    """The text in brackets after a space, where there is any."""
    return f" ({text})" if text else ""


def named(name: str, value: float | None) -> str:
    """A loss or metric with its name. One that is not a number is told: a person has to know about it."""
    return "" if value is None else f"{name} {figure(value)}"


def pairs(values: Mapping[str, float], prefix: str = "") -> str:
    """Metrics with their names."""
    return listed(*(named(f"{prefix}{clean(name)}", value) for name, value in values.items()))


def number(value: object) -> float | None:
    """Returns `value` if it is a finite number; a bool is none.

    >>> number(2), number(True), number(float("inf")), number("2")
    (2.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= sys.float_info.max else None


def clean(value: object) -> str:
    """Text on one line without control codes, so that nobody's error message moves the cursor.

    >>> clean("two\\nlines, \\x1b[31mred\\x1b[0m")
    'two lines, red'
    """
    words = " ".join(CONTROL_SEQUENCE.sub("", "" if value is None else str(value)).split())
    return "".join(letter for letter in words if letter.isprintable())


def lines_of(value: object) -> list[str]:
    """The text's lines that say something, each without control codes."""
    return [line for line in map(clean, str(value or "").splitlines()) if line]


@cache
def console_on(stream: TextIO) -> "Console":
    """The console of a stream: it wraps to a terminal's width, and elsewhere never wraps and moves no cursor."""
    from rich.console import Console

    on_terminal = stream.isatty()
    return Console(
        file=_lenient(stream),
        markup=False,
        highlight=False,
        emoji=False,
        width=None if on_terminal else NO_WIDTH,
        # FORCE_COLOR makes Rich take a pipe for a terminal: colours may stay, a moving cursor may not.
        force_interactive=None if on_terminal else False,
    )


def _lenient(stream: TextIO) -> TextIO:
    """The stream, with "?" for characters that its encoding lacks, of which a full disk ends nothing."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
        return cast("TextIO", AsFarAsItFits(stream))
    return stream


def say(console: "Console", *lines: str) -> None:
    """Prints lines, on a narrow terminal broken between words and indented under a label; a command stays whole."""
    from rich.text import Text

    for line in lines:
        console.print(Text(_broken(line, console.width)), soft_wrap=True)


def _broken(text: str, width: int) -> str:
    label = LABEL.match(text)
    indent = len(label[0]) if label else len(text) - len(text.lstrip()) + 4 * (len(text) > width)
    return text if text.startswith(COMMAND) else "\n".join(fitted(text, width, indent))


def say_error(message: str) -> None:
    """Prints an error as one message to stderr, without Rich, whose import would be a tenth of a refusal's time."""
    stream = _lenient(sys.stderr)
    width = stream.isatty() and os.get_terminal_size(stream.fileno()).columns
    for line in error_text(message).splitlines():
        print(_broken(line, width or NO_WIDTH), file=stream, flush=True)


def error_text(message: str) -> str:
    """An error as one message for stderr; lines after the first are indented."""
    first, *rest = lines_of(message) or ["stopped, and no reason was given"]
    return "\n".join([f"pipeline: {first}", *(f"    {line}" for line in rest)])

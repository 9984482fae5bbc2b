"""Shows a command's runs on a console: lines, and live bars while a run is under way."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from pipeline.driver import Ahead, RunResult
from pipeline.plan.estimate import Estimate
from pipeline.plan.plan import Plan
from pipeline.record.events import Epoch, Event
from pipeline.record.results import Result
from pipeline.views.terminal.plan_text import estimate_lines, plan_lines, shard_lines
from pipeline.views.terminal.run_state import Doing, RunState
from pipeline.views.terminal.sweep_table import begins_line, came_to, shared_and_own, sweep_rows
from pipeline.views.terminal.words import (
    clean,
    duration,
    fitted,
    listed,
    number,
    or_missing,
    rate,
    say,
    shortened,
    time_of_day,
    times,
)

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

REFRESH_SECONDS = 0.25  # between two drawings of the live bars
LINE_SECONDS = 10.0  # between two plain lines
# Of what follows a line that is broken; the lines of a drawing beside those of the table of a sweep; a narrow terminal.
INDENT, OTHER_LINES, NARROW = 4, 8, 60
LATEST = 2**33  # seconds since 1970 that a clock may say
SHOW_CURSOR = "\x1b[?25h"  # DECTCEM, DEC VT510 manual
# Of keys that differ between points, as columns of the table that fills, and the letters of a value.
MOST_KEYS, MOST_LETTERS = 3, 16
# What a point that is under way, or still to come, has for a speed.
RUNNING, TO_COME = "running", "-"
REFRESH_PER_SECOND = 2.0  # of the table of points that run at once


class Terminal:
    """A `pipeline.driver.Screen`: lines, and bars while a run is under way."""

    def __init__(self, console: Console, clock: Callable[[], float] | None = None) -> None:
        self._console, self._clock = console, clock
        # The lines of the last plan that was shown: of the next one, those that it shares say nothing new.
        self._last: frozenset[str] = frozenset()

    def say(self, text: str) -> None:
        """Shows a line, broken between words where the terminal is narrow."""
        say(self._console, text)

    def begins(self, ahead: Ahead) -> None:
        """Shows which point of a sweep begins, after an empty line."""
        self.say("")
        self.say(self._timed(begins_line(ahead)))

    def ended(self, point: RunResult, seconds: float | None) -> None:
        """Shows what a point of a sweep came to."""
        self.say(self._timed(f"point {point.number}: {came_to(point.result, seconds)}"))

    def shares(self, points: Sequence[RunResult]) -> None:
        """Shows what was typed for all points of a sweep."""
        if shared := shared_and_own(points)[0]:
            self.say(f"all        {' '.join(shared)}")

    def _say_all(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.say(line)

    def _timed(self, line: str) -> str:
        """The line, after the time of day where it may be read much later."""
        if self._clock is None or self._console.is_interactive:
            return line
        return f"{time_of_day(self._clock())} {line}"

    def resumed(self, folder: str, status: str, step: int, saved_step: int | None) -> None:
        """Shows which run a point goes on with, and from where."""
        where = "from the beginning, since it has no checkpoint"
        if saved_step:
            where = f"from the checkpoint of step {saved_step:,}"
        self.say(f"resuming   {folder}, {status} at step {step:,}, {where} (resume=never begins anew)")

    def planned(self, plan: Plan, full: bool, reused: str | None, cut: Estimate | None = None) -> None:
        """Shows a plan; of one that follows another, what it does not share with that."""
        lines = plan_lines(plan, full, reused)
        lines += [f"{label:<11}{text}" for label, text in (shard_lines(cut) if cut else ())]
        self._say_all(line for line in lines if full or line not in self._last)
        self._last = frozenset(lines)

    def described(self, typed: str) -> None:
        """Shows it, after an empty line."""
        self.say("")
        for line in typed.expandtabs(4).splitlines():
            # Its lines may be a script's, whose spaces count.
            self.say("".join(letter for letter in line if letter.isprintable()))

    def estimated(self, plan: Plan, estimate: Estimate) -> None:
        """Shows what a plan needs, after an empty line."""
        self._say_all(["", *estimate_lines(plan, estimate)])

    def live(self, plan: Plan, now: float, ahead: Ahead | None, earlier: Iterable[Event] = ()) -> Progress:
        """Bars, or lines where this is no terminal."""
        return Progress(plan, self._console, now, ahead, earlier)


class Progress:
    """Takes a run's events and shows them, but for those of `earlier` commands. Bars are drawn inside its `with` block.

    However the block ends, a Ctrl-C included, the bars go and the cursor comes back. While a repeat is timed
    nothing is drawn, since training may run on the same cores. A terminal that goes away does not end the
    run: the event log is the record, and this is only a view of it.
    """

    def __init__(
        self, plan: Plan, console: Console, now: float, ahead: Ahead | None = None, earlier: Iterable[Event] = ()
    ) -> None:
        self._seen, self._ahead = RunState(plan, now), ahead
        for event in earlier:
            self._seen.take(event, now)
        self._console = console
        self._now = self._told = now
        # The time of day of the last event that says it, for lines that are read later.
        self._clock: float | None = None
        self._drawn = -math.inf
        self._waiting: list[str] = []
        self._live: Live | None = None
        self._open = self._gone = False

    def __enter__(self) -> Progress:
        self._open = self._console.is_interactive
        return self

    def __exit__(self, *exception: object) -> None:
        self._open = False
        try:
            self._restore()
        finally:
            self._say(self._waiting)
            self._waiting = []

    def update(self, event: Event, now: float) -> None:
        """Takes the next event, of any kind, and shows what it changes; `now` is in seconds on one clock."""
        self._now = max(self._now, now)
        seconds = number(event.time)
        self._clock = seconds if seconds is not None and 0 < seconds < LATEST else self._clock
        lines = self._seen.take(event, self._now)
        if self._open:
            # Of a sweep it is the points that stay.
            stay = self._ahead is None or not isinstance(event, Epoch)
            self._waiting += [line.text for line in lines if line.lasting and stay]
            # Now and then; while repeats are timed, only where one ends and before the next begins.
            is_time = self._seen.turned if self._seen.timing else self._now - self._drawn >= REFRESH_SECONDS
            if is_time or self._seen.failing:
                self._draw()
        elif self._console.is_interactive:
            self._say([line.text for line in lines if line.lasting])
        else:
            self._say([line.text for line in lines] or self._after_a_while())

    def _draw(self) -> None:
        from rich.live import Live
        from rich.text import Text

        if self._gone:
            return
        self._drawn = self._now
        bars = _bars(self._seen.view(), self._now - self._seen.start, self._ahead, *self._console.size)
        try:
            if self._live is None:
                # What goes to the terminal is led past the bars; a redirected stdout stays what it is.
                self._live = Live(
                    console=self._console,
                    auto_refresh=False,
                    transient=True,
                    redirect_stdout=sys.stdout.isatty(),
                    redirect_stderr=sys.stderr.isatty(),
                )
                self._live.start()
            with self._console:  # both in one write
                if self._waiting:
                    fit = [part for line in self._waiting for part in fitted(line, self._console.width, INDENT)]
                    self._console.print(Text("\n".join(fit)))
                self._live.update(bars, refresh=True)
            self._waiting = []
        except (OSError, UnicodeError):
            self._gone = True

    def _after_a_while(self) -> list[str]:
        """A line on how things stand, where none was written for long; none while a repeat is timed."""
        if self._now - self._told < LINE_SECONDS or self._seen.timing:
            return []
        view = self._seen.view()
        figures = view.figures or f"{duration(self._now - self._seen.start)} so far"
        return [f"{view.label}: {listed(view.where, figures)}"]

    def _say(self, lines: list[str]) -> None:
        if not lines or self._gone:
            return
        self._told = self._now
        if self._console.is_interactive:
            lines = [part for line in lines for part in fitted(line, self._console.width, INDENT)]
        else:
            lines = [f"{'' if self._clock is None else time_of_day(self._clock) + ' '}{line}" for line in lines]
        try:
            self._console.file.write("".join(f"{line}\n" for line in lines))
            self._console.file.flush()
        except (OSError, UnicodeError):
            self._gone = True

    def _restore(self) -> None:
        if self._live is None:
            return
        try:
            with suppress(IndexError):  # it was interrupted before it had begun
                self._live.stop()
        except (OSError, UnicodeError):
            self._gone = True
        finally:
            # Once more and past Rich, which a Ctrl-C may have left in the middle of something.
            with suppress(OSError):
                self._console.file.write(SHOW_CURSOR)
                self._console.file.flush()


@contextmanager
def board(console: Console, points: Mapping[Any, RunResult]) -> Iterator[None]:
    """On a terminal, shows the points of a sweep inside its block, as far as they have come by then."""
    from rich.live import Live
    from rich.text import Text

    def table() -> RenderableType:
        return Text("\n".join(sweep_rows([*points.values()])), no_wrap=True)

    live = Live(get_renderable=table, console=console, refresh_per_second=REFRESH_PER_SECOND, transient=True)
    with live if console.is_interactive else nullcontext():
        yield


def _bars(view: Doing, elapsed: float, ahead: Ahead | None = None, width: int = 80, height: int = 24) -> RenderableType:
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    row = Table.grid(padding=(0, 2, 0, 0), expand=True)
    row.add_column(width=10, no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    row.add_column(no_wrap=True, justify="right")
    narrow = width < NARROW
    # An unknown total stays an empty bar: a pulse would have to be drawn again and again.
    bar = ProgressBar(total=view.total or 1, completed=view.done if view.total else 0)
    where = "" if narrow else view.where
    row.add_row(Text(view.label, style="bold"), bar, Text(where), Text(duration(elapsed), style="dim"))
    if ahead is not None:
        seconds = 0.0 if ahead.seconds_left is None else ahead.seconds_left - elapsed
        # A point that takes longer than those before it leaves it open.
        left = f"{duration(seconds)} left" if seconds > 0 else ""
        done = f"{ahead.done} of {len(ahead.points)}{' points' * (not narrow)}"
        bar = ProgressBar(total=len(ahead.points), completed=ahead.done)
        row.add_row(Text("sweep", style="bold"), bar, Text(done), Text(left, style="dim"))
    figures = listed(view.where * narrow, view.figures)
    indent = 2 if narrow else 12
    below = [Text(" " * indent + line, no_wrap=True) for line in fitted(figures, width - indent)] if figures else []
    table = [] if ahead is None else [_filling_table(ahead, height - OTHER_LINES, narrow)]
    return Group(*table, row, *below)


def _filling_table(ahead: Ahead, height: int, narrow: bool) -> RenderableType:
    """The points that fit, around the current one: what they differ in, and their speeds as far as they have ended."""
    from rich.table import Table
    from rich.text import Text

    numbers, values = [point.number for point in ahead.points], _values(ahead.points)
    table = Table.grid(padding=(0, 1 if narrow else 2, 0, 0), pad_edge=False)
    names, speeds = list(values), ("ex/s" if narrow else "examples/s", "speedup")
    for name in ("", *names, *speeds):
        table.add_column(no_wrap=True, justify="left" if name in names else "right")
    table.add_row(*(Text(name, style="bold") for name in ("", *names, *speeds)))
    shown = max(1, height)
    current = numbers.index(ahead.number)
    first = max(0, min(current - shown // 2, len(numbers) - shown))
    for place in range(first, min(first + shown, len(numbers))):
        speed, speedup = _speeds(ahead.points[place].result, place == current)
        style = "bold" if place == current else ""
        cells = [str(numbers[place]), *(values[name][place] for name in names), speed, speedup]
        table.add_row(*(Text(cell, style=style) for cell in cells))
    return table


def _speeds(result: Result, current: bool) -> tuple[str, str]:
    status, speed = clean(result.ending.status), result.speed
    if speed.examples_per_second is None:
        return (RUNNING if current else status or TO_COME), ""
    return rate(speed.examples_per_second), or_missing(speed.speedup, times, TO_COME)


def _values(points: Sequence[RunResult]) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = {}
    for place, own in enumerate(shared_and_own(points)[1]):
        for line in own:
            key, _, value = line.lstrip("+").partition("=")
            columns.setdefault(key.rpartition(".")[2], [TO_COME] * len(points))[place] = shortened(value, MOST_LETTERS)
    return dict([*columns.items()][:MOST_KEYS])

"""Shows a command's runs on a console: lines, and live bars while a run is under way."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.analyze.comparable import efficiency_of
from pipeline.driver import Ahead, RunResult
from pipeline.plan.estimate import Estimate
from pipeline.plan.plan import Plan
from pipeline.record.events import Epoch, Event
from pipeline.views.terminal import words
from pipeline.views.terminal.plan_text import estimate_lines, plan_lines, shard_lines
from pipeline.views.terminal.run_state import Doing, RunState
from pipeline.views.terminal.sweep_table import shared_and_own, sweep_rows
from pipeline.views.terminal.words import MISSING, clean, duration, fitted, listed

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

REFRESH_SECONDS, LINE_SECONDS = 0.25, 10.0  # between two drawings of the live bars, and between two plain lines
# Of what follows a line that is broken; the lines of a drawing beside those of the table of a sweep; a narrow terminal.
INDENT, OTHER_LINES, NARROW = 4, 8, 60
LATEST = 2**33  # seconds since 1970 that a clock may say
SHOW_CURSOR = "\x1b[?25h"  # DECTCEM, DEC VT510 manual
# Of keys that differ between points, as columns of the table that fills, and the letters of a value.
MOST_KEYS, MOST_LETTERS = 3, 16
REFRESH_PER_SECOND = 2.0  # of the table of points that run at once


class Terminal:
    """A `pipeline.driver.Screen`: lines, and bars while a run is under way."""

    def __init__(self, console: "Console", clock: Callable[[], float] | None = None) -> None:
        self._console, self._clock = console, clock
        # The lines of the last plan that was shown: of the next one, those that it shares say nothing new.
        self._last: list[str] = []

    def say(self, *lines: str) -> None:
        """Shows lines, broken between words where the terminal is narrow."""
        words.say(self._console, *lines)

    def begins(self, ahead: Ahead) -> None:
        """Shows which point of a sweep begins, by its own overrides, and how far the sweep is, after an empty line."""
        place = [point.number for point in ahead.points].index(ahead.number)
        own = " ".join(shared_and_own(ahead.points)[1][place])
        left = "" if ahead.seconds_left is None else f"about {duration(ahead.seconds_left)} left"
        far = listed(f"{ahead.done} of {len(ahead.points)} done", left)
        self.say("", self._timed(f"-- point {ahead.number}: {own or 'as all'} ({far})"))

    def ended(self, point: RunResult, seconds: float | None) -> None:
        """Shows a point's status, figures and seconds."""
        result, speed, share = point.result, point.result.speed, efficiency_of(point.result)
        came_to = listed(
            clean(result.ending.status) or "UNKNOWN",
            words.per_second(speed, words.brackets(words.throughput_span(speed)) + words.marks(result.layout)),
            words.or_missing(speed.speedup, words.times, ""),
            "" if share is None else f"efficiency {words.percent(share)}",
            *(f"val_{clean(name)} {words.figure(value)}" for name, value in [*result.training.val_metrics.items()][:1]),
            words.or_missing(seconds, duration, ""),
        )
        self.say(self._timed(f"point {point.number}: {came_to}"))

    def shares(self, points: Sequence[RunResult]) -> None:
        """Shows what was typed for all points of a sweep."""
        if shared := shared_and_own(points)[0]:
            self.say(f"all        {' '.join(shared)}")

    def _timed(self, line: str) -> str:
        # Where it may be read much later.
        return line if self._clock is None or self._console.is_interactive else _time_of_day(self._clock()) + line

    def resumed(self, folder: str, status: str, step: int, saved_step: int | None) -> None:
        """Shows which run a point goes on with, and from where."""
        where = f"the checkpoint of step {saved_step:,}" if saved_step else "the beginning, since it has no checkpoint"
        self.say(f"resuming   {folder}, {status} at step {step:,}, from {where} (resume=never begins anew)")

    def planned(self, plan: Plan, full: bool, reused: str | None, cut: Estimate | None = None) -> None:
        """Shows a plan; of one that follows another, what it does not share with that."""
        lines = plan_lines(plan, full, reused) + (words.labelled(shard_lines(cut)) if cut else [])
        self.say(*(line for line in lines if full or line not in self._last))
        self._last = lines

    def described(self, typed: str) -> None:
        """Shows it, after an empty line; its lines may be a script's, whose spaces count."""
        self.say("", *("".join(filter(str.isprintable, line)) for line in typed.expandtabs(4).splitlines()))

    def estimated(self, plan: Plan, estimate: Estimate) -> None:
        """Shows what a plan needs, after an empty line."""
        self.say("", *estimate_lines(plan, estimate))

    def live(self, plan: Plan, now: float, ahead: Ahead | None, earlier: Iterable[Event] = ()) -> "Progress":
        """Bars, or lines where this is no terminal."""
        return Progress(plan, self._console, now, ahead, earlier)


class Progress:
    """Takes a run's events and shows them, but for those of `earlier` commands. Bars are drawn inside its `with` block.

    However the block ends, a Ctrl-C included, the bars go and the cursor comes back. While a repeat is timed nothing is
    drawn, since training may run on the same cores. A terminal that goes away does not end the run.
    """

    def __init__(
        self, plan: Plan, console: "Console", now: float, ahead: Ahead | None = None, earlier: Iterable[Event] = ()
    ) -> None:
        self._seen, self._ahead, self._console = RunState(plan, now), ahead, console
        for event in earlier:
            self._seen.take(event, now)
        self._now = self._shown = now
        self._clock = ""  # the time of day of the last event that says it, for lines that are read later
        self._drawn = -math.inf
        self._waiting: list[str] = []
        self._live: Live | None = None
        self._open = self._gone = False

    def __enter__(self) -> "Progress":
        self._open = self._console.is_interactive
        return self

    def __exit__(self, *exception: object) -> None:
        self._open = False
        try:
            if self._live is not None:
                with self._writing(), suppress(IndexError):  # it was interrupted before it had begun
                    self._live.stop()
        finally:
            try:
                # Once more and past Rich, which a Ctrl-C may have left in the middle of something.
                if self._live is not None:
                    with suppress(OSError):
                        self._console.file.write(SHOW_CURSOR)
                        self._console.file.flush()
            finally:
                self._say(self._waiting)

    def update(self, event: Event, now: float) -> None:
        """Takes the next event, of any kind, and shows what it changes; `now` is in seconds on one clock."""
        now = self._now = max(self._now, now)
        if 0 < (seconds := words.number(event.time) or 0) < LATEST:
            self._clock = _time_of_day(seconds)
        lines = self._seen.take(event, now)
        lasting = [text for text, lasts in lines if lasts]
        if self._open:
            # Of a sweep it is the points that stay.
            self._waiting += lasting if self._ahead is None or not isinstance(event, Epoch) else []
            # Now and then; while repeats are timed, only where one ends and before the next begins.
            if self._seen.failing or (self._seen.turned if self._seen.timing else now - self._drawn >= REFRESH_SECONDS):
                self._draw()
        elif self._console.is_interactive:
            self._say(lasting)
        elif lines:
            self._say([text for text, _ in lines])
        elif self._now - self._shown >= LINE_SECONDS and not self._seen.timing:
            # How things stand, where nothing was written for long.
            view, so_far = self._seen.view(), f"{duration(self._now - self._seen.start)} so far"
            self._say([f"{view.label}: {listed(view.where, view.figures or so_far)}"])

    def _draw(self) -> None:
        from rich.live import Live
        from rich.text import Text

        if self._gone:
            return
        self._drawn = self._now
        bars = _bars(self._seen.view(), self._now - self._seen.start, self._ahead, *self._console.size)
        with self._writing():
            if self._live is None:
                # What goes to the terminal is led past the bars; a redirected stdout stays what it is.
                live = partial(Live, console=self._console, auto_refresh=False, transient=True)
                self._live = live(redirect_stdout=sys.stdout.isatty(), redirect_stderr=sys.stderr.isatty())
                self._live.start()
            with self._console:  # both in one write
                if self._waiting:
                    self._console.print(Text("\n".join(self._fitted(self._waiting))))
                self._live.update(bars, refresh=True)
            self._waiting = []

    def _say(self, lines: Sequence[str]) -> None:
        if not lines or self._gone:
            return
        self._shown = self._now
        lines = self._fitted(lines) if self._console.is_interactive else [f"{self._clock}{line}" for line in lines]
        with self._writing():
            self._console.file.write("".join(f"{line}\n" for line in lines))
            self._console.file.flush()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, UnicodeError):
            self._gone = True

    def _fitted(self, lines: Iterable[str]) -> list[str]:
        return [part for line in lines for part in fitted(line, self._console.width, INDENT)]


@contextmanager
def board(console: "Console", points: Mapping[Any, RunResult]) -> Iterator[None]:
    """On a terminal, shows the points of a sweep inside its block, as far as they have come by then."""
    from rich.live import Live
    from rich.text import Text

    def table() -> Text:
        return Text("\n".join(sweep_rows([*points.values()])), no_wrap=True)

    live = Live(get_renderable=table, console=console, refresh_per_second=REFRESH_PER_SECOND, transient=True)
    with live if console.is_interactive else nullcontext():
        yield


def _time_of_day(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%H:%M:%S} "


def _bars(view: Doing, elapsed: float, ahead: Ahead | None, width: int, height: int) -> "RenderableType":
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    narrow, row = width < NARROW, Table.grid(padding=(0, 2, 0, 0), expand=True)
    row.add_column(width=10, no_wrap=True, style="bold")
    row.add_column(ratio=1)
    row.add_column(no_wrap=True, justify="right")
    row.add_column(no_wrap=True, justify="right", style="dim")
    # An unknown total stays an empty bar: a pulse would have to be drawn again and again.
    bar = ProgressBar(total=view.total or 1, completed=view.done if view.total else 0)
    row.add_row(view.label, bar, Text("" if narrow else view.where), duration(elapsed))
    table = []
    if ahead is not None:
        # A point that takes longer than those before it leaves it open.
        seconds = (ahead.seconds_left or 0.0) - elapsed
        done = f"{ahead.done} of {len(ahead.points)}{' points' * (not narrow)}"
        bar = ProgressBar(total=len(ahead.points), completed=ahead.done)
        row.add_row("sweep", bar, done, f"{duration(seconds)} left" if seconds > 0 else "")
        table = [_filling_table(ahead, max(1, height - OTHER_LINES), narrow)]
    figures, indent = listed(view.where * narrow, view.figures), 2 if narrow else 12
    below = [Text(" " * indent + line, no_wrap=True) for line in fitted(figures, width - indent) if line]
    return Group(*table, row, *below)


def _filling_table(ahead: Ahead, rows: int, narrow: bool) -> "RenderableType":
    """The points that fit, around the current one: what they differ in, and their speeds as far as they have ended."""
    from rich.table import Table
    from rich.text import Text

    values: dict[str, dict[int, str]] = {}
    for point, own in zip(ahead.points, shared_and_own(ahead.points)[1], strict=True):
        for override in own:
            key, _, value = override.lstrip("+").partition("=")
            values.setdefault(key.rpartition(".")[2], {})[point.number] = words.shortened(value, MOST_LETTERS)
    names, speeds = [*values][:MOST_KEYS], ("ex/s" if narrow else "examples/s", "speedup")
    table = Table.grid(padding=(0, 1 if narrow else 2, 0, 0), pad_edge=False)
    for name in (header := ("", *names, *speeds)):
        table.add_column(no_wrap=True, justify="left" if name in names else "right")
    table.add_row(*header, style="bold")
    current = [point.number for point in ahead.points].index(ahead.number)
    first = max(0, min(current - rows // 2, len(ahead.points) - rows))
    for point in ahead.points[first : first + rows]:
        speed, is_current = point.result.speed, point.number == ahead.number
        reached = ("running" if is_current else clean(point.result.ending.status) or MISSING, "")
        if speed.examples_per_second is not None:
            reached = (words.rate(speed.examples_per_second), words.or_missing(speed.speedup, words.times))
        cells = [str(point.number), *(values[name].get(point.number, MISSING) for name in names), *reached]
        table.add_row(*map(Text, cells), style="bold" if is_current else None)
    return table

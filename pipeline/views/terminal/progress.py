"""Shows a run while it goes on: live bars on a terminal, and elsewhere a plain line now and then."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from pipeline.plan.plan import Plan
from pipeline.record.events import Epoch, Event
from pipeline.run.views import Ahead
from pipeline.views.terminal.points import filling_table
from pipeline.views.terminal.run_state import RunState
from pipeline.views.terminal.training_state import View
from pipeline.views.terminal.words import duration, fitted, listed, number, time_of_day

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

REFRESH_SECONDS = 0.25  # between two drawings of the live bars
LINE_SECONDS = 10.0  # between two plain lines
# Of what follows a line that is broken; the lines of a drawing beside those of the table of a sweep; a narrow terminal.
INDENT, OTHER_LINES, NARROW = 4, 8, 60
LATEST = 2**33  # seconds since 1970 that a clock may say
SHOW_CURSOR = "\x1b[?25h"  # DECTCEM, DEC VT510 manual


class Progress:
    """Takes a run's events and shows them. Bars are drawn only inside its `with` block.

    However the block ends, a Ctrl-C included, the bars go and the cursor comes back. While a repeat is timed
    nothing is drawn, since training may run on the same cores. A terminal that goes away does not end the
    run: the event log is the record, and this is only a view of it.
    """

    def __init__(self, plan: Plan, console: Console, now: float, ahead: Ahead | None = None) -> None:
        self._seen, self._ahead = RunState(plan, now), ahead
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        try:
            self._restore()
        finally:
            self._say(self._waiting)
            self._waiting = []

    def recall(self, events: Iterable[Event], now: float) -> None:
        """Takes what an earlier command was told, and shows nothing of it."""
        for event in events:
            self._seen.take(event, now)

    def update(self, event: Event, now: float) -> None:
        """Takes the next event, of any kind, and shows what it changes; `now` is in seconds on one clock."""
        self._now = max(self._now, now)
        said = number(event.time)
        self._clock = said if said is not None and 0 < said < LATEST else self._clock
        lines = self._seen.take(event, self._now)
        if self._open:
            # Of a sweep it is the points that stay.
            stay = self._ahead is None or not isinstance(event, Epoch)
            self._waiting += [line.text for line in lines if line.lasting and stay]
            if self._is_time_to_draw():
                self._draw()
        elif self._console.is_interactive:
            self._say([line.text for line in lines if line.lasting])
        else:
            self._say([line.text for line in lines] or self._after_a_while())

    def _is_time_to_draw(self) -> bool:
        """Now and then; while repeats are timed, only where one ends and before the next begins."""
        if self._seen.failing:
            return True
        if self._seen.timing:
            return self._seen.turned
        return self._now - self._drawn >= REFRESH_SECONDS

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
        stream = self._console.file
        encoding = getattr(stream, "encoding", None) or "utf-8"
        if self._console.is_interactive:
            lines = [part for line in lines for part in fitted(line, self._console.width, INDENT)]
        else:
            lines = [f"{'' if self._clock is None else time_of_day(self._clock) + ' '}{line}" for line in lines]
        text = "".join(f"{line}\n" for line in lines)
        try:
            stream.write(text.encode(encoding, "replace").decode(encoding))
            stream.flush()
        except OSError:
            self._gone = True

    def _restore(self) -> None:
        if self._live is None:
            return
        try:
            self._live.stop()
        except IndexError:
            pass  # it was interrupted before it had begun
        except (OSError, UnicodeError):
            self._gone = True
        finally:
            # Once more and past Rich, which a Ctrl-C may have left in the middle of something.
            with suppress(OSError):
                self._console.file.write(SHOW_CURSOR)
                self._console.file.flush()


def _bars(view: View, elapsed: float, ahead: Ahead | None = None, width: int = 80, height: int = 24) -> RenderableType:
    """What is happening, a bar, how far it is and for how long, and its figures under it.

    Of a sweep that it is a point of, above it the table so far, and below it how far that is.
    """
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
        count = len(ahead.points)
        done = f"{ahead.done} of {count}" if narrow else f"{ahead.done} of {count} points"
        bar = ProgressBar(total=count, completed=ahead.done)
        row.add_row(Text("sweep", style="bold"), bar, Text(done), Text(left, style="dim"))
    figures = listed(view.where * narrow, view.figures)
    indent = 2 if narrow else 12
    below = [Text(" " * indent + line, no_wrap=True) for line in fitted(figures, width - indent)] if figures else []
    table = [] if ahead is None else [filling_table(ahead, height - OTHER_LINES, narrow)]
    return Group(*table, row, *below)

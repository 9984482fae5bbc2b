"""Shows a command's points on a console."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipeline.plan.estimate import Estimate
from pipeline.plan.plan import Plan
from pipeline.run.views import Ahead, RunResult
from pipeline.views.terminal.console import say
from pipeline.views.terminal.estimate_text import estimate_lines, shard_lines
from pipeline.views.terminal.live import Progress
from pipeline.views.terminal.plan_text import plan_lines
from pipeline.views.terminal.prediction_text import predicted_lines
from pipeline.views.terminal.result import resumed_line
from pipeline.views.terminal.sweep_table import begins_line, ended_line, shared_and_own
from pipeline.views.terminal.words import time_of_day

if TYPE_CHECKING:
    from rich.console import Console


class Terminal:
    """A `pipeline.run.views.Screen`: lines, and bars while a run is under way."""

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
        self.say(self._timed(ended_line(point, seconds)))

    def shares(self, points: Sequence[RunResult]) -> None:
        """Shows what was typed for all points of a sweep."""
        if shared := shared_and_own(points)[0]:
            self.say(f"all        {' '.join(shared)}")

    def _timed(self, line: str) -> str:
        """The line, after the time of day where it may be read much later."""
        timed = self._clock is not None and not self._console.is_interactive
        return f"{time_of_day(self._clock())} {line}" if timed and self._clock else line

    def resumed(self, folder: str, status: str, step: int, saved_step: int | None) -> None:
        """Shows which run a point goes on with, and from where."""
        self.say(resumed_line(folder, status, step, saved_step))

    def planned(self, plan: Plan, full: bool, reused: str | None) -> None:
        """Shows a plan; of one that follows another, what it does not share with that."""
        lines = plan_lines(plan, full, reused)
        for line in lines:
            if full or line not in self._last:
                self.say(line)
        self._last = frozenset(lines)

    def described(self, typed: str) -> None:
        """Shows it, after an empty line."""
        self.say("")
        for line in typed.expandtabs(4).splitlines():
            # Its lines may be a script's, whose spaces count.
            self.say("".join(letter for letter in line if letter.isprintable()))

    def estimated(self, plan: Plan, estimate: Estimate) -> None:
        """Shows what a plan needs, after an empty line."""
        for line in ["", *estimate_lines(plan, estimate)]:
            self.say(line)

    def shared(self, estimate: Estimate) -> None:
        """Shows which tables are cut and what stays whole."""
        for label, text in shard_lines(estimate):
            self.say(f"{label:<11}{text}")

    def predicted(self, point: RunResult) -> None:
        """Shows how fast a plan would be, after an empty line."""
        for line in ["", *predicted_lines(point)]:
            self.say(line)

    def live(self, plan: Plan, now: float, ahead: Ahead | None) -> Progress:
        """Bars, or lines where this is no terminal."""
        return Progress(plan, self._console, now, ahead)

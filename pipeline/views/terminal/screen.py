"""Shows a command's points on a console."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeline.plan.estimate import Estimate
from pipeline.plan.plan import Plan
from pipeline.run.views import Ahead, PointResult
from pipeline.views.terminal.estimate import estimate_lines, shard_lines
from pipeline.views.terminal.plan import plan_lines
from pipeline.views.terminal.predict import predicted_lines
from pipeline.views.terminal.progress import Progress
from pipeline.views.terminal.result import resumed_line

if TYPE_CHECKING:
    from rich.console import Console


class Terminal:
    """A `pipeline.run.views.Screen`: lines, and bars while a run is under way."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def say(self, text: str) -> None:
        """Shows a line, which the terminal may wrap."""
        self._console.print(text, soft_wrap=True)

    def resumed(self, folder: str, status: str, step: int, saved_step: int | None) -> None:
        """Shows which run a point goes on with, and from where."""
        self.say(resumed_line(folder, status, step, saved_step))

    def planned(self, plan: Plan, full: bool) -> None:
        """Shows a plan."""
        for line in plan_lines(plan, full=full):
            self.say(line)

    def described(self, typed: str) -> None:
        """Shows it, after an empty line."""
        self.say("")
        for line in typed.expandtabs(4).splitlines():
            # Its lines may be a script's, whose spaces count.
            self.say("".join(letter for letter in line if letter.isprintable()))

    def estimated(self, plan: Plan, made: Estimate) -> None:
        """Shows what a plan needs, after an empty line."""
        for line in ["", *estimate_lines(plan, made)]:
            self.say(line)

    def shared(self, made: Estimate) -> None:
        """Shows which tables are cut and what stays whole."""
        for label, text in shard_lines(made):
            self.say(f"{label:<11}{text}")

    def predicted(self, point: PointResult) -> None:
        """Shows how fast a plan would be, after an empty line."""
        for line in ["", *predicted_lines(point)]:
            self.say(line)

    def live(self, plan: Plan, now: float, ahead: Ahead | None) -> Progress:
        """Bars, or lines where this is no terminal."""
        return Progress(plan, self._console, now, ahead)

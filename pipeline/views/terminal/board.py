"""Shows a sweep whose points run at once: a table that fills as they end; without a terminal, a line for each."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from pipeline.run.views import RunResult
from pipeline.views.terminal.sweep import sweep_rows
from pipeline.views.terminal.words import clean, duration, listed, rate, times

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

Key = tuple[int, int]
REFRESH_PER_SECOND = 2.0


class Board:
    """The points of a sweep, by their keys, as far as they have come; those that have not begun too."""

    def __init__(self, console: Console, points: Mapping[Key, RunResult]) -> None:
        self._console, self._points = console, dict(points)
        self._done = sum(point.result.finished for point in points.values())
        self._live: Live | None = None

    def __enter__(self) -> Board:
        if self._console.is_interactive:
            from rich.live import Live

            self._live = Live(
                get_renderable=self._table, console=self._console, refresh_per_second=REFRESH_PER_SECOND, transient=True
            )
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def begun(self, key: Key, point: RunResult) -> None:
        """Shows that a point is under way."""
        self._points[key] = point
        beside = sum(other.result.ending.status == "RUNNING" for other in self._points.values()) - 1
        if self._live is None:
            self._say(listed(f"-- {_named(point)} begins", f"beside {beside} other{'s' * (beside > 1)}" * (beside > 0)))

    def ended(self, key: Key, point: RunResult, seconds: float) -> None:
        """Shows what became of a point, and how long it took."""
        self._points[key] = point
        self._done += 1
        if self._live is None:
            self._say(f"-- {_named(point)}: {_came_to(point, seconds)} ({self._done} of {len(self._points)} points)")

    def _say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def _table(self) -> RenderableType:
        from rich.text import Text

        return Text("\n".join(sweep_rows([self._points[key] for key in sorted(self._points)])), no_wrap=True)


def _named(point: RunResult) -> str:
    return " ".join(map(clean, point.overrides)) or "defaults"


def _came_to(point: RunResult, seconds: float) -> str:
    speed = point.result.speed
    return listed(
        clean(point.result.ending.status),
        "" if speed.examples_per_second is None else f"{rate(speed.examples_per_second)} examples/s",
        "" if speed.speedup is None else times(speed.speedup),
        duration(seconds),
    )

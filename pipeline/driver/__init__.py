"""Takes runs from their plans to their results. Here: the protocols of a run's views, and the results that they get."""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import setitem
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.analyze.history import LoggedRun
from pipeline.config.offered import load_offer
from pipeline.plan.plan import Plan
from pipeline.record.events import Event
from pipeline.record.files import TrackingStore

if TYPE_CHECKING:
    from pipeline.analyze.calibration import Score
    from pipeline.analyze.predict import Prediction
    from pipeline.plan.estimate import Estimate


@dataclass(frozen=True)
class Foreseen:
    """A prediction, how good earlier ones were, and the share of a worker that pays."""

    prediction: "Prediction"
    score: "Score"
    knee_share: float


@dataclass(frozen=True)
class RunResult(LoggedRun):
    """A run's result and folder, what was typed, and its number in the sweep; what was only planned or `foreseen`."""

    overrides: tuple[str, ...] = ()
    number: int = 0
    estimate: "Estimate | None" = None
    foreseen: Foreseen | None = None


@dataclass(frozen=True)
class Ahead:
    """Progress of a sweep: the number of the run under way, all results so far, and the seconds left, if known."""

    number: int
    points: tuple[RunResult, ...]
    seconds_left: float | None

    @property
    def done(self) -> int:
        """The number of runs that have ended."""
        return sum(point.result.ending.status not in (None, "WAITING", "RUNNING") for point in self.points)


class View(AbstractContextManager["View"], Protocol):
    """Takes a run's events in order, each once, inside its `with` block; `now` is in seconds on one clock."""

    def update(self, event: Event, now: float) -> None:
        """Takes the next event, of any kind."""


class Screen(Protocol):
    """Shows a command's runs to a person."""

    def say(self, text: str) -> None:
        """Shows a line."""

    def resumed(self, folder: str, status: str, step: int, saved_step: int | None) -> None:
        """Shows which run is resumed, and from which step."""

    def planned(self, plan: Plan, full: bool, reused: str | None, cut: "Estimate | None" = None) -> None:
        """Shows a plan; `full` if nothing is trained. Its baseline may be `reused` from a folder, its tables `cut`."""

    def described(self, typed: str) -> None:
        """Shows the commands or the job that would start a plan's processes."""

    def estimated(self, plan: Plan, estimate: "Estimate") -> None:
        """Shows what a plan needs."""

    def live(self, plan: Plan, now: float, ahead: Ahead | None, earlier: Iterable[Event] = ()) -> View:
        """A view of a run of `plan`, under the progress of its sweep, from the events of `earlier` commands on."""


class Tracking(Protocol):
    """Sends runs' logs to their store, raising nothing; waits while it gets on within `timeout` and `waits` is true."""

    def begin(self) -> None:
        """Gets ready, while something else is waited for."""

    def follow(self, folder: Path, store: TrackingStore) -> None:
        """Sends the log in `folder` to `store` from now on."""

    def drain(self, folder: Path, timeout: float, waits: Callable[[], bool] = ...) -> tuple[bool, str | None]:
        """(True if all of the log in `folder` is there, what was wrong), after that time."""

    def close(self, timeout: float, waits: Callable[[], bool] = ...) -> None:
        """Sends what is left, and ends."""


Make = Callable[[Plan, Path], View]


def offered(names: Sequence[str]) -> dict[str, Make]:
    """The views that packages offer, as entry points of the group `pipeline.views`. Raises `UserError`."""
    return {name: load_offer("views", name, "views", {}, "views=[]") for name in names}


@contextmanager
def updated(
    makes: Mapping[str, Make], plan: Plan, folder: Path, say: Callable[[str], None]
) -> Iterator[Callable[[Event, float], None]]:
    """Yields the function that updates views of other packages; one that fails is left out, and the run goes on."""
    views = dict[str, Any](makes)

    def each(call: Callable[[str, Any], object]) -> None:
        for name, view in [*views.items()]:
            try:
                call(name, view)
            except Exception as error:
                del views[name]
                say(f"The view {name} failed with {type(error).__name__}: {error}. The run goes on without it.")

    each(lambda name, make: setitem(views, name, make(plan, folder)))
    each(lambda name, view: view.__enter__())
    try:
        yield lambda event, now: each(lambda name, view: view.update(event, now))
    finally:
        each(lambda name, view: view.__exit__(*sys.exc_info()))

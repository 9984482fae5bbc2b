"""What a run is told to: who shows it, and who tracks it. A command hands them in; a run knows no more of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.config.shipped import load_offer
from pipeline.plan.estimate import Estimate
from pipeline.plan.plan import Plan
from pipeline.record.events import Event
from pipeline.record.predictions import FittedOn
from pipeline.record.results import Result
from pipeline.record.tracking import Store

if TYPE_CHECKING:
    from pipeline.analyze.scoring import Score


@dataclass(frozen=True)
class Needs:
    """What a planned point needs: bytes of a device, at least where activations are not known, and what all exchange
    for a step of so many examples; None where that is not known.
    """

    device_bytes: int
    activations_known: bool
    step_bytes: int | None
    step_examples: int


@dataclass(frozen=True)
class Spread:
    """How far equal runs lie apart, as a relative standard deviation, and how many runs have told that."""

    deviation: float
    runs: int


@dataclass(frozen=True)
class Foreseen:
    """What is known of a predicted point beside its speed: a step's seconds and the shares of its parts, the runs that
    tell, how good earlier predictions were, the share of a worker that pays, and how far equal runs lie apart.
    """

    step_seconds: float
    parts: Mapping[str, float]
    fitted_on: FittedOn
    score: "Score"
    knee_share: float
    spread: Spread | None = None


@dataclass(frozen=True)
class PointResult:
    """What became of a point of a command, or of a sweep: its result, its folder, and what was typed.

    `number` is the one that it has wherever it is spoken of; None where it is its place among those that are shown.
    """

    result: Result
    folder: str = ""
    overrides: tuple[str, ...] = ()
    number: int | None = None
    needs: Needs | None = None
    foreseen: Foreseen | None = None


@dataclass(frozen=True)
class Ahead:
    """How far a sweep is: the number of the point under way, what has become of all so far, and the seconds that those
    which are left may take, if known."""

    number: int
    points: tuple[PointResult, ...]
    seconds_left: float | None

    @property
    def done(self) -> int:
        """How many have ended."""
        return sum(point.result.ending.status is not None for point in self.points)


class View(Protocol):
    """Is fed a run's events in order, each once, inside its `with` block; `now` is in seconds on one clock."""

    def __enter__(self) -> "View":
        """Begins to show."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends to show, however the block ends."""

    def update(self, event: Event, now: float) -> None:
        """Takes the next event, of any kind."""

    def recall(self, events: Iterable[Event], now: float) -> None:
        """Takes what an earlier command was told, and shows nothing of it."""


class Screen(Protocol):
    """Where a command shows its points to a person."""

    def say(self, text: str) -> None:
        """Shows a line."""

    def shares(self, points: Sequence[PointResult]) -> None:
        """Shows what was typed for all points of a sweep."""

    def begins(self, ahead: Ahead) -> None:
        """Shows which point of a sweep begins."""

    def ended(self, point: PointResult, seconds: float | None) -> None:
        """Shows what a point of a sweep came to, after so many seconds."""

    def resumed(self, folder: str, status: str, step: int, saved_step: int | None) -> None:
        """Shows which run a point goes on with, and from where."""

    def planned(self, plan: Plan, full: bool, reused: str | None) -> None:
        """Shows a plan; `full` where that is all that was asked for. Its baseline may be `reused` from a folder."""

    def described(self, typed: str) -> None:
        """Shows what would be typed or submitted to start a plan's processes."""

    def estimated(self, plan: Plan, made: Estimate) -> None:
        """Shows what a plan needs."""

    def shared(self, made: Estimate) -> None:
        """Shows which tables are cut and what stays whole."""

    def predicted(self, point: PointResult) -> None:
        """Shows how fast a plan would be."""

    def live(self, plan: Plan, now: float, ahead: Ahead | None) -> View:
        """A view of a run of `plan`, under a sweep that is as far as `ahead` says."""


class Tracking(Protocol):
    """Sends runs' event logs to where they are tracked. Nothing here raises.

    It is waited for until it has not got on for `timeout` seconds, or the caller says that it `waits` no more.
    """

    def begin(self) -> None:
        """Gets ready, while something else is waited for."""

    def follow(self, folder: Path, store: Store) -> None:
        """Has the log in `folder` sent to `store` from now on."""

    def run_id(self, folder: Path, timeout: float, waits: Callable[[], bool] = ...) -> str | None:
        """What the run of `folder` is called there; None if it is not there after that time."""

    def drain(self, timeout: float, waits: Callable[[], bool] = ...) -> tuple[bool, str | None]:
        """(Is all that the logs hold there, what was wrong), after that time."""

    def close(self, timeout: float, waits: Callable[[], bool] = ...) -> None:
        """Sends what is left, and ends."""


Make = Callable[[Plan, Path], View]


def offered(names: Sequence[str]) -> dict[str, Make]:
    """What packages offer under these names, as entry points of the group `pipeline.views`. Raises `UserError`."""
    return {name: load_offer("views", name, "views", {}, "views=[]") for name in names}


class Offered:
    """Views of other packages: one that fails is left out from then on, and the run goes on without it."""

    def __init__(self, makes: Mapping[str, Make], plan: Plan, folder: Path, say: Callable[[str], None]) -> None:
        self._say = say
        self._views: dict[str, View] = {}
        made = {name: self._try(name, make, plan, folder) for name, make in makes.items()}
        self._views |= {name: view for name, view in made.items() if view is not None}

    def __enter__(self) -> "Offered":
        self._all("__enter__")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._all("__exit__", kind, error, trace)

    def update(self, event: Event, now: float) -> None:
        """Takes the next event."""
        self._all("update", event, now)

    def _all(self, part: str, *given: object) -> None:
        for name, view in [*self._views.items()]:
            self._try(name, methodcaller(part, *given), view)

    def _try(self, name: str, call: Callable[..., Any], *given: object) -> Any:
        try:
            return call(*given)
        except Exception as error:
            self._views.pop(name, None)
            self._say(f"The view {name} failed with {type(error).__name__}: {error}. The run goes on without it.")

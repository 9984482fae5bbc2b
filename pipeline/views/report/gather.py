"""Turns the folder of a sweep into its points: what was asked for, what came of it, and what was never run.

A sweep with `sweep.json` lists its points there, also those that were not run yet; one without has those that left a
result, in the order of their folders' names.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from pipeline.analyze import comparable
from pipeline.analyze.comparable import Marks
from pipeline.config.schema import PredictConfig
from pipeline.driver import RunResult
from pipeline.errors import UserError
from pipeline.plan.planning import falls
from pipeline.record import results
from pipeline.record.events import Epoch
from pipeline.record.files import read_sweep
from pipeline.record.results import Ending, Result

LOSS = "loss"
# What a YAML file raises that is not there, or was cut short.
UNREADABLE = (OSError, ValueError, YAMLError, OmegaConfBaseException)


@dataclass(frozen=True)
class ReportedRun(RunResult):
    """One run of a sweep, or one that was to be: its configuration, and what is written beside its speed.

    `group` is a letter for the points whose speeds compare, `marks` what is to be said of the speed; both are empty for
    a point that was not measured. Points of the same `configuration` repeat each other.
    """

    configuration: str = ""
    group: str = ""
    marks: Marks = field(default_factory=Marks)

    @property
    def status(self) -> str:
        """FINISHED, or why there is nothing to see."""
        return str(self.result.ending.status)

    @property
    def name(self) -> str:
        """Its name in a figure."""
        workers = self.result.layout.workers
        counted = "" if workers is None else f", {workers} worker{'s' * (workers != 1)}"
        return f"{self.number}  {self.result.choices.called or 'unknown'}{counted}"

    @cached_property
    def learnt(self) -> list[tuple[float, Mapping[str, float]]]:
        """(seconds of training, validation metrics and loss) at the end of each epoch."""
        reports: dict[int, tuple[float, Mapping[str, float]]] = {}
        seconds = 0.0
        for event in (event for event in self.events if isinstance(event, Epoch) and event.of_point):
            seconds += event.seconds or 0.0
            values = {**event.val_metrics, LOSS: event.val_loss}
            finite = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
            reports[event.epoch] = seconds, finite
        return [reports[epoch] for epoch in sorted(reports)]


@dataclass(frozen=True)
class ReportedSweep:
    """A sweep as it lies in its folder."""

    folder: Path
    points: tuple[ReportedRun, ...]
    # Of what one worker does, what another one has to bring to pay.
    knee_share: float

    @property
    def name(self) -> str:
        """Its name, as a person types it."""
        return self.folder.name

    @property
    def measured(self) -> list[ReportedRun]:
        """The points that have a speed."""
        return [point for point in self.points if point.group]

    @property
    def confidences(self) -> list[float]:
        """The probabilities that the points' intervals hold the true medians: one for all, if they repeat as often."""
        shares = {point.result.speed.interval_confidence for point in self.measured}
        return sorted(confidence for confidence in shares if confidence)

    @cached_property
    def metric(self) -> str | None:
        """The metric that validation is judged by: the first that a point has, or the loss where none has one."""
        names = [name for point in self.points for _, values in point.learnt for name in values]
        return next((name for name in names if name != LOSS), LOSS if names else None)

    @cached_property
    def target(self) -> float | None:
        """The best value of the metric that every point reached which validated."""
        best, worst = (min, max) if self.falls else (max, min)
        curves = ([value for _, value in self.curve(point)] for point in self.points)
        return worst((best(values) for values in curves if values), default=None)

    @property
    def falls(self) -> bool:
        """True if a smaller value of the metric is better."""
        return falls(self.metric or "")

    def curve(self, point: ReportedRun) -> list[tuple[float, float]]:
        """(seconds of training, the metric) at the end of each epoch."""
        metric = self.metric or LOSS
        if point.status != "FINISHED":
            # Where it was ended says nothing of how well it would have learnt.
            return []
        return [(seconds, values[metric]) for seconds, values in point.learnt if metric in values]

    def seconds_to_target(self, point: ReportedRun) -> float | None:
        """Seconds of training until a point reached what every point did."""
        if (target := self.target) is None:
            return None
        curve = self.curve(point)
        return next((seconds for seconds, value in curve if (value <= target if self.falls else value >= target)), None)


def gather(folder: Path) -> ReportedSweep:
    """The sweep in a folder. Raises `UserError`."""
    folder = folder.resolve()
    if listed := read_sweep(folder):
        # Repeats share a configuration's number.
        points = [
            _point(place, folder / entry.folder, entry.overrides, str(entry.place), Ending(entry.status, entry.error))
            for place, entry in enumerate(listed)
        ]
    else:
        folders = sorted((path.parent for path in folder.glob(f"*/{results.FILE}")), key=_naturally)
        # Each is a configuration of its own.
        points = [_point(place, path, _typed(path), str(place), Ending()) for place, path in enumerate(folders)]
    if not points:
        raise UserError("a sweep with points", f"{folder}, which has none", "`python -m pipeline -m ...` first")
    return ReportedSweep(folder, tuple(_grouped(points)), _knee_share(points))


def _point(place: int, folder: Path, overrides: tuple[str, ...], configuration: str, listed: Ending) -> ReportedRun:
    """A point; one without a result has ended as sweep.json lists it, or says how far it came."""
    result = results.read(folder) or Result()
    if not result.ending.status:
        if listed == Ending() and (folder / "plan.json").exists():
            listed = Ending("UNFINISHED", "it was started and has not ended; the same command goes on with it")
        ending = replace(listed, status=listed.status or "NOT RUN", error=listed.error or "it was not run yet")
        result = replace(result, ending=ending)
    return ReportedRun(result, folder, overrides, place, configuration=configuration)


def _knee_share(points: Sequence[ReportedRun]) -> float:
    for point in points:
        try:
            share = OmegaConf.select(OmegaConf.load(point.folder / "hydra" / "config.yaml"), "predict.knee_share")
        except UNREADABLE:
            continue
        if isinstance(share, float):
            return share
    return PredictConfig().knee_share


def _grouped(points: Sequence[ReportedRun]) -> list[ReportedRun]:
    measured = [place for place, point in enumerate(points) if point.result.speed.examples_per_second is not None]
    runs = [points[place] for place in measured]
    letters = {at: _letter(number) for number, group in enumerate(comparable.groups(runs)) for at in group}
    marks = comparable.marks(runs)
    letter_of = {place: (letters[at], marks[at]) for at, place in enumerate(measured)}
    grouped = ((point, *letter_of.get(point.number, ("", Marks()))) for point in points)
    return [replace(point, group=group, marks=mark) for point, group, mark in grouped]


def _letter(number: int) -> str:
    """The name of a group.

    >>> _letter(0), _letter(27)
    ('A', 'B2')
    """
    return f"{ascii_uppercase[number % 26]}{number // 26 + 1 if number >= 26 else ''}"


def _typed(folder: Path) -> tuple[str, ...]:
    try:
        typed = OmegaConf.to_container(OmegaConf.load(folder / "hydra" / "overrides.yaml"), resolve=False)
    except UNREADABLE:
        return ()
    return tuple(map(str, typed)) if isinstance(typed, list) else ()


def _naturally(folder: Path) -> list[tuple[int, str]]:
    """The key by which 2 comes before 10.

    >>> sorted([Path("10_a"), Path("2_b")], key=_naturally)[0].name
    '2_b'
    """
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", folder.name)]

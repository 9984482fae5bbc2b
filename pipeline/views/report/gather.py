"""Turns the folder of a sweep into its points: what was asked for, what came of it, and what was never run.

A sweep with `sweep.json` lists its points there, also those that were not run yet; one without has those that left a
result, in the order of their folders' names.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from string import ascii_uppercase
from typing import Any

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
from pipeline.views.terminal.words import listed, plural

LOSS = "loss"


@dataclass(frozen=True)
class ReportedRun(RunResult):
    """One run of a sweep, or one that was to be. Points of the same `configuration` repeat each other.

    `group` is a letter for the points whose speeds compare, `marks` what is to be said of the speed; both are empty for
    a point that was not measured.
    """

    configuration: str = ""
    group: str = ""
    marks: Marks = field(default_factory=Marks)

    @property
    def name(self) -> str:
        """Its name in a figure."""
        counted = listed(self.result.choices.called or "unknown", plural(self.result.layout.workers, "worker"))
        return f"{self.number}  {counted}"

    @cached_property
    def learnt(self) -> list[tuple[float, Mapping[str, float]]]:
        """(seconds of training, validation metrics and loss) at the end of each epoch."""
        reports, seconds = dict[int, tuple[float, Mapping[str, float]]](), 0.0
        for event in self.events:
            if isinstance(event, Epoch) and event.of_point:
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
    knee_share: float  # of what one worker does, what another one has to bring to pay

    @property
    def measured(self) -> list[ReportedRun]:
        """The points that have a speed."""
        return [point for point in self.points if point.group]

    @property
    def confidences(self) -> list[float]:
        """The probabilities that the points' intervals hold the true medians: one for all, if they repeat as often."""
        return sorted({share for point in self.measured if (share := point.result.speed.interval_confidence)})

    @cached_property
    def metric(self) -> str | None:
        """The metric that validation is judged by: the first that a point has, or the loss where none has one."""
        names = [name for point in self.points for _, values in point.learnt for name in values]
        return next((name for name in names if name != LOSS), LOSS if names else None)

    @cached_property
    def target(self) -> float | None:
        """The best value of the metric that every point reached which validated."""
        best, worst = (min, max) if falls(self.metric or "") else (max, min)
        curves = ([value for _, value in self.curve(point)] for point in self.points)
        return worst((best(values) for values in curves if values), default=None)

    def curve(self, point: ReportedRun) -> list[tuple[float, float]]:
        """(seconds of training, the metric) at the end of each epoch."""
        metric = self.metric or LOSS
        # Where one was ended says nothing of how well it would have learnt.
        epochs = point.learnt if point.result.finished else []
        return [(seconds, values[metric]) for seconds, values in epochs if metric in values]

    def seconds_to_target(self, point: ReportedRun) -> float | None:
        """Seconds of training until a point reached what every point did."""
        target, sign = self.target, -1 if falls(self.metric or "") else 1
        curve = [] if target is None else [(seconds, sign * (value - target)) for seconds, value in self.curve(point)]
        return next((seconds for seconds, above in curve if above >= 0), None)


def gather(folder: Path) -> ReportedSweep:
    """The sweep in a folder. Raises `UserError`."""
    folder = folder.resolve()
    if entries := read_sweep(folder):
        # Repeats share a configuration's number.
        points = [
            _point(place, folder / entry.folder, entry.overrides, str(entry.place), Ending(entry.status, entry.error))
            for place, entry in enumerate(entries)
        ]
    else:
        folders = sorted((path.parent for path in folder.glob(f"*/{results.FILE}")), key=_naturally)
        # Each is a configuration of its own.
        typed = [_hydra(path, "overrides") for path in folders]
        overrides = (tuple(map(str, each)) if isinstance(each, list) else () for each in typed)
        both = zip(folders, overrides, strict=True)
        points = [_point(place, path, own, str(place), Ending()) for place, (path, own) in enumerate(both)]
    if not points:
        raise UserError("a sweep with points", f"{folder}, which has none", "`python -m pipeline -m ...` first")
    shares = (_hydra(point.folder, "config", "predict.knee_share") for point in points)
    share = next((share for share in shares if isinstance(share, float)), PredictConfig().knee_share)
    return ReportedSweep(folder, tuple(_marked(points)), share)


def _marked(points: Sequence[ReportedRun]) -> list[ReportedRun]:
    measured = [point for point in points if point.result.speed.examples_per_second is not None]
    all_points = list(points)
    groups = {place: number for number, places in enumerate(comparable.groups(measured)) for place in places}
    for place, (point, marks) in enumerate(zip(measured, comparable.marks(measured), strict=True)):
        again, letter = divmod(groups[place], 26)
        all_points[point.number] = replace(
            point, group=f"{ascii_uppercase[letter]}{again + 1 if again else ''}", marks=marks
        )
    return all_points


def _point(place: int, folder: Path, overrides: tuple[str, ...], configuration: str, ending: Ending) -> ReportedRun:
    """A point; one without a result has ended as sweep.json lists it, or says how far it came."""
    result = results.read(folder) or Result()
    if not result.ending.status:
        if ending == Ending() and (folder / "plan.json").exists():
            ending = Ending("UNFINISHED", "it was started and has not ended; the same command goes on with it")
        ending = replace(ending, status=ending.status or "NOT RUN", error=ending.error or "it was not run yet")
        result = replace(result, ending=ending)
    return ReportedRun(result, folder, overrides, place, configuration=configuration)


def _hydra(folder: Path, name: str, key: str = "") -> Any:
    """A value that Hydra wrote of a point, or all of a file; None of one that is not there, or was cut short."""
    with suppress(OSError, ValueError, YAMLError, OmegaConfBaseException):
        config = OmegaConf.load(folder / "hydra" / f"{name}.yaml")
        return OmegaConf.select(config, key) if key else OmegaConf.to_container(config, resolve=False)
    return None


def _naturally(folder: Path) -> list[tuple[int, str]]:
    """The key by which 2 comes before 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", folder.name)]

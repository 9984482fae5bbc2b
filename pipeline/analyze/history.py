"""Reads what runs and sweeps have written."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipeline.analyze import comparable, measure
from pipeline.errors import UserError
from pipeline.plan import plan as plans
from pipeline.plan.plan import Plan
from pipeline.record import log, results
from pipeline.record.events import Built, Epoch, Event, Measured, Restarted, Resumed, Run
from pipeline.record.files import SWEEP
from pipeline.record.results import Result


@dataclass(frozen=True)
class LoggedRun:
    """One run as it was written: its result, and the folder that has the rest, if it is there."""

    result: Result
    folder: Path = Path()

    @cached_property
    def settings(self) -> Mapping[str, object]:
        """The settings that plan.json has, by their names there."""
        return log.read_whole(self.folder / "plan.json") if self.folder.name else {}

    @cached_property
    def plan(self) -> Plan | None:
        """The plan that it was run by; None where its settings do not make one."""
        with suppress(KeyError, TypeError, ValueError):
            return plans.from_values(self.settings)
        return None

    @cached_property
    def repeats(self) -> list[float]:
        """Examples per second of each timed repeat."""
        point, speed = self._timed("point"), self.result.speed
        baseline = self._timed("baseline") if speed.baseline_source == results.IN_THIS_RUN else []
        # The result counts those that were whole, and that hold for its plan.
        repeats = len(point) if speed.repeats is None else speed.repeats
        places = measure.counted(point, baseline, repeats, comparable.devices_of(self.result))
        return [point[place].examples_per_second for place in places]

    def _timed(self, group: str) -> list[measure.Repeat]:
        attempt, by_repeat = 0, dict[int, tuple[int, dict[int, Measured]]]()
        for event in self.events:
            if isinstance(event, Resumed | Restarted):
                attempt += 1
            elif isinstance(event, Measured) and event.group == group:
                # What was timed once more, perhaps by others, takes the place of what was cut short.
                last, ranks = by_repeat.get(event.repeat, (attempt, {}))
                by_repeat[event.repeat] = attempt, {**(ranks if last == attempt else {}), event.rank: event}
        repeats = [ranks for _, (_, ranks) in sorted(by_repeat.items())]
        everyone = 1 if group == "baseline" else len(self.plan.processes) if self.plan else 0
        return [measure.slowest(ranks, others=len(ranks) == everyone) for ranks in repeats]

    @cached_property
    def events(self) -> list[Event]:
        """The events of its log on how it began, was built, timed and trained, and was started again."""
        shows = Run | Built | Resumed | Restarted | Measured | Epoch
        return [event for event, _ in log.read(self.folder / "events.jsonl") if isinstance(event, shows)]

    @property
    def began(self) -> Run:
        """The first event of its log, one without values if there is none."""
        return next((event for event in self.events if isinstance(event, Run)), Run())

    @property
    def train_examples(self) -> int | None:
        """Examples of an epoch, if the log has them."""
        built = (event for event in self.events if isinstance(event, Built) and event.of_point)
        return next((event.train_examples for event in built), None)


@dataclass(frozen=True)
class TimedRun:
    """A run that ended and timed its steps, with its plan and how many parameters its model has."""

    run: LoggedRun
    plan: Plan
    parameters: int


def load(folder: Path) -> LoggedRun:
    """The run in a folder. Raises `UserError`."""
    result = results.read(folder)
    run = LoggedRun(result or Result(), folder)
    if result is None or not run.settings:
        lacks = f"{folder}, which has {'no result' if result is None else 'no plan'}"
        raise UserError("a run that was started, with result.json and plan.json", lacks, "a run that ended")
    return run


def finished(output: Path, of_sweep: str | None = None) -> list[TimedRun]:
    """The runs under `output`, or of a sweep by its folder or name, that timed their steps and ended, oldest first."""
    where = [output / "runs", output / "sweeps"]
    if of_sweep is not None:
        where = [find_sweep(of_sweep, output, "predict.sweep", "predict.sweep=null")]
    paths = sorted((path for folder in where for path in folder.glob(f"**/{results.FILE}")), key=log.written)
    runs = [LoggedRun(results.read(path.parent) or Result(), path.parent) for path in paths]
    timed = [run for run in runs if run.result.finished and run.result.speed.examples_per_second]
    sized = [(run, parameters) for run in timed if (parameters := run.result.training.parameters)]
    return [TimedRun(run, run.plan, parameters) for run, parameters in sized if run.plan is not None]


def find_sweep(name: str, output: Path, key: str, otherwise: str) -> Path:
    """The folder of a sweep by its name or path, typed for `key`. Raises `UserError`, with what to type `otherwise`."""
    for folder in (Path(name), output / "sweeps" / name):
        if name and _is_sweep(folder):
            return folder
    last = max(filter(_is_sweep, output.glob("sweeps/*")), key=log.written, default=None)
    instead = f"{key}={last.name}, or {otherwise}" if last else otherwise
    raise UserError(f"{key} to be a sweep's name or folder", name or "none", instead)


def _is_sweep(folder: Path) -> bool:
    return (folder / SWEEP).is_file() or any(folder.glob(f"*/{results.FILE}"))

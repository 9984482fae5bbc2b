"""Reads what runs have written: finds a run by its folder, its name or its id in MLflow, and a sweep's runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.record import log
from pipeline.record.events import Built, Event, Measured, Restarted, Resumed

# What a sweep's folder tells of its points.
SWEEP = "sweep.json"


class HistoryError(ValueError):
    """A run that cannot be found or read: the message says what was expected, received, and what to type instead."""


@dataclass(frozen=True)
class Run:
    """One run as it was written: its folder, result.json and plan.json."""

    folder: Path
    result: Mapping[str, Any]
    plan: Mapping[str, Any]

    @cached_property
    def repeats(self) -> list[float]:
        """Examples per second of each timed repeat."""
        # It needs NumPy, which whoever only shows results can do without.
        from pipeline.analyze import measure

        attempt, told = 0, dict[int, tuple[int, dict[int, Measured]]]()
        for event in self._timing:
            if not isinstance(event, Measured):
                attempt += 1
            else:
                # What was timed once more, perhaps by others, takes the place of what was cut short.
                last, ranks = told.get(event.repeat, (attempt, {}))
                told[event.repeat] = attempt, {**(ranks if last == attempt else {}), event.rank: event}
        # The result counts those that were whole, and that hold for its plan.
        whole = sorted(told)[: self.result.get("repeats")]
        return [measure.slowest(told[repeat][1]).examples_per_second for repeat in whole]

    @cached_property
    def measured_at(self) -> float | None:
        """When its first repeat was timed, in seconds since 1970; None where none was."""
        return next((event.time for event in self._timing if isinstance(event, Measured)), None)

    @cached_property
    def _timing(self) -> list[Event]:
        """What its log tells of timed repeats, and of the beginnings after which they may come again."""
        return [
            event
            for event, _ in log.read(self.folder / "events.jsonl")
            if isinstance(event, Resumed | Restarted) or (isinstance(event, Measured) and event.group == "point")
        ]

    @cached_property
    def train_examples(self) -> int | None:
        """Examples of an epoch, where the run has told."""
        told = (event for event, _ in log.read(self.folder / "events.jsonl"))
        return next((event.train_examples for event in told if isinstance(event, Built) and event.of_point), None)


def find(name: str, output: Path) -> Path:
    """The folder of the run that `name` names. Raises `HistoryError`."""
    if (Path(name) / "result.json").is_file():
        return Path(name)
    there = {
        path.parent: log.read_whole(path).get("mlflow_run_id") for path in sorted(output.glob("[rs]*/**/result.json"))
    }
    found = [folder for folder, number in there.items() if folder.name == name or str(number or "").startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise HistoryError(
            f"Expected the name of one run, received {name}, which is that of {len(found)}. Try {found[0]}."
        )
    last = max(there, key=log.written, default=None)
    instead = f"Try {last}." if last else "Try --output-dir=..."
    raise HistoryError(f"Expected a run's folder, its name or its id in MLflow, received {name}. {instead}")


def of(result: Mapping[str, Any]) -> Run:
    """The run that a result tells of, with its plan where that is still there."""
    folder = Path(str(result["folder"])) if result.get("folder") else None
    return Run(folder or Path(), result, {} if folder is None else log.read_whole(folder / "plan.json"))


def load(folder: Path) -> Run:
    """The run in a folder. Raises `HistoryError`."""
    run = Run(folder, log.read_whole(folder / "result.json"), log.read_whole(folder / "plan.json"))
    if not run.result or not run.plan:
        raise HistoryError(
            f"Expected a run that was started, with result.json and plan.json, received {folder}, which has "
            f"{'no plan' if run.result else 'no result'}. Try a run that ended."
        )
    return run


def finished(output: Path, of_sweep: str | None = None) -> list[Run]:
    """The runs under `output`, or of one sweep, that ended and timed their steps, oldest first. Raises `HistoryError`.

    `of_sweep` is its folder, or its name.
    """
    where = (
        [output / "runs", output / "sweeps"]
        if of_sweep is None
        else [find_sweep(of_sweep, output, "predict.sweep", "predict.sweep=null")]
    )
    found = [path for folder in where for path in folder.glob("**/result.json")]
    runs = [
        Run(path.parent, log.read_whole(path), log.read_whole(path.parent / "plan.json"))
        for path in sorted(found, key=log.written)
    ]
    return [
        run
        for run in runs
        if run.plan
        and run.result.get("status") == "FINISHED"
        and run.result.get("parameters")
        and run.result.get("examples_per_second")
    ]


def find_sweep(name: str, output: Path, key: str, otherwise: str) -> Path:
    """The folder of the sweep that `name`, given for `key`, names, by its name or path. Raises `HistoryError`, which
    tells what can be typed `otherwise`.
    """
    for folder in (Path(name), output / "sweeps" / name):
        if name and _is_sweep(folder):
            return folder
    last = max(filter(_is_sweep, output.glob("sweeps/*")), key=log.written, default=None)
    instead = f"{key}={last.name}, or {otherwise}" if last else otherwise
    raise HistoryError(f"Expected {key} to be a sweep's name or folder, received {name or 'none'}. Try {instead}.")


def _is_sweep(folder: Path) -> bool:
    return (folder / SWEEP).is_file() or any(folder.glob("*/result.json"))

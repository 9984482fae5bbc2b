"""Reads what runs have written: finds a run by its folder, its name or its id in MLflow, and a sweep's runs."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline import events


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
        from pipeline import measure

        told: dict[int, dict[int, Mapping[str, Any]]] = {}
        for event, _ in events.read(self.folder / "events.jsonl"):
            if event.get("event") == "measured" and event.get("group") == "point":
                told.setdefault(event["repeat"], {})[event["rank"]] = event
        return [measure.slowest(told[repeat]).examples_per_second for repeat in sorted(told)]

    @cached_property
    def train_examples(self) -> int | None:
        """Examples of an epoch, where the run has told."""
        built = (event for event, _ in events.read(self.folder / "events.jsonl") if event.get("event") == "built")
        return next((each.get("train_examples") for each in built if each.get("group", "point") == "point"), None)


def find(name: str, output: Path) -> Path:
    """The folder of the run that `name` names. Raises `HistoryError`."""
    if (Path(name) / "result.json").is_file():
        return Path(name)
    there = {path.parent: _read(path).get("mlflow_run_id") for path in sorted(output.glob("[rs]*/**/result.json"))}
    found = [folder for folder, number in there.items() if folder.name == name or str(number or "").startswith(name)]
    if len(found) == 1:
        return found[0]
    if found:
        raise HistoryError(
            f"Expected the name of one run, received {name}, which is that of {len(found)}. Try {found[0]}."
        )
    last = max(there, key=lambda folder: folder.stat().st_mtime, default=None)
    instead = f"Try {last}." if last else "Try --output-dir=..."
    raise HistoryError(f"Expected a run's folder, its name or its id in MLflow, received {name}. {instead}")


def of(result: Mapping[str, Any]) -> Run:
    """The run that a result tells of, with its plan where that is still there."""
    folder = Path(str(result["folder"])) if result.get("folder") else None
    return Run(folder or Path(), result, {} if folder is None else _read(folder / "plan.json"))


def load(folder: Path) -> Run:
    """The run in a folder. Raises `HistoryError`."""
    run = Run(folder, _read(folder / "result.json"), _read(folder / "plan.json"))
    if not run.result or not run.plan:
        raise HistoryError(
            f"Expected a run that was started, with result.json and plan.json, received {folder}, which has "
            f"{'no plan' if run.result else 'no result'}. Try a run that ended."
        )
    return run


def finished(output: Path, sweep: str | None = None) -> list[Run]:
    """The runs under `output`, or of one sweep, that ended and timed their steps, oldest first. Raises `HistoryError`.

    `sweep` is its folder, or its name.
    """
    where = [output / "runs", output / "sweeps"] if sweep is None else [_sweep(sweep, output)]
    found = [path for folder in where for path in folder.glob("**/result.json")]
    runs = [Run(path.parent, _read(path), _read(path.parent / "plan.json")) for path in sorted(found, key=_written)]
    return [
        run
        for run in runs
        if run.plan
        and run.result.get("status") == "FINISHED"
        and run.result.get("parameters")
        and run.result.get("examples_per_second")
    ]


def _sweep(name: str, output: Path) -> Path:
    """The folder of a sweep."""
    for folder in (output / "sweeps" / name, Path(name)):
        if folder.is_dir():
            return folder
    there = sorted(output.glob("sweeps/*/"), key=_written)
    instead = f"predict.sweep={there[-1].name}, or predict.sweep=null" if there else "predict.sweep=null"
    raise HistoryError(f"Expected predict.sweep to be a sweep's name or folder, received {name}. Try {instead}.")


def _written(path: Path) -> float:
    return path.stat().st_mtime


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}

"""Baselines that were measured, each in a file of its own, for later runs to be compared with."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from pipeline.record.events import read_whole, write_whole
from pipeline.record.reading import read_as


@dataclass(frozen=True)
class Baseline:
    """Examples per second of each repeat on one device, the folder of the run that measured it, and when it did."""

    examples_per_second: tuple[float, ...]
    folder: str
    time: float | None = None


def read(path: Path) -> Baseline | None:
    """The baseline in a file; None where there is none that can be read."""
    baseline: Baseline | None = read_as(Baseline, read_whole(path))
    return baseline


def write(path: Path, baseline: Baseline) -> None:
    """Writes it, whole. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(dataclasses.asdict(baseline), indent=2))

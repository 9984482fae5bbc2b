"""Baselines that were measured, each in a file of its own, for later runs to be compared with."""

import dataclasses
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.record import plain
from pipeline.record.log import read_whole, write_whole
from pipeline.record.plain import MismatchError


@dataclass(frozen=True)
class Baseline:
    """Examples per second of each repeat on one device, the folder of the run that measured it, and when it did."""

    examples_per_second: tuple[float, ...]
    folder: str
    time: float | None = None


def read(path: Path) -> Baseline | None:
    """The baseline in a file; None where there is none that can be read."""
    with suppress(MismatchError):
        return plain.made_of(Baseline, read_whole(path))
    return None


def write(path: Path, baseline: Baseline) -> None:
    """Writes it, whole. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(dataclasses.asdict(baseline), indent=2))

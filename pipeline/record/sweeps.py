"""The points of a sweep and what became of each, as `sweep.json` in its folder has them."""

import dataclasses
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.record import plain
from pipeline.record.log import read_whole, write_whole
from pipeline.record.plain import MismatchError

FILE = "sweep.json"


@dataclass
class Entry:
    """A point of a sweep: its number and which repeat of it this is, its folder as seen from the sweep's, and how it
    ended, if it did. `seconds` is how long it took.
    """

    place: int
    repeat: int
    fingerprint: str
    folder: str
    overrides: tuple[str, ...]
    status: str | None = None
    error: str | None = None
    seconds: float | None = None


def read(folder: Path) -> list[Entry]:
    """The points of the sweep in a folder; none where it does not list them, or a file that is broken."""
    entries: list[Entry] = []
    with suppress(MismatchError):
        entries = plain.read(list[Entry], read_whole(folder / FILE).get("points"))
    return entries


def write(folder: Path, entries: Sequence[Entry]) -> None:
    """Writes the points of the sweep in a folder, whole. Raises `OSError`."""
    points = [dataclasses.asdict(entry) for entry in sorted(entries, key=lambda entry: (entry.place, entry.repeat))]
    write_whole(folder / FILE, json.dumps({"name": folder.name, "points": points}, indent=2))

"""The points of a sweep and what became of each, as `sweep.json` in its folder has them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.record import codec
from pipeline.record.codec import MismatchError
from pipeline.record.log import read_whole, write_json

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
    with suppress(MismatchError):
        return codec.from_plain(list[Entry], read_whole(folder / FILE).get("points"))
    return []


def write(folder: Path, entries: Sequence[Entry]) -> None:
    """Writes the points of the sweep in a folder, whole. Raises `OSError`."""
    points = sorted(entries, key=lambda entry: (entry.place, entry.repeat))
    write_json(folder / FILE, {"name": folder.name, "points": points})

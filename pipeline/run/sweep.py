"""Keeps what becomes of a sweep's points in `sweep.json`, so that the same command goes on where it was ended.

A point is known by the fingerprint of its config. One that has finished is kept, one that has not is run again, and one
that is new is added.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.config.parts import Part, asked
from pipeline.config.schema import COMPOSED, Config, Order, StrategyConfig
from pipeline.errors import UserError
from pipeline.record import log, results, sweeps
from pipeline.record.events import Ended
from pipeline.record.results import Result
from pipeline.record.sweeps import Entry
from pipeline.run.lock import Lock
from pipeline.run.views import PointResult


def fingerprint(config: Config) -> str:
    """Names what a point is: two configs with the same one are the same point.

    >>> fingerprint(Config(workers=2)) == fingerprint(Config(workers=2, output_dir="elsewhere"))
    True
    >>> fingerprint(Config(workers=2)) == fingerprint(Config(workers=4))
    False
    """
    # As 0.1.0 had them: one host where none is named, one engine and one collective, and no hosts of a cluster.
    hosts = 1 if config.hardware.hosts is None else config.hardware.hosts
    said: dict[str, Any] = asked(
        dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, hosts=hosts)), Part.POINT
    )
    for part, key, usual in (
        ("strategy", "devices_per_replica", None),
        ("strategy", "collective", StrategyConfig.collective),
        ("cluster", "hosts", []),
        ("cluster", "copy", False),
    ):
        if said[part][key] == usual:
            del said[part][key]
    since = {"backend": Config.backend}
    return _digest({key: value for key, value in said.items() if since.get(key) != value})


def fingerprint_of_words(overrides: Sequence[str]) -> str:
    """The same for a point whose config could not be read, of which there is only what was typed."""
    return _digest(list(overrides))


def ordered(points: int, repeats: int, how: Order) -> list[tuple[int, int]]:
    """(point, repeat) in the order in which they run.

    Interleaved, each round takes all points, every other one from the last to the first: a machine that slows down or
    speeds up steadily then favours none of them.

    >>> ordered(3, 2, Order.interleaved)
    [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    >>> ordered(2, 2, Order.typed)
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    if how is Order.typed:
        return [(point, repeat) for point in range(points) for repeat in range(repeats)]
    return [
        (point, repeat)
        for repeat in range(repeats)
        for point in (range(points) if repeat % 2 == 0 else reversed(range(points)))
    ]


class Sweep:
    """The points of a sweep's folder, which no other command may work on meanwhile. Raises `UserError` if one does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = Lock(folder, "sweep.lock")
        except BlockingIOError:
            raise UserError(
                f"the sweep {folder.name} to be at rest",
                "one that another command works on",
                "again when that has ended, or another sweep.name",
            ) from None
        self.entries = sweeps.read(folder)

    def point(
        self, place: int, name: str, about: str, overrides: Sequence[str], repeat: int, made: Path | None
    ) -> Entry:
        """The entry of the point with the fingerprint `about`, a new one where there is none.

        `place`, in the command, is its number where no other entry has that; `name` is a part of its folder's name.
        What Hydra has put into the folder `made` is moved to the point's.
        """
        found = next((entry for entry in self.entries if (entry.fingerprint, entry.repeat) == (about, repeat)), None)
        if found is None:
            found = Entry(self._number(place, about), repeat, about, "", tuple(overrides))
            found.folder = f"{found.place}_{re.sub(r'[^A-Za-z0-9_-]', '_', name)}" + f"_{repeat + 1}" * (repeat > 0)
            self.entries.append(found)
        found.overrides = tuple(overrides)
        # The last attempt, where the first one came to nothing.
        found.folder = self._name([self.folder / found.folder, *attempts(self.folder / found.folder)][-1])
        target = self.folder / found.folder
        if made is not None and made.resolve() != target.resolve():
            target.mkdir(exist_ok=True)
            for path in made.iterdir():
                if not (target / path.name).exists():
                    path.replace(target / path.name)
            shutil.rmtree(made)
        target.mkdir(exist_ok=True)
        return found

    def kept(self, entry: Entry) -> Result | None:
        """The result of a point that has finished; None for one that is to be run."""
        folder = self.folder / entry.folder
        result = results.read(folder)
        if result is None or not result.finished:
            return None
        # What was killed in between has no end that could be tracked.
        ended = any(isinstance(event, Ended) for event, _ in log.read(folder / "events.jsonl"))
        return result if ended else None

    def note(self, entry: Entry, point: PointResult, seconds: float | None = None) -> None:
        """Takes in what became of a point."""
        entry.status, entry.error = point.result.ending.status, point.result.ending.error
        entry.folder = self._name(Path(point.folder))
        entry.seconds = seconds if seconds is not None else entry.seconds
        self.write()

    def write(self) -> None:
        """Writes `sweep.json`."""
        sweeps.write(self.folder, self.entries)

    def release(self) -> None:
        """Lets other commands work on it."""
        shutil.rmtree(self.folder / COMPOSED, ignore_errors=True)
        self._lock.release()

    def _name(self, folder: Path) -> str:
        """The folder as seen from here: one of another sweep, where a point has gone on with an earlier run there."""
        return os.path.relpath(folder.resolve(), self.folder.resolve())

    def _number(self, place: int, about: str) -> int:
        """The number of a new entry: that of its point's other repeats, or that of its place, or the next."""
        numbers = {entry.fingerprint: entry.place for entry in self.entries}
        return numbers.get(about, max(numbers.values()) + 1 if place in numbers.values() else place)


def note_alone(folder: Path, point: PointResult) -> None:
    """Notes in its sweep, if it is of one, what became of a point that another command than the sweep's has ended."""
    if not (folder.parent / sweeps.FILE).exists():
        return
    # A command that works on the sweep meanwhile keeps what it knows; the next one looks into the point's folder.
    with suppress(UserError, OSError):
        made = Sweep(folder.parent)
        try:
            for entry in made.entries:
                if folder.resolve() in [path.resolve() for path in attempts(made.folder / entry.folder)]:
                    made.note(entry, point)
        finally:
            made.release()


def attempts(folder: Path) -> Iterator[Path]:
    """The folders of a point's attempts that are there, from this one on."""
    while folder.is_dir():
        yield folder
        folder = another(folder)


def another(folder: Path) -> Path:
    """A new folder for one more attempt at the point in `folder`, which keeps what became of the last one.

    >>> another(Path("nowhere/0_mirrored.2"))
    PosixPath('nowhere/0_mirrored.3')
    """
    first, _, number = folder.name.rpartition(".")
    name, last = (first, int(number)) if first and number.isdecimal() else (folder.name, 1)
    return folder.with_name(f"{name}.{last + 1}")


def make_another(folder: Path) -> Path:
    """Makes a folder for one more attempt at the point in `folder`, after all that are there."""
    while True:
        folder = another([folder, *attempts(folder)][-1])
        with suppress(FileExistsError):
            folder.mkdir()
            return folder


def _digest(value: object) -> str:
    # Once through JSON, after which keys of different types are texts that can be sorted.
    plain = json.loads(json.dumps(value, default=str))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]

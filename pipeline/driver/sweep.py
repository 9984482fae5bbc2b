"""Keeps the results of a sweep's runs in `sweep.json`, so that the same command goes on where it was ended.

The fingerprint of its config identifies a run. One that has finished is kept, another is run again, a new one is added.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.config.parts import Part, asked
from pipeline.config.schema import COMPOSED, Config, Order, StrategyConfig
from pipeline.driver import RunResult
from pipeline.driver.run_folders import EVENTS, Lock, attempts
from pipeline.errors import UserError
from pipeline.record import log, results
from pipeline.record.events import Ended
from pipeline.record.files import SWEEP, Entry, read_sweep, write_sweep


def fingerprint(config: Config) -> str:
    """Identifies a run: two configs with the same fingerprint are the same run.

    >>> fingerprint(Config(workers=2)) == fingerprint(Config(workers=2, output_dir="elsewhere"))
    True
    >>> fingerprint(Config(workers=2)) == fingerprint(Config(workers=4))
    False
    """
    # As 0.1.0 had them: one host where none is named, one engine and one collective, and no hosts of a cluster.
    hosts = 1 if config.hardware.hosts is None else config.hardware.hosts
    values: dict[str, Any] = asked(
        dataclasses.replace(config, hardware=dataclasses.replace(config.hardware, hosts=hosts)), Part.POINT
    )
    for part, key, usual in (
        ("strategy", "devices_per_replica", None),
        ("strategy", "collective", StrategyConfig.collective),
        ("cluster", "hosts", []),
        ("cluster", "copy", False),
    ):
        if values[part][key] == usual:
            del values[part][key]
    since = {"backend": Config.backend}
    return digest({key: value for key, value in values.items() if since.get(key) != value})


def ordered(points: int, repeats: int, how: Order) -> list[tuple[int, int]]:
    """(run, repeat) in the order in which they start.

    Interleaved, each round takes all runs, every other round from the last to the first: a machine that slows down or
    speeds up steadily then favours none of them.

    >>> ordered(3, 2, Order.interleaved)
    [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    >>> ordered(2, 2, Order.typed)
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    if how is Order.typed:
        return [(point, repeat) for point in range(points) for repeat in range(repeats)]
    rounds = [range(points)[:: 1 if repeat % 2 == 0 else -1] for repeat in range(repeats)]
    return [(point, repeat) for repeat, order in enumerate(rounds) for point in order]


class Sweep:
    """The runs of a sweep's folder, locked. Raises `UserError` if another command works on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = Lock(folder, "sweep.lock")
        except BlockingIOError:
            received, instead = "one that another command works on", "again when that has ended, or another sweep.name"
            raise UserError(f"the sweep {folder.name} to be at rest", received, instead) from None
        self.entries = read_sweep(folder)
        # By run and repeat; and the number of each run.
        self._entry_of = {(entry.fingerprint, entry.repeat): entry for entry in reversed(self.entries)}
        self._number_of = {entry.fingerprint: entry.place for entry in self.entries}
        # What sweep.json does not list, as where it was lost, may be a run of another config.
        found = (path.parent.name.partition("_")[0] for path in folder.glob(f"*_*/{EVENTS}"))
        self._numbers = {*self._number_of.values(), *(int(number) for number in found if number.isdecimal())}

    def entry(
        self, place: int, name: str, about: str, overrides: Sequence[str], repeat: int, composed: Path | None
    ) -> Entry:
        """The entry of the run with the fingerprint `about`, a new one if there is none.

        `place`, in the command, is its number unless another entry has that; `name` is a part of its folder's name.
        Hydra's files are moved there from the folder where it `composed` the run.
        """
        if (entry := self._entry_of.get((about, repeat))) is None:
            entry = Entry(self._number(place, about), repeat, about, "", tuple(overrides))
            entry.folder = f"{entry.place}_{re.sub(r'[^A-Za-z0-9_-]', '_', name)}" + f"_{repeat + 1}" * (repeat > 0)
            self.entries.append(entry)
            self._entry_of[about, repeat] = entry
        entry.overrides = tuple(overrides)
        # That of the last attempt.
        entry.folder = self._name([self.folder / entry.folder, *attempts(self.folder / entry.folder)][-1])
        target = self.folder / entry.folder
        if composed is not None and composed.resolve() != target.resolve():
            target.mkdir(exist_ok=True)
            for path in composed.iterdir():
                if not (target / path.name).exists():
                    path.replace(target / path.name)
            shutil.rmtree(composed)
        target.mkdir(exist_ok=True)
        return entry

    def finished(self, entry: Entry) -> results.Result | None:
        """The result of a run that has finished; None for one that is still to run."""
        folder = self.folder / entry.folder
        result = results.read(folder)
        if result is None or not result.finished:
            return None
        # One that was killed in between has no end that could be tracked.
        ended = any(isinstance(event, Ended) for event, _ in log.read(folder / EVENTS))
        return result if ended else None

    def note(self, entry: Entry, point: RunResult, seconds: float | None = None) -> None:
        """Takes in the result of a run."""
        entry.status, entry.error = point.result.ending.status, point.result.ending.error
        entry.folder = self._name(point.folder)
        entry.seconds = seconds if seconds is not None else entry.seconds
        self.write()

    def write(self) -> None:
        """Writes `sweep.json`."""
        write_sweep(self.folder, self.entries)

    def release(self) -> None:
        """Lets other commands work on it."""
        shutil.rmtree(self.folder / COMPOSED, ignore_errors=True)
        self._lock.release()

    def _name(self, folder: Path) -> str:
        """The folder relative to the sweep's; it is another sweep's if the run resumed an earlier one there."""
        return os.path.relpath(folder.resolve(), self.folder.resolve())

    def _number(self, place: int, about: str) -> int:
        """The number of a new entry: that of its run's other repeats, or that of its place, or the next."""
        if about not in self._number_of:
            self._number_of[about] = max(self._numbers) + 1 if place in self._numbers else place
            self._numbers.add(self._number_of[about])
        return self._number_of[about]


def note_alone(folder: Path, point: RunResult) -> None:
    """Notes the result of a run in its sweep, if it has one, when another command than the sweep's has ended it."""
    if not (folder.parent / SWEEP).exists():
        return
    # If a command works on the sweep meanwhile, the next one looks into the run's folder.
    with suppress(UserError, OSError):
        sweep = Sweep(folder.parent)
        try:
            for entry in sweep.entries:
                if folder.resolve() in [path.resolve() for path in attempts(sweep.folder / entry.folder)]:
                    sweep.note(entry, point)
        finally:
            sweep.release()


def digest(value: object) -> str:
    """A short text that equal values share, as JSON has them."""
    # Once through JSON, after which keys of different types are texts that can be sorted.
    plain = json.loads(json.dumps(value, default=str))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]

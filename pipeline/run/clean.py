"""Decides which runs and sweeps of an output folder are to go, by their age and how good they are.

A sweep goes whole, or stays: without one of its points its report would say less. What is under way, what a command can
go on with, and what a sweep that stays has gone on with, stay too.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.record import log, results, sweeps
from pipeline.record.results import Result
from pipeline.run.folders import LOCK, PLAN, Lock

SECONDS = {"h": 3600, "d": 86_400, "w": 604_800}
AGE = re.compile(r"(\d{1,6})([hdw])")
# Why something stays.
BUSY, UNFINISHED, YOUNG, BEST, NEEDED = (
    "under way", "not finished, so that a command can go on with it", "younger", "among the best", "part of a sweep",
)  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """A run or a sweep: its folder, those of its runs, what became of them, when it was last written to, its bytes, and
    whether a command works on it."""

    folder: Path
    runs: tuple[Path, ...]
    results: tuple[Result | None, ...]
    written: float
    bytes: int = 0
    busy: bool = False

    @property
    def unfinished(self) -> bool:
        """May a command go on with one of its runs?"""
        return any(
            result is None
            or result.ending.status in ("KILLED", "PREEMPTED", None)
            or (result.ending.status == "FAILED" and any((folder / "checkpoints").glob("*.json")))
            for folder, result in zip(self.runs, self.results, strict=True)
        )


def seconds_of(age: str) -> int | None:
    """An age in seconds; None where it is none.

    >>> seconds_of("30d"), seconds_of("12h"), seconds_of("a month")
    (2592000, 43200, None)
    """
    found = AGE.fullmatch(age)
    return None if found is None else int(found[1]) * SECONDS[found[2]]


@dataclass(frozen=True)
class Rules:
    """What goes: what is older than so many seconds and has none of the best runs; and also what is unfinished?

    The best are those with the highest speedup, of each model on each data set.
    """

    keep_best: int
    older_than: float
    unfinished: bool = False


def staying(all_of: Sequence[Kept], rules: Rules, now: float) -> dict[Path, str | None]:
    """By its folder, why each stays; None for what is to go."""
    best = _best(all_of, rules.keep_best)
    why: dict[Path, str | None] = {}
    for kept in all_of:
        why[kept.folder] = (
            BUSY if kept.busy
            else YOUNG if now - kept.written < rules.older_than
            else UNFINISHED if kept.unfinished and not rules.unfinished
            else BEST if best & set(kept.runs)
            else None
        )  # fmt: skip
    # Of what stays, a sweep may have gone on with a run that is elsewhere.
    needed = {run.resolve() for kept in all_of if why[kept.folder] for run in kept.runs}
    for kept in all_of:
        if why[kept.folder] is None and needed & {run.resolve() for run in kept.runs}:
            why[kept.folder] = NEEDED
    return why


def gather(output: Path) -> list[Kept]:
    """The runs and sweeps in an output folder, oldest first."""
    runs = [_kept(folder, [folder]) for folder in _folders(output / "runs")]
    found = [*runs, *(_kept(folder, _points(folder)) for folder in _folders(output / "sweeps"))]
    return sorted(found, key=lambda kept: kept.written)


def _best(all_of: Iterable[Kept], keep_best: int) -> set[Path]:
    """The runs that finished with the highest speedups, or throughput where there is none, of each model and data."""
    groups: dict[tuple[str | None, str | None], list[tuple[tuple[float, float], Path]]] = {}
    for kept in all_of:
        for folder, result in zip(kept.runs, kept.results, strict=True):
            if result is not None and result.finished:
                speed = (result.speed.speedup or 0.0, result.speed.examples_per_second or 0.0)
                groups.setdefault((result.choices.model, result.choices.data), []).append((speed, folder))
    return {folder for group in groups.values() for _, folder in sorted(group, reverse=True)[:keep_best]}


def _kept(folder: Path, runs: Sequence[Path]) -> Kept:
    files = [path.stat(follow_symlinks=False) for path in folder.rglob("*") if path.is_file()]
    return Kept(
        folder,
        tuple(runs),
        tuple(results.read(run) for run in runs),
        max((stat.st_mtime for stat in files), default=log.written(folder)),
        # What is linked twice is there once.
        sum({stat.st_ino: stat.st_size for stat in files}.values()),
        any(map(_is_locked, (folder / "sweep.lock", *(run / LOCK for run in runs)))),
    )


def _is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        Lock(path.parent, path.name).release()
    except OSError:
        return True
    return False


def _points(sweep: Path) -> list[Path]:
    """The folders of a sweep's points, of earlier attempts at them, and of runs elsewhere that they went on with."""
    listed = [Path(os.path.normpath(sweep / entry.folder)) for entry in sweeps.read(sweep)]
    inside = [path.parent for path in sorted(sweep.glob("*/plan.json"))]
    return [path for path in dict.fromkeys([*listed, *inside]) if (path / PLAN).exists()]


def _folders(place: Path) -> Iterator[Path]:
    if place.is_dir():
        yield from sorted(path for path in place.iterdir() if path.is_dir())

"""Removes runs that are old and not among the best, from disk and MLflow together: `python -m pipeline clean`.

0: said, or with dry=false removed. 1: something could not be removed. 2: a wrong argument. A sweep goes whole, or
stays: without one of its runs its report would say less.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.analyze.comparable import grouped
from pipeline.commands.verbs import OUTPUT_DIR, Key, Words, verb
from pipeline.driver.run_folders import EVENTS, HYDRA_S, LOCK, PLAN, Lock
from pipeline.errors import UserError
from pipeline.launch import standby
from pipeline.record import log, results
from pipeline.record.files import SWEEP, read_sweep
from pipeline.record.results import Result
from pipeline.views import report
from pipeline.views import terminal as show
from pipeline.views.mlflow import stores
from pipeline.views.mlflow.stores import prepare, reason
from pipeline.views.terminal.words import amount, brackets, duration, listed, plural, times

A_DAY = 86_400  # seconds
SECONDS = {"h": 3600, "d": 86_400, "w": 604_800}
AGE = re.compile(r"(\d{1,6})([hdw])")
# Why something stays.
BUSY, UNFINISHED, YOUNG, BEST, NEEDED = (
    "under way", "not finished, so that a command can go on with it", "younger", "among the best", "part of a sweep",
)  # fmt: skip


@verb(
    "",
    "Lists the runs and sweeps that it would remove; with dry=false it removes them from disk and MLflow.\n"
    "Removed is what is older and holds none of the best runs (by speedup, for each model and data set).\n"
    "A sweep goes as a whole. Active and unfinished runs stay. Unused fork servers of launch.keep end too.",
    (
        Key("keep_best", "5", "runs of each model and data set that stay, however old"),
        Key("older_than", "30d", "age since the last write: 12h, 30d, 8w"),
        Key("unfinished", "false", "true: also unfinished runs, which a command could resume"),
        Key("dry", "true", "false: remove it"),
        OUTPUT_DIR,
    ),
)
def clean(typed: Words) -> int:
    """Removes old runs, or lists them."""
    best, older_than = typed["keep_best"], typed["older_than"]
    age = seconds_of(older_than)
    if age is None:
        raise UserError("older_than to be an age, as 12h, 30d or 8w", older_than or "nothing", "older_than=30d")
    if not best.isdecimal():
        raise UserError("keep_best to be a whole number", best or "nothing", "keep_best=5")
    dry, console, now = typed.is_true("dry"), show.console_on(sys.stdout), time.time()
    folders = gather(Path(typed["output_dir"]))
    why = staying(folders, int(best), age, typed.is_true("unfinished"), now)
    going = [folder for folder in folders if why[folder.folder] is None]
    failed = 0
    prepare(os.environ)
    for folder in going:
        problem = "" if dry else _remove(folder)
        failed += bool(problem)
        what = f"not removed ({problem})" if problem else "would remove" if dry else "removed"
        show.say(console, f"{what}: {_about(folder, now)}")
    stays = Counter(reason for reason in why.values() if reason)
    for line in [*_sum_up(going, stays, dry, failed), *_servers(dry, now)]:
        show.say(console, line)
    return 1 if failed else 0


def _remove(kept: Stored) -> str:
    """Removes it from MLflow, then from disk; returns what was wrong."""
    sent = [*kept.runs, kept.folder / report.FOLDER]
    try:
        for folder in sent:
            if folder.resolve().is_relative_to(kept.folder.resolve()):
                stores.remove(folder)
        _delete(kept.folder)
    except OSError as error:
        return f"{error.filename or kept.folder}: {error.strerror or error}"
    except Exception as error:
        # What a store raises is MLflow's affair: it is told in a line, and the folder stays.
        return reason(error, "the store").rstrip(".")
    return ""


def _delete(folder: Path) -> None:
    """Deletes a folder, and last what shows that it is a run's: killed before, `clean` lists it again."""
    last = (results.FILE, PLAN, SWEEP)
    for path in sorted(folder.iterdir(), key=lambda path: last.index(path.name) if path.name in last else -1):
        if path.is_dir() and not path.is_symlink():
            _delete(path)
        else:
            path.unlink()
    folder.rmdir()


def _about(folder: Stored, now: float) -> str:
    speedups = [result.speed.speedup for result in folder.runs.values() if result.speed.speedup]
    age = now - folder.written
    return listed(
        str(folder.folder),
        plural(len(folder.runs), "run") if len(folder.runs) > 1 else "",
        amount(folder.bytes),
        f"{duration(age) if age < A_DAY else plural(int(age / A_DAY), 'day')} old",
        f"{times(max(speedups))} at best" if speedups else "",
    )


def _servers(dry: bool, now: float) -> Iterator[str]:
    """Ends the fork servers of launch.keep that no command uses; yields a line about each."""
    for pid, ends in standby.servers():
        used = standby.children(pid)
        until = f"ends by itself in {duration(max(0.0, ends - now))}"
        does = "is in use" if used else f"{until}; dry=false ends it now" if dry else "was ended"
        if not (dry or used):
            # It ignores what a scheduler sends.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        yield f"The fork server {pid} of launch.keep {does}."


def _sum_up(going: Sequence[Stored], stays: Counter[str], dry: bool, failed: int) -> list[str]:
    size = amount(sum(folder.bytes for folder in going))
    why = brackets(listed(*(f"{count} {reason}" for reason, count in stays.items())))
    verb = "would go" if dry else "went"
    line = f"{plural(len(going) - failed, 'folder')} {verb}, {size}; {stays.total()} stay{why}."
    return [line, *["Nothing was removed yet: type it again with dry=false."] * bool(dry and going)]


@dataclass(frozen=True)
class Stored:
    """A run or a sweep: its folder, its runs' results by their folders, when it was last written to, and its bytes.

    It is `busy` while a command works on it.
    """

    folder: Path
    runs: Mapping[Path, Result]
    written: float
    bytes: int = 0
    busy: bool = False

    @property
    def unfinished(self) -> bool:
        """True if a command can resume one of its runs."""
        return any(
            result.ending.status in ("KILLED", "PREEMPTED", None)
            or (result.ending.status == "FAILED" and any((folder / "checkpoints").glob("*.json")))
            for folder, result in self.runs.items()
        )


def seconds_of(age: str) -> int | None:
    """An age in seconds; None if it is none.

    >>> seconds_of("30d"), seconds_of("12h"), seconds_of("a month")
    (2592000, 43200, None)
    """
    match = AGE.fullmatch(age)
    return None if match is None else int(match[1]) * SECONDS[match[2]]


def staying(
    all_of: Sequence[Stored], keep_best: int, older_than: float, unfinished: bool, now: float
) -> dict[Path, str | None]:
    """By its folder, why each stays; None for one to delete.

    It stays unless it is older than so many seconds and has none of the best runs, those with the highest speedup of
    each model on each data set. Unfinished ones stay too, unless they are to go.
    """
    best = _best(all_of, keep_best)
    why: dict[Path, str | None] = {}
    for stored in all_of:
        why[stored.folder] = (
            BUSY if stored.busy
            else YOUNG if now - stored.written < older_than
            else UNFINISHED if stored.unfinished and not unfinished
            else BEST if best & set(stored.runs)
            else None
        )  # fmt: skip
    # A sweep that stays may have resumed a run that is elsewhere.
    needed = {run.resolve() for stored in all_of if why[stored.folder] for run in stored.runs}
    for stored in all_of:
        if why[stored.folder] is None and needed & {run.resolve() for run in stored.runs}:
            why[stored.folder] = NEEDED
    return why


def gather(output: Path) -> list[Stored]:
    """The runs and sweeps in an output folder, oldest first."""
    runs = [_stored(folder, [folder]) for folder in _folders(output / "runs") if _is_run(folder)]
    sweeps = [_stored(folder, _runs_of(folder)) for folder in _folders(output / "sweeps") if _is_sweep(folder)]
    return sorted(runs + sweeps, key=lambda stored: stored.written)


def _best(all_of: Iterable[Stored], keep_best: int) -> set[Path]:
    groups = grouped(
        (
            (one.choices.model, one.choices.data),
            (one.speed.speedup or 0.0, one.speed.examples_per_second or 0.0, folder),
        )
        for stored in all_of
        for folder, one in stored.runs.items()
        if one.finished
    )
    return {folder for group in groups.values() for *_, folder in sorted(group, reverse=True)[:keep_best]}


def _stored(folder: Path, runs: Sequence[Path]) -> Stored:
    files = [path.stat(follow_symlinks=False) for path in folder.rglob("*") if path.is_file()]
    return Stored(
        folder,
        {run: results.read(run) or Result() for run in runs},
        max((stat.st_mtime for stat in files), default=log.written(folder)),
        # A file that is linked twice counts once.
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


def _runs_of(sweep: Path) -> list[Path]:
    """The folders of a sweep's runs, of earlier attempts, and of runs elsewhere that they resumed."""
    listed = [Path(os.path.normpath(sweep / entry.folder)) for entry in read_sweep(sweep)]
    inside = [path.parent for path in sorted(sweep.glob("*/plan.json"))]
    return [path for path in dict.fromkeys([*listed, *inside]) if (path / PLAN).exists()]


def _is_run(folder: Path) -> bool:
    """True if a command of ours has made a folder; other programs name theirs runs and sweeps too."""
    return any((folder / name).exists() for name in (PLAN, EVENTS, HYDRA_S))


def _is_sweep(folder: Path) -> bool:
    return any((folder / name).exists() for name in (SWEEP, "multirun.yaml")) or any(map(_is_run, _folders(folder)))


def _folders(place: Path) -> Iterator[Path]:
    if place.is_dir():
        yield from sorted(path for path in place.iterdir() if path.is_dir())

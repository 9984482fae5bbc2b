"""The verbs on what runs wrote, which start none: `report`, `compare`, `explain`, and `clean`, which removes it.

A run is its folder, the folder's name, or its id in MLflow, of which the first letters are enough. A sweep is removed
as a whole, or stays: without one of its runs its report would say less.
"""

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, combinations
from pathlib import Path

from pipeline.analyze import comparable
from pipeline.analyze.compare import Judge
from pipeline.analyze.history import LoggedRun, find_sweep, load
from pipeline.commands.verbs import is_true, verb
from pipeline.config.parts import flat
from pipeline.driver import Tracking
from pipeline.driver.run_folders import EVENTS, HYDRA_S, LOCK, PLAN, Lock, find
from pipeline.driver.session import lacks
from pipeline.errors import UserError, amount, refuse
from pipeline.launch import standby
from pipeline.record import log, results
from pipeline.record.files import SWEEP, read_sweep, read_tracking
from pipeline.record.results import Result
from pipeline.views import report as reports
from pipeline.views import terminal as show
from pipeline.views.mlflow import Tracker, stores
from pipeline.views.terminal.result import explained_lines
from pipeline.views.terminal.sweep_table import sweep_table
from pipeline.views.terminal.verdict_text import Row, compared_lines, pair_text, unlike_text
from pipeline.views.terminal.words import brackets, duration, listed, plural, times

# What a plan holds that nobody asked for, or that follows from the rest; and each run's own places.
OF_NO_INTEREST = ("version", "processes", "notes", "machine", "rehearsal", "oversubscribed")
PLACES = ("checkpoint.folder", "checkpoint.before")
# Values of one training, of which there is one each, so that nothing can be said of how sure a difference is.
OUTCOMES = (
    "stopped_by", "stopped_at", "loss", "val_loss", "metrics", "val_metrics", "seconds_startup", "seconds_training",
    "staleness_mean",
)  # fmt: skip
# For MLflow to have it all; what is not there by then is sent by `python -m pipeline sync`.
DRAIN_SECONDS = 60.0
SECONDS = {"h": 3600, "d": 86_400, "w": 604_800}
# Why something stays.
BUSY, UNFINISHED, YOUNG, BEST, NEEDED = (
    "under way", "not finished, so that a command can go on with it", "younger", "among the best", "part of a sweep",
)  # fmt: skip


@verb("NAME|FOLDER", sweep="the sweep's name or folder, also as the first word")
def report(name: str = "", *, output_dir: str = "outputs", sweep: str = "") -> int:
    """Writes the report of a sweep into its folder, and into MLflow if its runs are tracked."""
    refuse((name and sweep, "one sweep", "two", report.usage))
    output = Path(output_dir)
    tracker = Tracker(os.environ, output / "tracker.log")
    try:
        written = reports.write(find_sweep(sweep or name, output, "sweep", "`python -m pipeline -m ...` first"))
        sent = send(written, tracker)
        drained, problem = tracker.drain(sent, DRAIN_SECONDS) if sent else (True, None)
    except OSError as error:
        show.say_error(f"The report cannot be written: {error}.")
        return 2
    finally:
        tracker.close(DRAIN_SECONDS)
    show_written(written)
    if sent and not drained:
        show.say_error(lacks({sent: problem}))
    return 0


def send(written: reports.WrittenReport, tracker: Tracking) -> Path | None:
    """Has a tracker send the report to the points' store; its log's folder, None without a store. Raises `OSError`."""
    stores = (read_tracking(point.folder).store for point in written.sweep.points)
    store = next((store for store in stores if store and store.uri), None)
    return None if store is None else reports.track(written, tracker, store)


def show_written(written: reports.WrittenReport) -> None:
    """Shows a report: the table, the verdict, and where it is."""
    console = show.console_on(sys.stdout)
    console.print(sweep_table(written.sweep.points, console.width), soft_wrap=True)
    show.say(console, *written.shown())


@verb("RUN RUN [RUN ...]")
def compare(first: str, second: str, *more: str, output_dir: str = "outputs") -> int:
    """Shows which settings and results of runs differ, which run is faster, and how sure that is.

    A RUN is a folder, its name, or the first letters of an MLflow id.
    """
    runs = [load(find(run, Path(output_dir))) for run in (first, second, *more)]
    judge, marks = Judge(runs), comparable.marks(runs)
    engines = {place: mark.engine for place, mark in enumerate(marks)}
    verdicts, unlike = list[str](), dict[str, None]()
    for one, other in combinations(range(len(runs)), 2):
        verdicts.append(pair_text(one, other, judge.between(runs[one], runs[other]), engines))
        both = f"{one} and {other}: " * (len(runs) > 2)
        whys = comparable.unlike(runs[one], runs[other])
        unlike |= {f"Speeds are not comparable: {both}{unlike_text(why)}.": None for why in whys}
    outcomes = _rows([{name: flat(run.result)[name] for name in OUTCOMES} for run in runs])
    outcomes = [(name, values) for name, values in outcomes if any(value is not None for value in values)]
    tables = {"asked for": settings_of(runs), "results": outcomes}
    show.say(show.console_on(sys.stdout), *compared_lines(runs, marks, [*verdicts, *unlike], tables))
    return 0


def settings_of(runs: Sequence[LoggedRun]) -> list[Row]:
    """The settings that runs differ in: by dotted key, the value of each."""
    rows = _rows([{**run.settings, "versions": run.result.versions} for run in runs])
    rows = [(key, values) for key, values in rows if key not in PLACES and key.split(".")[0] not in OF_NO_INTEREST]
    return [(key, values) for key, values in rows if len(set(map(repr, values))) > 1]


def _rows(values: Sequence[Mapping[str, object]]) -> list[Row]:
    """By dotted key, in the order in which they come, the values of each run; None where it has none."""
    dotted = [dict(comparable.flat(of_run)) for of_run in values]
    return [(key, tuple(of_run.get(key) for of_run in dotted)) for key in dict.fromkeys(chain(*dotted))]


@verb("RUN")
def explain(name: str, *, output_dir: str = "outputs") -> int:
    """Explains a run's lost efficiency; RUN is a folder, its name, or the first letters of an MLflow id.

    python -m pipeline explain key=value ... trains first; it takes the keys of a run: python -m pipeline --help.
    """
    run = load(find(name, Path(output_dir)))
    lines = explained_lines(run.result.explained, run.result.speed.efficiency)
    if not lines:
        instead = "python -m pipeline explain strategy=... to train and explain"
        raise UserError("a run that was explained", f"{run.folder}, which was not", instead)
    show.say(show.console_on(sys.stdout), *lines)
    return 0


@verb(
    keep_best="runs of each model and data set that stay, however old",
    older_than="age since the last write: 12h, 30d, 8w",
    unfinished="true: also unfinished runs, which a command could resume",
    dry="false: remove it",
)
def clean(
    *,
    keep_best: str = "5",
    older_than: str = "30d",
    unfinished: str = "false",
    dry: str = "true",
    output_dir: str = "outputs",
) -> int:
    """Lists the runs and sweeps that it would remove; with dry=false it removes them from disk and MLflow.

    Removed is what is older and holds none of the best runs (by speedup, for each model and data set).
    A sweep goes as a whole. Active and unfinished runs stay. Unused fork servers of launch.keep end too.
    """
    match = re.fullmatch(r"(\d{1,6})([hdw])", older_than)
    refuse(
        (match is None, "older_than to be an age, as 12h, 30d or 8w", older_than or "nothing", "older_than=30d"),
        (not keep_best.isdecimal(), "keep_best to be a whole number", keep_best or "nothing", "keep_best=5"),
    )
    age = int(match[1]) * SECONDS[match[2]] if match else 0
    lists, say, now = is_true("dry", dry), partial(show.say, show.console_on(sys.stdout)), time.time()
    folders, failed = gather(Path(output_dir)), 0
    why = staying(folders, int(keep_best), age, is_true("unfinished", unfinished), now)
    going = [stored for stored in folders if why[stored.folder] is None]
    stores.prepare(os.environ)
    for stored in going:
        problem = "" if lists else _remove(stored)
        failed += bool(problem)
        what = f"not removed ({problem})" if problem else "would remove" if lists else "removed"
        say(f"{what}: {_about(stored, now)}")
    stays = Counter(filter(None, why.values()))
    count, size = plural(len(going) - failed, "folder"), amount(sum(stored.bytes for stored in going))
    reasons = brackets(listed(*(f"{number} {reason}" for reason, number in stays.items())))
    say(f"{count} {'would go' if lists else 'went'}, {size}; {stays.total()} stay{reasons}.")
    say(*["Nothing was removed yet: type it again with dry=false."] * bool(lists and going), *_servers(lists, now))
    return min(failed, 1)


class Stored:
    """A run or a sweep: its runs' results by their folders, when it was last written to, and its bytes.

    It is `busy` while a command works on it, `unfinished` if a command can resume one of its runs.
    """

    def __init__(self, folder: Path, runs: Sequence[Path]) -> None:
        self.folder, self.runs = folder, {run: results.read(run) or Result() for run in runs}
        files = [path.stat(follow_symlinks=False) for path in folder.rglob("*") if path.is_file()]
        self.written = max((stat.st_mtime for stat in files), default=log.written(folder))
        # A file that is linked twice counts once.
        self.bytes = sum({stat.st_ino: stat.st_size for stat in files}.values())
        self.busy = any(map(_is_locked, (folder / "sweep.lock", *(run / LOCK for run in runs))))
        self.unfinished = any(
            result.ending.status in ("KILLED", "PREEMPTED", None)
            or (result.ending.status == "FAILED" and any((run / "checkpoints").glob("*.json")))
            for run, result in self.runs.items()
        )


def _remove(stored: Stored) -> str:
    """Removes it from MLflow, then from disk; returns what was wrong."""
    try:
        for folder in (*stored.runs, stored.folder / reports.FOLDER):
            if folder.resolve().is_relative_to(stored.folder.resolve()):
                stores.remove(folder)
        _delete(stored.folder)
    except OSError as error:
        return f"{error.filename or stored.folder}: {error.strerror or error}"
    except Exception as error:
        # What a store raises is MLflow's affair: it is told in a line, and the folder stays.
        return stores.reason(error, "the store").rstrip(".")
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


def _about(stored: Stored, now: float) -> str:
    speedups = [result.speed.speedup for result in stored.runs.values() if result.speed.speedup]
    days = int((now - stored.written) / SECONDS["d"])
    return listed(
        str(stored.folder),
        plural(len(stored.runs), "run") if len(stored.runs) > 1 else "",
        amount(stored.bytes),
        f"{plural(days, 'day') if days >= 1 else duration(now - stored.written)} old",
        f"{times(max(speedups))} at best" if speedups else "",
    )


def _servers(dry: bool, now: float) -> Iterator[str]:
    """Ends the fork servers of launch.keep that no command uses; yields a line about each."""
    for pid, ends in standby.servers():
        does = f"ends by itself in {duration(max(0.0, ends - now))}; dry=false ends it now" if dry else "was ended"
        if standby.children(pid):
            does = "is in use"
        elif not dry:
            # It ignores what a scheduler sends.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        yield f"The fork server {pid} of launch.keep {does}."


def staying(
    folders: Sequence[Stored], keep_best: int, older_than: float, unfinished: bool, now: float
) -> dict[Path, str | None]:
    """By its folder, why each stays; None for one to delete: older than so many seconds, finished, with no best run.

    The best runs are those with the highest speedup of each model on each data set.
    """
    finished = [(one, folder) for stored in folders for folder, one in stored.runs.items() if one.finished]
    speeds = [(one.speed.speedup or 0.0, one.speed.examples_per_second or 0.0, folder) for one, folder in finished]
    choices = ((one.choices.model, one.choices.data) for one, _ in finished)
    groups = comparable.grouped(zip(choices, speeds, strict=True)).values()
    best = {folder for group in groups for *_, folder in sorted(group, reverse=True)[:keep_best]}
    why = {
        stored.folder: BUSY if stored.busy
        else YOUNG if now - stored.written < older_than
        else UNFINISHED if stored.unfinished and not unfinished
        else BEST if best & set(stored.runs)
        else None
        for stored in folders
    }  # fmt: skip
    # A sweep that stays may have resumed a run that is elsewhere.
    needed = {run.resolve() for stored in folders if why[stored.folder] for run in stored.runs}
    for stored in folders:
        if needed & {run.resolve() for run in stored.runs}:
            why[stored.folder] = why[stored.folder] or NEEDED
    return why


def gather(output: Path) -> list[Stored]:
    """The runs and sweeps in an output folder, oldest first."""
    stored = [Stored(folder, [folder]) for folder in _folders(output / "runs") if _is_ours(folder)]
    for sweep in _folders(output / "sweeps"):
        if _is_ours(sweep, SWEEP, "multirun.yaml") or any(map(_is_ours, _folders(sweep))):
            # Its runs, those of earlier attempts, and those elsewhere that it resumed.
            entries = [Path(os.path.normpath(sweep / entry.folder)) for entry in read_sweep(sweep)]
            inside = [path.parent for path in sorted(sweep.glob("*/plan.json"))]
            runs = [path for path in dict.fromkeys([*entries, *inside]) if (path / PLAN).exists()]
            stored.append(Stored(sweep, runs))
    return sorted(stored, key=lambda one: one.written)


def _folders(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.is_dir()) if place.is_dir() else []


def _is_ours(folder: Path, *names: str) -> bool:
    """True if a command of ours has made a folder, a run's or one with such files; other programs name theirs alike."""
    return any((folder / name).exists() for name in names or (PLAN, EVENTS, HYDRA_S))


def _is_locked(path: Path) -> bool:
    with suppress(OSError):
        if path.exists():
            Lock(path.parent, path.name).release()
        return False
    return True

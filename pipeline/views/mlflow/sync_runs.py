"""Turns the folders of runs into MLflow runs that hold all of their logs: what was not sent is sent later.

It leaves one log to `pipeline.views.mlflow.copies`, and logs that still grow to their followers.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from pipeline.errors import UserError
from pipeline.record import kept, log
from pipeline.record.events import Attached, Resumed, Run
from pipeline.record.tracking import LOG, STATE, TrackingStore, recall
from pipeline.views.mlflow.copies import Copy, Deleted
from pipeline.views.mlflow.stores import reason, sqlite_path, unreachable, without_password

# Between the first two attempts at a store that fails; twice that before the last.
RETRY_SECONDS = 1.0


def sync(folders: Sequence[Path], output_dir: Path, uri: str | None, say: Callable[[str], None]) -> bool:
    """Sends what the store of each run below `folders`, or `uri`, does not hold yet; True if everything was sent."""
    counts = {True: 0, None: 0, False: 0}
    failed: dict[str, str] = {}
    untracked: list[Path] = []
    for folder in (run_folder for root in folders or [output_dir] for run_folder in run_folders(root)):
        store = _store_of(folder, uri)
        if store is None:
            untracked.append(folder)
        else:
            counts[_sync_one(Copy(folder, store), str(store.uri), failed, say)] += 1
    say(f"Runs sent: {counts[True]}; nothing new: {counts[None]}; not sent: {counts[False]}.")
    if untracked:
        say(f"Runs without tracking: {len(untracked)}. Try uri={local_uri(output_dir)} for a local store.")
    # A run that was asked for by name is not sent by skipping it.
    return not counts[False] and not set(untracked) & set(folders)


def run_folders(root: Path) -> list[Path]:
    """The folders of runs at and below `root`, but not the copies of their logs among MLflow's artifacts."""
    if (root / LOG).exists():
        return [root]
    folders = sorted(log.parent for log in root.rglob(LOG))
    return [folder for folder in folders if (folder / STATE).exists() or _home(folder) == folder.name]


def bring_up(copy: Copy, gone: int | None = None, time_ms: int | None = None) -> str:
    """Sends all that a log holds, and ends the run as KILLED where nobody will; returns what a person is told of that.

    The driver with the process number `gone` writes no more. A killed run ends at `time_ms`, or with its last event.
    """
    _patiently(lambda: _catch_up(copy))
    driver = copy.state.driver
    if driver is None or copy.closed or copy.state.ended:
        return ""
    lives = False if gone is not None and driver.pid == gone else driver_lives(driver)
    if lives is None:
        return f" It has no end, and only {driver.host} knows whether it still runs: sync there."
    if lives:
        return " It still runs."
    if kept.trains_on(copy.folder, time.time()):
        return f" It trains on without a driver: python -m pipeline attach {copy.folder} takes its place."
    _patiently(lambda: copy.kill(time_ms))
    return " It has no end and its process is gone: set to KILLED."


def driver_lives(run: Run | Resumed | Attached) -> bool | None:
    """True if the process that writes the log still runs; None where that cannot be seen from here."""
    if run.host != os.uname().nodename or run.pid is None:
        return None
    try:
        process = psutil.Process(run.pid)
        # A process that began later only has the same number; a minute is for a clock that was set meanwhile.
        began_before = process.create_time() < run.time + 60
        return began_before and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except (psutil.Error, ValueError):
        return False


def local_uri(output_dir: Path) -> str:
    """The store of runs below `output_dir` where no other is named."""
    return f"sqlite:///{output_dir.resolve() / 'mlflow.db'}"


def _sync_one(copy: Copy, uri: str, failed: dict[str, str], say: Callable[[str], None]) -> bool | None:
    """True: sent something; None: there was nothing to send; False: could not. `failed` has stores that are down."""
    try:
        if not copy.lock():
            say(f"{copy.folder}: another process is sending it now.")
            return None
        if _complete(copy, uri, failed):
            return None
        if uri in failed:
            raise UserError(failed[uri])
        path = sqlite_path(uri)
        if path and not path.parent.is_dir():
            raise UserError(f"a folder {path.parent} for the store", "none", "uri=..")
        about = bring_up(copy)
        if copy.sent or about:
            say(f"{copy.folder}: {copy.sent} event{'s' * (copy.sent != 1)} sent, run {copy.run_id}.{about}")
        return True if copy.sent else None
    except Deleted as error:
        say(f"{copy.folder}: left alone. {error}")
        return None
    except Exception as error:
        problem = reason(error, uri)
        if unreachable(error):
            failed[uri] = problem
        say(f"{copy.folder}: not sent. {problem}")
        return False
    finally:
        copy.release()


def _complete(copy: Copy, uri: str, failed: dict[str, str]) -> bool:
    """True if all is sent. A store that was thrown away is filled again; one that cannot be asked is believed."""
    if copy.closed and not copy.behind() and uri not in failed:
        try:
            copy.verify()
        except Exception as error:
            if unreachable(error):
                failed[uri] = reason(error, uri)
    return copy.closed and not copy.behind()


def _catch_up(copy: Copy) -> None:
    while copy.advance():
        pass


def _patiently(do: Callable[[], None]) -> None:
    """Tries three times where trying again may help: a locked database, a server that is busy."""
    for attempt in range(3):
        try:
            do()
            return
        except Exception as error:
            if attempt == 2 or isinstance(error, UserError) or unreachable(error):
                raise
            time.sleep(RETRY_SECONDS * 2**attempt)


def _home(folder: Path) -> str | None:
    """The name of the folder that a log says it was written in."""
    first = next((event for event, _ in log.read(folder / LOG)), None)
    return Path(first.folder).name if isinstance(first, Run) and first.folder else None


def _store_of(folder: Path, uri: str | None) -> TrackingStore | None:
    store = recall(folder).store or TrackingStore()
    if uri is None or without_password(uri) == store.uri:
        return replace(store, uri=uri or store.uri) if store.uri else None
    path = sqlite_path(uri)
    return replace(store, uri=uri, artifacts=(path.parent / "mlartifacts").as_uri() if path else None)

"""Turns a run's event log into an MLflow run: as it grows, by a process of its own, or later, by `sync`.

Both fold the log through `changes`, and note in the run's `tracking.json` how far they came. To send a thing twice
changes nothing: a run is found again by its key, and MLflow stores an equal point once. The follower is a process
because MLflow takes seconds to import and its server may hang: the driver waits for neither.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from pipeline.record import log as event_log
from pipeline.record.files import DELETED, LOG, TrackingStore, read_tracking, write_tracking
from pipeline.views.mlflow.stores import logged_in, without_password

LOOK_SECONDS = 0.05  # between two looks at how far the follower is
# A process that imports, sends or writes computes for longer before long, also beside many others; one that waits for
# a server that does not answer does not.
LEAST_SECONDS = 0.02


class Tracker:
    """Starts the follower and names runs to it. Nothing here raises.

    The follower is waited for until it has not got on for `timeout` seconds, or the caller `waits` no more.
    """

    def __init__(self, environ: Mapping[str, str], log: Path) -> None:
        self._environ, self._log = dict(environ), log
        self._process: subprocess.Popen[bytes] | None = None
        # The folders that the follower has been named: a file that it reads, so that it can be neither full nor closed.
        self._names: int | None = None
        self._lock = threading.Lock()
        self._problem: str | None = None

    def begin(self) -> None:
        """Starts the process, which imports MLflow meanwhile; without it, the first log that is followed does."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            path = filter(None, [str(Path(__file__).resolve().parents[3]), self._environ.get("PYTHONPATH")])
            environ = {**self._environ, "PYTHONPATH": os.pathsep.join(path)}
            command = [sys.executable, "-m", "pipeline.views.mlflow.sync_runs", str(os.getpid())]
            try:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                # One that takes the place of another reads from the beginning what that was named.
                if self._names is None:
                    self._names, names_file = tempfile.mkstemp()
                    os.unlink(names_file)
                with self._log.open("ab") as log:
                    self._process = subprocess.Popen(
                        command, stdin=self._names, stdout=log, stderr=log, env=environ, start_new_session=True
                    )
            except OSError as error:
                self._problem = f"The tracking process could not start: {error}."

    def follow(self, folder: Path, store: TrackingStore) -> None:
        """Names the log in `folder` to the follower, and notes in the folder that it belongs in `store`."""
        try:
            if store.uri is not None:
                store = replace(store, uri=logged_in(store.uri, self._environ))
            remember(folder, store)
            if store.uri is not None:
                self.begin()
                self._name(os.fsencode(folder))
        except OSError as error:
            self._problem = f"The run is not tracked: {error}."

    def drain(self, folder: Path, timeout: float, waits: Callable[[], bool] = lambda: True) -> tuple[bool, str | None]:
        """Returns (True if MLflow holds all of the log in `folder`, what was wrong), after that time at most."""
        process = self._process
        if process is None:
            return self._problem is None, self._problem

        def is_sent() -> bool:
            copied = read_tracking(folder).copied
            return copied.closed == DELETED or next(event_log.read(folder / LOG, copied.offset), None) is None

        if not is_sent():
            self._name(os.fsencode(folder))
            _wait(process, timeout, lambda: waits() and not is_sent(), lambda: read_tracking(folder).copied.problem)
        problem = read_tracking(folder).copied.problem
        if problem is None and not is_sent():
            ended = self._problem or f"The tracking process has ended; see {self._log}."
            problem = "The tracking process is not done yet." if process.poll() is None else ended
        return problem is None, problem

    def close(self, timeout: float = 12.0, waits: Callable[[], bool] = lambda: True) -> None:
        """Ends the process, which first sends what is left and ends as KILLED the runs that have no end."""
        self._name(b"")
        with self._lock:
            process, names = self._process, self._names
            self._process = self._names = None
        if process is not None and names is not None:
            _wait(process, timeout, waits, lambda: None)
            process.kill()
            process.wait()
            os.close(names)

    def _name(self, folder: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._names is not None:
                os.write(self._names, folder + b"\0")


def remember(folder: Path, store: TrackingStore) -> None:
    """Notes in the run's folder where it is tracked, and that nothing is known to be wrong there."""
    store = replace(store, uri=without_password(store.uri))
    state = replace(read_tracking(folder), store=store)
    write_tracking(folder, state.with_copied(store.uri, replace(state.copied, problem=None)))


def _wait(
    process: subprocess.Popen[bytes], timeout: float, waits: Callable[[], bool], problem: Callable[[], str | None]
) -> None:
    """Waits while the caller does and the process gets on: it computes, but not to try again what meets a `problem`."""
    import psutil  # only once a follower is waited for: a plan has none

    def computed() -> float:
        with contextlib.suppress(psutil.Error):
            return float(sum(psutil.Process(process.pid).cpu_times()[:2]))  # of the user and the system
        return 0.0

    before, until = computed(), time.monotonic() + timeout
    while process.poll() is None and waits() and time.monotonic() < until:
        time.sleep(min(LOOK_SECONDS, timeout))
        if computed() - before >= LEAST_SECONDS and not problem():
            before, until = computed(), time.monotonic() + timeout

"""Turns what the conductor asks into commands for the follower, and its answers into values.

It is all that the conductor imports; it leaves MLflow to the process that it starts.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from pipeline.record.tracking import Store
from pipeline.views.mlflow.patience import Patience
from pipeline.views.mlflow.state import remember

# Between two looks at whether the process gets on.
LOOK_SECONDS = 0.1


class Tracker:
    """Starts the following process and talks to it. Nothing here raises.

    The process is waited for until it has not got on for `timeout` seconds, or the caller says that it `waits` no more.
    """

    def __init__(self, environ: Mapping[str, str], log: Path) -> None:
        self._environ, self._log = environ, log
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._news = threading.Condition()
        # What the process is to follow, by folder, and what its pipe has not taken yet.
        self._follows: dict[str, dict[str, object]] = {}
        self._unsent = b""
        self._run_ids: dict[str, str] = {}
        self._errors: dict[str, str | None] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._numbers = itertools.count(1)
        self._problem: str | None = None

    def begin(self) -> None:
        """Starts the process, which imports MLflow meanwhile; without it, the first log that is followed does."""
        if self._process is None or self._process.poll() is not None:
            try:
                self._start()
            except OSError as error:
                self._problem = f"The tracking process could not start: {error}."

    def follow(self, folder: Path, store: Store) -> None:
        """Has the log in `folder` sent to `store` from now on, and notes in the folder that it belongs there."""
        try:
            remember(folder, store)
            if store.uri is None:
                return
            self._follows[str(folder)] = {"follow": str(folder), "store": dataclasses.asdict(store)}
            if self._process is None or self._process.poll() is not None:
                self._start()
            else:
                self._say(self._follows[str(folder)])
        except OSError as error:
            self._problem = f"The tracking process could not start: {error}."

    def run_id(self, folder: Path, timeout: float, waits: Callable[[], bool] = lambda: True) -> str | None:
        """The MLflow run of `folder`; None if there is none after that time, or the store fails."""

        def known() -> bool:
            return bool(str(folder) in self._run_ids or self._errors.get(str(folder)))

        with self._news:
            if not known() and timeout:
                self._say({"hurry": timeout})
                self._wait(known, timeout, waits)
            return self._run_ids.get(str(folder))

    def drain(self, timeout: float, waits: Callable[[], bool] = lambda: True) -> tuple[bool, str | None]:
        """(Is all that the logs hold in MLflow, what was wrong), after that time at most."""
        if self._process is None:
            return self._problem is None, self._problem
        asked = next(self._numbers)
        # It is told to be done a little earlier, so that its answer comes in time.
        said = self._say({"drain": max(0.0, timeout - 0.2), "id": asked})
        with self._news:
            if said:
                self._wait(lambda: asked in self._answers, timeout, waits)
            answer = self._answers.pop(asked, None)
            if answer:
                return bool(answer["drained"]), answer["error"]
            if not said or not self._listening():
                return False, self._problem or f"The tracking process has ended; see {self._log}."
            errors = [error for error in self._errors.values() if error]
            return False, errors[-1] if errors else "The tracking process is not done yet."

    def close(self, timeout: float = 12.0, waits: Callable[[], bool] = lambda: True) -> None:
        """Ends the process, which first sends what is left and ends as KILLED the runs that have no end."""
        process, self._process = self._process, None
        if process is None or process.stdin is None or process.stdout is None:
            return
        self._send(process)
        with contextlib.suppress(OSError):
            process.stdin.close()
        patience = Patience(timeout, lambda: _computed(process))
        while process.poll() is None and waits() and not patience.is_over(any(self._errors.values())):
            time.sleep(min(LOOK_SECONDS, timeout))
        process.kill()
        process.wait()
        if self._reader is not None:
            self._reader.join()
        process.stdout.close()

    def _start(self) -> None:
        self.close()
        package = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(filter(None, [package, self._environ.get("PYTHONPATH")]))
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeline.views.mlflow"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**self._environ, "PYTHONPATH": path},
                start_new_session=True,
                bufsize=0,
            )
        if self._process.stdin is not None:
            os.set_blocking(self._process.stdin.fileno(), False)
        self._reader = threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True)
        self._reader.start()
        # One that was started before it had these too, and is gone.
        self._unsent = b""
        for command in self._follows.values():
            self._say(command)

    def _listening(self) -> bool:
        return self._reader is not None and self._reader.is_alive()

    def _wait(self, reached: Callable[[], bool], timeout: float, waits: Callable[[], bool]) -> None:
        """Waits for news, as long as there is a process that gets on, and the caller waits."""
        process = self._process
        if process is None:
            return
        patience = Patience(timeout, lambda: _computed(process))
        while not self._news.wait_for(lambda: reached() or not self._listening(), min(LOOK_SECONDS, timeout)):
            self._send(process)
            if patience.is_over(any(self._errors.values())) or not waits():
                return

    def _say(self, command: Mapping[str, object]) -> bool:
        """Has the process told of a command; false where there is none to tell."""
        with self._news:
            self._unsent += json.dumps(command).encode() + b"\n"
            return self._process is not None and self._send(self._process)

    def _send(self, process: "subprocess.Popen[bytes]") -> bool:
        """Writes what the pipe takes, the rest once a process that was stopped takes more; false where it is gone."""
        with self._news:
            try:
                while self._unsent and process.stdin is not None:
                    self._unsent = self._unsent[os.write(process.stdin.fileno(), self._unsent) :]
            except BlockingIOError:
                pass
            except (OSError, ValueError):
                return False
        return process.stdin is not None

    def _listen(self, lines: IO[bytes]) -> None:
        for line in lines:
            with contextlib.suppress(ValueError, KeyError), self._news:
                news = json.loads(line)
                if "run_id" in news:
                    self._run_ids[news["run"]] = news["run_id"]
                elif "drained" in news:
                    self._answers[news["id"]] = news
                else:
                    self._errors[news["run"]] = news["error"]
                self._news.notify_all()


def _computed(process: "subprocess.Popen[bytes]") -> float:
    """The processor time that a process has used, in seconds; 0 once it is gone."""
    # Only once a follower is waited for: a plan has none.
    import psutil

    try:
        used = psutil.Process(process.pid).cpu_times()
        return float(used.user + used.system)
    except psutil.Error:
        return 0.0

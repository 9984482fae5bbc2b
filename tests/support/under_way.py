"""Commands under way in a folder: what their runs have logged so far, who is harmed meanwhile, and how they end."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from conftest import Ran, finish, start
from run_events import logged, runs


def losses(result: dict[str, Any]) -> tuple[Any, ...]:
    return result["loss"], result["val_loss"], result["metrics"], result["val_metrics"]


def until(reached: Callable[[], Any], seconds: float = 240.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (there := reached()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)
    return there


class UnderWay:
    """A command, in whose place another may be typed; killed where a `with` block ends before it."""

    def __init__(self, folder: Path, *arguments: str, cold: bool = False, python: Path | None = None, **environ: str):
        self.folder = folder
        self._start = partial(start, folder, cold=cold, python=python, **environ)
        folder.mkdir(exist_ok=True)
        self.process: subprocess.Popen[str] | None = None
        if arguments:
            self.type(*arguments)

    def __enter__(self) -> "UnderWay":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def type(self, *arguments: str, **environ: str) -> None:
        self.process = self._start(*arguments, **environ)

    @property
    def runs(self) -> list[Path]:
        return runs(self.folder)

    def told(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The events of a kind, or all, as far as they are written, a run's after the others'."""
        return [event for run in self.runs for event in logged(run, kind)]

    def step(self, kind: str = "steps") -> int:
        """How far the last run is."""
        told = logged(self.runs[-1], kind) if self.runs else []
        return max((event.get("step") or 0 for event in told), default=0)

    def restarted(self) -> list[str]:
        return [event["text"] for event in self.told("restarted")]

    def until(self, reached: Callable[[], object], seconds: float = 240.0) -> None:
        def reached_or_over() -> object:
            assert self.process is not None
            assert self.process.poll() is None, "\n".join(self.process.communicate())
            return reached()

        until(reached_or_over, seconds)

    def until_told(self, kind: str, count: int = 1) -> None:
        self.until(lambda: len(self.told(kind)) >= count, 90)

    def more(self, steps: int, kind: str = "steps") -> None:
        before = self.step(kind)
        self.until(lambda: self.step(kind) >= before + steps)

    def harm(self, number: int, rank: int | None = None) -> None:
        """Sends a signal to the process of a rank that was started last, or to the command."""
        assert self.process is not None
        pids = [event["pid"] for event in self.told("started") if event["rank"] == rank]
        os.kill(self.process.pid if rank is None else pids[-1], number)

    def kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.communicate()

    def ended(self, timeout: float = 400.0) -> Ran:
        """How it ends, and the seconds from now until then."""
        assert self.process is not None
        return finish(self.process, self.folder, time.monotonic(), timeout)

"""Commands under way in a folder: what their runs have logged so far, and how they end."""

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from conftest import Ran, finish, start


def events(folder: Path, kind: str | None = None, runs: str = "outputs/[rs]*/**") -> list[dict[str, Any]]:
    """The events of all runs, of one kind or of all, as far as they are written, a run's after the others'."""
    logs = sorted(folder.glob(f"{runs}/events.jsonl"))
    lines = [line for log in logs for line in log.read_text().splitlines() if line.endswith("}")]
    return [event for event in map(json.loads, lines) if kind in (None, event["event"])]


def losses(result: dict[str, Any]) -> tuple[Any, ...]:
    """What a run has come to."""
    return result["loss"], result["val_loss"], result["metrics"], result["val_metrics"]


def until(reached: Callable[[], Any], seconds: float = 240.0) -> Any:
    """Waits for something that will come, and returns it."""
    deadline = time.monotonic() + seconds
    while not (there := reached()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.1)
    return there


class UnderWay:
    """A command, in whose place another may be typed."""

    def __init__(self, folder: Path, *arguments: str, **environ: str) -> None:
        self.folder, self._environ = folder, environ
        folder.mkdir(exist_ok=True)
        self.process: subprocess.Popen[str] | None = None
        if arguments:
            self.type(*arguments)

    def type(self, *arguments: str, **environ: str) -> None:
        """Types another command."""
        self._began = time.monotonic()
        self.process = start(self.folder, *arguments, **self._environ, **environ)

    def told(self, kind: str | None = None) -> list[dict[str, Any]]:
        """The events of a kind, or all."""
        return events(self.folder, kind)

    def step(self, kind: str = "steps") -> int:
        """How far the last run is."""
        logs = sorted(self.folder.glob("outputs/[rs]*/**/events.jsonl"))
        told = events(logs[-1].parent, kind, ".") if logs else []
        return max((event.get("step") or 0 for event in told), default=0)

    def restarted(self) -> list[str]:
        """Why processes were started again, each time."""
        return [event["text"] for event in self.told("restarted")]

    def until(self, reached: Callable[[], object], seconds: float = 240.0) -> None:
        """Waits for something that comes while the command is under way."""

        def reached_or_over() -> object:
            assert self.process is not None
            assert self.process.poll() is None, "\n".join(self.process.communicate())
            return reached()

        until(reached_or_over, seconds)

    def more(self, steps: int, kind: str = "steps") -> None:
        """Waits until it has trained so many steps more."""
        before = self.step(kind)
        self.until(lambda: self.step(kind) >= before + steps)

    def kill(self) -> None:
        """Kills it outright."""
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()

    def ended(self, timeout: float = 400.0) -> Ran:
        """How it ends."""
        assert self.process is not None
        return finish(self.process, self.folder, self._began, timeout)

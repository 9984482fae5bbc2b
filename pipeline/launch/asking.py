"""Asks a process of ours on a host, a line of JSON for each question and each answer, whoever has started it there.

It is `python -m pipeline.doctor`, which says what it answers. What it is asked is not looked at here.
"""

import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

# For an answer that takes no time but that of the way.
ANSWER_SECONDS = 30.0
MODULE = "pipeline.doctor"


class LineError(RuntimeError):
    """A host that does not answer, or cannot do what it was asked: the message says why."""


class Line(Protocol):
    """Where one host's process is asked."""

    def ask(self, question: Mapping[str, Any], timeout: float = ANSWER_SECONDS) -> Any:
        """The answer to a question. Raises `LineError`."""

    def close(self) -> None:
        """Ends the process."""


@dataclass(frozen=True)
class Helpers:
    """A line to each host of a cluster, by its name, its address as other hosts have it, and why some have no line.

    `here` is the name of the host that conducts, where it is one of them.
    """

    lines: Mapping[str, Line]
    addresses: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    here: str | None = None


class ProcessLine:
    """A process that this one has started, through its standard input and output."""

    def __init__(self, command: list[str], environ: Mapping[str, str]) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the line
        self._unread = b""
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self._said, env=dict(environ), bufsize=0
            )
        except OSError as error:
            self._said.close()
            raise LineError(f"{command[0]}: {error.strerror or error}") from error

    def ask(self, question: Mapping[str, Any], timeout: float = ANSWER_SECONDS) -> Any:
        """The answer to a question. Raises `LineError`."""
        return answer_of(self.answer(json.dumps(question), timeout))

    def answer(self, question: str, timeout: float) -> str:
        """The line that answers a line. Raises `LineError`; one that is late is the last that was asked."""
        stdin = self._process.stdin
        assert stdin is not None, "it is a pipe"
        try:
            stdin.write(question.encode() + b"\n")
        except OSError as error:
            raise LineError(self._last_words()) from error
        return self._line(timeout).decode(errors="replace")

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _line(self, timeout: float) -> bytes:
        stdout, until = self._process.stdout, time.monotonic() + timeout
        assert stdout is not None, "it is a pipe"
        while b"\n" not in self._unread:
            if not select.select([stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                self._process.kill()
                raise LineError(f"no answer within {timeout:g} s")
            more = os.read(stdout.fileno(), 1 << 16)
            if not more:
                raise LineError(self._last_words())
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """What a process that has ended said last."""
        code = self._process.wait()
        self._said.seek(0)
        said = [line.strip() for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        return said[-1] if said else f"it ended with {code} and told nothing"


class Answers:
    """What an agent has answered on its host, by a process that is started with the first question.

    `tell` is given the number of a question and the line that answers it, by a thread of its own.
    """

    def __init__(self, environ: Mapping[str, str], tell: Callable[[int, str], None]) -> None:
        self._environ, self._tell = environ, tell
        self._questions = queue.SimpleQueue[tuple[int, str, float] | None]()
        self._answering: threading.Thread | None = None

    def ask(self, number: int, question: str, timeout: float) -> None:
        """Has a question answered, after those before it."""
        if self._answering is None:
            self._answering = threading.Thread(target=self._answer, daemon=True)
            self._answering.start()
        self._questions.put((number, question, timeout))

    def close(self) -> None:
        """Ends the process, once it has answered."""
        if self._answering is not None:
            self._questions.put(None)

    def _answer(self) -> None:
        line: ProcessLine | None = None
        while asked := self._questions.get():
            number, question, timeout = asked
            try:
                line = line or here(self._environ)
                self._tell(number, line.answer(question, timeout))
            except LineError as error:
                self._tell(number, json.dumps({"failed": str(error)}))
        if line is not None:
            line.close()


def here(environ: Mapping[str, str]) -> ProcessLine:
    """A line to a process on this host. Raises `LineError`."""
    return ProcessLine([sys.executable, "-m", MODULE], environ)


def answer_of(line: str) -> Any:
    """What a process has answered. Raises `LineError` where it could not."""
    try:
        answer = json.loads(line)
    except ValueError as error:
        raise LineError(f"an answer that is none: {line[:80]!r}") from error
    if not isinstance(answer, dict) or "told" not in answer:
        failed = answer.get("failed") if isinstance(answer, dict) else None
        raise LineError(str(failed or f"an answer that is none: {line[:80]!r}"))
    return answer["told"]

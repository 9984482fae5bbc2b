"""Asks a process of ours on a host, a line of JSON for each question and each answer, whoever has started it there.

It is `python -m pipeline.doctor`, which says what it answers. What it is asked is not looked at here.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from pipeline.launch import ANSWER_SECONDS, LaunchError

MODULE = "pipeline.doctor"


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
            raise LaunchError(f"{command[0]}: {error.strerror or error}") from error

    def ask(self, question: Mapping[str, Any], timeout: float = ANSWER_SECONDS) -> Any:
        """The answer to a question. Raises `LaunchError`."""
        return answer_of(self.answer(json.dumps(question), timeout))

    def answer(self, question: str, timeout: float) -> str:
        """Returns the line that answers a line. Raises `LaunchError`; after one that is late, nothing is answered."""
        stdin = self._process.stdin
        assert stdin is not None, "it is a pipe"
        try:
            stdin.write(question.encode() + b"\n")
        except OSError as error:
            raise LaunchError(self._last_words()) from error
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
                raise LaunchError(f"no answer within {timeout:g} s")
            more = os.read(stdout.fileno(), 1 << 16)
            if not more:
                raise LaunchError(self._last_words())
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _last_words(self) -> str:
        """Returns the last line that a process which has ended wrote on its standard error."""
        code = self._process.wait()
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with {code} and printed nothing"


def here(environ: Mapping[str, str]) -> ProcessLine:
    """A line to a process on this host. Raises `LaunchError`."""
    return ProcessLine([sys.executable, "-m", MODULE], environ)


def answer_of(line: str) -> Any:
    """The answer in a line. Raises `LaunchError` where there is none."""
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if isinstance(answer, dict) and "told" in answer:
        return answer["told"]
    failed = answer.get("failed") if isinstance(answer, dict) else None
    raise LaunchError(str(failed or f"an answer that is none: {line[:80]!r}"))

"""Asks `python -m pipeline.doctor` on a host, a line of JSON for each question and answer, whoever has started it."""

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping

from pipeline.launch import LaunchError, Line

MODULE = "pipeline.doctor"


class _AnsweringProcess:
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

    def answer(self, question: str, timeout: float) -> str:
        stdin, stdout, until = self._process.stdin, self._process.stdout, time.monotonic() + timeout
        assert stdin is not None, "it is a pipe"
        assert stdout is not None, "it is a pipe"
        try:
            stdin.write(question.encode() + b"\n")
        except OSError as error:
            raise LaunchError(self._last_words()) from error
        while b"\n" not in self._unread:
            if not select.select([stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                self._process.kill()
                raise LaunchError(f"no answer within {timeout:g} s")
            if not (more := os.read(stdout.fileno(), 1 << 16)):
                raise LaunchError(self._last_words())
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with {code} and printed nothing"


def started(command: list[str], environ: Mapping[str, str]) -> Line:
    """A line to a process that this one starts, through its standard input and output. Raises `LaunchError`."""
    process = _AnsweringProcess(command, environ)
    return Line(process.answer, process.close)


def here(environ: Mapping[str, str]) -> Line:
    """A line to a process on this host. Raises `LaunchError`."""
    return started([sys.executable, "-m", MODULE], environ)

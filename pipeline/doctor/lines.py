"""A line to the process that looks at a host, `python -m pipeline.doctor`, whoever has started it."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any, Protocol

# For an answer that takes no time but that of the way.
ANSWER_SECONDS = 30.0
MODULE = "pipeline.doctor"


class LineError(RuntimeError):
    """A host that does not answer, or cannot do what it was asked: the message says why."""


class Line(Protocol):
    """Where one host's helper is asked."""

    def ask(self, question: Mapping[str, Any], timeout: float = ANSWER_SECONDS) -> Any:
        """The answer to a question of `pipeline.doctor.__main__`. Raises `LineError`."""

    def close(self) -> None:
        """Ends the helper."""


class ProcessLine:
    """A helper that this process has started, through its standard input and output."""

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
        """The answer to a question. Raises `LineError`, after which there is no other answer."""
        stdin = self._process.stdin
        assert stdin is not None, "it is a pipe"
        try:
            stdin.write(json.dumps(question).encode() + b"\n")
        except OSError as error:
            raise LineError(self._last_words()) from error
        return answer_of(self._line(time.monotonic() + timeout, timeout))

    def close(self) -> None:
        """Ends the helper."""
        self._process.kill()
        self._process.communicate()
        self._said.close()

    def _line(self, until: float, timeout: float) -> bytes:
        stdout = self._process.stdout
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
        """What a helper that has ended said last."""
        code = self._process.wait()
        self._said.seek(0)
        said = [line.strip() for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        return said[-1] if said else f"it ended with {code} and told nothing"


def here(environ: Mapping[str, str]) -> ProcessLine:
    """A line to a helper on this host. Raises `LineError`."""
    return ProcessLine([sys.executable, "-m", MODULE], environ)


def answer_of(line: bytes | str) -> Any:
    """What a helper has answered. Raises `LineError` where it could not."""
    try:
        answer = json.loads(line)
        return answer["told"]
    except (ValueError, KeyError, TypeError) as error:
        failed = answer.get("failed") if isinstance(error, KeyError) else None
        raise LineError(str(failed or f"an answer that is none: {line[:80]!r}")) from error

"""The event log: lines of `pipeline.record.events`, whole. It is the record of a run; all else is a view of it."""

import errno
import json
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pipeline.record import plain
from pipeline.record.events import Event, from_plain, to_line

# Read at once, from its end, of a log that is opened again.
BLOCK_BYTES = 65_536
# The mode of a file that nobody but its owner can read.
SECRET = 0o600

Made = TypeVar("Made")


class EventLog:
    """Appends events to a file, one line each, written whole. What a crash has left of a last line is removed.

    While the disk is full, lines are kept here and written once there is space again.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._unwritten = b""
        size = os.fstat(self._file).st_size
        whole = _end_of_lines(self._file, size)
        if whole < size:
            # The next line would be appended to it, and lost with it.
            os.ftruncate(self._file, whole)

    def append(self, event: Event) -> None:
        """Writes `event` with one system call, so that a reader or a crash sees a whole line or none of it."""
        self._unwritten += to_line(event)
        try:
            self._write()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise

    def close(self) -> None:
        """Ends the log. Raises `OSError` where the disk is still full."""
        try:
            self._write()
        finally:
            os.close(self._file)

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]


def write_whole(path: Path, text: str, mode: int = 0o666) -> None:
    """Writes a file so that a reader or a crash sees all of `text` or what was there before. Raises `OSError`.

    Threads, processes and hosts may write one path at once: each fills a file of its own first. `mode` is that of a new
    file, less the umask; SECRET for one that nobody else can read.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    # What no encoding has, such as a byte of a path, is written as "?".
    data = text.encode(errors="replace")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_whole(path: Path) -> dict[str, Any]:
    """The values of a JSON object that is a whole file; empty where there is no such file, or something else in it."""
    with suppress(OSError, ValueError):
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
    return {}


def read_made(kind: Callable[..., Made], path: Path) -> Made | None:
    """The dataclass whose `plain.fields_of` are a whole file; None where there is no such file, or something else."""
    values = read_whole(path)
    with suppress(plain.MismatchError):
        return plain.made_of(kind, values) if values else None
    return None


def written(path: Path) -> float:
    """When a file or folder was written last, in seconds since the epoch; 0 where there is none any more."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def from_here(path: Path) -> Path:
    """A file or folder as a person would type it: from the folder where they are, if it is in there."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def read(path: Path, start: int = 0) -> Iterator[tuple[Event, int]]:
    """Yields (event, offset after it) for each whole line from byte `start`; a line cut short is left for later."""
    for values, end in objects(path, start):
        yield from_plain(values), end


def objects(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """The same for any file of a JSON object a line: (its values, offset after it)."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        lines.seek(start)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            with suppress(ValueError):
                values = json.loads(line)
                if isinstance(values, dict):
                    yield values, start


def _end_of_lines(file: int, size: int) -> int:
    """Where the last whole line among the first `size` bytes of an open file ends."""
    while size:
        start = max(0, size - BLOCK_BYTES)
        last = os.pread(file, size - start, start).rfind(b"\n")
        if last >= 0:
            return start + last + 1
        size = start
    return 0

"""The event log, whole lines of `pipeline.record.events`, which is the record of a run; and files written whole."""

import errno
import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from msgspec.structs import replace

import pipeline.record as record
from pipeline.errors import unwritten
from pipeline.record.events import KINDS, Event, EventBase, Unknown

BLOCK_BYTES = 65_536
# The last is of `ulimit -f`.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# Also where whoever read the output, as `head`, has closed it.
UNTAKEN = (*FULL, errno.EPIPE)
# The mode of a file that nobody but its owner can read.
SECRET = 0o600

T = TypeVar("T")
Kind = TypeVar("Kind", bound=EventBase)


def stamped(event: Kind, time: float, group: str | None = None, rank: int | None = None) -> Kind:
    """Returns the event with a rank, and with a time and a group unless it has them."""
    rank = event.rank if rank is None else rank
    return replace(event, time=event.time or time, group=event.group or group, rank=rank)


def to_line(event: EventBase) -> bytes:
    """Returns the event as a line of JSON: of an unknown event all that was read."""
    values: object = event
    if isinstance(event, Unknown):
        values = {"time": event.time, "event": event.name, "group": event.group, "rank": event.rank} | event.values
    return record.to_json(values) + b"\n"


def to_plain(event: EventBase) -> dict[str, Any]:
    """Returns the values of the event's line."""
    return dict(json.loads(to_line(event)))


def from_line(line: bytes) -> Event | None:
    """Returns the event of a line; None where it holds no JSON object."""
    with suppress(ValueError):
        values = json.loads(line)
        return from_plain(values) if isinstance(values, dict) else None
    return None


def from_plain(values: Mapping[str, object]) -> Event:
    """Returns the event whose line has these values; `Unknown` where no class has such ones."""
    name = values.get("event")
    if isinstance(name, str) and name in KINDS:
        # Until version 2 the fields of a size stood beside those of the event.
        old_size = {"size": values} if name == "sized" and "variables" in values else {}
        with suppress(record.MismatchError):
            return record.from_plain(KINDS[name], {**values, **old_size})
    stamp: dict[str, Any] = {}
    for field, kind in EventBase.__annotations__.items():
        with suppress(record.MismatchError):
            stamp |= {field: record.from_plain(kind, values[field])} if field in values else {}
    return Unknown(str(name or ""), dict(values), **stamp)


class EventLog:
    """Appends events to a file, one line each, written whole. A last line that a crash cut short is removed.

    While the disk is full, lines wait in memory and are written once there is space again.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._unwritten = b""
        start = size = os.fstat(self._file).st_size
        last = -1
        while start and last < 0:
            start = max(0, start - BLOCK_BYTES)
            last = os.pread(self._file, BLOCK_BYTES, start).rfind(b"\n")
        if (whole := start + last + 1) < size:
            # The next line would be appended to it, and lost with it.
            os.ftruncate(self._file, whole)

    def append(self, event: Event) -> None:
        """Writes `event` with one system call, so that a reader or a crash sees a whole line or none of it."""
        self._unwritten += to_line(event)
        try:
            self._write()
        except OSError as error:
            if error.errno not in FULL:
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


class AsFarAsItFits:
    """A stream that drops what a full disk or a closed pipe does not take; stderr says once that a disk is full."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._said = stream, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Writes a text."""
        try:
            return self._stream.write(text)
        except OSError as error:
            if error.errno not in UNTAKEN:
                raise
            if not self._said and error.errno in FULL:
                self._said = True
                with suppress(OSError):
                    print(f"pipeline: {unwritten(error)}", file=sys.stderr)
        return 0

    def flush(self) -> None:
        """Writes what the buffer holds, or leaves it there."""
        try:
            self._stream.flush()
        except OSError as error:
            if error.errno not in UNTAKEN:
                raise


def read(path: Path, start: int = 0) -> Iterator[tuple[Event, int]]:
    """Yields (event, offset after it) for each whole line from byte `start`; a line cut short is left for later."""
    for values, end in objects(path, start):
        yield from_plain(values), end


def objects(path: Path, start: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Yields (values, offset after it) for each JSON object of any file that has one a line."""
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


def write_whole(path: Path, text: str | bytes, mode: int = 0o666) -> None:
    """Writes a file so that a reader or a crash sees all of `text` or what was there before. Raises `OSError`.

    Threads, processes and hosts may write one path at once: each fills a file of its own first.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    # What no encoding has, such as a byte of a path, is written as "?".
    data = text.encode(errors="replace") if isinstance(text, str) else text
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: object, mode: int = 0o666) -> None:
    """Writes a typed value as a whole JSON file. Raises `OSError`."""
    write_whole(path, json.dumps(record.to_plain(value), indent=2), mode)


def read_whole(path: Path) -> dict[str, Any]:
    """The values of a JSON object that is a whole file; empty where there is no such file, or something else in it."""
    with suppress(OSError, ValueError):
        values = json.loads(path.read_text(encoding="utf-8"))
        return values if isinstance(values, dict) else {}
    return {}


def read_json(kind: type[T], path: Path) -> T | None:
    """The typed value that is a whole file; None where there is no such file, or something else in it."""
    values = read_whole(path)
    with suppress(record.MismatchError):
        return record.from_plain(kind, values) if values else None
    return None


def written(path: Path) -> float:
    """The time when a file or folder was written last, in seconds since 1970; 0 if there is none any more."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def from_here(path: Path) -> Path:
    """A file or folder as a user would type it: from the working directory, if it is in there."""
    folder = Path.cwd()
    return path.relative_to(folder) if path.is_relative_to(folder) else path

"""What an agent's processes emit, in a file that is sent on from an offset until the driver has all of it.

The chief's lies beside the run's checkpoints and outlives the agent: the next chief's agent sends what is left there.
"""

import errno
import hashlib
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.plan.plan import Plan
from pipeline.record.events import Epoch, Steps, Unheard
from pipeline.record.log import from_line, stamped, to_line, to_plain

# Stands in for folders of checkpoints that are no folders here, in the home of the agent's user.
ELSEWHERE = ".cache/pipeline/unheard"
# Sent at once, but for the last line.
PIECE_BYTES = 1 << 20


class Lines:
    """Lines of a job's processes that the driver lacks: a file in `folder`, or beside checkpoints for the chief's."""

    def __init__(self, plan: Plan, group: str, ranks: Iterable[int], folder: Path) -> None:
        # Those that others have left are sent first, see `unheard`. Names are in the order of time.
        self._left, name = list[Path](), f"unheard-{time.time_ns()}.jsonl"
        self._own, self._file = folder / name, -1
        if plan.checkpoint.folder is not None and group == "point" and 0 in ranks:
            with suppress(OSError):
                *before, lasting = map(_lasting, filter(None, [plan.checkpoint.before, plan.checkpoint.folder]))
                lasting.mkdir(parents=True, exist_ok=True)
                left = [path for place in (*before, lasting) for path in place.glob("unheard-*.jsonl")]
                self._left = sorted(left, key=lambda path: path.name)
                self._file, self._own = _opened(lasting / name), lasting / name
        if self._file < 0:
            self._file = _opened(self._own)
        # Files that are yet to be sent, and how much of the first of them was.
        self._files: list[Path | int] = [*self._left, self._file]
        self._sent = 0

    @property
    def more(self) -> bool:
        """True if there are lines that were not sent."""
        return len(self._files) > 1 or self._sent < self._size

    def append(self, lines: bytes) -> None:
        """Writes lines, all or none. Raises `OSError`."""
        size = self._size
        try:
            if os.write(self._file, lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def next(self) -> bytes:
        """Returns the next lines to be sent; empty if none of these are for the driver."""
        lines, first = list[bytes](), self._files[0]
        with suppress(FileNotFoundError), open(first, "rb", closefd=first != self._file) as file:
            file.seek(self._sent)
            lines = file.readlines(PIECE_BYTES)
        self._sent += sum(map(len, lines))
        if first == self._file:
            return b"".join(lines)
        if not lines:
            self._files.pop(0)
            self._sent = 0
        return unheard(lines)

    def heard(self) -> None:
        """Removes what was sent, which the driver has, unless there is more."""
        if self.more:
            return
        while self._left:
            self._left.pop().unlink(missing_ok=True)
        if self._sent:
            os.ftruncate(self._file, 0)
            self._sent = 0

    def close(self) -> None:
        """Closes the file, and removes it if it is empty, with a folder that has nothing else."""
        is_empty = not self._size
        os.close(self._file)
        if is_empty:
            with suppress(OSError):
                self._own.unlink()
                self._own.parent.rmdir()

    @property
    def _size(self) -> int:
        return os.fstat(self._file).st_size


def unheard(lines: Iterable[bytes]) -> bytes:
    """Returns the line of one event with the steps and epochs among lines of processes that are over; empty if none."""
    events = [event for line in lines if isinstance(event := from_line(line), Steps | Epoch) and event.of_point]
    return to_line(stamped(Unheard(tuple(map(to_plain, events))), time.time(), "point")) if events else b""


def _lasting(checkpoints: str) -> Path:
    if "://" not in checkpoints:
        return Path(checkpoints)
    return Path.home() / ELSEWHERE / hashlib.sha256(checkpoints.encode()).hexdigest()[:16]


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

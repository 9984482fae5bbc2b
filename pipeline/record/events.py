"""What a run tells: one JSON object a line, in `events.jsonl`. The log is the record; all else is a view of it.

Every event has `time` (seconds since 1970), `event` (its kind) and, where a process sent it, `group` ("point" for the
run's own processes, "baseline" for the one-device comparison) and `rank`. The kinds, and what else they carry:

    run         conductor: `key` (unique for ever), `name`, `folder`, `experiment`, `params` {}, `tags` {}
    started     conductor: `pid`, `role`, `host` of a process
    joined      process: has its devices and strategy; `devices`, `versions` {}
    loaded      process: has its data; by part, `sharded` {}, `examples` {} and `broken` {} (what it found so)
    built       process: has its model; `parameters`, `state_bytes`, `input_shape`, `input_dtype`, `num_classes`,
                `train_examples`, `validation_examples`, `steps_per_epoch`, `epochs`, `data_digest`
    sized       process: how large the model is, where that was not known; the fields of `size.Size`, or an `error`
    profiling   process: `what` it timed before training: "model" or "input" (`step_seconds`, roughly, then `examples`
                [] and `seconds` [] of pieces), "stages" (`stages` [{}])
    profiled    conductor: what that comes to; `values`, as in result.json
    calibrated  process: `step_seconds`, after tracing
    measured    process: one timed repeat; `repeat`, `steps`, `examples` (over all replicas), `seconds`,
                `calls` [[steps, seconds], ...], `input_seconds` [] (of them spent waiting for batches, of each worker
                of an asynchronous training, else one)
    resumed     conductor: another command goes on with the run; `params` {}, `tags` {}, `pid`
    restored    chief: training goes on; `step` it goes on from, `found` (was there a checkpoint?); before it is
                logged, `told`, of whose `steps` and `epoch` those are logged that no conductor had heard
    checkpoint  chief: one was written; `step`, `path`, `seconds`
    restarted   conductor: all processes are started again; `text` why, `workers`, `processes`, `leaders`
    left        process: has left for a scheduler, after a checkpoint; `step`, chief adds `written` (did that work?)
    signalled   process: got a scheduler's `signal`
    steps       chief: one call of the training loop; `epoch`, `step` (optimizer steps done), `losses` [] (one a
                step, the last at `step`), `metrics` {} (running, over the epoch), `examples`, `seconds`,
                `learning_rate`
    epoch       chief: `epoch` (from 1), `step`, `loss`, `metrics` {}, `val_loss`, `val_metrics` {}, `seconds`
    system      first process of each host: `host`, `values` {} (percent, GiB)
    warning     anyone: `text`, something that a person should know
    saved       chief: `path` of the trained model, relative to the folder
    failed      process: `error` (one line for a person), `peer` (true where it only lost its peers), `diverged`
    finished    process: training is over; `weights` [] (a hash of the trained weights of each of its replicas); chief
                adds `epochs`, `loss`, `metrics`, `val_loss`, `val_metrics`
    explaining  process: `what` it timed after training: "everything", "no input" (`examples`, `seconds`), "no step"
                (`seconds` of a call), "no communication" (`replicas` [[number, seconds of a step]])
    explained   conductor: what that comes to; `values`, as in result.json
    result      conductor: `values`, the whole of result.json
    report      conductor: of a sweep, in a log of its own; `files` {} (paths in the sweep's folder, by the folder among
                the artifacts), `values` {} of the best point, `tags` {}, `text`
    ended       conductor: `status` (FINISHED, FAILED, KILLED or PREEMPTED), `error`; the last line, unless another
                command goes on with the run

`beat`, `stopped` and `exited` reach the conductor and are not logged.
"""

import errno
import json
import math
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Event = dict[str, Any]

# Kinds that only the conductor needs.
PASSING = ("beat", "stopped", "exited")

# What a scheduler sends before it takes the machine away: Slurm and Kubernetes SIGTERM, Slurm also what it is told to.
PREEMPTING = (signal.SIGTERM, signal.SIGUSR1)

# Read at once, from its end, of a log that is opened again.
BLOCK_BYTES = 65_536


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


def to_line(event: Event) -> bytes:
    """The event as a line of JSON; numbers that JSON lacks (NaN, infinity) become null.

    >>> to_line({"event": "steps", "loss": float("nan")})
    b'{"event": "steps", "loss": null}\\n'
    """
    return json.dumps(_finite(event), default=str).encode() + b"\n"


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that a reader or a crash sees all of `text` or what was there before."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    # What no encoding has, such as a byte of a path, is written as "?".
    partial.write_text(text, encoding="utf-8", errors="replace")
    partial.replace(path)


def read_whole(path: Path) -> dict[str, Any]:
    """The values of a JSON object that is a whole file; empty where there is no such file, or something else in it."""
    with suppress(OSError, ValueError):
        values = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(values, dict):
            return values
    return {}


def written(path: Path) -> float:
    """When a file or folder was written last, in seconds since the epoch; 0 where there is none any more."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def read(path: Path, start: int = 0) -> Iterator[tuple[Event, int]]:
    """Yields (event, offset after it) for each whole line from byte `start`; a line cut short is left for later."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        lines.seek(start)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                yield event, start


def _end_of_lines(file: int, size: int) -> int:
    """Where the last whole line among the first `size` bytes of an open file ends."""
    while size:
        start = max(0, size - BLOCK_BYTES)
        last = os.pread(file, size - start, start).rfind(b"\n")
        if last >= 0:
            return start + last + 1
        size = start
    return 0


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

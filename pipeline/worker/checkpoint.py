"""Checkpoints: everything that decides how a training goes on, written beside it, whole or not at all, and verified.

A checkpoint is `NAME-TOKEN.npz`, NumPy's archive of arrays, and `NAME.json`, written last, which says what the state
is, which archive holds its arrays, and the archive's SHA-256. Nothing in either is pickled.
"""

import contextlib
import hashlib
import io
import json
import math
import posixpath
import time
import uuid
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import IO, Any, TypeAlias

import ml_dtypes  # noqa: F401 # Registers bfloat16 and the like with NumPy.
import numpy as np

from pipeline.data import files
from pipeline.plan.plan import Checkpoints
from pipeline.record.events import Checkpoint, Warned
from pipeline.worker.engine import Emit
from pipeline.worker.model_error import TrainingError

FORMAT = 1
# How long a state takes to be written that none was written before, on a slow disk.
WRITE_SECONDS, WRITE_BYTES_PER_SECOND = 0.05, 100e6


@dataclass(frozen=True)
class State:
    """A training as it was after a step: plain values by name, and arrays by name.

    Values: `step`, `epoch` (those done), `in_epoch` (steps of the next one), `examples` (that those have trained, each
    step a global batch), `best` ({metric: value}, or null), and others. Arrays are named `GROUP/...`, in order.
    """

    values: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def group(self, name: str) -> list[np.ndarray]:
        """The arrays of a group, in order."""
        return [array for key, array in self.arrays.items() if key.startswith(f"{name}/")]

    @property
    def kinds(self) -> dict[str, tuple[str, Sequence[int]]]:
        """The types and shapes of its arrays."""
        return {key: (str(array.dtype), array.shape) for key, array in self.arrays.items()}

    def write(self, file: Any) -> None:
        """Writes its arrays as NumPy's archive: their bytes where NumPy has no name for a type, as for bfloat16."""
        storable = {
            key: array if array.dtype.isbuiltin == 1 else np.frombuffer(array.tobytes(), np.uint8)
            for key, array in self.arrays.items()
        }
        np.savez(file, **storable)  # type: ignore[arg-type] # No array is called allow_pickle.

    @classmethod
    def read(cls, values: dict[str, Any], kinds: Mapping[str, tuple[str, Sequence[int]]], data: bytes) -> "State":
        """Returns the state of these values and of arrays of these kinds in an archive."""
        arrays = {}
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            for key, (kind, shape) in kinds.items():
                array = archive[key]
                of_bytes = str(array.dtype) != kind
                arrays[key] = np.frombuffer(array.tobytes(), np.dtype(kind)).reshape(shape) if of_bytes else array
        return cls(values, arrays)

    @property
    def name(self) -> str:
        """The name of its files: later states come later in the alphabet."""
        return f"step-{self.values['step']:010d}-{self.values['epoch']:06d}"


def grouped(name: str, arrays: Sequence[np.ndarray | float]) -> dict[str, np.ndarray]:
    """Arrays by name, as "model/00000", for `State.arrays`."""
    return {f"{name}/{number:05d}": np.asarray(array) for number, array in enumerate(arrays)}


# Gives every process the first one's state; all of them call it together.
OnAll: TypeAlias = Callable[[State | None], State | None]


@dataclass(eq=False)
class Checkpointer:
    """The checkpoints of one run in a folder, or on TensorFlow's file systems, written by a thread of its own.

    The training begins with `state`, and ends when `leave` says so.
    """

    kept: Checkpoints
    emit: Emit
    state: State | None = None
    leave: Callable[[], bool] = bool
    # What each of them tells beside the state.
    about: Mapping[str, Any] = field(default_factory=dict)
    divergence_factor: float = math.inf
    rate_scale: float = 1.0
    # Of the time since the last one, that those after each epoch may take.
    share: float | None = None

    def __post_init__(self) -> None:
        self._folder = str(self.kept.folder)
        # What is being written and what waits, and whether they were written; and whether one was late.
        self._writer, self._handed_over, self._late = ThreadPoolExecutor(1), list[tuple[State, Future[bool]]](), False
        # How long the last one took, with what it took to gather it; and why it could not be written, told once.
        self._seconds: float | None = None
        self._problem: str | None = None
        # Values of the metric that decides which checkpoint is kept, the best among them, once they are asked for.
        self._bests: list[float] | None = None

    def check(self) -> None:
        """Refuses a folder that cannot be written to, before training counts on it."""
        probe = posixpath.join(self._folder, f".probe-{uuid.uuid4().hex}")
        try:
            files.make_folder(self._folder)
            files.write(probe, lambda file: file.write(b"probe"))
            files.remove(probe)
        except OSError as error:
            expected = f"Expected to be able to write checkpoints to {self._folder}, received: {_reason(error)}."
            raise TrainingError(f"{expected} Try checkpoint.folder=..., or more space.") from error

    def write(self, state: State, wait: bool = False, gathered: float = 0.0) -> bool:
        """Hands `state`, gathered in so many seconds, to the writer; with `wait`, returns if it was written."""
        # One can wait while another is written. A later one takes its place, unless it was the best.
        under_way = [one for one in self._handed_over if not one[1].done()]
        if len(under_way) > 1:
            (_, first), (left_out, waiting) = under_way
            if left_out.values["best"]:
                futures.wait([first])
            elif waiting.cancel() and not self._late:
                self._late, step = True, left_out.values["step"]
                late = "Checkpoints take longer to write than training takes from one to the next: that of step"
                self.emit(Warned(f"{late} {step} was left out for a later one. Try fewer of them."))
        writing = self._writer.submit(self._write, state, gathered)
        self._handed_over = [*(one for one in under_way if not one[1].done()), (state, writing)]
        return not wait or writing.result()

    def expected_seconds(self, size: int) -> float:
        """Returns seconds to write a state of `size` bytes: as the last one took; for ever while that is written."""
        if self._handed_over and not self._handed_over[-1][1].done():
            return math.inf
        return WRITE_SECONDS + size / WRITE_BYTES_PER_SECOND if self._seconds is None else self._seconds

    def wait(self) -> None:
        """Returns once nothing is being written."""
        futures.wait([writing for _, writing in self._handed_over])

    def last(self, good: Callable[[Mapping[str, Any]], bool] = bool) -> State | None:
        """The last whole checkpoint whose values are `good`; of each that cannot be read a warning says why."""
        for name in sorted(self._names(), reverse=True):
            try:
                values = self._manifest(name)
                if values["format"] != FORMAT:
                    raise ValueError(f"its format is {values['format']}, and this program reads {FORMAT}")
                if not good(values):
                    continue
                data = files.read(self._path(values["archive"]))
                if hashlib.sha256(data).hexdigest() != values["sha256"]:
                    raise ValueError(f"{values['archive']} is not what was written: it was cut short or changed")
                return State.read(values, values["arrays"], data)
            except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
                passed_over = f"The checkpoint {self._path(name)} was passed over for the one before"
                self.emit(Warned(f"{passed_over}: {_reason(error)}."))
        return None

    def is_best(self, value: float) -> bool:
        """True if a value of the metric that decides which checkpoint is kept is better than all before."""
        if self._bests is None:
            self._bests = [best for best in map(self._best_of, self._names()) if best is not None]
        sign = 1 if self.kept.best_is == "max" else -1
        best = bool(np.isfinite(value)) and all(sign * value > sign * other for other in self._bests)
        self._bests += [value] if best else []
        return best

    def drop_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, which a training that went back has not made."""
        for name in filter(lambda name: int(name.split("-")[1]) > step, self._names()):
            self._remove(name)

    def _write(self, state: State, gathered: float) -> bool:
        before, self._problem = self._problem, None
        try:
            self._seconds = self._write_one(state) + gathered
        except BaseException as error:
            self._problem = _reason(error)
            if self._problem != before:
                failed = f"The checkpoint of step {state.values['step']} could not be written to {self._folder}"
                self.emit(Warned(f"{failed}: {self._problem}. Those before it are still there, and more are tried."))
        return self._problem is None

    def _write_one(self, state: State) -> float:
        began, archive, digest = time.perf_counter(), f"{state.name}-{uuid.uuid4().hex[:8]}.npz", hashlib.sha256()
        files.make_folder(self._folder)

        def fill(file: IO[bytes]) -> None:
            def write(data: Any) -> int:
                digest.update(data)
                file.write(data)
                return memoryview(data).nbytes

            # It cannot seek, so that what passes is the file; what has no `read` is a path to NumPy.
            state.write(SimpleNamespace(write=write, flush=bool, read=None))

        weights = (array.astype(np.float32) for array in state.group("trained") if array.dtype.kind not in "biu?")
        try:
            files.write(self._path(archive), fill)
            finite = all(np.isfinite(array).all() for array in weights)
            read_by = {"format": FORMAT, "archive": archive, "sha256": digest.hexdigest(), "arrays": state.kinds}
            manifest = json.dumps({**state.values, **read_by, "finite": finite}).encode()
            files.write(self._path(f"{state.name}.json"), lambda file: file.write(manifest))
        except BaseException:
            with contextlib.suppress(OSError):
                files.remove(self._path(archive))
            raise
        self._tidy()
        seconds = time.perf_counter() - began
        self.emit(Checkpoint(state.values["step"], self._path(f"{state.name}.json"), seconds=seconds))
        return seconds

    def _tidy(self) -> None:
        """Leaves the last ones and the best, and no archive that nothing refers to."""
        names = sorted(self._names())
        last = set(names[-self.kept.keep :])
        if self.kept.best:
            scored = {name: value for name in names if (value := self._best_of(name)) is not None}
            choose = max if self.kept.best_is == "max" else min
            last |= {choose(scored, key=scored.__getitem__)} if scored else set()
        for name in set(names) - last:
            self._remove(name)
        archives = {self._manifest(name)["archive"] for name in last}
        for file in files.names(self._folder):
            if file.endswith(".npz") and file not in archives:
                files.remove(self._path(file))

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            archive = self._manifest(name)["archive"]
            for file in (f"{name}.json", archive):
                files.remove(self._path(file))

    def _best_of(self, name: str) -> float | None:
        try:
            value = (self._manifest(name).get("best") or {}).get(self.kept.best)
            return None if value is None else float(value)
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def _names(self) -> list[str]:
        with contextlib.suppress(OSError):
            names = files.names(self._folder)
            return [file.removesuffix(".json") for file in names if file.startswith("step-") and file.endswith(".json")]
        return []

    def _manifest(self, name: str) -> dict[str, Any]:
        return json.loads(files.read(self._path(f"{name}.json")))  # type: ignore[no-any-return]

    def _path(self, name: str) -> str:
        return posixpath.join(self._folder, name)


def _reason(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)

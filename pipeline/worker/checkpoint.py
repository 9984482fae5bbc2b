"""Checkpoints: everything that decides how a training goes on, written beside it, whole or not at all, and verified.

A checkpoint is two files: `NAME-TOKEN.npz`, NumPy's archive of arrays, and `NAME.json`, written last, which says what
the state is, which archive holds its arrays, and the archive's SHA-256. Nothing in either is pickled.
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
from typing import IO, Any, TypeAlias

import numpy as np

from pipeline.data import files
from pipeline.errors import refuse
from pipeline.plan.plan import Checkpoints, Plan
from pipeline.record.events import Checkpoint, Warned
from pipeline.worker.engine import Emit
from pipeline.worker.model_error import TrainingError

FORMAT = 1
# How long a state takes to be written that none was written before, on a slow disk.
WRITE_SECONDS, WRITE_BYTES_PER_SECOND = 0.05, 100e6


@dataclass(frozen=True)
class State:
    """A training as it was after a step: plain values by name, and arrays by name.

    Values: `step` (optimizer steps done), `epoch` (whole epochs done), `in_epoch` (steps of the epoch under way),
    `examples` (that those have trained, each step a global batch), `best` ({metric: value}, or null) and what the
    training adds. Arrays are named `GROUP/...`; those of one group are in order.
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
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return cls(values, {key: _typed(archive[key], *kind) for key, kind in kinds.items()})

    @property
    def name(self) -> str:
        """The name of its files: later states come later in the alphabet."""
        return f"step-{self.values['step']:010d}-{self.values['epoch']:06d}"


def grouped(name: str, arrays: Sequence[np.ndarray | float]) -> dict[str, np.ndarray]:
    """Arrays by name, for `State.arrays`.

    >>> list(grouped("model", [1, 2]))
    ['model/00000', 'model/00001']
    """
    return {f"{name}/{number:05d}": np.asarray(array) for number, array in enumerate(arrays)}


# Gives every process the first one's state; all of them call it together.
OnAll: TypeAlias = Callable[[State | None], State | None]


class Checkpointer:
    """The checkpoints of one run in a folder, local or anything that TensorFlow's file systems reach.

    They are written by a thread of its own. What fails is told at once, as a `warning`, and loses no earlier one.
    """

    def __init__(self, checkpoints: Checkpoints, emit: Emit) -> None:
        assert checkpoints.folder is not None, "the driver names the folder"
        self.kept, self._folder, self._emit = checkpoints, checkpoints.folder, emit
        # What is being written, what waits, and what became of it: whether it was written.
        self._writer, self._handed_over = ThreadPoolExecutor(1), list[tuple[State, Future[bool]]]()
        self._late = False
        # How long the last one took, with what it took to gather it.
        self._seconds: float | None = None
        # Why the last one could not be written, so that one reason is told once.
        self._problem: str | None = None

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
        """Hands `state` to the writer, `gathered` in so many seconds; with `wait`, returns once it is written, and
        whether that worked.

        One can wait while another is written. A later one takes its place, unless it was the best; once that is told.
        """
        under_way = [one for one in self._handed_over if not one[1].done()]
        if len(under_way) > 1:
            (_, first), (left_out, waiting) = under_way
            if left_out.values["best"]:
                futures.wait([first])
            elif waiting.cancel() and not self._late:
                self._late = True
                self._warn(
                    f"Checkpoints take longer to write than training takes from one to the next: that of step "
                    f"{left_out.values['step']} was left out for a later one. Try fewer of them."
                )
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
                self._warn(f"The checkpoint {self._path(name)} was passed over for the one before: {_reason(error)}.")
        return None

    def best(self) -> float | None:
        """The best value so far of the metric that decides which checkpoint is kept."""
        values = [value for value in map(self._best_of, self._names()) if value is not None]
        return None if not values else max(values) if self.kept.best_is == "max" else min(values)

    def is_better(self, value: float, than: float | None) -> bool:
        """True if a value of that metric is better than another."""
        if not np.isfinite(value):
            return False
        return than is None or (value > than if self.kept.best_is == "max" else value < than)

    def drop_after(self, step: int) -> None:
        """Removes the checkpoints of later steps, which a training that went back has not made."""
        for name in self._names():
            if int(name.split("-")[1]) > step:
                self._remove(name)

    def _write(self, state: State, gathered: float) -> bool:
        """Writes a state and returns True; warns and returns False where that fails."""
        before, self._problem = self._problem, None
        try:
            self._seconds = self._write_one(state) + gathered
        except BaseException as error:
            self._problem = _reason(error)
            if self._problem != before:
                self._warn(
                    f"The checkpoint of step {state.values['step']} could not be written to {self._folder}: "
                    f"{self._problem}. Those before it are still there, and more are tried."
                )
        return self._problem is None

    def _write_one(self, state: State) -> float:
        """Writes a state, and returns how many seconds that took."""
        began = time.perf_counter()
        files.make_folder(self._folder)
        archive = f"{state.name}-{uuid.uuid4().hex[:8]}.npz"
        hashed: list[str] = []

        def fill(file: IO[bytes]) -> None:
            through = _Hashing(file)
            state.write(through)
            hashed.append(through.digest.hexdigest())

        weights = (array.astype(np.float32) for array in state.group("trained") if array.dtype.kind not in "biu?")
        try:
            files.write(self._path(archive), fill)
            values = state.values | {
                "format": FORMAT,
                "archive": archive,
                "sha256": hashed[0],
                "arrays": state.kinds,
                "finite": all(np.isfinite(array).all() for array in weights),
            }
            files.write(self._path(f"{state.name}.json"), lambda file: file.write(json.dumps(values).encode()))
        except BaseException:
            with contextlib.suppress(OSError):
                files.remove(self._path(archive))
            raise
        self._tidy()
        seconds = time.perf_counter() - began
        self._emit(Checkpoint(state.values["step"], self._path(f"{state.name}.json"), seconds=seconds))
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
            files.remove(self._path(f"{name}.json"))
            files.remove(self._path(archive))

    def _best_of(self, name: str) -> float | None:
        try:
            value = (self._manifest(name).get("best") or {}).get(self.kept.best)
            return None if value is None else float(value)
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def _names(self) -> list[str]:
        try:
            names = files.names(self._folder)
        except OSError:
            return []
        return [file.removesuffix(".json") for file in names if file.startswith("step-") and file.endswith(".json")]

    def _manifest(self, name: str) -> dict[str, Any]:
        return json.loads(files.read(self._path(f"{name}.json")))  # type: ignore[no-any-return]

    def _path(self, name: str) -> str:
        return posixpath.join(self._folder, name)

    def _warn(self, text: str) -> None:
        self._emit(Warned(text))


class _Hashing(io.RawIOBase):
    """Writes on to a file, hashing what passes; it cannot seek, so that what passes is the file."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.digest = file, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self._file.write(data)
        return len(memoryview(data).cast("B"))


def _typed(array: np.ndarray, kind: str, shape: Sequence[int]) -> np.ndarray:
    if str(array.dtype) == kind:
        return array
    # Registers bfloat16 and the like with NumPy.
    import ml_dtypes  # noqa: F401

    return np.frombuffer(array.tobytes(), np.dtype(kind)).reshape(shape)


def _reason(error: BaseException) -> str:
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def is_good(plan: Plan, values: Mapping[str, Any]) -> bool:
    """True if a checkpoint, by its values, is of a training that had not diverged."""
    loss, first = values["loss"], values["first_loss"]
    return bool(values["finite"]) and (loss is None or loss <= plan.training.divergence_factor * max(1.0, abs(first)))


def check_same_data(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to go on with data that has changed under the same config; other shards are told by their count alone."""
    comparable = then["shards"] == now["shards"]
    if then["build"] != now["build"]:
        # That was asked for.
        return
    others = then["examples"] != now["examples"] or (comparable and then["digest"] != now["digest"])
    expected = f"the data that the checkpoint was trained on, {then['examples']} examples ({then['digest']})"
    received = f"{now['examples']} ({now['digest']}): it has changed since"
    refuse((others, expected, received, "resume=never"), error=TrainingError)


@dataclass(frozen=True)
class Checkpointing:
    """The checkpoints of a training: where they go, the state that it begins with, and whether it is to leave.

    A loss `divergence_factor` times the first one has exploded.
    """

    checkpointer: Checkpointer
    state: State | None = None
    leave: Callable[[], bool] = bool
    divergence_factor: float | None = None
    # What the learning rate is multiplied by; that of a checkpoint may have been another.
    rate_scale: float = 1.0
    # What every checkpoint says of its run: its `data`, and the `learning_rate` that was asked for.
    about: Mapping[str, Any] = field(default_factory=dict)
    # Of the time since the last one, what a checkpoint after each epoch may take.
    share: float | None = None

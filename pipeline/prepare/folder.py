"""The files of a folder of prepared data while it is filled: shards, whole or absent, and facts about them.

Whatever ends a command, the same one goes on from here. A lock keeps a second one out.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from pipeline.data import manifest
from pipeline.data.arrays import split as split_rows
from pipeline.data.manifest import Feature, Manifest, Shard
from pipeline.errors import UserError, refuse
from pipeline.record.log import read_json, write_json, write_whole

HIDDEN = ".prepare"
PARTIAL = ".partial"
MIB = 2**20


@dataclass(frozen=True)
class SourceFacts:
    """A whole shard: its entry in the manifest, why examples were left out, and up to two sizes of its images."""

    shard: Shard
    skipped: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ShardPiece:
    """Records of one file; `rows` has the start of each, its length with its frame, and its label, int64 [records, 3].

    Unless it is `labelled`, the last column says nothing. `broken` has the records that are, and why; `lost` says the
    same of examples of the source that are not among the records.
    """

    path: str
    features: tuple[Feature, ...]
    labelled: bool
    digest: str
    broken: Mapping[int, str] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    index: bytes = b""

    @property
    def rows(self) -> NDArray[np.int64]:
        """The index as an array."""
        return np.frombuffer(self.index, np.int64).reshape(-1, 3)


@dataclass(frozen=True)
class FolderState:
    """The beginning of a folder: the settings, the digest of the source, and the number of shards of each split."""

    asked: Mapping[str, Any]
    digest: str | None = None
    shards: Mapping[str, int] = field(default_factory=dict)
    gathered: int | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None


class Folder:
    """A folder that this process alone fills, from when it is made until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        hidden = path / HIDDEN
        try:
            foreign = path.exists() and not hidden.exists() and any(path.iterdir())
            if foreign and not (path / manifest.FILE).is_file():
                expected = "out to be a folder that is empty, or that this command began"
                raise UserError(expected, f"{path} with other files", f"out={path / 'prepared'}")
            hidden.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            received = f"{path}: {error.strerror or error}"
            raise UserError("out to be a folder that can be written to", received, "out=prepared") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            expected, received = f"{path} to be filled by one command at a time", "one that another is filling"
            raise UserError(expected, received, "again when that has ended, or out=ANOTHER") from error

    def close(self) -> None:
        """Lets go of the folder."""
        os.close(self._lock)

    @property
    def state(self) -> FolderState | None:
        """The state that was written last; None if there is none."""
        return read_json(FolderState, self.path / HIDDEN / "state.json")

    def begin(self, state: FolderState) -> None:
        """Notes what is made here."""
        write_json(self.path / HIDDEN / "state.json", state)

    def manifest(self) -> Manifest | None:
        """The manifest; None if the folder is not finished."""
        if not (self.path / manifest.FILE).is_file():
            return None
        return manifest.load(str(self.path))

    def clear_partial(self) -> None:
        """Removes what a command that was killed left of files and Dask workers."""
        for place in (self.path, self.path / HIDDEN / "pieces"):
            for path in place.glob(f".*{PARTIAL}") if place.is_dir() else ():
                path.unlink(missing_ok=True)
        shutil.rmtree(self.path / HIDDEN / "dask", ignore_errors=True)

    def whole(self, finished: Manifest | None) -> dict[str, SourceFacts]:
        """The shards that are here whole, by file: those whose size is that of their facts."""
        shards = [] if finished is None else [shard for split in finished.splits.values() for shard in split]
        by_file = {shard.file: SourceFacts(shard) for shard in shards}
        for path in sorted((self.path / HIDDEN / "shards").glob("*.json")):
            if (facts := read_json(SourceFacts, path)) is not None:
                by_file[facts.shard.file] = facts
        return {name: facts for name, facts in by_file.items() if self.has(facts.shard)}

    def has(self, shard: Shard) -> bool:
        """True if a shard is here whole, as seen from this machine."""
        return file_bytes(self.path / shard.file) == shard.bytes

    def finish(self, complete: Manifest) -> None:
        """Writes the manifest, which says that all is there, and removes what only the filling needed."""
        write_whole(self.path / manifest.FILE, complete.to_json())
        _sync_folder(self.path)
        for name in ("shards", "pieces", "dask"):
            shutil.rmtree(self.path / HIDDEN / name, ignore_errors=True)
        for name in ("state.json", "workers.log"):
            (self.path / HIDDEN / name).unlink(missing_ok=True)


class Writing:
    """Counts what is written to a file."""

    def __init__(self) -> None:
        self.examples = self.bytes = 0
        # Why examples were left out, and the sizes of images.
        self.skipped: tuple[str, ...] = ()
        self.sizes: tuple[tuple[int, int], ...] = ()
        self._hash, self._classes = hashlib.sha256(), Counter[int]()

    @property
    def sha256(self) -> str:
        """The SHA-256 of all records."""
        return self._hash.hexdigest()

    def write(self, file: BinaryIO, record: bytes, label: int | None) -> None:
        """Writes one record."""
        file.write(record)
        self._hash.update(record)
        self.examples += 1
        self.bytes += len(record)
        if label is not None:
            self._classes[label] += 1

    def facts(self, name: str) -> SourceFacts:
        """The facts of the file."""
        classes = {str(label): count for label, count in sorted(self._classes.items())}
        return SourceFacts(Shard(name, self.examples, self.bytes, self.sha256, classes), self.skipped, self.sizes)


@contextmanager
def partial(path: Path, facts: Path | None = None) -> Iterator[tuple[BinaryIO, Writing]]:
    """A file that comes to be at `path` once the block has ended without an error, and until then has a hidden name.

    Its facts are written to `facts` before, so that every file that is there has them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A worker that is taken for dead may still write beside the one that has its task now.
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    writing = Writing()
    try:
        with hidden.open("wb", buffering=1 << 20) as file:
            yield file, writing
            file.flush()
            os.fsync(file.fileno())
        if facts is not None:
            facts.parent.mkdir(parents=True, exist_ok=True)
            write_json(facts, writing.facts(path.name))
        hidden.replace(path)
        _sync_folder(path.parent)
    finally:
        hidden.unlink(missing_ok=True)


def piece_path(folder: str, number: int) -> Path:
    """The file that has the facts of a piece, and says that it is there."""
    return Path(folder, HIDDEN, "pieces", f"{number:05d}.msgpack")


def write_piece(folder: str, number: int, pieces: Mapping[str, ShardPiece]) -> None:
    """Notes the parts of a piece that is whole, by split."""
    with partial(piece_path(folder, number)) as (file, _):
        file.write(msgspec.msgpack.encode(pieces))


def read_piece(folder: str, number: int) -> dict[str, ShardPiece]:
    """The parts of a piece by split."""
    return msgspec.msgpack.decode(piece_path(folder, number).read_bytes(), type=dict[str, ShardPiece])


def log(folder: str) -> Path:
    """The file into which Dask workers of this machine print."""
    return Path(folder, HIDDEN, "workers.log")


def file_bytes(path: str | Path) -> int | None:
    """The size of a file; None if it cannot be told."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_name(split: str, number: int, shards: int) -> str:
    """The name of a shard.

    >>> file_name("train", 3, 12)
    'train-00003-of-00012.tfrecord'
    """
    return f"{split}-{number:05d}-of-{shards:05d}.tfrecord"


def shard_count(examples: int, total_bytes: int, shard_bytes: float, workers: int | None) -> int:
    """The number of shards of about `shard_bytes`; as many as workers, or a multiple, if there are enough examples.

    >>> shard_count(1_000, total_bytes=250, shard_bytes=100, workers=None)
    3
    >>> shard_count(1_000, total_bytes=250, shard_bytes=100, workers=2)
    4
    >>> shard_count(5, total_bytes=250, shard_bytes=1, workers=2)
    4
    >>> shard_count(1, total_bytes=250, shard_bytes=1, workers=2)
    1
    """
    by_size = max(1, min(examples, int(-(-total_bytes // shard_bytes))))
    if not workers or examples < workers:
        return by_size if not workers else max(1, examples)
    return min(-(-by_size // workers), examples // workers) * workers


def check_shards(examples: int, shards: int | None, workers: int | None) -> None:
    """Refuses more shards or workers than there are training examples. Raises `UserError`."""
    refuse(
        (workers and examples < workers, f"at least one training example for each of {workers} workers", examples,
         f"workers={examples}"),
        (shards and examples < shards, f"at least one training example in each of {shards} shards", examples,
         f"shards={examples // (workers or 1) * (workers or 1)}"),
    )  # fmt: skip


def orders(
    whole: NDArray[np.int64], groups: NDArray[np.int64] | None, fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows that train and those that are held out, each in the order in which they fill shards.

    `whole` are the rows that can be used, `groups` the class of each of these, where there are classes.

    >>> train, validation = orders(np.arange(10), None, fraction=0.2, seed=0)
    >>> len(train), len(validation), len({*train, *validation})
    (8, 2, 10)
    """
    if not fraction:
        return shuffled(whole, seed, 0), whole[:0]
    train, held_out = split_rows(np.zeros(len(whole), np.int64) if groups is None else groups, fraction, seed)
    return whole[train], whole[held_out]


def shuffled(rows: NDArray[np.int64], seed: int, use: int) -> NDArray[np.int64]:
    """The rows in an order that the seed decides, and what they are used for."""
    return np.random.default_rng([seed, use]).permutation(rows)

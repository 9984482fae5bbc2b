"""The files of a folder of prepared data while it is filled: shards, whole or absent, and facts about them.

Whatever ends a command, the same one goes on from here. A lock keeps a second one out.
"""

import fcntl
import hashlib
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipeline.data import records
from pipeline.data.records import Feature, Manifest, Shard
from pipeline.errors import UserError
from pipeline.record.log import read_json, write_json, write_whole

HIDDEN = ".prepare"
PARTIAL = ".partial"
# The file into which Dask workers of this machine print.
PRINTED = f"{HIDDEN}/workers.log"


@dataclass(frozen=True)
class SourceFacts:
    """A whole shard: its entry in the manifest, why examples were left out, and up to two sizes of its images."""

    shard: Shard
    skipped: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class ShardPiece:
    """Records of one file; `index` has the start of each, its length with its frame, and its label, int64.

    `broken` has the records that are, and why; `lost` says the same of examples that are not among the records.
    """

    path: str
    features: tuple[Feature, ...]
    digest: str
    broken: Mapping[int, str] = field(default_factory=dict)
    lost: tuple[str, ...] = ()
    index: bytes = b""

    @property
    def rows(self) -> NDArray[np.int64]:
        """The index as an array, int64 [records, 3]."""
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
        self.path, self.hidden = path, path / HIDDEN
        try:
            foreign = path.exists() and not self.hidden.exists() and any(path.iterdir())
            if foreign and not (path / records.MANIFEST).is_file():
                expected = "out to be a folder that is empty, or that this command began"
                raise UserError(expected, f"{path} with other files", f"out={path / 'prepared'}")
            self.hidden.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.hidden / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            received = f"{path}: {error.strerror or error}"
            raise UserError("out to be a folder that can be written to", received, "out=prepared") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            expected, received = f"{path} to be filled by one command at a time", "one that another is filling"
            raise UserError(expected, received, "again when that has ended, or out=ANOTHER") from error
        self.state = read_json(FolderState, self.hidden / "state.json")

    def close(self) -> None:
        """Lets go of the folder."""
        os.close(self._lock)

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest; None if the folder was not finished."""
        return records.load_manifest(str(self.path)) if (self.path / records.MANIFEST).is_file() else None

    def begin(self, state: FolderState) -> None:
        """Notes what is made here."""
        write_json(self.hidden / "state.json", state)

    def whole(self) -> dict[str, SourceFacts]:
        """The shards that are here whole, by file. Removes what a command that was killed left beside them."""
        for place in (self.path, self.hidden / "pieces"):
            for path in place.glob(f".*{PARTIAL}"):
                path.unlink(missing_ok=True)
        shutil.rmtree(self.hidden / "dask", ignore_errors=True)
        facts = [
            SourceFacts(one) for split in (self.manifest.splits if self.manifest else {}).values() for one in split
        ]
        noted = (read_json(SourceFacts, path) for path in (self.hidden / "shards").glob("*.json"))
        by_file = {one.shard.file: one for one in (*facts, *noted) if one is not None}
        return {name: one for name, one in by_file.items() if self.has(one.shard)}

    def has(self, shard: Shard) -> bool:
        """True if a shard of its size is here, as seen from this machine."""
        return file_bytes(self.path / shard.file) == shard.bytes

    def finish(self, complete: Manifest) -> None:
        """Writes the manifest, which says that all is there, and removes what only the filling needed."""
        write_whole(self.path / records.MANIFEST, complete.to_json())
        _sync_folder(self.path)
        for name in ("shards", "pieces", "dask"):
            shutil.rmtree(self.hidden / name, ignore_errors=True)
        for name in ("state.json", "workers.log"):
            (self.hidden / name).unlink(missing_ok=True)


class Writing:
    """A file that is written record by record, and what is counted of it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.examples, self.bytes = file, 0, 0
        # Why examples were left out, and the sizes of images.
        self.skipped: list[str] = []
        self.sizes: set[tuple[int, int]] = set()
        self._hash, self._classes = hashlib.sha256(), Counter[int]()

    def write(self, record: bytes, label: int | None = None) -> None:
        """Writes one record."""
        self._file.write(record)
        self._hash.update(record)
        self.examples += 1
        self.bytes += len(record)
        if label is not None:
            self._classes[label] += 1

    def facts(self, name: str) -> SourceFacts:
        """The facts of the file."""
        classes = {str(label): count for label, count in sorted(self._classes.items())}
        shard = Shard(name, self.examples, self.bytes, self._hash.hexdigest(), classes)
        return SourceFacts(shard, tuple(self.skipped), tuple(sorted(self.sizes)[:2]))


@contextmanager
def partial(path: Path, facts: Path | None = None) -> Iterator[Writing]:
    """A file that comes to be at `path` once the block has ended without an error, and until then has a hidden name.

    Its facts are written to `facts` before, so that every file that is there has them.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A worker that is taken for dead may still write beside the one that has its task now.
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex}{PARTIAL}")
    try:
        with hidden.open("wb", buffering=1 << 20) as file:
            writing = Writing(file)
            yield writing
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
    """The file that has the parts of a piece by split, and says that it is there."""
    return Path(folder, HIDDEN, "pieces", f"{number:05d}.msgpack")


def file_bytes(path: str | Path) -> int | None:
    """The size of a file; None if it cannot be told."""
    with suppress(OSError):
        return os.stat(path).st_size
    return None


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_name(split: str, number: int, shards: int) -> str:
    """The name of a shard, as train-00003-of-00012.tfrecord."""
    return f"{split}-{number:05d}-of-{shards:05d}.tfrecord"

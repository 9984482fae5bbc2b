"""What a folder of prepared data holds while it is made: shards, whole or absent, and what is known of them.

Whatever ends a command, the same one finds here what is done. A lock keeps a second one out.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pipeline.data import manifest
from pipeline.data.manifest import Feature, Manifest, Shard
from pipeline.errors import UserError
from pipeline.record.log import write_whole

HIDDEN = ".prepare"
PARTIAL = ".partial"


@dataclass(frozen=True)
class Facts:
    """What is known of a whole shard: what the manifest says, what was left out, and up to two sizes of its images."""

    shard: Shard
    skipped: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Piece:
    """Records of one file: where each starts and how long it is with its frame, and its label, int64 [records, 3].

    Where it is not `labelled`, the last column says nothing. `broken` has the records that are, and why; `lost` says
    the same of examples of the source that are not among the records.
    """

    path: str
    index: NDArray[np.int64]
    features: tuple[Feature, ...]
    labelled: bool
    digest: str
    broken: Mapping[int, str]
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """What a folder was begun with: what was asked for, the digest of the source, and how many shards a split has."""

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
                raise UserError(
                    "out to be a folder that is empty, or that this command began",
                    f"{path} with other files",
                    f"out={path / 'prepared'}",
                )
            hidden.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(hidden / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise UserError(
                "out to be a folder that can be written to", f"{path}: {error.strerror or error}", "out=prepared"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise UserError(
                f"{path} to be filled by one command at a time",
                "one that another is filling",
                "again when that has ended, or out=ANOTHER",
            ) from error

    def close(self) -> None:
        """Lets go of the folder."""
        os.close(self._lock)

    @property
    def state(self) -> State | None:
        """What was begun here; None where nothing was."""
        try:
            values = json.loads((self.path / HIDDEN / "state.json").read_text())
            names = values["class_names"]
            return State(**values | {"class_names": None if names is None else tuple(names)})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def begin(self, state: State) -> None:
        """Notes what is made here."""
        write_whole(self.path / HIDDEN / "state.json", json.dumps(dataclasses.asdict(state)))

    def manifest(self) -> Manifest | None:
        """What the folder says of itself; None where it is not finished."""
        if not (self.path / manifest.FILE).is_file():
            return None
        return manifest.load(str(self.path), lambda path: Path(path).read_text())

    def clear_partial(self) -> None:
        """Removes what a command that was killed left of files and Dask workers."""
        for place in (self.path, self.path / HIDDEN / "pieces"):
            for path in place.glob(f".*{PARTIAL}") if place.is_dir() else ():
                path.unlink(missing_ok=True)
        shutil.rmtree(self.path / HIDDEN / "dask", ignore_errors=True)

    def whole(self, made: Manifest | None) -> dict[str, Facts]:
        """The shards that are here whole, by file: those whose size is what is known of them."""
        known = {} if made is None else {shard.file: Facts(shard) for split in made.splits.values() for shard in split}
        for path in sorted((self.path / HIDDEN / "shards").glob("*.json")):
            facts = read_facts(path)
            if facts is not None:
                known[facts.shard.file] = facts
        return {name: facts for name, facts in known.items() if _size(self.path / name) == facts.shard.bytes}

    def finish(self, made: Manifest) -> None:
        """Writes the manifest, which says that all is there, and removes what only the making needed."""
        write_whole(self.path / manifest.FILE, made.to_json())
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
        """Of what has been written."""
        return self._hash.hexdigest()

    def write(self, file: BinaryIO, record: bytes, label: int | None) -> None:
        """Writes one record."""
        file.write(record)
        self._hash.update(record)
        self.examples += 1
        self.bytes += len(record)
        if label is not None:
            self._classes[label] += 1

    def facts(self, name: str) -> Facts:
        """What is known of the file."""
        classes = {str(label): count for label, count in sorted(self._classes.items())}
        made = Shard(name, self.examples, self.bytes, self.sha256, classes)
        return Facts(made, self.skipped, self.sizes)


@contextmanager
def partial(path: Path, facts: Path | None = None) -> Iterator[tuple[BinaryIO, Writing]]:
    """A file that comes to be at `path` once the block has ended without an error, and until then has a hidden name.

    What is known of it is written to `facts` before, so that it is known of every file that is there.
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
            write_whole(facts, json.dumps(dataclasses.asdict(writing.facts(path.name))))
        hidden.replace(path)
        _sync_folder(path.parent)
    finally:
        hidden.unlink(missing_ok=True)


def facts_path(folder: str, name: str) -> Path:
    """Where it is written what is known of a shard."""
    return Path(folder, HIDDEN, "shards", f"{name}.json")


def read_facts(path: Path) -> Facts | None:
    """What is known of a shard; None where that cannot be read."""
    try:
        values = json.loads(path.read_text())
        sizes = tuple((height, width) for height, width in values["sizes"])
        return Facts(Shard(**values["shard"]), tuple(values["skipped"]), sizes)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def piece_path(folder: str, number: int, split: str) -> Path:
    """Where the records of a piece are, where they are copied."""
    return Path(folder, HIDDEN, "pieces", f"{number:05d}-{split}.tfrecord")


def piece_facts(folder: str, number: int) -> Path:
    """Where it is written what is known of a piece."""
    return Path(folder, HIDDEN, "pieces", f"{number:05d}.json")


def write_piece(folder: str, number: int, pieces: Mapping[str, Piece]) -> None:
    """Notes a piece that is whole: its index first, and what says that it is there last."""
    path = piece_facts(folder, number)
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {}
    for split, piece in pieces.items():
        with partial(path.with_name(f"{number:05d}-{split}.npy")) as (file, _):
            np.save(file, piece.index, allow_pickle=False)
        values[split] = {name: value for name, value in vars(piece).items() if name not in ("index", "features")} | {
            "features": [dataclasses.asdict(feature) for feature in piece.features],
            "broken": {str(row): why for row, why in piece.broken.items()},
        }
    with partial(path) as (file, _):
        file.write(json.dumps(values).encode())


def read_piece(path: str) -> dict[str, Piece]:
    """The parts of a piece, from where it is noted."""
    found = {}
    for split, values in json.loads(Path(path).read_text()).items():
        index = np.load(path.removesuffix(".json") + f"-{split}.npy", allow_pickle=False)
        features = tuple(Feature(**feature | {"shape": tuple(feature["shape"])}) for feature in values.pop("features"))
        broken = {int(row): why for row, why in values.pop("broken").items()}
        lost = tuple(values.pop("lost"))
        found[split] = Piece(index=index, features=features, broken=broken, lost=lost, **values)
    return found


def log(folder: str) -> Path:
    """What Dask workers of this machine print."""
    return Path(folder, HIDDEN, "workers.log")


def missing(folder: str, facts: Sequence[Facts]) -> list[str]:
    """Shards that are not where they were made, as seen from here."""
    return [fact.shard.file for fact in facts if _size(Path(folder, fact.shard.file)) != fact.shard.bytes]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

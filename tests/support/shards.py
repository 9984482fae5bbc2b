"""Writes small folders of prepared data whose labels are serial numbers, and breaks them."""

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipeline.data import records
from pipeline.data.records import Feature, Manifest, Shard

# Bytes of a record: they are all of one size as long as labels are below 128.
VALUES = 4


def write(folder: Path, train: Sequence[int], validation: Sequence[int] = (), num_classes: int | None = None) -> Path:
    """TFRecord files of so many examples; labels count on, x is float32 [4], a hundredth of them."""
    folder.mkdir(parents=True, exist_ok=True)
    serial, splits = 0, {}
    for split, sizes in (("train", train), ("validation", validation)):
        shards = []
        for number, size in enumerate(sizes):
            made = b"".join(record(serial + place) for place in range(size))
            serial += size
            path = folder / f"{split}-{number:05d}-of-{len(sizes):05d}.tfrecord"
            path.write_bytes(made)
            shards.append(Shard(path.name, size, len(made), hashlib.sha256(made).hexdigest()))
        splits[split] = tuple(shards)
    features = (Feature("x", (VALUES,), "float32", "floats"), Feature("y", (), "int32", "ints"))
    (folder / "manifest.json").write_text(Manifest(features, splits, num_classes).to_json())
    return folder


def record(label: int, x: np.ndarray | None = None) -> bytes:
    x = np.full(VALUES, label, np.float32) / 100 if x is None else x
    return records.framed(records.example({"x": x, "y": np.array(label)}))


def file_of(folder: Path, number: int) -> Path:
    return sorted(folder.glob("train-*.tfrecord"))[number]


def put(folder: Path, number: int, place: int, made: bytes) -> None:
    """Puts a record in place of that at `place` of a training file, as if it had been prepared so."""
    path = file_of(folder, number)
    frames, data = _frames(path), path.read_bytes()
    path.write_bytes(data[: frames[place].start] + made + data[frames[place].stop :])
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["splits"]["train"][number]["bytes"] = path.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))


def flip(folder: Path, number: int, *places: tuple[int, int]) -> None:
    """Flips a bit in records of a training file: (record, byte), of which byte 0 is the first of its length."""
    path = file_of(folder, number)
    frames, data = _frames(path), bytearray(path.read_bytes())
    for place, byte in places:
        data[frames[place].start + byte] ^= 1
    path.write_bytes(data)


def cut(folder: Path, number: int, place: int, byte: int = 5) -> None:
    """Cuts a training file off within a record, or at its start with `byte` 0."""
    path = file_of(folder, number)
    path.write_bytes(path.read_bytes()[: _frames(path)[place].start + byte])


def _frames(path: Path) -> list[records.Frame]:
    return list(records.frames(io.BytesIO(path.read_bytes())))

"""Turns the data of a data set's function into rows, each of which can be made a record, or into a stream of examples.

Called in a Dask worker. TensorFlow is imported where a person's function has done so, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from pipeline.data import files, manifest, pictures, records
from pipeline.data.arrays import Nested
from pipeline.data.errors import DataError
from pipeline.data.examples import Examples, Segment, leaves
from pipeline.data.manifest import Feature
from pipeline.errors import first_of
from pipeline.prepare import values
from pipeline.prepare.folder import ShardPiece, file_bytes
from pipeline.prepare.values import LOOKED_AT, MOST, Example, Labels, in_words, kind_of

if TYPE_CHECKING:
    import tensorflow as tf

MOST_OPEN = 64
# Rows that are taken out of arrays at a time.
BLOCK = 256


class Rows(Protocol):
    """One part of a source: so many examples, of which any can be made a record.

    `labels` are int64 [examples] where each example has one whole number for a label, and None otherwise. `broken` has
    the rows that are known to be broken, and why; others may turn out to be when their record is made. `nbytes` is
    about what all records come to, and `digest` names the content.
    """

    count: int
    nbytes: int
    features: tuple[Feature, ...]
    labels: Labels | None
    broken: Mapping[int, str]
    digest: str

    def make(self, chosen: NDArray[np.int64]) -> Iterator[Example]:
        """The chosen rows as records, in this order."""


class Arrays(Rows):
    """Arrays with the examples along the first axis, in nested structures: `(x, y)` or `(x, y, weight)`."""

    def __init__(self, part: Nested[np.ndarray | float], split: str, classes: int | None) -> None:
        self._split = split
        self._arrays = {name: np.asarray(leaf) for name, leaf in values.flat(part, split).items()}
        lengths = {name: len(array) if array.ndim else -1 for name, array in self._arrays.items()}
        if len(set(lengths.values())) != 1 or -1 in lengths.values():
            listed = [f"{name} of shape {array.shape}" for name, array in self._arrays.items()]
            shapes = first_of(listed, between=", ", last=" and")
            expected = "arrays with as many examples along their first axis"
            raise DataError(expected, f"for {split}: {shapes}", "numpy.asarray around lists of numbers")
        self.count = next(iter(lengths.values()))
        self.features = tuple(values.feature(name, array, array.shape[1:]) for name, array in self._arrays.items())
        self.labels = values.labels_of(self._arrays.get("y"))
        self.broken = self._broken(classes)
        # A whole number takes a byte or two, whatever its array has for it.
        sizes = [
            2 * array.size if one.stored == "ints" else array.nbytes
            for one, array in zip(self.features, self._arrays.values(), strict=True)
        ]
        self.nbytes = sum(sizes) + self.count * (records.HEADER + records.FOOTER + 16 * len(sizes))
        self.digest = self._digest()

    def make(self, chosen: NDArray[np.int64]) -> Iterator[Example]:
        """The chosen rows as records, in this order."""
        for start in range(0, len(chosen), BLOCK):
            block = chosen[start : start + BLOCK]
            columns = {one.name: (self._arrays[one.name][block], one.stored) for one in self.features}
            for place, row in enumerate(block.tolist()):
                data = records.example(
                    {name: values.stored(np.asarray(array[place]), kind) for name, (array, kind) in columns.items()}
                )
                yield Example(records.framed(data), None if self.labels is None else int(self.labels[row]))

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for name, array in self._arrays.items():
            digest.update(repr((name, array.dtype.str, array.shape)).encode())
            for start in range(0, self.count, LOOKED_AT):
                digest.update(np.ascontiguousarray(array[start : start + LOOKED_AT]).data)
        return digest.hexdigest()[:16]

    def _broken(self, classes: int | None) -> dict[int, str]:
        whys: dict[int, str] = {}
        for name, array in self._arrays.items():
            for start in range(0, self.count, LOOKED_AT):
                block = array[start : start + LOOKED_AT]
                if array.dtype.kind == "f":
                    bad, why = ~np.isfinite(block), f"has NaN or infinity in {name}"
                elif array.dtype == np.uint64:
                    bad, why = block > MOST, f"has a number in {name} that int64 does not hold"
                else:
                    break
                if bad.any():
                    lost = np.flatnonzero(bad.reshape(len(block), -1).any(axis=1))
                    whys |= {int(start + row): why for row in lost}
        if self.labels is not None:
            wrong = (self.labels < 0) | (self.labels >= (MOST if classes is None else classes))
            whys |= {int(row): str(values.wrong_label(int(self.labels[row]), classes)) for row in np.flatnonzero(wrong)}
        return {row: f"example {row} of {self._split} {whys[row]}" for row in sorted(whys)}


class Images(Rows):
    """Files of images with a label each, which are stored as they are."""

    def __init__(self, part: Examples, classes: int | None) -> None:
        self._paths = [str(path) for path in part.raw["path"]]
        self._classes = labels = np.asarray(part.raw["label"]).astype(np.int64)
        sizes = [file_bytes(path) for path in self._paths]
        self.count = len(self._paths)
        self.nbytes = sum((size or 0) + records.HEADER + records.FOOTER + 32 for size in sizes)
        # Where the finished example says so, the channels that images are made with.
        shape = getattr(leaves(part.spec)[0], "shape", None) if part.spec is not None else None
        channels = int(shape[-1]) if shape is not None and len(shape) == 3 and shape[-1] else None
        self.features = (Feature("x", (None, None, channels), "float32", "image"), Feature("y", (), "int32", "ints"))
        self.labels = labels
        whys = (
            values.wrong_label(label, classes) or (None if size is not None else "cannot be read (no such file)")
            for label, size in zip(labels.tolist(), sizes, strict=True)
        )
        self.broken = {row: f"{self._paths[row]} {why}" for row, why in enumerate(whys) if why}
        self.digest = digest_of(json.dumps([self._paths, sizes, labels.tolist()]))

    def make(self, chosen: NDArray[np.int64]) -> Iterator[Example]:
        """The chosen rows as records, in this order."""
        for row in chosen.tolist():
            path, label = self._paths[row], int(self._classes[row])
            try:
                data = Path(path).read_bytes()
                why = pictures.fault(data)
            except OSError as error:
                why = f"cannot be read ({error.strerror or error})"
            if why:
                yield Example(None, label, f"{path} {why}")
                continue
            from PIL import Image

            with Image.open(io.BytesIO(data)) as image:
                size = image.height, image.width
            yield Example(records.framed(records.example({"x": data, "y": np.asarray(label)})), label, size=size)


class Records(Rows):
    """Records that are in files already, one piece after the other, and are copied."""

    def __init__(self, pieces: Sequence[ShardPiece]) -> None:
        self._pieces = [piece for piece in pieces if piece.index]
        self._starts = np.cumsum([0, *(len(piece.rows) for piece in self._pieces)])
        self._index = np.concatenate([np.zeros((0, 3), np.int64), *(piece.rows for piece in self._pieces)])
        self.count = len(self._index)
        self.nbytes = int(self._index[:, 1].sum())
        self.features = self._pieces[0].features if self._pieces else ()
        for piece in self._pieces:
            if piece.features != self.features:
                received = f"{in_words(self.features)} and {in_words(piece.features)}"
                instead = "the same shapes and types in every example"
                raise DataError("examples that are all alike", received, instead)
        labelled = bool(self._pieces) and all(piece.labelled for piece in self._pieces)
        self.labels = self._index[:, 2] if labelled else None
        starts = zip(self._starts.tolist(), self._pieces, strict=False)
        self.broken = {start + row: why for start, piece in starts for row, why in piece.broken.items()}
        self.digest = digest_of("".join(piece.digest for piece in self._pieces))

    def make(self, chosen: NDArray[np.int64]) -> Iterator[Example]:
        """The chosen rows as records, in this order."""
        opened: dict[int, BinaryIO] = {}
        try:
            for row in chosen.tolist():
                place = int(np.searchsorted(self._starts, row, "right")) - 1
                if place not in opened:
                    if len(opened) >= MOST_OPEN:
                        opened.pop(next(iter(opened))).close()
                    opened[place] = files.opened(self._pieces[place].path)
                offset, length, label = self._index[row].tolist()
                opened[place].seek(offset)
                data = opened[place].read(length)
                class_label = label if self.labels is not None else None
                name = f"{self._pieces[place].path} record {row - int(self._starts[place])}"
                if records.unframed(data) is None:
                    yield Example(None, class_label, f"{name} has a wrong checksum")
                else:
                    yield Example(data, class_label)
        finally:
            for file in opened.values():
                file.close()


def digest_of(text: str) -> str:
    """A short name for a text's content."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def parts_of(data: object) -> tuple[object, object]:
    """`(train, validation)` of what a function returned; an iterator is all for training. Raises `DataError`."""
    if isinstance(data, tuple | list) and len(data) == 2:
        return data[0], data[1]
    if hasattr(data, "__next__") or _is_dataset(data):
        return data, None
    expected = "data.build to return (train, validation), or an iterator of (x, y)"
    raise DataError(expected, kind_of(data), "returning (train, None)")


def is_in_files(part: object) -> TypeGuard[Examples]:
    """True for records that are in files already, prepared or of another kind."""
    return isinstance(part, Examples) and part.in_files


def is_prepared(path: str) -> bool:
    """True for a shard of prepared data, which a manifest beside it names."""
    folder, _, name = path.rpartition("/")
    try:
        files.size_of(f"{folder}/{manifest.FILE}")
    except OSError:
        return False
    description = manifest.load(folder, files.read)
    return any(shard.file == name for shards in description.splits.values() for shard in shards)


def is_stream(part: object) -> bool:
    """True for examples that come one after another."""
    if isinstance(part, Examples):
        return part.in_files or (not part.image_files and (part.parse or part.decode) is not None)
    arrays = isinstance(part, tuple | list | Mapping) or hasattr(part, "__array__")
    return not arrays and (hasattr(part, "__iter__") or callable(part))


def rows_of(part: object, split: str, classes: int | None) -> Rows:
    """A part that is neither a stream nor in files, as rows. Raises `DataError`."""
    if isinstance(part, Examples) and part.image_files:
        return Images(part, classes)
    if isinstance(part, Examples):
        arrays = Arrays(part.raw, split, classes)
        arrays.broken = {**arrays.broken, **_whys(part)}
        return arrays
    if not isinstance(part, tuple | list) or len(part) not in (2, 3):
        expected = f"data.build to return (x, y) or (x, y, weight) for {split}, or an iterator of these"
        raise DataError(expected, kind_of(part), "(x, y), (x_validation, y_validation)")
    return Arrays(tuple(part), split, classes)


def examples_of(part: object) -> Iterator[object]:
    """The examples of a stream, in nested structures of arrays."""
    if isinstance(part, Examples) or _is_dataset(part):
        dataset: tf.data.Dataset = _dataset_of(part) if isinstance(part, Examples) else part
        if int(dataset.cardinality()) == -1:
            raise DataError("a data set of single examples that ends", "one without end", "dataset.take(examples)")
        return iter(dataset.as_numpy_iterator())
    stream = part() if callable(part) and not hasattr(part, "__iter__") else part
    return iter(cast("Iterable[object]", stream))


def _is_dataset(part: object) -> TypeGuard[tf.data.Dataset]:
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and isinstance(part, tensorflow.data.Dataset)


def _whys(part: Examples) -> dict[int, str]:
    broken = part.look(part, 0, 1, True) if part.look else []
    return {flaw.first + more: f"{flaw.name} {flaw.why}" for flaw in broken for more in range(flaw.examples)}


def _dataset_of(part: Examples) -> tf.data.Dataset:
    import tensorflow as tf

    from pipeline.worker.data import reading

    as_it_is = tf.autograph.experimental.do_not_convert
    if part.in_files:
        read = reading.raw(dataclasses.replace(part, augment=None), False, 0, reading.Reading())
        assert callable(read), "records are read in order"
        dataset = read(tf.constant(0, tf.int64))
    else:
        dataset = tf.data.Dataset.from_tensor_slices(part.raw)
    if part.parse is not None:
        dataset = dataset.batch(BLOCK).map(as_it_is(part.parse)).unbatch()
    decode = part.decode
    if decode is None:
        return dataset
    return dataset.map(as_it_is(lambda *parsed: decode(parsed if len(parsed) > 1 else parsed[0])))


def piece_of_file(part: Examples, segment: Segment) -> ShardPiece:
    """The records of a file that is prepared already: where each is, its label, and which are broken."""
    folder, _, file_name = segment.path.rpartition("/")
    description = manifest.load(folder, files.read)
    classed = [feature for feature in description.features if feature.name == "y" and values.is_label(feature)]
    whys, index = _whys(dataclasses.replace(part, raw=(segment,))), []
    with files.opened(segment.path) as file:
        for frame in records.frames(file):
            label = 0
            if frame.data is None:
                whys.setdefault(frame.number, f"{segment.path} record {frame.number} {frame.broken}")
            elif classed and frame.number not in whys:
                label = int(records.parsed(frame.data)["y"][0])
            index.append((frame.start, (frame.stop or frame.start) - frame.start, label))
    shards = {shard.file: shard.sha256 for split in description.splits.values() for shard in split}
    return ShardPiece(
        segment.path,
        description.features,
        bool(classed),
        shards.get(file_name, ""),
        {row: why for row, why in whys.items() if row < len(index)},
        tuple(why for row, why in whys.items() if row >= len(index)),
        np.array(index, np.int64).tobytes(),
    )

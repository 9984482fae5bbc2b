"""Turns the data of a data set's function into rows, each of which can be made a record, or into a stream of examples.

Called in a Dask worker. TensorFlow is imported where a person's function has done so, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from pipeline.data import files, manifest, pictures, records
from pipeline.data.arrays import Nested
from pipeline.data.errors import DataError
from pipeline.data.examples import Examples, Segment, leaves
from pipeline.data.manifest import Feature, Manifest
from pipeline.errors import first_of
from pipeline.prepare import values
from pipeline.prepare.folder import ShardPiece, file_bytes
from pipeline.prepare.values import LOOKED_AT, Example, Labels, in_words, kind_of

if TYPE_CHECKING:
    import tensorflow as tf

MOST_OPEN = 64
# Rows that are taken out of arrays at a time.
BLOCK = 256
# What a record's frame takes.
FRAME = records.HEADER + records.FOOTER


@dataclass(frozen=True)
class Rows:
    """One part of a source: so many examples, of which any can be made a record.

    `labels` are int64 [examples] where each example has one whole number for a label, and None otherwise. `broken` has
    the rows that are known to be broken, and why; others may turn out to be when their record is made. `nbytes` is
    about what all records come to, and `digest` names the content. `make` yields rows as records, in their order.
    """

    count: int
    nbytes: int
    features: tuple[Feature, ...]
    labels: Labels | None
    broken: Mapping[int, str]
    digest: str
    make: Callable[[NDArray[np.int64]], Iterator[Example]]

    @property
    def usable(self) -> NDArray[np.int64]:
        """The rows that are not known to be broken."""
        return np.delete(np.arange(self.count), list(self.broken))


def of_arrays(part: Sequence[Nested[np.ndarray | float]], split: str, classes: int | None) -> Rows:
    """Rows of arrays with the examples along the first axis, in nested structures: `(x, y)` or `(x, y, weight)`."""
    arrays = values.flat(part, split)
    lengths = {len(array) if array.ndim else -1 for array in arrays.values()}
    if len(lengths) != 1 or -1 in lengths:
        listed = [f"{name} of shape {array.shape}" for name, array in arrays.items()]
        shapes = first_of(listed, between=", ", last=" and")
        expected = "arrays with as many examples along their first axis"
        raise DataError(expected, f"for {split}: {shapes}", "numpy.asarray around lists of numbers")
    (count,) = lengths
    features = tuple(values.feature(name, array, array.shape[1:]) for name, array in arrays.items())
    labels, digest = values.labels_of(arrays), hashlib.sha256()
    for name, array in arrays.items():
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        for start in range(0, count, LOOKED_AT):
            digest.update(np.ascontiguousarray(array[start : start + LOOKED_AT]).data)
    # A whole number takes a byte or two, whatever its array has for it.
    sizes = [2 * arrays[one.name].size if one.stored == "ints" else arrays[one.name].nbytes for one in features]

    def make(chosen: NDArray[np.int64]) -> Iterator[Example]:
        for start in range(0, len(chosen), BLOCK):
            block = chosen[start : start + BLOCK]
            columns = {name: array[block] for name, array in arrays.items()}
            for place, row in enumerate(block.tolist()):
                record = values.record({name: column[place] for name, column in columns.items()}, features)
                yield Example(record, None if labels is None else int(labels[row]))

    return Rows(
        count,
        sum(sizes) + count * (FRAME + 16 * len(sizes)),
        features,
        labels,
        {row: f"example {row} of {split} {why}" for row, why in sorted(values.faults(arrays, classes).items())},
        digest.hexdigest()[:16],
        make,
    )


def of_images(part: Examples, classes: int | None) -> Rows:
    """Rows of files of images with a label each, which are stored as they are."""
    paths = [str(path) for path in part.raw["path"]]
    labels = np.asarray(part.raw["label"]).astype(np.int64)
    sizes = [file_bytes(path) for path in paths]
    missing = {row: "cannot be read (no such file)" for row, size in enumerate(sizes) if size is None}
    # Where the finished example says so, the channels that images are made with.
    shape = getattr(leaves(part.spec)[0], "shape", None) if part.spec is not None else None
    channels = int(shape[-1]) if shape is not None and len(shape) == 3 and shape[-1] else None

    def make(chosen: NDArray[np.int64]) -> Iterator[Example]:
        from PIL import Image

        for row in chosen.tolist():
            path, label = paths[row], int(labels[row])
            try:
                data = Path(path).read_bytes()
                why = pictures.fault(data)
            except OSError as error:
                why = f"cannot be read ({error.strerror or error})"
            if why:
                yield Example(None, label, f"{path} {why}")
                continue
            with Image.open(io.BytesIO(data)) as image:
                size = image.height, image.width
            yield Example(records.framed(records.example({"x": data, "y": np.asarray(label)})), label, size=size)

    return Rows(
        len(paths),
        sum((size or 0) + FRAME + 32 for size in sizes),
        (Feature("x", (None, None, channels), "float32", "image"), Feature("y", (), "int32", "ints")),
        labels,
        {row: f"{paths[row]} {why}" for row, why in sorted((missing | values.wrong_labels(labels, classes)).items())},
        digest_of(json.dumps([paths, sizes, labels.tolist()])),
        make,
    )


def of_pieces(pieces: Sequence[ShardPiece]) -> Rows:
    """Rows of records that are in files already, one piece after the other, and are copied."""
    pieces = [piece for piece in pieces if piece.index]
    starts = np.cumsum([0, *(len(piece.rows) for piece in pieces)])
    index = np.concatenate([np.zeros((0, 3), np.int64), *(piece.rows for piece in pieces)])
    features = pieces[0].features if pieces else ()
    for piece in pieces:
        if piece.features != features:
            received = f"{in_words(features)} and {in_words(piece.features)}"
            raise DataError("examples that are all alike", received, "the same shapes and types in every example")
    labels = index[:, 2] if pieces and all(piece.labelled for piece in pieces) else None

    def make(chosen: NDArray[np.int64]) -> Iterator[Example]:
        opened: dict[int, BinaryIO] = {}
        try:
            for row in chosen.tolist():
                place = int(np.searchsorted(starts, row, "right")) - 1
                if place not in opened:
                    if len(opened) >= MOST_OPEN:
                        opened.pop(next(iter(opened))).close()
                    opened[place] = files.opened(pieces[place].path)
                offset, length, label = index[row].tolist()
                opened[place].seek(offset)
                data = opened[place].read(length)
                name = f"{pieces[place].path} record {row - int(starts[place])}"
                whole = records.unframed(data) is not None
                why = None if whole else f"{name} has a wrong checksum"
                yield Example(data if whole else None, None if labels is None else label, why)
        finally:
            for file in opened.values():
                file.close()

    return Rows(
        len(index),
        int(index[:, 1].sum()),
        features,
        labels,
        {
            start + row: why
            for start, piece in zip(starts[:-1].tolist(), pieces, strict=True)
            for row, why in piece.broken.items()
        },
        digest_of("".join(piece.digest for piece in pieces)),
        make,
    )


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


def is_stream(part: object) -> bool:
    """True for examples that come one after another."""
    if isinstance(part, Examples):
        return part.in_files or (not part.image_files and (part.parse or part.decode) is not None)
    arrays = isinstance(part, tuple | list | Mapping) or hasattr(part, "__array__")
    return not arrays and (hasattr(part, "__iter__") or callable(part))


def rows_of(part: object, split: str, classes: int | None) -> Rows:
    """A part that is neither a stream nor in files, as rows. Raises `DataError`."""
    if isinstance(part, Examples):
        if part.image_files:
            return of_images(part, classes)
        rows = of_arrays(part.raw, split, classes)
        return dataclasses.replace(rows, broken={**rows.broken, **_whys(part)})
    if not isinstance(part, tuple | list) or len(part) not in (2, 3):
        expected = f"data.build to return (x, y) or (x, y, weight) for {split}, or an iterator of these"
        raise DataError(expected, kind_of(part), "(x, y), (x_validation, y_validation)")
    return of_arrays(part, split, classes)


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


def manifest_of(path: str) -> Manifest | None:
    """The manifest beside a shard of prepared data, which names it; None where there is none or it names others."""
    folder, _, name = path.rpartition("/")
    try:
        files.size_of(f"{folder}/{manifest.FILE}")
    except OSError:
        return None
    contents = manifest.load(folder, files.read)
    return contents if any(shard.file == name for split in contents.splits.values() for shard in split) else None


def piece_of_file(part: Examples, segment: Segment, contents: Manifest) -> ShardPiece:
    """The records of a file that is prepared already: where each is, its label, and which are broken."""
    labelled = any(map(values.is_label, contents.features))
    whys, index = _whys(dataclasses.replace(part, raw=(segment,))), []
    with files.opened(segment.path) as file:
        for frame in records.frames(file):
            label = 0
            if frame.data is None:
                whys.setdefault(frame.number, f"{segment.path} record {frame.number} {frame.broken}")
            elif labelled and frame.number not in whys:
                label = int(records.parsed(frame.data)["y"][0])
            index.append((frame.start, (frame.stop or frame.start) - frame.start, label))
    name = segment.path.rpartition("/")[2]
    return ShardPiece(
        segment.path,
        contents.features,
        labelled,
        next(shard.sha256 for split in contents.splits.values() for shard in split if shard.file == name),
        {row: why for row, why in whys.items() if row < len(index)},
        tuple(why for row, why in whys.items() if row >= len(index)),
        np.array(index, np.int64).tobytes(),
    )

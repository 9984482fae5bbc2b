"""Turns the data of a data set's function into rows, each of which can be made a record, or into a stream of examples.

Called in a Dask worker. TensorFlow is imported where a person's function has done so, and nowhere else.
"""

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

from pipeline.data import files, pictures, records
from pipeline.data.arrays import Nested, floats, is_one_array, refuse_masked
from pipeline.data.errors import DataError
from pipeline.data.examples import LOOKED_AT, MOST, Examples, Segment, are_labels, leaves
from pipeline.data.examples import faults as faulty_rows
from pipeline.data.records import Feature
from pipeline.errors import first_of
from pipeline.prepare.folder import ShardPiece, file_bytes

if TYPE_CHECKING:
    import tensorflow as tf

MOST_OPEN = 64
# Rows that are taken out of arrays at a time.
BLOCK = 256
# What a record's frame takes.
FRAME = records.HEADER + records.FOOTER
# Vectors of integers up to so many values are stored as integers, which other readers of records expect; longer ones
# as bytes, which are read faster.
SHORT = 64


@dataclass(frozen=True)
class Example:
    """An example as a record in its frame, its label if it is a class, its image's height and width; or why not."""

    record: bytes | None
    label: int | None = None
    why: str = ""
    size: tuple[int, int] | None = None


@dataclass(frozen=True)
class Rows:
    """One part of a source: so many examples, of about so many bytes, of which `make` yields any as records.

    `labels` are int64 [examples] where each example has one whole number for a label, and None otherwise. `broken` has
    the rows that are known to be broken, and why; others may turn out to be when their record is made.
    """

    count: int
    nbytes: int
    features: tuple[Feature, ...]
    labels: NDArray[np.int64] | None
    broken: Mapping[int, str]
    digest: str
    make: Callable[[NDArray[np.int64]], Iterator[Example]]

    @property
    def usable(self) -> NDArray[np.int64]:
        """The rows that are not known to be broken."""
        return np.delete(np.arange(self.count), list(self.broken))


def of_arrays(part: Sequence[Nested[np.ndarray | float]], split: str, classes: int | None) -> Rows:
    """Rows of arrays with the examples along the first axis, in nested structures: `(x, y)` or `(x, y, weight)`."""
    arrays = flat(part, split)
    lengths = {len(array) if array.ndim else -1 for array in arrays.values()}
    if len(lengths) != 1 or -1 in lengths:
        listed = [f"{name} of shape {array.shape}" for name, array in arrays.items()]
        shapes = first_of(listed, between=", ", last=" and")
        expected = "arrays with as many examples along their first axis"
        raise DataError(expected, f"for {split}: {shapes}", "numpy.asarray around lists of numbers")
    (count,) = lengths
    features = tuple(feature(name, array, array.shape[1:]) for name, array in arrays.items())
    y, digest = arrays.get("y", ()), hashlib.sha256()
    labels = y.astype(np.int64) if are_labels(y) else None
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
                data = encoded({name: column[place] for name, column in columns.items()}, features)
                yield Example(data, None if labels is None else int(labels[row]))

    nbytes = sum(sizes) + count * (FRAME + 16 * len(sizes))
    whys = {row: f"example {row} of {split} {why}" for row, why in sorted(faults(arrays, classes).items())}
    return Rows(count, nbytes, features, labels, whys, digest.hexdigest()[:16], make)


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
                yield Example(None, why=f"{path} {why}")
                continue
            with Image.open(io.BytesIO(data)) as image:
                record = records.framed(records.example({"x": data, "y": np.asarray(label)}))
                yield Example(record, label, size=(image.height, image.width))

    features = Feature("x", (None, None, channels), "float32", "image"), Feature("y", (), "int32", "ints")
    whys = {row: f"{paths[row]} {why}" for row, why in sorted((missing | faults({"y": labels}, classes)).items())}
    nbytes = sum((size or 0) + FRAME + 32 for size in sizes)
    digest = digest_of(json.dumps([paths, sizes, labels.tolist()]))
    return Rows(len(paths), nbytes, features, labels, whys, digest, make)


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
    labels = index[:, 2] if are_labelled(features) else None

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
                if records.framed(data[records.HEADER : -records.FOOTER]) == data:
                    yield Example(data, None if labels is None else label)
                else:
                    name = f"{pieces[place].path} record {row - int(starts[place])}"
                    yield Example(None, why=f"{name} has a wrong checksum")
        finally:
            for file in opened.values():
                file.close()

    placed = zip(starts.tolist(), pieces, strict=False)
    whys = {start + row: why for start, piece in placed for row, why in piece.broken.items()}
    digest = digest_of("".join(piece.digest for piece in pieces))
    return Rows(len(index), int(index[:, 1].sum()), features, labels, whys, digest, make)


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


def _is_dataset(part: object) -> TypeGuard["tf.data.Dataset"]:
    tensorflow = sys.modules.get("tensorflow")
    return tensorflow is not None and isinstance(part, tensorflow.data.Dataset)


def _whys(part: Examples) -> dict[int, str]:
    broken = part.look(part, 0, 1, True) if part.look else []
    return {flaw.first + more: f"{flaw.name} {flaw.why}" for flaw in broken for more in range(flaw.examples)}


def _dataset_of(part: Examples) -> "tf.data.Dataset":
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


def piece_of_file(part: Examples, segment: Segment) -> ShardPiece | None:
    """The records of a shard: where each is, its label, and which are broken; None where no manifest names the file."""
    folder, _, name = segment.path.rpartition("/")
    try:
        files.size_of(f"{folder}/{records.MANIFEST}")
    except OSError:
        return None
    contents = records.load_manifest(folder, files.read)
    shard = next((one for split in contents.splits.values() for one in split if one.file == name), None)
    if shard is None:
        return None
    labelled, whys, index = are_labelled(contents.features), _whys(dataclasses.replace(part, raw=(segment,))), []
    with files.opened(segment.path) as file:
        for frame in records.frames(file):
            label = 0
            if frame.data is None:
                whys.setdefault(frame.number, f"{segment.path} record {frame.number} {frame.broken}")
            elif labelled and frame.number not in whys:
                label = int(records.parsed(frame.data)["y"][0])
            index.append((frame.start, (frame.stop or frame.start) - frame.start, label))
    broken = {row: why for row, why in whys.items() if row < len(index)}
    lost = tuple(why for row, why in whys.items() if row >= len(index))
    table = np.array(index, np.int64).tobytes()
    return ShardPiece(segment.path, contents.features, shard.sha256, broken, lost, table)


class Encoder:
    """Makes records of a stream's examples, which must all have the features of the first."""

    def __init__(self, split: str, classes: int | None) -> None:
        self._split, self._classes = split, classes
        self.features: tuple[Feature, ...] = ()

    def make(self, example: object, name: str) -> Example:
        """One example as a record, or why it is broken. Raises `DataError` for what no record can hold."""
        if not isinstance(example, tuple | list) or len(example) not in (2, 3):
            received, instead = f"{name} as {kind_of(example)}", "yielding (x, y) of one example at a time"
            raise DataError("examples (x, y) or (x, y, weight)", received, instead)
        arrays = flat(example, self._split)
        features = tuple(feature(leaf, array, array.shape) for leaf, array in arrays.items())
        self.features = self.features or features
        if features != self.features:
            why = f"has {in_words(features)}, {in_words(self.features)} as in the first was expected"
        else:
            why = faults({leaf: array[None] for leaf, array in arrays.items()}, self._classes).get(0, "")
        if why:
            return Example(None, why=f"{name} {why}")
        return Example(encoded(arrays, features), int(arrays["y"]) if are_labelled(features) else None)


def feature(name: str, array: np.ndarray, shape: Sequence[int]) -> Feature:
    """The feature that stores values of such an array. Raises `DataError` for what no record can hold."""
    kind, values = array.dtype, int(np.prod(shape, dtype=np.int64))
    if kind.kind not in "fiub" or kind.itemsize > 8:
        instead = "numbers in its place, such as the places of words in a vocabulary"
        raise DataError(f"{name} to be numbers of at most 8 bytes, or true and false", kind, instead)
    # TensorFlow reads no unsigned numbers of 4 or 8 bytes out of bytes.
    as_ints = not shape or kind in (np.uint32, np.uint64) or (values <= SHORT and kind != np.uint8)
    stored = "floats" if kind == np.float32 else "ints" if kind.kind != "f" and as_ints else "bytes"
    return Feature(name, tuple(shape), kind.newbyteorder("=").name, stored)


def encoded(arrays: Mapping[str, np.ndarray], features: Sequence[Feature]) -> bytes:
    """One example as a record in its frame; bytes of arrays are little endian."""
    stored = {
        one.name: array if one.stored != "bytes" else array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        for one in features
        for array in [np.asarray(arrays[one.name])]
    }
    return records.framed(records.example(stored))


def flat(part: Sequence[Nested[np.ndarray | float]], split: str) -> dict[str, np.ndarray]:
    """The arrays of `(x, y)` or `(x, y, weight)` by the names of their features. Raises `DataError`."""
    leaves: dict[str, np.ndarray | float] = records.flat(tuple(_without_lists(values, split) for values in part))
    if not any(name == "x" or name.startswith("x/") for name in leaves):
        raise DataError(f"examples with an x for {split}", "none", "(x, y)")
    return {name: np.asarray(leaf) for name, leaf in leaves.items() if leaf is not None}


def _without_lists(values: Nested[np.ndarray | float], split: str) -> Nested[np.ndarray | float]:
    """The same structure, with an array in place of each list of numbers; Python's floats are float32, as in Keras."""
    if isinstance(values, Mapping):
        for key in values:
            if not isinstance(key, str) or not key or "/" in key or key.isdigit():
                expected = f"names of inputs and outputs that are text without /, and no numbers, for {split}"
                raise DataError(expected, f"{key!r}", "another name")
        return {key: _without_lists(inner, split) for key, inner in values.items()}
    if not isinstance(values, list | tuple):
        refuse_masked(values, split)
        return values
    # Of a tuple each is an input, as of a data set.
    if isinstance(values, tuple) or not is_one_array(values):
        return tuple(_without_lists(inner, split) for inner in values)
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"rows of one length in the lists of {split}", "others", "arrays of one shape") from error
    return floats(array, np.float32, f"the lists of {split}") if array.dtype == np.float64 else array


def faults(arrays: Mapping[str, np.ndarray], classes: int | None) -> dict[int, str]:
    """Reasons not to prepare examples by their rows, which are the first axis of the arrays."""
    whys = faulty_rows(arrays, MOST if classes is None else classes)
    for name, array in arrays.items():
        if array.dtype == np.uint64 and (large := array > MOST).any():
            rows = np.flatnonzero(large.reshape(len(array), -1).any(axis=1))
            whys |= dict.fromkeys(rows.tolist(), f"has a number in {name} that int64 does not hold")
    return whys


def in_words(features: Sequence[Feature]) -> str:
    """Features as a person reads them."""
    return ", ".join(f"{feature.name} of {feature.dtype} {list(feature.shape)}" for feature in features)


def kind_of(value: object) -> str:
    """The kind of a value, in words."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__


def are_labelled(features: Sequence[Feature]) -> bool:
    """True if the label of each example is one whole number."""
    return any(one.name == "y" and one.stored == "ints" and not one.shape and one.dtype != "bool" for one in features)

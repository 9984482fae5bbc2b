"""Looks at data before they are trained on: a few examples, without a trace for later readers, and broken ones.

It also makes examples once and keeps them, in memory as arrays or in a file as records. What varies them anew in each
epoch is left for then.
"""

import dataclasses
import fcntl
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from pipeline.data import records
from pipeline.data.arrays import Nested
from pipeline.data.examples import Broken, Examples, Segment
from pipeline.errors import refuse
from pipeline.worker.data import batches
from pipeline.worker.data.reading import NOT_FINITE, Batch, Part, conditions, is_pure
from pipeline.worker.layout import BatchLayout
from pipeline.worker.model_error import TrainingError

# Data sets that are read twice alike, by the names of their classes: none draws, keeps, or runs what is a user's own.
HARMLESS = (
    "_AssertCardinalityDataset", "_BatchDataset", "_ConcatenateDataset", "_FilterDataset", "_MapDataset",
    "_OptionsDataset", "_ParallelMapDataset", "_PrefetchDataset", "_RangeDataset", "_RepeatDataset", "_ShardDataset",
    "_SkipDataset", "_TakeDataset", "_TensorDataset", "_TensorSliceDataset", "_TextLineDataset", "_UnbatchDataset",
    "_ZipDataset", "FixedLengthRecordDatasetV2", "TFRecordDatasetV2", "TextLineDatasetV2",
)  # fmt: skip


def examples_of(part: Part, first: int, count: int, classes: int | None) -> Batch:
    """Examples `first` to `first + count` of a part, as a batch; made up if reading would leave a trace."""
    inner = part.raw if isinstance(part, Examples) else part
    if isinstance(inner, tf.data.Dataset) and not is_harmless(inner):
        return made_up(batches.spec(part), count, classes)
    with tf.device("CPU:0"):
        if isinstance(part, tf.data.Dataset):
            return next(iter(part.skip(first).take(count).batch(count)))
        if not isinstance(part, Examples):
            return tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf[first : first + count]), part)
        layout = BatchLayout(first + count, replicas=1, first=0, local=1, counts=(part.count,))
        _, (batch,) = next(iter(batches.Data(part, layout, shuffle=False, seed=0).stream()))
        return tf.nest.map_structure(lambda leaf: leaf[first:], batch)


def is_harmless(part: tf.data.Dataset) -> bool:
    """True if reading a data set from its start changes nothing, neither what is read later nor anything else."""
    functions = [getattr(part, name) for name in ("_map_func", "_predicate") if hasattr(part, name)]
    are_pure = type(part).__name__ in HARMLESS and all(is_pure(function.function.graph) for function in functions)
    return are_pure and all(map(is_harmless, part._inputs()))


def made_up(spec: Batch, count: int, classes: int | None) -> Batch:
    """Examples of a structure: numbers about 0, labels below `classes`, others 0 and 1. Raises `TypeError` for text."""
    chance = np.random.default_rng(0)

    def inputs(leaf: tf.Tensor) -> tf.Tensor:
        if leaf.dtype == tf.string:
            raise TypeError("examples of text cannot be made up")
        shape = (count, *leaf.shape[1:])
        return tf.cast(
            chance.normal(size=shape) if leaf.dtype.is_floating else chance.integers(0, 2, shape), leaf.dtype
        )

    def labels(leaf: tf.Tensor) -> tf.Tensor:
        if leaf.dtype.is_floating:
            return tf.cast(chance.uniform(0.1, 0.9, (count, *leaf.shape[1:])), leaf.dtype)
        if leaf.shape.rank == 1 and leaf.dtype.is_integer:
            return tf.cast(np.arange(count) % (classes or 2), leaf.dtype)
        return inputs(leaf)

    if not isinstance(spec, tuple):
        return tf.nest.map_structure(inputs, spec)
    return tuple(tf.nest.map_structure(make, part) for make, part in zip((inputs, labels, labels), spec, strict=False))


# Examples that fail one after the other before a data set is taken to fail for ever; and those that are made at a time.
ENDLESS, CHUNK = 10_000, 512
# What an operation raises that meets a file or an example that it cannot read; the last where its message quotes that.
UNREADABLE = (
    tf.errors.InvalidArgumentError, tf.errors.DataLossError, tf.errors.NotFoundError, UnicodeDecodeError,
)  # fmt: skip


def _read(part: tf.data.Dataset) -> Iterator[tuple[Batch | None, str]]:
    """Yields each example of a data set, or the reason for which it cannot be made."""
    iterator = iter(part)
    while True:
        try:
            yield next(iterator), ""
        except StopIteration:
            return
        except (tf.errors.OpError, UnicodeDecodeError) as error:
            yield None, _reason(error.message if isinstance(error, tf.errors.OpError) else str(error))


def first_broken(part: Part | None, classes: int | None) -> list[Broken]:
    """The first example of a data set that cannot be made or trained on, found by making one after the other."""
    for place, (example, reason) in enumerate(_read(part) if isinstance(part, tf.data.Dataset) else ()):
        name = f"example {place} of the data set"
        if example is None:
            return [Broken(None, place, 1, name, f"cannot be made ({reason})")]
        batch = tf.nest.map_structure(lambda leaf: leaf[tf.newaxis], example)
        if wrong := [words for right, words in conditions(batch, classes) if not right]:
            why = "has NaN or infinity" if wrong[0] == NOT_FINITE else f"has label {int(batch[1][0])}"
            return [Broken(None, place, 1, name, why)]
    return []


def _reason(message: str) -> str:
    # Without where in TensorFlow's graph it is: "... transformation with iterator: Iterator::Root: REASON [Op:...]".
    first = message.splitlines()[0] if message else ""
    first = re.sub(r"^.*transformation with iterator: \S+: ", "", first)
    return re.sub(r"\{\{.*?\}\}|\[Op:\w+\].*|name: *$", "", first).strip()


def sifted(part: tf.data.Dataset, classes: int | None) -> tuple[tf.data.Dataset, int]:
    """(a data set without the examples that cannot be made or trained on, how many these are); reads it twice."""

    def is_whole(*example: Batch) -> tf.Tensor:
        batch = tf.nest.map_structure(lambda leaf: leaf[tf.newaxis], example if len(example) > 1 else example[0])
        return tf.reduce_all([True, *(condition for condition, _ in conditions(batch, classes))])

    sound = part.ignore_errors().filter(tf.autograph.experimental.do_not_convert(is_whole))
    whole = batches.count(sound)
    dataset = sound.apply(tf.data.experimental.assert_cardinality(whole)).with_options(part.options())
    # With those that cannot be made.
    count = in_a_row = 0
    expected = "a data set that goes on after an example that cannot be made"
    received = f"one that failed {ENDLESS:,} times in a row"
    instead = "putting it right, or data.on_error=stop, which says what is wrong"
    for count, (example, _) in enumerate(_read(part), start=1):  # noqa: B007 # It is how many there are.
        in_a_row = 0 if example is not None else in_a_row + 1
        refuse((in_a_row == ENDLESS, expected, received, instead), error=TrainingError)
    return dataset, count - whole


def in_memory(part: Examples | tf.data.Dataset) -> Part:
    """The part as arrays, in its order; `Examples` are again those, of arrays, which may still be varied."""
    _expect_one_size(part)
    if not (chunks := list(_made(part))):
        return part
    arrays = tf.nest.map_structure(lambda *leaves: np.concatenate(leaves), *chunks)
    is_part = isinstance(part, Examples)
    return dataclasses.replace(part, raw=arrays, parse=None, decode=None, look=None) if is_part else arrays


def in_file(part: Examples | tf.data.Dataset, folder: Path, name: str) -> Examples:
    """The part as records of a file in `folder`, which is written if it is not there; `name` tells it from others."""
    # Several processes that want the same file wait for the first, and one that is killed leaves none.
    _expect_one_size(part)
    spec = part.element_spec
    path = folder / f"{hashlib.sha256(f'{name} {spec}'.encode()).hexdigest()[:16]}.tfrecord"
    folder.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _write(part, path)
    leaves = {str(place): leaf for place, leaf in enumerate(tf.nest.flatten(spec))}

    def parse(batch: tf.Tensor) -> Batch:
        parsed = tf.io.parse_example(batch, dict.fromkeys(leaves, tf.io.FixedLenFeature((), tf.string)))
        return tf.nest.pack_sequence_as(spec, [_from_bytes(parsed[name], leaf) for name, leaf in leaves.items()])

    varied = part if isinstance(part, Examples) else Examples((), spec)
    segment = Segment(str(path.resolve()), batches.count(part))
    return dataclasses.replace(
        varied, raw=(segment,), spec=spec, parse=parse, decode=None, look=None, flaws=(), digest=path.stem
    )


def _write(part: Examples | tf.data.Dataset, path: Path) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            for chunk in _made(part):
                for row in zip(*tf.nest.flatten(chunk), strict=True):
                    values = [one if isinstance(one, bytes) else np.asarray(one).tobytes() for one in row]
                    file.write(records.framed(records.example({str(at): one for at, one in enumerate(values)})))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        expected = f"Expected to be able to write the cache of the data to {path}, received: {error.strerror or error}."
        instead = "Try more space there, another output_dir, or data.cache=none."
        raise TrainingError(f"{expected} {instead}") from error


def _from_bytes(values: tf.Tensor, leaf: tf.TensorSpec) -> tf.Tensor:
    if leaf.dtype == tf.string:
        return values
    if leaf.dtype == tf.bool:
        return tf.cast(_from_bytes(values, tf.TensorSpec(leaf.shape, tf.uint8)), tf.bool)
    return tf.reshape(tf.io.decode_raw(values, leaf.dtype), [tf.shape(values)[0], *leaf.shape])


def _made(part: Examples | tf.data.Dataset) -> Iterator[Nested[np.ndarray]]:
    """The examples of a part in their order, some at a time: its structure, with arrays [examples, ...]."""
    plain = dataclasses.replace(part, augment=None) if isinstance(part, Examples) else part
    layout = BatchLayout(CHUNK, replicas=1, first=0, local=1, counts=(batches.count(part),))
    stream = batches.Data(plain, layout, shuffle=False, seed=0).stream().take(layout.steps)
    for _, (batch,) in stream.as_numpy_iterator():
        yield batch


def _expect_one_size(part: Examples | tf.data.Dataset) -> None:
    for leaf in tf.nest.flatten(part.element_spec):
        of_one_size = isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined()
        wrong = not of_one_size or (leaf.dtype == tf.string and leaf.shape.rank)
        received = f"a {type(leaf).__name__} of shape {leaf.shape} and {getattr(leaf.dtype, 'name', leaf.dtype)}"
        refuse((wrong, "examples of one size to keep", received, "data.cache=none"), error=TrainingError)

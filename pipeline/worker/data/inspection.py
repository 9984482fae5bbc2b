"""Looks at data before they are trained on: a few examples, without a trace for later readers, and broken ones."""

import re
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from pipeline.data.examples import Broken, Examples
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
    return (
        type(part).__name__ in HARMLESS
        and all(is_pure(function.function.graph) for function in functions)
        and all(map(is_harmless, part._inputs()))
    )


def made_up(spec: Batch, count: int, classes: int | None) -> Batch:
    """Examples of a structure: numbers about 0, labels below `classes`, others 0 and 1. Raises `TypeError` for text."""
    chance = np.random.default_rng(0)

    def inputs(leaf: tf.Tensor) -> tf.Tensor:
        shape = (count, *leaf.shape[1:])
        if leaf.dtype == tf.string:
            raise TypeError("examples of text cannot be made up")
        values = chance.normal(size=shape) if leaf.dtype.is_floating else chance.integers(0, 2, shape)
        return tf.cast(values, leaf.dtype)

    def labels(leaf: tf.Tensor) -> tf.Tensor:
        if leaf.dtype.is_floating:
            return tf.cast(chance.uniform(0.1, 0.9, (count, *leaf.shape[1:])), leaf.dtype)
        if leaf.shape.rank == 1 and leaf.dtype.is_integer:
            return tf.cast(np.arange(count) % (classes or 2), leaf.dtype)
        return inputs(leaf)

    if not isinstance(spec, tuple):
        return tf.nest.map_structure(inputs, spec)
    return tuple(tf.nest.map_structure(make, part) for make, part in zip((inputs, labels, labels), spec, strict=False))


# Examples that fail one after the other before a data set is taken to fail for ever.
ENDLESS = 10_000
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
    """Returns what TensorFlow says went wrong, without where in its graph.

    >>> _reason("{{function_node f}} Error in user-defined function passed to Map:1 transformation with iterator: \\
    ... Iterator::Root::Map: assertion failed: [bad] [Op:IteratorGetNext]")
    'assertion failed: [bad]'
    """
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
    for example, _ in _read(part):
        count += 1
        in_a_row = 0 if example is not None else in_a_row + 1
        if in_a_row == ENDLESS:
            expected = "a data set that goes on after an example that cannot be made"
            instead = "putting it right, or data.on_error=stop, which says what is wrong"
            raise TrainingError(expected, f"one that failed {ENDLESS:,} times in a row", instead)
    return dataset, count - whole

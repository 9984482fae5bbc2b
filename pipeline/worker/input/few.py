"""A few of a part's examples, without a trace: what reads the part later reads what it would have read."""

import numpy as np
import tensorflow as tf

from pipeline.data.examples import Examples
from pipeline.worker.input import batches
from pipeline.worker.input.layout import Layout
from pipeline.worker.input.part import Batch, Part
from pipeline.worker.input.reading import is_pure

# Data sets that are read twice alike, by the names of their classes: none draws, keeps, or runs what is a person's own.
HARMLESS = (
    "_AssertCardinalityDataset", "_BatchDataset", "_ConcatenateDataset", "_FilterDataset", "_MapDataset",
    "_OptionsDataset", "_ParallelMapDataset", "_PrefetchDataset", "_RangeDataset", "_RepeatDataset", "_ShardDataset",
    "_SkipDataset", "_TakeDataset", "_TensorDataset", "_TensorSliceDataset", "_TextLineDataset", "_UnbatchDataset",
    "_ZipDataset", "FixedLengthRecordDatasetV2", "TFRecordDatasetV2", "TextLineDatasetV2",
)  # fmt: skip


def examples_of(part: Part, first: int, count: int, classes: int | None) -> Batch:
    """Examples `first` to `first + count` of a part, as one batch: fewer where it ends before, and made up where
    reading would leave a trace. Labels that are made up are below `classes`.
    """
    inner = part.raw if isinstance(part, Examples) else part
    if isinstance(inner, tf.data.Dataset) and not is_harmless(inner):
        return made_up(batches.spec(part), count, classes)
    with tf.device("CPU:0"):
        if isinstance(part, tf.data.Dataset):
            return next(iter(part.skip(first).take(count).batch(count)))
        if not isinstance(part, Examples):
            return tf.nest.map_structure(lambda leaf: tf.convert_to_tensor(leaf[first : first + count]), part)
        layout = Layout(first + count, replicas=1, first=0, local=1, counts=(part.count,))
        _, (batch,) = next(iter(batches.stream(part, layout, shuffle=False, seed=0)))
        return tf.nest.map_structure(lambda leaf: leaf[first:], batch)


def is_harmless(part: tf.data.Dataset) -> bool:
    """Does reading a data set from its start change nothing of what is read of it later, and nothing else?"""
    functions = [getattr(part, name) for name in ("_map_func", "_predicate") if hasattr(part, name)]
    return (
        type(part).__name__ in HARMLESS
        and all(is_pure(made.function.graph) for made in functions)
        and all(map(is_harmless, part._inputs()))
    )


def made_up(spec: Batch, count: int, classes: int | None) -> Batch:
    """Examples of a structure: numbers about 0, labels below `classes`, other whole numbers 0 and 1.

    Raises `TypeError` for text, of which nothing is known.
    """
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

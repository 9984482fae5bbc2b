"""Turns what a user gives as data into what TensorFlow trains on: arrays of one length, or a set of single examples.

Examples are weighed by the class of their label, a class number or the place of the largest of several numbers, as
Keras's `fit` does with `class_weight`. A weight that an example has already is multiplied.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.data.errors import DataError, refuse
from pipeline.data.examples import Examples, Leaf, leaves
from pipeline.worker.data import loading
from pipeline.worker.data.loading import NAMES, SEVERAL
from pipeline.worker.data.reading import Batch, FitData, Part, Spec

# What makes batches of examples, and what hands on the elements that it is given, one for one or fewer.
BATCHING = ("_BatchDataset", "_ParallelBatchDataset", "_PaddedBatchDataset", "_DenseToRaggedDataset")
HANDING_ON = (
    "_MapDataset", "_ParallelMapDataset", "_PrefetchDataset", "_OptionsDataset", "_AssertCardinalityDataset",
    "_ShuffleDataset", "CacheDataset", "_RepeatDataset", "_TakeDataset", "_SkipDataset", "_FilterDataset",
    "_ShardDataset",
)  # fmt: skip


def part(value: object, name: str) -> Part | None:
    """A part as it is trained on: arrays, nested as they came, or what makes examples. Raises `DataError`."""
    if isinstance(value, tf.data.Dataset):
        spec = value.element_spec
        several = isinstance(spec, tuple) and len(spec) > len(NAMES)
        expected = f"a {name} data set of (x, y) or (x, y, sample_weight)"
        refuse((several, expected, several and f"one of {len(spec)} components", SEVERAL))
        _check_kinds(spec, name)
        varies = not all(leaf.shape.is_fully_defined() for leaf in tf.nest.flatten(spec))
        pad = "tf.ensure_shape in dataset.map, padding where sizes differ, or dataset.unbatch() where these are batches"
        refuse(
            (is_batched(value), f"a {name} data set of single examples, which are batched here",
             f"one of batches, {_written(spec)}", "to leave out .batch, or dataset.unbatch()"),
            (varies, f"a {name} data set of examples of one size", _written(spec), pad),
        )  # fmt: skip
    if value is None or isinstance(value, Examples | tf.data.Dataset):
        return value
    if isinstance(value, Iterator):
        received = f"a {type(value).__name__}, which ends once it is read"
        instead = "arrays, or tf.data.Dataset.from_generator"
        raise DataError(f"{name} data that can be read again in each epoch", received, instead)
    return loading.part(value, name)


def for_keras(x: FitData, y: FitData, sample_weight: FitData, name: str) -> tuple[FitData, FitData, FitData]:
    """Returns what Keras's `fit` was given, with arrays in place of lists of numbers. Raises `DataError`."""
    if isinstance(x, tf.data.Dataset) and all(
        isinstance(one, tf.TensorSpec) for one in tf.nest.flatten(x.element_spec)
    ):
        _check_kinds(x.element_spec, name)
        first = {leaf.shape[0] for leaf in tf.nest.flatten(x.element_spec) if leaf.shape.rank} - {None}
        expected = f"a {name} data set of batches, as many examples in each of their arrays"
        refuse((len(first) > 1, expected, _written(x.element_spec), "dataset.batch(32)"))
    kinds = Mapping | list | tuple | tf.SparseTensor | tf.RaggedTensor
    # What makes batches.
    if not (isinstance(x, kinds) or hasattr(x, "__array__") or hasattr(x, "tocsr")):
        return x, y, sample_weight
    named = zip((x, y, sample_weight), NAMES, strict=True)
    structures: list[Any] = [loading.without_lists(values, path, name) for values, path in named]
    pairs = zip(structures, NAMES, strict=True)
    arrays = [None if values is None else loading.arrays(values, path, name) for values, path in pairs]
    loading.check_lengths(arrays, name)

    def for_text(leaf: object, array: np.ndarray) -> object:
        # As a tensor, in place of NumPy's text, which Keras does not take.
        return tf.constant(array) if array.dtype.kind in "US" and not isinstance(leaf, tf.Tensor) else leaf

    return tf.nest.map_structure(for_text, structures[0], arrays[0]), structures[1], structures[2]


def _check_kinds(spec: Spec, name: str) -> None:
    for leaf in tf.nest.flatten(spec):
        if not isinstance(leaf, tf.TensorSpec):
            how = "tf.sparse.to_dense" if isinstance(leaf, tf.SparseTensorSpec) else ".to_tensor(shape=...)"
            received = f"a {type(leaf).__name__} in it"
            raise DataError(f"a {name} data set of dense tensors", received, f"{how} in dataset.map")
    labels = tf.nest.flatten(spec[1:]) if isinstance(spec, tuple) else []
    are_text = any(leaf.dtype == tf.string for leaf in labels)
    instead = "keras.layers.StringLookup in dataset.map, which numbers classes"
    refuse((are_text, f"numbers as y of the {name} data set", "text", instead))


def is_batched(data: tf.data.Dataset) -> bool:
    """True if the elements of a data set are batches, each of whose arrays has as many examples.

    >>> is_batched(tf.data.Dataset.range(8).batch(4).prefetch(1)), is_batched(tf.data.Dataset.range(8))
    (True, False)
    """
    node = data
    while type(node).__name__ in HANDING_ON:
        (node,) = node._inputs()
    specs = tf.nest.flatten(data.element_spec)
    first = [leaf.shape[0] if leaf.shape.rank else 0 for leaf in specs]
    return type(node).__name__ in BATCHING and len(set(first)) == 1 and first[0] != 0


def _written(spec: Spec) -> str:
    """The shapes of a data set's elements, as a user reads them: x of [None, 6] and y of [None]."""
    texts = []
    for path, part in zip(NAMES, spec if isinstance(spec, tuple) else (spec,), strict=False):
        shapes = [leaf.shape for leaf in tf.nest.flatten(part)]
        of_each = ("an unknown rank" if shape.rank is None else str(shape.as_list()) for shape in shapes)
        texts.append(f"{path} of {', '.join(of_each)}")
    return " and ".join(texts)


def weighed(part: Part, class_weight: Mapping[int, float]) -> Part:
    """Returns (x, y, weight), 1 for a class without a weight. Raises `DataError` without labels of a single output."""
    if isinstance(part, tf.data.Dataset):
        _check_labels(part.element_spec, examples=False)
        return part.map(lambda *example: _weighed(example, class_weight), num_parallel_calls=tf.data.AUTOTUNE)
    if not isinstance(part, Examples):
        _check_labels(part, examples=True)
        with tf.device("CPU:0"):
            x, y, weight = _weighed(part, class_weight, batched=True)
        return x, y, weight.numpy()
    _check_labels(part.element_spec, examples=False)
    assert isinstance(part.spec, tuple), "as `Examples` says"
    shapes = [leaf.shape for leaf in leaves(part.spec[2:]) if isinstance(leaf, Leaf)]
    spec = (*part.spec[:2], Leaf(shapes[0] if shapes else (), "float32"))
    if part.is_made:
        return dataclasses.replace(part, raw=weighed(part.raw, class_weight), spec=spec)
    # What comes last of what makes them; records are parsed.
    last = next(name for name in ("augment", "decode", "parse") if getattr(part, name) is not None)
    make: Callable[..., Batch] = getattr(part, last)
    made = {last: lambda *arguments: _weighed(make(*arguments), class_weight, batched=last == "parse")}
    return dataclasses.replace(part, spec=spec, **made)  # type: ignore[arg-type] # one that makes


def _weighed(example: Batch, class_weight: Mapping[int, float], batched: bool = False) -> tuple[Any, ...]:
    x, y, weight = keras.utils.unpack_x_y_sample_weight(tuple(example))
    label = tf.convert_to_tensor(y)
    if label.shape.rank > int(batched):
        label = tf.squeeze(label, -1) if label.shape[-1] == 1 else tf.argmax(label, -1)
    if label.dtype.is_floating:
        label = tf.round(label)
    table = tf.constant([class_weight.get(number, 1.0) for number in range(max(class_weight) + 1)], tf.float32)
    number = tf.cast(label, tf.int64)
    weighted = (number >= 0) & (number < len(table))
    weights = tf.where(weighted, tf.gather(table, tf.where(weighted, number, 0)), 1.0)
    # Along the first axis of weights, which may be a column.
    return x, y, weights if weight is None else tf.transpose(tf.transpose(tf.cast(weight, tf.float32)) * weights)


def _check_labels(spec: Batch, examples: bool) -> None:
    """Refuses what has no single label an example; `spec` is an example's structure, or that of all examples."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(spec)
    if y is None or tf.nest.is_nested(y):
        received = "data of x alone" if y is None else f"labels of {len(y)} outputs"
        instead = "train.class_weight=null, and weights of the examples in the data: (x, y, sample_weight)"
        raise DataError("labels of a single output for train.class_weight", received, instead)
    shape = np.shape(y)[1:] if examples else y.shape
    expected = "a class, or a number for each class, as the label of an example for train.class_weight"
    instead = "train.class_weight=null, and (x, y, sample_weight)"
    refuse((len(shape) > 1, expected, f"labels of shape {list(shape)}", instead))

"""Weighs examples by the class of their label, as Keras's `fit` does with `class_weight`, whatever kind the data are.

A label is a class number, or the place of the largest of several numbers, as of a one-hot label. A weight that an
example has already is multiplied.
"""

import dataclasses
from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf

from pipeline.data.errors import DataError
from pipeline.data.examples import Examples, Leaf
from pipeline.worker.data.reading import Batch, Part


def weighed(part: Part, class_weight: Mapping[int, float]) -> Part:
    """Returns (x, y, weight), 1 for a class without a weight. Raises `DataError` without labels of a single output."""
    if isinstance(part, tf.data.Dataset):
        _check(part.element_spec, examples=False)
        return part.map(lambda *example: _weighed(example, class_weight), num_parallel_calls=tf.data.AUTOTUNE)
    if isinstance(part, Examples):
        return _made(part, class_weight)
    _check(part, examples=True)
    with tf.device("CPU:0"):
        x, y, weight = _weighed(part, class_weight, batched=True)
    return x, y, weight.numpy()


def _made(part: Examples, class_weight: Mapping[int, float]) -> Examples:
    """Examples that are weighed once they are made."""
    _check(part.element_spec, examples=False)
    assert isinstance(part.spec, tuple), "as `Examples` says"
    spec = (*part.spec[:2], Leaf((), "float32"))
    if part.is_made:
        return dataclasses.replace(part, raw=weighed(part.raw, class_weight), spec=spec)

    def last(make: Callable[..., Batch], batched: bool = False) -> Callable[..., Batch]:
        return lambda *arguments: _weighed(make(*arguments), class_weight, batched)

    if part.augment is not None:
        return dataclasses.replace(part, augment=last(part.augment), spec=spec)
    if part.decode is not None:
        return dataclasses.replace(part, decode=last(part.decode), spec=spec)
    assert part.parse is not None, "records are parsed"
    return dataclasses.replace(part, parse=last(part.parse, batched=True), spec=spec)


def _weighed(
    example: Batch, class_weight: Mapping[int, float], batched: bool = False
) -> tuple[Batch, Batch, tf.Tensor]:
    """An example, or a batch of them, with its weight, float32."""
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
    return x, y, weights if weight is None else weights * tf.cast(weight, tf.float32)


def _check(spec: Batch, examples: bool) -> None:
    """Refuses what has no single label an example; `spec` is an example's structure, or that of all examples."""
    _, y, _ = keras.utils.unpack_x_y_sample_weight(spec)
    if y is None or tf.nest.is_nested(y):
        received = "data of x alone" if y is None else f"labels of {len(y)} outputs"
        instead = "train.class_weight=null, and weights of the examples in the data: (x, y, sample_weight)"
        raise DataError("labels of a single output for train.class_weight", received, instead)
    shape = np.shape(y)[1:] if examples else y.shape
    if len(shape) > 1:
        expected = "a class, or a number for each class, as the label of an example for train.class_weight"
        instead = "train.class_weight=null, and (x, y, sample_weight)"
        raise DataError(expected, f"labels of shape {list(shape)}", instead)

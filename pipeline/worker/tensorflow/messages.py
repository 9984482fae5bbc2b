"""Sends many arrays from one device to another as one message, which costs as much as a message for one of them."""

import math
from collections.abc import Sequence

import tensorflow as tf

# An array of so many bytes goes by itself: to join it with others would take as long as a message.
LARGE = 1 << 20


def joined(arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns all bytes of the arrays as one, uint8 [bytes], and behind it the large arrays as they are.

    A first dimension that is not known before a step goes with them.
    """
    small = [array for array in arrays if not _is_large(array)]
    rows = [tf.shape(array)[0] for array in small if not array.shape.is_fully_defined()]
    parts = [tf.reshape(tf.bitcast(part, tf.uint8), [-1]) for part in ([tf.stack(rows)] if rows else []) + small]
    return [*([tf.concat(parts, 0)] if parts else []), *filter(_is_large, arrays)]


def split(message: Sequence[tf.Tensor], arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the arrays that were `joined`, on the device of the scope; of `arrays`, types and shapes are asked."""
    small = [array for array in arrays if not _is_large(array)]
    large = iter(message[1:] if small else message)
    apart = iter(_split(message[0], small) if small else ())
    return [next(large if _is_large(array) else apart) for array in arrays]


def _split(message: tf.Tensor, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    unknown = sum(not array.shape.is_fully_defined() for array in arrays)
    rows = iter(tf.unstack(tf.bitcast(tf.reshape(message[: 4 * unknown], [unknown, 4]), tf.int32)) if unknown else ())
    shapes = [array.shape if array.shape.is_fully_defined() else [next(rows), *array.shape[1:]] for array in arrays]
    sizes = [math.prod(shape) * array.dtype.size for shape, array in zip(shapes, arrays, strict=True)]
    parts = tf.split(message[4 * unknown :], sizes, num=len(arrays))
    return [
        tf.bitcast(tf.reshape(part, [*shape, *([array.dtype.size] if array.dtype.size > 1 else [])]), array.dtype)
        for part, shape, array in zip(parts, shapes, arrays, strict=True)
    ]


def _is_large(array: tf.Tensor) -> bool:
    """True if an array goes by itself: a large one, or one of which more than the first dimension is not known."""
    shape = array.shape
    if shape.rank and not shape.is_fully_defined():
        return not shape[1:].is_fully_defined()
    return shape.rank is None or shape.num_elements() * array.dtype.size >= LARGE

"""What an asynchronous worker and its servers send each other in a step: weights one way, gradients the other.

A message costs more than the bytes of small weights, so a server sends all of its weights in one, and gets their
gradients in another. What updates the weights is all computed where they are.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial

import keras
import tensorflow as tf

from pipeline.worker.tensorflow import tables
from pipeline.worker.tensorflow.collective import Addend
from pipeline.worker.tensorflow.patched import patched
from pipeline.worker.tensorflow.step import narrowed, widened

# Most trainable variables of a small model.
FEW = 16
# An array of so many bytes goes by itself: to join it with others would take as long as a message.
LARGE = 1 << 20


def is_small(model: keras.Model) -> bool:
    """True if messages take most of a step: a few weights, which together are no large array."""
    variables = model.trainable_variables
    size = sum(variable.shape.num_elements() * tf.as_dtype(variable.dtype).size for variable in variables)
    return len(variables) <= FEW and size < LARGE


@contextlib.contextmanager
def fetched(model: keras.Model, before: tf.Tensor) -> Iterator[dict[int, tf.Tensor]]:
    """Inside, weights have the values, by id, that each server sends in one message once `before` is known.

    One that a layer assigns to is read where it is from then on. Tables, of which rows are looked up, always are.
    """
    values: dict[int, tf.Tensor] = {}
    with contextlib.ExitStack() as stack:
        for device, held in _by_server(_read_whole(model)).items():
            read = [tf.TensorSpec(variable.shape, variable._value.dtype) for variable in held]
            with tf.device(device):
                # Functions, so that what begins them is one message, however many operations they have.
                message = tf.function(partial(_read, device, held), autograph=False)(before)
            for variable, value in zip(held, split(message, read), strict=True):
                values[id(variable)] = value
                assign = partial(_assigned, variable, variable._value)
                stack.enter_context(patched(variable, {"_value": value, "_direct_assign": assign}))
        yield values


def applied(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    gradients: Sequence[Addend | None],
    before: tf.Tensor,
    gradient_bits: int,
) -> tf.Tensor:
    """Updates weights by gradients, which each server gets in one message; returns the updates since `before`.

    With `gradient_bits` 16, dense gradients travel as bfloat16.
    """
    updates, variables = model.optimizer.iterations.value, model.trainable_variables
    present = {
        id(variable): gradient for variable, gradient in zip(variables, gradients, strict=True) if gradient is not None
    }
    by_server = _by_server([variable for variable in variables if id(variable) in present])
    leaves = {
        device: [leaf for variable in held for leaf in _leaves(present[id(variable)], gradient_bits)]
        for device, held in by_server.items()
    }
    messages_to = {device: joined(arrays) for device, arrays in leaves.items()}

    def apply(before: tf.Tensor, received: dict[str, list[tf.Tensor]]) -> tf.Tensor:
        arrived: dict[int, Addend] = {}
        for device, held in by_server.items():
            with tf.device(device):
                parts = iter(split(received[device], leaves[device]))
                for variable in held:
                    arrived[id(variable)] = _whole(present[id(variable)], variable, parts)
        all_here = tf.nest.flatten(list(arrived.values()), expand_composites=True)
        with tf.device(updates.device):
            with tf.control_dependencies(all_here):
                stale = updates.read_value() - before
            with tf.control_dependencies([stale]):
                strategy.run(update, args=([arrived.get(id(variable)) for variable in variables],))
            return stale

    def update(arrived: list[Addend | None]) -> None:
        # `strategy.run` leaves the device of the scope behind.
        with tf.device(updates.device):
            model.optimizer.apply(arrived, variables)

    with tf.device(updates.device):
        return tf.function(apply, autograph=False)(before, messages_to)  # type: ignore[no-any-return]


def _read_whole(model: keras.Model) -> list[keras.Variable]:
    """The variables that a step reads whole."""
    looked_up = {id(shard) for shard in tables.shards(model)}
    return [variable for variable in model.trainable_variables if id(variable) not in looked_up]


def _read(device: str, variables: Sequence[keras.Variable], before: tf.Tensor) -> list[tf.Tensor]:
    """The message of a server with the values of its variables."""
    with tf.device(device), tf.control_dependencies([before]):
        return joined([variable._value.read_value() for variable in variables])


def _assigned(variable: keras.Variable, held: tf.Variable, value: tf.Tensor) -> None:
    vars(variable)["_value"] = held
    held.assign(tf.cast(value, held.dtype))


def _by_server(variables: Sequence[keras.Variable]) -> dict[str, list[keras.Variable]]:
    by_server: dict[str, list[keras.Variable]] = {}
    for variable in variables:
        by_server.setdefault(variable._value.device, []).append(variable)
    return by_server


def _leaves(gradient: Addend, gradient_bits: int) -> list[tf.Tensor]:
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [narrowed(gradient) if gradient_bits == 16 else gradient]


def _whole(gradient: Addend, variable: keras.Variable, parts: Iterator[tf.Tensor]) -> Addend:
    """A gradient that has arrived, from its next parts, as wide as `gradient` was."""
    first = next(parts)
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(first, next(parts), tf.constant(list(variable.shape), tf.int32))
    return widened(first, gradient.dtype)


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

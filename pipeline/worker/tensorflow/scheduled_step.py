"""The compiled loop of one worker among other asynchronous ones: K steps in one call.

A message to a server costs more than the bytes of small weights, so a server sends all of its weights in one, and gets
their gradients in another. What updates the weights is all computed where they are.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.private import custom_gradients, in_stateless_scope
from pipeline.private_keras import keras_variables
from pipeline.worker.data.reading import Batch
from pipeline.worker.patched import all_patched, patched
from pipeline.worker.tensorflow import loss_scaling as losses
from pipeline.worker.tensorflow import tables
from pipeline.worker.tensorflow.collective import Addend
from pipeline.worker.tensorflow.loss_scaling import metrics
from pipeline.worker.tensorflow.loss_scaling.updates import updating
from pipeline.worker.tensorflow.step import Carried, all_reduce_once, awaited, caller, narrowed, widened
from pipeline.worker.variables import bytes_of

# To go round the loop takes messages to the servers beside those of steps, which are most of a small model's step: so
# many of its steps are made before. Each takes a trace of its own.
UNROLLED = 4
# Most trainable variables of a small model.
FEW = 16
# An array of so many bytes goes by itself: to join it with others would take as long as a message.
LARGE = 1 << 20


def scheduled_steps(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    batch: Callable[..., Batch],
    counted: Sequence[keras.Variable],
    fresh: Sequence[np.ndarray],
    gradient_bits: int = 32,
) -> Callable[[Iterator[Batch], tf.Tensor, tf.Tensor], tuple[tf.Tensor, ...]]:
    """A compiled function that trains `model` for a number of steps on one worker, while others do the same.

    (source, rows, edges [steps + 1]) ->
        (number of the worker, loss vectors [steps, 1 + outputs], examples of each step [steps], staleness [steps],
        seconds that each step waited for its batch [steps], the metrics' state)

    Staleness counts the updates that were applied between reading the variables and updating them. A step's batch is
    `batch(source, rows, edge, next edge)`; the variables that metrics have `counted` in begin as `fresh`. With
    `gradient_bits` 16, gradients travel as bfloat16.
    """
    all_reduce_once(model.optimizer)
    call = caller(model)
    updates = model.optimizer.iterations.value

    def replica_step(
        batch: Batch, state: Sequence[tf.Tensor], before: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], list[Addend | None]]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        counts, variables = metrics.CountedApart(model, counted, state), model.trainable_variables
        held = [variable.value for variable in variables]
        with fetched(model, before) as held_here, counts.updated(), tf.GradientTape() as tape:
            tape.watch(list(held_here.values()))
            y_pred = call(x, training=True)
            values = losses.weighted(model, x, y, y_pred, weights, tf.constant(1.0), training=True)
            scaled = model.optimizer.scale_loss(values[0])
        of_fetched, of_held = tape.gradient(scaled, [held_here, held])
        gradients = [
            _sum(of_fetched.get(id(variable)), gradient) for variable, gradient in zip(variables, of_held, strict=True)
        ]
        counts.count(x, y, y_pred, weights)
        return values, counts.state, gradients

    def one(
        source: Iterator[Batch], rows: tf.Tensor, edges: tf.Tensor, index: tf.Tensor, state: Sequence[tf.Tensor],
        values: tf.TensorArray, sizes: tf.TensorArray, waits: tf.TensorArray,
    ) -> tuple[Carried, ...]:  # fmt: skip
        own_batch, waited = awaited(lambda: batch(source, rows, edges[index], edges[index + 1]), after=values)
        with losses.without_keras_scaling(), _added_in_place(), updating(model.optimizer):
            with tf.device(updates.device):
                before = updates.read_value()
            loss, state, gradients = strategy.run(replica_step, args=(own_batch, state, before))
            stale = applied(strategy, model, gradients, before, gradient_bits)
        size = tf.shape(tf.nest.flatten(own_batch)[0], tf.int64)[0]
        written = [array.write(index, value) for array, value in ((values, loss), (sizes, size), (waits, waited))]
        return index + 1, stale, state, *written

    def steps(source: Iterator[Batch], rows: tf.Tensor, edges: tf.Tensor) -> tuple[Nested[tf.Tensor], ...]:
        def some(number: int, first: tf.Tensor, stale: tf.TensorArray, *others: Carried) -> tuple[Carried, ...]:
            index, rest, ages = first, list(others), []
            for _ in range(number):
                index, age, *rest = one(source, rows, edges, index, *rest)
                ages.append(age)
            with tf.device(updates.device):
                together = tf.cast(tf.stack(ages), tf.int64)
            return index, stale.scatter(tf.range(first, index), together), *rest

        count = tf.shape(edges)[0] - 1
        arrays = [tf.TensorArray(kind, size=count) for kind in (tf.int64, tf.float32, tf.int64, tf.float32)]
        carried = (0, arrays[0], [tf.constant(value) for value in fresh], *arrays[1:])
        for number in (UNROLLED, 1) if is_small(model) else (1,):
            carried = tf.while_loop(lambda index, *_, by=number: index + by <= count, partial(some, number), carried)
        _, stale, state, values, sizes, waits = carried
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        return worker, *(array.stack() for array in (values, sizes, stale, waits)), state

    return tf.function(steps, reduce_retracing=True, autograph=False)  # type: ignore[no-any-return]


def _added_in_place() -> contextlib.AbstractContextManager[None]:
    """Inside, Keras adds to a variable where it is held, so that nothing is lost that other workers add meanwhile."""
    usual = keras_variables.Variable.assign_add

    def assign_add(self: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        if in_stateless_scope() or "_direct_assign" in vars(self):
            return usual(self, value)
        return self._value.assign_add(tf.cast(value, self._value.dtype))

    return patched(keras_variables.Variable, {"assign_add": assign_add})


def _sum(first: Addend | None, second: Addend | None) -> Addend | None:
    if first is None or second is None:
        return second if first is None else first
    return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)


def is_small(model: keras.Model) -> bool:
    """True if messages take most of a step: a few weights, which together are no large array."""
    variables = model.trainable_variables
    return len(variables) <= FEW and sum(map(bytes_of, variables)) < LARGE


@contextlib.contextmanager
def fetched(model: keras.Model, before: tf.Tensor) -> Iterator[dict[int, tf.Tensor]]:
    """Inside, weights have the values, by id, that each server sends in one message once `before` is known.

    One that a layer assigns to is read where it is from then on. Tables, of which rows are looked up, always are, and
    so is what a custom gradient reads.
    """
    values: dict[int, tf.Tensor] = {}
    variables: list[tuple[keras.Variable, tf.Variable]] = []
    looked_up = {id(shard) for shard in tables.shards(model)}
    read_whole = [variable for variable in model.trainable_variables if id(variable) not in looked_up]
    with contextlib.ExitStack() as stack:
        for device, held in _by_server(read_whole).items():
            read = [tf.TensorSpec(variable.shape, variable._value.dtype) for variable in held]
            with tf.device(device):
                # Functions, so that what begins them is one message, however many operations they have.
                message = tf.function(partial(_read, device, held), autograph=False)(before)
            for variable, value in zip(held, split(message, read), strict=True):
                values[id(variable)] = value
                variables.append((variable, variable._value))
                assign = partial(_assigned, variable, variable._value)
                stack.enter_context(patched(variable, {"_value": value, "_direct_assign": assign}))
        stack.enter_context(_read_in_custom_gradients(variables))
        yield values


def _read_in_custom_gradients(
    variables: Sequence[tuple[keras.Variable, tf.Variable]],
) -> contextlib.AbstractContextManager[None]:
    """Inside, what has a gradient of its own reads variables where they are held: TensorFlow finds no others there."""
    usual = custom_gradients._graph_mode_decorator

    def decorated(function: Callable[..., object], args: Sequence[object], kwargs: dict[str, object]) -> object:
        with all_patched((variable, {"_value": held}) for variable, held in variables):
            return usual(function, args, kwargs)

    return patched(custom_gradients, {"_graph_mode_decorator": decorated})


def applied(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    gradients: Sequence[Addend | None],
    before: tf.Tensor,
    gradient_bits: int,
) -> tf.Tensor:
    """Updates weights by gradients, which each server gets in one message; returns the updates since `before`."""
    # With `gradient_bits` 16, dense gradients travel as bfloat16.
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
    """Returns all bytes of the arrays as one, uint8 [bytes], and behind it the large arrays as they are."""
    # A first dimension that is not known before a step goes with them.
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

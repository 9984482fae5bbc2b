"""The compiled loop of one worker among other asynchronous ones: K steps in one call, and validation in one process."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from pipeline.data.nested import Nested
from pipeline.private import in_stateless_scope
from pipeline.private_keras import keras_variables
from pipeline.worker.data.reading import Batch, Batches
from pipeline.worker.rates import updating
from pipeline.worker.tensorflow.collective import Addend
from pipeline.worker.tensorflow.loss_scaling import loss as losses
from pipeline.worker.tensorflow.loss_scaling import metrics
from pipeline.worker.tensorflow.loss_scaling.updates import overwritten_without_branch
from pipeline.worker.tensorflow.step import Carried, awaited, caller, narrowed, widened

# See `scheduled_steps` and `validation_alone`.
ScheduledSteps: TypeAlias = Callable[[Iterator[Batch], tf.Tensor, tf.Tensor], tuple[tf.Tensor, ...]]
ValidationAlone: TypeAlias = Callable[
    [Batches, tf.Tensor, Sequence[tf.Tensor]], tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]
]


def scheduled_steps(
    model: keras.Model,
    strategy: tf.distribute.Strategy,
    batch: Callable[..., Batch],
    counted: Sequence[keras.Variable],
    fresh: Sequence[np.ndarray],
    gradient_bits: int = 32,
) -> ScheduledSteps:
    """A compiled function that trains `model` for a number of steps on one worker, while others do the same.

    (source, rows, edges [steps + 1]) ->
        (number of the worker, loss vectors [steps, 1 + outputs], examples of each step [steps], staleness [steps],
        seconds that each step waited for its batch [steps], the metrics' state)

    Staleness counts the updates that were applied between reading the variables and updating them. A step's batch is
    `batch(source, rows, edge, next edge)`; the variables that metrics have `counted` in begin as `fresh`. With
    `gradient_bits` 16, gradients travel as bfloat16.
    """
    call = caller(model)
    updates = model.optimizer.iterations.value

    def replica_step(batch: Batch, state: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor], tf.Tensor]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        counts, variables = metrics.CountedApart(model, counted, state), model.trainable_variables
        before = updates.read_value()
        with tf.control_dependencies([before]), counts.updated(), tf.GradientTape() as tape:
            y_pred = call(x, training=True)
            values = losses.weighted(model, x, y, y_pred, weights, tf.constant(1.0), training=True)
            scaled = model.optimizer.scale_loss(values[0])
        gradients = tape.gradient(scaled, variables)
        present = [gradient for gradient in gradients if gradient is not None]
        with tf.control_dependencies(tf.nest.flatten(present, expand_composites=True)):
            stale = updates.read_value() - before
        if gradient_bits == 16:
            gradients = [_sent_narrow(*pair) for pair in zip(gradients, variables, strict=True)]
        with tf.control_dependencies([stale]):
            model.optimizer.apply(gradients, variables)
        counts.count(x, y, y_pred, weights)
        return values, counts.state, stale

    def steps(source: Iterator[Batch], rows: tf.Tensor, edges: tf.Tensor) -> tuple[Nested[tf.Tensor], ...]:
        def one(index: tf.Tensor, state: Sequence[tf.Tensor], *arrays: tf.TensorArray) -> tuple[Carried, ...]:
            values, sizes, stale, waits = arrays
            own_batch, waited = awaited(lambda: batch(source, rows, edges[index], edges[index + 1]), after=values)
            with contextlib.ExitStack() as stack:
                stack.enter_context(losses.without_keras_scaling())
                stack.enter_context(_added_in_place())
                for optimizer in updating(model.optimizer):
                    stack.enter_context(overwritten_without_branch(optimizer))
                loss, state, age = strategy.run(replica_step, args=(own_batch, state))
            size = tf.shape(tf.nest.flatten(own_batch)[0], tf.int64)[0]
            age = tf.cast(age, tf.int64)
            written = [array.write(index, value) for array, value in ((values, loss), (sizes, size), (stale, age))]
            return index + 1, state, *written, waits.write(index, waited)

        count = tf.shape(edges)[0] - 1
        arrays = [tf.TensorArray(kind, size=count) for kind in (tf.float32, tf.int64, tf.int64, tf.float32)]
        state = [tf.constant(value) for value in fresh]
        _, state, *arrays = tf.while_loop(lambda index, *_: index < count, one, (0, state, *arrays))
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        return worker, *(array.stack() for array in arrays), state

    return tf.function(steps, reduce_retracing=True, autograph=False)  # type: ignore[no-any-return]


def validation_alone(model: keras.Model, counted: Sequence[keras.Variable]) -> ValidationAlone:
    """A compiled function that evaluates `model` for a number of steps, on this process alone.

    (iterator over (examples, [a batch]), steps, the metrics' state) ->
        (loss vectors [steps, 1 + outputs], examples of each step [steps], the metrics' state after them)
    """
    call = caller(model)

    def steps(
        iterator: Batches, count: tf.Tensor, state: Sequence[tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        def one(
            index: tf.Tensor, state: Sequence[tf.Tensor], values: tf.TensorArray, sizes: tf.TensorArray
        ) -> tuple[Carried, ...]:
            examples, (batch,) = next(iterator)
            x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
            counts = metrics.CountedApart(model, counted, state)
            with counts.updated(), losses.without_keras_scaling():
                y_pred = call(x, training=False)
                loss = losses.weighted(model, x, y, y_pred, weights, tf.constant(1.0), training=False)
            counts.count(x, y, y_pred, weights)
            return index + 1, counts.state, values.write(index, loss), sizes.write(index, examples)

        arrays = (tf.TensorArray(tf.float32, size=count), tf.TensorArray(tf.float32, size=count))
        _, state, values, sizes = tf.while_loop(lambda index, *_: index < count, one, (0, list(state), *arrays))
        return values.stack(), sizes.stack(), list(state)

    return tf.function(steps, reduce_retracing=True, autograph=False)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _added_in_place() -> Iterator[None]:
    """Inside, Keras adds to a variable where it is held, so that nothing is lost that other workers add meanwhile."""
    usual = keras_variables.Variable.assign_add

    def assign_add(self: keras.Variable, value: tf.Tensor) -> tf.Tensor:
        if in_stateless_scope():
            return usual(self, value)
        return self._value.assign_add(tf.cast(value, self._value.dtype))

    try:
        keras_variables.Variable.assign_add = assign_add
        yield
    finally:
        keras_variables.Variable.assign_add = usual


def _sent_narrow(gradient: Addend | None, variable: keras.Variable) -> Addend | None:
    """A gradient that is narrow on its way to where its variable is, and as wide as before when it is there."""
    if gradient is None:
        return None
    narrow = narrowed(gradient)
    with tf.device(variable._value.device):
        return widened(narrow, gradient.dtype)

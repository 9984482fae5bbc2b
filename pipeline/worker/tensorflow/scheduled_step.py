"""The compiled loop of one worker among other asynchronous ones: K steps in one call, and validation in one process."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import keras
import numpy as np
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.private import in_stateless_scope
from pipeline.private_keras import keras_variables
from pipeline.worker.data.reading import Batch, Batches
from pipeline.worker.tensorflow import servers
from pipeline.worker.tensorflow.collective import Addend
from pipeline.worker.tensorflow.loss_scaling import loss as losses
from pipeline.worker.tensorflow.loss_scaling import metrics
from pipeline.worker.tensorflow.loss_scaling.updates import updating
from pipeline.worker.tensorflow.patched import patched
from pipeline.worker.tensorflow.step import Carried, all_reduce_once, awaited, caller

# To go round the loop takes messages to the servers beside those of steps, which are most of a small model's step: so
# many of its steps are made before. Each takes a trace of its own.
UNROLLED = 4

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
    all_reduce_once(model.optimizer)
    call = caller(model)
    updates = model.optimizer.iterations.value

    def replica_step(
        batch: Batch, state: Sequence[tf.Tensor], before: tf.Tensor
    ) -> tuple[tf.Tensor, list[tf.Tensor], list[Addend | None]]:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        counts, variables = metrics.CountedApart(model, counted, state), model.trainable_variables
        held = [variable.value for variable in variables]
        with servers.fetched(model, before) as fetched, counts.updated(), tf.GradientTape() as tape:
            tape.watch(list(fetched.values()))
            y_pred = call(x, training=True)
            values = losses.weighted(model, x, y, y_pred, weights, tf.constant(1.0), training=True)
            scaled = model.optimizer.scale_loss(values[0])
        of_fetched, of_held = tape.gradient(scaled, [fetched, held])
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
            stale = servers.applied(strategy, model, gradients, before, gradient_bits)
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
        for number in (UNROLLED, 1) if servers.is_small(model) else (1,):
            carried = tf.while_loop(lambda index, *_, by=number: index + by <= count, partial(some, number), carried)
        _, stale, state, values, sizes, waits = carried
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        return worker, *(array.stack() for array in (values, sizes, stale, waits)), state

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

"""The compiled loop: K steps in one call, the same for every strategy.

Gradients are summed over replicas here, before the optimizer clips them or averages weights, so that every setting
of the optimizer means what it means on one device.
"""

from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from pipeline.train import loss as losses

# (iterator over (examples, a batch for each local replica), steps)
#     -> (loss vectors [steps, 1 + outputs], examples of each step [steps])
Steps = Callable[[Iterator[Any], Any], tuple[Any, Any]]


def training_steps(
    model: keras.Model, strategy: tf.distribute.Strategy, gradient_bits: int, always_fed: bool = False
) -> Steps:
    """A compiled function that trains `model` for a number of steps and updates its metrics.

    The loss of each step is that of the global batch, the same on every replica. With `gradient_bits` 16, gradients
    travel as bfloat16. `always_fed` promises that no replica is ever without examples, which saves a pass over the
    gradients.
    """
    sum_once(model.optimizer)
    call = _call(model)
    variables = model.trainable_variables

    def replica_step(examples: Any, batch: Any) -> Any:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        share = _share(batch, examples)
        with tf.GradientTape() as tape:
            y_pred = call(x, training=True)
            values = losses.weighted(model, x, y, y_pred, weights, share, training=True)
            scaled = model.optimizer.scale_loss(values[0])
        gradients = tape.gradient(scaled, variables)
        # Nothing from a replica without examples may reach the sum: what it divides by is 0.
        if not always_fed:
            gradients = [_where(share > 0, gradient) for gradient in gradients]
        summed, values = _sum(gradients, values, gradient_bits)
        model.optimizer.apply(summed, variables)
        model.compute_metrics(x, y, y_pred, sample_weight=weights)
        return values

    return _many(strategy, replica_step)


def validation_steps(model: keras.Model, strategy: tf.distribute.Strategy) -> Steps:
    """A compiled function that evaluates `model` for a number of steps and updates its metrics."""
    call = _call(model)

    def replica_step(examples: Any, batch: Any) -> Any:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        y_pred = call(x, training=False)
        values = losses.weighted(model, x, y, y_pred, weights, _share(batch, examples), training=False)
        model.compute_metrics(x, y, y_pred, sample_weight=weights)
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, values)

    return _many(strategy, replica_step)


def sum_once(optimizer: keras.optimizers.Optimizer) -> None:
    """Keeps Keras from summing gradients over replicas a second time."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None:
            each._all_reduce_sum_gradients = list


def sum_as_keras_does(optimizer: keras.optimizers.Optimizer) -> None:
    """Gives an optimizer back to Keras, which then sums gradients over replicas itself."""
    for each in (optimizer, getattr(optimizer, "inner_optimizer", None)):
        if each is not None:
            vars(each).pop("_all_reduce_sum_gradients", None)


def _many(strategy: tf.distribute.Strategy, replica_step: Callable[..., Any]) -> Steps:
    def steps(iterator: Any, count: Any) -> Any:
        def one(index: Any, values: Any, sizes: Any) -> Any:
            # A plain iterator, and each replica's part taken here: TensorFlow's distributed iterator costs a fifth of a
            # small step on CPU devices, for copying ahead what is in the same memory.
            examples, batches = next(iterator)
            mine = strategy.experimental_distribute_values_from_function(
                lambda context: batches[context.replica_id_in_sync_group % len(batches)]
            )
            with losses.without_keras_scaling():
                summed = strategy.run(replica_step, args=(examples, mine))
            first = strategy.experimental_local_results(summed)[0]
            return index + 1, values.write(index, first), sizes.write(index, examples)

        arrays = (tf.TensorArray(tf.float32, size=count), tf.TensorArray(tf.float32, size=count))
        _, values, sizes = tf.while_loop(lambda index, *_: index < count, one, (0, *arrays))
        return values.stack(), sizes.stack()

    # Keras's own fit converts nothing with AutoGraph either, which would take as long as all the rest of tracing.
    return tf.function(steps, reduce_retracing=True, autograph=False)  # type: ignore[no-any-return]


def _sum(gradients: list[Any], values: Any, gradient_bits: int) -> tuple[list[Any], Any]:
    """Gradients and loss values summed over replicas."""
    context = tf.distribute.get_replica_context()
    if context.num_replicas_in_sync == 1:
        return gradients, values
    add = tf.distribute.ReduceOp.SUM
    present = [gradient for gradient in gradients if gradient is not None]
    if gradient_bits == 16:
        narrow = context.all_reduce(add, [_narrow(gradient) for gradient in present])
        summed = [_widen(total, gradient.dtype) for total, gradient in zip(narrow, present, strict=True)]
        values = context.all_reduce(add, values)
    else:
        *summed, values = context.all_reduce(add, [*present, values])
    each = iter(summed)
    return [None if gradient is None else next(each) for gradient in gradients], values


def _narrow(gradient: Any) -> Any:
    wide = isinstance(gradient, tf.Tensor) and gradient.dtype == tf.float32
    return tf.cast(gradient, tf.bfloat16) if wide else gradient


def _widen(gradient: Any, dtype: Any) -> Any:
    return tf.cast(gradient, dtype) if gradient.dtype != dtype else gradient


def _where(condition: Any, gradient: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_where(condition, gradient.values), gradient.indices, gradient.dense_shape)
    return tf.where(condition, gradient, tf.zeros((), gradient.dtype))


def _share(batch: Any, examples: Any) -> Any:
    here = tf.shape(tf.nest.flatten(batch)[0])[0]
    return tf.cast(here, tf.float32) / examples


def _call(model: keras.Model) -> Callable[..., Any]:
    """Calls the model with `training` where its `call` takes that."""
    return model if model._call_has_training_arg else lambda x, training: model(x)

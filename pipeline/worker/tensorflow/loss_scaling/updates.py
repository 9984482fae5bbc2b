"""Lets optimizers that act every so many steps do so where replicas share a process.

Keras accumulates gradients, and overwrites weights with their moving averages, inside a condition, in which such
replicas cannot meet to change a variable.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import keras
import tensorflow as tf

from pipeline.private import maybe_merge_call, strategy_supports_no_merge_call
from pipeline.worker.tensorflow.collective import Addend
from pipeline.worker.tensorflow.patched import patched


@contextlib.contextmanager
def accumulated_among_replicas(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside, steps that are traced have `optimizer` update after as many steps as it says.

    The condition is around all replicas, since it is the same for each.
    """
    if not optimizer.gradient_accumulation_steps:
        yield
        return
    with patched(optimizer, {"_backend_apply_gradients": partial(_apply_accumulated, optimizer)}):
        yield


def _apply_accumulated(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[Addend], variables: Sequence[keras.Variable]
) -> None:
    """Keras's own, but for where the condition is."""
    if strategy_supports_no_merge_call():
        type(optimizer)._backend_apply_gradients(optimizer, gradients, variables)
        return
    steps = optimizer.gradient_accumulation_steps
    sums = [optimizer._accumulated_gradients[optimizer._get_variable_index(variable)] for variable in variables]

    def update(gradients: Sequence[Addend]) -> None:
        means = [(gradient + total) / steps for gradient, total in zip(gradients, sums, strict=True)]
        means = optimizer._clip_gradients(means)
        optimizer._apply_weight_decay(variables)
        optimizer._backend_update_step(means, variables, optimizer.learning_rate)
        optimizer._backend_reset_gradient_accumulators()

    def add(gradients: Sequence[Addend]) -> None:
        optimizer._backend_increment_gradient_accumulators(gradients, sums)

    def on_all(strategy: tf.distribute.Strategy, gradients: Sequence[Addend]) -> None:
        def every(function: object) -> None:
            strategy.extended.call_for_each_replica(function, args=(gradients,))

        due = tf.equal((optimizer._iterations + 1) % steps, 0)
        tf.cond(due, lambda: every(update), lambda: every(add))

    tf.distribute.get_replica_context().merge_call(on_all, args=(list(gradients),))
    if optimizer.use_ema:
        optimizer._update_model_variables_moving_average(optimizer._trainable_variables)


@contextlib.contextmanager
def overwritten_without_branch(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside, steps that are traced overwrite the weights that `optimizer` updates as often as it says."""
    frequency = optimizer.ema_overwrite_frequency if optimizer.use_ema else None
    if not frequency:
        yield
        return
    apply = partial(_apply_and_overwrite, optimizer, frequency, optimizer._backend_apply_gradients)
    # All replicas are traced inside, so none sees another's change.
    with patched(optimizer, {"_backend_apply_gradients": apply, "ema_overwrite_frequency": None}):
        yield


def _apply_and_overwrite(
    optimizer: keras.optimizers.Optimizer,
    frequency: int,
    apply: Callable[[Sequence[Addend], Sequence[keras.Variable]], None],
    gradients: Sequence[Addend],
    variables: Sequence[keras.Variable],
) -> None:
    apply(gradients, variables)
    due = tf.equal((optimizer.iterations + 1) % frequency, 0)
    pairs = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    values = [(variable.value, average.value) for variable, average in pairs if average is not None]
    maybe_merge_call(_overwrite, tf.distribute.get_strategy(), values, due)


def _overwrite(
    strategy: tf.distribute.Strategy, pairs: Sequence[tuple[tf.Variable, tf.Variable]], due: tf.Tensor
) -> None:
    def chosen(variable: tf.Variable, average: tf.Tensor, due: tf.Tensor) -> None:
        variable.assign(tf.where(due, tf.cast(average, variable.dtype), variable))

    for variable, average in pairs:
        strategy.extended.update(variable, chosen, args=(average, due), group=False)

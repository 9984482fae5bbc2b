"""Gradients that an optimizer adds up over several steps before it updates, also where replicas share a process.

Keras updates inside a condition, in which such replicas cannot meet to change a variable. Here the condition is around
all of them, since it is the same for each.
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import keras
import tensorflow as tf

from pipeline.private import strategy_supports_no_merge_call
from pipeline.worker.tensorflow.collective import Addend


@contextlib.contextmanager
def accumulated_among_replicas(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside, steps that are traced have `optimizer` update after as many steps as it says."""
    if not optimizer.gradient_accumulation_steps:
        yield
        return
    # Past Keras's own setter, which would track it.
    vars(optimizer)["_backend_apply_gradients"] = partial(_apply, optimizer)
    try:
        yield
    finally:
        vars(optimizer).pop("_backend_apply_gradients")


def _apply(
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

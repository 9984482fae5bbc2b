"""Lets optimizers that act every so many steps do so where replicas share a process, and traces Adam in less time.

Keras accumulates gradients, and overwrites weights with their moving averages, inside a condition, in which such
replicas cannot meet to change a variable. Its Adam takes nearly half of the time in which a deep model is traced: the
half of its operations that are traced here compute the same to the last bit.
"""

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from pipeline.private import maybe_merge_call, strategy_supports_no_merge_call
from pipeline.worker import variables
from pipeline.worker.patched import all_patched
from pipeline.worker.tensorflow.collective import Addend

# By graph, device, type and learning rate: the graph and the rate, kept so that their identities stay theirs, and the
# scalars to update variables with: the corrected rate, 1 - beta_1, 1 - beta_2 and epsilon.
KnownScalars: TypeAlias = dict[tuple[int, str, tf.DType, int], tuple[object, object, tuple[tf.Tensor, ...]]]


def updating(*optimizers: keras.optimizers.Optimizer) -> AbstractContextManager[None]:
    """Inside, steps that are traced have optimizers update weights as they are to among replicas."""
    return all_patched((one, _answers(one)) for one in itertools.chain(*map(variables.updating, optimizers)))


def _answers(optimizer: keras.optimizers.Optimizer) -> dict[str, object]:
    instead, apply = dict[str, object](), optimizer._backend_apply_gradients
    if optimizer.gradient_accumulation_steps:
        # The condition is around all replicas, since it is the same for each.
        instead["_backend_apply_gradients"] = apply = partial(_apply_accumulated, optimizer)
    if optimizer.use_ema and (frequency := optimizer.ema_overwrite_frequency):
        # All replicas are traced inside, so none sees another's change.
        instead["_backend_apply_gradients"] = partial(_apply_and_overwrite, optimizer, frequency, apply)
        instead["ema_overwrite_frequency"] = None
    # An Adam or AdamW of Keras's.
    if type(optimizer).update_step is keras.optimizers.Adam.update_step and not optimizer.amsgrad:
        instead["update_step"] = partial(_update, optimizer, {})
    return instead


def _apply_accumulated(
    optimizer: keras.optimizers.Optimizer, gradients: Sequence[Addend], variables: Sequence[keras.Variable]
) -> None:
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
        each = partial(partial, strategy.extended.call_for_each_replica, args=(gradients,))
        tf.cond(tf.equal((optimizer._iterations + 1) % steps, 0), each(update), each(add))

    tf.distribute.get_replica_context().merge_call(on_all, args=(list(gradients),))
    if optimizer.use_ema:
        optimizer._update_model_variables_moving_average(optimizer._trainable_variables)


def _apply_and_overwrite(
    optimizer: keras.optimizers.Optimizer, frequency: int, apply: Callable[..., None], *applied: Sequence[Any]
) -> None:
    apply(*applied)
    due = tf.equal((optimizer.iterations + 1) % frequency, 0)
    both = zip(optimizer._trainable_variables, optimizer._model_variables_moving_average, strict=True)
    pairs = [(variable.value, average.value) for variable, average in both if average is not None]

    def chosen(variable: tf.Variable, average: tf.Tensor, due: tf.Tensor) -> None:
        variable.assign(tf.where(due, tf.cast(average, variable.dtype), variable))

    def overwrite(strategy: tf.distribute.Strategy, pairs: Sequence[Sequence[tf.Variable]], due: tf.Tensor) -> None:
        for variable, average in pairs:
            strategy.extended.update(variable, chosen, args=(average, due), group=False)

    maybe_merge_call(overwrite, tf.distribute.get_strategy(), pairs, due)


def _update(
    optimizer: keras.optimizers.Optimizer, known: KnownScalars, gradient: Addend, variable: tf.Variable, rate: tf.Tensor
) -> None:
    """Keras's `Adam.update_step`, operation by operation, on the device of the scope."""
    if not isinstance(gradient, tf.Tensor):
        type(optimizer).update_step(optimizer, gradient, variable, rate)
        return
    ops, graph, dtype = tf.raw_ops, tf.compat.v1.get_default_graph(), variable.dtype
    where = (id(graph), variable.device, dtype, id(rate))
    if where not in known:
        step, betas = keras.ops.cast(optimizer.iterations + 1, dtype), (optimizer.beta_1, optimizer.beta_2)
        power_1, power_2 = (keras.ops.power(keras.ops.cast(beta, dtype), step) for beta in betas)
        rest_1, rest_2 = (tf.constant(1 - beta, dtype) for beta in betas)
        corrected = keras.ops.cast(rate, dtype) * keras.ops.sqrt(1 - power_2) / (1 - power_1)
        known[where] = (graph, rate, (corrected, rest_1, rest_2, tf.constant(optimizer.epsilon, dtype)))
    corrected, rest_1, rest_2, epsilon = known[where][-1]
    if gradient.dtype != dtype:
        gradient = tf.cast(gradient, dtype)
    place = optimizer._get_variable_index(variable)
    mean, square = optimizer._momentums[place].value, optimizer._velocities[place].value
    mean.assign_add(ops.Mul(x=ops.Sub(x=gradient, y=tf.convert_to_tensor(mean)), y=rest_1))
    change = ops.Sub(x=ops.Square(x=gradient), y=tf.convert_to_tensor(square))
    square.assign_add(ops.Mul(x=change, y=rest_2))
    root = ops.AddV2(x=ops.Sqrt(x=tf.convert_to_tensor(square)), y=epsilon)
    variable.assign_sub(ops.RealDiv(x=ops.Mul(x=tf.convert_to_tensor(mean), y=corrected), y=root))

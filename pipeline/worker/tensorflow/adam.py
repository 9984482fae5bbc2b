"""Traces Keras's Adam in half of its operations, which compute the same to the last bit.

Keras corrects the learning rate for the step anew for each variable of each replica, and takes each operation through
layers that serve other backends: of the time that a deep model takes to trace, that is nearly a half.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import keras
import tensorflow as tf

from pipeline.worker.tensorflow.collective import Addend

# Where scalars are known: in which graph, on which device, in which type, for which learning rate.
ScalarKey: TypeAlias = tuple[int, str, tf.DType, int]


@contextlib.contextmanager
def traced_briefly(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Inside, steps that are traced update dense variables so where the optimizer is an Adam or AdamW of Keras's."""
    is_adam = type(optimizer).update_step is keras.optimizers.Adam.update_step
    if not is_adam or optimizer.amsgrad:
        yield
        return
    # Past Keras's own setter, which would track it.
    vars(optimizer)["update_step"] = partial(_update, optimizer, _Scalars(optimizer))
    try:
        yield
    finally:
        vars(optimizer).pop("update_step")


@dataclass(frozen=True)
class _OfStep:
    """Scalars to update all variables of a device with: the corrected rate, 1 - beta_1, 1 - beta_2 and epsilon."""

    rate: tf.Tensor
    rest_1: tf.Tensor
    rest_2: tf.Tensor
    epsilon: tf.Tensor


@dataclass
class _Scalars:
    """The scalars of a step, made once on each device."""

    optimizer: keras.optimizers.Optimizer
    # With the graph and the learning rate, which are kept so that their identities stay theirs.
    known: dict[ScalarKey, tuple[object, object, _OfStep]] = field(default_factory=dict)

    def on(self, variable: tf.Variable, learning_rate: tf.Tensor) -> _OfStep:
        """Those for a variable, on the device of the scope."""
        graph = tf.compat.v1.get_default_graph()
        place = (id(graph), variable.device, variable.dtype, id(learning_rate))
        if place not in self.known:
            self.known[place] = (graph, learning_rate, self._made(variable.dtype, learning_rate))
        return self.known[place][-1]

    def _made(self, dtype: tf.DType, learning_rate: tf.Tensor) -> _OfStep:
        optimizer, ops = self.optimizer, keras.ops
        step = ops.cast(optimizer.iterations + 1, dtype)
        power_1, power_2 = (ops.power(ops.cast(beta, dtype), step) for beta in (optimizer.beta_1, optimizer.beta_2))
        rest_1, rest_2 = (tf.constant(1 - beta, dtype) for beta in (optimizer.beta_1, optimizer.beta_2))
        rate = ops.cast(learning_rate, dtype) * ops.sqrt(1 - power_2) / (1 - power_1)
        return _OfStep(rate, rest_1, rest_2, tf.constant(optimizer.epsilon, dtype))


def _update(
    optimizer: keras.optimizers.Optimizer,
    scalars: _Scalars,
    gradient: Addend,
    variable: tf.Variable,
    learning_rate: tf.Tensor,
) -> None:
    """Keras's `Adam.update_step`, operation by operation."""
    if not isinstance(gradient, tf.Tensor):
        type(optimizer).update_step(optimizer, gradient, variable, learning_rate)
        return
    ops, of_step = tf.raw_ops, scalars.on(variable, learning_rate)
    if gradient.dtype != variable.dtype:
        gradient = tf.cast(gradient, variable.dtype)
    place = optimizer._get_variable_index(variable)
    mean, square = optimizer._momentums[place].value, optimizer._velocities[place].value
    mean.assign_add(ops.Mul(x=ops.Sub(x=gradient, y=tf.convert_to_tensor(mean)), y=of_step.rest_1))
    change = ops.Sub(x=ops.Square(x=gradient), y=tf.convert_to_tensor(square))
    square.assign_add(ops.Mul(x=change, y=of_step.rest_2))
    root = ops.AddV2(x=ops.Sqrt(x=tf.convert_to_tensor(square)), y=of_step.epsilon)
    variable.assign_sub(ops.RealDiv(x=ops.Mul(x=tf.convert_to_tensor(mean), y=of_step.rate), y=root))

"""A step of training, or of validation, as a function of the values of all variables and a batch.

Arrays are those of the whole global batch wherever its parts are, so that a step computes what one device computes: the
loss is divided by all examples, statistics are those of all, and XLA adds up between the devices.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The values of trainable, other, optimizer's and metrics' variables.
State: TypeAlias = tuple[list[Any], list[Any], list[Any], list[Any]]
# (state, a batch) -> (state, its loss)
Step: TypeAlias = Callable[[State, Any], tuple[State, Any]]
# What a batch makes of a model: its loss, the gradients, and the values of other and of metrics' variables.
Made: TypeAlias = tuple[Any, list[Any], list[Any], list[Any]]


def made_of(model: keras.Model, state: State, batch: Any) -> Made:
    """What a batch makes of a model, before its weights are updated."""
    trainable, other, optimizer, metrics = state
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    differentiated = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)
    (_, (loss, y_pred, other, metrics)), gradients = differentiated(
        trainable, other, metrics, x, y, weights, training=True, optimizer_variables=optimizer
    )
    return loss, gradients, other, _counted(model, metrics, x, y, y_pred, weights)


def train(
    model: keras.Model, state: State, batch: Any, made_of: Callable[[keras.Model, State, Any], Made] = made_of
) -> tuple[State, Any]:
    """(state, loss) after the model has been trained on a batch."""
    trainable, _, optimizer, _ = state
    loss, gradients, other, metrics = made_of(model, state, batch)
    trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
    return (list(trainable), list(other), list(optimizer), list(metrics)), loss


def validate(model: keras.Model, state: State, batch: Any) -> tuple[State, Any]:
    """The same without training: the metrics alone change."""
    trainable, other, optimizer, metrics = state
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    _, (loss, y_pred, _, metrics) = model.compute_loss_and_updates(
        trainable, other, metrics, x, y, weights, training=False
    )
    return (trainable, other, optimizer, _counted(model, metrics, x, y, y_pred, weights)), loss


def _counted(model: keras.Model, metrics: Sequence[Any], x: Any, y: Any, y_pred: Any, weights: Any) -> list[Any]:
    """The metrics' variables once a batch is counted."""
    variables = model.metrics_variables
    with keras.StatelessScope(state_mapping=list(zip(variables, metrics, strict=True))) as scope:
        model.compute_metrics(x, y, y_pred, weights)
    found = [scope.get_current_value(variable) for variable in variables]
    return [value if new is None else new for value, new in zip(metrics, found, strict=True)]


def results(model: keras.Model) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """What the metrics come to, of the values of their variables."""

    def made(values: Sequence[Any]) -> dict[str, Any]:
        with keras.StatelessScope(state_mapping=list(zip(model.metrics_variables, values, strict=True))):
            found: dict[str, Any] = model.get_metrics_result()
        return found

    compiled: Callable[[Sequence[Any]], dict[str, Any]] = jax.jit(made)
    return compiled


def over(value: np.ndarray, sharding: NamedSharding) -> Any:
    """An array over all devices, of which each process, which has all of it, gives its own devices their parts."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def everywhere(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())

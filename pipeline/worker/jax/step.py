"""A step of training, or of validation, as a function of the values of all variables and a batch.

Arrays are those of the whole global batch wherever its parts are, so that a step computes what one device computes.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.worker.patched import patched
from pipeline.worker.variables import Variable

# A model's trainable variables, all others that a step may read, the optimizer's and the metrics'.
Variables: TypeAlias = tuple[list[Variable], list[Variable], list[Variable], list[Variable]]
# The values of these.
State: TypeAlias = tuple[list[Any], list[Any], list[Any], list[Any]]
# (state, a batch) -> (state, its loss)
Step: TypeAlias = Callable[[State, Any], tuple[State, Any]]
# What a batch makes of a model: its loss, the gradients, and the values of other and of metrics' variables.
Made: TypeAlias = tuple[Any, list[Any], list[Any], list[Any]]
# (model, its variables, their values, a batch) -> what it makes of the model
MadeOf: TypeAlias = Callable[[keras.Model, Variables, State, Any], Made]


def made_of(model: keras.Model, variables: Variables, state: State, batch: Any) -> Made:
    """Returns what a batch makes of a model, before its weights are updated."""

    def scaled(trainable: list[Any]) -> tuple[Any, tuple[Any, Any, State]]:
        return _forward(model, variables, (trainable, *state[1:]), batch, training=True)

    (_, (loss, y_pred, after)), gradients = jax.value_and_grad(scaled, has_aux=True)(state[0])
    _, other, _, metrics = _counted(model, variables, (*state[:1], *after[1:]), batch, y_pred)
    return loss, gradients, other, metrics


def train(
    model: keras.Model, variables: Variables, state: State, batch: Any, made_of: MadeOf = made_of
) -> tuple[State, Any]:
    """(state, loss) after the model has been trained on a batch."""
    trainable, _, optimizer, _ = state
    loss, gradients, other, metrics = made_of(model, variables, state, batch)
    trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
    return (list(trainable), list(other), list(optimizer), list(metrics)), loss


def validate(model: keras.Model, variables: Variables, state: State, batch: Any) -> tuple[State, Any]:
    """The same without training: weights and slots stay as they are."""
    _, (loss, y_pred, after) = _forward(model, variables, state, batch, training=False)
    _, other, _, metrics = _counted(model, variables, (*state[:1], *after[1:]), batch, y_pred)
    return (state[0], other, state[2], metrics), loss


def variables_of(model: keras.Model, beside: Sequence[Variable] = ()) -> Variables:
    """A model's variables and its optimizer's; those held `beside` them are among the others."""
    return (
        list(model.trainable_variables), [*model.non_trainable_variables, *beside], list(model.optimizer.variables),
        list(model.metrics_variables),
    )  # fmt: skip


def _forward(
    model: keras.Model, variables: Variables, state: State, batch: Any, training: bool
) -> tuple[Any, tuple[Any, Any, State]]:
    """(the scaled loss, (the loss, what the model returns, the values of all variables after it)) of a batch.

    Keras's own `stateless_call` and `stateless_compute_loss` know of the model's weights alone, and go past `__call__`:
    layers would train only where a model hands `training` on, and of one called twice the last call's losses count.
    """
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    with _scope(variables, state, collect_losses=True) as scope:
        y_pred = model(x, **({"training": training} if model._call_has_training_arg else {}))
        added, scope.collect_losses = model.losses, False
        with patched(model, {"_losses_override": added}):
            # One of each example is summed, as under TensorFlow.
            loss = keras.ops.sum(model._compute_loss(x, y, y_pred, sample_weight=weights, training=training))
        scaled = model.optimizer.scale_loss(loss) if training else loss
        return scaled, (loss, y_pred, _values(variables, scope))


def _counted(model: keras.Model, variables: Variables, state: State, batch: Any, y_pred: Any) -> State:
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    with _scope(variables, state) as scope:
        model.compute_metrics(x, y, y_pred, weights)
        return _values(variables, scope)


def _scope(variables: Variables, state: State, collect_losses: bool = False) -> keras.StatelessScope:
    pairs = [pair for group, values in zip(variables, state, strict=True) for pair in zip(group, values, strict=True)]
    return keras.StatelessScope(state_mapping=pairs, collect_losses=collect_losses)


def _values(variables: Variables, scope: keras.StatelessScope) -> State:
    first, second, third, fourth = ([scope.get_current_value(one) for one in group] for group in variables)
    return first, second, third, fourth


def results(model: keras.Model) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """Returns a function from the values of the metrics' variables to the metrics."""

    def made(values: Sequence[Any]) -> dict[str, Any]:
        with keras.StatelessScope(state_mapping=list(zip(model.metrics_variables, values, strict=True))):
            return model.get_metrics_result()  # type: ignore[no-any-return]

    return jax.jit(made)  # type: ignore[no-any-return]


def over(value: Any, sharding: NamedSharding) -> Any:
    """An array over all devices, of which each process, which has all of it, gives its own devices their parts."""
    # What is there already is not copied.
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])


def everywhere(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())

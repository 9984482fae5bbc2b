"""The compiled functions: some steps of training, or of validation, on a mesh of devices.

Arrays are those of the whole global batch wherever its parts are, so that a step computes what one device computes: the
loss is divided by all examples, statistics are those of all, and XLA adds up between the devices.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.worker.jax.devices import BATCH

# The values of trainable, other, optimizer's and metrics' variables.
State: TypeAlias = tuple[list[Any], list[Any], list[Any], list[Any]]
# (state, batches [steps or more, batch, ...], steps) -> (state, losses float32 [steps or more])
Steps: TypeAlias = Callable[[State, Any, int], tuple[State, Any]]


def training_steps(model: keras.Model, mesh: Mesh, places: State) -> Steps:
    """Trains so many steps on the first of the batches, in buffers that it takes over; `places` are the shardings."""
    return _compiled(partial(_train, model), mesh, places)


def validation_steps(model: keras.Model, mesh: Mesh, places: State) -> Steps:
    """The same without training: the metrics alone change."""
    return _compiled(partial(_validate, model), mesh, places)


def _compiled(step: Callable[[State, Any], tuple[State, Any]], mesh: Mesh, places: State) -> Steps:
    def many(state: State, batches: Any, count: Any) -> tuple[State, Any]:
        room = jax.tree.leaves(batches)[0].shape[0]

        def body(place: Any, carried: tuple[State, Any]) -> tuple[State, Any]:
            state, losses = carried
            batch = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), batches)
            state, loss = step(state, batch)
            return state, losses.at[place].set(loss.astype(jnp.float32))

        # The number of steps is no part of what is compiled.
        done: tuple[State, Any] = jax.lax.fori_loop(0, count, body, (state, jnp.zeros(room, jnp.float32)))
        return done

    whole = NamedSharding(mesh, PartitionSpec())
    made: Steps = jax.jit(many, donate_argnums=0, out_shardings=(places, whole))
    return made


def _train(model: keras.Model, state: State, batch: Any) -> tuple[State, Any]:
    trainable, other, optimizer, metrics = state
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    differentiated = jax.value_and_grad(model.compute_loss_and_updates, has_aux=True)
    (_, (loss, y_pred, other, metrics)), gradients = differentiated(
        trainable, other, metrics, x, y, weights, training=True, optimizer_variables=optimizer
    )
    trainable, optimizer = model.optimizer.stateless_apply(optimizer, gradients, trainable)
    metrics = _counted(model, metrics, x, y, y_pred, weights)
    return (list(trainable), list(other), list(optimizer), metrics), loss


def _validate(model: keras.Model, state: State, batch: Any) -> tuple[State, Any]:
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


def placed(mesh: Mesh, batch: int) -> NamedSharding:
    """Where batches [steps, batch, ...] are: cut over the replicas, or whole on each where they do not divide."""
    even = batch % mesh.shape[BATCH] == 0
    return NamedSharding(mesh, PartitionSpec(None, BATCH) if even else PartitionSpec())


def everywhere(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())

"""The compiled functions: some steps of training, or of validation, on a mesh of devices.

Arrays are those of the whole global batch wherever its parts are, so that a step computes what one device computes: the
loss is divided by all examples, statistics are those of all, and XLA adds up between the devices.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.worker.jax.devices import BATCH

# The values of trainable, other, optimizer's and metrics' variables.
State: TypeAlias = tuple[list[Any], list[Any], list[Any], list[Any]]
# (state, a batch) -> (state, its loss)
Step: TypeAlias = Callable[[State, Any], tuple[State, Any]]
# Loops are compiled for so many steps, or twice, four times, ... as many.
LEAST_ROOM = 4


class Steps:
    """A step, compiled for each size of batch that comes, which takes the buffers of the state over.

    On a CPU it is called once a step, since XLA computes the convolutions inside a loop of its own on one thread and
    some fifty times slower. Elsewhere a loop over the steps is compiled, which leaves the host alone.
    """

    def __init__(self, step: Step, mesh: Mesh, places: State) -> None:
        """`places` are the shardings of the state."""
        self._mesh, self._looped = mesh, is_looped(mesh)
        function = partial(_loop, step) if self._looped else step
        self._function = jax.jit(function, donate_argnums=0, out_shardings=(places, everywhere(mesh)))
        self._compiled: dict[Any, Any] = {}
        # Seconds spent on that so far.
        self.compiling = 0.0

    def __call__(self, state: State, batches: Any) -> tuple[State, np.ndarray]:
        """(state, losses float32 [steps]) after a step on each of these batches [steps, batch, ...]."""
        steps, size = jax.tree.leaves(batches)[0].shape[:2]
        cut = BATCH if size % self._mesh.shape[BATCH] == 0 else None
        if self._looped:
            room = LEAST_ROOM
            while room < steps:
                room *= 2
            placed = partial(_placed, sharding=NamedSharding(self._mesh, PartitionSpec(None, cut)), room=room)
            state, made = self._made(state, jax.tree.map(placed, batches), np.int32(steps))
            return state, np.asarray(made)[:steps]
        losses, sharding = [], NamedSharding(self._mesh, PartitionSpec(cut))
        for place in range(steps):
            batch = jax.tree.map(lambda leaf: over(leaf[place], sharding), batches)  # noqa: B023 # called at once
            state, loss = self._made(state, batch)
            losses.append(loss)
        return state, np.array([np.asarray(loss) for loss in losses], np.float32)

    def compiled_for(self, state: Any, batch: Any) -> tuple[Any, int]:
        """(what is compiled for a state and a batch of such shapes, which is not run; operations before that)."""
        lowered = self._function.lower(state, batch)
        return lowered.compile(), lowered.as_text().count("\n")

    def _made(self, state: State, batch: Any, *count: Any) -> tuple[State, Any]:
        size = jax.tree.leaves(batch)[0].shape
        if size not in self._compiled:
            began = time.perf_counter()
            self._compiled[size] = self._function.lower(state, batch, *count).compile()
            self.compiling += time.perf_counter() - began
        made: tuple[State, Any] = self._compiled[size](state, batch, *count)
        return made


def is_looped(mesh: Mesh) -> bool:
    """Is a loop over the steps worth it on such devices?"""
    looped: bool = mesh.devices.flat[0].platform != "cpu"
    return looped


def training_steps(model: keras.Model, mesh: Mesh, places: State) -> Steps:
    """Trains a step on each batch."""
    return Steps(partial(_train, model), mesh, places)


def validation_steps(model: keras.Model, mesh: Mesh, places: State) -> Steps:
    """The same without training: the metrics alone change."""
    return Steps(partial(_validate, model), mesh, places)


def _loop(step: Step, state: State, batches: Any, count: Any) -> tuple[State, Any]:
    """(state, losses) after `count` steps: their number is no part of what is compiled."""

    def body(place: Any, carried: tuple[State, Any]) -> tuple[State, Any]:
        state, losses = carried
        batch = jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, place, keepdims=False), batches)
        state, loss = step(state, batch)
        return state, losses.at[place].set(loss.astype(jnp.float32))

    room = jax.tree.leaves(batches)[0].shape[0]
    done: tuple[State, Any] = jax.lax.fori_loop(0, count, body, (state, jnp.zeros(room, jnp.float32)))
    return done


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


def over(value: np.ndarray, sharding: NamedSharding) -> Any:
    """An array over all devices, of which each process, which has all of it, gives its own devices their parts."""
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])


def _placed(array: np.ndarray, sharding: NamedSharding, room: int) -> Any:
    """The array over all devices, with as many steps as there is room for, of which the last are never read."""
    made = np.empty((room, *array.shape[1:]), array.dtype)
    made[: len(array)] = array
    return over(made, sharding)


def everywhere(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())

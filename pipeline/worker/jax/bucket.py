"""Gradients that travel in one bucket, as one array, where XLA would add up one array after the other.

On CPUs each takes some 0.1 ms, however small, of which a small model's step is made; large ones, too, are added up
faster in one piece, and processes of one host add it through the memory that they share. So each device computes the
mean loss of its own examples, its gradients and what metrics add up, and one array of all of these is summed over the
devices. Where each has as many examples and none meets another on its way to the loss, that is what one device
computes. It is done for models that are made of layers, losses and metrics of which this is known, and for batches
whose examples have no weights.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from keras import layers, losses

from pipeline.worker.jax import step
from pipeline.worker.jax.devices import BATCH, MODEL, on_cpu

# Returns the sums of all devices' arrays, inside a function of one of them.
Add = Callable[[list[Any]], list[Any]]
# Layers that make of an example what they would make of it alone, as long as they have no state, such as a seed.
LAYERS = frozenset({
    layers.Activation, layers.Add, layers.Average, layers.AveragePooling1D, layers.AveragePooling2D, layers.Concatenate,
    layers.Conv1D, layers.Conv2D, layers.Dense, layers.DepthwiseConv2D, layers.Dropout, layers.Embedding,
    layers.Flatten, layers.GlobalAveragePooling1D, layers.GlobalAveragePooling2D, layers.GlobalMaxPooling1D,
    layers.GlobalMaxPooling2D, layers.InputLayer, layers.LayerNormalization, layers.LeakyReLU, layers.Maximum,
    layers.MaxPooling1D, layers.MaxPooling2D, layers.Multiply, layers.ReLU, layers.Rescaling, layers.Reshape,
    layers.RMSNormalization, layers.SeparableConv2D, layers.Subtract, layers.ZeroPadding2D,
})  # fmt: skip
# Those whose mean over a batch is that over its examples.
LOSSES = frozenset({
    losses.binary_crossentropy, losses.categorical_crossentropy, losses.mean_absolute_error, losses.mean_squared_error,
    losses.sparse_categorical_crossentropy,
})  # fmt: skip


def by_xla(arrays: list[Any]) -> list[Any]:
    """The sums over all devices of the mesh, which XLA makes of one array."""
    return unpacked(jax.lax.psum(packed(arrays), BATCH), [array.shape for array in arrays])


def made_of(
    mesh: Mesh, model: keras.Model, variables: step.Variables, state: step.State, batch: Any, add: Add = by_xla
) -> step.Made:
    """As `step.made_of`, of a model that `fits`."""
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    parts, (trainable, other, _, metrics) = mesh.shape[BATCH], state
    if weights is not None or any(leaf.shape[0] % parts for leaf in jax.tree.leaves(batch)):
        return step.made_of(model, variables, state, batch)

    def of_part(state: step.State, batch: Any) -> Any:
        none = [jnp.zeros(one.shape, one.dtype) for one in metrics]
        loss, gradients, _, added = step.made_of(model, variables, (*state[:3], none), batch)
        return add([loss, *gradients, *added])

    whole = PartitionSpec()
    # Unchecked: Keras's layers do not say what of theirs is the same on all devices.
    by_part = jax.shard_map(
        of_part, mesh=mesh, in_specs=(whole, PartitionSpec(BATCH)), out_specs=whole, check_vma=False
    )
    sums = by_part(state, (x, y))
    loss, *gradients = (one / parts for one in sums[: 1 + len(trainable)])
    added = sums[1 + len(trainable) :]
    return loss, gradients, other, [old + new for old, new in zip(metrics, added, strict=True)]


def fits(model: keras.Model, variables: step.Variables, mesh: Mesh) -> bool:
    """True if a model's gradients can travel so, and it is then trained as it would be otherwise."""
    (trainable, other, _, counted), metrics = variables, model._compile_metrics
    return (
        on_cpu(mesh)
        and mesh.shape[BATCH] > 1
        and mesh.shape[MODEL] == 1
        and all(variable.dtype == "float32" for variable in (*trainable, *counted))
        and not other
        and not model.losses
        and _is_of_examples(model)
        and _is_mean(model)
        and all(map(_is_added_up, [] if metrics is None else metrics.metrics))
    )


def _is_of_examples(layer: Any) -> bool:
    """True if a layer, or a model of layers, makes of an example what it would make of it alone."""
    if isinstance(layer, keras.Model):
        inner = layer.layers if isinstance(layer, keras.Sequential) else getattr(layer, "operations", [None])
        return _is_of_keras(layer) and all(map(_is_of_examples, inner))
    return (
        type(layer) in LAYERS
        and _is_along_last(getattr(layer, "axis", -1))
        and not getattr(layer, "mask_zero", False)
        and layer.activity_regularizer is None
        and _is_function_of_keras(getattr(layer, "activation", None) or keras.activations.linear)
    )


def _is_mean(model: keras.Model) -> bool:
    """True if a model's loss is the mean over the examples, none of which has a weight."""
    losses_of_model = model._compile_loss and model._compile_loss._flat_losses
    if not losses_of_model or len(losses_of_model) > 1 or len(model.outputs) > 1 or len(model.outputs[0].shape) < 2:
        return False
    loss = losses_of_model[0].loss
    return (
        _is_of_keras(loss)
        and loss.reduction == "sum_over_batch_size"
        and getattr(loss, "fn", None) in LOSSES
        and _is_usual(loss._fn_kwargs)
    )


def _is_added_up(metric: keras.metrics.Metric) -> bool:
    """True if a metric is a sum over examples, and their number."""
    return (
        type(metric).update_state is keras.metrics.MeanMetricWrapper.update_state
        and _is_function_of_keras(metric._fn)
        and _is_usual(metric._fn_kwargs)
    )


def _is_usual(arguments: Mapping[str, Any]) -> bool:
    """True if a function, with these arguments, looks at each example by itself and counts all alike."""
    return _is_along_last(arguments.get("axis", -1)) and arguments.get("ignore_class") is None


def _is_along_last(axis: Any) -> bool:
    return axis in (-1, [-1], (-1,))


def _is_function_of_keras(function: Any) -> bool:
    return inspect.isfunction(function) and function.__module__.startswith("keras.")


def _is_of_keras(thing: object) -> bool:
    return type(thing).__module__.startswith("keras.")


def packed(arrays: list[Any]) -> Any:
    """float32 [numbers of all]."""
    # Not concatenated: XLA would then compute the sums behind each number anew for each.
    vector, place = jnp.zeros(sum(array.size for array in arrays), jnp.float32), 0
    for array in arrays:
        vector = jax.lax.dynamic_update_slice(vector, array.astype(jnp.float32).reshape(-1), (place,))
        place += array.size
    return vector


def unpacked(vector: Any, shapes: list[tuple[int, ...]]) -> list[Any]:
    """Arrays of these shapes that `packed` made a vector of."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [
        vector[end - math.prod(shape) : end].reshape(shape) for end, shape in zip(ends.tolist(), shapes, strict=True)
    ]

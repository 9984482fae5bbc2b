"""The axes by which variables are cut over the devices of a replica: derived from the layers, or as written patterns.

Large kernels are cut by column and the one that follows by row, so that nothing is exchanged between the two; attention
by heads; embeddings by rows. What does not divide evenly is left whole, which costs memory and nothing else.
"""

import math
from collections.abc import Mapping, Sequence

import keras
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.plan.division import matched
from pipeline.worker.jax.devices import MODEL
from pipeline.worker.model_error import TrainingError
from pipeline.worker.variables import slots_of

# Numbers of a variable from which on it is cut: smaller ones cost more to exchange than they take.
LARGE = 1024
# Kernels of attention that are cut by their heads where these leave them, and the one that takes the heads together.
BY_HEAD, FROM_HEADS = ("query", "key", "value"), ("projection", "attention_output", "output")
HEADS = ("heads", "num_heads", "_num_heads", "num_query_heads")

# The axes of the mesh that a variable's axes are cut over; None for one that is whole.
Axes = tuple[str | None, ...]


def derived(model: keras.Model, parts: int) -> dict[str, Axes]:
    """The axes of each variable that is cut over `parts` devices, by its path."""
    axes: dict[str, Axes] = {}
    heads = _heads(model)
    # By the layer that has them, in the order in which they were made.
    layers: dict[int, tuple[keras.layers.Layer, dict[str, keras.Variable]]] = {}
    owners = {id(one): layer for layer in model._flatten_layers() for one in layer._trainable_variables}
    for variable in model.trainable_variables:
        if (layer := owners.get(id(variable))) is not None:
            layers.setdefault(id(layer), (layer, {}))[1][variable.name] = variable
    # How many numbers the last kernel that was cut by column gives.
    width: int | None = None
    for number, (layer, own) in layers.items():
        if (table := own.get("embeddings")) is not None and len(table.shape) == 2:
            _cut(axes, table, 0, parts)
        if (kernel := own.get("kernel")) is None or len(kernel.shape) < 2:
            continue
        if number in heads and layer.name in (*BY_HEAD, *FROM_HEADS):
            # By its heads: [width, width], or Keras's [width, heads, width of a head].
            leaves, bias = layer.name in BY_HEAD, own.get("bias")
            if heads[number] % parts == 0 and _cut(axes, kernel, int(leaves), parts) and leaves and bias is not None:
                _cut(axes, bias, 0, parts, least=1)
            continue
        width = _cut_kernel(axes, kernel, own.get("bias"), parts, width)
    return axes


def written(model: keras.Model, patterns: Mapping[str, Sequence[str | None]], mesh: Mesh) -> dict[str, Axes]:
    """Returns the axes of variables that patterns match, by path; refuses one without a match, and a path with two."""
    paths = {variable.path: tuple(variable.shape) for variable in model.trainable_variables}
    by = matched(patterns, list(paths), "a variable's whole path")
    return {path: _checked(path, paths[path], patterns[pattern], mesh) for path, pattern in by.items()}


def shardings(model: keras.Model, layout: Mapping[str, Axes], mesh: Mesh) -> dict[int, NamedSharding]:
    """Returns where each variable of a model and its optimizer is, by its id; the slots of one are where it is."""
    whole = NamedSharding(mesh, PartitionSpec())
    placed = {id(variable): whole for variable in (*model.variables, *model.optimizer.variables)}
    slots = slots_of((model.optimizer,))
    for variable in model.trainable_variables:
        if variable.path in layout:
            alike = [slot for slot in slots.get(id(variable), ()) if slot.shape == variable.shape]
            cut = NamedSharding(mesh, PartitionSpec(*layout[variable.path]))
            placed |= dict.fromkeys(map(id, (variable, *alike)), cut)
    return placed


def _heads(model: keras.Model) -> dict[int, int]:
    """Returns the heads of the attention that a layer belongs to, by the layer's id."""
    heads_of: dict[int, int] = {}
    for layer in model._flatten_layers():
        heads = next((value for name in HEADS if isinstance(value := getattr(layer, name, None), int)), None)
        if heads is not None:
            heads_of |= {id(inner): heads for inner in layer._flatten_layers(include_self=False)}
    return heads_of


def _cut_kernel(
    axes_of: dict[str, Axes], kernel: keras.Variable, bias: keras.Variable | None, parts: int, width: int | None
) -> int | None:
    """Cuts a kernel by row after one that was cut by column, else by column; returns its width if by column."""
    takes, gives = len(kernel.shape) - 2, len(kernel.shape) - 1
    if width == kernel.shape[takes] and _cut(axes_of, kernel, takes, parts):
        return None
    if not _cut(axes_of, kernel, gives, parts):
        return None
    if bias is not None:
        _cut(axes_of, bias, len(bias.shape) - 1, parts, least=1)
    return int(kernel.shape[gives])


def _cut(axes_of: dict[str, Axes], variable: keras.Variable, axis: int, parts: int, least: int = LARGE) -> bool:
    """Notes that a variable is cut at an axis, where it is large and divides evenly."""
    shape = tuple(variable.shape)
    if math.prod(shape) < least or shape[axis] % parts:
        return False
    axes_of[variable.path] = tuple(MODEL if place == axis else None for place in range(len(shape)))
    return True


def _checked(path: str, shape: tuple[int, ...], axes: Sequence[str | None], mesh: Mesh) -> Axes:
    named = [axis for axis in axes if axis is not None]
    fits = len(axes) == len(shape) and len(set(named)) == len(named) and set(named) <= set(mesh.axis_names)
    if not fits or any(length % mesh.shape[axis] for length, axis in zip(shape, axes, strict=True) if axis):
        raise TrainingError(
            f"Expected axes of the mesh ({', '.join(f'{name}: {size}' for name, size in mesh.shape.items())}) or null, "
            f"one for each axis of {path} {list(shape)}, that divide it evenly, received {list(axes)}. "
            f"Try {[None] * (len(shape) - 1) + [MODEL]}.".replace("None", "null").replace("'", "")
        )
    return tuple(axes)

"""Reads a model's size from the built model, and what a step holds from what XLA has made of it, of shapes alone."""

import math
from functools import partial
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pipeline.plan.plan import Plan
from pipeline.plan.size import Moment, Size
from pipeline.worker import variables
from pipeline.worker.jax import build, layouts, step
from pipeline.worker.jax.compiled import lowered
from pipeline.worker.jax.devices import BATCH, MODEL, on_cpu
from pipeline.worker.jax.loop import JaxLoop
from pipeline.worker.model_error import ModelError

# Examples of a replica for which a step is compiled, to tell what grows with them.
FEW, MANY = 2, 64
CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
# Numbers of devices that a variable may be cut over, beside those of the plan.
PARTS = (2, 4, 8)


def of(loop: JaxLoop, plan: Plan, forgetful: bool = False) -> Size:
    """The size of a loop's model; with `forgetful` also what a step holds whose blocks compute again, for good."""
    model, arrays = loop.model, loop.train_data.arrays
    parts_of_replica = loop.mesh.shape[MODEL]
    cut: dict[str, tuple[int, ...]] = {}
    for parts in sorted({parts_of_replica, *PARTS} - {1}):
        layout = loop.cut if parts == parts_of_replica else layouts.derived(model, parts)
        cut |= {path: (*cut.get(path, ()), parts) for path in layout}
    listed, apart = variables.listed(model, (model.optimizer,), cut)
    leaves = jax.tree.leaves(arrays)
    per_example = sum(leaf.nbytes for leaf in leaves) // len(leaves[0])
    moment, operations = _step(loop)
    again: tuple[Moment, ...] | None = None
    if forgetful and not plan.training.remat:
        try:
            build.forget(model)
            again = (_step(loop)[0],)
        except ModelError:
            # A model without blocks has nothing to forget.
            again = None
    return Size(listed, apart, (moment,), per_example, operations=operations, forgetful_step=again)


def _step(loop: JaxLoop) -> tuple[Moment, int]:
    """(what a step holds on a device beside variables and slots, operations of it before XLA joins them)."""
    replicas, held, operations = loop.mesh.shape[BATCH], [], 0
    # Traced anew: the model may be called otherwise by now.
    trained = partial(step.train, loop.model, loop.groups)
    for examples in (FEW, MANY):
        program = lowered(trained, loop.mesh, loop.places, *_shapes(loop, examples * replicas))
        operations, memory = program.as_text().count("\n"), program.compile().memory_analysis()
        held.append(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
    growing = max(0, held[1] - held[0]) // (MANY - FEW)
    fixed = max(0, held[0] - FEW * growing)
    if on_cpu(loop.mesh):
        growing += max(map(_patches, loop.model._flatten_layers()), default=0)
    return (fixed, growing), operations


def _patches(layer: keras.layers.Layer) -> int:
    """Bytes of an example that the gradient of a convolution's kernel takes on a CPU, where XLA does not count them.

    There Eigen puts beside each other all that each place of the output was made from, and the output.
    """
    kernel = getattr(layer, "kernel", None)
    if kernel is None or len(kernel.shape) < 3 or not isinstance(layer, CONVOLUTIONS):
        return 0
    output = layer.compute_output_shape(layer._build_shapes_dict["input_shape"])
    channels_first = layer.data_format == "channels_first"
    places = math.prod(size or 1 for size in (output[2:] if channels_first else output[1:-1]))
    width = np.dtype(layer.compute_dtype).itemsize if layer.compute_dtype != "bfloat16" else 4
    return int(places * (math.prod(kernel.shape[:-1]) + kernel.shape[-1]) * width)


def _shapes(loop: JaxLoop, examples: int) -> tuple[Any, Any]:
    """The state and a batch as shapes, where they are to be."""
    state = jax.tree.map(
        lambda value, sharding: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding),
        loop.values(),
        loop.places,
    )
    over = NamedSharding(loop.mesh, PartitionSpec(BATCH))
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((examples, *leaf.shape[1:]), _narrow(leaf.dtype), sharding=over),
        loop.train_data.arrays,
    )
    return state, batch


def _narrow(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns what JAX makes of a type: 32 bits of 64."""
    narrow: np.dtype[Any] = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    return narrow

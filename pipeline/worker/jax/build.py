"""Makes the plan's model under JAX, compiled with what the plan chooses, and refuses what its steps cannot do."""

import contextlib
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.config import targets
from pipeline.errors import refuse
from pipeline.plan.plan import Plan
from pipeline.plan.size import Moment, Size
from pipeline.worker import compiling, labels, variables
from pipeline.worker.compiling import check_batches, check_made, compile_chosen
from pipeline.worker.jax import step
from pipeline.worker.jax.compiled import lowered
from pipeline.worker.jax.data import PARTS, ProcessData, of_batch
from pipeline.worker.jax.devices import BATCH, MODEL, derived_layout, on_cpu
from pipeline.worker.jax.loop import JaxLoop
from pipeline.worker.model_error import ModelError

# Examples of a replica for which a step is compiled, to tell what grows with them.
FEW, MANY = 2, 64
CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
# Numbers of devices that a variable may be cut over, beside those of the plan.
CUT_OVER = (2, 4, 8)


def model(plan: Plan, data: ProcessData, note: Callable[[str], object] = str) -> keras.Model:
    """Returns the plan's model, compiled and built; what means nothing here goes to `note`. Raises `UserError`."""
    shape = keras.tree.map_structure(lambda leaf: tuple(leaf.shape[1:]), data.train[0])
    if targets.asks_for(plan.model.build, "model.build", "num_classes") and data.num_classes is None:
        expected, received = "the number of classes, which model.build asks for", "data whose labels do not tell"
        instead = "data.num_classes=10, or whatever it is, or a model.build that predicts a quantity"
        raise ModelError(expected, received, instead)
    model_built = targets.call(plan.model.build, "model.build", input_shape=shape, num_classes=data.num_classes)
    check_made(model_built)
    _check(model_built, note)
    check_batches(model_built)
    compile_chosen(
        model_built,
        targets.value(plan.training.optimizer, "train.optimizer"),
        plan.training.learning_rate,
        targets.value(plan.training.loss, "train.loss"),
        targets.value(plan.training.metrics, "train.metrics"),
    )
    sample = keras.tree.map_structure(lambda leaf: np.zeros((2, *leaf.shape[1:]), leaf.dtype), data.train)
    with compiling.in_words(model_built, sample):
        labels.check(model_built, sample)
        model_built._symbolic_build(data_batch=sample)
        _expect_loss(model_built, sample)
    if not model_built.trainable_variables:
        raise ModelError("Expected a model with weights to train, received one without.")
    for text in compiling.overlooked(model_built, sample):
        note(text)
    if plan.training.rate_scale != 1.0:
        compiling.scale(model_built.optimizer, plan.training.rate_scale)
    if not model_built.optimizer.built:
        model_built.optimizer.build(model_built.trainable_variables)
    outputs = labels.outputs(model_built, sample)
    for name, part in data.parts.items():
        if part is not None and len(part) > 1:
            labels.check_values(outputs, part[1], PARTS[name])
    return model_built


def _check(model: keras.Model, note: Callable[[str], object]) -> None:
    own = ("train_step", "test_step", "compute_loss_and_updates", "stateless_call", "stateless_compute_loss")
    for name in own:
        if getattr(type(model), name) is not getattr(keras.Model, name):
            received = f"{type(model).__name__}, which has one of its own"
            raise ModelError(f"a model with Keras's own {name} under backend=jax", received, "backend=tensorflow")
    if model.compiled and model.jit_compile is False:
        note("The model was compiled with jit_compile=False, which is left out: under backend=jax XLA compiles steps.")


def _expect_loss(model: keras.Model, sample: Any) -> None:
    def added(x: Any) -> list[Any]:
        with keras.StatelessScope(collect_losses=True):
            model(x)
            return list(model.losses)

    if model._compile_loss is None and type(model).compute_loss is keras.Model.compute_loss:
        instead = "train.loss=sparse_categorical_crossentropy, or whatever fits its labels"
        expected = "a model that is compiled with a loss, or whose layers add one"
        refuse((not jax.eval_shape(added, sample[0]), expected, "one of neither", instead), error=ModelError)


def expect_no_groups(model: keras.Model, mesh: Mesh, x: Any) -> None:
    """Refuses convolutions of groups of channels where replicas of several devices share a batch.

    XLA adds their kernels' gradients over all devices, and not once of each replica (jaxlib 0.10).
    """

    def called(x: Any) -> Any:
        with keras.StatelessScope():
            return model(x)

    if min(mesh.shape.values()) == 1:
        return
    sample = keras.tree.map_structure(lambda leaf: np.zeros((2, *leaf.shape[1:]), leaf.dtype), x)
    if re.search(r"(feature|batch)_group_count=(?!1\b)", str(jax.make_jaxpr(called)(sample))):
        raise ModelError(
            "no convolution of groups of channels, as DepthwiseConv2D is, with several workers of several devices "
            "under backend=jax, where XLA makes its gradient too large",
            "a model with one",
            "workers=1, or strategy=mirrored, or backend=tensorflow",
        )


def forget(model: keras.Model) -> None:
    """Makes all blocks of a built model compute again. Raises `ModelError` where that would save nothing."""
    compiling.forget(model, _forgetful, stateful=True)


def _forgetful(block: keras.layers.Layer, call_of_block: compiling.BlockCall) -> compiling.BlockCall:
    listed = [*block.non_trainable_variables, *block.metrics_variables]
    changed = [*listed, *variables.held([block], [*listed, *block.trainable_variables])]

    @functools.wraps(call_of_block)
    def call(*args: Any, **named: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, named))
        traced = [place for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]

        def called(*arrays: Any) -> tuple[Any, list[Any]]:
            own_leaves = list(leaves)
            for place, array in zip(traced, arrays, strict=True):
                own_leaves[place] = array
            own_args, own_given = structure.unflatten(own_leaves)
            result = call_of_block(*own_args, **own_given)
            return result, [variable.value for variable in changed]

        outputs, values = jax.checkpoint(called)(*(leaves[place] for place in traced))
        # What a block has changed, as the state of its random numbers, is to be known outside of what is forgotten.
        for variable, value in zip(changed, values, strict=True):
            variable.assign(value)
        return outputs

    return call


def size_of(loop: JaxLoop, plan: Plan) -> Size:
    """The size of a loop's model, and what a step of it holds, at last with blocks that compute again, for good."""
    model, arrays = loop.model, loop.train_data.arrays
    parts_of_replica = loop.mesh.shape[MODEL]
    cut: dict[str, tuple[int, ...]] = {}
    for parts in sorted({parts_of_replica, *CUT_OVER} - {1}):
        layout = loop.cut if parts == parts_of_replica else derived_layout(model, parts)
        cut |= {path: (*cut.get(path, ()), parts) for path in layout}
    listed, apart = variables.listed(model, (model.optimizer,), cut)
    leaves = jax.tree.leaves(arrays)
    per_example = sum(leaf.nbytes for leaf in leaves) // len(leaves[0])
    moment, operations = _step(loop)
    again: tuple[Moment, ...] | None = None
    if not plan.training.remat:
        # A model without blocks has nothing to forget.
        with contextlib.suppress(ModelError):
            forget(model)
            again = (_step(loop)[0],)
    return Size(listed, apart, (moment,), per_example, operations=operations, forgetful_step=again)


def _step(loop: JaxLoop) -> tuple[Moment, int]:
    """(what a step holds on a device beside variables and slots, operations of it before XLA joins them)."""
    replicas, held, operations = loop.mesh.shape[BATCH], [], 0
    # Traced anew: the model may be called otherwise by now.
    trained = functools.partial(step.train, loop.model, loop.groups)
    values, sharding = loop.values(), NamedSharding(loop.mesh, PartitionSpec(BATCH))
    state = jax.tree.map(lambda one, at: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=at), values, loop.places)
    for examples in (FEW, MANY):
        batch = of_batch(loop.train_data, examples * replicas, sharding)
        program = lowered(trained, loop.mesh, loop.places, state, batch)
        operations, memory = program.as_text().count("\n"), program.compile().memory_analysis()
        held.append(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
    growing = max(0, held[1] - held[0]) // (MANY - FEW)
    fixed = max(0, held[0] - FEW * growing)
    if on_cpu(loop.mesh):
        growing += max(map(_patches, loop.model._flatten_layers()), default=0)
    return (fixed, growing), operations


def _patches(layer: keras.layers.Layer) -> int:
    """Bytes of an example that the gradient of a convolution's kernel takes on a CPU, where XLA does not count them."""
    # There Eigen puts beside each other all that each place of the output was made from, and the output.
    kernel = getattr(layer, "kernel", None)
    if kernel is None or len(kernel.shape) < 3 or not isinstance(layer, CONVOLUTIONS):
        return 0
    output = layer.compute_output_shape(layer._build_shapes_dict["input_shape"])
    channels_first = layer.data_format == "channels_first"
    places = math.prod(size or 1 for size in (output[2:] if channels_first else output[1:-1]))
    width = np.dtype(layer.compute_dtype).itemsize if layer.compute_dtype != "bfloat16" else 4
    return int(places * (math.prod(kernel.shape[:-1]) + kernel.shape[-1]) * width)

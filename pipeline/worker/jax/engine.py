"""JAX's engine: makes the plan's model, refuses what its steps cannot do, and trains it on a mesh of all processes."""

import contextlib
import functools
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.config import targets
from pipeline.data.examples import rows
from pipeline.errors import refuse
from pipeline.plan.backends import shares_memory_under_jax
from pipeline.plan.plan import BUILDER, Plan
from pipeline.plan.size import Moment, Size
from pipeline.record import events
from pipeline.record.findings import Check
from pipeline.worker import compiling, labels, variables
from pipeline.worker.artifacts import Logits, sample_of
from pipeline.worker.callbacks import Callbacks
from pipeline.worker.engine import Note
from pipeline.worker.jax import bucket, devices, step
from pipeline.worker.jax.data import PARTS, DeviceData, ProcessData, of_batch
from pipeline.worker.jax.devices import BATCH, MODEL
from pipeline.worker.jax.loop import JaxLoop, told_by_first, whole
from pipeline.worker.loop import NO_COMPARISON, Resume, WeightComparison, versions
from pipeline.worker.model_error import ModelError
from pipeline.worker.process import WorkerProcess
from pipeline.worker.state import on_all

# The folder of compiled programs under `output_dir`.
PROGRAMS = "compiled"
# What Gloo and JAX's coordination say where another process is gone.
_LOST = re.compile(r"Gloo|UNAVAILABLE|DEADLINE_EXCEEDED|coordination service|[Cc]onnection (closed|reset|refused)")
# What XLA raises, also as plain errors of Python.
_KINDS = ("JaxRuntimeError", "XlaRuntimeError", "ValueError", "RuntimeError")
# Examples of a replica for which a step is compiled, to tell what grows with them.
FEW, MANY = 2, 64
CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
# Numbers of devices that a variable may be cut over, beside those of the plan.
CUT_OVER = (2, 4, 8)
# Keras's, as steps of a model's own would not be called.
STEPS = ("train_step", "test_step", "compute_loss_and_updates", "stateless_call", "stateless_compute_loss")


class JaxEngine(WorkerProcess):
    """JAX in a process of a training."""

    _data: ProcessData
    _loop: JaxLoop

    def join(self) -> dict[str, str]:
        """Takes the process's devices; returns versions once every process has joined."""
        self._data = ProcessData(self._plan, self._process, self._emit)
        self._add: bucket.Add = bucket.by_xla
        devices.prepare_devices(self._plan, self._process)
        if self._process.role != BUILDER:
            # What a step holds is asked of a program that is compiled, not of one that is read.
            step.keep(Path(self._plan.output_dir) / PROGRAMS)
        self._mesh = devices.mesh_of(self._plan, self._process)
        if shares_memory_under_jax(self._plan):
            try:
                self._add = bucket.of_plan(self._plan, self._process)
            except ConnectionRefusedError as error:
                self._note(f"Gloo adds gradients, in place of shared memory: {error}.")
        return versions("jax", "jaxlib")

    def _build(self, train_counts: list[int], validation_counts: list[int], resume: Resume) -> events.Built:
        plan, own = self._plan, self._data
        own.finish()
        x, held_out = own.train[0], own.parts["validation"]
        model = planned_model(plan, own, self._note)
        expect_no_groups(model, self._mesh, x)
        if plan.training.remat:
            forget(model)
        train, validation = DeviceData(own.train, own.layout(train_counts), plan.data.shuffle, plan.training.seed), None
        if held_out is not None:
            validation = DeviceData(held_out, own.layout(validation_counts), False, plan.training.seed)
        position = resume(train.layout, own.digest(), partial(on_all, send=told_by_first))
        patterns, parts = plan.strategy.build.get("layout"), self._mesh.shape[MODEL]
        if isinstance(patterns, dict):
            cut = devices.written_layout(model, patterns, self._mesh)  # type: ignore[arg-type] # refused there
        else:
            cut = devices.derived_layout(model, parts) if parts > 1 else {}
        self._loop = loop = JaxLoop(
            model, self._mesh, train, validation, self._chief, len(plan.leaders) == 1, position, cut,
            alike=plan.training.deterministic, add=self._add,
        )  # fmt: skip
        if self._add is not bucket.by_xla:
            travel = bucket.fits(model, loop.groups, self._mesh)
            by_gloo = "Gloo adds gradients, in place of shared memory: those of this model do not travel in one bucket."
            self._note("Processes add gradients through shared memory." if travel else by_gloo, warn=False)
        state_bytes = variables.state_bytes(model, (model.optimizer,))
        if parts > 1:
            held, total = loop.held_bytes(), state_bytes - sum(map(variables.bytes_of, model.trainable_variables))
            self._note(
                f"A device holds {held:,} of the {total:,} bytes of weights and of the optimizer's state.", False
            )
        example = partial(rows, held_out or own.train, np.arange(1))
        self._sample = sample_of(plan, model, own.class_names, example, self._note)
        return events.Built(
            state_bytes=state_bytes,
            input_shape=keras.tree.map_structure(lambda leaf: tuple(leaf.shape[1:]), x),
            input_dtype=keras.tree.map_structure(lambda leaf: leaf.dtype.name, x),
            num_classes=own.num_classes,
            validation_examples=validation.layout.examples if validation else 0,
            validation_steps=validation.layout.steps if validation else 0,
        )

    def _begin(self) -> tuple[Callable[..., Callbacks], WeightComparison]:
        devices.seed_all(self._plan.training.seed)
        plain = partial(planned_model, self._plan, self._data)
        hooks = partial(Callbacks, plain=plain, weights=lambda model: [whole(one.value) for one in model.weights])
        return hooks, NO_COMPARISON

    def _trained_model(self) -> keras.Model:
        return self._loop.whole_model()

    def _logits(self) -> Logits:
        return self._loop.whole_model().predict_on_batch  # type: ignore[no-any-return]

    def _size(self) -> events.Sized:
        if self._process.role != BUILDER:
            return events.Sized(error="a step would be compiled twice more for it")
        return events.Sized(size_of(self._loop, self._plan))

    def _check(self) -> Check:
        return Check("not made", unsaid="under backend=jax replicas make a step of the whole global batch together")

    @staticmethod
    def _lost_a_peer(error: BaseException) -> bool:
        """True for what is raised in a process whose peers have gone.

        >>> JaxEngine._lost_a_peer(ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"))
        True
        """
        return type(error).__name__ in _KINDS and bool(_LOST.search(str(error)))


def planned_model(plan: Plan, data: ProcessData, note: Note = str) -> keras.Model:
    """Returns the plan's model, compiled and built; what means nothing here goes to `note`. Raises `UserError`."""
    shape = keras.tree.map_structure(lambda leaf: tuple(leaf.shape[1:]), data.train[0])
    unknown = data.num_classes is None and targets.asks_for(plan.model.build, "model.build", "num_classes")
    expected, received = "the number of classes, which model.build asks for", "data whose labels do not tell"
    instead = "data.num_classes=10, or whatever it is, or a model.build that predicts a quantity"
    refuse((unknown, expected, received, instead), error=ModelError)
    model = targets.call(plan.model.build, "model.build", input_shape=shape, num_classes=data.num_classes)
    compiling.check_made(model)
    for name in STEPS:
        own = getattr(type(model), name) is not getattr(keras.Model, name)
        expected, received = f"a model with Keras's own {name} under backend=jax", type(model).__name__
        refuse((own, expected, f"{received}, which has one of its own", "backend=tensorflow"), error=ModelError)
    if model.compiled and model.jit_compile is False:
        note("The model was compiled with jit_compile=False, which is left out: under backend=jax XLA compiles steps.")
    compiling.check_batches(model)
    compiling.compile_chosen(
        model,
        targets.value(plan.training.optimizer, "train.optimizer"),
        plan.training.learning_rate,
        targets.value(plan.training.loss, "train.loss"),
        targets.value(plan.training.metrics, "train.metrics"),
    )
    sample = _zeros(data.train)
    with compiling.in_words(model, sample):
        labels.check(model, sample)
        model._symbolic_build(data_batch=sample)
        expect_loss(model, sample)
    if not model.trainable_variables:
        raise ModelError("Expected a model with weights to train, received one without.")
    for text in compiling.overlooked(model, sample):
        note(text)
    if plan.training.rate_scale != 1.0:
        compiling.scale(model.optimizer, plan.training.rate_scale)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    outputs = labels.outputs(model, sample)
    for name, part in data.parts.items():
        if part is not None and len(part) > 1:
            labels.check_values(outputs, part[1], PARTS[name])
    return model


def _zeros(arrays: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: np.zeros((2, *leaf.shape[1:]), leaf.dtype), arrays)


def expect_loss(model: keras.Model, sample: Any) -> None:
    """Refuses a model that has no loss to train by."""

    def added(x: Any) -> list[Any]:
        with keras.StatelessScope(collect_losses=True):
            model(x)
            return list(model.losses)

    if model._compile_loss is None and type(model).compute_loss is keras.Model.compute_loss:
        instead = "train.loss=sparse_categorical_crossentropy, or whatever fits its labels"
        expected = "a model that is compiled with a loss, or whose layers add one"
        refuse((not jax.eval_shape(added, sample[0]), expected, "one of neither", instead), error=ModelError)


def expect_no_groups(model: keras.Model, mesh: Mesh, x: Any) -> None:
    """Refuses convolutions of groups of channels where replicas of several devices share a batch."""
    # XLA adds their kernels' gradients over all devices, and not once of each replica (jaxlib 0.10).

    def called(x: Any) -> Any:
        with keras.StatelessScope():
            return model(x)

    grouped = re.compile(r"(feature|batch)_group_count=(?!1\b)")
    if min(mesh.shape.values()) > 1 and grouped.search(str(jax.make_jaxpr(called)(_zeros(x)))):
        expected = (
            "no convolution of groups of channels, as DepthwiseConv2D is, with several workers of several devices"
        )
        why, instead = (
            "where XLA makes its gradient too large",
            "workers=1, or strategy=mirrored, or backend=tensorflow",
        )
        raise ModelError(f"{expected} under backend=jax, {why}", "a model with one", instead)


def forget(model: keras.Model) -> None:
    """Makes all blocks of a built model compute again. Raises `ModelError` where that would save nothing."""
    compiling.forget(model, _forgetful, stateful=True)


def _forgetful(block: keras.layers.Layer, call_of_block: compiling.BlockCall) -> compiling.BlockCall:
    listed = [*block.non_trainable_variables, *block.metrics_variables]
    changed = [*listed, *variables.held([block], [*listed, *block.trainable_variables])]

    @functools.wraps(call_of_block)
    def call(*args: Any, **named: Any) -> Any:
        leaves, structure = jax.tree.flatten((args, named))
        traced = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)}

        def called(arrays: dict[int, Any]) -> tuple[Any, list[Any]]:
            own_args, own_named = structure.unflatten(arrays.get(place, leaf) for place, leaf in enumerate(leaves))
            result = call_of_block(*own_args, **own_named)
            return result, [variable.value for variable in changed]

        outputs, values = jax.checkpoint(called)(traced)
        # What a block has changed, as the state of its random numbers, is to be known outside of what is forgotten.
        for variable, value in zip(changed, values, strict=True):
            variable.assign(value)
        return outputs

    return call


def size_of(loop: JaxLoop, plan: Plan) -> Size:
    """The size of a loop's model, and what a step of it holds, at last with blocks that compute again, for good."""
    model, leaves, parts_of_replica = loop.model, jax.tree.leaves(loop.train_data.arrays), loop.mesh.shape[MODEL]
    cut: dict[str, tuple[int, ...]] = {}
    for parts in sorted({parts_of_replica, *CUT_OVER} - {1}):
        layout = loop.cut if parts == parts_of_replica else devices.derived_layout(model, parts)
        cut |= {path: (*cut.get(path, ()), parts) for path in layout}
    listed, apart = variables.listed(model, (model.optimizer,), cut)
    per_example = sum(leaf.nbytes for leaf in leaves) // len(leaves[0])
    moment, operations = _step(loop)
    again: tuple[Moment, ...] | None = None
    # A model without blocks has nothing to forget.
    with contextlib.suppress(ModelError):
        if not plan.training.remat:
            forget(model)
            again = (_step(loop)[0],)
    return Size(listed, apart, (moment,), per_example, operations=operations, forgetful_step=again)


def _step(loop: JaxLoop) -> tuple[Moment, int]:
    """(what a step holds on a device beside variables and slots, operations of it before XLA joins them)."""
    replicas, held, operations = loop.mesh.shape[BATCH], [], 0
    # Traced anew: the model may be called otherwise by now.
    trained = partial(step.train, loop.model, loop.groups)
    values, sharding = loop.values(), NamedSharding(loop.mesh, PartitionSpec(BATCH))
    state = jax.tree.map(lambda one, at: jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=at), values, loop.places)
    for examples in (FEW, MANY):
        batch = of_batch(loop.train_data, examples * replicas, sharding)
        program = step.lowered(trained, loop.mesh, loop.places, state, batch)
        operations, memory = program.as_text().count("\n"), program.compile().memory_analysis()
        held.append(memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes)
    growing = max(0, held[1] - held[0]) // (MANY - FEW)
    fixed = max(0, held[0] - FEW * growing)
    if devices.on_cpu(loop.mesh):
        growing += max(map(_patches, loop.model._flatten_layers()), default=0)
    return (fixed, growing), operations


def _patches(layer: keras.layers.Layer) -> int:
    """Bytes of an example that the gradient of a convolution's kernel takes on a CPU, where XLA does not count them."""
    # There Eigen puts beside each other all that each place of the output was made from, and the output.
    kernel = getattr(layer, "kernel", None)
    if kernel is None or len(kernel.shape) < 3 or not isinstance(layer, CONVOLUTIONS):
        return 0
    output = layer.compute_output_shape(layer._build_shapes_dict["input_shape"])
    places = math.prod(size or 1 for size in (output[2:] if layer.data_format == "channels_first" else output[1:-1]))
    width = np.dtype(layer.compute_dtype).itemsize if layer.compute_dtype != "bfloat16" else 4
    return int(places * (math.prod(kernel.shape[:-1]) + kernel.shape[-1]) * width)

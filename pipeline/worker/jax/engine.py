"""JAX's engine: what a process of a plan trains with, on a mesh of the devices of all processes."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import keras
import numpy as np

from pipeline.data.examples import rows
from pipeline.plan.backends import shares_memory_under_jax
from pipeline.plan.plan import BUILDER, Plan, Process
from pipeline.record import events
from pipeline.record.findings import Check
from pipeline.worker import variables
from pipeline.worker.artifacts import TextSample, sample_of
from pipeline.worker.callbacks import Callbacks
from pipeline.worker.engine import Emit, Notes
from pipeline.worker.jax import bucket, build, compiled
from pipeline.worker.jax.data import DeviceData, ProcessData
from pipeline.worker.jax.devices import MODEL, derived_layout, mesh_of, prepare_devices, seed_all, written_layout
from pipeline.worker.jax.loop import JaxLoop, told_by_first, whole
from pipeline.worker.loop import NO_COMPARISON, Engine, Resume, WeightComparison, versions
from pipeline.worker.state import on_all

# The folder of compiled programs under `output_dir`.
PROGRAMS = "compiled"
# What Gloo and JAX's coordination say where another process is gone.
_LOST = re.compile(r"Gloo|UNAVAILABLE|DEADLINE_EXCEEDED|coordination service|[Cc]onnection (closed|reset|refused)")
# What XLA raises, also as plain errors of Python.
_KINDS = ("JaxRuntimeError", "XlaRuntimeError", "ValueError", "RuntimeError")


class JaxEngine(Engine):
    """JAX in a process of a training."""

    def __init__(self, plan: Plan, process: Process, emit: Emit, asked_to_leave: Callable[[], bool]) -> None:
        self._plan, self._process, self._emit = plan, process, emit
        self._chief = process.rank == plan.leaders[0]
        self.notes = Notes(emit if self._chief else None)
        self._data = ProcessData(plan, process, emit)
        self._sample: TextSample | None = None
        self._add: bucket.Add = bucket.by_xla

    def join(self) -> dict[str, str]:
        """Takes the process's devices; returns versions once every process has joined."""
        prepare_devices(self._plan, self._process)
        if self._process.role != BUILDER:
            # What a step holds is asked of a program that is compiled, not of one that is read.
            compiled.keep(Path(self._plan.output_dir) / PROGRAMS)
        self._mesh = mesh_of(self._plan, self._process)
        if shares_memory_under_jax(self._plan):
            try:
                self._add = bucket.of_plan(self._plan, self._process)
            except ConnectionRefusedError as error:
                self.notes.add(f"Gloo adds gradients, in place of shared memory: {error}.")
        return versions("jax", "jaxlib")

    def build(
        self, train_counts: list[int], validation_counts: list[int], resume: Resume
    ) -> tuple[JaxLoop, events.Built]:
        """Makes the model, lays it over the mesh, and joins it to a loop that begins where `resume` says."""
        plan, own = self._plan, self._data
        own.finish()
        model = build.model(plan, own, self.notes.add)
        build.expect_no_groups(model, self._mesh, own.train[0])
        if plan.training.remat:
            build.forget(model)
        train = DeviceData(own.train, own.layout(train_counts), plan.data.shuffle, plan.training.seed)
        validation, held_out = None, own.parts["validation"]
        if held_out is not None:
            validation = DeviceData(held_out, own.layout(validation_counts), False, plan.training.seed)
        position = resume(train.layout, own.digest(), partial(on_all, send=told_by_first))
        patterns, parts = plan.strategy.build.get("layout"), self._mesh.shape[MODEL]
        if isinstance(patterns, dict):
            cut = written_layout(model, patterns, self._mesh)  # type: ignore[arg-type] # refused there
        else:
            cut = derived_layout(model, parts) if parts > 1 else {}
        self._loop = loop = JaxLoop(
            model, self._mesh, train, validation, self._chief, len(plan.leaders) == 1, position, cut,
            alike=plan.training.deterministic, add=self._add,
        )  # fmt: skip
        if self._add is not bucket.by_xla:
            travel = bucket.fits(model, loop.groups, self._mesh)
            by_gloo = "Gloo adds gradients, in place of shared memory: those of this model do not travel in one bucket."
            self.notes.add("Processes add gradients through shared memory." if travel else by_gloo, warn=False)
        state_bytes = variables.state_bytes(model, (model.optimizer,))
        if parts > 1:
            held, whole = loop.held_bytes(), state_bytes - sum(map(variables.bytes_of, model.trainable_variables))
            note = f"A device holds {held:,} of the {whole:,} bytes of weights and of the optimizer's state."
            self.notes.add(note, warn=False)
        self._sample = sample_of(
            plan, model, own.class_names, lambda: rows(held_out or own.train, np.arange(1)), self.notes.add
        )
        x = own.train[0]
        return loop, events.Built(
            state_bytes=state_bytes,
            input_shape=keras.tree.map_structure(lambda leaf: tuple(leaf.shape[1:]), x),
            input_dtype=keras.tree.map_structure(lambda leaf: leaf.dtype.name, x),
            num_classes=own.num_classes,
            validation_examples=0 if validation is None else validation.layout.examples,
            validation_steps=0 if validation is None else validation.layout.steps,
        )

    def begin(self) -> tuple[Callable[..., Callbacks], WeightComparison]:
        """Seeds training; returns what makes its callbacks, and what compares weights on the way: nothing."""
        seed_all(self._plan.training.seed)
        plain = partial(build.model, self._plan, self._data)
        hooks = partial(Callbacks, plain=plain, weights=lambda model: [whole(one.value) for one in model.weights])
        return hooks, NO_COMPARISON

    def trained_model(self) -> keras.Model:
        """The trained model, whole on one device of this process."""
        return self._loop.whole_model()

    def write_sample(self, folder: Path) -> None:
        """Writes text that the trained model makes, where it is a language model that is to."""
        if self._sample is not None:
            self._sample.write(self._loop.whole_model().predict_on_batch, folder, self._emit)

    def size(self) -> events.Sized:
        """Returns the size of the model, and of what a step of it holds."""
        if self._process.role != BUILDER:
            return events.Sized(error="a step would be compiled twice more for it")
        return events.Sized(build.size_of(self._loop, self._plan))

    def check(self) -> Check:
        """Nothing: replicas make each step together."""
        return Check("not made", unsaid="under backend=jax replicas make a step of the whole global batch together")

    @staticmethod
    def lost_a_peer(error: BaseException) -> bool:
        """True for what is raised in a process whose peers have gone.

        >>> JaxEngine.lost_a_peer(ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"))
        True
        """
        return type(error).__name__ in _KINDS and bool(_LOST.search(str(error)))

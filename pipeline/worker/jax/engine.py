"""JAX's engine: what one process does of a plan, on a mesh of the devices of all processes."""

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import keras
import numpy as np
from jax.sharding import Mesh

from pipeline.data.examples import rows
from pipeline.plan.plan import BUILDER, Plan, Process
from pipeline.record import commands, events
from pipeline.record.commands import Command
from pipeline.record.events import EventBase, Failed
from pipeline.record.findings import Check
from pipeline.worker import rates, variables
from pipeline.worker.callbacks import Callbacks
from pipeline.worker.checkpoint import State, Survival
from pipeline.worker.engine import Tell
from pipeline.worker.going_on import survival
from pipeline.worker.input.broken import expect_batch
from pipeline.worker.jax import build, layouts, remat, size
from pipeline.worker.jax.data import Data, OwnData
from pipeline.worker.jax.devices import MODEL, mesh_of, prepare_devices, seed_all, versions
from pipeline.worker.jax.errors import lost_a_peer
from pipeline.worker.jax.loop import JaxLoop, told_by_first, whole
from pipeline.worker.loop import TrainingError
from pipeline.worker.model_error import told
from pipeline.worker.notes import Notes
from pipeline.worker.pace import Pace
from pipeline.worker.sampling import Writing, writing_of
from pipeline.worker.saving import save
from pipeline.worker.state import packed, unpacked
from pipeline.worker.training import Diverged, Preempted

UNCHECKED = "under backend=jax replicas make a step of the whole global batch together"


class JaxEngine:
    """A process that trains under JAX. See `pipeline.worker.engine.Engine`."""

    def __init__(self, plan: Plan, process: Process, tell: Tell, asked_to_leave: Callable[[], bool]) -> None:
        self._plan, self._process, self._tell, self._asked_to_leave = plan, process, tell, asked_to_leave
        self._work: Work | None = None

    def join(self) -> dict[str, str]:
        """Takes its devices; returns the versions that a measurement depends on, once every process has joined."""
        prepare_devices(self._plan, self._process)
        mesh = mesh_of(self._plan, self._process)
        self._work = Work(self._plan, self._process, mesh, self._tell, self._asked_to_leave)
        return versions()

    def obey(self, command: Command[EventBase]) -> None:
        """Does what a command says; one that has left does nothing more."""
        if self._work is None:
            return
        try:
            self._work.obey(command)
        except Preempted:
            self._work = None
        except Exception:
            self._work.finish_writing()
            raise

    def failure(self, error: BaseException) -> Failed:
        """What an error is told as."""
        return Failed(told(error), lost_a_peer(error), isinstance(error, Diverged))


class Work:
    """What a process has made so far, and the commands that go on from it."""

    def __init__(
        self, plan: Plan, process: Process, mesh: Mesh, tell: Tell, asked_to_leave: Callable[[], bool]
    ) -> None:
        self._plan, self._process, self._mesh, self._tell = plan, process, mesh, tell
        self._asked_to_leave = asked_to_leave
        self._chief = process.rank == plan.leaders[0]
        self._notes = Notes(tell if self._chief else None)
        self._data = OwnData(plan, process, tell)
        self._loop: JaxLoop | None = None
        self._pace: Pace | None = None
        self._survival: Survival | None = None
        self._writing: Writing | None = None

    def obey(self, command: Command[EventBase]) -> None:
        """Does what a command says, and tells the event that answers it."""
        match command:
            case commands.Load():
                self._data.load()
            case commands.Drop():
                self._data.drop(command.broken)
            case commands.Build():
                self._build(command.train_counts, command.validation_counts, command.resume)
            case commands.Check():
                self._tell(events.Checked(Check("not made", unsaid=UNCHECKED)))
            case commands.Size():
                self._size()
            case commands.Begin():
                self._begin()
            case commands.Calibrate():
                self._tell(self._paced().calibrate(command.steps_per_call))
            case commands.Measure():
                self._tell(self._paced().measure(command))
            case commands.Train():
                self._train(command.steps_per_call, command.folder)
            case commands.Leave():
                if self._pace is not None:
                    self._pace.leave()
                self._tell(events.Left())
                raise Preempted
            case _:
                raise TrainingError("a command that backend=jax knows", type(command).__name__, "backend=tensorflow")

    def _build(self, train_counts: list[int], validation_counts: list[int], resume: str | None) -> None:
        plan, own = self._plan, self._data
        expect_batch(sum(train_counts), plan.training.global_batch, plan.workers, plan.data.on_error == "skip")
        own.finish()
        model = build.model(plan, own, self._notes.add)
        if plan.training.remat:
            remat.forget(model)
        train = Data(own.train, own.layout(train_counts), plan.data.shuffle, plan.training.seed)
        held_out = own.parts["validation"]
        validation = None
        if held_out is not None:
            validation = Data(held_out, own.layout(validation_counts), False, plan.training.seed)
        self._survival, position = survival(
            plan, resume, train.layout, own.digest(), self._chief, self._on_all, self._asked_to_leave, self._tell
        )
        cut = self._layout(model)
        placed = layouts.shardings(model, cut, self._mesh)
        self._loop = loop = JaxLoop(
            model, self._mesh, placed, train, validation, self._chief, len(plan.leaders) == 1, position, cut,
            alike=plan.training.deterministic,
        )  # fmt: skip
        state_bytes = variables.state_bytes(model, (model.optimizer,))
        if self._mesh.shape[MODEL] > 1:
            held, whole = loop.held_bytes(), state_bytes - sum(map(variables.bytes_of, model.trainable_variables))
            self._notes.keep(f"A device holds {held:,} of the {whole:,} bytes of weights and of the optimizer's state.")
        self._writing = writing_of(
            plan, model, own.class_names, lambda: rows(held_out or own.train, np.arange(1)), self._notes.add
        )
        x = own.train[0]
        self._tell(
            events.Built(
                parameters=model.count_params(),
                state_bytes=state_bytes,
                input_shape=keras.tree.map_structure(lambda leaf: tuple(leaf.shape[1:]), x),
                input_dtype=keras.tree.map_structure(lambda leaf: leaf.dtype.name, x),
                num_classes=own.num_classes,
                train_examples=train.layout.examples,
                validation_examples=0 if validation is None else validation.layout.examples,
                validation_steps=0 if validation is None else validation.layout.steps,
                steps_per_epoch=train.layout.steps,
                epochs=plan.training.epochs or -(-(plan.training.steps or 1) // train.layout.steps),
                data_digest=own.digest(),
                notes=self._notes.texts or None,
            )
        )

    def _size(self) -> None:
        loop = self._ready()
        if self._process.role != BUILDER:
            self._tell(events.Sized(error="a step would be compiled twice more for it"))
            return
        try:
            sized = size.of(loop, self._plan, forgetful=True)
        except Exception as error:
            # An estimate is no reason to end a training.
            traceback.print_exc()
            self._tell(events.Sized(error=told(error)))
        else:
            self._tell(events.Sized(sized))

    def _layout(self, model: keras.Model) -> dict[str, layouts.Axes]:
        """Which variables are cut over the devices of a replica, by their paths."""
        patterns = self._plan.strategy.build.get("layout")
        if isinstance(patterns, dict):
            return layouts.written(model, patterns, self._mesh)  # type: ignore[arg-type] # refused there
        parts = self._mesh.shape[MODEL]
        return layouts.derived(model, parts) if parts > 1 else {}

    def _begin(self) -> None:
        plan = self._plan
        seed_all(plan.training.seed)
        hooks = partial(Callbacks, plain=partial(build.model, plan, self._data), weights=_weights)
        self._paced().begin(plan, hooks, self._survival)

    def _train(self, steps_per_call: int, folder: str) -> None:
        loop, training = self._ready(), self._paced().finish(steps_per_call)
        digests, save_it = loop.replica_digests(), self._plan.training.save
        if self._chief and (save_it or self._writing):
            model = loop.whole_model()
            if save_it:
                rates.unscaled(model.optimizer)
                self._tell(events.Saved(save(model, Path(folder), self._tell)))
            if self._writing:
                self._writing.write(model.predict_on_batch, Path(folder), self._tell)
        self._tell(events.Finished(digests, **(training.result if self._chief else {})))

    def finish_writing(self) -> None:
        """Returns once no checkpoint is being written: what comes after a failure goes on from it."""
        if self._survival is not None:
            self._survival.checkpointer.wait()

    def _on_all(self, state: State | None) -> State | None:
        """The first process's state on every process, all of which call this together."""
        header, body = packed(state) if state is not None else (b"", b"")
        first, second = told_by_first(np.array([len(header), len(body)])).tolist()
        if not first:
            return None
        sent = np.zeros(first + second, np.uint8)
        if state is not None:
            sent[:] = np.frombuffer(header + body, np.uint8)
        data = told_by_first(sent).tobytes()
        return state or unpacked(data[:first], data[first:])

    def _paced(self) -> Pace:
        if self._pace is None:
            self._pace = Pace(self._ready(), self._tell, self._plan.training.deterministic)
        return self._pace

    def _ready(self) -> JaxLoop:
        assert self._loop is not None, "build comes first"
        return self._loop


def _weights(model: keras.Model) -> list[np.ndarray]:
    return [whole(variable.value) for variable in model.weights]

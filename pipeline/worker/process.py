"""Carries out the commands of `pipeline.record.commands` in a process of a training, whichever engine trains.

Without `Begin`, as in the baseline, steps train the model for nothing but time.
"""

import dataclasses
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from pipeline.plan.plan import Plan, Process
from pipeline.record import commands, events
from pipeline.record.commands import Command
from pipeline.record.events import EventBase, Failed
from pipeline.worker.artifacts import save
from pipeline.worker.checkpoint import Checkpointer, Checkpointing, OnAll, check_same_data, is_good
from pipeline.worker.engine import Emit
from pipeline.worker.layout import BEGINNING, BatchLayout, Position
from pipeline.worker.loop import Engine
from pipeline.worker.model_error import told
from pipeline.worker.rates import unscaled
from pipeline.worker.stepper import Stepper
from pipeline.worker.training import Diverged, Preempted


class WorkerProcess:
    """A process of a training: carries out commands and emits the events that answer them, whichever engine trains."""

    def __init__(
        self, plan: Plan, process: Process, engine: Engine, emit: Emit, asked_to_leave: Callable[[], bool]
    ) -> None:
        self._plan, self._engine, self._emit, self._asked_to_leave = plan, engine, emit, asked_to_leave
        self._chief = process.rank == plan.leaders[0]
        # A process that serves others, or has left, does nothing more: some of them may still need it.
        self._active = process.rank in plan.leaders
        self._stepper: Stepper | None = None
        self._checkpointing: Checkpointing | None = None

    def join(self) -> dict[str, str]:
        """Takes the process's devices; returns the versions of what computes once every process has joined."""
        return self._engine.join()

    def obey(self, command: Command[EventBase]) -> None:
        """Carries out a command and emits the event that answers it."""
        if not self._active:
            return
        try:
            self._obey(command)
        except Preempted:
            self._active = False
        except Exception as error:
            # What comes after a failure goes on from the checkpoint that is being written.
            if self._checkpointing is not None:
                self._checkpointing.checkpointer.wait()
            self._engine.raise_cause(error)
            raise

    def failure(self, error: BaseException) -> Failed:
        """Returns the event that reports an error."""
        return Failed(told(error), self._engine.lost_a_peer(error), isinstance(error, Diverged))

    def _obey(self, command: Command[EventBase]) -> None:
        match command:
            case commands.Load():
                self._emit(self._engine.load(command.folder))
            case commands.Drop():
                self._emit(self._engine.drop(command.broken))
            case commands.Build():
                self._build(command)
            case commands.Check():
                self._emit(events.Checked(self._engine.check()))
            case commands.MeasureSize():
                self._size()
            case commands.Profile():
                self._emit(self._engine.profile(command))
            case commands.Begin():
                self._steps().begin(self._plan, *self._engine.begin(), self._checkpointing)
            case commands.Calibrate():
                self._emit(self._steps().calibrate(command.steps_per_call))
            case commands.Measure():
                self._emit(self._steps().measure(command))
            case commands.Train():
                self._train(command)
            case commands.Explain():
                self._emit(self._engine.explain(command))
            case commands.Leave():
                if self._stepper is not None:
                    self._stepper.leave()
                self._emit(events.Left())
                self._active = False

    def _build(self, command: commands.Build) -> None:
        plan, examples = self._plan, sum(command.train_counts)
        layout, digest = BatchLayout(0, 0, 0, 0, ()), ""

        def position(data: BatchLayout, data_digest: str, on_all: OnAll) -> Position:
            nonlocal layout, digest
            layout, digest = data, data_digest
            return self._resume(command.resume, layout, digest, on_all)

        loop, built = self._engine.build(command.train_counts, command.validation_counts, position)
        self._stepper = Stepper(loop, self._emit, plan.training.deterministic)
        built = msgspec.structs.replace(
            built,
            parameters=loop.model.count_params(),
            train_examples=examples,
            steps_per_epoch=layout.steps,
            epochs=plan.training.epochs or -(-(plan.training.steps or 1) // layout.steps),
            data_digest=digest,
            notes=self._engine.notes.texts or None,
        )
        self._emit(built)

    def _resume(self, resume: commands.Resume | None, layout: BatchLayout, digest: str, on_all: OnAll) -> Position:
        """Sets up checkpoints, where some are written, and returns the position of the one that training resumes from.

        The first process reads it, and `on_all` gives it to the others. Raises `TrainingError` for one of other data.
        """
        plan, train, state = self._plan, self._plan.training, None
        if plan.checkpoint.folder is None:
            return BEGINNING
        checkpointer = Checkpointer(plan.checkpoint, self._emit)
        if resume is not None and self._chief:
            state = checkpointer.last(is_good(plan))
            if state is None and plan.checkpoint.before is not None:
                before = dataclasses.replace(plan.checkpoint, folder=plan.checkpoint.before)
                state = Checkpointer(before, self._emit).last(is_good(plan))
        if resume is not None and len(plan.leaders) > 1:
            state = on_all(state)
        data = {"examples": layout.examples, "shards": len(layout.counts), "digest": digest, "build": plan.data.build}
        self._checkpointing = Checkpointing(
            checkpointer, state, self._asked_to_leave, train.divergence_factor, train.rate_scale,
            {"data": data, "learning_rate": train.learning_rate}, train.checkpoint_share,
        )  # fmt: skip
        if resume is not None and self._chief:
            if resume == "back":
                checkpointer.drop_after(-1 if state is None else state.values["step"])
            values = {} if state is None else state.values
            self._emit(events.Restored(values.get("step", 0), state is not None, tuple(values.get("told", ()))))
        if state is None:
            return BEGINNING
        check_same_data(state.values["data"], data)
        return Position(state.values["epoch"], state.values["examples"])

    def _size(self) -> None:
        try:
            sized = self._engine.size()
        except Exception as error:
            # An estimate is no reason to end a training.
            traceback.print_exc()
            sized = events.Sized(error=told(error))
        self._emit(sized)

    def _train(self, command: commands.Train) -> None:
        training, folder = self._steps().finish(command.steps_per_call), Path(command.folder)
        digests = self._engine.digests()
        if self._chief:
            if self._plan.training.save:
                for optimizer in self._steps().loop.optimizers():
                    unscaled(optimizer)
                self._emit(events.Saved(save(self._engine.trained_model(), folder, self._emit)))
            self._engine.write_sample(folder)
        self._emit(events.Finished(digests, **(training.result if self._chief else {})))

    def _steps(self) -> Stepper:
        assert self._stepper is not None, "build comes first"
        return self._stepper

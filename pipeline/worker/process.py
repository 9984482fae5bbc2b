"""Carries out the commands of `pipeline.record.commands` in a process of a training, whichever engine trains.

Without `Begin`, as in the baseline, steps train the model for nothing but time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from pipeline.config import targets
from pipeline.plan.plan import Plan, Process
from pipeline.record import commands, events
from pipeline.record.commands import Command
from pipeline.record.events import Beat, CoreTime, Event, EventBase, Failed
from pipeline.record.log import stamped
from pipeline.worker.artifacts import save
from pipeline.worker.callbacks import Callbacks, check
from pipeline.worker.checkpoint import Checkpointer, Checkpointing, OnAll, check_same_data, is_good
from pipeline.worker.compiling import unscaled
from pipeline.worker.engine import Emit
from pipeline.worker.layout import BEGINNING, BatchLayout, Position
from pipeline.worker.loop import Call, Engine, TrainingLoop, WeightComparison, waited
from pipeline.worker.model_error import told
from pipeline.worker.training import Diverged, Preempted, Training

CALIBRATION_STEPS = 3


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
            self._emit(events.Unheard(tuple(values.get("told", ()))))
            self._emit(events.Restored(values.get("step", 0), state is not None))
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


class Stepper:
    """The steps of a loop: of a training while it lasts, then for the sake of timing alone.

    What training emits while steps are timed is held back until they are over: the driver runs on the same cores.
    """

    def __init__(self, loop: TrainingLoop, emit: Emit, deterministic: bool) -> None:
        """With `deterministic` it reports no waits for the input and no other work, which differ each time."""
        self.loop, self._deterministic = loop, deterministic
        self.training: Training | None = None
        self.buffer = EventBuffer(emit)
        self._put_back = contextlib.ExitStack()
        self._spare = False

    def begin(
        self,
        plan: Plan,
        make_hooks: Callable[..., Callbacks],
        same: WeightComparison,
        checkpointing: Checkpointing | None,
    ) -> None:
        """Begins the plan's training, which goes on where its checkpoint was, if it has one."""
        train = plan.training
        callbacks = [targets.value(one, f"train.callbacks[{index}]") for index, one in enumerate(train.callbacks)]
        check(callbacks)
        if checkpointing is not None and self.loop.chief:
            checkpointing.checkpointer.check()
        self.training = Training(
            self.loop,
            train.epochs,
            train.steps,
            callbacks,
            self.buffer.emit,
            hooks=make_hooks,
            checkpointing=checkpointing,
            same=same,
        )

    def calibrate(self, steps_per_call: int | None) -> events.Calibrated:
        """Compiles the step, and times a few."""
        loop, count = self.loop, steps_per_call or CALIBRATION_STEPS
        self._advance(1, steps_per_call or 1)
        while not loop.warm:
            self._advance(loop.concurrent_steps, 1)
        timed = self._advance(count * loop.concurrent_steps, count)
        seconds = sum(call.seconds for call in timed) * loop.concurrent_steps
        return events.Calibrated(seconds / sum(call.steps for call in timed))

    def measure(self, command: commands.Measure) -> events.Measured:
        """Times steps, after some that are not."""
        loop = self.loop
        with self.buffer.held():
            self._advance(command.warmup_steps, command.steps_per_call)
            clock = CoreClock()
            timed = self._advance(command.steps, command.steps_per_call)
            core_time = clock.read()
        waits = [
            sum(waited(call.waits) for call in timed if call.worker == worker)
            for worker in range(loop.concurrent_steps)
        ]
        return events.Measured(
            repeat=command.repeat,
            steps=sum(call.steps for call in timed),
            examples=float(sum(call.sizes.sum() for call in timed)),
            seconds=sum(call.seconds for call in timed),
            calls=[events.TimedCall(call.steps, call.seconds) for call in timed],
            input_seconds=[] if self._deterministic else waits,
            core_time=None if self._deterministic else core_time,
        )

    def finish(self, steps_per_call: int) -> Training:
        """Trains to the end. What steps changed that were made for time alone is put back."""
        assert self.training is not None, "begin comes first"
        for _ in self.training.advance(None, steps_per_call):
            pass
        self._put_back.close()
        return self.training

    def leave(self) -> None:
        """Writes a checkpoint where training has begun and is not over, and raises `Preempted`."""
        if self.training is not None:
            self.training.leave()

    def _advance(self, steps: int, steps_per_call: int) -> list[Call]:
        """At least `steps` steps."""
        loop, training = self.loop, self.training
        calls = [] if training is None else list(training.advance(steps, steps_per_call))
        done = sum(call.steps for call in calls)
        if done < steps and training is not None and not self._spare:
            self._spare = True
            self._put_back.enter_context(loop.put_back())
        while done < steps:
            calls.append(loop.call(steps_per_call, steps - done))
            done += calls[-1].steps
        return calls


class EventBuffer:
    """Emits events at once, or afterwards with the time when they came."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held: list[Event] | None = None

    def emit(self, event: Event) -> None:
        """Emits an event, or keeps it; a beat says that the process lives, and is never late."""
        if self._held is None or isinstance(event, Beat):
            self._emit(event)
        else:
            self._held.append(stamped(event, time.time()))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, events are kept; afterwards they are emitted, also where training failed."""
        held = self._held = []
        try:
            yield
        finally:
            self._held = None
            for event in held:
                self._emit(event)


BOOT = Path("/proc/sys/kernel/random/boot_id")
# What a core did nothing in, and what Linux counts twice: guests are in `user` and `nice` already.
IDLE = ("idle", "iowait", "guest", "guest_nice")


class CoreClock:
    """Counts from when it is made. Source: proc(5), /proc/stat; time that a hypervisor took away counts as busy.

    >>> since = CoreClock().read()
    >>> since is None or since.own_seconds >= 0
    True
    """

    def __init__(self) -> None:
        self._machine, self._cores = _machine(), sorted(os.sched_getaffinity(0))
        self._busy, self._own = self._read_busy(), time.process_time()

    def read(self) -> CoreTime | None:
        """Seconds since then, over all cores that this process may use; None where Linux tells not."""
        now = self._read_busy()
        if self._busy is None or now is None:
            return None
        return CoreTime(self._machine, self._cores, now - self._busy, time.process_time() - self._own)

    def _read_busy(self) -> float | None:
        import psutil

        each = psutil.cpu_times(percpu=True)
        if max(self._cores) >= len(each) or not self._machine:
            return None
        return float(
            sum(sum(each[core]) - sum(getattr(each[core], name, 0.0) for name in IDLE) for core in self._cores)
        )


def _machine() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""

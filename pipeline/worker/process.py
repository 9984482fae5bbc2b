"""Carries out the commands of `pipeline.record.commands` in a process of a training, whichever engine trains.

Without `Begin`, as in the baseline, steps train the model for nothing but time.
"""

import contextlib
import dataclasses
import os
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec

from pipeline.config import targets
from pipeline.plan.division import expect_batch
from pipeline.plan.plan import Plan, Process
from pipeline.record import commands, events
from pipeline.record.commands import Command
from pipeline.record.events import Beat, CoreTime, Event, EventBase, Failed
from pipeline.record.log import stamped
from pipeline.worker.artifacts import save
from pipeline.worker.callbacks import check
from pipeline.worker.checkpoint import Checkpointer, Checkpointing, OnAll, check_same_data, is_good
from pipeline.worker.compiling import unscaled
from pipeline.worker.engine import Emit
from pipeline.worker.layout import BEGINNING, BatchLayout, Position
from pipeline.worker.loop import Call, Engine, waited
from pipeline.worker.model_error import told
from pipeline.worker.training import Diverged, Preempted, Training

CALIBRATION_STEPS = 3


class WorkerProcess:
    """A process of a training: carries out commands and emits the events that answer them, whichever engine trains.

    What training emits while steps are timed is held back until they are over: the driver runs on the same cores.
    """

    def __init__(
        self, plan: Plan, process: Process, engine: Engine, emit: Emit, asked_to_leave: Callable[[], bool]
    ) -> None:
        self._plan, self._engine, self._emit, self._asked_to_leave = plan, engine, emit, asked_to_leave
        self._chief = process.rank == plan.leaders[0]
        # A process that serves others, or has left, does nothing more: some of them may still need it.
        self._active = process.rank in plan.leaders
        self._training: Training | None = None
        self._checkpointing: Checkpointing | None = None
        self._buffer = EventBuffer(emit)
        # Once training is over, steps are made for the sake of timing alone, and what they change is put back.
        self._put_back, self._spare = contextlib.ExitStack(), False

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
                self._begin()
            case commands.Calibrate():
                self._emit(self._calibrate(command.steps_per_call))
            case commands.Measure():
                self._emit(self._measure(command))
            case commands.Train():
                self._train(command)
            case commands.Explain():
                self._emit(self._engine.explain(command))
            case commands.Leave():
                if self._training is not None:
                    self._training.leave()
                self._emit(events.Left())
                self._active = False

    def _build(self, command: commands.Build) -> None:
        plan, resume, examples = self._plan, partial(self._resume, command.resume), sum(command.train_counts)
        expect_batch(examples, plan)
        self._loop, built = self._engine.build(command.train_counts, command.validation_counts, resume)
        steps = self._loop.layout.steps
        built = msgspec.structs.replace(
            built,
            parameters=self._loop.model.count_params(),
            train_examples=examples,
            steps_per_epoch=steps,
            epochs=plan.training.epochs or -(-(plan.training.steps or 1) // steps),
            data_digest=self._data["digest"],
            notes=self._engine.notes.texts or None,
        )
        self._emit(built)

    def _resume(self, resume: commands.Resume | None, layout: BatchLayout, digest: str, on_all: OnAll) -> Position:
        """Sets up checkpoints, where some are written, and returns the position of the one that training resumes from.

        The first process reads it, and `on_all` gives it to the others. Raises `TrainingError` for one of other data.
        """
        plan, train, state = self._plan, self._plan.training, None
        shards = len(layout.counts)
        self._data = {"examples": layout.examples, "shards": shards, "digest": digest, "build": plan.data.build}
        if plan.checkpoint.folder is None:
            return BEGINNING
        checkpointer = Checkpointer(plan.checkpoint, self._emit)
        if resume is not None and self._chief:
            good = partial(is_good, plan)
            places = [plan.checkpoint.folder, *filter(None, [plan.checkpoint.before])]
            each = [dataclasses.replace(plan.checkpoint, folder=place) for place in places]
            last = [Checkpointer(one, self._emit).last(good) for one in each]
            state = max(filter(None, last), key=lambda state: state.name, default=None)
        if resume is not None and len(plan.leaders) > 1:
            state = on_all(state)
        self._checkpointing = Checkpointing(
            checkpointer, state, self._asked_to_leave, train.divergence_factor, train.rate_scale,
            {"data": self._data, "learning_rate": train.learning_rate}, train.checkpoint_share,
        )  # fmt: skip
        if resume is not None and self._chief:
            if resume == "back":
                checkpointer.drop_after(-1 if state is None else state.values["step"])
            values = {} if state is None else state.values
            self._emit(events.Unheard(tuple(values.get("told", ()))))
            self._emit(events.Restored(values.get("step", 0), state is not None))
        if state is None:
            return BEGINNING
        check_same_data(state.values["data"], self._data)
        return Position(state.values["epoch"], state.values["examples"])

    def _size(self) -> None:
        try:
            sized = self._engine.size()
        except Exception as error:
            # An estimate is no reason to end a training.
            traceback.print_exc()
            sized = events.Sized(error=told(error))
        self._emit(sized)

    def _begin(self) -> None:
        train, checkpointing = self._plan.training, self._checkpointing
        hooks, same = self._engine.begin()
        callbacks = [targets.value(one, f"train.callbacks[{index}]") for index, one in enumerate(train.callbacks)]
        check(callbacks)
        if checkpointing is not None and self._chief:
            checkpointing.checkpointer.check()
        self._training = Training(
            self._loop, train.epochs, train.steps, callbacks, self._buffer.emit, hooks=hooks,
            checkpointing=checkpointing, same=same,
        )  # fmt: skip

    def _calibrate(self, steps_per_call: int | None) -> events.Calibrated:
        loop, count = self._loop, steps_per_call or CALIBRATION_STEPS
        self._advance(1, steps_per_call or 1)
        while not loop.warm:
            self._advance(loop.concurrent_steps, 1)
        timed = self._advance(count * loop.concurrent_steps, count)
        seconds = sum(call.seconds for call in timed) * loop.concurrent_steps
        return events.Calibrated(seconds / sum(call.steps for call in timed))

    def _measure(self, command: commands.Measure) -> events.Measured:
        # Waits for the input and other work differ each time.
        deterministic = self._plan.training.deterministic
        with self._buffer.held():
            self._advance(command.warmup_steps, command.steps_per_call)
            clock = CoreClock()
            timed = self._advance(command.steps, command.steps_per_call)
            core_time = clock.read()
        waits = [
            sum(waited(call.waits) for call in timed if call.worker == worker)
            for worker in range(self._loop.concurrent_steps)
        ]
        return events.Measured(
            repeat=command.repeat,
            steps=sum(call.steps for call in timed),
            examples=float(sum(call.sizes.sum() for call in timed)),
            seconds=sum(call.seconds for call in timed),
            calls=[events.TimedCall(call.steps, call.seconds) for call in timed],
            input_seconds=[] if deterministic else waits,
            core_time=None if deterministic else core_time,
        )

    def _advance(self, steps: int, steps_per_call: int) -> list[Call]:
        calls = [] if self._training is None else list(self._training.advance(steps, steps_per_call))
        done = sum(call.steps for call in calls)
        if done < steps and self._training is not None and not self._spare:
            self._spare = True
            self._put_back.enter_context(self._loop.put_back())
        while done < steps:
            calls.append(self._loop.call(steps_per_call, steps - done))
            done += calls[-1].steps
        return calls

    def _train(self, command: commands.Train) -> None:
        assert self._training is not None, "begin comes first"
        for _ in self._training.advance(None, command.steps_per_call):
            pass
        self._put_back.close()
        digests, folder = self._loop.replica_digests(), Path(command.folder)
        if self._chief:
            if self._plan.training.save:
                for optimizer in self._loop.optimizers:
                    unscaled(optimizer)
                self._emit(events.Saved(save(self._engine.trained_model(), folder, self._emit)))
            self._engine.write_sample(folder)
        self._emit(events.Finished(digests, **(self._training.result if self._chief else {})))


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
        self._machine = BOOT.read_text().strip() if BOOT.exists() else ""
        self._cores = sorted(os.sched_getaffinity(0))
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

"""Carries out the commands of `pipeline.record.commands` in a process of a training, whichever engine trains."""

import abc
import contextlib
import dataclasses
import os
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import keras
import msgspec

from pipeline.config import targets
from pipeline.errors import refuse
from pipeline.plan.division import expect_batch
from pipeline.plan.plan import Plan, Process
from pipeline.record import commands, events
from pipeline.record.commands import Command
from pipeline.record.events import Beat, CoreTime, Event, EventBase, Failed, Warned
from pipeline.record.findings import Check
from pipeline.record.log import stamped
from pipeline.worker.artifacts import Logits, TextSample, save
from pipeline.worker.callbacks import check
from pipeline.worker.checkpoint import Checkpointer, OnAll, State
from pipeline.worker.compiling import unscaled
from pipeline.worker.engine import Emit
from pipeline.worker.layout import BEGINNING, BatchLayout, Position
from pipeline.worker.loop import Call, Resume, TrainingLoop, WeightComparison, waited
from pipeline.worker.model_error import TrainingError, told
from pipeline.worker.training import Diverged, Preempted, Training

CALIBRATION_STEPS = 3


class WorkerProcess(abc.ABC):
    """A process of a training: carries out commands and emits the events that answer them. An engine supplies the rest.

    What training emits while steps are timed is held back until they are over: the driver runs on the same cores.
    """

    # A `pipeline.worker.data.loading.WholeData`, and what `_build` makes on it.
    _data: Any
    _loop: TrainingLoop
    # Text to write once the model is trained, where that is a language model.
    _sample: TextSample | None = None

    def __init__(self, plan: Plan, process: Process, emit: Emit, asked_to_leave: Callable[[], bool]) -> None:
        self._plan, self._process, self._emit, self._asked_to_leave = plan, process, emit, asked_to_leave
        self._chief = process.rank == plan.leaders[0]
        # A process that serves others, or has left, does nothing more: some of them may still need it.
        self._active = process.rank in plan.leaders
        # On data and model, for the result.
        self._notes: list[str] = []
        self._training: Training | None = None
        self._checkpointer: Checkpointer | None = None
        # What training has emitted while steps are timed; None while none are.
        self._held: list[Event] | None = None
        # Once training is over, steps are made for the sake of timing alone, and what they change is put back.
        self._put_back, self._spare = contextlib.ExitStack(), False

    @abc.abstractmethod
    def join(self) -> dict[str, str]:
        """Takes the process's devices, or serves others; returns versions once every process has joined."""

    @abc.abstractmethod
    def _build(self, train_counts: list[int], validation_counts: list[int], resume: Resume) -> events.Built:
        """Makes the model and the loop over shards of so many examples; training begins where `resume` says."""

    @abc.abstractmethod
    def _check(self) -> Check:
        """Compares what all replicas make of a few examples with what one device does; changes nothing."""

    @abc.abstractmethod
    def _size(self) -> events.Sized:
        """Returns the size of the model, and of what a step of it holds."""

    def _time(self, command: commands.Profile | commands.Explain) -> events.Profiling | events.Explaining:
        """Times the input or the model alone, or, once training is over, steps of which a part is left out."""
        raise TrainingError("a command that this backend knows", type(command).__name__, "backend=tensorflow")

    @abc.abstractmethod
    def _begin(self) -> tuple[Callable[..., Any], WeightComparison]:
        """Seeds training; returns what makes its callbacks, and what compares weights on the way."""

    @abc.abstractmethod
    def _trained_model(self) -> keras.Model:
        """Returns the trained model, whole, to be saved."""

    @abc.abstractmethod
    def _logits(self) -> Logits:
        """Returns what the trained model makes of tokens."""

    @abc.abstractmethod
    def _lost_a_peer(self, error: BaseException) -> bool:
        """True for what is raised in a process whose peers have gone."""

    def _raise_cause(self, error: Exception) -> None:  # noqa: B027 # Most errors are their own cause.
        """Raises what is broken in the data, where an error came of that."""

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
            if self._checkpointer is not None:
                self._checkpointer.wait()
            self._raise_cause(error)
            raise

    def failure(self, error: BaseException) -> Failed:
        """Returns the event that reports an error."""
        return Failed(told(error), self._lost_a_peer(error), isinstance(error, Diverged))

    def _note(self, text: str, warn: bool = True) -> None:
        """Keeps a text for the result the first time that it comes, in the first process, and may emit it."""
        if self._chief and text not in self._notes:
            self._notes.append(text)
            if warn:
                self._emit(Warned(text))

    def _obey(self, command: Command[EventBase]) -> None:
        match command:
            case commands.Load():
                self._emit(self._data.load(command.folder))
            case commands.Drop():
                self._emit(self._data.drop(command.broken))
            case commands.Build():
                self._emit(self._built(command))
            case commands.Check():
                self._emit(events.Checked(self._check()))
            case commands.MeasureSize():
                # An estimate is no reason to end a training.
                try:
                    sized = self._size()
                except Exception as error:
                    traceback.print_exc()
                    sized = events.Sized(error=told(error))
                self._emit(sized)
            case commands.Profile() | commands.Explain():
                self._emit(self._time(command))
            case commands.Begin():
                train, (hooks, same) = self._plan.training, self._begin()
                callbacks = [targets.value(one, f"train.callbacks[{at}]") for at, one in enumerate(train.callbacks)]
                check(callbacks)
                if self._checkpointer is not None and self._chief:
                    self._checkpointer.check()
                self._training = Training(
                    self._loop, train.epochs, train.steps, callbacks, self._emit_later, hooks=hooks,
                    checkpointer=self._checkpointer, same=same,
                )  # fmt: skip
            case commands.Calibrate(steps_per_call):
                self._advance(1, steps_per_call or 1)
                while not self._loop.warm:
                    self._advance(self._loop.concurrent_steps, 1)
                count, workers = steps_per_call or CALIBRATION_STEPS, self._loop.concurrent_steps
                timed = self._advance(count * workers, count)
                seconds = sum(call.seconds for call in timed) * workers
                self._emit(events.Calibrated(seconds / sum(call.steps for call in timed)))
            case commands.Measure():
                self._emit(self._measured(command))
            case commands.Train():
                self._train(command)
            case commands.Leave():
                if self._training is not None:
                    self._training.leave()
                self._emit(events.Left())
                self._active = False

    def _built(self, command: commands.Build) -> events.Built:
        plan, examples = self._plan, sum(command.train_counts)
        expect_batch(examples, plan)
        resume = partial(self._resume, command.resume)
        built = self._build(command.train_counts, command.validation_counts, resume)
        steps = self._loop.layout.steps
        return msgspec.structs.replace(
            built,
            parameters=self._loop.model.count_params(),
            train_examples=examples,
            steps_per_epoch=steps,
            epochs=plan.training.epochs or -(-(plan.training.steps or 1) // steps),
            data_digest=self._about_data["digest"],
            notes=self._notes or None,
        )

    def _resume(self, resume: commands.Resume | None, layout: BatchLayout, digest: str, on_all: OnAll) -> Position:
        """Sets up checkpoints, where some are written, and returns the position of the one that training resumes from.

        The first process reads it, and `on_all` gives it to the others. Raises `TrainingError` for one of other data.
        """
        plan, train, policy = self._plan, self._plan.training, self._plan.checkpoint
        state: State | None = None
        shards = len(layout.counts)
        now = {"examples": layout.examples, "shards": shards, "digest": digest, "build": plan.data.build}
        self._about_data = now
        if policy.folder is None:
            return BEGINNING

        def is_good(values: Mapping[str, Any]) -> bool:
            loss, highest = values["loss"], train.divergence_factor * max(1.0, abs(values["first_loss"] or 0.0))
            return bool(values["finite"]) and (loss is None or loss <= highest)

        if resume is not None and self._chief:
            each = [dataclasses.replace(policy, folder=place) for place in (policy.folder, policy.before) if place]
            last = [Checkpointer(one, self._emit).last(is_good) for one in each]
            state = max(filter(None, last), key=lambda state: state.name, default=None)
        if resume is not None and len(plan.leaders) > 1:
            state = on_all(state)
        self._checkpointer = Checkpointer(
            policy, self._emit, state, self._asked_to_leave, {"data": now, "learning_rate": train.learning_rate},
            train.divergence_factor, train.rate_scale, train.checkpoint_share,
        )  # fmt: skip
        values = {} if state is None else state.values
        if resume is not None and self._chief:
            if resume == "back":
                self._checkpointer.drop_after(values.get("step", -1))
            self._emit(events.Unheard(tuple(values.get("told", ()))))
            self._emit(events.Restored(values.get("step", 0), state is not None))
        if state is None:
            return BEGINNING
        then = values["data"]
        # Otherwise another one was asked for.
        if then["build"] == now["build"]:
            # Other shards are told by their count alone.
            same_digest = then["shards"] != shards or then["digest"] == digest
            expected = f"the data that the checkpoint was trained on, {then['examples']} examples ({then['digest']})"
            received = f"{layout.examples} ({digest}): it has changed since"
            changed = then["examples"] != layout.examples or not same_digest
            refuse((changed, expected, received, "resume=never"), error=TrainingError)
        return Position(values["epoch"], values["examples"])

    def _emit_later(self, event: Event) -> None:
        """Emits an event, or keeps it, with its time, while steps are timed; a beat is never late."""
        if self._held is None or isinstance(event, Beat):
            self._emit(event)
        else:
            self._held.append(stamped(event, time.time()))

    def _measured(self, command: commands.Measure) -> events.Measured:
        held = self._held = []
        try:
            self._advance(command.warmup_steps, command.steps_per_call)
            read_clock = core_clock()
            timed = self._advance(command.steps, command.steps_per_call)
            core_time = read_clock()
        finally:
            self._held = None
            for event in held:
                self._emit(event)
        calls = [events.TimedCall(call.steps, call.seconds) for call in timed]
        examples, waits = float(sum(call.sizes.sum() for call in timed)), [0.0] * self._loop.concurrent_steps
        for call in timed:
            waits[call.worker] += waited(call.waits)
        steps, seconds = sum(call.steps for call in timed), sum(call.seconds for call in timed)
        # Waits for the input and other work differ each time.
        varying = ([], None) if self._plan.training.deterministic else (waits, core_time)
        return events.Measured(command.repeat, examples, seconds, steps, calls, *varying)

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
                self._emit(events.Saved(save(self._trained_model(), folder, self._emit)))
            if self._sample is not None:
                self._sample.write(self._logits(), folder, self._emit)
        self._emit(events.Finished(digests, **(self._training.result if self._chief else {})))


BOOT = Path("/proc/sys/kernel/random/boot_id")
# proc(5), /proc/stat: what a core did nothing in, and what Linux counts twice: guests are in `user` and `nice` already.
IDLE = ("idle", "iowait", "guest", "guest_nice")


def core_clock() -> Callable[[], CoreTime | None]:
    """Returns what reads the seconds of all cores that this process may use, from now on; None if Linux tells not."""
    import psutil

    cores = sorted(os.sched_getaffinity(0))
    if not BOOT.exists() or cores[-1] >= len(psutil.cpu_times(percpu=True)):
        return lambda: None

    def busy() -> float:
        each = psutil.cpu_times(percpu=True)
        return float(sum(sum(each[core]) - sum(getattr(each[core], name, 0.0) for name in IDLE) for core in cores))

    machine, began, own = BOOT.read_text().strip(), busy(), time.process_time()
    return lambda: CoreTime(machine, cores, busy() - began, time.process_time() - own)

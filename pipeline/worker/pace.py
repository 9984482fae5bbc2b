"""Has a loop make steps: of a training while it lasts, then for the sake of timing alone."""

import contextlib
from collections.abc import Callable
from typing import Protocol

from pipeline.config import targets
from pipeline.plan.plan import Plan
from pipeline.record import commands, events
from pipeline.worker.callbacks import Callbacks, check
from pipeline.worker.checkpoint import Survival
from pipeline.worker.cores import CoreClock
from pipeline.worker.engine import Tell
from pipeline.worker.loop import Call, Loop, waited
from pipeline.worker.same import NEVER, SameWeights
from pipeline.worker.telling import Telling
from pipeline.worker.training import Training

CALIBRATION_STEPS = 3


class TimedLoop(Loop, Protocol):
    """A loop whose steps are timed."""

    @property
    def concurrent_steps(self) -> int:
        """Workers that step beside each other."""

    @property
    def warm(self) -> bool:
        """Have all of them begun?"""

    def put_back(self) -> contextlib.AbstractContextManager[None]:
        """Inside, steps are made for nothing but time; afterwards model and optimizer are what they were."""


class Pace:
    """The steps of a loop, of which those that train and those that are only timed are told apart."""

    def __init__(self, loop: TimedLoop, tell: Tell, deterministic: bool) -> None:
        """With `deterministic` it tells of no waits for the input and no other work, which are others each time."""
        self._loop, self._deterministic = loop, deterministic
        self.training: Training | None = None
        self.telling = Telling(tell)
        self._put_back = contextlib.ExitStack()
        self._spare = False

    def begin(
        self,
        plan: Plan,
        make_hooks: Callable[..., Callbacks],
        survival: Survival | None,
        same: SameWeights = NEVER,
    ) -> None:
        """Begins the plan's training, which goes on where its checkpoint was, if it has one."""
        train = plan.training
        callbacks = [targets.value(one, f"train.callbacks[{index}]") for index, one in enumerate(train.callbacks)]
        check(callbacks)
        if survival is not None and self._loop.chief:
            survival.checkpointer.check()
        self.training = Training(
            self._loop,
            train.epochs,
            train.steps,
            callbacks,
            self.telling.tell,
            hooks=make_hooks,
            survival=survival,
            same=same,
        )

    def calibrate(self, steps_per_call: int | None) -> events.Calibrated:
        """Has the step compiled, and times a few."""
        loop, count = self._loop, steps_per_call or CALIBRATION_STEPS
        self._advance(1, steps_per_call or 1)
        while not loop.warm:
            self._advance(loop.concurrent_steps, 1)
        timed = self._advance(count * loop.concurrent_steps, count)
        seconds = sum(call.seconds for call in timed) * loop.concurrent_steps
        return events.Calibrated(seconds / sum(call.steps for call in timed))

    def measure(self, command: commands.Measure) -> events.Measured:
        """Times steps, after some that are not."""
        loop = self._loop
        with self.telling.held():
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
        loop, training = self._loop, self.training
        calls = [] if training is None else list(training.advance(steps, steps_per_call))
        done = sum(call.steps for call in calls)
        if done < steps and training is not None and not self._spare:
            self._spare = True
            self._put_back.enter_context(loop.put_back())
        while done < steps:
            calls.append(loop.call(steps_per_call, steps - done))
            done += calls[-1].steps
        return calls

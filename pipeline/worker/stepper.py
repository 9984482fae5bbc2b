"""Makes the steps of a loop: of a training while it lasts, then for the sake of timing alone.

What training emits while steps are timed is held back until they are over: the driver runs on the same cores.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pipeline.config import targets
from pipeline.plan.plan import Plan
from pipeline.record import commands, events
from pipeline.record.events import Beat, CoreTime, Event
from pipeline.record.log import stamped
from pipeline.worker.callbacks import Callbacks, check
from pipeline.worker.checkpoint import Checkpointing
from pipeline.worker.engine import Emit
from pipeline.worker.loop import Call, TrainingLoop, WeightComparison, waited
from pipeline.worker.training import Training

CALIBRATION_STEPS = 3


class Stepper:
    """The steps of a loop, of which those that train and those that are only timed are told apart."""

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

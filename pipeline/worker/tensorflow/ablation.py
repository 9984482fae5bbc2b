"""Times steps with parts of them switched off: their input, what replicas exchange, and the steps themselves.

For after training: what these steps change is of no use to anyone.
"""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import keras
import tensorflow as tf

from pipeline.record.commands import Explain
from pipeline.record.events import Explaining, TimedReplica
from pipeline.worker.data.reading import Batch, Batches
from pipeline.worker.loop import Call
from pipeline.worker.tensorflow import custom_steps, step
from pipeline.worker.tensorflow.collective import ALONE
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.loss_scaling import normalization
from pipeline.worker.tensorflow.profile import first_step, one_again, plain

# Calls without a step that are timed together.
CALLS = 20


class Ablation:
    """The steps of a loop whose training is over, whole and in parts."""

    def __init__(
        self,
        loop: Loop,
        make: Callable[[tf.distribute.Strategy], keras.Model],
        replicas: Sequence[int],
        cores: Sequence[int],
        beat: Callable[[], None],
    ) -> None:
        """`make` makes the model again under another strategy; `replicas` here are pinned to `cores`, if any."""
        self._loop, self._make, self._beat = loop, make, beat
        self._replicas, self._cores = tuple(replicas), tuple(cores)
        data = loop.train_data
        self._data = dataclasses.replace(data, part=plain(data.part), shuffle=False)
        self._ready: Batches | None = None
        self._own_statistics: step.Steps | None = None
        self._copies: dict[int, _Copy] = {}

    def timed(self, command: Explain) -> Explaining:
        """Returns the answer to such a command."""
        match command.what:
            case "no step":
                # Calls of the compiled loop in which no step is made.
                batches = self._loop.reader()
                seconds = sum(self._loop.on(batches, 0).seconds for _ in range(CALLS)) / CALLS
                return Explaining(command.what, seconds=seconds)
            case "no communication":
                replicas = self._no_communication(command.replicas, command.seconds, command.steps_per_call)
                return Explaining(command.what, replicas=replicas)
            case "everything":
                examples, seconds = self._steps(command, self._loop.reader())
            case "no input":
                examples, seconds = self._steps(command, self._there())
            case "no statistics":
                # Each replica normalizes by the statistics of its own batch.
                if self._own_statistics is None:
                    self._own_statistics = self._loop.compiled_anew()
                # The step is traced when it is called first.
                with normalization.with_own_statistics(self._loop.model):
                    examples, seconds = self._steps(command, self._there(), self._own_statistics)
        return Explaining(command.what, examples, seconds)

    def _no_communication(self, replicas: Sequence[int], seconds: float, steps_per_call: int) -> list[TimedReplica]:
        """Times a step of each of these replicas, which train a copy each at the same time, for so many seconds."""
        if not self._copies:
            self._copy()
        own = [number for number in self._replicas if number in replicas]
        for number in own:
            self._copies[number].train(1)
        ready = threading.Barrier(max(1, len(own)))

        def work(number: int) -> TimedReplica:
            ready.wait()
            began, steps = time.perf_counter(), 0
            while not steps or time.perf_counter() - began < seconds:
                self._copies[number].train(steps_per_call)
                steps += steps_per_call
                self._beat()
            return TimedReplica(number, (time.perf_counter() - began) / steps)

        # One of several is held to a device's share of the cores, as the baseline is, and as it has while all compute.
        cores = self._share(own[0]) if len(own) == 1 < len(self._replicas) else ()
        with _pinned(cores), ThreadPoolExecutor(max(1, len(own))) as threads:
            return list(threads.map(work, own))

    def _steps(self, command: Explain, batches: Batches, train: step.Steps | None = None) -> tuple[float, float]:
        """(examples of the global batches, seconds) of as many steps as the command says, after those that warm up."""
        warmup_steps, steps, steps_per_call = command.warmup_steps, command.steps, command.steps_per_call

        def call(count: int) -> Call:
            result = self._loop.on(batches, count, train)
            self._beat()
            return result

        for done in range(0, warmup_steps, steps_per_call):
            call(min(steps_per_call, warmup_steps - done))
        calls = [call(steps_per_call) for _ in range(-(-steps // steps_per_call))]
        return float(sum(call.sizes.sum() for call in calls)), sum(call.seconds for call in calls)

    def _there(self) -> Batches:
        """A batch that is there, again and again."""
        self._ready = self._ready or one_again(self._loop.strategy, self._data)
        return self._ready

    def _copy(self) -> None:
        _, batches = first_step(self._data)
        layout = self._data.layout
        devices = self._loop.strategy.extended.worker_devices
        for number, device, batch in zip(self._replicas, devices, batches, strict=True):
            under = tf.distribute.OneDeviceStrategy(device)
            together = step.Replicas(under, ALONE, always_fed=layout.always_fed, static=layout.last != "short")
            self._copies[number] = _Copy(self._make(under), together, batch, self._loop.xla)
            self._copies[number].train(1)

    def _share(self, number: int) -> tuple[int, ...]:
        """The cores that one of this process's replicas is meant to have."""
        share, place = len(self._cores) // len(self._replicas), self._replicas.index(number)
        return self._cores[place * share : (place + 1) * share]


class _Copy:
    def __init__(self, model: keras.Model, together: step.Replicas, batch: Batch, xla: set[str] | None) -> None:
        self._steps = custom_steps.training_steps(model, together, xla)
        examples = tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.float32)
        self._batches = iter(tf.data.Dataset.from_tensors((examples, (batch,))).repeat())
        # Kept, since the compiled function holds its variables weakly.
        self._model = model

    def train(self, steps: int) -> None:
        losses, _, _ = self._steps(self._batches, tf.constant(steps))
        losses.numpy()


@contextlib.contextmanager
def _pinned(cores: Sequence[int]) -> Iterator[None]:
    """Inside, all threads of this process, TensorFlow's too, run on these cores; where none are named, as they did."""
    if not cores:
        yield
        return
    usual = os.sched_getaffinity(0)
    _hold_to(cores)
    try:
        yield
    finally:
        _hold_to(usual)


def _hold_to(cores: Iterable[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)

"""TensorFlow's engine: what one process does of a plan under `tf.distribute`."""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from pipeline.config import targets
from pipeline.plan.division import left_out
from pipeline.plan.plan import BUILDER, Process
from pipeline.record import commands, events
from pipeline.record.events import Beat, Warned
from pipeline.record.findings import Check
from pipeline.worker import variables
from pipeline.worker.artifacts import Logits, sample_of
from pipeline.worker.callbacks import Callbacks
from pipeline.worker.collective import Collective, Pausable, collective_of
from pipeline.worker.data import batches, inspection
from pipeline.worker.data.batches import Data
from pipeline.worker.data.reading import Batch, Batches, Reading, Shape
from pipeline.worker.data.source import source
from pipeline.worker.engine import Emit
from pipeline.worker.layout import Position, ReplicaPlace
from pipeline.worker.loop import Call, Resume, WeightComparison, versions
from pipeline.worker.process import WorkerProcess
from pipeline.worker.state import on_all
from pipeline.worker.tensorflow import build, custom_steps, devices, placement, static, step, tables
from pipeline.worker.tensorflow import size as of_model
from pipeline.worker.tensorflow.collective import ALONE, Addend, from_first, lost_a_peer, over, texts
from pipeline.worker.tensorflow.equality_check import check
from pipeline.worker.tensorflow.loop import Loop, not_validated, replica_digests
from pipeline.worker.tensorflow.loss_scaling import normalization
from pipeline.worker.tensorflow.process_data import ProcessData, digest_of
from pipeline.worker.tensorflow.profile import Profiler, first_step, one_again, plain, profiler, seed, settle
from pipeline.worker.tensorflow.scheduled import AsyncLoop

# Weights up to which a training that is under way tells how large its step is.
MOST_TRACED_AGAIN = 100
# Calls without a step that are timed together.
CALLS = 20
# Makes the model under a strategy.
Make: TypeAlias = Callable[[tf.distribute.Strategy], keras.Model]


class TensorFlowEngine(WorkerProcess):
    """TensorFlow in a process that trains by `tf.distribute`, or serves others."""

    _data: ProcessData
    _loop: Loop
    # Kept for the process's life, as a loop's iterators are.
    _server: object = None
    _profile: Profiler | None = None
    _ablation: "_Ablation | None" = None
    # Makes the same model again, under another strategy.
    _make: Make

    def join(self) -> dict[str, str]:
        """Takes the process's devices, or serves others; returns versions once every process has joined."""
        plan, process = self._plan, self._process
        self._data = ProcessData(plan, process, self._emit)
        self._place = ReplicaPlace(next(iter(process.replicas), 0), len(process.replicas), plan.workers)
        devices.prepare_devices(plan, process)
        if process.rank in plan.leaders:
            self._strategy = devices.make_strategy(plan, process, self._emit)
            collective: Collective[Addend] = collective_of(plan, process, self._strategy)
            if note := getattr(collective, "note", ""):
                self._note(note)
            self._collective = Pausable(collective)
        else:
            self._server = devices.start_server(plan, process, self._emit)
        return versions("tensorflow")

    def _build(self, train_counts: list[int], validation_counts: list[int], resume: Resume) -> events.Built:
        plan, train = self._plan, self._data.parts["train"]
        if plan.strategy.static_batches:
            left_out(sum(train_counts), plan.workers, plan.training.global_batch)
        sample = batches.spec(train)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(sample)
        classes = self._data.known_classes(self._strategy, self._collective, sample, self._note)
        shape = tf.nest.map_structure(lambda leaf: tuple(leaf.shape[1:]), x)
        self._make = partial(self._model, sample=sample, shape=shape, classes=classes)
        model = self._build_under_strategy(sample)
        reading = Reading(
            plan.data.shuffle_window, plan.data.parallel_reads, plan.data.prefetch,
            self._data.check_labels(model, sample, classes), plan.data_servers,
        )  # fmt: skip
        data = Data(train, self._data.layout(train_counts), plan.data.shuffle, plan.training.seed, reading)
        held_out = [
            Data(part, layout, False, plan.training.seed, reading)
            for part, layout in self._data.validation_parts(validation_counts)
        ]
        first = from_first(self._strategy, self._collective)
        everywhere = partial(on_all, send=lambda words: first([words])[0].numpy())
        position = resume(data.layout, digest_of(data.part), everywhere)
        self._loop = self._loop_over(model, data, held_out, position)
        of_xla: dict[str, Any] = {}
        if plan.training.xla is not None and not plan.strategy.static_batches and self._process.role != BUILDER:
            note, of_xla = settle(self._loop, self._data.anew()[0], plan.training.xla)
            self._note(note, warn=False)
        whole = self._data.whole["validation"] or self._data.whole["train"]
        self._sample = sample_of(
            plan, model, getattr(whole, "class_names", None), lambda: inspection.examples_of(whole, 0, 1, classes),
            self._note,
        )  # fmt: skip
        if (placed := vars(model).get(step.PLACED_AS)) is not None:
            note = placement.checked(model, placed, self._loop.graph(), self._data.folder)
            self._note(note, warn=False)
        return events.Built(
            state_bytes=variables.state_bytes(model, step.optimizers(model)),
            normalizations=sum(layer.synchronized for layer in normalization.layers(model)),
            input_shape=shape,
            input_dtype=tf.nest.map_structure(lambda leaf: leaf.dtype.name, x),
            num_classes=classes,
            validation_examples=sum(part.layout.examples for part in held_out),
            validation_steps=sum(part.layout.steps for part in held_out),
            **of_xla,
        )

    def _build_under_strategy(self, sample: Batch) -> keras.Model:
        plan, make = self._plan, self._make
        if plan.strategy.static_batches and plan.hardware.rehearsal:
            default = tf.distribute.get_strategy()
            bits = plan.training.gradient_bits
            note = static.check_model(make(default), sample, plan.training.replica_batch, bits)
            self._note(note, warn=False)
            # The model that trains has the names and the initial weights that it has without the check.
            keras.utils.clear_session()
            devices.set_policy(plan)
        if not plan.strategy.asynchronous:
            built = make(self._strategy)
            if plan.strategy.static_batches and (text := static.updated_otherwise(built)) is not None:
                self._note(text)
            return built
        with tables.on_servers(len(plan.ranks("parameter server")), plan.strategy.min_shard_bytes):
            built = make(self._strategy)
        for text in tables.check(built, plan.strategy.min_shard_bytes):
            self._emit(Warned(text))
        return built

    def _loop_over(self, model: keras.Model, data: Data, held_out: list[Data], position: Position) -> Loop:
        plan, strategy, bits = self._plan, self._strategy, self._plan.training.gradient_bits
        if plan.strategy.asynchronous:
            shares = self._data.read_by_workers(data.part)
            asynchronous = AsyncLoop(model, strategy, data, held_out, bits)
            asynchronous.feed(source(data, shares, plan.workers, position), plan.workers)
            return asynchronous
        if held_out and (own := custom_steps.of(model)) is not None and own.test is None:
            held_out = []
            self._note(not_validated(model, own, plan.checkpoint.best))
        chief, alone = self._process.rank == 0, len(plan.leaders) == 1
        return Loop(
            model, strategy, data, held_out, bits, chief, alone, position, self._collective, plan.training.gather
        )

    def _model(self, under: tf.distribute.Strategy, sample: Batch, shape: Shape, classes: int | None) -> keras.Model:
        plan = self._plan
        shared = plan.strategy.devices_per_replica > 1 and under is self._strategy
        # Inside the scope, which optimizers and metrics are made in that the plan names.
        with placement.in_host_memory() if shared else contextlib.nullcontext(), under.scope():
            built = build.model(
                lambda: targets.call(plan.model.build, "model.build", input_shape=shape, num_classes=classes),
                under,
                sample,
                targets.value(plan.training.optimizer, "train.optimizer"),
                plan.training.learning_rate,
                targets.value(plan.training.loss, "train.loss"),
                targets.value(plan.training.metrics, "train.metrics"),
                plan.training.rate_scale,
                self._collective if under is self._strategy else None,
                self._note,
                plan.training.gather,
                plan.training.batch_statistics,
                isinstance(self._data.parts["train"], tuple),
            )
        if shared:
            layout: Any = plan.strategy.build.get("layout")
            placement.place(built, under, devices.devices_by_replica(plan, self._process), layout)
            count: Any = plan.strategy.build.get("micro_batches", 1)
            if count > 1:
                placement.in_micro_batches(built, sample, count)
        if plan.training.remat:
            build.forget(built)
        return built

    def _check(self) -> Check:
        if self._plan.strategy.static_batches:
            return Check("not made", unsaid="steps with static shapes are compiled alone")
        return check(self._loop, self._collective, self._place, self._data.sample)

    def _size(self) -> events.Sized:
        loop, builds = self._loop, self._process.role == BUILDER
        if not builds and len(loop.model.trainable_variables) > MOST_TRACED_AGAIN:
            return events.Sized(error="a deep model takes long to be traced once more for it")
        layers = tuple(unit.layer for unit in placement.units(loop.model))
        size = of_model.of(loop, forgetful=builds and not self._plan.training.remat)
        return events.Sized(dataclasses.replace(size, layers=layers))

    def _time(self, command: commands.Profile | commands.Explain) -> events.Profiling | events.Explaining:
        if isinstance(command, commands.Profile):
            # On data that training does not read.
            self._profile = self._profile or profiler(self._loop, *self._data.anew())
            return self._profile.timed(command)
        self._ablation = self._ablation or _Ablation(self._loop, self._make, self._process, self._emit)
        return self._ablation.timed(command)

    def _begin(self) -> tuple[Callable[..., Callbacks], WeightComparison]:
        plan, where = self._plan, self._place
        seed(self._loop, plan.training.seed)
        hooks = partial(Callbacks, plain=partial(self._make, tf.distribute.get_strategy()), weights=tables.weights)

        def gather(digests: Sequence[str]) -> list[list[str]]:
            # By TensorFlow's own sums, whatever it is that adds gradients.
            of_all = texts(self._strategy, over(self._strategy), where, " ".join(digests))
            return [text.split() for text in of_all]

        every = plan.training.compare_weights_every
        same = WeightComparison(every, lambda: replica_digests(self._loop.model.weights), gather, plan.collective)
        return hooks, same

    def _trained_model(self) -> keras.Model:
        # Without parameter servers where it has tables on them.
        return tables.whole(self._loop.model, partial(self._make, tf.distribute.get_strategy()))

    def _logits(self) -> Logits:
        # Outside the strategy, by this process alone.
        logits = tf.function(partial(self._loop.model, training=False), reduce_retracing=True)
        return lambda tokens: logits(tf.constant(tokens))

    _lost_a_peer = staticmethod(lost_a_peer)

    def _raise_cause(self, error: Exception) -> None:
        if isinstance(error, inspection.UNREADABLE):
            self._data.name_broken(error)


class _Ablation:
    """Times steps with parts of them switched off, after training: what these steps change is of no use to anyone."""

    def __init__(self, loop: Loop, make: Make, process: Process, emit: Emit) -> None:
        self._loop, self._make, self._beat = loop, make, partial(emit, Beat())
        self._replicas, self._cores = process.replicas, process.cores
        self._data = dataclasses.replace(loop.train_data, part=plain(loop.train_data.part), shuffle=False)

    def timed(self, command: commands.Explain) -> events.Explaining:
        match command.what:
            case "no step":
                # Calls of the compiled loop in which no step is made.
                batches = self._loop.reader()
                seconds = sum(self._loop.on(batches, 0).seconds for _ in range(CALLS)) / CALLS
                return events.Explaining(command.what, seconds=seconds)
            case "no communication":
                return events.Explaining(command.what, replicas=self._no_communication(command))
            case "everything":
                examples, seconds = self._steps(command, self._loop.reader())
            case "no input":
                examples, seconds = self._steps(command, self._ready)
            case "no statistics":
                own = self._own_statistics
                # The step is traced when it is called first.
                with normalization.with_own_statistics(self._loop.model):
                    examples, seconds = self._steps(command, self._ready, own)
        return events.Explaining(command.what, examples, seconds)

    def _no_communication(self, command: commands.Explain) -> list[events.TimedReplica]:
        """Times a step of each of the replicas, which train a copy each at the same time."""
        own, steps_per_call = [one for one in self._replicas if one in command.replicas], command.steps_per_call
        for number in own:
            self._copies[number](1)
        ready = threading.Barrier(max(1, len(own)))

        def work(number: int) -> events.TimedReplica:
            ready.wait()
            began, steps = time.perf_counter(), 0
            while not steps or time.perf_counter() - began < command.seconds:
                self._copies[number](steps_per_call)
                steps += steps_per_call
                self._beat()
            return events.TimedReplica(number, (time.perf_counter() - began) / steps)

        cores: Sequence[int] = ()
        if len(own) == 1 < len(self._replicas):
            # It is held to a device's share of the cores, as the baseline is, and as it has while all compute.
            share, place = len(self._cores) // len(self._replicas), self._replicas.index(own[0])
            cores = self._cores[place * share : (place + 1) * share]
        with contextlib.ExitStack() as stack:
            if cores:
                stack.callback(_hold_to, os.sched_getaffinity(0))
                _hold_to(cores)
            threads = stack.enter_context(ThreadPoolExecutor(max(1, len(own))))
            return list(threads.map(work, own))

    def _steps(
        self, command: commands.Explain, batches: Batches, train: step.Steps | None = None
    ) -> tuple[float, float]:
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

    @cached_property
    def _ready(self) -> Batches:
        return one_again(self._loop.strategy, self._data)

    @cached_property
    def _own_statistics(self) -> step.Steps:
        # Each replica normalizes by the statistics of its own batch.
        return self._loop.compiled_anew()

    @cached_property
    def _copies(self) -> dict[int, Callable[[int], None]]:
        devices, (_, batches) = self._loop.strategy.extended.worker_devices, first_step(self._data)
        return {number: self._copy(*own) for number, *own in zip(self._replicas, devices, batches, strict=True)}

    def _copy(self, device: str, batch: Batch) -> Callable[[int], None]:
        """Returns what trains a copy of the model for so many steps."""
        under, layout = tf.distribute.OneDeviceStrategy(device), self._data.layout
        together = step.Replicas(under, ALONE, always_fed=layout.always_fed, static=layout.last != "short")
        model = self._make(under)
        steps = custom_steps.compiled_steps(model, together, xla=self._loop.xla)
        examples = tf.cast(tf.shape(tf.nest.flatten(batch)[0])[0], tf.float32)
        batches = iter(tf.data.Dataset.from_tensors((examples, (batch,))).repeat())

        # The model is kept, since the compiled function holds its variables weakly.
        def train(count: int, _model: keras.Model = model) -> None:
            steps(batches, tf.constant(count))[0].numpy()

        train(1)
        return train


def _hold_to(cores: Iterable[int]) -> None:
    # All threads of this process, TensorFlow's too.
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)

"""TensorFlow's engine: what one process does of a plan under `tf.distribute`."""

import contextlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import keras
import tensorflow as tf

from pipeline.config import targets
from pipeline.plan.batches import left_out
from pipeline.plan.plan import BUILDER, Plan, Process
from pipeline.record import commands, events
from pipeline.record.commands import Command
from pipeline.record.events import Beat, EventBase, Failed, Warned
from pipeline.record.findings import Check
from pipeline.worker import rates, variables
from pipeline.worker.callbacks import Callbacks
from pipeline.worker.checkpoint import Survival
from pipeline.worker.collective import Pausable, collective_of
from pipeline.worker.engine import Tell
from pipeline.worker.going_on import survival
from pipeline.worker.input import batches, few, integrity
from pipeline.worker.input.broken import expect_batch
from pipeline.worker.input.part import Batch, Shape
from pipeline.worker.input.passes import Place
from pipeline.worker.input.profile import Profile
from pipeline.worker.input.reading import Reading
from pipeline.worker.keras_fit.agree import texts
from pipeline.worker.notes import Notes
from pipeline.worker.pace import Pace
from pipeline.worker.same import NEVER, SameWeights
from pipeline.worker.sampling import Writing, writing_of
from pipeline.worker.saving import save
from pipeline.worker.tensorflow import build, remat, static, step, tables
from pipeline.worker.tensorflow import size as of_model
from pipeline.worker.tensorflow.collective import Addend, over
from pipeline.worker.tensorflow.custom_steps import loop as custom_loop
from pipeline.worker.tensorflow.custom_steps import step as custom_step
from pipeline.worker.tensorflow.devices import (
    devices_by_replica,
    make_strategy,
    prepare_devices,
    set_policy,
    start_server,
    versions,
)
from pipeline.worker.tensorflow.equality_check.comparison import check
from pipeline.worker.tensorflow.errors import diverged, explain, lost_a_peer
from pipeline.worker.tensorflow.loop import Data, Loop
from pipeline.worker.tensorflow.loss_scaling import normalization
from pipeline.worker.tensorflow.own_data import OwnData, digest_of
from pipeline.worker.tensorflow.placement import listing, micro_batches, place
from pipeline.worker.tensorflow.saving import replica_digests
from pipeline.worker.tensorflow.scheduled import ScheduledLoop
from pipeline.worker.tensorflow.state import on_all
from pipeline.worker.tensorflow.switched import Switched
from pipeline.worker.training import Preempted

# Weights up to which a training that is under way tells how large its step is.
MOST_TRACED_AGAIN = 100


class TensorFlowEngine:
    """A process that trains, or the server that it is to others. See `pipeline.worker.engine.Engine`."""

    def __init__(self, plan: Plan, process: Process, tell: Tell, asked_to_leave: Callable[[], bool]) -> None:
        self._plan, self._process, self._tell, self._asked_to_leave = plan, process, tell, asked_to_leave
        self._work: Work | None = None
        # Kept for the process's life.
        self._server: object = None

    def join(self) -> dict[str, str]:
        """Takes its devices; returns the versions that a measurement depends on, once every process has joined."""
        plan, process = self._plan, self._process
        prepare_devices(plan, process)
        if process.rank in plan.leaders:
            strategy = make_strategy(plan, process, self._tell)
            collective: Pausable[Addend] = Pausable(collective_of(plan, process, strategy))
            self._work = Work(plan, process, strategy, collective, self._tell, self._asked_to_leave)
        else:
            self._server = start_server(plan, process, self._tell)
        return versions()

    def obey(self, command: Command[EventBase]) -> None:
        """Does what a command says; one that serves others, or has left, does nothing more."""
        work = self._work
        if work is None:
            return
        try:
            work.obey(command)
        except Preempted:
            # It waits for the others, some of whom may still need it, to be told to end.
            self._work = None
        except Exception as error:
            work.finish_writing()
            if isinstance(error, integrity.UNREADABLE):
                work.data.name_broken(error)
            raise

    def failure(self, error: BaseException) -> Failed:
        """What an error is told as."""
        return Failed(explain(error), lost_a_peer(error), diverged(error))


class Work:
    """What a process has made so far, and the commands that go on from it."""

    def __init__(
        self,
        plan: Plan,
        process: Process,
        strategy: tf.distribute.Strategy,
        collective: Pausable[Addend],
        tell: Tell,
        asked_to_leave: Callable[[], bool],
    ) -> None:
        self._plan, self._process, self._strategy, self._tell = plan, process, strategy, tell
        self._collective, self._asked_to_leave = collective, asked_to_leave
        self.data = OwnData(plan, process, tell)
        self._notes = Notes(tell if process.rank == plan.leaders[0] else None)
        if collective.note:
            self._notes.add(collective.note)
        # The run's.
        self._folder = Path()
        self._loop: Loop | None = None
        # Kept for the process's life, as a loop's iterators are.
        self._profile: Profile | None = None
        self._pace: Pace | None = None
        self._survival: Survival | None = None
        self._switched: Switched | None = None
        self._writing: Writing | None = None
        # Makes the same model again, under another strategy.
        self._make: Callable[[tf.distribute.Strategy], keras.Model] = keras.Model

    def obey(self, command: Command[EventBase]) -> None:
        """Does what a command says, and tells the event that answers it."""
        match command:
            case commands.Load():
                self._folder = Path(command.folder)
                self.data.load(command.folder)
            case commands.Drop():
                self.data.drop(command.broken)
            case commands.Build():
                self._build(command.train_counts, command.validation_counts, command.resume)
            case commands.Check():
                self._tell(events.Checked(self._check()))
            case commands.Size():
                self._size()
            case commands.Profile():
                self._time_alone(command.what, command.steps)
            case commands.Begin():
                self._begin()
            case commands.Calibrate():
                self._tell(self._paced().calibrate(command.steps_per_call))
            case commands.Measure():
                self._tell(self._paced().measure(command))
            case commands.Train():
                self._train(command.steps_per_call, command.folder)
            case commands.Explain():
                self._explain(command)
            case commands.Leave():
                self._leave()

    def _build(self, train_counts: list[int], validation_counts: list[int], resume: str | None) -> None:
        plan, train = self._plan, self.data.parts["train"]
        expect_batch(sum(train_counts), plan.training.global_batch, plan.workers, plan.data.on_error == "skip")
        if plan.strategy.static_batches:
            left_out(sum(train_counts), plan.workers, plan.training.global_batch)
        sample = batches.spec(train)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(sample)
        classes = self.data.known_classes(self._strategy, self._collective, sample, self._notes)
        shape = tf.nest.map_structure(lambda leaf: tuple(leaf.shape[1:]), x)
        model, outputs = self._build_under_strategy(sample, shape, classes)
        reading = Reading(
            plan.data.shuffle_window, plan.data.parallel_reads, plan.data.prefetch,
            self.data.check_labels(model, sample, classes), plan.data_servers,
        )  # fmt: skip
        data = Data(train, self.data.layout(train_counts), plan.data.shuffle, plan.training.seed, reading)
        held_out = [
            Data(part, layout, False, plan.training.seed, reading)
            for part, layout in self.data.validation_parts(validation_counts)
        ]
        self._loop = self._loop_over(model, outputs, data, held_out, resume)
        whole = self.data.whole["validation"] or self.data.whole["train"]
        self._writing = writing_of(
            plan, model, getattr(whole, "class_names", None), lambda: few.examples_of(whole, 0, 1, classes),
            self._notes.add,
        )  # fmt: skip
        if (placement := place.of(model)) is not None:
            self._notes.keep(listing.checked(model, placement, self._loop.graph(), self._folder))
        self._tell(
            events.Built(
                parameters=model.count_params(),
                state_bytes=variables.state_bytes(model, step.optimizers(model)),
                normalizations=sum(layer.synchronized for layer in normalization.layers(model)),
                input_shape=shape,
                input_dtype=tf.nest.map_structure(lambda leaf: leaf.dtype.name, x),
                num_classes=classes,
                train_examples=data.layout.examples,
                validation_examples=sum(part.layout.examples for part in held_out),
                validation_steps=sum(part.layout.steps for part in held_out),
                steps_per_epoch=data.layout.steps,
                epochs=plan.training.epochs or -(-(plan.training.steps or 1) // data.layout.steps),
                data_digest=digest_of(train),
                notes=self._notes.texts or None,
            )
        )

    def _build_under_strategy(self, sample: Batch, shape: Shape, classes: int | None) -> tuple[keras.Model, list[str]]:
        """The model, where its variables are to be, and the names of its outputs."""
        plan = self._plan

        def make(under: tf.distribute.Strategy) -> tuple[keras.Model, list[str]]:
            return self._model(under, sample, shape, classes)

        self._make = lambda under: make(under)[0]
        if plan.strategy.static_batches and plan.hardware.rehearsal:
            static.check_model(
                make(tf.distribute.get_strategy())[0], sample, plan.training.replica_batch, plan.training.gradient_bits
            )
            self._notes.keep(static.passed(plan.training.replica_batch))
            # The model that trains has the names and the initial weights that it has without the check.
            keras.utils.clear_session()
            set_policy(plan)
        if not plan.strategy.asynchronous:
            return make(self._strategy)
        with tables.on_servers(len(plan.ranks("parameter server")), plan.strategy.min_shard_bytes):
            made = make(self._strategy)
        for text in tables.check(made[0], plan.strategy.min_shard_bytes):
            self._tell(Warned(text))
        return made

    def _loop_over(
        self, model: keras.Model, outputs: list[str], data: Data, held_out: list[Data], resume: str | None
    ) -> Loop:
        """The loop that trains the model, from where an earlier one was where there is something to go on with."""
        plan, strategy, bits = self._plan, self._strategy, self._plan.training.gradient_bits
        first, rest = (*held_out, None, None)[:2]
        chief, alone = self._process.rank == 0, len(plan.leaders) == 1
        everywhere = partial(on_all, strategy=strategy, collective=self._collective)
        self._survival, position = survival(
            plan, resume, data.layout, digest_of(data.part), chief, everywhere, self._asked_to_leave, self._tell
        )
        if plan.strategy.asynchronous:
            shares = self.data.read_by_workers(data.part)
            return ScheduledLoop(model, strategy, data, shares, plan.workers, first, outputs, bits, position)
        loop = Loop
        if (own := custom_step.of(model)) is not None:
            loop = custom_loop.CustomLoop
            if first is not None and own.test is None:
                first, rest = None, None
                self._notes.add(custom_loop.not_validated(model, own, plan.checkpoint.best))
        return loop(
            model, strategy, data, first, outputs, bits, chief, alone, rest, position, self._collective,
            plan.training.gather,
        )  # fmt: skip

    def _model(
        self, under: tf.distribute.Strategy, sample: Batch, shape: Shape, classes: int | None
    ) -> tuple[keras.Model, list[str]]:
        """The plan's model, compiled under a strategy, and the names of its outputs."""
        plan = self._plan
        shared = plan.strategy.devices_per_replica > 1 and under is self._strategy
        # Inside the scope, which optimizers and metrics are made in that the plan names.
        with place.in_host_memory() if shared else contextlib.nullcontext(), under.scope():
            made = build.model(
                lambda: targets.call(plan.model.build, "model.build", input_shape=shape, num_classes=classes),
                under,
                sample,
                targets.value(plan.training.optimizer, "train.optimizer"),
                plan.training.learning_rate,
                targets.value(plan.training.loss, "train.loss"),
                targets.value(plan.training.metrics, "train.metrics"),
                plan.training.rate_scale,
                self._collective if under is self._strategy else None,
                self._notes.add,
                plan.training.gather,
                plan.training.batch_statistics,
                isinstance(self.data.parts["train"], tuple),
            )
        if shared:
            layout: Any = plan.strategy.build.get("layout")
            place.place(made[0], under, devices_by_replica(plan, self._process), layout)
            count: Any = plan.strategy.build.get("micro_batches", 1)
            if count > 1:
                micro_batches.use(made[0], sample, count)
        if plan.training.remat:
            remat.forget(made[0])
        return made

    def _check(self) -> Check:
        """What came of comparing all replicas with one device. Nothing that training goes on with is changed."""
        if self._plan.strategy.static_batches:
            return Check("not made", unsaid="steps with static shapes are compiled alone")
        mine = self._process.replicas
        return check(self._ready(), self._collective, Place(mine[0], len(mine), self._plan.workers), self.data.few)

    def _size(self) -> None:
        loop, builds = self._ready(), self._process.role == BUILDER
        if not builds and len(loop.model.trainable_variables) > MOST_TRACED_AGAIN:
            self._tell(events.Sized(error="a deep model takes long to be traced once more for it"))
            return
        try:
            layers = tuple(unit.layer for unit in place.units(loop.model))
            made = of_model.of(loop, forgetful=builds and not self._plan.training.remat)
        except Exception as error:
            # An estimate is no reason to end a training.
            traceback.print_exc()
            self._tell(events.Sized(error=explain(error)))
        else:
            self._tell(events.Sized(replace(made, layers=layers)))

    def _time_alone(self, what: Literal["model", "input"], steps: int | None) -> None:
        """Times the input or the model, on data that training does not read."""
        if self._profile is None:
            self._profile = Profile(self._ready(), *self.data.anew())
        profile = self._profile
        if steps is None:
            self._tell(events.Profiling(what, profile.input_pace() if what == "input" else profile.model_pace()))
        else:
            examples, seconds = profile.input(steps) if what == "input" else profile.model(steps)
            self._tell(events.Profiling(what, examples=examples, seconds=seconds))

    def _begin(self) -> None:
        plan = self._plan
        keras.utils.set_random_seed(plan.training.seed)
        hooks = partial(Callbacks, plain=partial(self._make, tf.distribute.get_strategy()), weights=tables.weights)
        self._paced().begin(plan, hooks, self._survival, self._same())

    def _same(self) -> SameWeights:
        """What compares the weights of all replicas, where the plan has them compared."""
        plan, mine, model = self._plan, self._process.replicas, self._ready().model
        if plan.training.compare_weights_every is None:
            return NEVER
        where = Place(mine[0], len(mine), plan.workers)

        def gather(digests: Sequence[str]) -> list[list[str]]:
            # By TensorFlow's own sums, whatever it is that adds gradients.
            own = over(self._strategy)
            told = texts(
                self._strategy, own, " ".join(digests), where.first // where.local, where.processes, where.local
            )
            return [text.split() for text in told]

        return SameWeights(
            plan.training.compare_weights_every,
            lambda: replica_digests(model.weights),
            gather,
            plan.collective,
        )

    def _train(self, steps_per_call: int, folder: str) -> None:
        loop, training = self._ready(), self._paced().finish(steps_per_call)
        if loop.chief and self._plan.training.save:
            for optimizer in step.optimizers(loop.model):
                rates.unscaled(optimizer)
            plain = self._make(tf.distribute.get_strategy()) if tables.has_tables(loop.model) else None
            model = loop.model if plain is None else tables.whole(loop.model, plain)
            self._tell(events.Saved(save(model, Path(folder), self._tell)))
        if loop.chief and self._writing is not None:
            # Outside the strategy, by this process alone.
            logits = tf.function(partial(loop.model, training=False), reduce_retracing=True)
            self._writing.write(lambda tokens: logits(tf.constant(tokens)), Path(folder), self._tell)
        self._tell(
            events.Finished(replica_digests(loop.model.trainable_variables), **(training.result if loop.chief else {}))
        )

    def _explain(self, command: commands.Explain) -> None:
        process = self._process
        if self._switched is None:
            beat = partial(self._tell, Beat())
            self._switched = Switched(self._ready(), self._make, process.replicas, process.cores, beat)
        self._tell(self._switched.timed(command))

    def _leave(self) -> None:
        """Writes a checkpoint where training has begun and is not over, and raises `Preempted`."""
        if self._pace is not None:
            self._pace.leave()
        self._tell(events.Left())
        raise Preempted

    def finish_writing(self) -> None:
        """Returns once no checkpoint is being written: what comes after a failure goes on from it."""
        if self._survival is not None:
            self._survival.checkpointer.wait()

    def _paced(self) -> Pace:
        if self._pace is None:
            self._pace = Pace(self._ready(), self._tell, self._plan.training.deterministic)
        return self._pace

    def _ready(self) -> Loop:
        assert self._loop is not None, "build comes first"
        return self._loop

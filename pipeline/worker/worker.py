"""One process's life: its devices, strategy, data and model, then what the conductor asks of it, told as events.

A worker or parameter server of an asynchronous training serves its coordinator, and takes `exit` alone.

Commands, each a dictionary with `do`:

    load       {"folder"}             make the data, and look for what is broken; answered by `loaded`
    drop       {"broken"}             leave out what any process found broken; answered by `loaded`
    build      {"train_counts", "validation_counts", "resume"}   make the model; `built`. Training will go on from the
               last good checkpoint with `resume` "last" or "back"; with "back" later ones are removed; `restored`
    size       {}                     tell how large the model is; `sized`
    profile    {"what", "steps"}      before `begin`, time the "model" alone, then the "input", each a few and then
               so many steps, then the "stages" of the input in the first process; each answered by `profiling`
    begin      {}                     begin training: from here on, steps are those of the training while it lasts
    calibrate  {"steps_per_call"}     trace, time a few steps; `calibrated`
    measure    {"repeat", "warmup_steps", "steps", "steps_per_call"}   time steps; `measured`
    train      {"steps_per_call", "folder"}   train to the end, save; `saved`, `finished`
    explain    {"what", ...}          once training is over, or in a baseline: time steps with "everything" or
               "no input" or "no statistics" ("warmup_steps", "steps", "steps_per_call"), a call with "no step", or
               some "replicas" with "no communication" ("seconds", "steps_per_call"); each answered by `explaining`
    leave      {}                     write a checkpoint as soon as all agree to, and do nothing more; `left`. It is
               heard at once, whatever a process is at
    exit       {}                     end with 0

Training tells `steps`, `epoch` and `checkpoint`. Without `begin`, as in the baseline, steps train the model for nothing
but time.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from pipeline.config import targets
from pipeline.data.examples import Broken, Examples
from pipeline.data.manifest import SPLITS
from pipeline.plan import size as sizes
from pipeline.plan.plan import DATA_SERVER, Plan, Process, dealt, from_json, left_out, shared, stays_here
from pipeline.strategies.parameter_server import serve
from pipeline.worker.input import batches, cache, integrity, service
from pipeline.worker.input.profile import Profile
from pipeline.worker.input.reading import Reading
from pipeline.worker.tensorflow import build, loopback, static, tables
from pipeline.worker.tensorflow import size as of_model
from pipeline.worker.tensorflow.checkpoint import Checkpointer
from pipeline.worker.tensorflow.loop import Call, Data, Loop, Tell, TrainingError, waited
from pipeline.worker.tensorflow.scheduled import ScheduledLoop
from pipeline.worker.tensorflow.state import on_all
from pipeline.worker.tensorflow.switched import Switched
from pipeline.worker.tensorflow.training import Diverged, Preempted, Survival, Training

CALIBRATION_STEPS = 3
_ABOVE_THE_REASON = re.compile(r"Graph execution error|Detected at node|<stack traces|File |\d+ root error|\[\[")


def main(
    plan_text: str,
    rank: int,
    tell: Tell,
    take: Callable[[], dict[str, Any]],
    asked_to_leave: Callable[[], bool],
    leave: Callable[[int], NoReturn],
) -> NoReturn:
    """Lives process `rank` of a plan: tells events, takes commands, and on `exit` leaves at once with 0.

    It does not return, because letting go of TensorFlow's iterators and servers can take a minute.
    """
    plan = from_json(plan_text)
    process = plan.processes[rank]
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    prepare_devices(plan, process)
    leads = rank in plan.leaders
    strategy = make_strategy(plan, process, tell) if leads else None
    # Kept for the process's life.
    server = None if leads else start_server(plan, process, tell)
    tell("joined", devices=list(process.devices), versions=versions())
    if process.rank == min(each.rank for each in plan.processes if each.host == process.host):
        _sample_system(plan.system_metrics_seconds, process.host, tell)
    work = None if strategy is None else Work(plan, process, strategy, tell, asked_to_leave)
    while (command := take())["do"] != "exit":
        if work is not None:
            try:
                getattr(work, command.pop("do"))(**command)
            except Preempted:
                # It waits for the others, some of whom may still need it, to be told to end.
                work = None
            except Exception as error:
                work.finish_writing()
                if isinstance(error, integrity.UNREADABLE):
                    work.name_broken(error)
                raise
    del server
    leave(0)


def prepare_devices(plan: Plan, process: Process) -> None:
    """Cores, threads, devices, precision and seeds, as planned; before anything lists devices."""
    if process.cores:
        os.sched_setaffinity(0, process.cores)
    tf.config.threading.set_intra_op_parallelism_threads(process.intra_op_threads)
    tf.config.threading.set_inter_op_parallelism_threads(process.inter_op_threads)
    gpus = tf.config.list_physical_devices("GPU")
    if plan.kind == "gpu" and process.devices:
        wanted = [int(name.split(":")[1]) for name in process.devices]
        if max(wanted) >= len(gpus):
            raise TrainingError(
                f"Expected {plan.hardware} to have {', '.join(process.devices)}, received {len(gpus)} GPUs from "
                f"TensorFlow. Try installing tensorflow[and-cuda], or hardware.rehearse=true."
            )
        tf.config.set_visible_devices([gpus[index] for index in wanted], "GPU")
        for index in wanted:
            # The baseline has its turn on the same GPU.
            tf.config.experimental.set_memory_growth(gpus[index], True)
    elif plan.kind == "tpu":
        # The TPU is found when the strategy connects to it.
        tf.config.set_visible_devices([], "GPU")
    else:
        tf.config.set_visible_devices([], "GPU")
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * max(1, len(process.devices))
        )
    _set_policy(plan)
    if plan.deterministic:
        tf.config.experimental.enable_op_determinism()


def _set_policy(plan: Plan) -> None:
    """The seed and the precision, which Keras keeps for the process."""
    keras.utils.set_random_seed(plan.seed)
    keras.config.set_dtype_policy(plan.precision)


def make_strategy(plan: Plan, process: Process, tell: Tell) -> tf.distribute.Strategy:
    """The plan's strategy over this process's devices; returns once every process has joined."""
    kind = plan.kind.upper()
    _stay_on_loopback(plan, process, tell)
    return targets.call(
        plan.strategy_build,
        "strategy.build",
        devices=tuple(f"{kind}:{index}" for index in range(len(process.devices))),
        addresses=tuple(each.address for each in plan.processes if each.address and each.devices),
        rank=process.rank,
        **addresses_by_role(plan),
    )


def start_server(plan: Plan, process: Process, tell: Tell) -> Any:
    """The server through which the coordinator uses this process's device, or keeps its variables here; or the one that
    makes batches.
    """
    _stay_on_loopback(plan, process, tell)
    if process.role == DATA_SERVER:
        return service.serve(str(process.address))
    on_gpu = plan.kind == "gpu" and process.devices
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=process.intra_op_threads,
        inter_op_parallelism_threads=process.inter_op_threads,
        device_count={} if on_gpu else {"GPU": 0},
    )
    if on_gpu:
        config.gpu_options.visible_device_list = ",".join(name.split(":")[1] for name in process.devices)
        config.gpu_options.allow_growth = True
    addresses = addresses_by_role(plan)
    return serve(**addresses, address=str(process.address), config=config)


def addresses_by_role(plan: Plan) -> dict[str, Any]:
    """The addresses of an asynchronous training: `coordinator`, `workers` and `parameter_servers`."""
    if not plan.asynchronous:
        return {}
    address = {each.rank: str(each.address) for each in plan.processes}
    return {
        "coordinator": address[0],
        "workers": tuple(address[rank] for rank in plan.ranks("worker")),
        "parameter_servers": tuple(address[rank] for rank in plan.ranks("parameter server")),
    }


def _stay_on_loopback(plan: Plan, process: Process, tell: Tell) -> None:
    addresses = [each.address for each in plan.processes if each.address]
    if addresses and all(stays_here(address) for address in addresses) and not loopback.listen_on_loopback_only():
        tell("warning", text=f"TensorFlow listens on every network interface of this machine at {process.address}.")


class Work:
    """What a process has made so far, and the commands that go on from it."""

    def __init__(
        self,
        plan: Plan,
        process: Process,
        strategy: tf.distribute.Strategy,
        tell: Tell,
        asked_to_leave: Callable[[], bool],
    ) -> None:
        self._plan, self._process, self._strategy, self._tell = plan, process, strategy, tell
        self._asked_to_leave = asked_to_leave
        # "train" and "validation", None for one that is not there: as they were made, and what this process reads.
        self._whole: dict[str, Any] = {}
        # Of the run.
        self._folder = Path()
        self._parts: dict[str, Any] = {}
        self._loop: Loop | None = None
        # Kept for the process's life, as a loop's iterators are.
        self._profile: Profile | None = None
        self._training: Training | None = None
        self._survival: Survival | None = None
        self._switched: Switched | None = None
        # Makes the same model again, under another strategy.
        self._make: Callable[[tf.distribute.Strategy], keras.Model] = keras.Model
        self._put_back = contextlib.ExitStack()
        self._spare = False
        # What training tells while it is timed, to be told afterwards: the conductor runs on the same cores.
        self._held: list[tuple[str, dict[str, Any]]] | None = None

    def load(self, folder: str) -> None:
        """Makes the data, looks through its share of them for what is broken, and tells how many examples there are."""
        plan, number, processes = self._plan, self._process.rank, len(self._plan.leaders)
        self._folder = Path(folder)
        self._whole = dict(zip(SPLITS, self._shard(number, processes), strict=True))
        if plan.static_batches:
            for name, part in zip(("training", "validation"), self._whole.values(), strict=True):
                static.check_data(part, name)
        # Of what was made for this process alone, no other sees anything.
        share = (0, 1) if self._has_shards() else (plan.leaders.index(number), processes)
        broken = {name: integrity.broken(part, plan.num_classes, *share, plan.on_error == "skip")
                  for name, part in self._whole.items()}  # fmt: skip
        flaws = () if self._has_shards() else integrity.flaws(self._whole["train"], plan.num_classes)
        if plan.on_error == "stop":
            integrity.refuse([each for found in broken.values() for each in found], flaws)
        else:
            self._sift(broken, reports=self._has_shards() or number == plan.leaders[0])
        for flaw in flaws if number == plan.leaders[0] else ():
            self._tell("warning", text=f"There are {flaw}.")
        self._tell_loaded(broken)

    def _sift(self, broken: dict[str, list[Broken]], reports: bool) -> None:
        """Leaves out what is broken of data sets, which every process reads whole; one of them `reports` it."""
        for name, part in self._whole.items():
            if isinstance(part, tf.data.Dataset):
                self._whole[name], lost = integrity.sifted(part, self._plan.num_classes)
                if lost and reports:
                    which, why = (
                        f"of the {name} data set",
                        "that cannot be made, or have NaN, infinity or a wrong label",
                    )
                    broken[name].append(Broken(None, 0, lost, which, why))

    def drop(self, broken: Mapping[str, Mapping[str, list[dict[str, Any]]]]) -> None:
        """Leaves out what any process has found broken, or this one alone in what was made for it."""
        own = [broken.get(str(self._process.rank), {})] if self._has_shards() else broken.values()
        for name, part in self._whole.items():
            lost = [Broken(**each) for of_process in own for each in of_process.get(name, ())]
            if not isinstance(part, tf.data.Dataset):
                self._whole[name] = integrity.without(part, lost)
        self._tell_loaded({})

    def _tell_loaded(self, broken: Mapping[str, Sequence[Broken]]) -> None:
        """Tells how many examples this process has, once files are divided, and what it found broken."""
        sharded = {}
        for name, part in self._whole.items():
            mine, sharded[name] = self._divided(part)
            # What is broken is left out first.
            self._parts[name] = mine if any(broken.values()) else self._cached(name, mine)
        self._tell(
            "loaded",
            sharded=sharded,
            examples={name: 0 if part is None else batches.count(part) for name, part in self._parts.items()},
            broken={name: [dataclasses.asdict(each) for each in found] for name, found in broken.items()},
        )

    def _cached(self, name: str, part: Any) -> Any:
        """The part, made once and kept, where that was asked for."""
        plan = self._plan
        if part is None or plan.cache == "none" or not isinstance(part, Examples | tf.data.Dataset):
            return part
        if plan.cache == "memory":
            return cache.in_memory(part)
        build = json.dumps(plan.data_build, sort_keys=True, default=str)
        if isinstance(part, Examples) and part.digest is not None:
            # Other runs on the same data can use it.
            files = [dataclasses.astuple(each) for each in part.raw] if part.in_files else part.count
            return cache.in_file(part, Path(plan.output_dir) / "cache", f"{build} {part.digest} {files}")
        mine = self._process.rank if self._has_shards() else 0
        return cache.in_file(part, self._folder / "cache", f"{build} {name} {mine}")

    def _divided(self, part: Any) -> tuple[Any, bool]:
        """(what this process reads of a part, whether others read something else)."""
        leaders = self._plan.leaders
        if len(leaders) == 1 or part is None or self._has_shards():
            return part, len(leaders) > 1 and self._has_shards()
        if not (isinstance(part, Examples) and part.in_files):
            return part, False
        files = [each.records for each in part.raw]
        # Files that were lost may leave too few for what was asked.
        asked = self._plan.shard if len(files) >= len(leaders) else "auto"
        if shared(asked, files, len(leaders)) == "element":
            return part, False
        mine = dealt(files, len(leaders))[leaders.index(self._process.rank)]
        return dataclasses.replace(part, raw=tuple(part.raw[place] for place in mine)), True

    def build(self, train_counts: list[int], validation_counts: list[int], resume: str | None = None) -> None:
        """Makes the model, on data of which each shard has the given number of examples."""
        plan, strategy = self._plan, self._strategy
        train = self._parts["train"]
        integrity.expect_batch(sum(train_counts), plan.global_batch, plan.workers, plan.on_error == "skip")
        if plan.static_batches:
            left_out(sum(train_counts), plan.workers, plan.global_batch)
        sample = batches.spec(train)
        x, y, _ = keras.utils.unpack_x_y_sample_weight(sample)
        classes = plan.num_classes or integrity.num_classes(train, y)
        reading = Reading(plan.shuffle_window, plan.parallel_reads, plan.prefetch, classes, plan.data_servers)
        data = Data(train, self._layout(train_counts), plan.shuffle, plan.seed, reading)
        held_out = [
            Data(part, layout, False, plan.seed, reading) for part, layout in self._validation_parts(validation_counts)
        ]
        if classes is None and targets.asks_for(plan.model_build, "model.build", "num_classes"):
            raise TrainingError(
                "Expected the number of classes, which model.build asks for, received data whose labels do not tell. "
                "Try data.num_classes=10, or whatever it is."
            )
        shape = tf.nest.map_structure(lambda leaf: tuple(leaf.shape[1:]), x)

        def make(under: tf.distribute.Strategy) -> tuple[keras.Model, list[str]]:
            return build.model(
                lambda: targets.call(plan.model_build, "model.build", input_shape=shape, num_classes=classes),
                under,
                sample,
                targets.value(plan.optimizer, "train.optimizer"),
                plan.learning_rate,
                targets.value(plan.loss, "train.loss"),
                targets.value(plan.metrics, "train.metrics"),
                plan.rate_scale,
            )

        if plan.static_batches and plan.rehearsal:
            static.check_model(make(tf.distribute.get_strategy())[0], sample, plan.replica_batch, plan.gradient_bits)
            # The model that trains has the names and the initial weights that it has without the check.
            keras.utils.clear_session()
            _set_policy(plan)
        if plan.asynchronous:
            with tables.on_servers(len(plan.ranks("parameter server")), plan.min_shard_bytes):
                model, outputs = make(strategy)
            for text in tables.check(model, plan.min_shard_bytes):
                self._tell("warning", text=text)
        else:
            model, outputs = make(strategy)
        self._make = lambda under: make(under)[0]
        chief = self._process.rank == 0
        alone = len(plan.leaders) == 1
        first, rest = (*held_out, None, None)[:2]
        position = self._prepare_survival(resume, data.layout, _digest(train))
        if plan.asynchronous:
            self._loop = ScheduledLoop(
                model, strategy, data, self._racing(train), plan.workers, first, outputs, plan.gradient_bits, position
            )
        else:
            self._loop = Loop(model, strategy, data, first, outputs, plan.gradient_bits, chief, alone, rest, position)
        self._tell(
            "built",
            parameters=model.count_params(),
            state_bytes=of_model.state_bytes(model),
            normalizations=len(build.normalizations(model)),
            input_shape=shape,
            input_dtype=tf.nest.map_structure(lambda leaf: leaf.dtype.name, x),
            num_classes=classes,
            train_examples=data.layout.examples,
            validation_examples=sum(each.layout.examples for each in held_out),
            validation_steps=sum(each.layout.steps for each in held_out),
            steps_per_epoch=data.layout.steps,
            epochs=plan.epochs or -(-(plan.steps or 1) // data.layout.steps),
            data_digest=_digest(train),
        )

    def size(self) -> None:
        """Tells how large the model is; for that the step is compiled, if it was not yet."""
        loop = self._ready()
        try:
            made = of_model.of(loop.model, loop.graph(), len(self._process.replicas), loop.train_data.part)
        except Exception as error:
            # An estimate is no reason to end a training.
            traceback.print_exc()
            self._tell("sized", error=explain(error))
        else:
            self._tell("sized", **sizes.to_plain(made))

    def profile(self, what: str, steps: int | None = None) -> None:
        """Times the input or the model alone, on data that training does not read."""
        if self._profile is None:
            self._profile = Profile(self._ready(), *self._data_anew())
        profile = self._profile
        told: dict[str, Any] = {}
        if what == "stages":
            told = {"stages": profile.costs() if self._process.rank == 0 else []}
        elif steps is None:
            told = {"step_seconds": profile.input_pace() if what == "input" else profile.model_pace()}
        else:
            examples, seconds = profile.input(steps) if what == "input" else profile.model(steps)
            told = {"examples": examples, "seconds": seconds}
        self._tell("profiling", what=what, **told)

    def _data_anew(self) -> tuple[Any, list[Any]]:
        """The training data, and what workers that race read of it: what may be read without a trace, or made again.

        A data set draws the orders of its shuffles from a state that each iterator changes.
        """
        train = self._parts["train"]
        if isinstance(train, tf.data.Dataset):
            train = self._shard(self._process.rank, len(self._plan.leaders))[0]
        return train, self._racing(train)

    def _racing(self, train: Any) -> list[Any]:
        """What workers that race read of the training data: each a part of its own, where it can be had in parts."""
        shares = self._plan.workers if self._plan.asynchronous and self._has_shards() else 1
        return [self._shard(shard, shares)[0] for shard in range(shares)] if shares > 1 else [train]

    def begin(self) -> None:
        """Begins training."""
        plan = self._plan
        keras.utils.set_random_seed(plan.seed)
        callbacks = [targets.value(each, f"train.callbacks[{index}]") for index, each in enumerate(plan.callbacks)]
        wrong = [each for each in callbacks if not isinstance(each, keras.callbacks.Callback)]
        if wrong:
            raise TrainingError(f"Expected train.callbacks to be Keras callbacks, received {type(wrong[0]).__name__}.")
        if self._survival is not None and self._process.rank == 0:
            self._survival.checkpointer.check()
        self._training = Training(
            self._ready(), plan.epochs, plan.steps, callbacks, self._tell_of_training, survival=self._survival
        )

    def calibrate(self, steps_per_call: int | None) -> None:
        """Traces the step, and times a few: one call, or so many steps that a call's length can be chosen."""
        loop, count = self._ready(), steps_per_call or CALIBRATION_STEPS
        self._advance(1, steps_per_call or 1)
        while not loop.warm:
            self._advance(loop.concurrent_steps, 1)
        timed = self._advance(count * loop.concurrent_steps, count)
        seconds = sum(call.seconds for call in timed) * loop.concurrent_steps
        self._tell("calibrated", step_seconds=seconds / sum(call.steps for call in timed))

    def measure(self, repeat: int, warmup_steps: int, steps: int, steps_per_call: int) -> None:
        """Times at least `steps` steps after `warmup_steps`, in whole calls."""
        loop = self._ready()
        with self._told_afterwards():
            self._advance(warmup_steps, steps_per_call)
            timed = self._advance(steps, steps_per_call)
        waits = [
            sum(waited(call.waits) for call in timed if call.worker == worker)
            for worker in range(loop.concurrent_steps)
        ]
        self._tell(
            "measured",
            repeat=repeat,
            steps=sum(call.steps for call in timed),
            examples=float(sum(call.sizes.sum() for call in timed)),
            seconds=sum(call.seconds for call in timed),
            calls=[[call.steps, call.seconds] for call in timed],
            input_seconds=[] if self._plan.deterministic else waits,
        )

    def train(self, steps_per_call: int, folder: str) -> None:
        """Trains to the end; the chief saves the model into `folder`."""
        loop, training = self._ready(), self._training
        assert training is not None, "begin comes first"
        for _ in training.advance(None, steps_per_call):
            pass
        self._put_back.close()
        if loop.chief and self._plan.save:
            build.unscaled(loop.model.optimizer)
            plain = self._make(tf.distribute.get_strategy()) if tables.has_tables(loop.model) else None
            model = loop.model if plain is None else tables.whole(loop.model, plain)
            save(model, Path(folder) / "model.keras")
            self._tell("saved", path="model.keras")
        self._tell("finished", weights=replica_digests(loop.model), **(training.result if loop.chief else {}))

    def explain(self, what: str, **how: Any) -> None:
        """Times steps, or what is left of them when a part is switched off."""
        process = self._process
        if self._switched is None:
            beat = partial(self._tell, "beat")
            self._switched = Switched(self._ready(), self._make, process.replicas, process.cores, beat)
        told: dict[str, Any] = {}
        if what == "no step":
            told["seconds"] = self._switched.no_step()
        elif what == "no communication":
            told["replicas"] = self._switched.no_communication(**how)
        else:
            timed = getattr(self._switched, what.replace(" ", "_"))
            told["examples"], told["seconds"] = timed(**how)
        self._tell("explaining", what=what, **told)

    def leave(self) -> None:
        """Writes a checkpoint where training has begun and is not over, and raises `Preempted`."""
        if self._training is not None:
            self._training.leave()
        self._tell("left", step=None)
        raise Preempted

    def finish_writing(self) -> None:
        """Returns once no checkpoint is being written: what comes after a failure goes on from it."""
        if self._survival is not None:
            self._survival.checkpointer.wait()

    def name_broken(self, error: Exception) -> None:
        """Raises what is broken in the data, if that is what an operation has failed for."""
        if not lost_a_peer(error):
            for part in self._parts.values():
                found = integrity.broken(part, self._plan.num_classes, 0, 1, thorough=True)
                integrity.refuse([*found, *integrity.first_broken(part, self._plan.num_classes)], [])

    def _prepare_survival(self, resume: str | None, layout: batches.Layout, digest: str) -> batches.Position:
        """Finds the checkpoint to go on from, on all processes; returns its position in the data."""
        plan = self._plan
        if plan.checkpoint.folder is None:
            return batches.Position()
        chief, checkpointer = self._process.rank == 0, Checkpointer(plan.checkpoint, self._tell)
        state = None
        if resume is not None and chief:
            state = checkpointer.last(_is_good(plan))
            if state is None and plan.checkpoint.before is not None:
                there = dataclasses.replace(plan.checkpoint, folder=plan.checkpoint.before)
                state = Checkpointer(there, self._tell).last(_is_good(plan))
        if resume is not None and len(plan.leaders) > 1:
            state = on_all(state, self._strategy)
        data = {"examples": layout.examples, "shards": len(layout.counts), "digest": digest, "build": plan.data_build}
        about = {"data": data, "learning_rate": plan.learning_rate}
        self._survival = Survival(
            checkpointer, state, self._asked_to_leave, plan.divergence_factor, plan.rate_scale, about
        )
        if resume is not None and chief:
            if resume == "back":
                checkpointer.drop_after(-1 if state is None else state.values["step"])
            self._tell("restored", step=0 if state is None else state.values["step"], found=state is not None)
        if state is None:
            return batches.Position()
        _check_same_data(state.values["data"], data)
        return batches.Position(state.values["epoch"], state.values["examples"])

    def _advance(self, steps: int, steps_per_call: int) -> list[Call]:
        """At least `steps` steps: of the training while it lasts, then for the sake of timing alone."""
        loop, training = self._ready(), self._training
        calls = [] if training is None else list(training.advance(steps, steps_per_call))
        done = sum(call.steps for call in calls)
        if done < steps and training is not None and not self._spare:
            self._spare = True
            self._put_back.enter_context(loop.put_back())
        while done < steps:
            calls.append(loop.call(steps_per_call, steps - done))
            done += calls[-1].steps
        return calls

    @contextlib.contextmanager
    def _told_afterwards(self) -> Iterator[None]:
        """Inside, what training tells is held back; afterwards it is told, also where training failed."""
        held = self._held = []
        try:
            yield
        finally:
            self._held = None
            for event, fields in held:
                self._tell(event, **fields)

    def _tell_of_training(self, event: str, **fields: Any) -> None:
        if self._held is None or event == "beat":
            self._tell(event, **fields)
        else:
            self._held.append((event, {"time": time.time(), **fields}))

    def _has_shards(self) -> bool:
        return targets.asks_for(self._plan.data_build, "data.build", "shard")

    def _shard(self, shard: int, shards: int) -> tuple[Any, Any]:
        """(training, validation) data, or a shard of them where the data can be had in shards."""
        with tf.device("CPU:0"):
            made = targets.call(self._plan.data_build, "data.build", shard=shard, shards=shards)
        try:
            train, validation = made
        except (TypeError, ValueError) as error:
            raise TrainingError(
                f"Expected data.build to return (train, validation), received {type(made).__name__}."
            ) from error
        return train, validation

    def _ready(self) -> Loop:
        assert self._loop is not None, "build comes first"
        return self._loop

    def _layout(self, counts: list[int]) -> batches.Layout:
        plan, process = self._plan, self._process
        if plan.asynchronous:
            return batches.Layout(plan.global_batch, replicas=1, first=0, local=1, counts=tuple(counts))
        return batches.Layout(
            plan.global_batch,
            plan.workers,
            process.replicas[0],
            len(process.replicas),
            tuple(counts),
            process.rank,
            "left out" if self._plan.static_batches else "short",
        )

    def _validation_parts(self, counts: list[int]) -> list[tuple[Any, batches.Layout]]:
        """What is validated, and its layout: under static shapes in two parts of batches of one size each."""
        part = self._parts["validation"]
        if part is None:
            return []
        layout = self._layout(counts)
        return batches.static_parts(part, layout) if self._plan.static_batches else [(part, layout)]


def replica_digests(model: keras.Model) -> list[str]:
    """A hash of the trained weights for each replica that this process holds: all of them must agree."""
    copies = [[np.asarray(copy) for copy in _copies(variable.value)] for variable in model.trainable_variables]
    return [
        hashlib.sha256(b"".join(np.ascontiguousarray(copy).tobytes() for copy in replica)).hexdigest()[:16]
        for replica in zip(*copies, strict=True)
    ]


def _copies(variable: Any) -> tuple[Any, ...]:
    return tuple(getattr(variable, "values", (variable,)))


def save(model: keras.Model, path: Path) -> None:
    """Writes the model whole or not at all. It loads on one device as it does here."""
    partial = path.with_name(f".{path.name}").with_suffix(".partial.keras")
    try:
        model.save(partial)
        partial.rename(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise TrainingError(
            f"Expected to be able to write the trained model to {path}, received: {error.strerror or error}. Try more "
            f"space: the same command then goes on from the last checkpoint."
        ) from error


def _is_good(plan: Plan) -> Callable[[Mapping[str, Any]], bool]:
    """Is a checkpoint, by its values, of a training that had not diverged?"""

    def good(values: Mapping[str, Any]) -> bool:
        loss, first = values["loss"], values["first_loss"]
        return bool(values["finite"]) and (loss is None or loss <= plan.divergence_factor * max(1.0, abs(first)))

    return good


def _check_same_data(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuses to go on with data that has changed under the same config; other shards are told by their count alone."""
    comparable = then["shards"] == now["shards"]
    if then["build"] != now["build"]:
        # That was asked for.
        return
    if then["examples"] != now["examples"] or (comparable and then["digest"] != now["digest"]):
        raise TrainingError(
            f"Expected the data that the checkpoint was trained on, {then['examples']} examples ({then['digest']}), "
            f"received {now['examples']} ({now['digest']}): it has changed since. Try resume=never."
        )


def versions() -> dict[str, str]:
    """The versions that a measurement depends on."""
    return {"python": platform.python_version()} | {
        name: metadata.version(name) for name in ("tensorflow", "keras", "numpy")
    }


def explain(error: BaseException) -> str:
    """An error in one line for a person: our own messages as they stand, others with their type."""
    # What TensorFlow wraps around the error of a step that a coordinator handed out.
    error = getattr(error, "original_exception", error)
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    lines = [re.sub(r"^\(\d+\) [A-Z_]+: *", "", line.strip()) for line in text.splitlines() if line.strip()]
    # What TensorFlow writes above the reason: where in the graph, and that there is a reason.
    first = next((line for line in lines if not _ABOVE_THE_REASON.match(line)), next(iter(lines), ""))
    own = isinstance(error, TrainingError | build.ModelError | targets.TargetError) or first.startswith("Expected ")
    if "Could not start gRPC server" in first:
        return "Expected a free port, received one that another program listens on. Try cluster.base_port=null."
    return first if own else f"{type(error).__name__}: {first}"


def diverged(error: BaseException) -> bool:
    """Has the training diverged, so that another learning rate may help?"""
    return isinstance(error, Diverged)


def lost_a_peer(error: BaseException) -> bool:
    """Is this what TensorFlow raises in a process whose peers have gone?"""
    kinds = (
        tf.errors.UnavailableError,
        tf.errors.AbortedError,
        tf.errors.CancelledError,
        tf.errors.DeadlineExceededError,
    )
    return isinstance(error, kinds)


def _digest(part: Any) -> str:
    """Names the data: a hash of the arrays, or of a data set's structure and size."""
    if isinstance(part, Examples) and part.digest is not None:
        return part.digest
    digest = hashlib.sha256()
    part = part.raw if isinstance(part, Examples) else part
    if isinstance(part, tf.data.Dataset):
        digest.update(repr((part.element_spec, int(part.cardinality()))).encode())
    else:
        for leaf in tf.nest.flatten(part):
            digest.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    return digest.hexdigest()[:16]


def _sample_system(seconds: float, host: int, tell: Tell) -> None:
    """Tells this host's load every so many seconds, from a thread of its own."""
    if seconds <= 0:
        return
    import psutil

    psutil.cpu_percent()
    name = f"host{host}"

    def sample() -> None:
        while True:
            time.sleep(seconds)
            memory, network = psutil.virtual_memory(), psutil.net_io_counters()
            values = {
                "cpu_utilization_percentage": psutil.cpu_percent(),
                "system_memory_usage_gib": memory.used / 2**30,
                "system_memory_usage_percentage": memory.percent,
                "network_receive_gib": network.bytes_recv / 2**30,
                "network_transmit_gib": network.bytes_sent / 2**30,
            }
            with contextlib.suppress(OSError):
                tell("system", host=name, values=values)

    threading.Thread(target=sample, daemon=True).start()

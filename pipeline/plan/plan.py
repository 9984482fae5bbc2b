"""Turns a config into a plan: the numbers every process agrees on.

Arithmetic only. It refuses a bad config before any device is touched, saying what was expected, what was received
and what to type instead. Free ports and the machine's facts come in as arguments.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.parts import Part, facts, fields_of, key_of, part_of
from pipeline.config.schema import (
    WITH_PASSWORD,
    Baseline,
    CheckpointConfig,
    Config,
    DataConfig,
    Kind,
    Precision,
    Scaling,
    Store,
    holds_password,
)
from pipeline.plan.machine import Machine

# An epoch of mnist5k on one device; on more devices as many steps, which takes about as long and learns as well.
DEFAULT_STEPS = 63
DEFAULT_BATCH = 64
# One timed repeat is made to last about this long where its steps are not given.
REPEAT_SECONDS = 0.75
# Where a TPU's worker listens; the port that Google's TPUs have is 8470.
TPU_ADDRESS = re.compile(r"grpc://([^\s:/,@]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")
# Hosts on which nothing listens beyond this machine, and what a host looks like.
LOOPBACK = ("127.0.0.1", "localhost")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
# MLflow's stores.
SERVER = re.compile(r"https?://[^/\s]\S*")
DATABASE = re.compile(r"(sqlite|postgresql|mysql|mssql)(\+\w+)?://")
# More than any cluster has; a larger number is a slip, and planning it would fill the memory.
MOST_WORKERS = 65_536
MOST_SERVERS = 1_024
# The same for what is counted in examples or steps, and for seconds.
MOST, MOST_SECONDS = 10**15, 10**9
WORKERS_PER_SERVER = 4
# A process may have so many times its share of the examples, where each reads files of its own.
EVEN = 1.02
DATA_SERVER = "data server"
OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lamb", "lion", "muon", "nadam",
    "rmsprop", "sgd",
)  # fmt: skip


IDENTITY, TRAINING, COMPARABILITY, BASELINE = Part.IDENTITY, Part.TRAINING, Part.COMPARABILITY, Part.BASELINE
STEP_TIME, PREDICTION, SIZE, PARAMETER = Part.STEP_TIME, Part.PREDICTION, Part.SIZE, Part.PARAMETER


class PlanError(ValueError):
    """A config that cannot be planned: the message says what was expected, received, and what to type instead."""


@dataclass(frozen=True)
class Process:
    """One operating-system process: its rank, role and host, and the devices and cores it computes on.

    `replicas` are the numbers, over the whole run, of the model's replicas that it trains, one for each device. A
    coordinator and a parameter server train none and have no device.
    """

    rank: int
    role: str
    host: int
    address: str | None
    devices: tuple[str, ...]
    replicas: tuple[int, ...]
    cores: tuple[int, ...]
    intra_op_threads: int
    inter_op_threads: int


@dataclass(frozen=True)
class Checkpoints:
    """How often training's state is written: steps, minutes, epochs; how many are kept, by which metric, and where.

    `before` is where an earlier command wrote it, if that was elsewhere.
    """

    every_steps: int | None = None
    every_minutes: float | None = None
    every_epochs: int | None = None
    keep: int = 2
    best: str | None = None
    best_is: str = "min"
    folder: str | None = None
    before: str | None = None


@dataclass(frozen=True)
class Plan:
    """Frozen numbers that conductor and processes agree on. Plain values only: it is written as plan.json.

    Each field says what it is part of, see `parts.Part`.
    """

    strategy: str = part_of(IDENTITY, PARAMETER)
    strategy_build: dict[str, Any] = part_of(IDENTITY, STEP_TIME)
    asynchronous: bool = part_of(IDENTITY, TRAINING, STEP_TIME, key="strategy")
    min_shard_bytes: int | None = part_of(IDENTITY, STEP_TIME)
    exchange: str | None = part_of(IDENTITY, STEP_TIME)
    hardware: str = part_of(IDENTITY, PARAMETER)
    kind: str = part_of(IDENTITY, COMPARABILITY, BASELINE, STEP_TIME, PARAMETER)
    hosts: int = part_of(IDENTITY, PREDICTION, PARAMETER)
    memory_gib: float | None = part_of()
    link_gbps: float | None = part_of()
    model: str = part_of(IDENTITY, PARAMETER)
    model_build: dict[str, Any] = part_of(IDENTITY, TRAINING, BASELINE, PREDICTION, SIZE, key="model.build")
    data: str = part_of(IDENTITY, PARAMETER)
    data_build: dict[str, Any] = part_of(IDENTITY, TRAINING, BASELINE, STEP_TIME, SIZE, key="data.build")
    num_classes: int | None = part_of(IDENTITY, SIZE)
    input_shape: tuple[int, ...] | None = part_of(IDENTITY)
    train_examples: int | None = part_of(IDENTITY)
    shuffle: bool = part_of(IDENTITY, TRAINING, COMPARABILITY, BASELINE, STEP_TIME, key="data.shuffle")
    shuffle_window: int = part_of(IDENTITY, TRAINING, COMPARABILITY, BASELINE, STEP_TIME, key="data.shuffle_window")
    parallel_reads: int = part_of(IDENTITY, TRAINING, COMPARABILITY, BASELINE, STEP_TIME, key="data.parallel_reads")
    shard: str = part_of(IDENTITY)
    # How processes divide the files of the training data, where these are known: "file" or "element".
    divided: str | None = part_of()
    train_files: int | None = part_of(IDENTITY)
    cache: str = part_of(IDENTITY, TRAINING, COMPARABILITY, BASELINE, STEP_TIME, key="data.cache")
    on_error: str = part_of(IDENTITY, TRAINING, key="data.on_error")
    prefetch: int = part_of(COMPARABILITY, BASELINE, STEP_TIME)
    # Addresses of tf.data services that were there before; processes of this plan are named by their role.
    service: tuple[str, ...] = part_of(COMPARABILITY, STEP_TIME)
    output_dir: str = part_of()
    processes: tuple[Process, ...] = part_of()
    workers: int = part_of(IDENTITY, PREDICTION, PARAMETER)
    replica_batch: int = part_of(IDENTITY, BASELINE, PREDICTION, PARAMETER)
    global_batch: int = part_of(IDENTITY, TRAINING, PREDICTION, PARAMETER)
    scaling: str = part_of(IDENTITY, BASELINE, PARAMETER)
    epochs: int | None = part_of(IDENTITY, TRAINING, PARAMETER)
    steps: int | None = part_of(IDENTITY, TRAINING, PARAMETER)
    optimizer: Any = part_of(IDENTITY, TRAINING, COMPARABILITY, BASELINE, STEP_TIME, SIZE)
    learning_rate: float | None = part_of(IDENTITY, TRAINING, BASELINE, PARAMETER)
    loss: Any = part_of(IDENTITY, TRAINING, COMPARABILITY, BASELINE, STEP_TIME, SIZE)
    metrics: Any = part_of(IDENTITY, TRAINING, COMPARABILITY, BASELINE, STEP_TIME)
    callbacks: tuple[Any, ...] = part_of(IDENTITY, TRAINING)
    seed: int = part_of(IDENTITY, TRAINING, PARAMETER)
    deterministic: bool = part_of(IDENTITY, TRAINING, COMPARABILITY, BASELINE, STEP_TIME, PARAMETER)
    precision: str = part_of(IDENTITY, TRAINING, BASELINE, STEP_TIME, SIZE, PARAMETER)
    static_batches: bool = part_of(IDENTITY, TRAINING, BASELINE, STEP_TIME, key="strategy")
    gradient_bits: int = part_of(IDENTITY, TRAINING, COMPARABILITY, STEP_TIME, PARAMETER)
    steps_per_call: int | None = part_of(IDENTITY, COMPARABILITY, BASELINE, STEP_TIME)
    save: bool = part_of(IDENTITY)
    on_divergence: str = part_of(IDENTITY)
    divergence_factor: float = part_of(IDENTITY)
    checkpoint: Checkpoints = part_of()
    warmup_steps: int = part_of(IDENTITY, BASELINE)
    measure_steps: int | None = part_of(IDENTITY)
    repeats: int = part_of(IDENTITY, PARAMETER)
    baseline: str = part_of(IDENTITY, PARAMETER)
    threads_per_device: int | None = part_of(IDENTITY, COMPARABILITY, BASELINE, STEP_TIME, PARAMETER)
    startup_timeout: float = part_of()
    heartbeat_timeout: float = part_of()
    progress_timeout: float = part_of()
    stop_timeout: float = part_of()
    preempt_timeout: float = part_of()
    max_restarts: int = part_of()
    elastic: bool = part_of()
    min_workers: int = part_of()
    system_metrics_seconds: float = part_of(IDENTITY)
    rehearsal: bool = part_of(IDENTITY, PREDICTION)
    oversubscribed: bool = part_of(PREDICTION)
    machine: str = part_of(BASELINE)
    notes: tuple[str, ...] = part_of(default=())
    # What the learning rate is multiplied by, after a rollback or with fewer workers than planned.
    rate_scale: float = part_of(default=1.0)
    # Are the input and the model timed alone before training?
    profile: bool = part_of(default=False)
    # Is the lost efficiency taken apart after training?
    explain: bool = part_of(default=False)
    # Of the processors of the conductor's host.
    cache_bytes: int | None = part_of(default=None)

    @property
    def concurrent_steps(self) -> int:
        """Workers that take steps of their own, beside each other: 1 where all of them make each step together."""
        return self.workers if self.asynchronous else 1

    @property
    def leaders(self) -> tuple[int, ...]:
        """Ranks of the processes that are told what to do: those that train, or the coordinator, who has them train."""
        return (0,) if self.asynchronous else tuple(process.rank for process in self.processes if process.devices)

    @property
    def data_servers(self) -> tuple[str, ...]:
        """Addresses of the tf.data services that make batches; none where the processes that train make them."""
        return self.service or tuple(str(self.processes[rank].address) for rank in self.ranks(DATA_SERVER))

    def ranks(self, role: str) -> tuple[int, ...]:
        """Ranks of the processes with a role."""
        return tuple(process.rank for process in self.processes if process.role == role)

    def steps_per_epoch(self, examples: int) -> int:
        """Optimizer steps that see each of `examples` once; the last may be smaller than the global batch.

        With static batches the last, incomplete one is left out.
        """
        return examples // self.global_batch if self.static_batches else math.ceil(examples / self.global_batch)

    def to_json(self) -> str:
        """The plan as JSON text, keys in the order above."""
        return json.dumps(dataclasses.asdict(self), indent=2)


def from_json(text: str) -> Plan:
    """The plan that `Plan.to_json` wrote."""
    values = _tuples(
        json.loads(text), keep=("strategy_build", "model_build", "data_build", "loss", "metrics", "optimizer")
    )
    values["processes"] = tuple(Process(**_tuples(process)) for process in values["processes"])
    values["checkpoint"] = Checkpoints(**values["checkpoint"])
    return Plan(**values)


def make(
    config: Config,
    machine: Machine,
    present: bool = True,
    files: Sequence[int] = (),
) -> Plan:
    """The plan of `config` on `machine`; `listening` gives its processes their ports.

    With `present` true, devices that the machine lacks are refused; otherwise a note says so. `files` has the training
    examples of each file of the data, where that is known. Raises `PlanError`.
    """
    check_ranges(config)
    config = replace(config, hardware=replace(config.hardware, hosts=config.hardware.hosts or machine.hosts))
    kind, per_host, notes = _devices(config, machine, present)
    tasks = _tasks_that_train(config, machine)
    workers = _workers(config, kind, per_host, tasks)
    per_process, per_worker_host = _layout(config, workers, tasks)
    asynchronous = config.strategy.asynchronous
    concurrent_steps = workers if asynchronous else 1
    servers = _parameter_servers(config, workers, machine.tasks.count("ps"))
    # Workers that race make each step alone.
    scaling, replica_batch, global_batch = split_batch(config, 1 if asynchronous else workers)
    notes += _notes_on_tpu(config, kind, workers, global_batch)
    on_cpu = kind == "cpu"
    hosts = config.hardware.hosts or machine.hosts
    local_hosts = 1 if machine.hosts == 1 else hosts
    here = workers if local_hosts == 1 else per_worker_host
    threads = config.hardware.threads_per_device or max(1, len(machine.cores) // max(per_host, here))
    oversubscribed = on_cpu and here * threads > len(machine.cores)
    if oversubscribed:
        notes.append(
            f"{here} CPU devices of {threads} thread{'s' * (threads > 1)} share {len(machine.cores)} "
            f"core{'s' * (len(machine.cores) > 1)}: the speedup says nothing about {here} separate devices."
        )
    several_hosts = hosts > 1 and local_hosts == 1 and workers > per_worker_host
    stands_for_hosts = several_hosts and present and not config.hardware.rehearse
    if stands_for_hosts:
        notes.append(f"This machine stands for {hosts} hosts: a rehearsal.")
    if config.hardware.rehearse:
        notes.append(f"Logical CPU devices stand for the devices of {config.hardware.name}: a rehearsal.")
    first = 1 if asynchronous else 0
    training = workers // per_process
    _check_tasks(config, machine, tasks, training, servers, per_process)
    alone = training == 1 and not asynchronous
    data_servers, service = _service(config, asynchronous)
    others = first + training + servers
    address = {
        rank: None if alone and rank < others else f"{config.cluster.host}:0" for rank in range(others + data_servers)
    }
    processes = (
        *(_other(rank, "coordinator", 0, address[rank]) for rank in range(first)),
        *(
            _process(
                number,
                first,
                address[first + number],
                config,
                kind,
                workers,
                per_process,
                per_worker_host,
                threads,
                machine,
            )
            for number in range(training)
        ),
        *(
            _other(
                first + training + number,
                "parameter server",
                number % hosts,
                address[first + training + number],
            )
            for number in range(servers)
        ),
        *(
            _other(others + number, DATA_SERVER, number % hosts, address[others + number])
            for number in range(data_servers)
        ),
    )
    if (data_servers or service) and _baseline(config, kind) != "none" and config.measure.steps != 0:
        notes.append("The baseline makes its batches itself, without a tf.data service.")
    if asynchronous and workers > 1:
        notes.append(
            "Asynchronous: each worker steps at its own pace, on weights that others may have changed meanwhile."
        )
    _check_ports(config.cluster.base_port, len(processes))
    train, measure, launch, asked = config.train, config.measure, config.launch, config.data.shard.value
    return Plan(
        strategy=config.strategy.name,
        strategy_build=_with_address(config, machine) if kind == "tpu" else config.strategy.build,
        asynchronous=asynchronous,
        min_shard_bytes=config.strategy.min_shard_bytes,
        exchange=config.strategy.exchange.value if config.strategy.exchange else None,
        hardware=config.hardware.name,
        kind=kind,
        hosts=max(process.host for process in processes) + 1,
        memory_gib=config.hardware.memory_gib,
        link_gbps=config.hardware.link_gbps,
        model=config.model.name,
        model_build=config.model.build,
        data=config.data.name,
        data_build=config.data.build,
        num_classes=config.data.num_classes,
        input_shape=None if config.data.input_shape is None else tuple(config.data.input_shape),
        train_examples=config.data.train_examples,
        shuffle=config.data.shuffle,
        shuffle_window=config.data.shuffle_window,
        parallel_reads=config.data.parallel_reads,
        shard=asked,
        divided=shared(asked, files, 1 if asynchronous else training) if files else None,
        train_files=len(files) or None,
        cache=config.data.cache.value,
        on_error=config.data.on_error.value,
        prefetch=config.data.prefetch,
        service=service,
        output_dir=config.output_dir,
        processes=processes,
        workers=workers,
        replica_batch=replica_batch,
        global_batch=global_batch,
        scaling=scaling,
        epochs=train.epochs,
        steps=train.steps if train.epochs or train.steps else DEFAULT_STEPS * concurrent_steps,
        optimizer=train.optimizer,
        learning_rate=train.learning_rate,
        loss=train.loss,
        metrics=train.metrics,
        callbacks=tuple(train.callbacks),
        seed=train.seed,
        deterministic=train.deterministic,
        precision=_precision(config),
        static_batches=config.strategy.on_tpu,
        gradient_bits=train.gradient_bits,
        steps_per_call=train.steps_per_call,
        save=train.save,
        on_divergence=train.on_divergence.value,
        divergence_factor=train.divergence_factor,
        checkpoint=_checkpoints(config),
        warmup_steps=measure.warmup_steps,
        measure_steps=measure.steps,
        repeats=measure.repeats,
        baseline=_baseline(config, kind),
        threads_per_device=threads if on_cpu else config.hardware.threads_per_device,
        startup_timeout=launch.startup_timeout,
        heartbeat_timeout=launch.heartbeat_timeout,
        progress_timeout=launch.progress_timeout,
        stop_timeout=launch.stop_timeout,
        preempt_timeout=launch.preempt_timeout,
        max_restarts=launch.max_restarts,
        elastic=launch.elastic,
        min_workers=launch.min_workers,
        system_metrics_seconds=config.tracking.system_metrics_seconds,
        rehearsal=config.hardware.rehearse or stands_for_hosts,
        oversubscribed=oversubscribed,
        machine=_machine_name(machine),
        cache_bytes=machine.cache_bytes,
        notes=tuple(notes),
        profile=config.data.profile,
        explain=_explain(config, kind),
    )


def listening(plan: Plan, given: Sequence[str]) -> Plan:
    """The plan with HOST:PORT for each of its processes that has an address; a note says what is open to others."""
    if not given:
        return plan
    processes = tuple(
        process if process.address is None else replace(process, address=address)
        for process, address in zip(plan.processes, given, strict=True)
    )
    addresses = [process.address for process in processes if process.address]
    return replace(plan, processes=processes, notes=(*plan.notes, *_notes_on_network(addresses)))


def shared(asked: str, files: Sequence[int], processes: int) -> str:
    """How processes divide files that have so many examples each: "file" or "element".

    By file where each process gets as many examples as the others, or nearly so: one with fewer waits at the end of
    each epoch while the others go on. Raises `PlanError` where there are too few files to be divided as was asked.

    >>> shared("auto", [100] * 8, processes=2), shared("auto", [100] * 3, processes=2)
    ('file', 'element')
    """
    if processes == 1 or asked == "element":
        return "element"
    if asked == "file":
        if len(files) < processes:
            raise PlanError(
                f"Expected data.shard=file with a file for each of {processes} processes, received {len(files)}. "
                f"Try data.shard=element, or `python -m pipeline prepare` with shards={processes}."
            )
        return "file"
    most = max(sum(files[place] for place in part) for part in dealt(files, processes))
    return "file" if len(files) >= processes and most <= EVEN * sum(files) / processes else "element"


def dealt(files: Sequence[int], processes: int) -> list[list[int]]:
    """The places of files that have so many examples, dealt out to processes.

    The largest come first, each to the process that has the fewest examples so far.

    >>> dealt([3, 5, 2], 2)
    [[1], [0, 2]]
    """
    parts: list[list[int]] = [[] for _ in range(processes)]
    for place in sorted(range(len(files)), key=lambda place: -files[place]):
        min(parts, key=lambda part: sum(files[each] for each in part)).append(place)
    return parts


def on_one_device(config: Config) -> Config:
    """The config with one worker where its strategy trains on one device however many are asked for; else itself."""
    strategy = config.strategy
    if strategy.spans_devices or strategy.spans_processes or config.workers in (None, 1):
        return config
    return replace(config, workers=1)


def on_one_worker(config: Config, plan: Plan) -> Config:
    """The config of a plan's step on one device, under the same strategy; it trains for nothing and keeps nothing."""
    threads = plan.threads_per_device or config.hardware.threads_per_device
    return replace(
        config,
        workers=1,
        strategy=replace(config.strategy, devices_per_process=None),
        hardware=replace(config.hardware, hosts=1, devices_per_host=1, threads_per_device=threads),
        train=replace(config.train, replica_batch=plan.replica_batch, global_batch=None, callbacks=[], save=False),
        measure=replace(config.measure, scaling=None, steps=None, baseline=Baseline.none, explain=False),
        checkpoint=CheckpointConfig(),
    )


def baseline_of(plan: Plan, machine: Machine) -> Plan:
    """The same model, data, precision and threads per device on one device, with no strategy.

    Weak scaling keeps the replica batch, so the one device trains `replica_batch` examples a step; strong scaling
    keeps the global batch.
    """
    first = next(process for process in plan.processes if process.devices)
    threads = plan.threads_per_device or 0
    one = replace(
        first,
        rank=0,
        role="chief",
        host=0,
        address=None,
        devices=first.devices[:1],
        replicas=(0,),
        cores=machine.cores[:threads] if plan.kind == "cpu" else (),
        intra_op_threads=threads if plan.kind == "cpu" else first.intra_op_threads,
        inter_op_threads=first.inter_op_threads,
    )
    batch = plan.replica_batch if plan.scaling == "weak" else plan.global_batch
    return replace(
        plan,
        strategy="default",
        strategy_build={"_target_": "pipeline.strategies.default"},
        asynchronous=False,
        min_shard_bytes=None,
        exchange="none",
        processes=(one,),
        workers=1,
        hosts=1,
        replica_batch=batch,
        global_batch=batch,
        callbacks=(),
        save=False,
        checkpoint=Checkpoints(),
        service=(),
        rehearsal=False,
        oversubscribed=False,
        notes=(),
        explain=False,
    )


def builder_of(plan: Plan, machine: Machine) -> Plan:
    """One process that builds the plan's model on this machine's CPU, whatever devices the plan has.

    Its batches are of any size, so that what is kept of each example can be told.
    """
    plan = baseline_of(plan, machine)
    one = replace(plan.processes[0], devices=("CPU:0",), cores=(), intra_op_threads=0, inter_op_threads=0)
    return replace(plan, kind="cpu", processes=(one,), static_batches=False, system_metrics_seconds=0.0)


def fingerprint(plan: Plan, versions: dict[str, str]) -> str:
    """Names what a baseline's throughput depends on: two plans with the same one may share a measurement.

    Model, data, batch rule, precision, threads, machine and versions decide; how long it trains does not.
    """
    decides = {name: getattr(plan, name) for name in fields_of(Plan, BASELINE)} | {"versions": versions}
    return hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_ranges(config: Config) -> None:
    """Refuses values that are out of range or contradict each other, whatever the hardware."""
    train, measure, launch = config.train, config.measure, config.launch
    at_least = {
        "workers": (config.workers, 1),
        "strategy.devices_per_process": (config.strategy.devices_per_process, 1),
        "strategy.parameter_servers": (config.strategy.parameter_servers, 1),
        "strategy.min_shard_bytes": (config.strategy.min_shard_bytes, 1),
        "hardware.hosts": (config.hardware.hosts, 1),
        "hardware.devices_per_host": (config.hardware.devices_per_host, 1),
        "hardware.threads_per_device": (config.hardware.threads_per_device, 1),
        "train.epochs": (train.epochs, 1),
        "train.steps": (train.steps, 1),
        "train.replica_batch": (train.replica_batch, 1),
        "train.global_batch": (train.global_batch, 1),
        "train.steps_per_call": (train.steps_per_call, 1),
        "train.seed": (train.seed, 0),
        "data.num_classes": (config.data.num_classes, 1),
        "data.train_examples": (config.data.train_examples, 1),
        "data.validation_examples": (config.data.validation_examples, 0),
        "data.shuffle_window": (config.data.shuffle_window, 1),
        "data.parallel_reads": (config.data.parallel_reads, 1),
        "data.prefetch": (config.data.prefetch, 0),
        "measure.warmup_steps": (measure.warmup_steps, 0),
        "measure.steps": (measure.steps, 0),
        "measure.repeats": (measure.repeats, 1),
        "sweep.repeats": (config.sweep.repeats, 1),
        "tracking.system_metrics_seconds": (config.tracking.system_metrics_seconds, 0),
        "tracking.drain_timeout": (config.tracking.drain_timeout, 0),
        "launch.max_restarts": (launch.max_restarts, 0),
        "launch.min_workers": (launch.min_workers, 1),
        "checkpoint.every_steps": (config.checkpoint.every_steps, 1),
        "checkpoint.every_epochs": (config.checkpoint.every_epochs, 1),
        "checkpoint.keep": (config.checkpoint.keep, 1),
    }
    for key, (value, least) in at_least.items():
        if value is not None and not least <= value < math.inf:
            raise PlanError(f"Expected {key} to be {least} or more, received {value}. Try {key}={least}.")
        _check_size(key, value, least)
    above_zero = {
        "train.learning_rate": (train.learning_rate, 0.001),
        "hardware.memory_gib": (config.hardware.memory_gib, 16),
        "hardware.link_gbps": (config.hardware.link_gbps, 10),
        "hardware.price_per_hour": (config.hardware.price_per_hour, 1),
        "predict.knee_share": (config.predict.knee_share, 0.5),
        "launch.startup_timeout": (launch.startup_timeout, 60),
        "launch.heartbeat_timeout": (launch.heartbeat_timeout, 30),
        "launch.progress_timeout": (launch.progress_timeout, 50),
        "launch.stop_timeout": (launch.stop_timeout, 4),
        "launch.preempt_timeout": (launch.preempt_timeout, 25),
        "train.divergence_factor": (train.divergence_factor, 10_000),
        "checkpoint.every_minutes": (config.checkpoint.every_minutes, 10),
    }
    for key, (number, usual) in above_zero.items():
        if number is not None and not 0 < number < math.inf:
            raise PlanError(f"Expected {key} to be above 0, received {number}. Try {key}={usual}.")
        _check_size(key, number, usual)
    for key, text, default in (
        ("output_dir", config.output_dir, "outputs"),
        ("tracking.experiment", config.tracking.experiment, "pipeline"),
        ("strategy.name", config.strategy.name, "mine"),
        ("hardware.name", config.hardware.name, "mine"),
        ("model.name", config.model.name, "mine"),
        ("data.name", config.data.name, "mine"),
        ("tracking.name", config.tracking.name, "mine"),
        ("cluster.name", config.cluster.name, "local"),
    ):
        if not text.strip():
            raise PlanError(f"Expected {key} to be a name, received nothing. Try {key}={default}.")
    if train.seed >= 2**31:
        raise PlanError(f"Expected train.seed to be below 2147483648, received {train.seed}. Try train.seed=0.")
    if train.gradient_bits not in (16, 32):
        raise PlanError(
            f"Expected train.gradient_bits to be 16 or 32, received {train.gradient_bits}. Try train.gradient_bits=32."
        )
    if train.epochs and train.steps:
        raise PlanError(
            f"Expected train.epochs or train.steps, received both ({train.epochs} and {train.steps}). "
            f"Try train.epochs=null or train.steps=null."
        )
    shape = config.data.input_shape
    if shape is not None and not all(1 <= size <= MOST for size in shape):
        raise PlanError(
            f"Expected data.input_shape of sizes from 1 to {MOST:,}, received {shape}. Try data.input_shape=null."
        )
    _check_survival(config)
    check_path(config.data)
    _check_optimizer(train.optimizer)
    _check_named("train.loss", train.loss, "sparse_categorical_crossentropy")
    for metric in train.metrics or ():
        _check_named("train.metrics", metric, "[accuracy]")
    base_port = config.cluster.base_port
    if base_port is not None and not 1 <= base_port <= 65535:
        raise PlanError(
            f"Expected cluster.base_port between 1 and 65535, received {base_port}. Try cluster.base_port=null."
        )
    _check_host(config.cluster.host)
    uri = config.tracking.uri
    if holds_password(uri):
        raise PlanError(WITH_PASSWORD)
    if config.tracking.store is Store.server and not SERVER.fullmatch(uri or ""):
        raise PlanError(
            f"Expected tracking.uri to be an MLflow server's address, received {uri or 'none'}. "
            f"Try tracking.uri=http://127.0.0.1:5000, or tracking=sqlite for a local store."
        )
    if uri is not None and not (SERVER.fullmatch(uri) or DATABASE.match(uri)):
        raise PlanError(
            f"Expected tracking.uri to be null or a store's address, received {uri or 'nothing'}. "
            f"Try tracking.uri=null."
        )


def stays_here(address: str | None) -> bool:
    """Is a process with this address, or this host, kept from listening on anything but 127.0.0.1?

    >>> stays_here("127.0.0.1:2222"), stays_here("10.0.0.5:2222"), stays_here(None)
    (True, False, True)
    """
    return address is None or address.partition(":")[0] in LOOPBACK


def identity(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was asked to do, from `Plan.to_json`'s values: two with the same are the same run, and one can go on
    where the other was ended. Where it ran, and how it was watched and saved, is not of it.
    """
    return facts(Plan, IDENTITY, plan)


def changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The keys of the config whose values decide what is trained, and differ, from `Plan.to_json`'s values.

    >>> changed({"seed": 0, "model_build": {"units": 1}}, {"seed": 0, "model_build": {"units": 2}})
    ['model.build.units']
    """
    found: list[str] = []
    for name in fields_of(Plan, TRAINING):
        if name in then and then[name] != now.get(name):
            found += _leaves(key_of(Plan, name, "train"), then.get(name), now.get(name))
    return list(dict.fromkeys(found))


def _leaves(key: str, then: Any, now: Any) -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for name in [*then, *(each for each in now if each not in then)]:
            if then.get(name) != now.get(name):
                yield from _leaves(f"{key}.{name}", then.get(name), now.get(name))
    else:
        yield key


def check_path(data: DataConfig) -> None:
    """Refuses a path that is none, and one that nothing reads."""
    path = data.path
    if path is not None and not path.strip():
        raise PlanError("Expected data.path to be a folder or a file, received nothing. Try data.path=FOLDER.")
    if path is not None and "path" not in data.build:
        raise PlanError(
            f"Expected data.path=null with data={data.name}, which reads none, received {path}. "
            f"Try data.path=null, or data=images, numpy, csv, tfds or tfrecord, which do."
        )


def _check_survival(config: Config) -> None:
    """Refuses what contradicts itself in how a run is kept and resumed."""
    asked = config.checkpoint
    if config.resume_changes and config.resume in ("auto", "never"):
        raise PlanError(
            f"Expected resume_changes with the run that they are changes of, received resume={config.resume}. "
            f"Try resume=RUN, its folder, name or id in MLflow, or resume_changes=[]."
        )
    if config.launch.elastic and not config.strategy.spans_processes:
        raise PlanError(
            f"Expected launch.elastic=false under strategy={config.strategy.name}, whose workers are in one process, "
            f"received true. Try strategy=multi_worker, or launch.elastic=false."
        )
    if asked.best_is is not None and asked.keep_best is None:
        raise PlanError(
            f"Expected checkpoint.best_is with checkpoint.keep_best, received {asked.best_is.value} alone. "
            f"Try checkpoint.keep_best=val_loss, or checkpoint.best_is=null."
        )
    for key, text, instead in (
        ("checkpoint.folder", asked.folder, "null"),
        ("checkpoint.keep_best", asked.keep_best, "val_loss"),
        ("resume", config.resume, "auto"),
        ("predict.sweep", config.predict.sweep, "null"),
    ):
        if text is not None and not text.strip():
            raise PlanError(f"Expected {key} to be a name, received nothing. Try {key}={instead}.")


def _checkpoints(config: Config) -> Checkpoints:
    asked = config.checkpoint
    return Checkpoints(
        asked.every_steps,
        asked.every_minutes,
        asked.every_epochs,
        asked.keep,
        asked.keep_best,
        asked.best_is.value if asked.best_is else "min" if asked.keep_best and falls(asked.keep_best) else "max",
        asked.folder,
    )


def falls(metric: str) -> bool:
    """Is a smaller value of what Keras names so the better one?

    >>> [falls(name) for name in ("val_loss", "mae", "size_mape", "val_mse_1", "mean_error", "accuracy", "mean_io_u")]
    [True, True, True, True, True, False, False]
    """
    return re.search(r"loss|error|divergence|(^|_)(m[as]p?l?e|rmse)(_|$)", metric) is not None


def split_batch(config: Config, replicas: int) -> tuple[str, int, int]:
    """(scaling, replica batch, global batch) for `replicas` replicas.

    Weak scaling holds the replica batch fixed, strong scaling the global one; which of the two `train` names
    decides where `measure.scaling` is null.
    """
    train, declared = config.train, config.measure.scaling
    if train.replica_batch and train.global_batch:
        raise PlanError(
            f"Expected train.replica_batch or train.global_batch, received both ({train.replica_batch} and "
            f"{train.global_batch}). Try train.replica_batch=null or train.global_batch=null."
        )
    scaling = declared or (Scaling.strong if train.global_batch else Scaling.weak)
    if scaling is Scaling.weak and train.global_batch:
        raise PlanError(
            f"Expected train.replica_batch with measure.scaling=weak, which holds it fixed, received "
            f"train.global_batch={train.global_batch}. "
            f"Try train.replica_batch={max(1, train.global_batch // replicas)} train.global_batch=null, "
            f"or measure.scaling=strong."
        )
    if scaling is Scaling.strong and train.replica_batch:
        raise PlanError(
            f"Expected train.global_batch with measure.scaling=strong, which holds it fixed, received "
            f"train.replica_batch={train.replica_batch}. Try train.global_batch={train.replica_batch * replicas} "
            f"train.replica_batch=null, or measure.scaling=weak."
        )
    # Of little data, which an epoch's worth is known of, the batch that nobody named is smaller than usual.
    there = config.data.train_examples or MOST
    if scaling is Scaling.weak:
        replica_batch = train.replica_batch or max(1, min(DEFAULT_BATCH, there // replicas))
        return scaling.value, replica_batch, replica_batch * replicas
    usual = DEFAULT_BATCH if there >= DEFAULT_BATCH else max(1, there // replicas) * replicas
    global_batch = train.global_batch or usual
    if global_batch % replicas:
        nearest = max(replicas, round(global_batch / replicas) * replicas)
        raise PlanError(
            f"Expected a global batch that divides evenly over {replicas} replicas, received {global_batch}. "
            f"Try train.global_batch={nearest}."
        )
    return scaling.value, global_batch // replicas, global_batch


def left_out(examples: int, workers: int, global_batch: int) -> int:
    """Examples of an epoch that fill no whole global batch. Refuses data that fill none.

    >>> left_out(examples=1_438, workers=8, global_batch=512)
    414
    """
    if examples < global_batch:
        fitting = f"train.replica_batch={examples // workers}" if examples >= workers else f"workers={examples}"
        raise PlanError(
            f"Expected training data for at least one whole batch of {global_batch}, since a TPU takes no other, "
            f"received {examples} examples. Try {fitting}."
        )
    return examples % global_batch


def _check_size(key: str, value: float | None, instead: float) -> None:
    """Refuses a number that is larger than anything of its kind, which only a slip makes."""
    group = key.partition(".")[0]
    most = MOST_SECONDS if group in ("launch", "tracking") else MOST_WORKERS if group == "hardware" else MOST
    if value is not None and value > most:
        raise PlanError(f"Expected {key} to be no more than {most:,}, received {value:g}. Try {key}={instead}.")


def _check_host(host: str) -> None:
    """Refuses what processes cannot listen on and reach each other at."""
    if not HOST.fullmatch(host) or host == "0.0.0.0" or (host.startswith("127.") and host not in LOOPBACK):
        raise PlanError(
            f"Expected cluster.host to be 127.0.0.1, or an address or name at which other machines reach this one, "
            f"received {host or 'nothing'}. Try cluster.host=127.0.0.1."
        )


def _host(address: str) -> str:
    return address.rpartition(":")[0]


def _notes_on_network(addresses: Collection[str]) -> list[str]:
    """What is open to others where processes listen beyond this machine."""
    if all(stays_here(address) for address in addresses):
        return []
    ports = sorted(int(address.rpartition(":")[2]) for address in addresses)
    host = _host(next(iter(addresses)))
    return [
        f"TensorFlow's own transport is open, unauthenticated and unencrypted: whoever reaches a port can read this "
        f"training, change it and run code in it. It binds every network interface of each host, not "
        f"{host} alone (ports {ports[0]} to {ports[-1]}). Keep others out of this network, or try "
        f"cluster.host=127.0.0.1."
    ]


def _check_optimizer(optimizer: Any) -> None:
    if optimizer is None or (isinstance(optimizer, dict) and "_target_" in optimizer):
        return
    if not isinstance(optimizer, str):
        raise PlanError(
            f"Expected train.optimizer to be a Keras optimizer's name or {{_target_: ...}}, received {optimizer!r}. "
            f"Try train.optimizer=adam."
        )
    if optimizer.lower() not in OPTIMIZERS:
        near = difflib.get_close_matches(optimizer.lower(), OPTIMIZERS, 1) or ["adam"]
        raise PlanError(
            f"Expected train.optimizer to be one of {', '.join(OPTIMIZERS)}, received {optimizer}. "
            f"Try train.optimizer={near[0]}."
        )


def _check_named(key: str, node: Any, usual: str) -> None:
    """Refuses what is neither a Keras name nor a function, nor a list of these or one for each of a model's outputs."""
    if node is None or (isinstance(node, dict) and "_target_" in node) or (isinstance(node, str) and node.strip()):
        return
    if not isinstance(node, dict | list) or not node:
        raise PlanError(
            f"Expected {key} to be Keras's names or functions {{_target_: ...}}, received {node!r}. Try {key}={usual}."
        )
    for each in node.values() if isinstance(node, dict) else node:
        _check_named(key, each, usual)


def _check_ports(base_port: int | None, processes: int) -> None:
    if base_port is not None and processes > 1 and base_port + processes - 1 > 65535:
        raise PlanError(
            f"Expected cluster.base_port to leave {processes} processes a port each up to 65535, received {base_port}. "
            f"Try cluster.base_port=null, or {65536 - processes}."
        )


def _devices(config: Config, machine: Machine, present: bool) -> tuple[str, int, list[str]]:
    """(kind that computes, devices per host, notes)."""
    hardware = config.hardware
    notes: list[str] = []
    _check_on_tpu(config, machine)
    kind = hardware.kind
    if kind is Kind.auto and config.strategy.on_tpu:
        kind = Kind.tpu
    elif kind is Kind.auto:
        kind = Kind.gpu if machine.gpus and not hardware.rehearse else Kind.cpu
    there = len({Kind.gpu: machine.gpus, Kind.tpu: machine.tpus}.get(kind, machine.cores))
    per_host = hardware.devices_per_host or max(1, there)
    if hardware.rehearse:
        return "cpu", per_host, notes
    if kind is Kind.tpu:
        return kind.value, per_host, _absent_tpu(config, machine, present)
    here = per_host * (hardware.hosts or 1) if machine.hosts == 1 else per_host
    if kind is Kind.gpu and here > len(machine.gpus):
        gpus, cores = len(machine.gpus), len(machine.cores)
        lacks = f"hardware={hardware.name} has {here} GPUs, this machine has {gpus} and {cores} CPU cores"
        if present:
            instead = f"hardware={gpus}gpu" if gpus in (1, 2, 4, 8) else "hardware=auto"
            raise PlanError(
                f"Expected the devices that the hardware names, received a machine without them: {lacks}. "
                f"Try {instead}, or hardware.rehearse=true to run the same layout on logical CPU devices."
            )
        notes.append(f"{lacks}: a run here is refused without hardware.rehearse=true.")
    return kind.value, per_host, notes


def _check_on_tpu(config: Config, machine: Machine) -> None:
    """Refuses a strategy for TPUs on other devices, and another strategy on TPUs."""
    strategy, hardware = config.strategy, config.hardware
    found = hardware.kind is Kind.auto and bool(machine.tpus) and not hardware.rehearse
    if strategy.on_tpu and hardware.kind is not Kind.tpu and not found:
        raise PlanError(
            f"Expected the hardware of a TPU, since {strategy.name} trains on nothing else, received "
            f"hardware={hardware.name}. Try hardware=tpu_v5e_8, with hardware.rehearse=true where there is none."
        )
    if hardware.kind is Kind.tpu and not strategy.on_tpu:
        raise PlanError(
            f"Expected a strategy for TPUs, since hardware={hardware.name} is one, received "
            f"strategy={strategy.name}. Try strategy=tpu."
        )


def _absent_tpu(config: Config, machine: Machine, present: bool) -> list[str]:
    """A note on a TPU that is not there; with `present` true it is refused."""
    if _tpu_address(config, machine):
        return []
    name = config.hardware.name
    called = f" (TPU_NAME={machine.tpu_name} is no address)" if machine.tpu_name else ""
    if present:
        raise PlanError(
            f"Expected a TPU for hardware={name}, received a machine without one and no address of one{called}. "
            f"Try it on a TPU VM, strategy.build.address=grpc://HOST:8470, "
            f"or hardware.rehearse=true to run the same plan on logical CPU devices."
        )
    return [f"hardware={name} is a TPU, this machine has none{called}: a run here is refused without "
            f"hardware.rehearse=true."]  # fmt: skip


def _tpu_address(config: Config, machine: Machine) -> str | None:
    """Where the TPU is: an address, "local" for one that is attached, None where there is none. Refuses others."""
    given = config.strategy.build.get("address")
    key, address = ("strategy.build.address", given) if given else ("TPU_NAME", machine.tpu_name or "")
    if given == "local":
        return "local" if machine.tpus else None
    if not given and not address.startswith("grpc:"):
        return "local" if machine.tpus else None
    found = TPU_ADDRESS.fullmatch(str(address))
    if found is None or not 1 <= int(found.group(2)) <= 65535:
        bare = re.sub(r"^[a-z]*:/*", "", str(address))
        near = [each for each in (f"grpc://{bare}", f"grpc://{bare}:8470") if TPU_ADDRESS.fullmatch(each)]
        offered = near[0] if near and found is None else "grpc://10.0.0.2:8470"
        raise PlanError(
            f"Expected {key} to be local or grpc://HOST:PORT, with a port up to 65535, received {address}. "
            f"Try {key}={offered}."
        )
    return str(address)


def _with_address(config: Config, machine: Machine) -> dict[str, Any]:
    """What makes the strategy, with the TPU's address where its function takes one."""
    build = config.strategy.build
    return build | {"address": _tpu_address(config, machine)} if "address" in build else build


def _precision(config: Config) -> str:
    named, on_tpu = config.train.precision, config.strategy.on_tpu
    if on_tpu and named is Precision.mixed_float16:
        raise PlanError(
            "Expected train.precision to be mixed_bfloat16 or float32 under strategy=tpu, since TPUs compute in "
            "bfloat16, received mixed_float16. Try train.precision=mixed_bfloat16."
        )
    return (named or (Precision.mixed_bfloat16 if on_tpu else Precision.float32)).value


def _baseline(config: Config, kind: str) -> str:
    """Where the baseline comes from; a TPU belongs to one process, and there is no second one for a baseline."""
    named = config.measure.baseline
    if kind != "tpu":
        return named.value if named else "once"
    if named not in (None, Baseline.none):
        raise PlanError(
            f"Expected measure.baseline=none on a TPU, which belongs to one process and leaves none for a baseline, "
            f"received {named.value}. Try measure.baseline=none, and -m workers=1,{config.workers or 8} to compare."
        )
    return "none"


def _explain(config: Config, kind: str) -> bool:
    """Is the lost efficiency to be explained? Refused where none is known, or a step is not of all workers."""
    if not config.measure.explain:
        return False
    if config.strategy.asynchronous:
        raise PlanError(
            f"Expected measure.explain=false with strategy={config.strategy.name}, whose workers share no step that "
            f"could be taken apart, received true. Try measure.explain=false, or strategy=multi_worker."
        )
    if config.measure.steps == 0:
        raise PlanError(
            "Expected a run that is measured with measure.explain=true, received measure.steps=0. "
            "Try measure.steps=null, or measure.explain=false."
        )
    if _baseline(config, kind) == "none":
        raise PlanError(
            f"Expected a baseline with measure.explain=true, since efficiency is lost against it, received none"
            f"{' on a TPU, which leaves no device for one' if kind == 'tpu' else ''}. "
            f"Try {'' if kind == 'tpu' else 'measure.baseline=null, or '}measure.explain=false."
        )
    return True


def _notes_on_tpu(config: Config, kind: str, workers: int, global_batch: int) -> list[str]:
    """What batches of one size leave out, and why there is no baseline."""
    if not config.strategy.on_tpu:
        return []
    notes, examples = [], config.data.train_examples
    out = None if examples is None else left_out(examples, workers, global_batch)
    if out != 0:
        count = f"up to {global_batch - 1}" if out is None else f"{out} of {examples}"
        others = ", others each time" if config.data.shuffle else ""
        notes.append(
            f"Batches are all of {global_batch}, as a TPU needs: each epoch leaves out {count} training "
            f"examples{others}."
        )
    if kind == "tpu" and config.measure.baseline is None and config.measure.steps != 0:
        notes.append("A TPU belongs to one process, which leaves none for a baseline: compare with a run of workers=1.")
    return notes


def _tasks_that_train(config: Config, machine: Machine) -> int | None:
    """How many processes that train something else has started; None where as many are started as are needed."""
    strategy, kinds = config.strategy, machine.tasks
    if not kinds or not strategy.spans_processes:
        return None
    if strategy.asynchronous and "chief" not in kinds:
        raise PlanError(
            f"Expected a chief among the tasks, since it coordinates the others under strategy={strategy.name}, "
            f"received {', '.join(kinds)}. Try it with a chief, or strategy=multi_worker."
        )
    workers = kinds.count("worker")
    return workers if strategy.asynchronous else workers + kinds.count("chief")


def _check_tasks(
    config: Config, machine: Machine, tasks: int | None, training: int, servers: int, per_process: int
) -> None:
    """Refuses more processes than something else has started."""
    if tasks is None:
        return
    if training > tasks:
        raise PlanError(
            f"Expected no more processes that train than the {tasks} that were started, received {training} for "
            f"workers={training * per_process}. Try workers={tasks * per_process}."
        )
    there = machine.tasks.count("ps")
    if servers > there:
        raise PlanError(
            f"Expected no more parameter servers than the {there} that were started, received {servers}. "
            f"Try {f'strategy.parameter_servers={there}' if there else 'strategy=multi_worker'}."
        )


def _workers(config: Config, kind: str, per_host: int, tasks: int | None) -> int:
    strategy, hardware = config.strategy, config.hardware
    hosts = hardware.hosts or 1
    devices = per_host * hosts
    if not (strategy.spans_devices or strategy.spans_processes):
        if config.workers not in (None, 1):
            raise PlanError(
                f"Expected workers=1, since {strategy.name} trains on one device, received workers={config.workers}. "
                f"Try workers=1, or strategy=mirrored workers={config.workers}."
            )
        return 1
    usual = devices
    if tasks:
        each = strategy.devices_per_process or (max(1, devices // tasks) if strategy.spans_devices else 1)
        usual = tasks * each
    workers = config.workers or usual
    if workers > MOST_WORKERS:
        raise PlanError(f"Expected no more than {MOST_WORKERS} workers, received {workers}. Try workers={per_host}.")
    if hosts > 1 and not strategy.spans_processes and workers > per_host:
        raise PlanError(
            f"Expected one host, since {strategy.name} holds all its devices in one process, received "
            f"hardware={hardware.name} with {hosts} hosts. "
            f"Try {'' if strategy.on_tpu else 'strategy=multi_worker, or '}workers={per_host} for one host."
        )
    if workers > devices and (kind != "cpu" or hardware.rehearse):
        raise PlanError(
            f"Expected no more workers than devices, received workers={workers} on hardware={hardware.name} "
            f"with {devices}. Try workers={devices}."
        )
    if strategy.spans_processes and workers > 1 and workers % hosts:
        raise PlanError(
            f"Expected workers that divide evenly over {hosts} hosts, received workers={workers}. "
            f"Try workers={max(hosts, workers // hosts * hosts)}."
        )
    return workers


def _layout(config: Config, workers: int, tasks: int | None) -> tuple[int, int]:
    """(devices per process, workers per host)."""
    strategy, hosts = config.strategy, config.hardware.hosts or 1
    per_host = math.ceil(workers / hosts) if workers > 1 else 1
    used = strategy.devices_per_process
    if not strategy.spans_processes:
        if used not in (None, workers):
            raise PlanError(
                f"Expected strategy.devices_per_process={workers}, since {strategy.name} is one process with every "
                f"worker, received {used}. Try strategy.devices_per_process=null, or strategy=multi_worker."
            )
        return workers, workers
    usual = per_host if hosts > 1 else 1
    if tasks:
        usual = max(1, workers // tasks)
    per_process = used or (usual if strategy.spans_devices else 1)
    if per_process > 1 and not strategy.spans_devices:
        raise PlanError(
            f"Expected strategy.devices_per_process=1 under {strategy.name}, received {per_process}. "
            f"Try strategy.devices_per_process=1."
        )
    if per_host % per_process:
        fitting = max(count for count in range(1, min(per_process, per_host) + 1) if per_host % count == 0)
        raise PlanError(
            f"Expected strategy.devices_per_process to divide the {per_host} workers of a host, received "
            f"{per_process}. Try strategy.devices_per_process={fitting}."
        )
    return per_process, per_host


def _parameter_servers(config: Config, workers: int, there: int) -> int:
    strategy = config.strategy
    if not strategy.asynchronous:
        for key in ("parameter_servers", "min_shard_bytes"):
            if getattr(strategy, key) is not None:
                raise PlanError(
                    f"Expected strategy.{key} with strategy=parameter_server only, received it with {strategy.name}. "
                    f"Try strategy.{key}=null, or strategy=parameter_server."
                )
        return 0
    if config.train.deterministic and workers > 1:
        raise PlanError(
            f"Expected train.deterministic=false under {strategy.name}, where {workers} workers race, received true. "
            f"Try workers=1, or strategy=mirrored."
        )
    # What a server passes on grows with the workers, and one keeps up with a few of them.
    servers = strategy.parameter_servers or there or math.ceil(workers / WORKERS_PER_SERVER)
    if servers > MOST_WORKERS:
        raise PlanError(
            f"Expected no more than {MOST_WORKERS} parameter servers, received {servers}. "
            f"Try strategy.parameter_servers=null."
        )
    return servers


def _service(config: Config, asynchronous: bool) -> tuple[int, tuple[str, ...]]:
    """(processes of this plan that make batches, over all hosts; addresses of services that are there already)."""
    asked = config.data.service
    if asked is None:
        return 0, ()
    if asynchronous:
        raise PlanError(
            f"Expected data.service=null under strategy={config.strategy.name}, whose workers make the examples of the "
            f"steps that they are handed, received {asked}. Try data.service=null, or strategy=multi_worker."
        )
    if re.fullmatch(r"\d+", asked):
        if not 1 <= int(asked) <= MOST_SERVERS:
            raise PlanError(
                f"Expected data.service to be from 1 to {MOST_SERVERS} processes on each host, received {asked}. "
                f"Try data.service=2."
            )
        return int(asked) * (config.hardware.hosts or 1), ()
    addresses = tuple(each.strip().removeprefix("grpc://") for each in asked.split(","))
    for each in addresses:
        host, _, port = each.rpartition(":")
        if not (HOST.fullmatch(host) and port.isdecimal() and 1 <= int(port) <= 65535):
            raise PlanError(
                f"Expected data.service to be how many processes on each host, or addresses HOST:PORT, received "
                f"{asked or 'nothing'}. Try data.service=2, or 'data.service=\"10.0.0.5:5050,10.0.0.6:5050\"'."
            )
    if len(set(addresses)) < len(addresses):
        raise PlanError(f"Expected each address of data.service once, received {asked}. Try each of them once.")
    return 0, addresses


def _process(
    number: int,
    first_rank: int,
    address: str | None,
    config: Config,
    kind: str,
    workers: int,
    per_process: int,
    per_host: int,
    threads: int,
    machine: Machine,
) -> Process:
    """The process that holds `per_process` of the workers, and `number` times as many come before."""
    replicas = tuple(range(number * per_process, (number + 1) * per_process))
    host = replicas[0] // per_host
    local = machine.hosts == 1
    first = replicas[0] if local else replicas[0] % per_host
    cores: tuple[int, ...] = ()
    intra, inter = 0, 0
    if kind == "cpu":
        here = workers if local else per_host
        mine = machine.cores[first * threads : (first + per_process) * threads]
        cores = mine if here * threads <= len(machine.cores) else ()
        # The devices of a process share one Eigen pool. With one thread a device its work runs on the inter-op
        # threads, and a larger pool only adds hand-overs; two inter-op threads keep communication beside compute.
        intra = threads if threads == 1 else threads * per_process
        inter = max(2, per_process)
    # Each host numbers its GPUs from 0; several processes of one host take consecutive ones.
    devices = tuple(f"{kind.upper()}:{index}" for index in range(per_process))
    if kind == "gpu":
        devices = tuple(f"GPU:{first + index}" for index in range(per_process))
    return Process(
        rank=first_rank + number,
        role="chief" if first_rank + number == 0 else "worker",
        host=host,
        address=address,
        devices=devices,
        replicas=replicas,
        cores=cores,
        intra_op_threads=intra,
        inter_op_threads=inter,
    )


def _other(rank: int, role: str, host: int, address: str | None) -> Process:
    """A process that trains no replica: on any core, with as many threads as TensorFlow takes."""
    return Process(rank, role, host, address, (), (), (), 0, 0)


def _machine_name(machine: Machine) -> str:
    gpus = f"GPUs: {', '.join(machine.gpus) or 'none'}"
    chips = f", TPU chips: {len(machine.tpus)}" if machine.tpus else ""
    return f"{machine.hostname}: {machine.cpu}, {len(machine.cores)} cores, {gpus}{chips}"


def _tuples(values: dict[str, Any], keep: tuple[str, ...] = ()) -> dict[str, Any]:
    """JSON's lists back as the tuples they were, except inside the keys in `keep`."""
    return {
        key: tuple(value) if isinstance(value, list) and key not in keep else value for key, value in values.items()
    }

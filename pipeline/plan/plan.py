"""The plan: the numbers every process agrees on, as values and as plan.json."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, replace
from itertools import chain
from typing import Any

from pipeline.config.parts import KEY, Part, flat, leaves, part_of, typed, unflat
from pipeline.config.schema import Json, Object

# One timed repeat is made to last about this long where its steps are not given.
REPEAT_SECONDS = 0.75

# Of plan.json. The first, which had none written, held the same values.
VERSION = 2
# What a training was given without a length, for each worker that steps alone, before that was said in the plan.
STEPS_THEN = 63
# What adds up: of its own accord one of the two others, see `Plan.collective`.
AUTO, TENSORFLOW, SHARED_MEMORY = "auto", "tensorflow", "shared_memory"
DATA_SERVER = "data server"
# The role of a process that trains nothing, and builds a model for its size alone.
BUILDER = "builder"

IDENTITY, TRAINING, COMPARABILITY, BASELINE = Part.IDENTITY, Part.TRAINING, Part.COMPARABILITY, Part.BASELINE
STEP_TIME, PREDICTION, SIZE, PARAMETER = Part.STEP_TIME, Part.PREDICTION, Part.SIZE, Part.PARAMETER


@dataclass(frozen=True)
class Process:
    """A process of the operating system: `replicas` are numbers over the whole run, none where it trains nothing."""

    rank: int
    role: str
    host: int
    address: str | None
    devices: tuple[str, ...] = ()
    replicas: tuple[int, ...] = ()
    cores: tuple[int, ...] = ()
    intra_op_threads: int = 0
    inter_op_threads: int = 0


@dataclass(frozen=True)
class Checkpoints:
    """Checkpoints; `before` is where an earlier command wrote the last one, if that was elsewhere."""

    every_steps: int | None = None
    every_minutes: float | None = None
    every_epochs: int | None = None
    keep: int = 2
    best: str | None = None
    best_is: str = "min"
    folder: str | None = None
    before: str | None = None


@dataclass(frozen=True)
class StrategyPart:
    """The strategy, what makes it, and what the plan reasons about of it."""

    name: str = part_of(IDENTITY, PARAMETER, name="strategy")
    build: Object = part_of(IDENTITY, STEP_TIME, name="strategy_build")
    asynchronous: bool = part_of(IDENTITY, TRAINING, STEP_TIME, key="strategy")
    min_shard_bytes: int | None = part_of(IDENTITY, STEP_TIME)
    exchange: str | None = part_of(IDENTITY, STEP_TIME)
    static_batches: bool = part_of(IDENTITY, TRAINING, BASELINE, STEP_TIME, key="strategy")
    # Over how many devices each copy of the model is cut.
    devices_per_replica: int = part_of(IDENTITY, STEP_TIME, default=1)
    # What was asked to add up what replicas computed; see `Plan.collective`.
    collective: str = part_of(IDENTITY, STEP_TIME, default="tensorflow")
    # What was asked of the buckets in which gradients leave for other hosts; see `Plan.bucket_bytes`.
    bucket_bytes: int | None = part_of(PREDICTION, default=0)


@dataclass(frozen=True)
class HardwarePart:
    """The devices that it is laid over, and what they stand for."""

    name: str = part_of(IDENTITY, PARAMETER, name="hardware")
    kind: str = part_of(IDENTITY, COMPARABILITY, BASELINE, STEP_TIME, PARAMETER)
    hosts: int = part_of(IDENTITY, PREDICTION, PARAMETER)
    memory_gib: float | None = part_of()
    link_gbps: float | None = part_of(PREDICTION)
    threads_per_device: int | None = part_of(IDENTITY, COMPARABILITY, BASELINE, STEP_TIME, PARAMETER)
    rehearsal: bool = part_of(IDENTITY, PREDICTION)
    oversubscribed: bool = part_of(PREDICTION)
    machine: str = part_of(BASELINE)
    # Of the host that has the least, which CPU devices share.
    host_memory_gib: float | None = part_of(default=None)
    # Of the processors of the host that has the least.
    cache_bytes: int | None = part_of(default=None)
    # Of the hosts, by their numbers, where they are known; empty where they are all this machine.
    host_names: tuple[str, ...] = part_of(default=())


@dataclass(frozen=True)
class ModelPart:
    """The model, and what makes it."""

    name: str = part_of(IDENTITY, PARAMETER, name="model")
    build: Object = part_of(IDENTITY, TRAINING, BASELINE, PREDICTION, SIZE, key="model.build", name="model_build")


@dataclass(frozen=True)
class DataPart:
    """The data, what makes them, and how they are read."""

    name: str = part_of(IDENTITY, PARAMETER, name="data")
    build: Object = part_of(IDENTITY, TRAINING, BASELINE, STEP_TIME, SIZE, key="data.build", name="data_build")
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
    # data.cache=auto: image files that fit into memory are decoded once. The same is trained as by cache="none".
    keep_small: bool = part_of(default=False)


@dataclass(frozen=True)
class TrainingPart:
    """Length, batches and optimizer of training; batches in examples, `learning_rate` before `rate_scale`."""

    replica_batch: int = part_of(IDENTITY, BASELINE, PREDICTION, PARAMETER)
    global_batch: int = part_of(IDENTITY, TRAINING, PREDICTION, PARAMETER)
    scaling: str = part_of(IDENTITY, BASELINE, PARAMETER)
    epochs: int | None = part_of(IDENTITY, TRAINING, PARAMETER)
    steps: int | None = part_of(IDENTITY, TRAINING, PARAMETER)
    optimizer: Json = part_of(IDENTITY, TRAINING, COMPARABILITY, BASELINE, STEP_TIME, SIZE)
    learning_rate: float | None = part_of(IDENTITY, TRAINING, BASELINE, PARAMETER)
    loss: Json = part_of(IDENTITY, TRAINING, COMPARABILITY, BASELINE, STEP_TIME, SIZE)
    metrics: Json = part_of(IDENTITY, TRAINING, COMPARABILITY, BASELINE, STEP_TIME)
    callbacks: tuple[Json, ...] = part_of(IDENTITY, TRAINING)
    seed: int = part_of(IDENTITY, TRAINING, PARAMETER)
    deterministic: bool = part_of(IDENTITY, TRAINING, COMPARABILITY, BASELINE, STEP_TIME, PARAMETER)
    precision: str = part_of(IDENTITY, TRAINING, BASELINE, STEP_TIME, SIZE, PARAMETER)
    gradient_bits: int = part_of(IDENTITY, TRAINING, COMPARABILITY, STEP_TIME, PARAMETER)
    steps_per_call: int | None = part_of(IDENTITY, COMPARABILITY, BASELINE, STEP_TIME)
    save: bool = part_of(IDENTITY)
    on_divergence: str = part_of(IDENTITY)
    divergence_factor: float = part_of(IDENTITY)
    gather: bool = part_of(IDENTITY, TRAINING, COMPARABILITY, STEP_TIME, default=False)
    remat: bool = part_of(IDENTITY, BASELINE, STEP_TIME, SIZE, PARAMETER, default=False)
    # XLA compiles forward and backward passes: "true", "auto" (where that is faster), or None for not.
    xla: str | None = part_of(IDENTITY, BASELINE, STEP_TIME, PARAMETER, default=None)
    batch_statistics: str = part_of(IDENTITY, TRAINING, COMPARABILITY, STEP_TIME, PARAMETER, default="global")
    # What the learning rate is multiplied by, after a rollback or with fewer workers than planned.
    rate_scale: float = part_of(default=1.0)
    # By the class's number, which is a text in JSON.
    class_weight: dict[str, float] | None = part_of(IDENTITY, TRAINING, default=None)
    sample_tokens: int | None = part_of(default=None)
    sample_temperature: float = part_of(default=0.8)
    check: str = part_of(default="off")
    compare_weights_every: int | None = part_of(default=None)
    # Did nobody say how long?
    usual_length: bool = part_of(default=False)
    # A checkpoint is also written after an epoch, where it takes less than this share of the time since the last one.
    checkpoint_share: float | None = part_of(default=None)


@dataclass(frozen=True)
class MeasurementPart:
    """Steps and repeats of the measurement, and its baseline."""

    warmup_steps: int = part_of(IDENTITY, BASELINE)
    steps: int | None = part_of(IDENTITY, name="measure_steps")
    repeats: int = part_of(IDENTITY, PARAMETER)
    baseline: str = part_of(IDENTITY, PARAMETER)
    system_metrics_seconds: float = part_of(IDENTITY)
    patience: float = part_of(default=0.0)
    profile: bool = part_of(default=False)
    explain: bool = part_of(default=False)


@dataclass(frozen=True)
class LaunchPart:
    """Timeouts of processes, in seconds, and restarts of those that are lost."""

    startup_timeout: float = part_of()
    heartbeat_timeout: float = part_of()
    progress_timeout: float = part_of()
    stop_timeout: float = part_of()
    preempt_timeout: float = part_of()
    max_restarts: int = part_of()
    elastic: bool = part_of()
    min_workers: int = part_of()
    # How long processes go on without a driver, and whether they may outlive the command that started them.
    orphan_timeout: float = part_of(default=300.0)
    detach: bool = part_of(default=False)


@dataclass(frozen=True)
class Plan:
    """Plain values in parts, each of which says what it is part of; in plan.json they stand beside each other."""

    strategy: StrategyPart
    hardware: HardwarePart
    model: ModelPart
    data: DataPart
    training: TrainingPart
    measurement: MeasurementPart
    launch: LaunchPart
    processes: tuple[Process, ...] = part_of()
    workers: int = part_of(IDENTITY, PREDICTION, PARAMETER)
    checkpoint: Checkpoints = part_of()
    output_dir: str = part_of()
    # What trains inside a process.
    backend: str = part_of(IDENTITY, TRAINING, BASELINE, STEP_TIME, PARAMETER, key="backend", default="tensorflow")
    notes: tuple[str, ...] = part_of(default=())

    @property
    def concurrent_steps(self) -> int:
        """Workers that take steps of their own, beside each other: 1 where all of them make each step together."""
        return self.workers if self.strategy.asynchronous else 1

    @property
    def is_checked(self) -> bool:
        """True if all replicas' step is compared with one device's before training."""
        return self.training.check != "off" and self.workers > 1 and not self.strategy.asynchronous

    @property
    def collective(self) -> str:
        """The collective; by itself shared memory where several processes of a host compute on CPUs."""
        if self.strategy.collective != AUTO:
            return self.strategy.collective
        on_cpu = self.hardware.kind == "cpu" and self.backend == TENSORFLOW
        # Who names the way that TensorFlow's take, asks for these.
        communication = self.strategy.build.get("communication", "auto")
        shares = on_cpu and communication == "auto" and len(self.leaders) > self.hosts_that_train
        return SHARED_MEMORY if shares else TENSORFLOW

    @property
    def bucket_bytes(self) -> int | None:
        """Bytes of gradients that leave for other hosts together; 0: all at the end; None: as `bucket_of` has it."""
        on_cpu = self.hardware.kind == "cpu" and self.backend == TENSORFLOW
        ours = self.collective in (TENSORFLOW, SHARED_MEMORY)
        return self.strategy.bucket_bytes if on_cpu and ours and self.hosts_that_train > 1 else 0

    @property
    def leaders(self) -> tuple[int, ...]:
        """Ranks of the processes that are told what to do: those that train, or the coordinator, who has them train."""
        return (0,) if self.strategy.asynchronous else tuple(each.rank for each in self.processes if each.devices)

    @property
    def hosts_that_train(self) -> int:
        """The number of hosts on which leaders are."""
        return len({self.processes[rank].host for rank in self.leaders})

    @property
    def data_servers(self) -> tuple[str, ...]:
        """Addresses of the tf.data services that make batches; none where the processes that train make them."""
        return self.data.service or tuple(str(self.processes[rank].address) for rank in self.ranks(DATA_SERVER))

    def host_of(self, process: Process) -> str:
        """The name of the host that a process is on; its number where it has none."""
        names = self.hardware.host_names
        return names[process.host] if process.host < len(names) else str(process.host)

    def ranks(self, role: str) -> tuple[int, ...]:
        """Ranks of the processes with a role."""
        return tuple(process.rank for process in self.processes if process.role == role)

    def steps_per_epoch(self, examples: int) -> int:
        """Optimizer steps that see each of `examples` once: the last is smaller, or with static batches left out."""
        whole, left = divmod(examples, self.training.global_batch)
        return whole + (left > 0 and not self.strategy.static_batches)

    def to_json(self) -> str:
        """The plan as JSON text, its parts' fields beside each other, and a version."""
        return json.dumps({"version": VERSION} | flat(self), indent=2, default=asdict)


def from_json(text: str) -> Plan:
    """The plan that `Plan.to_json` wrote, in this version or an earlier one."""
    return from_values(json.loads(text))


def from_values(values: Mapping[str, Any]) -> Plan:
    """The plan of plan.json's values. Raises `ValueError` for odd ones, `TypeError` where some are missing."""
    types = {name: field.type for name, field in leaves(Plan).items() if name in values}
    return unflat(Plan, {name: typed(values[name], kind) for name, kind in types.items()})  # type: ignore[arg-type]


def as_long_as(plan: Plan, then: Mapping[str, Any]) -> Plan:
    """Returns the plan with the length of an earlier run, from that one's values, where nobody gave either a length."""
    length = then.get("epochs"), then.get("steps")
    concurrent = then.get("workers", 1) if then.get("asynchronous") else 1
    usual = then["usual_length"] if "usual_length" in then else length == (None, STEPS_THEN * concurrent)
    if not (plan.training.usual_length and usual):
        return plan
    return replace(plan, training=replace(plan.training, epochs=length[0], steps=length[1]))


def with_rate_scale(plan: Plan, scale: float) -> Plan:
    """The plan with its learning rate multiplied by `scale`."""
    return replace(plan, training=replace(plan.training, rate_scale=scale))


def fingerprint(plan: Plan, versions: dict[str, str]) -> str:
    """Names what a baseline's throughput depends on: two plans with the same one may share a measurement."""
    decides = flat(plan, BASELINE) | {"versions": versions}
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()[:16]


def identity(plan: Mapping[str, Json]) -> dict[str, object]:
    """Returns what a run was to do, from plan.json's values: a run goes on where another with the same was ended."""
    # What an earlier version lacks has its default.
    values = {name: plan.get(name, field.default) for name, field in leaves(Plan, IDENTITY).items()}
    decides = {name: value for name, value in values.items() if value is not MISSING}
    # Before there was a choice, what nobody had asked for was written as TensorFlow's own.
    return decides | {"collective": TENSORFLOW} if decides["collective"] == AUTO else decides


def changed(then: Mapping[str, Json], now: Mapping[str, Json]) -> list[str]:
    """The keys of the config whose values decide what is trained, and differ, from `Plan.to_json`'s values.

    >>> changed({"seed": 0, "model_build": {"units": 1}}, {"seed": 0, "model_build": {"units": 2}})
    ['model.build.units']
    """
    placed = {name: field.metadata.get(KEY) or f"train.{name}" for name, field in leaves(Plan, TRAINING).items()}
    keys = (_leaves(key, then[name], now.get(name)) for name, key in placed.items() if name in then)
    return list(dict.fromkeys(chain.from_iterable(keys)))


def _leaves(key: str, then: Json, now: Json) -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for name in then | now:
            yield from _leaves(f"{key}.{name}", then.get(name), now.get(name))
    elif then != now:
        yield key

"""The typed shape of a config: all that can be set, as plain dataclasses, one for each group of keys.

What each key means is written beside its default in `conf/`. `None` means "found or chosen when the run is planned".
The classes are mutable because Hydra composes into them; what comes out of the plan is frozen.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from pipeline.config.parts import Part, part_of
from pipeline.errors import UserError

# What YAML and JSON files hold, as types: a value, and an object with keys.
if TYPE_CHECKING:
    Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
else:
    Json = Any  # OmegaConf, which reads the schema's annotations as the program runs, knows no recursive types
Object = dict[str, Json]

# Where Hydra puts the points of a named sweep, which are numbered anew by each command.
COMPOSED = ".composed"
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)


class Mode(Enum):
    """The use of a composed config."""

    run = "run"
    plan = "plan"
    predict = "predict"


class Kind(Enum):
    """The kind of a hardware's devices; `auto` takes GPUs where there are any, under a strategy for TPUs the TPU."""

    auto = "auto"
    cpu = "cpu"
    gpu = "gpu"
    tpu = "tpu"


class Scaling(Enum):
    """The batch that is held fixed as workers are added: the replica's (weak) or the global one (strong)."""

    weak = "weak"
    strong = "strong"


class Baseline(Enum):
    """The source of the one-device throughput: `auto` reuses an equal one of an earlier command, `fresh` measures it
    for every point, `none` does without."""

    auto = "auto"
    fresh = "fresh"
    none = "none"


class Exchange(Enum):
    """The exchange between a strategy's devices at each step, which decides where memory goes and what travels."""

    none = "none"
    all_reduce = "all_reduce"
    central = "central"
    parameter_server = "parameter_server"


class Precision(Enum):
    """Keras's dtype policies that train."""

    float32 = "float32"
    mixed_bfloat16 = "mixed_bfloat16"
    mixed_float16 = "mixed_float16"


class Store(Enum):
    """The store that tracks runs."""

    sqlite = "sqlite"
    server = "server"
    none = "none"


class Divergence(Enum):
    """The end of a training whose loss is NaN or explodes."""

    stop = "stop"
    rollback = "rollback"


class Best(Enum):
    """The best value of a metric."""

    min = "min"
    max = "max"


class Cache(Enum):
    """The place where examples stay once they are made."""

    none = "none"
    memory = "memory"
    file = "file"


class Sharding(Enum):
    """The division of data over processes: each reads its own files, or its own examples of all files."""

    auto = "auto"
    file = "file"
    element = "element"


class OnError(Enum):
    """The treatment of examples that are broken."""

    stop = "stop"
    skip = "skip"


class Order(Enum):
    """The order of a sweep's runs: in rounds, so that a machine's drift favours none, or as they were typed."""

    interleaved = "interleaved"
    typed = "typed"


class StartMethod(Enum):
    """The start of a process: forked from a server that holds the imports, or from nothing."""

    forkserver = "forkserver"
    spawn = "spawn"


@dataclass
class StrategyConfig:
    """One way to lay workers over devices, and the function that makes it."""

    name: str = "???"
    spans_devices: bool = False
    spans_processes: bool = False
    asynchronous: bool = False
    devices_per_process: int | None = None
    devices_per_replica: int | None = None
    parameter_servers: int | None = None
    min_shard_bytes: int | None = None
    on_tpu: bool = False
    exchange: Exchange | None = None
    collective: str = "auto"
    bucket_bytes: int | None = None
    build: Object = field(default_factory=dict)


@dataclass
class HardwareConfig:
    """Facts about the devices: counts, threads, memory in GiB, link speed in Gbit/s, price of one host for an hour."""

    name: str = "???"
    # None: as many as the cluster has.
    hosts: int | None = None
    devices_per_host: int | None = None
    kind: Kind = Kind.auto
    threads_per_device: int | None = None
    memory_gib: float | None = None
    link_gbps: float | None = None
    price_per_hour: float | None = part_of(default=None)
    rehearse: bool = False


@dataclass
class ModelConfig:
    """A model's name and the function that makes it."""

    name: str = "???"
    build: Object = field(default_factory=dict)


@dataclass
class DataConfig:
    """A data set's name, its facts where known, the function that makes it, and how it is read."""

    name: str = "???"
    num_classes: int | None = None
    input_shape: list[int] | None = None
    train_examples: int | None = None
    validation_examples: int | None = None
    path: str | None = None
    shuffle: bool = True
    shuffle_window: int = 10_000
    cache: Cache = Cache.none
    shard: Sharding = Sharding.auto
    parallel_reads: int = 4
    prefetch: int = 2
    service: str | None = None
    on_error: OnError = OnError.stop
    profile: bool = False
    build: Object = field(default_factory=dict)


@dataclass
class TrainConfig:
    """Length, batches and optimizer of training."""

    epochs: int | None = None
    steps: int | None = None
    replica_batch: int | None = None
    global_batch: int | None = None
    optimizer: Json = None
    learning_rate: float | None = None
    loss: Json = None
    metrics: list[Json] | None = None
    class_weight: Json = None
    callbacks: list[Json] = field(default_factory=list)
    seed: int = 0
    deterministic: bool = False
    precision: Precision | None = None
    steps_per_call: int | None = None
    gradient_bits: int = 32
    gather: bool = False
    remat: bool = False
    xla: str | None = None
    batch_statistics: str = "global"
    save: bool = True
    check: str = "true"
    compare_weights_every: int | None = None
    on_divergence: Divergence = Divergence.stop
    divergence_factor: float = 1e4
    sample_tokens: int | None = part_of(default=None)
    sample_temperature: float = part_of(default=0.8)


@dataclass
class CheckpointConfig:
    """The time between checkpoints, what is kept of them, and where."""

    every_steps: int | None = None
    every_minutes: float | None = 10.0
    every_epochs: int | None = None
    keep: int = 2
    keep_best: str | None = None
    best_is: Best | None = None
    folder: str | None = None


@dataclass
class MeasureConfig:
    """The measurement of throughput, and its baseline."""

    warmup_steps: int = 3
    steps: int | None = None
    repeats: int = 5
    scaling: Scaling | None = None
    baseline: Baseline | None = None
    patience: float = part_of(default=30.0)
    explain: bool = False


@dataclass
class SweepConfig:
    """A sweep that goes on: its name, the order of its points, how often each is run, and how many of them at once."""

    name: str | None = None
    order: Order = Order.interleaved
    repeats: int = 1
    parallel: int = 1


@dataclass
class PredictConfig:
    """The settings of a prediction: the share of a worker that another one must bring to pay; what to predict from,
    and whether a size that no run had is timed on one device."""

    knee_share: float = 0.5
    sweep: str | None = None
    time_one: bool = True


@dataclass
class TrackingConfig:
    """The store that tracks runs, and the time between samples of a machine's load."""

    name: str = "???"
    store: Store = Store.sqlite
    uri: str | None = None
    experiment: str = "pipeline"
    system_metrics_seconds: float = 5.0
    drain_timeout: float = 10.0
    log_model: bool = True


@dataclass
class ClusterConfig:
    """The place where processes start."""

    name: str = "???"
    host: str = "127.0.0.1"
    base_port: int | None = None
    start_method: StartMethod = StartMethod.forkserver
    # Of cluster=hosts: which machines, and are they to be given the code?
    hosts: list[str] = field(default_factory=list)
    copy: bool = False
    options: Object = field(default_factory=dict)


@dataclass
class LaunchConfig:
    """Timeouts of processes in seconds: to join, give a sign of life, make progress, stop, and leave with a checkpoint;
    restarts, and the fewest workers that a training goes on with; how long processes go on without a driver, and a
    fork server without a command."""

    startup_timeout: float = 60.0
    heartbeat_timeout: float = 30.0
    progress_timeout: float = 50.0
    stop_timeout: float = 4.0
    preempt_timeout: float = 25.0
    max_restarts: int = 3
    elastic: bool = False
    min_workers: int = 1
    # None: some minutes, or a week where it is to be detached.
    orphan_timeout: float | None = None
    detach: bool = False
    keep: str | None = None


@dataclass
class Config:
    """Everything a run is made from.

    Each says whether it makes a point of a sweep another one, which holds for all that is in it.
    """

    mode: Mode = part_of(default=Mode.run)
    backend: str = part_of(Part.POINT, default="tensorflow")
    workers: int | None = part_of(Part.POINT, default=None)
    output_dir: str = part_of(default="outputs")
    resume: str = part_of(default="auto")
    resume_changes: list[str] = part_of(default_factory=list)
    allowed_targets: list[str] | None = part_of(default=None)
    strategy: StrategyConfig = part_of(Part.POINT, default_factory=StrategyConfig)
    hardware: HardwareConfig = part_of(Part.POINT, default_factory=HardwareConfig)
    model: ModelConfig = part_of(Part.POINT, default_factory=ModelConfig)
    data: DataConfig = part_of(Part.POINT, default_factory=DataConfig)
    train: TrainConfig = part_of(Part.POINT, default_factory=TrainConfig)
    measure: MeasureConfig = part_of(Part.POINT, default_factory=MeasureConfig)
    sweep: SweepConfig = part_of(default_factory=SweepConfig)
    predict: PredictConfig = part_of(default_factory=PredictConfig)
    checkpoint: CheckpointConfig = part_of(default_factory=CheckpointConfig)
    tracking: TrackingConfig = part_of(default_factory=TrackingConfig)
    cluster: ClusterConfig = part_of(Part.POINT, default_factory=ClusterConfig)
    launch: LaunchConfig = part_of(default_factory=LaunchConfig)
    views: list[str] = part_of(default_factory=list)


@dataclass
class PrepareConfig:
    """Everything that a folder of prepared data is made from."""

    out: str | None = None
    processes: int | None = None
    scheduler: str | None = None
    shard_mib: float = 64.0
    shards: int | None = None
    workers: int | None = None
    seed: int = 0
    validation_fraction: float = 0.0
    allowed_targets: list[str] | None = None
    data: DataConfig = field(default_factory=DataConfig)


def holds_password(uri: object) -> bool:
    """True if the address of a tracking server holds a user and password."""
    return "@" in str(uri or "")


def check_password(uri: object) -> None:
    """Refuses a tracking server's address that holds a user and password. Raises `UserError`."""
    if holds_password(uri):
        raise UserError(
            "tracking.uri without a user and password, which would end up in files",
            "one with them",
            "the environment variables MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        )


def check_name(key: str, name: str) -> None:
    """Refuses a name by which no folder can be called. Raises `UserError`.

    >>> check_name("sweep.name", "a b/c")
    Traceback (most recent call last):
    pipeline.errors.UserError: Expected sweep.name to be a folder's name of letters, digits, '.', '_' and '-', \
received a b/c. Try sweep.name=a_b_c.
    """
    if NAME.fullmatch(name) is None:
        near = re.sub(r"[^\w.-]+", "_", name, flags=re.ASCII).strip("._-")[:99] or "mine"
        raise UserError(
            f"{key} to be a folder's name of letters, digits, '.', '_' and '-'",
            name.strip() or "nothing",
            f"{key}={near}",
        )

"""The typed shape of a config: all that can be set, as plain dataclasses, one for each group of keys.

What each key means is beside its default in `conf/`. `None` means "found or chosen when the run is planned".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from pipeline.config.parts import ABOVE_ZERO, Part, number, part_of
from pipeline.errors import UserError

# What YAML and JSON files hold, as types: a value, and an object with keys.
if TYPE_CHECKING:
    Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
else:
    Json = Any  # OmegaConf, which reads the schema's annotations as the program runs, knows no recursive types
Object = dict[str, Json]

# Where Hydra puts the points of a named sweep, which are numbered anew by each command.
COMPOSED = ".composed"
# Groups whose choices have names.
NAMED = ("strategy", "hardware", "model", "data")

Mode = StrEnum("Mode", ("run", "plan", "predict"))
Kind = StrEnum("Kind", ("auto", "cpu", "gpu", "tpu"))  # `auto`: GPUs if any, under a strategy for TPUs the TPU
# The batch that is held fixed as workers are added: the replica's (weak) or the global one (strong).
Scaling = StrEnum("Scaling", ("weak", "strong"))
# `auto` reuses an equal one of an earlier command, `fresh` measures it for every point, `none` does without.
Baseline = StrEnum("Baseline", ("auto", "fresh", "none"))
# Between a strategy's devices at each step: decides where memory goes and what travels.
Exchange = StrEnum("Exchange", ("none", "all_reduce", "central", "parameter_server"))
Precision = StrEnum("Precision", ("float32", "mixed_bfloat16", "mixed_float16"))  # Keras's dtype policies that train
Store = StrEnum("Store", ("sqlite", "server", "none"))
Divergence = StrEnum("Divergence", ("stop", "rollback"))  # once the loss is NaN or explodes
Best = StrEnum("Best", ("min", "max"))
Cache = StrEnum("Cache", ("auto", "none", "memory", "file"))  # where examples stay once they are made
Sharding = StrEnum("Sharding", ("auto", "file", "element"))  # a process's own files, or examples of all files
OnError = StrEnum("OnError", ("stop", "skip"))  # for examples that are broken
Order = StrEnum("Order", ("interleaved", "typed"))  # in rounds, so that a machine's drift favours no run, or as typed
StartMethod = StrEnum("StartMethod", ("forkserver", "spawn"))  # from a server that holds the imports, or from nothing


@dataclass
class StrategyConfig:
    """One way to lay workers over devices, and the function that makes it."""

    name: str = "???"
    spans_devices: bool = False
    spans_processes: bool = False
    asynchronous: bool = False
    devices_per_process: int | None = number(1)
    devices_per_replica: int | None = number(1)
    parameter_servers: int | None = number(1)
    min_shard_bytes: int | None = number(1, usual=1_000_000)
    on_tpu: bool = False
    exchange: Exchange | None = None
    collective: str = "auto"
    bucket_bytes: int | None = number(0, usual=1_000_000)
    build: Object = field(default_factory=dict)


@dataclass
class HardwareConfig:
    """Facts about the devices: counts, threads, memory in GiB, link speed in Gbit/s, price of one host for an hour."""

    name: str = "???"
    # None: as many as the cluster has.
    hosts: int | None = number(1)
    devices_per_host: int | None = number(1)
    kind: Kind = Kind.auto
    threads_per_device: int | None = number(1)
    memory_gib: float | None = number(ABOVE_ZERO, usual=16)
    link_gbps: float | None = number(ABOVE_ZERO, usual=100)
    price_per_hour: float | None = number(ABOVE_ZERO, usual=1, parts=())
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
    num_classes: int | None = number(1, usual=10)
    input_shape: list[int] | None = None
    train_examples: int | None = number(1, usual=1000)
    validation_examples: int | None = number(0, usual=1000)
    path: str | None = None
    shuffle: bool = True
    shuffle_window: int = number(1, 10_000)
    cache: Cache = Cache.auto
    shard: Sharding = Sharding.auto
    parallel_reads: int = number(1, 4)
    prefetch: int = number(0, 2)
    service: str | None = None
    on_error: OnError = OnError.stop
    profile: bool = False
    build: Object = field(default_factory=dict)


@dataclass
class TrainConfig:
    """Length, batches and optimizer of training."""

    epochs: int | None = number(1)
    steps: int | None = number(1, usual=1000)
    replica_batch: int | None = number(1, usual=64)
    global_batch: int | None = number(1, usual=128)
    optimizer: Json = None
    learning_rate: float | None = number(ABOVE_ZERO, usual=0.001)
    loss: Json = None
    metrics: list[Json] | None = None
    class_weight: Json = None
    callbacks: list[Json] = field(default_factory=list)
    seed: int = number(0, 0)
    deterministic: bool = False
    precision: Precision | None = None
    steps_per_call: int | None = number(1)
    gradient_bits: int = 32
    gather: bool = False
    remat: bool = False
    xla: str | None = None
    batch_statistics: str = "global"
    save: bool = True
    check: str = "true"
    compare_weights_every: int | None = number(1)
    on_divergence: Divergence = Divergence.stop
    divergence_factor: float = number(ABOVE_ZERO, 1e4)
    sample_tokens: int | None = number(0, parts=())
    sample_temperature: float = number(0, 0.8, parts=())


@dataclass
class CheckpointConfig:
    """The time between checkpoints, what is kept of them, and where."""

    every_steps: int | None = number(1, usual=500)
    every_minutes: float | None = number(ABOVE_ZERO, 10.0)
    every_epochs: int | None = number(1)
    keep: int = number(1, 2)
    keep_best: str | None = None
    best_is: Best | None = None
    folder: str | None = None


@dataclass
class MeasureConfig:
    """The measurement of throughput, and its baseline."""

    warmup_steps: int = number(0, 3)
    steps: int | None = number(0, usual=20)
    repeats: int = number(1, 5)
    scaling: Scaling | None = None
    baseline: Baseline | None = None
    patience: float = number(0, 30.0, parts=())
    explain: bool = False


@dataclass
class SweepConfig:
    """A sweep that goes on: its name, the order of its points, how often each is run, and how many of them at once."""

    name: str | None = None
    order: Order = Order.interleaved
    repeats: int = number(1, 1)
    parallel: int = number(1, 1)


@dataclass
class PredictConfig:
    """A prediction: the share of a worker that another one must bring, its sweep, and timing of an unknown size."""

    knee_share: float = number(ABOVE_ZERO, 0.5)
    sweep: str | None = None
    time_one: bool = True


@dataclass
class TrackingConfig:
    """The store that tracks runs, and the time between samples of a machine's load."""

    name: str = "???"
    store: Store = Store.sqlite
    uri: str | None = None
    experiment: str = "pipeline"
    system_metrics_seconds: float = number(0, 5.0)
    drain_timeout: float = number(0, 10.0)
    log_model: bool = True


@dataclass
class ClusterConfig:
    """The place where processes start."""

    name: str = "???"
    host: str = "127.0.0.1"
    base_port: int | None = number(usual=23_456)
    start_method: StartMethod = StartMethod.forkserver
    # The machines of cluster=hosts, and whether they are given the code.
    hosts: list[str] = field(default_factory=list)
    copy: bool = False
    options: Object = field(default_factory=dict)


@dataclass
class LaunchConfig:
    """Timeouts of processes in seconds, restarts, the fewest workers to go on with, and life without a driver."""

    startup_timeout: float = number(ABOVE_ZERO, 60.0)
    heartbeat_timeout: float = number(ABOVE_ZERO, 30.0)
    progress_timeout: float = number(ABOVE_ZERO, 50.0)
    stop_timeout: float = number(ABOVE_ZERO, 4.0)
    preempt_timeout: float = number(ABOVE_ZERO, 25.0)
    max_restarts: int = number(0, 3)
    elastic: bool = False
    min_workers: int = number(1, 1)
    # None: some minutes, or a week where it is to be detached.
    orphan_timeout: float | None = number(ABOVE_ZERO, usual=300)
    detach: bool = False
    keep: str | None = None


@dataclass
class Config:
    """Everything a run is made from; each part says for all in it whether it makes a sweep's point another one."""

    mode: Mode = part_of(default=Mode.run)
    backend: str = part_of(Part.POINT, default="tensorflow")
    workers: int | None = number(1, parts=(Part.POINT,))
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
    processes: int | None = number(1)
    scheduler: str | None = None
    shard_mib: float = 64.0
    shards: int | None = number(1)
    workers: int | None = number(1)
    seed: int = number(0, 0)
    validation_fraction: float = 0.0
    allowed_targets: list[str] | None = None
    data: DataConfig = field(default_factory=DataConfig)


def holds_password(uri: object) -> bool:
    """True if the address of a tracking server holds a user and password."""
    return "@" in str(uri or "")


def check_password(uri: object) -> None:
    """Refuses a tracking server's address that holds a user and password. Raises `UserError`."""
    if holds_password(uri):
        expected = "tracking.uri without a user and password, which would end up in files"
        instead = "the environment variables MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        raise UserError(expected, "one with them", instead)

"""Refuses values that are out of range or contradict each other, whatever the hardware."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from operator import attrgetter

from pipeline.config.near import near
from pipeline.config.schema import (
    Config,
    DataConfig,
    Exchange,
    Json,
    Store,
    TrainConfig,
    check_password,
)
from pipeline.errors import UserError
from pipeline.plan.backends import JAX, check_collective, typed
from pipeline.plan.plan import AUTO, TENSORFLOW

# Keras's names of losses, metrics and optimizers, so that another is refused before Keras is imported. A test holds
# them to the Keras that is installed. What needs something to work on, as a wrapper of another loss, is left out.
LOSSES = (
    "BCE", "BinaryCrossentropy", "BinaryFocalCrossentropy", "CTC", "CategoricalCrossentropy",
    "CategoricalFocalCrossentropy", "CategoricalHinge", "Circle", "CosineSimilarity", "Dice", "Hinge", "Huber",
    "KLD", "KLDivergence", "LogCosh", "MAE", "MAPE", "MSE", "MSLE", "MeanAbsoluteError",
    "MeanAbsolutePercentageError", "MeanSquaredError", "MeanSquaredLogarithmicError", "Poisson",
    "SparseCategoricalCrossentropy", "SquaredHinge", "Tversky", "bce", "binary_crossentropy",
    "binary_focal_crossentropy", "categorical_crossentropy", "categorical_focal_crossentropy", "categorical_hinge",
    "circle", "cosine_similarity", "ctc", "dice", "hinge", "huber", "kl_divergence", "kld", "log_cosh", "mae",
    "mape", "mean_absolute_error", "mean_absolute_percentage_error", "mean_squared_error",
    "mean_squared_logarithmic_error", "mse", "msle", "poisson", "sparse_categorical_crossentropy", "squared_hinge",
    "tversky",
)  # fmt: skip
METRICS = (
    "AUC", "Accuracy", "BCE", "BinaryAccuracy", "BinaryCrossentropy", "BinaryIoU", "CategoricalAccuracy",
    "CategoricalCrossentropy", "CategoricalHinge", "ConcordanceCorrelation", "CosineSimilarity", "F1Score",
    "FBetaScore", "FalseNegatives", "FalsePositives", "Hinge", "IoU", "KLDivergence", "LogCoshError", "MAE", "MAPE",
    "MSE", "MSLE", "Mean", "MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanIoU", "MeanSquaredError",
    "MeanSquaredLogarithmicError", "OneHotIoU", "OneHotMeanIoU", "PearsonCorrelation", "Poisson", "Precision",
    "PrecisionAtRecall", "R2Score", "Recall", "RecallAtPrecision", "RootMeanSquaredError",
    "SensitivityAtSpecificity", "SparseCategoricalAccuracy", "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy", "SpecificityAtSensitivity", "SquaredHinge", "Sum", "TopKCategoricalAccuracy",
    "TrueNegatives", "TruePositives", "acc", "accuracy", "auc", "bce", "binary_accuracy", "binary_crossentropy",
    "binary_io_u", "categorical_accuracy", "categorical_crossentropy", "categorical_hinge", "ce",
    "concordance_correlation", "cosine_similarity", "crossentropy", "f1_score", "f_beta_score", "false_negatives",
    "false_positives", "hinge", "io_u", "kl_divergence", "log_cosh_error", "mae", "mape", "mean",
    "mean_absolute_error", "mean_absolute_percentage_error", "mean_io_u", "mean_squared_error",
    "mean_squared_logarithmic_error", "mse", "msle", "one_hot_io_u", "one_hot_mean_io_u", "pearson_correlation",
    "poisson", "precision", "precision_at_recall", "r2_score", "recall", "recall_at_precision",
    "root_mean_squared_error", "sensitivity_at_specificity", "sparse_categorical_accuracy",
    "sparse_categorical_crossentropy", "sparse_top_k_categorical_accuracy", "specificity_at_sensitivity",
    "squared_hinge", "sum", "top_k_categorical_accuracy", "true_negatives", "true_positives",
)  # fmt: skip
OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lion", "muon", "nadam", "rmsprop",
    "schedulefreeadamw", "sgd",
)  # fmt: skip
# Hosts on which nothing listens beyond this machine, and what a host looks like.
LOOPBACK = ("127.0.0.1", "localhost")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
# MLflow's stores.
SERVER = re.compile(r"https?://[^/\s]\S*")
DATABASE = re.compile(r"(sqlite|postgresql|mysql|mssql)(\+\w+)?://")
# More than any cluster has; a larger number is a slip, and planning it would fill the memory.
MOST_WORKERS = 65_536
# The same for what is counted in examples or steps, for seconds, and for classes.
MOST, MOST_SECONDS, MOST_CLASSES = 10**15, 10**9, 10**6
# Before training: compare and warn, refuse what differs, or do not compare.
CHECKS = ("true", "strict", "off")
# Counts by the least that makes sense of each, and amounts above 0 with what is usual.
AT_LEAST = {
    1: (
        "workers", "strategy.devices_per_process", "strategy.devices_per_replica", "strategy.parameter_servers",
        "strategy.min_shard_bytes", "hardware.hosts", "hardware.devices_per_host", "hardware.threads_per_device",
        "train.epochs", "train.steps", "train.replica_batch", "train.global_batch", "train.steps_per_call",
        "train.compare_weights_every", "data.num_classes", "data.train_examples", "data.shuffle_window",
        "data.parallel_reads", "measure.repeats", "sweep.repeats", "sweep.parallel", "launch.min_workers",
        "checkpoint.every_steps", "checkpoint.every_epochs", "checkpoint.keep",
    ),
    0: (
        "train.seed", "train.sample_tokens", "train.sample_temperature", "data.validation_examples", "data.prefetch",
        "measure.warmup_steps", "measure.steps", "measure.patience", "tracking.system_metrics_seconds",
        "tracking.drain_timeout", "launch.max_restarts", "strategy.bucket_bytes",
    ),
}  # fmt: skip
ABOVE_ZERO = {
    "train.learning_rate": 0.001, "train.divergence_factor": 10_000, "hardware.memory_gib": 16,
    "hardware.link_gbps": 10, "hardware.price_per_hour": 1, "predict.knee_share": 0.5, "launch.startup_timeout": 60,
    "launch.heartbeat_timeout": 30, "launch.progress_timeout": 50, "launch.stop_timeout": 4,
    "launch.preempt_timeout": 25, "launch.orphan_timeout": 300, "checkpoint.every_minutes": 10,
}  # fmt: skip
# Keys of which asynchronous workers take one value, and why.
ASYNCHRONOUS: dict[str, tuple[object, str]] = {
    "strategy.collective": (AUTO, "step by themselves and add nothing up"),
    "strategy.bucket_bytes": (None, "step by themselves and add nothing up"),
    "train.batch_statistics": ("global", "step by themselves, each normalizing by its own batch"),
    "train.compare_weights_every": (None, "have no weights of their own"),
    "train.gather": (False, "have batches that are whole ones each"),
    "train.remat": (False, "take Keras's own steps"),
    "data.service": (None, "make the examples of the steps that they are handed"),
    "measure.explain": (False, "share no step that could be taken apart"),
}
# Names, with what is usual.
NAMES = {
    "output_dir": "outputs", "tracking.experiment": "pipeline", "strategy.name": "mine", "hardware.name": "mine",
    "model.name": "mine", "data.name": "mine", "tracking.name": "mine", "cluster.name": "local",
    "checkpoint.folder": "null", "checkpoint.keep_best": "val_loss", "resume": "auto", "predict.sweep": "null",
}  # fmt: skip


def check_ranges(config: Config) -> None:
    """Refuses values that are out of range or contradict each other, whatever the hardware."""
    _check_numbers(config)
    _check_names(config)
    _check_asynchronous(config)
    check_collective(config)
    _check_batch_statistics(config)
    _check_training(config)
    _check_survival(config)
    check_path(config.data)
    _check_cluster_and_tracking(config)


def _check_numbers(config: Config) -> None:
    """Refuses numbers below what makes sense, or above anything of their kind."""
    for least, keys in AT_LEAST.items():
        for key in keys:
            value = attrgetter(key)(config)
            if value is not None and not least <= value < math.inf:
                raise UserError(f"{key} to be {least} or more", value, f"{key}={least}")
            _check_size(key, value, least)
    for key, usual in ABOVE_ZERO.items():
        value = attrgetter(key)(config)
        if value is not None and not 0 < value < math.inf:
            raise UserError(f"{key} to be above 0", value, f"{key}={usual}")
        _check_size(key, value, usual)


def _check_asynchronous(config: Config) -> None:
    """Refuses what asynchronous workers do not do."""
    for key, (usual, why) in ASYNCHRONOUS.items():
        value = attrgetter(key)(config)
        if config.strategy.asynchronous and value not in (usual, TENSORFLOW):
            raise UserError(
                f"{key}={typed(usual)} under strategy={config.strategy.name}, whose workers {why}",
                typed(value),
                f"{key}={typed(usual)}, or strategy=multi_worker",
            )


def _check_batch_statistics(config: Config) -> None:
    whose, strategy = config.train.batch_statistics, config.strategy
    if whose not in ("global", "host", "replica"):
        raise UserError(
            "train.batch_statistics to be global, host or replica",
            whose,
            f"train.batch_statistics={(near(whose, ('global', 'host', 'replica')) or ['global'])[0]}",
        )
    if strategy.exchange is Exchange.central and whose == "replica":
        raise UserError(
            f"train.batch_statistics=global, since the replicas of {strategy.name} share their moving statistics",
            whose,
            "strategy=mirrored",
        )


def _check_names(config: Config) -> None:
    """Refuses names of nothing."""
    for key, usual in NAMES.items():
        name = attrgetter(key)(config)
        if name is not None and not name.strip():
            raise UserError(f"{key} to be a name", "nothing", f"{key}={usual}")


def _check_training(config: Config) -> None:
    """Refuses what contradicts itself in how is trained."""
    train = config.train
    if train.seed >= 2**31:
        raise UserError("train.seed to be below 2147483648", train.seed, "train.seed=0")
    if train.gradient_bits not in (16, 32):
        raise UserError("train.gradient_bits to be 16 or 32", train.gradient_bits, "train.gradient_bits=32")
    if train.epochs and train.steps:
        raise UserError(
            "train.epochs or train.steps",
            f"both ({train.epochs} and {train.steps})",
            "train.epochs=null or train.steps=null",
        )
    shape = config.data.input_shape
    if shape is not None and not all(1 <= size <= MOST for size in shape):
        raise UserError(f"data.input_shape of sizes from 1 to {MOST:,}", shape, "data.input_shape=null")
    class_weights(train.class_weight)
    if check_of(train) == "strict" and config.strategy.on_tpu:
        raise UserError(
            f"train.check=true under strategy={config.strategy.name}, whose steps are compiled for static "
            "shapes and compared with nothing",
            "strict",
            "train.check=true, or strategy=mirrored",
        )
    _check_optimizer(train.optimizer)
    _check_named("train.loss", train.loss, LOSSES, "sparse_categorical_crossentropy")
    for metric in train.metrics or ():
        _check_named("train.metrics", metric, METRICS, "accuracy")


def class_weights(weights: Json) -> dict[str, float] | None:
    """Returns the weight of each class's examples, by its number, which is a text in JSON. Raises `UserError`."""
    if weights is None:
        return None
    pairs = list(weights.items()) if isinstance(weights, Mapping) else [(weights, None)]
    numbers = isinstance(weights, Mapping) and all(
        type(label) is int and 0 <= label < MOST_CLASSES
        and type(weight) in (int, float) and 0 <= float(str(weight)) < math.inf
        for label, weight in pairs
    )  # fmt: skip
    if not numbers or not any(weight for _, weight in pairs):
        raise UserError(
            "train.class_weight to give numbers of classes weights from 0 on, one of them above 0",
            weights,
            "train.class_weight='{0: 1.0, 1: 5.0}', or null",
        )
    return {str(label): float(str(weight)) for label, weight in pairs}


def check_of(train: TrainConfig) -> str:
    """Returns train.check as the plan has it: "true", "strict" or "off". Raises `UserError`."""
    # YAML's true is a word here.
    check = train.check.strip().lower()
    if check not in CHECKS:
        raise UserError(
            "train.check to be true, strict or off",
            train.check or "nothing",
            f"train.check={'off' if check == 'false' else 'true'}",
        )
    return check


def _check_cluster_and_tracking(config: Config) -> None:
    """Refuses addresses that are none."""
    base_port = config.cluster.base_port
    if base_port is not None and not 1 <= base_port <= 65535:
        raise UserError("cluster.base_port between 1 and 65535", base_port, "cluster.base_port=null")
    _check_host(config.cluster.host)
    uri = config.tracking.uri
    check_password(uri)
    if config.tracking.store is Store.server and not SERVER.fullmatch(uri or ""):
        raise UserError(
            "tracking.uri to be an MLflow server's address",
            uri or "none",
            "tracking.uri=http://127.0.0.1:5000, or tracking=sqlite for a local store",
        )
    if uri is not None and not (SERVER.fullmatch(uri) or DATABASE.match(uri)):
        raise UserError("tracking.uri to be null or a store's address", uri or "nothing", "tracking.uri=null")


def stays_here(address: str | None) -> bool:
    """True if a process with this address, or on this host, listens on nothing but 127.0.0.1.

    >>> stays_here("127.0.0.1:2222"), stays_here("10.0.0.5:2222"), stays_here(None)
    (True, False, True)
    """
    return address is None or address.partition(":")[0] in LOOPBACK


def check_path(data: DataConfig) -> None:
    """Refuses a path that is none, and one that nothing reads."""
    path = data.path
    if path is not None and not path.strip():
        raise UserError("data.path to be a folder or a file", "nothing", "data.path=FOLDER")
    if path is not None and "path" not in data.build:
        raise UserError(
            f"data.path=null with data={data.name}, which reads none",
            path,
            "data.path=null, or data=images, numpy, csv, tfds or tfrecord, which do",
        )


def _check_survival(config: Config) -> None:
    """Refuses what contradicts itself in how a run is kept and resumed."""
    checkpoint = config.checkpoint
    if config.resume_changes and config.resume in ("auto", "never"):
        raise UserError(
            "resume_changes with the run that they are changes of",
            f"resume={config.resume}",
            "resume=RUN, or resume_changes=[]",
        )
    if config.launch.elastic and not config.strategy.spans_processes:
        raise UserError(
            f"launch.elastic=false under strategy={config.strategy.name}, whose workers are in one process",
            "true",
            "strategy=multi_worker, or launch.elastic=false",
        )
    if config.launch.keep is not None and config.backend == JAX:
        raise UserError(
            "launch.keep=null under backend=jax, whose processes import what they need themselves",
            config.launch.keep,
            "launch.keep=null",
        )
    if checkpoint.best_is is not None and checkpoint.keep_best is None:
        raise UserError(
            "checkpoint.best_is with checkpoint.keep_best",
            f"{checkpoint.best_is.value} alone",
            "checkpoint.keep_best=val_loss, or checkpoint.best_is=null",
        )


def _check_size(key: str, value: float | None, instead: float) -> None:
    """Refuses a number that is larger than anything of its kind, which only a slip makes."""
    group = key.partition(".")[0]
    limit = MOST_SECONDS if group in ("launch", "tracking") else MOST_WORKERS if group == "hardware" else MOST
    if value is not None and value > limit:
        raise UserError(f"{key} to be no more than {limit:,}", f"{value:g}", f"{key}={instead}")


def _check_host(host: str) -> None:
    """Refuses what processes cannot listen on and reach each other at."""
    if not HOST.fullmatch(host) or host == "0.0.0.0" or (host.startswith("127.") and host not in LOOPBACK):
        raise UserError(
            "cluster.host to be 127.0.0.1, or an address or name at which other machines reach this one",
            host or "nothing",
            "cluster.host=127.0.0.1",
        )


def _check_optimizer(optimizer: Json) -> None:
    if isinstance(optimizer, list) or (isinstance(optimizer, dict) and "_target_" not in optimizer):
        raise UserError(
            "train.optimizer to be a Keras optimizer's name or {_target_: ...}",
            f"{optimizer!r}",
            "train.optimizer=adam",
        )
    name = optimizer.lower() if isinstance(optimizer, str) else optimizer
    _check_named("train.optimizer", name, OPTIMIZERS, "adam")


def _check_named(key: str, node: Json, names: Sequence[str], usual: str) -> None:
    """Refuses what is neither a name of Keras's nor a function, nor a list of these or one for each output of a model.

    A name with the package that registered it, package>name, is left to Keras.
    """
    if node is None or (isinstance(node, dict) and "_target_" in node):
        return
    form = "{}=[{}]" if key == "train.metrics" else "{}={}"
    if isinstance(node, str) and node not in names and ">" not in node:
        what, one = key.removeprefix("train.").replace("metrics", "metric"), (near(node, reversed(names)) or [usual])[0]
        if "." in node:
            one = f"{{_target_: {node}}}"
        raise UserError(
            f"{key} to be Keras's name of {'an' if what == 'optimizer' else 'a'} {what}, or a function "
            "{_target_: ...}",
            node.strip() or "nothing",
            f"{shlex.quote(form.format(key, one))}",
        )
    if isinstance(node, str):
        return
    if not isinstance(node, dict | list) or not node:
        raise UserError(
            f"{key} to be Keras's names or functions {{_target_: ...}}",
            f"{node!r}",
            f"{shlex.quote(form.format(key, usual))}",
        )
    for item in node.values() if isinstance(node, dict) else node:
        _check_named(key, item, names, usual)


def check_ports(base_port: int | None, processes: int) -> None:
    """Refuses a first port that leaves too few above it."""
    if base_port is not None and processes > 1 and base_port + processes - 1 > 65535:
        raise UserError(
            f"cluster.base_port to leave {processes} processes a port each up to 65535",
            base_port,
            f"cluster.base_port=null, or {65536 - processes}",
        )

"""Refuses values that are out of range or contradict each other, whatever the hardware."""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from operator import attrgetter

from pipeline.config.offered import near
from pipeline.config.parts import ABOVE_ZERO, LEAST, USUAL, places
from pipeline.config.schema import Config, DataConfig, Exchange, Json, PrepareConfig, Store, TrainConfig, check_password
from pipeline.errors import UserError, refuse
from pipeline.plan.backends import JAX, check_collective, expect_only, xla_of
from pipeline.plan.plan import AUTO, TENSORFLOW


def _with_aliases(classes: str, others: str = "") -> tuple[str, ...]:
    """Returns the names of Keras's classes, each also in snake case, as Keras has them, and others, sorted."""
    words = [re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name) for name in classes.split()]
    aliases = (re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower() for name in words)
    return tuple(sorted({*classes.split(), *aliases, *others.split()}))


# Keras's names of losses, metrics and optimizers, so that another is refused before Keras is imported. A test holds
# them to the Keras that is installed. What needs something to work on, as a wrapper of another loss, is left out.
_OF_BOTH = """
    BCE BinaryCrossentropy CategoricalCrossentropy CategoricalHinge CosineSimilarity Hinge KLDivergence MAE MAPE MSE
    MSLE MeanAbsoluteError MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogarithmicError Poisson
    SparseCategoricalCrossentropy SquaredHinge
"""
LOSSES = _with_aliases(
    f"{_OF_BOTH} BinaryFocalCrossentropy CTC CategoricalFocalCrossentropy Circle Dice Huber KLD LogCosh Tversky"
)
METRICS = _with_aliases(
    f"""
    {_OF_BOTH} AUC Accuracy BinaryAccuracy BinaryIoU CategoricalAccuracy ConcordanceCorrelation F1Score FBetaScore
    FalseNegatives FalsePositives IoU LogCoshError Mean MeanIoU OneHotIoU OneHotMeanIoU PearsonCorrelation Precision
    PrecisionAtRecall R2Score Recall RecallAtPrecision RootMeanSquaredError SensitivityAtSpecificity
    SparseCategoricalAccuracy SparseTopKCategoricalAccuracy SpecificityAtSensitivity Sum TopKCategoricalAccuracy
    TrueNegatives TruePositives
    """,
    "acc ce crossentropy",
)
OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lion", "muon", "nadam", "rmsprop",
    "schedulefreeadamw", "sgd",
)  # fmt: skip
# Hosts on which nothing listens beyond this machine, and what a host looks like.
LOOPBACK = ("127.0.0.1", "localhost")
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
SERVER = re.compile(r"https?://[^/\s]\S*")
DATABASE = re.compile(r"(sqlite|postgresql|mysql|mssql)(\+\w+)?://")
# More than any cluster has; a larger number is a slip, and planning it would fill the memory.
MOST_WORKERS = 65_536
# The same for what is counted in examples or steps, for seconds, and for classes.
MOST, MOST_SECONDS, MOST_CLASSES = 10**15, 10**9, 10**6
# Before training: compare and warn, refuse what differs, or do not compare.
CHECKS = ("true", "strict", "off")
BATCH_STATISTICS = ("global", "host", "replica")
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
    check_numbers(config)
    for key, usual in NAMES.items():
        name = attrgetter(key)(config)
        if name is not None and not name.strip():
            raise UserError(f"{key} to be a name", "nothing", f"{key}={usual}")
    strategy, checkpoint, launch = config.strategy, config.checkpoint, config.launch
    port, host, uri = config.cluster.base_port, config.cluster.host, config.tracking.uri
    built_by = str(strategy.build.get("_target_", ""))
    by_itself = built_by.endswith(".parameter_server")
    wrong, instead = by_itself != strategy.asynchronous, f"strategy.asynchronous={str(by_itself).lower()}"
    wrong &= built_by.startswith("pipeline.strategies.")
    refuse((wrong, f"{instead} with {built_by}", str(strategy.asynchronous).lower(), instead))
    if strategy.asynchronous:
        whose = f"strategy={strategy.name}, whose workers"
        expect_only(config, ASYNCHRONOUS, whose, "strategy=multi_worker", TENSORFLOW)
    check_collective(config)
    xla_of(config)
    _check_training(config)
    check_path(config.data)
    check_password(uri)
    refuse(
        (config.resume_changes and config.resume in ("auto", "never"),
         "resume_changes with the run that they are changes of", f"resume={config.resume}",
         "resume=RUN, or resume_changes=[]"),
        (launch.elastic and not strategy.spans_processes,
         f"launch.elastic=false under strategy={strategy.name}, whose workers are in one process", "true",
         "strategy=multi_worker, or launch.elastic=false"),
        (launch.keep is not None and config.backend == JAX,
         "launch.keep=null under backend=jax, whose processes import what they need themselves", launch.keep,
         "launch.keep=null"),
        (checkpoint.best_is is not None and checkpoint.keep_best is None,
         "checkpoint.best_is with checkpoint.keep_best",
         f"{checkpoint.best_is.value if checkpoint.best_is else None} alone",
         "checkpoint.keep_best=val_loss, or checkpoint.best_is=null"),
        (port is not None and not 1 <= port <= 65535, "cluster.base_port between 1 and 65535", port,
         "cluster.base_port=null"),
        # What processes cannot listen on and reach each other at.
        (not HOST.fullmatch(host) or host == "0.0.0.0" or (host.startswith("127.") and host not in LOOPBACK),
         "cluster.host to be 127.0.0.1, or an address or name at which other machines reach this one",
         host or "nothing", "cluster.host=127.0.0.1"),
        (config.tracking.store is Store.server and not SERVER.fullmatch(uri or ""),
         "tracking.uri to be an MLflow server's address", uri or "none",
         "tracking.uri=http://127.0.0.1:5000, or tracking=sqlite for a local store"),
        (uri is not None and not (SERVER.fullmatch(uri) or DATABASE.match(uri)),
         "tracking.uri to be null or a store's address", uri or "nothing", "tracking.uri=null"),
    )  # fmt: skip


def check_numbers(config: Config | PrepareConfig) -> None:
    """Refuses numbers below what makes sense, or above anything of their kind. Raises `UserError`."""
    schema: type = type(config)
    for key, field in places(schema).items():
        value, least, group = attrgetter(key)(config), field.metadata.get(LEAST), key.partition(".")[0]
        if value is None or least is None:
            continue
        expected, usual = f"{least} or more", least
        if least == ABOVE_ZERO:
            expected, usual = "above 0", f"{field.metadata[USUAL] or field.default:g}"
        limit = MOST_SECONDS if group in ("launch", "tracking") else MOST_WORKERS if group == "hardware" else MOST
        if not least <= value < math.inf:
            raise UserError(f"{key} to be {expected}", value, f"{key}={usual}")
        if value > limit:
            raise UserError(f"{key} to be no more than {limit:,}", f"{value:g}", f"{key}={usual}")


def _check_training(config: Config) -> None:
    train, strategy, shape = config.train, config.strategy, config.data.input_shape
    whose = train.batch_statistics
    refuse(
        (whose not in BATCH_STATISTICS, "train.batch_statistics to be global, host or replica", whose,
         f"train.batch_statistics={(near(whose, BATCH_STATISTICS) or BATCH_STATISTICS)[0]}"),
        (strategy.exchange is Exchange.central and whose == "replica",
         f"train.batch_statistics=global, since the replicas of {strategy.name} share their moving statistics", whose,
         "strategy=mirrored"),
        (train.seed >= 2**31, "train.seed to be below 2147483648", train.seed, "train.seed=0"),
        (train.gradient_bits not in (16, 32), "train.gradient_bits to be 16 or 32", train.gradient_bits,
         "train.gradient_bits=32"),
        (train.epochs and train.steps, "train.epochs or train.steps", f"both ({train.epochs} and {train.steps})",
         "train.epochs=null or train.steps=null"),
        (shape is not None and not all(1 <= size <= MOST for size in shape),
         f"data.input_shape of sizes from 1 to {MOST:,}", shape, "data.input_shape=null"),
    )  # fmt: skip
    class_weights(train.class_weight)
    static = "whose steps are compiled for static shapes and compared with nothing"
    expected = f"train.check=true under strategy={strategy.name}, {static}"
    is_strict = check_of(train) == "strict" and strategy.on_tpu
    refuse((is_strict, expected, "strict", "train.check=true, or strategy=mirrored"))
    optimizer = train.optimizer
    if isinstance(optimizer, list) or (isinstance(optimizer, dict) and "_target_" not in optimizer):
        expected = "train.optimizer to be a Keras optimizer's name or {_target_: ...}"
        raise UserError(expected, f"{optimizer!r}", "train.optimizer=adam")
    optimizer = optimizer.lower() if isinstance(optimizer, str) else optimizer
    _check_named("train.optimizer", optimizer, OPTIMIZERS, "adam")
    _check_named("train.loss", train.loss, LOSSES, "sparse_categorical_crossentropy")
    for metric in train.metrics or ():
        _check_named("train.metrics", metric, METRICS, "accuracy")


def class_weights(weights: Json) -> dict[str, float] | None:
    """Returns the weight of each class's examples, by its number, which is a text in JSON. Raises `UserError`."""
    if weights is None:
        return None
    pairs: list[tuple[object, object]] = list(weights.items()) if isinstance(weights, Mapping) else []
    numbers = all(
        type(label) is int and 0 <= label < MOST_CLASSES
        and type(weight) in (int, float) and 0 <= float(str(weight)) < math.inf
        for label, weight in pairs
    )  # fmt: skip
    expected = "train.class_weight to give numbers of classes weights from 0 on, one of them above 0"
    if not numbers or not any(weight for _, weight in pairs):
        raise UserError(expected, weights, "train.class_weight='{0: 1.0, 1: 5.0}', or null")
    return {str(label): float(str(weight)) for label, weight in pairs}


def check_of(train: TrainConfig) -> str:
    """Returns train.check as the plan has it: "true", "strict" or "off". Raises `UserError`."""
    # YAML's true is a word here.
    check = train.check.strip().lower()
    instead = f"train.check={'off' if check == 'false' else 'true'}"
    refuse((check not in CHECKS, "train.check to be true, strict or off", train.check or "nothing", instead))
    return check


def stays_here(address: str | None) -> bool:
    """True if a process with this address, or on this host, listens on nothing but 127.0.0.1."""
    return address is None or address.partition(":")[0] in LOOPBACK


def check_path(data: DataConfig) -> None:
    """Refuses a path that is none, and one that nothing reads."""
    path = data.path
    refuse(
        (path is not None and not path.strip(), "data.path to be a folder or a file", "nothing", "data.path=FOLDER"),
        (path is not None and "path" not in data.build, f"data.path=null with data={data.name}, which reads none", path,
         "data.path=null, or data=images, numpy, csv, tfds or tfrecord, which do"),
    )  # fmt: skip


def _check_named(key: str, node: Json, names: Sequence[str], usual: str) -> None:
    """Refuses what is no name of Keras's, or registered with it as package>name, no function, and none of several."""
    if node is None or (isinstance(node, dict) and "_target_" in node):
        return
    form = "{}=[{}]" if key == "train.metrics" else "{}={}"
    if isinstance(node, dict | list) and node:
        for item in node.values() if isinstance(node, dict) else node:
            _check_named(key, item, names, usual)
    elif not isinstance(node, str):
        expected = f"{key} to be Keras's names or functions {{_target_: ...}}"
        raise UserError(expected, f"{node!r}", shlex.quote(form.format(key, usual)))
    elif node not in names and ">" not in node:
        what, one = key.removeprefix("train.").replace("metrics", "metric"), (near(node, reversed(names)) or [usual])[0]
        if "." in node:
            one = f"{{_target_: {node}}}"
        article = "an" if what == "optimizer" else "a"
        expected = f"{key} to be Keras's name of {article} {what}, or a function {{_target_: ...}}"
        raise UserError(expected, node.strip() or "nothing", shlex.quote(form.format(key, one)))

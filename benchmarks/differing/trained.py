"""Trains cases, many in a process: on one device, and under the strategy that the process takes part in."""

import os
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from differing.asked import Answer, Asked, Found, Place
from differing.case import Case, script

from pipeline import strategies
from pipeline.record.events import Epoch, Event, Steps
from pipeline.worker.data import batches
from pipeline.worker.data.batches import Data
from pipeline.worker.layout import BatchLayout
from pipeline.worker.model_error import told
from pipeline.worker.tensorflow import build
from pipeline.worker.tensorflow.loop import Loop, replica_digests
from pipeline.worker.training import Training


def main(asked: Connection, place: Place, addresses: tuple[str, ...], log: str) -> None:
    """Answers each `Asked` by an `Answer` until the connection ends."""
    _write_to(Path(log))
    strategy = _strategy(place, addresses)
    while True:
        try:
            wanted: Asked = asked.recv()
        except EOFError:
            return
        try:
            answer = Answer(trained(wanted, strategy, place.rank, len(addresses)))
        except Exception as error:
            answer = Answer(error=told(error), trace=traceback.format_exc())
        asked.send(answer)


def _strategy(place: Place, addresses: tuple[str, ...]) -> tf.distribute.Strategy:
    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = 2 if place.strategy == "mirrored" else 1
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.experimental.enable_op_determinism()
    if place.strategy == "multi_worker":
        return strategies.multi_worker(("CPU:0",), addresses, place.rank, "ring")
    return strategies.mirrored(("CPU:0", "CPU:1")) if devices == 2 else tf.distribute.get_strategy()


def trained(asked: Asked, strategy: tf.distribute.Strategy, rank: int, processes: int) -> Found:
    """Trains a case, as the process of this rank among so many."""
    case = asked.case
    keras.utils.clear_session()
    keras.utils.set_random_seed(case.seed)
    # A module of a person's own by its name; without one, classes would seem to be Python's.
    defined: dict[str, Any] = {"__name__": "case"}
    exec(compile(script(case), "case.py", "exec"), defined)
    parts = [
        _part(case, defined["data"](examples, seed), asked.order if seed == 1 else None)
        for seed, examples in ((1, case.examples), (2, case.validation_examples))
    ]
    model = build.model(defined["model"], strategy, batches.spec(parts[0]))
    if asked.order is not None:
        # Also of models that take no numbers: what is rounding alone, as a gradient of 0, an optimizer may make large.
        model.set_weights([_in_last_digit(asked.order, weight) for weight in model.get_weights()])
    replicas = strategy.num_replicas_in_sync
    local = replicas // processes
    train, validation = (
        Data(part, BatchLayout(case.batch, replicas, rank * local, local, (examples,), rank), False, case.seed)
        for part, examples in zip(parts, (case.examples, case.validation_examples), strict=True)
    )
    loop = Loop(
        model, strategy, train, [validation] if case.validation_examples else [], chief=rank == 0,
        alone=local == replicas,
    )  # fmt: skip
    told: list[Event] = []
    callbacks = defined["callbacks"]()
    training = Training(loop, case.epochs, None, callbacks, told.append)
    for _ in training.advance(None, case.steps_per_call):
        pass
    return _found(model, told, loop)


def _part(case: Case, data: object, order: int | None) -> object:
    x, y, weights = data
    part = (x, y) if weights is None else (x, y, weights)
    if order is not None:
        part = tf.nest.map_structure(lambda array: array[_order(len(array), case.batch, order)], part)
        part = (tf.nest.map_structure(partial(_in_last_digit, order), part[0]), *part[1:])
    return tf.data.Dataset.from_tensor_slices(part) if case.data == "dataset" else part


def _order(examples: int, batch: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    starts = range(0, examples, batch)
    return np.concatenate(
        [start + random.permutation(min(batch, examples - start)) for start in starts] or [np.zeros(0, int)]
    )


def _in_last_digit(seed: int, array: np.ndarray) -> np.ndarray:
    """Numbers as rounding might have left them: replicas compute on fewer examples at once, in other blocks."""
    if array.dtype.kind != "f":
        return array
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), array.shape)
    return (array * (1.0 + signs * np.finfo(array.dtype).eps)).astype(array.dtype)


def _found(model: keras.Model, told: list[Event], loop: Loop) -> Found:
    found: dict[str, object] = {}
    steps = [loss for event in told if isinstance(event, Steps) for loss in event.losses]
    found["losses of steps"] = steps
    for event in told:
        if isinstance(event, Epoch):
            of_epoch = {"loss": event.loss, **event.metrics, "val_loss": event.val_loss, **_val(event.val_metrics)}
            found |= {f"{name} of epoch {event.epoch}": value for name, value in of_epoch.items() if value is not None}
    variables = [*model.variables, *model.optimizer.variables]
    found |= {f"{place}: {variable.path}": variable for place, variable in enumerate(variables)}
    for place, (variable, value) in enumerate(zip(model.metrics_variables, loop.metrics_state(), strict=True)):
        # Keras's means of the losses per output are not used: the loop adds up its own.
        if not variable.path.startswith("compile_loss/"):
            found[f"metrics {place}: {variable.path}"] = value
    found["different replicas"] = len(set(replica_digests(model.trainable_variables))) - 1
    return {name: np.asarray(keras.ops.convert_to_numpy(value), np.float64) for name, value in found.items()}


def _val(metrics: Mapping[str, float] | None) -> dict[str, float]:
    return {f"val_{name}": value for name, value in (metrics or {}).items()}


def _write_to(log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)

"""TensorFlow's loop over a model on replicas of this process, and what Keras's `fit` and ours make of one."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import pipeline
from pipeline.record.findings import Check
from pipeline.worker.data import batches
from pipeline.worker.data.batches import Data
from pipeline.worker.layout import BEGINNING, BatchLayout, Position, ReplicaPlace
from pipeline.worker.tensorflow import build, custom_steps
from pipeline.worker.tensorflow.equality_check import check
from pipeline.worker.tensorflow.loop import Loop

History = keras.callbacks.History


def loop_over(
    make: Callable[[], keras.Model],
    part: Any,
    strategy: tf.distribute.Strategy | None = None,
    batch: int = 16,
    shuffle: bool = True,
    seed: int = 5,
    held_out: Any = None,
    position: Position = BEGINNING,
    collective: Any = None,
    gather: bool = False,
    **built: Any,
) -> Loop:
    """The loop over a model in global batches of that size; `built` is what `build.model` takes beside.

    A model whose own steps cannot evaluate is not validated.
    """
    strategy = strategy or tf.distribute.get_strategy()
    replicas = strategy.num_replicas_in_sync

    def data(part: Any, shuffle: bool) -> Data:
        return Data(part, BatchLayout(batch, replicas, 0, replicas, (batches.count(part),)), shuffle, seed)

    model = build.model(make, strategy, batches.spec(part), collective=collective, **built)
    own = custom_steps.of(model)
    validates = held_out is not None and (own is None or own.test is not None)
    return Loop(
        model, strategy, data(part, shuffle), [data(held_out, False)] if validates else [],
        position=position, collective=collective, gather=gather,
    )  # fmt: skip


def checked(loop: Loop, part: Any, collective: Any = None) -> Check:
    """Returns what a step of all replicas on a few examples differs in from one device's."""
    replicas = loop.strategy.num_replicas_in_sync

    def rows(first: int, count: int) -> Any:
        return tf.nest.map_structure(lambda leaf: tf.constant(leaf[first : first + count]), part)

    return check(loop, collective or loop.collective, ReplicaPlace(0, replicas, replicas), rows)


def fitted(
    make: Callable[[], keras.Model], arguments: dict[str, Any], strategy: tf.distribute.Strategy | None = None,
    fit: Callable[..., History] = pipeline.fit,
) -> tuple[keras.Model, History]:  # fmt: skip
    """(a model that is made under a strategy, the history of fitting it); in the order of its data unless shuffled."""
    keras.utils.set_random_seed(3)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = make()
    return model, fit(model, **{"verbose": 0, "shuffle": False} | arguments)


def by_keras(make: Callable[[], keras.Model], arguments: dict[str, Any]) -> tuple[keras.Model, History]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        return fitted(make, arguments, fit=keras.Model.fit)


def assert_same(ours: History, theirs: History, tolerance: float) -> None:
    assert list(ours.history) == list(theirs.history)
    assert ours.epoch == theirs.epoch
    for name, values in theirs.history.items():
        np.testing.assert_allclose(ours.history[name], values, tolerance, tolerance, err_msg=name)


def assert_same_weights(ours: keras.Model, theirs: keras.Model, tolerance: float = 1e-5) -> None:
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)

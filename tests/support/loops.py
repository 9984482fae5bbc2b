"""TensorFlow's loop over a model on all replicas of a strategy, which are in this process."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from pipeline.record.findings import Check
from pipeline.worker.data import batches
from pipeline.worker.data.batches import Data
from pipeline.worker.layout import BEGINNING, BatchLayout, Position, ReplicaPlace
from pipeline.worker.tensorflow import build, custom_steps
from pipeline.worker.tensorflow.equality_check import check
from pipeline.worker.tensorflow.loop import Loop


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

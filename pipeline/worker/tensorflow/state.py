"""What a training is at a moment, taken from its variables and put back, and sent from the first process to all."""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from pipeline.worker.checkpoint import State, grouped
from pipeline.worker.collective import Collective
from pipeline.worker.keras_fit.agree import from_one
from pipeline.worker.loop import TrainingError
from pipeline.worker.state import packed, unpacked
from pipeline.worker.tensorflow.collective import Addend
from pipeline.worker.tensorflow.own.step import optimizers
from pipeline.worker.tensorflow.tables import grouped as shards_together
from pipeline.worker.tensorflow.tables import joined

# Sent from the first process in pieces of so many 8-byte numbers.
PIECE = 1 << 22


def of_model(model: keras.Model) -> dict[str, np.ndarray]:
    """The arrays of a model and its optimizer, without its metrics: `trained`, `other` and `optimizer`.

    A table that is cut into shards is one array.
    """
    return {
        key: array
        for name, variables in _parts(model).items()
        for key, array in grouped(name, [joined(shards) for shards in shards_together(variables)]).items()
    }


def put_back(model: keras.Model, state: State) -> None:
    """Gives a model and its optimizer what `of_model` took. Raises `TrainingError` where it does not fit."""
    for name, variables in _parts(model).items():
        together, arrays = shards_together(variables), state.group(name)
        if len(together) != len(arrays):
            raise _unfit(f"{len(together)} {name} variables", f"{len(arrays)}")
        for shards, array in zip(together, arrays, strict=True):
            rows = sum(shard.shape[0] for shard in shards) if len(shards) > 1 else None
            shape = (rows, *shards[0].shape[1:]) if rows else tuple(shards[0].shape)
            if shape != array.shape:
                raise _unfit(f"{shards[0].path} of shape {shape}", f"one of shape {array.shape}")
            edges = np.cumsum([shard.shape[0] for shard in shards[:-1]] if rows else [])
            for shard, part in zip(shards, np.split(array, edges) if rows else [array], strict=True):
                shard.assign(part)


def on_all(
    state: State | None, strategy: tf.distribute.Strategy, collective: Collective[Addend], replica: int = 0
) -> State | None:
    """The state of the process with that replica on every process, all of which call this together."""

    def send(values: list[tf.Tensor]) -> list[tf.Tensor]:
        return from_one(strategy, collective)([tf.constant(replica), *values])

    header, body = packed(state) if state is not None else (b"", b"")
    sizes = tf.constant([len(header), len(body)], tf.int64)
    (sizes,) = send([sizes])
    first, second = (int(size) for size in sizes.numpy())
    if not first:
        return None
    words = np.zeros(-(-(first + second) // 8), np.int64)
    if state is not None:
        words.view(np.uint8)[: first + second] = np.frombuffer(header + body, np.uint8)
    for start in range(0, len(words), PIECE):
        # Numbers without a sign of zero or a NaN of their own: what is sent is what arrives.
        (piece,) = send([tf.constant(words[start : start + PIECE])])
        words[start : start + PIECE] = piece.numpy()
    data = words.view(np.uint8)[: first + second].tobytes()
    return state or unpacked(data[:first], data[first:])


def _parts(model: keras.Model) -> dict[str, Sequence[keras.Variable]]:
    own = {id(variable) for variable in [*model.trainable_variables, *model.metrics_variables]}
    return {
        "trained": model.trainable_variables,
        "other": [variable for variable in model.variables if id(variable) not in own],
        "optimizer": [variable for optimizer in optimizers(model) for variable in optimizer.variables],
    }


def _unfit(expected: str, received: str) -> TrainingError:
    return TrainingError(
        f"Expected a checkpoint of this model, with {expected}, received {received}: the model has changed since. "
        f"Try resume=never."
    )

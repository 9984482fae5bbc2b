"""What a training is at a moment, taken from its variables and put back, and sent from the first process to all."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from pipeline.private import global_state
from pipeline.worker.collective import Collective
from pipeline.worker.keras_fit.agree import from_one
from pipeline.worker.tensorflow.checkpoint import State, grouped
from pipeline.worker.tensorflow.collective import Addend
from pipeline.worker.tensorflow.loop import TrainingError
from pipeline.worker.tensorflow.own.step import optimizers
from pipeline.worker.tensorflow.tables import grouped as shards_together
from pipeline.worker.tensorflow.tables import joined

# Sent from the first process in pieces of so many 8-byte numbers.
PIECE = 1 << 22
_ARRAY, _TUPLE = "__array__", "__tuple__"
_MONITORS = "__monitors__"

# What JSON holds.
Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"


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


def of_random_state() -> dict[str, object]:
    """Python's and NumPy's random state, as plain values."""
    version, words, gauss = random.getstate()
    numpys = np.random.get_state(legacy=False)
    numpys["state"]["key"] = numpys["state"]["key"].tolist()  # type: ignore[call-overload,index]
    return {"python": [version, list(words), gauss], "numpy": numpys, "keras": _keras_seed()}


def put_back_random_state(values: Mapping[str, Any]) -> None:
    """Sets what `of_random_state` took."""
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    numpys = {**values["numpy"], "state": dict(values["numpy"]["state"])}
    numpys["state"]["key"] = np.array(numpys["state"]["key"], np.uint32)
    np.random.set_state(numpys)
    if values["keras"] is not None and (own := global_state.get_global_attribute("global_seed_generator")) is not None:
        own.state.assign(np.array(values["keras"], own.state.dtype))


def of_callback(callback: keras.callbacks.Callback, name: str) -> tuple[dict[str, Plain], dict[str, np.ndarray]]:
    """(plain values, arrays) of those attributes of a callback that are numbers, words, arrays, or made of them."""
    values: dict[str, Plain] = {_MONITORS: getattr(callback, "monitor_op", None) is not None}
    arrays: dict[str, np.ndarray] = {}
    for key, value in vars(callback).items():
        if key == "monitor_op":
            continue
        found: dict[str, np.ndarray] = {}
        try:
            values[key] = _plain(value, f"{name}/{key}", found)
        except TypeError:
            continue
        arrays |= found
    return values, arrays


def put_back_callback(callback: keras.callbacks.Callback, values: Mapping[str, Plain], state: State) -> None:
    """Gives a callback what `of_callback` took."""
    if values.get(_MONITORS):
        # Keras sets these up at the end of the first epoch, which changes the sign of what they then compare with.
        callback._set_monitor_op()
    for key, value in values.items():
        if key != _MONITORS:
            setattr(callback, key, _rich(value, state.arrays))


def on_all(
    state: State | None, strategy: tf.distribute.Strategy, collective: Collective[Addend], replica: int = 0
) -> State | None:
    """The state of the process with that replica on every process, all of which call this together."""

    def send(values: list[tf.Tensor]) -> list[tf.Tensor]:
        return from_one(strategy, collective)([tf.constant(replica), *values])

    header, body = _packed(state) if state is not None else (b"", b"")
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
    return state or _unpacked(data[:first], data[first:])


def _packed(state: State) -> tuple[bytes, bytes]:
    kinds = {key: [str(array.dtype), array.shape] for key, array in state.arrays.items()}
    body = b"".join(np.ascontiguousarray(array).tobytes() for array in state.arrays.values())
    return json.dumps([state.values, kinds]).encode(), body


def _unpacked(header: bytes, body: bytes) -> State:
    values, kinds = json.loads(header)
    arrays, start = {}, 0
    for key, (kind, shape) in kinds.items():
        dtype = np.dtype(tf.as_dtype(kind).as_numpy_dtype)
        count = int(np.prod(shape))
        arrays[key] = np.frombuffer(body, dtype, count, start).reshape(shape)
        start += count * dtype.itemsize
    return State(values, arrays)


def _parts(model: keras.Model) -> dict[str, Sequence[keras.Variable]]:
    own = {id(variable) for variable in [*model.trainable_variables, *model.metrics_variables]}
    return {
        "trained": model.trainable_variables,
        "other": [variable for variable in model.variables if id(variable) not in own],
        "optimizer": [variable for optimizer in optimizers(model) for variable in optimizer.variables],
    }


def _keras_seed() -> Plain:
    own = global_state.get_global_attribute("global_seed_generator")
    return None if own is None else joined([own.state]).tolist()


def _plain(value: object, name: str, arrays: dict[str, np.ndarray]) -> Plain:
    """`value` as JSON has it, with arrays put into `arrays`; raises `TypeError` for what is no plain value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise TypeError(name)
        arrays[name] = np.array(value)
        return {_ARRAY: name}
    if isinstance(value, list | tuple):
        inner = [_plain(item, f"{name}/{number}", arrays) for number, item in enumerate(value)]
        return {_TUPLE: inner} if isinstance(value, tuple) else inner
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, f"{name}/{key}", arrays) for key, item in value.items()}
    raise TypeError(name)


def _rich(value: Plain, arrays: Mapping[str, np.ndarray]) -> object:
    if isinstance(value, list):
        return [_rich(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        array = arrays[str(value[_ARRAY])]
        return array.copy() if array.ndim else array[()]
    if isinstance(inner := value.get(_TUPLE), list):
        return tuple(_rich(item, arrays) for item in inner)
    return {key: _rich(item, arrays) for key, item in value.items()}


def _unfit(expected: str, received: str) -> TrainingError:
    return TrainingError(
        f"Expected a checkpoint of this model, with {expected}, received {received}: the model has changed since. "
        f"Try resume=never."
    )

"""State of a training that is no variable: random state and callbacks, as plain values and arrays; states for all."""

import contextlib
import hashlib
import io
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from pipeline.private_keras import global_state
from pipeline.worker.checkpoint import State, grouped
from pipeline.worker.variables import HELD, held

_ARRAY, _TUPLE = "__array__", "__tuple__"
_MONITORS = "__monitors__"

# Bytes travel from the first process in pieces of so many 8-byte numbers.
PIECE = 1 << 22
# Gives every process the first one's int64 array, all of equal length.
Send: TypeAlias = Callable[[np.ndarray], np.ndarray]
# What JSON holds.
Plain: TypeAlias = "bool | int | float | str | list[Plain] | dict[str, Plain] | None"


def of_random_state() -> dict[str, object]:
    """Python's and NumPy's random state, as plain values."""
    numpys, own = np.random.get_state(legacy=False), global_state.get_global_attribute("global_seed_generator")
    numpys["state"]["key"] = numpys["state"]["key"].tolist()  # type: ignore[call-overload,index]
    seed = None if own is None else np.array(keras.ops.convert_to_numpy(own.state)).tolist()
    return {"python": random.getstate(), "numpy": numpys, "keras": seed}


def put_back_random_state(values: Mapping[str, Any]) -> None:
    """Sets what `of_random_state` took."""
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
    numpys = {**values["numpy"], "state": dict(values["numpy"]["state"])}
    numpys["state"]["key"] = np.array(numpys["state"]["key"], np.uint32)
    np.random.set_state(numpys)
    if values["keras"] is not None and (own := global_state.get_global_attribute("global_seed_generator")) is not None:
        own.state.assign(np.array(values["keras"], own.state.dtype))


def of_callbacks(
    callbacks: Sequence[keras.callbacks.Callback], others: Sequence[object]
) -> tuple[list[tuple[str, dict[str, Plain]]], dict[str, np.ndarray]]:
    """(class and plain values of each callback, arrays of all): attributes, and variables that no `others` hold."""
    states, arrays = list[tuple[str, dict[str, Plain]]](), dict[str, np.ndarray]()
    for number, callback in enumerate(callbacks):
        values: dict[str, Plain] = {_MONITORS: getattr(callback, "monitor_op", None) is not None}
        for key, value in vars(callback).items():
            # What is no plain value, such as a function, the callback has been made with.
            with contextlib.suppress(TypeError):
                of_value: dict[str, np.ndarray] = {}
                values[key] = _plain(value, f"callback/{number}/{key}", of_value)
                arrays |= of_value
        states.append((type(callback).__name__, values))
        variables = [np.array(keras.ops.convert_to_numpy(one)) for one in held([callback], known=others)]
        arrays |= grouped(f"callback/{number}.{HELD}", variables)
    return states, arrays


def put_back_callbacks(
    callbacks: Sequence[keras.callbacks.Callback],
    states: Sequence[tuple[str, Mapping[str, Plain]]],
    state: State,
    others: Sequence[object],
) -> None:
    """Gives those callbacks what `of_callbacks` took that are of the same class as then."""
    for number, (callback, (name, values)) in enumerate(zip(callbacks, states, strict=False)):
        if type(callback).__name__ != name:
            continue
        if values.get(_MONITORS):
            # Keras sets these up at the end of the first epoch, which changes the sign of what they then compare with.
            callback._set_monitor_op()
        for key, value in values.items():
            if key != _MONITORS:
                setattr(callback, key, _rich(value, state.arrays))
        variables, arrays = held([callback], known=others), state.group(f"callback/{number}.{HELD}")
        if [tuple(variable.shape) for variable in variables] == [array.shape for array in arrays]:
            for variable, array in zip(variables, arrays, strict=True):
                variable.assign(array)


def digest(arrays: Iterable[np.ndarray]) -> str:
    """A hash of arrays, one after the other: all of them at once would be the model's memory once more.

    >>> digest([np.zeros(2), np.array(1)])
    '85526ba79728a470'
    """
    hashed = hashlib.sha256()
    for array in arrays:
        hashed.update(np.ascontiguousarray(array).view(np.uint8).data)
    return hashed.hexdigest()[:16]


def on_all(state: State | None, send: Send) -> State | None:
    """Returns the first process's state on all processes, which call this together."""
    header, archive = b"", io.BytesIO()
    if state is not None:
        header = json.dumps([state.values, state.kinds]).encode()
        state.write(archive)
    first, second = (int(size) for size in send(np.array([len(header), len(archive.getbuffer())], np.int64)))
    if not first:
        return None
    words = np.zeros(-(-(first + second) // 8), np.int64)
    text, data, _ = np.split(words.view(np.uint8), [first, first + second])
    if state is not None:
        text[:], data[:] = np.frombuffer(header, np.uint8), np.frombuffer(archive.getbuffer(), np.uint8)
    for start in range(0, len(words), PIECE):
        # Numbers without a sign of zero or a NaN of their own: what is sent is what arrives.
        words[start : start + PIECE] = send(words[start : start + PIECE])
    if state is None:
        values, kinds = json.loads(text.tobytes())
        state = State.read(values, kinds, data.tobytes())
    return state


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

"""Embedding tables on parameter servers: cut into shards where they are large, and read by the row.

By itself Keras fetches a whole table to look up a few of its rows, and fails where TensorFlow has cut one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.worker.model_error import ModelError
from pipeline.worker.patched import patched
from pipeline.worker.variables import bytes_of, is_plain, updating

# Optimizers that look at a variable as a whole: they do something else with a part of it.
_OF_WHOLE_VARIABLES = (keras.optimizers.Adafactor, keras.optimizers.Lamb, keras.optimizers.Muon)
_SHARD = re.compile(r"_shard_\d+_of_\d+")


def on_servers(servers: int, min_shard_bytes: int | None) -> AbstractContextManager[None]:
    """Inside, embeddings are tables on `servers`, cut evenly by rows into shards of `min_shard_bytes` or more."""
    usual = keras.layers.Embedding.build

    def build(layer: keras.layers.Embedding, input_shape: Sequence[int | None] | None = None) -> None:
        if layer.built or not is_plain(layer):
            return usual(layer, input_shape)  # type: ignore[no-any-return]
        count, size = 1, layer.input_dim * layer.output_dim * tf.as_dtype(layer.variable_dtype).size
        if min_shard_bytes is not None and not (layer.embeddings_constraint or layer.embeddings_regularizer):
            count = max(1, min(servers, size // min_shard_bytes, int(layer.input_dim)))
        if count == 1:
            usual(layer, input_shape)
            # Past Keras's own setter: what is saved of a layer does not know of it.
            vars(layer)["call"] = partial(_looked_up, layer, layer.call)
        else:
            layer.__class__ = _ShardedTable
            layer._shards, layer.built = _cut(layer, count), True
        return None

    return patched(keras.layers.Embedding, {"build": build})


def check(model: keras.Model, min_shard_bytes: int | None) -> list[str]:
    """Returns warnings of what stays whole of `model`; refuses an optimizer that would treat shards otherwise."""
    if min_shard_bytes is None:
        return []
    cut = [layer for layer in model._flatten_layers() if isinstance(layer, _ShardedTable) and len(layer._shards) > 1]
    for optimizer in updating(model.optimizer) if cut else ():
        clips, pieces = optimizer.clipnorm is not None, f"{cut[0].path} is cut into {len(cut[0]._shards)} shards"
        if clips or isinstance(optimizer, _OF_WHOLE_VARIABLES):
            expected = f"an optimizer that treats each weight by itself, since {pieces}"
            received = "clipnorm" if clips else type(optimizer).__name__.lower()
            raise ModelError(expected, received, "strategy.min_shard_bytes=null, or train.optimizer=adam")
    embeddings = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.Embedding)]
    of_tables = {id(weight) for layer in embeddings for weight in layer.weights}
    whole = [variable for variable in model.trainable_variables if not _SHARD.search(variable.path)]
    odd = "its layer has a constraint or regularizer, or is not a plain Embedding"
    return [
        f"{variable.path} ({bytes_of(variable):,} bytes) stays whole on one server: "
        f"{odd if id(variable) in of_tables else 'only embeddings can be cut'}."
        for variable in whole
        if bytes_of(variable) >= 2 * min_shard_bytes
    ]


def whole(model: keras.Model, make: Callable[[], keras.Model]) -> keras.Model:
    """The model; where a layer was built in shards the same one made without servers, with its weights and state."""
    if not any(isinstance(layer, _ShardedTable) for layer in model._flatten_layers()):
        return model
    plain = make()
    for ours, theirs in ((model.variables, plain.variables), (model.optimizer.variables, plain.optimizer.variables)):
        for shards, variable in zip(grouped(ours), theirs, strict=True):
            variable.assign(joined(shards))
    return plain


def grouped(variables: Sequence[keras.Variable]) -> list[list[keras.Variable]]:
    """The variables, those that are shards of one table together."""
    groups: dict[str, list[keras.Variable]] = {}
    for place, variable in enumerate(variables):
        name, shards = _SHARD.subn("", variable.path)
        groups.setdefault(name if shards else f"{place}", []).append(variable)
    return list(groups.values())


def joined(shards: Sequence[keras.Variable]) -> np.ndarray:
    """The value of a group of variables, as this process has it in its first copy."""
    values = [np.array(getattr(shard.value, "values", (shard.value,))[0]) for shard in shards]
    return np.concatenate(values) if len(values) > 1 else values[0]


def weights(model: keras.Model) -> list[np.ndarray]:
    """The values of a model's weights, tables that are cut as one each."""
    return [joined(shards) for shards in grouped(model.weights)]


def shards(model: keras.Model) -> list[keras.Variable]:
    """The variables of which a step looks up rows, and never reads the whole."""
    layers = model._flatten_layers()
    whole = [layer._embeddings for layer in layers if getattr(vars(layer).get("call"), "func", None) is _looked_up]
    return [*whole, *(shard for layer in layers if isinstance(layer, _ShardedTable) for shard in layer._shards)]


def _looked_up(layer: keras.layers.Embedding, usual: Callable[[tf.Tensor], tf.Tensor], inputs: tf.Tensor) -> tf.Tensor:
    # Where rows of a whole table are held, so that only they travel.
    return usual(inputs) if layer.lora_enabled or layer.quantization_mode else _rows(layer, [layer._embeddings], inputs)


class _ShardedTable(keras.layers.Embedding):  # type: ignore[misc]
    """An embedding in shards, which gives its config and its weights, and takes them, as a whole one does."""

    _shards: Sequence[keras.Variable]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return _rows(self, self._shards, inputs)

    @property
    def embeddings(self) -> tf.Tensor:
        return tf.concat([_held(shard) for shard in self._shards], 0)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> keras.layers.Embedding:
        return keras.layers.Embedding(**config)

    def enable_lora(self, *args: object, **kwargs: object) -> None:
        raise ModelError("a whole table for enable_lora", f"{self.path} in shards", "strategy.min_shard_bytes=null")

    def save_own_variables(self, store: dict[str, Any]) -> None:
        store["0"] = joined(self._shards)

    def load_own_variables(self, store: Mapping[str, Any]) -> None:
        ends = np.cumsum([shard.shape[0] for shard in self._shards])
        for shard, rows in zip(self._shards, np.split(np.asarray(store["0"]), ends[:-1]), strict=True):
            shard.assign(rows)

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        if len(weights) == 1:
            self.load_own_variables({"0": weights[0]})
        else:
            super().set_weights(weights)


# By these names Keras finds the class of a config, and the weights of a layer in a file.
_ShardedTable.__module__, _ShardedTable.__name__ = "keras.layers", "Embedding"


def _rows(layer: keras.layers.Embedding, shards: Sequence[keras.Variable], inputs: tf.Tensor) -> tf.Tensor:
    ids = inputs if inputs.dtype in ("int32", "int64") else keras.ops.cast(inputs, "int32")
    # As Keras has it, a negative number counts from the end.
    ids = tf.where(ids < 0, ids + layer.input_dim, ids)
    rows = tf.nn.embedding_lookup([_held(shard) for shard in shards], ids)
    return keras.ops.cast(rows, dtype=layer.compute_dtype)


def _held(shard: keras.Variable) -> tf.Variable | tf.Tensor:
    """Returns what holds a shard, or its first value where Keras only asks for shapes, and makes no variable yet."""
    return shard.value if shard._value is None else shard._value


def _cut(layer: keras.layers.Embedding, count: int) -> list[keras.Variable]:
    """Returns the layer's shards by rows, the first longer by one where these do not divide, with initial values."""

    @cache
    def whole(dtype: str | None) -> tf.Tensor:
        # Also where Keras only asks for shapes, in graphs of which none may use what another has.
        with tf.init_scope():
            return layer.embeddings_initializer((layer.input_dim, layer.output_dim), dtype=dtype)

    def part(rows: np.ndarray, shape: tuple[int, int], dtype: str | None = None) -> tf.Tensor:
        return whole(dtype)[int(rows[0]) : int(rows[-1]) + 1]

    parts, name = np.array_split(np.arange(layer.input_dim), count), f"_of_{count}"
    return [
        layer.add_weight(
            shape=(len(rows), layer.output_dim), initializer=partial(part, rows), name=f"embeddings_shard_{place}{name}"
        )
        for place, rows in enumerate(parts)
    ]

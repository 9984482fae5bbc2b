"""Embedding tables on parameter servers: cut into shards where they are large, and read by the row.

By itself Keras fetches a whole table to look up a few of its rows, and fails where TensorFlow has cut one.
"""

import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import keras
import numpy as np
import tensorflow as tf

from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow.patched import patched
from pipeline.worker.variables import bytes_of, updating

# Optimizers that look at a variable as a whole: they do something else with a part of it.
_OF_WHOLE_VARIABLES = (keras.optimizers.Adafactor, keras.optimizers.Lamb, keras.optimizers.Muon)
_SHARD = re.compile(r"_shard_\d+_of_\d+")


def on_servers(servers: int, min_shard_bytes: int | None) -> AbstractContextManager[None]:
    """Inside, embeddings are tables on `servers`, cut evenly by rows into shards of `min_shard_bytes` or more."""
    usual = keras.layers.Embedding.build

    def build(layer: keras.layers.Embedding, input_shape: Sequence[int | None] | None = None) -> None:
        plain = type(layer) is keras.layers.Embedding and not layer.lora_rank and not layer.quantization_mode
        if layer.built or not plain:
            usual(layer, input_shape)
            return
        layer.__class__ = _ShardedTable
        if (count := _shards(layer, servers, min_shard_bytes)) == 1:
            usual(layer, input_shape)
            layer._shards = [layer._embeddings]
        else:
            layer._shards = _cut(layer, count)
            layer.built = True

    return patched(keras.layers.Embedding, {"build": build})


def check(model: keras.Model, min_shard_bytes: int | None) -> list[str]:
    """Returns warnings of what stays whole of `model`; refuses an optimizer that would treat shards otherwise."""
    if min_shard_bytes is None:
        return []
    cut = [layer for layer in model._flatten_layers() if isinstance(layer, _ShardedTable) and len(layer._shards) > 1]
    for optimizer in updating(model.optimizer) if cut else ():
        if not isinstance(optimizer, _OF_WHOLE_VARIABLES) and optimizer.clipnorm is None:
            continue
        what = "clipnorm" if optimizer.clipnorm is not None else type(optimizer).__name__.lower()
        raise ModelError(
            f"an optimizer that treats each weight by itself, since {cut[0].path} is cut into "
            f"{len(cut[0]._shards)} shards",
            what,
            "strategy.min_shard_bytes=null, or train.optimizer=adam",
        )
    whole = [variable for variable in model.trainable_variables if not _SHARD.search(variable.path)]
    return [
        f"{variable.path} ({bytes_of(variable):,} bytes) stays whole on one server: {_reason(model, variable)}."
        for variable in whole
        if bytes_of(variable) >= 2 * min_shard_bytes
    ]


def whole(model: keras.Model, plain: keras.Model) -> keras.Model:
    """`plain`, the same model made without servers, with the weights and the optimizer's state of `model`."""
    for ours, theirs in (
        (model.variables, plain.variables),
        (model.optimizer.variables, plain.optimizer.variables),
    ):
        for shards, variable in zip(grouped(ours), theirs, strict=True):
            variable.assign(joined(shards))
    return plain


def grouped(variables: Sequence[keras.Variable]) -> list[list[keras.Variable]]:
    """The variables, those that are shards of one table together."""
    groups: dict[str, list[keras.Variable]] = {}
    for place, variable in enumerate(variables):
        shard = _SHARD.search(variable.path)
        key = _SHARD.sub("", variable.path) if shard else f"{place}"
        groups.setdefault(key, []).append(variable)
    return list(groups.values())


def joined(shards: Sequence[keras.Variable]) -> np.ndarray:
    """The value of a group of variables, as this process has it in its first copy."""
    values = [np.array(getattr(shard.value, "values", (shard.value,))[0]) for shard in shards]
    return np.concatenate(values) if len(values) > 1 else values[0]


def weights(model: keras.Model) -> list[np.ndarray]:
    """The values of a model's weights, tables that are cut as one each."""
    return [joined(shards) for shards in grouped(model.weights)]


def has_tables(model: keras.Model) -> bool:
    """True if a layer of `model` was built as a table on servers, which is not to be saved as it is."""
    return any(isinstance(layer, _ShardedTable) for layer in model._flatten_layers())


def shards(model: keras.Model) -> list[keras.Variable]:
    """The variables of which a step looks up rows, and never reads the whole."""
    return [shard for layer in model._flatten_layers() if isinstance(layer, _ShardedTable) for shard in layer._shards]


class _ShardedTable(keras.layers.Embedding):  # type: ignore[misc]
    """An embedding whose rows are looked up where they are held, so that only they travel."""

    _shards: Sequence[keras.Variable]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        ids = inputs if inputs.dtype in ("int32", "int64") else keras.ops.cast(inputs, "int32")
        rows = tf.nn.embedding_lookup([shard._value for shard in self._shards], ids)
        return keras.ops.cast(rows, dtype=self.compute_dtype)

    @property
    def embeddings(self) -> tf.Tensor | keras.Variable:
        """The whole table, fetched from the servers."""
        return self._shards[0] if len(self._shards) == 1 else tf.concat([shard._value for shard in self._shards], 0)


def _shards(layer: keras.layers.Embedding, servers: int, min_shard_bytes: int | None) -> int:
    if min_shard_bytes is None or layer.embeddings_constraint or layer.embeddings_regularizer:
        return 1
    size: int = layer.input_dim * layer.output_dim * tf.as_dtype(layer.variable_dtype).size
    return max(1, min(servers, size // min_shard_bytes, int(layer.input_dim)))


def _cut(layer: keras.layers.Embedding, count: int) -> list[keras.Variable]:
    """Returns the layer's shards by rows, the first longer by one where these do not divide, with the table's initial
    values.
    """
    whole: list[tf.Tensor] = []

    def part(start: int, stop: int) -> Callable[..., tf.Tensor]:
        def initial(shape: tuple[int, int], dtype: str | None = None) -> tf.Tensor:
            if not whole:
                whole.append(layer.embeddings_initializer((layer.input_dim, layer.output_dim), dtype=dtype))
            return whole[0][start:stop]

        return initial

    edges = np.cumsum([0, *(len(rows) for rows in np.array_split(np.arange(layer.input_dim), count))]).tolist()
    return [
        layer.add_weight(
            shape=(stop - start, layer.output_dim),
            initializer=part(start, stop),
            name=f"embeddings_shard_{place}_of_{count}",
            trainable=True,
        )
        for place, (start, stop) in enumerate(itertools.pairwise(edges))
    ]


def _reason(model: keras.Model, variable: keras.Variable) -> str:
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Embedding) and any(weight is variable for weight in layer.weights):
            return "its layer has a constraint or regularizer, or is not a plain Embedding"
    return "only embeddings can be cut"

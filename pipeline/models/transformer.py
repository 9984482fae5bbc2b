"""Turns sequences of tokens into what comes next: a decoder-only transformer of any size."""

from collections.abc import Sequence
from typing import Any

import keras
from keras import layers, ops

from pipeline.errors import refuse

# The rotary embedding's longest wavelength over 2 pi, in tokens (Su et al., 2021).
_ROTARY_BASE = 10_000.0
_INITIAL_DEVIATION = 0.02


# A block has 12 width^2 parameters: 4 of attention, 8 of its dense layers.
SIZES = {
    "tiny": {"blocks": 4, "width": 128, "heads": 4},
    "10m": {"blocks": 6, "width": 384, "heads": 6},
    "100m": {"blocks": 8, "width": 1024, "heads": 16},
    "1b": {"blocks": 20, "width": 2048, "heads": 16},
}


def transformer(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    size: str = "tiny",
    blocks: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    dropout: float = 0.0,
    flash_attention: bool | None = None,
    learning_rate: float = 0.001,
) -> keras.Model:
    """A compiled language model: int32 tokens [batch, length] to float32 logits [batch, length, num_classes].

    The logits at a token are those of the next one. Blocks of causal attention with rotary positions (Su et al., 2021)
    and of a dense layer four times as wide, each after an RMS normalization and added to what went in; the embedding
    serves as the last layer, too. It learns by cross-entropy with AdamW; its metrics are `accuracy` and `perplexity`.

    >>> transformer(input_shape=(64,), num_classes=256, blocks=2, width=8, heads=2).count_params()
    3624
    """
    shape = list(input_shape) if isinstance(input_shape, Sequence) else input_shape
    refuse(
        (not isinstance(shape, list) or len(shape) != 1, "sequences of tokens [length] for model=transformer",
         f"examples of shape {shape}", "data=text"),
        (size not in SIZES, f"a size of model=transformer ({', '.join(SIZES)})", size, "model.build.size=tiny"),
    )  # fmt: skip
    usual, typed = SIZES[size], {"blocks": blocks, "width": width, "heads": heads}
    depth, units, parts = (usual | {name: count for name, count in typed.items() if count is not None}).values()
    refuse(
        (depth < 1, "at least one block for model=transformer", depth, f"model.build.blocks={usual['blocks']}"),
        (parts < 1 or units < 1 or units % (2 * max(parts, 1)),
         f"heads that each have an even number of {units} for model=transformer", parts,
         f"model.build.width={64 * max(parts, 1)}"),
    )  # fmt: skip
    normal = keras.initializers.RandomNormal(stddev=_INITIAL_DEVIATION)
    tokens = keras.Input(tuple(input_shape), dtype="int32", name="tokens")
    # Logits in float32 whatever the precision policy: in 16 bits, those of unlikely tokens are all the same.
    embedding = layers.ReversibleEmbedding(
        num_classes, units, embeddings_initializer=normal, reverse_dtype="float32", name="embedding"
    )
    x = embedding(tokens)
    for place in range(depth):
        x = Block(parts, dropout, flash_attention, name=f"block_{place}")(x)
    logits = embedding(layers.RMSNormalization(name="norm")(x), reverse=True)
    model = keras.Model(tokens, logits, name="transformer")
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate, beta_2=0.95),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", Perplexity()],
    )
    return model


@keras.saving.register_keras_serializable(package="pipeline")
class Block(layers.Layer):  # type: ignore[misc]
    """Attention, then a dense layer four times as wide: [batch, length, width] to the same."""

    def __init__(self, heads: int, dropout: float = 0.0, flash_attention: bool | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.heads, self.dropout, self.flash_attention = heads, dropout, flash_attention

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Makes the layers, whose kernels are [width, …] where they widen and […, width] where they narrow."""
        width = int(input_shape[-1] or 0)
        self.attention_norm = layers.RMSNormalization(name="attention_norm", dtype=self.dtype_policy)
        self.attention = Attention(self.heads, self.flash_attention, name="attention", dtype=self.dtype_policy)
        self.dense_norm = layers.RMSNormalization(name="dense_norm", dtype=self.dtype_policy)
        self.widen, self.narrow = (
            _dense(units, name, self.dtype_policy) for units, name in ((4 * width, "widen"), (width, "narrow"))
        )
        self.drop = layers.Dropout(self.dropout, name="drop")
        for layer in (self.attention_norm, self.attention, self.dense_norm, self.widen):
            layer.build(input_shape)
        self.narrow.build((*input_shape[:-1], 4 * width))
        self.drop.build(input_shape)

    def call(self, x: Any, training: bool | None = None) -> Any:
        """[batch, length, width] to the same."""
        x += self.drop(self.attention(self.attention_norm(x)), training=training)
        return x + self.drop(self.narrow(ops.gelu(self.widen(self.dense_norm(x)))), training=training)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """As what goes in."""
        return tuple(input_shape)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make it again."""
        own = {"heads": self.heads, "dropout": self.dropout, "flash_attention": self.flash_attention}
        return {**super().get_config(), **own}


class Attention(layers.Layer):  # type: ignore[misc]
    """Causal attention of several heads over [batch, length, width], with rotary positions."""

    def __init__(self, heads: int, flash_attention: bool | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.heads, self.flash_attention = heads, flash_attention

    def build(self, input_shape: Sequence[int | None]) -> None:
        """Makes the four projections, each [width, width]: heads lie side by side."""
        width = int(input_shape[-1] or 0)
        self.query, self.key, self.value, self.projection = (
            _dense(width, name, self.dtype_policy) for name in ("query", "key", "value", "projection")
        )
        for layer in (self.query, self.key, self.value, self.projection):
            layer.build(input_shape)

    def call(self, x: Any) -> Any:
        """[batch, length, width] to the same."""
        batch, length, _ = ops.shape(x)
        head_width = x.shape[-1] // self.heads
        by_head = (batch, length, self.heads, head_width)
        query, key, value = (ops.reshape(project(x), by_head) for project in (self.query, self.key, self.value))
        frequencies = _ROTARY_BASE ** (-ops.arange(0, head_width, 2, dtype="float32") / head_width)
        # Places beyond 256 are not to be told apart in 16 bits.
        angles = ops.expand_dims(ops.arange(length, dtype="float32"), 1) * frequencies
        angles = ops.expand_dims(angles, 1)
        cosine, sine = ops.cast(ops.cos(angles), self.compute_dtype), ops.cast(ops.sin(angles), self.compute_dtype)
        query, key = (_rotated(each, cosine, sine) for each in (query, key))
        mixed = ops.dot_product_attention(query, key, value, is_causal=True, flash_attention=self.flash_attention)
        return self.projection(ops.reshape(mixed, ops.shape(x)))


@keras.saving.register_keras_serializable(package="pipeline")
class Perplexity(keras.metrics.SparseCategoricalCrossentropy):  # type: ignore[misc]
    """The exponential of the mean cross-entropy of logits: among how many tokens it is as if one had to guess."""

    def __init__(self, name: str = "perplexity", from_logits: bool = True, **options: Any) -> None:
        super().__init__(name=name, from_logits=from_logits, **options)

    def result(self) -> Any:
        """A scalar of at least 1."""
        return ops.exp(super().result())


def _dense(units: int, name: str, dtype: Any) -> layers.Dense:
    normal = keras.initializers.RandomNormal(stddev=_INITIAL_DEVIATION)
    return layers.Dense(units, use_bias=False, kernel_initializer=normal, name=name, dtype=dtype)


def _rotated(x: Any, cosine: Any, sine: Any) -> Any:
    """[batch, length, head, head_width], each pair of whose numbers is turned by its token's angle."""
    first, second = ops.split(x, 2, axis=-1)
    return ops.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)

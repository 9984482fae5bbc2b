"""Makes data sets of any size out of arguments: class means under noise, and a log of clicks with a signal planted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.data.errors import expect_at_least, refuse
from pipeline.data.image_sets import Part

if TYPE_CHECKING:
    import tensorflow as tf

_MEAN_CELLS = 4
_BLOCK_EXAMPLES = 64
# Examples are drawn in blocks of so many, each from its number alone, so that any process can make any of them.
BLOCK = 1_024
# The log-odds of a click when nothing speaks for or against it, and the share of the signal's variance that the
# categories have; the dense features have the rest.
_BIAS = -1.0
_OF_CATEGORIES = 0.7


def synthetic(
    *,
    shape: Sequence[int] = (28, 28, 1),
    num_classes: int = 10,
    train_examples: int = 8_192,
    validation_examples: int = 1_024,
    noise: float = 0.7,
    seed: int = 0,
) -> tuple[Part, Part]:
    """Two parts of one distribution: float32 [examples, *shape] in [0, 1], and int32 [examples].

    An example is `(1 - noise) * mean of its class + noise * uniform noise`: a linear model can learn it.
    """
    refuse((len(shape) < 1 or min(shape) < 1, "a shape of one or more sizes of at least 1 for data=synthetic",
            list(shape), "'data.build.shape=[28,28,1]'"))  # fmt: skip
    limits = [("num_classes", num_classes, 2, 10), ("train_examples", train_examples, 1, 8_192),
              ("validation_examples", validation_examples, 0, 1_024), ("seed", seed, 0, 0)]  # fmt: skip
    expect_at_least("synthetic", limits)
    refuse((not 0 <= noise <= 1, "noise between 0 and 1 for data=synthetic", noise, "data.build.noise=0.7"))
    # A stream for each use: the validation part stays the same however many examples train.
    streams = [np.random.default_rng([seed, use]) for use in range(3)]
    # All axes but the last are cut into a few cells of one value, wide enough for a convolution to see.
    cells = [min(size, _MEAN_CELLS) for size in shape[:-1]]
    means = np.float32(1 - noise) * streams[0].random((num_classes, *cells, shape[-1]), dtype=np.float32)
    train = _draw(means, shape, train_examples, noise, streams[1])
    return train, _draw(means, shape, validation_examples, noise, streams[2])


def _draw(
    means: NDArray[np.float32], shape: Sequence[int], examples: int, noise: float, rng: np.random.Generator
) -> Part:
    """Labels at random, and their means under noise; in blocks, since all means at once double the memory."""
    labels = rng.integers(len(means), size=examples, dtype=np.int32)
    x = rng.random((examples, *shape), dtype=np.float32)
    for start in range(0, examples, _BLOCK_EXAMPLES):
        block, cells = x[start : start + _BLOCK_EXAMPLES], means[labels[start : start + _BLOCK_EXAMPLES]]
        # Each cell is repeated until an example has its shape.
        for axis, size in enumerate(shape, start=1):
            cells = cells.take(np.arange(size) * cells.shape[axis] // size, axis=axis)
        block *= np.float32(noise)
        block += cells
    return np.minimum(x, 1, out=x), labels


def clicks(
    *,
    categories: Sequence[int] = (1_000, 200, 20),
    dense_features: int = 8,
    train_examples: int = 65_536,
    validation_examples: int = 8_192,
    signal: float = 1.6,
    seed: int = 0,
    shard: int = 0,
    shards: int = 1,
) -> tuple[tf.data.Dataset, tf.data.Dataset]:
    """Two parts of one distribution, each a data set of single examples `({"ids", "dense"}, clicked)`.

    `ids` is int32 [columns], one category for each of `categories`, low numbers more often than high ones; `dense` is
    float32 [dense_features], standard normal; `clicked` is int32, 0 or 1. The log-odds of a click are -1 plus an effect
    of each category plus a weighted sum of the dense features, together with a standard deviation of about `signal`:
    with 1.6, knowing them gives an area under the ROC curve of 0.82. Process `shard` of `shards` makes every
    `shards`-th block of 1,024 examples.
    """
    refuse((len(categories) < 1 or min(categories) < 1,
            "categories of one or more columns of at least 1 for data=clicks", list(categories),
            "'data.build.categories=[1000,200,20]'"))  # fmt: skip
    limits = [("dense_features", dense_features, 1, 8), ("train_examples", train_examples, 1, 65_536),
              ("validation_examples", validation_examples, 0, 8_192), ("seed", seed, 0, 0),
              ("signal", signal, 0, 1.6)]  # fmt: skip
    expect_at_least("clicks", limits)
    import tensorflow as tf

    keys = tf.random.split([seed, 0], 4)
    deviation = signal * math.sqrt(_OF_CATEGORIES / len(categories))
    effects = [
        deviation * tf.random.stateless_normal([size], tf.random.fold_in(keys[0], column))
        for column, size in enumerate(categories)
    ]
    weights = tf.math.l2_normalize(tf.random.stateless_normal([dense_features], keys[1]))
    weights *= signal * math.sqrt(1 - _OF_CATEGORIES)
    sizes = tf.constant(list(categories), tf.float32)

    def block(key: tf.Tensor, number: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        keys = tf.random.split(tf.random.fold_in(key, number), 3)
        # Squared, a uniform number is often small: a few categories have most of the examples.
        ids = tf.cast(tf.square(tf.random.stateless_uniform([BLOCK, len(effects)], keys[0])) * sizes, tf.int32)
        dense = tf.random.stateless_normal([BLOCK, weights.shape[0]], keys[1])
        odds = _BIAS + tf.linalg.matvec(dense, weights)
        for column, effect in enumerate(effects):
            odds += tf.gather(effect, ids[:, column])
        clicked = tf.random.stateless_uniform([BLOCK], keys[2]) < tf.sigmoid(odds)
        return {"ids": ids, "dense": dense}, tf.cast(clicked, tf.int32)

    def part(key: tf.Tensor, examples: int) -> tf.data.Dataset:
        # This shard's examples, in blocks that depend on their numbers and the key alone.
        blocks = -(-examples // BLOCK)
        own = range(shard, blocks, shards)
        count = len(own) * BLOCK - (blocks * BLOCK - examples if blocks - 1 in own else 0)
        make = tf.autograph.experimental.do_not_convert(partial(block, key))
        dataset = tf.data.Dataset.range(shard, max(blocks, shard), shards).map(make)
        return dataset.unbatch().take(count).apply(tf.data.experimental.assert_cardinality(count))

    return part(keys[2], train_examples), part(keys[3], validation_examples)

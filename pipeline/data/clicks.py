"""Makes a log of clicks of any length while it is read: who saw what, and who clicked, with a signal planted in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.data.errors import DataError, expect_at_least

if TYPE_CHECKING:
    import tensorflow as tf

# Examples are drawn in blocks of so many, each from its number alone, so that any process can make any of them.
BLOCK = 1_024
# The log-odds of a click when nothing speaks for or against it, and the share of the signal's variance that the
# categories have; the dense features have the rest.
_BIAS = -1.0
_OF_CATEGORIES = 0.7


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

    >>> train, validation = clicks(train_examples=3, validation_examples=2)
    >>> len(list(train)), train.element_spec[0]["ids"].shape
    (3, TensorShape([3]))
    """
    _check(categories, dense_features, train_examples, validation_examples, signal, seed)
    import tensorflow as tf

    keys = tf.random.split([seed, 0], 4)
    deviation = signal * math.sqrt(_OF_CATEGORIES / len(categories))
    effects = [
        deviation * tf.random.stateless_normal([size], tf.random.fold_in(keys[0], column))
        for column, size in enumerate(categories)
    ]
    weights = tf.math.l2_normalize(tf.random.stateless_normal([dense_features], keys[1]))
    weights *= signal * math.sqrt(1 - _OF_CATEGORIES)
    train = _log(effects, weights, keys[2], train_examples, shard, shards)
    return train, _log(effects, weights, keys[3], validation_examples, shard, shards)


def _log(
    effects: Sequence[tf.Tensor], weights: tf.Tensor, key: tf.Tensor, examples: int, shard: int, shards: int
) -> tf.data.Dataset:
    """This shard's examples, in blocks that depend on their numbers and the key alone."""
    import tensorflow as tf

    sizes = tf.constant([len(effect) for effect in effects], tf.float32)
    blocks = -(-examples // BLOCK)
    own_effects = range(shard, blocks, shards)
    count = len(own_effects) * BLOCK - (blocks * BLOCK - examples if blocks - 1 in own_effects else 0)

    def block(number: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        keys = tf.random.split(tf.random.fold_in(key, number), 3)
        # Squared, a uniform number is often small: a few categories have most of the examples.
        ids = tf.cast(tf.square(tf.random.stateless_uniform([BLOCK, len(effects)], keys[0])) * sizes, tf.int32)
        dense = tf.random.stateless_normal([BLOCK, weights.shape[0]], keys[1])
        odds = _BIAS + tf.linalg.matvec(dense, weights)
        for column, effect in enumerate(effects):
            odds += tf.gather(effect, ids[:, column])
        clicked = tf.random.stateless_uniform([BLOCK], keys[2]) < tf.sigmoid(odds)
        return {"ids": ids, "dense": dense}, tf.cast(clicked, tf.int32)

    dataset = tf.data.Dataset.range(shard, max(blocks, shard), shards).map(
        tf.autograph.experimental.do_not_convert(block)
    )
    return dataset.unbatch().take(count).apply(tf.data.experimental.assert_cardinality(count))


def _check(
    categories: Sequence[int],
    dense_features: int,
    train_examples: int,
    validation_examples: int,
    signal: float,
    seed: int,
) -> None:
    """Refuses what cannot be made, in words.

    >>> _check([10], dense_features=1, train_examples=1, validation_examples=0, signal=1.0, seed=0)
    """
    if len(categories) < 1 or min(categories) < 1:
        raise DataError(
            "categories of one or more columns of at least 1 for data=clicks",
            list(categories),
            "'data.build.categories=[1000,200,20]'",
        )
    limits = (
        ("dense_features", dense_features, 1, 8),
        ("train_examples", train_examples, 1, 65_536),
        ("validation_examples", validation_examples, 0, 8_192),
        ("seed", seed, 0, 0),
        ("signal", signal, 0, 1.6),
    )
    expect_at_least("clicks", limits)

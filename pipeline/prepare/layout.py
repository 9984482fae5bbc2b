"""The number of shards and the examples of each: decided before any is written, by arithmetic and a seed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.data.split import split
from pipeline.errors import UserError

MIB = 2**20


def file_name(split: str, number: int, shards: int) -> str:
    """The name of a shard.

    >>> file_name("train", 3, 12)
    'train-00003-of-00012.tfrecord'
    """
    return f"{split}-{number:05d}-of-{shards:05d}.tfrecord"


def shard_count(examples: int, total_bytes: int, shard_bytes: float, workers: int | None) -> int:
    """The number of shards of about `shard_bytes`; as many as workers, or a multiple, if there are enough examples.

    >>> shard_count(1_000, total_bytes=250, shard_bytes=100, workers=None)
    3
    >>> shard_count(1_000, total_bytes=250, shard_bytes=100, workers=2)
    4
    >>> shard_count(5, total_bytes=250, shard_bytes=1, workers=2)
    4
    >>> shard_count(1, total_bytes=250, shard_bytes=1, workers=2)
    1
    """
    by_size = max(1, min(examples, int(-(-total_bytes // shard_bytes))))
    if not workers or examples < workers:
        return by_size if not workers else max(1, examples)
    return min(-(-by_size // workers), examples // workers) * workers


def check(examples: int, shards: int | None, workers: int | None) -> None:
    """Refuses more shards or workers than there are training examples. Raises `UserError`.

    >>> check(examples=10, shards=5, workers=5)
    """
    if workers and examples < workers:
        raise UserError(f"at least one training example for each of {workers} workers", examples, f"workers={examples}")
    if shards and examples < shards:
        near = examples // (workers or 1) * (workers or 1)
        raise UserError(f"at least one training example in each of {shards} shards", examples, f"shards={near}")


def orders(
    whole: NDArray[np.int64], groups: NDArray[np.int64] | None, fraction: float, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The rows that train and those that are held out, each in the order in which they fill shards.

    `whole` are the rows that can be used, `groups` the class of each of these, where there are classes.

    >>> train, validation = orders(np.arange(10), None, fraction=0.2, seed=0)
    >>> len(train), len(validation), len({*train, *validation})
    (8, 2, 10)
    """
    if not fraction:
        return shuffled(whole, seed, 0), whole[:0]
    train, held_out = split(np.zeros(len(whole), np.int64) if groups is None else groups, fraction, seed)
    return whole[train], whole[held_out]


def shuffled(rows: NDArray[np.int64], seed: int, use: int) -> NDArray[np.int64]:
    """The rows in an order that the seed decides, and what they are used for."""
    return np.random.default_rng([seed, use]).permutation(rows)


def share(order: NDArray[np.int64], number: int, shards: int) -> NDArray[np.int64]:
    """The rows of one shard: each has as many as the others, or one more.

    >>> [share(np.arange(5), number, 2).tolist() for number in range(2)]
    [[0, 1], [2, 3, 4]]
    """
    return order[number * len(order) // shards : (number + 1) * len(order) // shards]

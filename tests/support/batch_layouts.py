"""How batches are laid over replicas, and what is in them."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipeline.worker.data.batches import DEFAULT, Data
from pipeline.worker.data.reading import Part, Reading
from pipeline.worker.layout import BEGINNING, BatchLayout, Position

EXAMPLES = 50
ONE = BatchLayout(global_batch=12, replicas=1, first=0, local=1, counts=(EXAMPLES,))
LAYOUTS = {
    "one replica": ONE,
    "second of two processes": BatchLayout(12, replicas=4, first=2, local=2, counts=(EXAMPLES,), process=1),
    "longer shard": BatchLayout(12, replicas=2, first=0, local=1, counts=(27, 23)),
    "shorter shard": BatchLayout(12, replicas=2, first=1, local=1, counts=(30, 18), process=1),
    "left out": BatchLayout(12, replicas=2, first=0, local=2, counts=(EXAMPLES,), last="left out"),
    "padded": BatchLayout(12, replicas=2, first=0, local=2, counts=(EXAMPLES,), last="padded"),
}


def stream(
    part: Part, layout: BatchLayout, shuffle: bool, seed: int, position: Position = BEGINNING,
    reading: Reading = DEFAULT,
) -> tf.data.Dataset:  # fmt: skip
    return Data(part, layout, shuffle, seed, reading).stream(position)


def leaves(batches: tf.data.Dataset) -> list[list[Any]]:
    return [[leaf.tolist() for leaf in tf.nest.flatten(step)] for step in batches.as_numpy_iterator()]


def expect_to_go_on(
    part: Part, layout: BatchLayout, shuffle: bool, positions: Sequence[tuple[int, int]], epochs: int = 4
) -> None:
    """What begins at a step of an epoch is what the stream from the beginning has from there on."""
    whole = leaves(stream(part, layout, shuffle, seed=0).take(epochs * layout.steps))
    for epoch, step in positions:
        tf.random.set_seed(epoch)
        rest = stream(part, layout, shuffle, 0, Position(epoch, step * layout.global_batch))
        done = epoch * layout.steps + step
        assert leaves(rest.take(epochs * layout.steps - done)) == whole[done:], (epoch, step)


def part_of(make: Callable[[int], Part], layout: BatchLayout) -> Part:
    """What this process reads of so many examples as `make` makes."""
    return make(layout.counts[layout.process] if layout.sharded else layout.examples)


def labels(batches: tf.data.Dataset) -> list[list[float]]:
    """The labels of each step's batches, over the local replicas."""
    return [[float(label) for _, y in replicas for label in y] for _, replicas in batches.as_numpy_iterator()]

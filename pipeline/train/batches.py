"""Lays the examples of each global batch over the replicas, so that each is seen once an epoch.

Step s of an epoch trains examples s*B to (s+1)*B of the epoch's order, whatever the number of processes; replica r
gets its even share of them, also of a smaller last batch. The order is drawn from the seed and the epoch alone.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

# A data set that cannot be indexed is shuffled through a window of this many examples.
SHUFFLE_WINDOW = 10_000


@dataclass(frozen=True)
class Layout:
    """Where this process stands: it feeds `local` replicas, from number `first` on, of `replicas`.

    `counts` holds the examples of each process where the data set's function has already taken this process's
    shard, and the one total where every process reads everything.

    `last` says what becomes of an epoch's last global batch where too few examples are left for it: it is "short",
    "left out", or "padded" with examples that do not count. Without short ones all batches have one static shape.
    """

    global_batch: int
    replicas: int
    first: int
    local: int
    counts: tuple[int, ...]
    process: int = 0
    last: Literal["short", "left out", "padded"] = "short"

    @property
    def sharded(self) -> bool:
        """Does each process read a shard of its own?"""
        return len(self.counts) > 1

    @property
    def examples(self) -> int:
        """Examples in an epoch, over all processes."""
        return sum(self.counts)

    @property
    def steps(self) -> int:
        """Steps in an epoch."""
        share = self.global_batch // len(self.counts)
        if self.last == "left out":
            return min(count // share for count in self.counts)
        return max(-(-count // share) for count in self.counts)

    @property
    def always_fed(self) -> bool:
        """Has every replica examples at every step, also at the last and smallest of an epoch?

        >>> Layout(global_batch=128, replicas=2, first=0, local=2, counts=(4_000,)).always_fed
        True
        >>> Layout(global_batch=128, replicas=2, first=0, local=2, counts=(129,)).always_fed
        False
        """
        if self.last != "short":
            return True
        share, parts = self.global_batch // len(self.counts), self.replicas // len(self.counts)
        return all(min(share, count - (self.steps - 1) * share) >= parts for count in self.counts)


def count(part: Any) -> int:
    """Examples in a part: (x, y) arrays, or a `tf.data.Dataset` of single examples, counted by reading if need be."""
    if not isinstance(part, tf.data.Dataset):
        return len(tf.nest.flatten(part)[0])
    known = int(part.cardinality())
    if known == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "Expected a data set of single examples that ends, received one without end. Try dataset.take(examples)."
        )
    return known if known >= 0 else int(part.reduce(np.int64(0), lambda total, _: total + 1))


def stream(part: Any, layout: Layout, shuffle: bool, seed: int) -> tf.data.Dataset:
    """A step's batches for this process's replicas, epoch after epoch without end.

    Yields (examples, batches): float32 scalar, the size of the whole global batch, and for each local replica the
    part's own structure with a leading batch axis of a size that may differ from step to step and may be 0.
    """
    if layout.last != "short":
        make = _static_from_dataset if isinstance(part, tf.data.Dataset) else _static_from_arrays
        batches = make(part, layout, shuffle, seed)
    elif isinstance(part, tf.data.Dataset):
        batches = _from_dataset(part, layout, shuffle, seed)
    else:
        batches = _from_arrays(part, layout, shuffle, seed)
    options = tf.data.Options()
    options.deterministic = True
    if not isinstance(part, tf.data.Dataset):
        # Nothing here can be tuned, and the tuner's thread holds up the end of an iterator for up to a minute.
        options.autotune.enabled = False
    # Said outright, because a strategy otherwise asks all workers at each step whether their data has ended.
    endless = batches.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    return endless.with_options(options).prefetch(2)


def spec(part: Any) -> Any:
    """The structure of a batch of two examples: a tensor of zeros for each leaf of the part."""
    if isinstance(part, tf.data.Dataset):
        return tf.nest.map_structure(lambda leaf: tf.zeros((2, *leaf.shape), leaf.dtype), part.element_spec)
    return tf.nest.map_structure(lambda leaf: tf.zeros((2, *np.shape(leaf)[1:]), np.asarray(leaf).dtype), part)


def order(examples: int, seed: int, epoch: Any) -> Any:
    """The places of an epoch's examples in their order, int64 [examples]; drawn from `seed` and `epoch`, an int64."""
    return tf.random.experimental.stateless_shuffle(tf.range(examples, dtype=tf.int64), seed=[seed, epoch])


def _from_arrays(part: Any, layout: Layout, shuffle: bool, seed: int) -> tf.data.Dataset:
    arrays = tf.nest.map_structure(tf.convert_to_tensor, part)
    mine = layout.counts[layout.process] if layout.sharded else layout.examples

    def epoch(number: Any) -> tf.data.Dataset:
        rows = order(mine, seed, number) if shuffle else tf.range(mine, dtype=tf.int64)

        def batches(step: Any) -> Any:
            start, stops, total = _shares(layout, step)
            chosen = [rows[first:last] for first, last in zip([start, *stops], stops, strict=False)]
            return total, tuple(
                tf.nest.map_structure(lambda array, rows=each: tf.gather(array, rows), arrays) for each in chosen
            )

        return tf.data.Dataset.range(layout.steps).map(_as_written(batches))

    return tf.data.Dataset.counter().flat_map(_as_written(epoch))


def _from_dataset(part: tf.data.Dataset, layout: Layout, shuffle: bool, seed: int) -> tf.data.Dataset:
    if shuffle:
        window = min(max(1, layout.examples), SHUFFLE_WINDOW)
        part = part.shuffle(window, seed=seed, reshuffle_each_iteration=True)
    share = layout.global_batch // len(layout.counts)
    empty = tf.data.Dataset.from_tensors(
        tf.nest.map_structure(lambda leaf: tf.zeros((0, *leaf.shape), leaf.dtype), part.element_spec)
    )
    whole = part.batch(share, num_parallel_calls=tf.data.AUTOTUNE)
    # A shard that is shorter than the others feeds empty batches while they go on.
    whole = whole.concatenate(empty.repeat()).take(layout.steps)

    def batches(step: Any, batch: Any) -> Any:
        start, stops, total = _shares(layout, step)
        base = step * share
        return total, tuple(
            tf.nest.map_structure(lambda leaf, rows=slice(first - base, last - base): leaf[rows], batch)
            for first, last in zip([start, *stops], stops, strict=False)
        )

    return whole.enumerate().map(_as_written(batches)).repeat()


def static_parts(part: Any, layout: Layout) -> list[tuple[Any, Layout]]:
    """A part cut in two, so that batches of static shapes hold each of its examples once, with the layout of each.

    What fills no whole batch comes one example a replica. Then a replica has an example that counts or one that only
    pads, and metrics that know no weights stay exact. The size of the other batches is the one that takes the
    fewest steps.
    """
    examples, replicas = layout.examples, layout.replicas
    most = min(layout.global_batch, examples) // replicas

    def steps(size: int) -> int:
        whole, rest = divmod(examples, size * replicas)
        return whole + -(-rest // replicas)

    size = min(range(most, 0, -1), key=steps, default=1)
    whole = examples - examples % (size * replicas)
    cut = (
        (_cut(part, 0, whole), dataclasses.replace(layout, global_batch=size * replicas, counts=(whole,))),
        (_cut(part, whole, examples), dataclasses.replace(layout, global_batch=replicas, counts=(examples - whole,))),
    )
    lasts: tuple[Literal["left out", "padded"], ...] = ("left out", "padded")
    return [
        (piece, dataclasses.replace(each, last=last))
        for (piece, each), last in zip(cut, lasts, strict=True)
        if each.examples
    ]


def _cut(part: Any, start: int, stop: int) -> Any:
    """Examples `start` to `stop` of a part. Those after the start of a data set are kept, not read past each time."""
    if not isinstance(part, tf.data.Dataset):
        return tf.nest.map_structure(lambda leaf: leaf[start:stop], part)
    return part.skip(start).take(stop - start).cache() if start else part.take(stop)


def _static_from_arrays(part: Any, layout: Layout, shuffle: bool, seed: int) -> tf.data.Dataset:
    arrays = tf.nest.map_structure(tf.convert_to_tensor, part)
    size = layout.global_batch // layout.replicas

    def epoch(number: Any) -> tf.data.Dataset:
        places = order(layout.examples, seed, number) if shuffle else tf.range(layout.examples, dtype=tf.int64)

        def batches(step: Any) -> Any:
            start = step * layout.global_batch
            # A number of rows that is known, unlike that of a slice; the last example pads.
            rows = tf.minimum(start + tf.range(layout.global_batch, dtype=tf.int64), layout.examples - 1)
            chosen = tf.split(tf.gather(places, rows), layout.replicas)
            return _counted(layout, step), tuple(
                tf.nest.map_structure(lambda array, mine=mine: tf.gather(array, tf.ensure_shape(mine, [size])), arrays)
                for mine in chosen
            )

        return tf.data.Dataset.range(layout.steps).map(_as_written(batches))

    return tf.data.Dataset.counter().flat_map(_as_written(epoch))


def _static_from_dataset(part: tf.data.Dataset, layout: Layout, shuffle: bool, seed: int) -> tf.data.Dataset:
    if shuffle:
        part = part.shuffle(min(layout.examples, SHUFFLE_WINDOW), seed=seed, reshuffle_each_iteration=True)
    if layout.last == "padded":
        part = part.concatenate(part.take(1).repeat()).take(layout.steps * layout.global_batch)
    whole = part.batch(layout.global_batch, drop_remainder=True, num_parallel_calls=tf.data.AUTOTUNE)
    size = layout.global_batch // layout.replicas

    def batches(step: Any, batch: Any) -> Any:
        return _counted(layout, step), tuple(
            tf.nest.map_structure(lambda leaf, first=first: leaf[first : first + size], batch)
            for first in range(0, layout.global_batch, size)
        )

    return whole.take(layout.steps).enumerate().map(_as_written(batches)).repeat()


def _counted(layout: Layout, step: Any) -> Any:
    """Examples that count in a step's global batch."""
    return tf.cast(tf.minimum(layout.examples - step * layout.global_batch, layout.global_batch), tf.float32)


def _as_written(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function without AutoGraph's conversion, which takes longer than tracing it."""
    return tf.autograph.experimental.do_not_convert(function)  # type: ignore[no-any-return]


def _shares(layout: Layout, step: Any) -> tuple[Any, list[Any], Any]:
    """(start, the stop of each local replica's share, examples in the global batch) of a step, as tensors."""
    counts = tf.constant(layout.counts, tf.int64)
    share = layout.global_batch // len(layout.counts)
    sizes = tf.clip_by_value(counts - step * share, 0, share)
    size = sizes[layout.process] if layout.sharded else sizes[0]
    parts = layout.local if layout.sharded else layout.replicas
    number = 0 if layout.sharded else layout.first
    edges = [step * share + size * (number + local) // parts for local in range(layout.local + 1)]
    return edges[0], edges[1:], tf.cast(tf.reduce_sum(sizes), tf.float32)

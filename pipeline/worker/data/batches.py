"""Lays the examples of each global batch over the replicas, so that each is seen once an epoch.

Step s of an epoch trains examples s*B to (s+1)*B of the epoch's order, and each replica its even share of them, also of
a smaller last batch. The order is drawn from the seed and the epoch alone, so that training can go on at any position.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from pipeline.data.errors import refuse
from pipeline.data.examples import Examples
from pipeline.private import cache_op, shuffle_op
from pipeline.worker.data import reading as reads
from pipeline.worker.data.reading import Batch, Part, Reading, Spec, Step
from pipeline.worker.layout import BEGINNING, BatchLayout, Position

DEFAULT = Reading()

# (number of an epoch, examples of it that are trained, steps that are left) -> (examples, batches) of each step
Epoch: TypeAlias = Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tf.data.Dataset]

# Without AutoGraph's conversion, which takes longer than tracing a function.
_as_written = tf.autograph.experimental.do_not_convert


@dataclass(frozen=True)
class Data:
    """A part of the data, of any of its kinds, how it is laid over replicas, and how it is read."""

    part: Part
    layout: BatchLayout
    shuffle: bool
    seed: int
    reading: Reading = DEFAULT

    def stream(self, position: Position = BEGINNING) -> tf.data.Dataset:
        """(examples, batches) of each step from the position on, epoch after epoch without end.

        That is the size of the whole global batch, a float32 scalar, and for each local replica the part's structure
        with a leading batch axis of a size that may differ from step to step and may be 0. It is what the stream from
        the beginning comes to; with another global batch, the rest of the epoch is cut anew. So are orders that a data
        set draws itself, but in `repeat` and in `interleave` over others.
        """
        data, reading = self, self.reading
        if isinstance(self.part, tf.data.Dataset) and (reading.servers or self.layout.local < self.layout.replicas):
            # Each makes its own examples alone, as far as that is known to make the same.
            data = dataclasses.replace(self, part=reads.opened(self.part))
        make = reads.maker(data.part, self.seed, reading.classes)
        batches = data.raw_stream(position)
        if make is not None:

            def made(numbered: tf.data.Dataset) -> tf.data.Dataset:
                one = _as_written(lambda number, examples, raw: (examples, tuple(make(number, each) for each in raw)))
                return numbered.map(one, num_parallel_calls=reads.parallel(), deterministic=True)

            batches = reads.made_by(reading.servers, batches, made) if reading.servers else made(batches)
        # Said outright, because a strategy otherwise asks all workers at each step whether their data has ended.
        endless = batches.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
        options = tf.data.Options()
        options.deterministic = True
        if not isinstance(data.part.raw if isinstance(data.part, Examples) else data.part, tf.data.Dataset):
            # Nothing here can be tuned, and the tuner's thread holds up the end of an iterator for up to a minute.
            options.autotune.enabled = False
        return endless.with_options(options).prefetch(reading.prefetch)

    def raw_stream(self, position: Position) -> tf.data.Dataset:
        """Returns (examples, batches) of raw elements for `stream`; the epoch's number first where examples need it."""
        part, layout, seed = self.part, self.layout, self.seed if self.shuffle else None
        position = layout.settled(position)
        raw = reads.raw(part, self.shuffle, self.seed, self.reading)
        inner = part.raw if isinstance(part, Examples) else part
        if isinstance(inner, tf.data.Dataset):
            _draw_orders(inner, position.epoch)
        window = self.reading.window
        epoch = _from_dataset(raw, layout, seed, window) if callable(raw) else _from_arrays(raw, layout, seed)
        batches = epochs(layout, position, epoch, numbered=not reads.is_ready(part))
        # Those of a data set that is read in a function are lost otherwise.
        return batches.with_options(inner.options()) if isinstance(inner, tf.data.Dataset) else batches


def count(part: Part) -> int:
    """Examples in a part: arrays, `Examples`, or a `tf.data.Dataset` of single ones, counted by reading if need be."""
    if isinstance(part, Examples):
        return part.count
    if not isinstance(part, tf.data.Dataset):
        return len(tf.nest.flatten(part)[0])
    cardinality = int(part.cardinality())
    without_end = cardinality == tf.data.INFINITE_CARDINALITY
    refuse((without_end, "a data set of single examples that ends", "one without end", "dataset.take(examples)"))
    return cardinality if cardinality >= 0 else int(part.reduce(np.int64(0), lambda total, _: total + 1))


def again(step: Step, of_type: Spec) -> tf.data.Dataset:
    """Returns `step` again and again, typed as the stream: compiled functions take its iterator untraced."""
    one = tf.data.Dataset.from_tensors(step).repeat()
    return tf.data.experimental.from_variant(tf.data.experimental.to_variant(one), of_type)


def spec(part: Part) -> Batch:
    """The structure of a batch of two examples: a tensor of zeros for each leaf of the part."""
    if isinstance(part, tf.data.Dataset | Examples):
        of_one = part.element_spec
        return tf.nest.map_structure(lambda leaf: tf.zeros((2, *leaf.shape), leaf.dtype), of_one)
    return tf.nest.map_structure(lambda leaf: tf.zeros((2, *np.shape(leaf)[1:]), np.asarray(leaf).dtype), part)


def order(examples: int, seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """The places of an epoch's examples in their order, int64 [examples]; drawn from `seed` and `epoch`, an int64."""
    return tf.random.experimental.stateless_shuffle(tf.range(examples, dtype=tf.int64), seed=[seed, epoch])


def shuffled(part: tf.data.Dataset, window: int, seed: int, epoch: tf.Tensor) -> tf.data.Dataset:
    """A data set shuffled through a window, in an order drawn from `seed` and `epoch`, an int64, alone."""
    # `Dataset.shuffle` draws it from TensorFlow's global seed, too, and takes no tensor for a seed where that is 0.
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(part),
        buffer_size=window,
        seed=seed,
        # Two zeros ask for an order by chance.
        seed2=epoch + 1,
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        reshuffle_each_iteration=False,
        **part._flat_structure,
    )
    return tf.data.experimental.from_variant(variant, part.element_spec)


def epochs(layout: BatchLayout, position: Position, make: Epoch, numbered: bool = False) -> tf.data.Dataset:
    """What `make` returns of each epoch's number, examples trained and steps left; `numbered`, the number first."""
    left = layout.steps_after(position.examples)

    def epoch(number: tf.Tensor) -> tf.data.Dataset:
        resumed = number == position.epoch
        trained = tf.where(resumed, tf.constant(position.examples, tf.int64), 0)
        elements = make(number, trained, tf.where(resumed, tf.constant(left, tf.int64), layout.steps))
        return elements.map(_as_written(lambda *rest: (number, *rest))) if numbered else elements

    return tf.data.Dataset.counter(position.epoch).flat_map(_as_written(epoch))


def _draw_orders(part: tf.data.Dataset, count: int) -> None:
    """Draws so many epochs' orders from a data set's own shuffles. What is cached is read in one order for ever."""
    for _ in range(count if isinstance(part, shuffle_op._ShuffleDataset) else 0):
        iter(part)
    for source in () if isinstance(part, cache_op.CacheDataset) else part._inputs():
        _draw_orders(source, count)


def _from_arrays(part: Part, layout: BatchLayout, seed: int | None) -> Epoch:
    arrays = tf.nest.map_structure(tf.convert_to_tensor, part)
    examples = layout.counts[layout.process] if layout.sharded else layout.examples

    def epoch(number: tf.Tensor, trained: tf.Tensor, steps: tf.Tensor) -> tf.data.Dataset:
        rows = tf.range(examples, dtype=tf.int64) if seed is None else order(examples, seed, number)

        def batches(step: tf.Tensor) -> Step:
            start, edges, total = _shares(layout, trained, step)
            if layout.last == "short":
                batch = rows[start : start + edges[-1]]
            else:
                # A number of rows that is known, unlike that of a slice; the last example pads.
                places = tf.minimum(start + tf.range(layout.global_batch, dtype=tf.int64), examples - 1)
                batch = tf.gather(rows, places)
            of_each = reads.pieces(batch, edges)
            return total, tuple(tf.nest.map_structure(partial(tf.gather, indices=own), arrays) for own in of_each)

        return tf.data.Dataset.range(steps).map(_as_written(batches))

    return epoch


def _from_dataset(
    read: Callable[[tf.Tensor], tf.data.Dataset], layout: BatchLayout, seed: int | None, window: int
) -> Epoch:
    def epoch(number: tf.Tensor, trained: tf.Tensor, steps: tf.Tensor) -> tf.data.Dataset:
        ordered = read(number)
        if seed is not None:
            ordered = shuffled(ordered, min(max(1, layout.examples), window), seed, number)
        whole = ordered.skip(trained // len(layout.counts)).batch(
            layout.share, drop_remainder=layout.last == "left out", num_parallel_calls=tf.data.AUTOTUNE
        )
        if layout.last == "short":
            # A shard that is shorter than the others feeds empty batches while they go on.
            empty = tf.nest.map_structure(lambda leaf: tf.zeros((0, *leaf.shape), leaf.dtype), ordered.element_spec)
            whole = whole.concatenate(tf.data.Dataset.from_tensors(empty).repeat())

        def batches(batch: Batch, step: tf.Tensor) -> Step:
            _, edges, total = _shares(layout, trained, step)
            if layout.last == "padded":
                # By the last example.
                size = tf.shape(tf.nest.flatten(batch)[0])[0]
                rows = tf.minimum(tf.range(layout.global_batch), size - 1)
                batch = tf.nest.map_structure(lambda leaf: tf.gather(leaf, rows), batch)
            return total, reads.pieces(batch, edges)

        # It looks for one step more: a `cache` is kept once its end was seen.
        return tf.data.Dataset.zip((whole, tf.data.Dataset.range(steps))).map(_as_written(batches))

    return epoch


def static_parts(part: Part, layout: BatchLayout) -> list[tuple[Part, BatchLayout]]:
    """A part cut in two, so that batches of static shapes hold each of its examples once, with the layout of each."""
    # What fills no whole batch comes one example a replica. Then a replica has an example that counts or one that only
    # pads, and metrics that know no weights stay exact. The size of the other batches takes the fewest steps.
    examples, replicas = layout.examples, layout.replicas
    largest = min(layout.global_batch, examples) // replicas

    def steps(size: int) -> int:
        whole, rest = divmod(examples, size * replicas)
        return whole + -(-rest // replicas)

    size = min(range(largest, 0, -1), key=steps, default=1)
    whole = examples - examples % (size * replicas)
    first = dataclasses.replace(layout, global_batch=size * replicas, counts=(whole,), last="left out")
    rest = dataclasses.replace(layout, global_batch=replicas, counts=(examples - whole,), last="padded")
    cut = ((_cut(part, 0, whole), first), (_cut(part, whole, examples), rest))
    return [(piece, of_piece) for piece, of_piece in cut if of_piece.examples]


def _cut(part: Part, start: int, stop: int) -> Part:
    """Examples `start` to `stop` of a part. Those after the start of a data set are kept, not read past each time."""
    if isinstance(part, Examples):
        cut = reads.cut if part.in_files else _cut
        return dataclasses.replace(part, raw=cut(part.raw, start, stop))
    if not isinstance(part, tf.data.Dataset):
        return tf.nest.map_structure(lambda leaf: leaf[start:stop], part)
    return part.skip(start).take(stop - start).cache() if start else part.take(stop)


def _shares(
    layout: BatchLayout, trained: tf.Tensor, step: tf.Tensor
) -> tuple[tf.Tensor, Sequence[int | tf.Tensor], tf.Tensor]:
    """(where a step's batch starts, the edges of the local replicas' shares in it, examples in the global batch)."""
    # The batch is what this process reads of the global one; the epoch had so many examples trained before.
    start = trained // len(layout.counts) + step * layout.share
    if layout.last != "short":
        static = range(0, layout.global_batch + 1, layout.global_batch // layout.replicas)
        return start, static, tf.cast(tf.minimum(layout.examples - start, layout.global_batch), tf.float32)
    sizes = tf.clip_by_value(tf.constant(layout.counts, tf.int64) - start, 0, layout.share)
    size = sizes[layout.process] if layout.sharded else sizes[0]
    parts = layout.local if layout.sharded else layout.replicas
    number = 0 if layout.sharded else layout.first
    edges = [size * (number + local) // parts for local in range(layout.local + 1)]
    return start, edges, tf.cast(tf.reduce_sum(sizes), tf.float32)

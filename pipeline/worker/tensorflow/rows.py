"""Adds gradients that are some rows of tables, over replicas of several processes: the rows of all, one after another.

TensorFlow gathers them in one piece of as many rows as a step has. Its collectives take one shape for all calls in a
loop, and another number of rows, as of a last batch that is shorter, aborts them for the process's life. Here rows
travel in pieces of a few fixed sizes.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import tensorflow as tf

# Bytes of a replica's rows in a piece, the largest first: few pieces for many rows, and little padding for few.
PIECE_BYTES = (1 << 20, 1 << 16, 1 << 12)
# A larger piece is taken where so many of the next size would be needed in its place.
FULL_ENOUGH = 4

# A tensor, or a list of such.
Arrays = TypeVar("Arrays")
# What each replica of this process has.
_Local: TypeAlias = list[tf.Tensor]


def added(context: tf.distribute.ReplicaContext, slices: Sequence[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
    """The sums over replicas of rows of one type: for each table those of the first replica, of the second, and so on,
    as one device has them for the global batch. Tables of the same width travel together.
    """
    if not _in_several_processes(context.strategy):
        return context.merge_call(_on_one_device, args=(slices,))  # type: ignore[no-any-return]
    widths = [math.prod(one.values.shape[1:]) for one in slices]
    lengths = tf.stack([tf.shape(one.indices, tf.int64)[0] for one in slices])
    mine = tf.one_hot(context.replica_id_in_sync_group, context.num_replicas_in_sync, dtype=tf.int64)
    counts = reduced(context, mine[:, None] * lengths)
    sums = dict[int, tf.IndexedSlices]()
    for width in dict.fromkeys(widths):
        places = [place for place, other in enumerate(widths) if other == width]
        alike = [slices[place] for place in places]
        sums |= zip(places, _together(context, alike, width, tf.gather(counts, places, axis=1)), strict=True)
    return [sums[place] for place in range(len(slices))]


def _in_several_processes(strategy: tf.distribute.Strategy) -> bool:
    local = len(strategy.extended.worker_devices)
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and local < strategy.num_replicas_in_sync


def _on_one_device(strategy: tf.distribute.Strategy, slices: Sequence[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
    """Rows of replicas that are all in this process."""
    pairs = [(one, one) for one in slices]
    return tf.distribute.ReductionToOneDevice().batch_reduce(tf.distribute.ReduceOp.SUM, pairs)  # type: ignore[no-any-return]


def _together(
    context: tf.distribute.ReplicaContext, slices: Sequence[tf.IndexedSlices], width: int, counts: tf.Tensor
) -> list[tf.IndexedSlices]:
    """The rows of tables of one width; `counts` [replicas, tables] says how many each replica has of each."""
    values = tf.concat([tf.reshape(one.values, [-1, width]) for one in slices], axis=0)
    indices = tf.concat([tf.cast(one.indices, tf.int64) for one in slices], axis=0)
    most = tf.reduce_max(tf.reduce_sum(counts, axis=1))
    number = context.replica_id_in_sync_group
    of_all, indices_of_all = context.merge_call(_gathered, args=(number, values, indices, most))
    ends = tf.cumsum(counts, axis=1)
    sums = []
    for table, one in enumerate(slices):
        rows = [
            (replica, slice(ends[replica, table] - counts[replica, table], ends[replica, table]))
            for replica in range(context.num_replicas_in_sync)
        ]
        summed = tf.concat([of_all[replica, here] for replica, here in rows], axis=0)
        where = tf.concat([indices_of_all[replica, here] for replica, here in rows], axis=0)
        shape = [-1, *one.values.shape[1:]]
        sums.append(tf.IndexedSlices(tf.reshape(summed, shape), tf.cast(where, one.indices.dtype), one.dense_shape))
    return sums


def reduced(context: tf.distribute.ReplicaContext, arrays: Arrays) -> Arrays:
    """The sums over replicas as TensorFlow makes them, whatever answers others who ask for such; see `whole.py`."""
    reduce = type(context).all_reduce
    summed: Arrays = getattr(reduce, "answers_for", reduce)(context, tf.distribute.ReduceOp.SUM, arrays)
    return summed


def _gathered(
    strategy: tf.distribute.Strategy, number: tf.Tensor, values: tf.Tensor, indices: tf.Tensor, most: tf.Tensor
) -> list[tf.distribute.DistributedValues]:
    """Values [replicas, rows, width] and indices [replicas, rows] of all replicas, none of which has more than `most`.

    Called for all replicas of this process together, since those of a loop in each could not meet.
    """
    numbers, most = _local(strategy, number), _local(strategy, most)[0]
    return [_pieces(strategy, numbers, _local(strategy, rows), most) for rows in (values, indices)]


def _pieces(
    strategy: tf.distribute.Strategy, numbers: _Local, rows: _Local, most: tf.Tensor
) -> tf.distribute.DistributedValues:
    """[replicas, rows, ...]: the rows of all replicas, from those [rows, ...] of the replicas here."""
    replicas, shape = strategy.num_replicas_in_sync, rows[0].shape[1:]
    row_bytes = math.prod(shape) * rows[0].dtype.size
    sizes = sorted({max(1, size // row_bytes) for size in PIECE_BYTES}, reverse=True)
    gathered = [tf.zeros([replicas, 0, *shape], here.dtype) for here in rows]
    done = tf.zeros([], tf.int64)
    for size, smaller in itertools.zip_longest(sizes, sizes[1:], fillvalue=0):
        # A larger piece for the rest too, where many of the next size would be needed in its place.
        until = most - FULL_ENOUGH * smaller
        done, gathered = tf.while_loop(
            lambda done, _, until=until: done < until,
            partial(_piece, strategy, numbers, rows, size),
            (done, gathered),
            shape_invariants=(tf.TensorShape([]), [tf.TensorShape([replicas, None, *shape])] * len(rows)),
            parallel_iterations=1,
        )
    return _distributed(strategy, gathered)


def _piece(
    strategy: tf.distribute.Strategy, numbers: _Local, rows: _Local, size: int, done: tf.Tensor, gathered: _Local
) -> tuple[tf.Tensor, _Local]:
    """`gathered` and the next so many rows of each replica; a replica that has no more of them sends zeros.

    They are sent as a sum, to which the other replicas add nothing.
    """
    sent = []
    for number, all_rows in zip(numbers, rows, strict=True):
        here = all_rows[done : done + size]
        here = tf.pad(here, [[0, size - tf.shape(here)[0]]] + [[0, 0]] * (here.shape.rank - 1))
        here = tf.ensure_shape(here, [size, *all_rows.shape[1:]])
        mine = tf.one_hot(number, strategy.num_replicas_in_sync, dtype=here.dtype)
        sent.append(tf.reshape(mine, [-1] + [1] * here.shape.rank) * here)
    together = _distributed(strategy, sent)
    summed = _local(strategy, strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, together, together))
    return done + size, [tf.concat(pair, axis=1) for pair in zip(gathered, summed, strict=True)]


def _local(strategy: tf.distribute.Strategy, value: tf.Tensor) -> _Local:
    return list(strategy.experimental_local_results(value))


def _distributed(strategy: tf.distribute.Strategy, local: _Local) -> tf.distribute.DistributedValues:
    return strategy.experimental_distribute_values_from_function(
        lambda context: local[context.replica_id_in_sync_group % len(local)]
    )

"""TensorFlow's own sums over replicas: by its rings, by NCCL, or on one device, as the strategy was made.

Gradients of tables are rows, which travel in pieces of a few fixed sizes. TensorFlow would gather them in one piece of
as many rows as a step has, but its collectives take one shape for all calls in a loop, and another number of rows, as
of a last batch that is shorter, aborts them for the process's life.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeAlias, TypeVar

import tensorflow as tf

from pipeline.plan.division import bucket_of
from pipeline.plan.plan import Plan, Process
from pipeline.private import custom_gradients
from pipeline.worker.collective import Alone, Collective
from pipeline.worker.patched import OfThread
from pipeline.worker.shared_memory import PeerLostError

# What replicas add: gradients, of which those of embeddings may be rows alone, losses, counts, statistics.
Addend: TypeAlias = tf.Tensor | tf.IndexedSlices


@dataclass(frozen=True)
class TensorFlowCollective:
    """Adds over the replicas of a `tf.distribute.Strategy` by `all_reduce`."""

    replicas: int
    # Why it adds in another's place.
    note: str = ""
    # See `Plan.bucket_bytes`.
    bucket_bytes: int | None = 0

    def sum(self, arrays: Sequence[Addend]) -> list[Addend]:
        """The sums; those of one type travel together, or in buckets."""
        context = tf.distribute.get_replica_context()
        summed = dict[int, Addend]()
        # What is sent together is packed into one tensor, which has one type.
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            places = [place for place, array in enumerate(arrays) if array.dtype == dtype]
            rows = [place for place in places if isinstance(arrays[place], tf.IndexedSlices)]
            dense = {place: arrays[place] for place in places if place not in rows}
            for bucket in (*in_buckets(dense, self.bucket_bytes), rows):
                if bucket:
                    summed |= zip(bucket, _added(context, [arrays[place] for place in bucket]), strict=True)
        return [summed[place] for place in range(len(arrays))]

    def sent_bytes(self, size: int) -> int:
        """2 (n - 1) / n of the bytes, in a ring (Patarasuk & Yuan, 2009) as where one device adds for all others."""
        return 2 * (self.replicas - 1) * size // self.replicas


@dataclass(frozen=True)
class OfProcess(TensorFlowCollective):
    """Adds over the replicas of this process, whatever others do."""

    def sum(self, arrays: Sequence[Addend]) -> list[Addend]:
        """The sums; nothing flows back through them."""

        def added(strategy: tf.distribute.Strategy, *of_replicas: tf.Tensor) -> list[tf.Tensor]:
            return [tf.add_n(strategy.experimental_local_results(values)) for values in of_replicas]

        sums: list[Addend] = tf.distribute.get_replica_context().merge_call(added, args=tuple(arrays))
        return sums


def of_process(strategy: tf.distribute.Strategy) -> Collective[Addend]:
    """That of the replicas in this process."""
    replicas = len(strategy.extended.worker_devices)
    return OfProcess(replicas) if replicas > 1 else ALONE


def over(strategy: tf.distribute.Strategy) -> Collective[Addend]:
    """TensorFlow's own collective of a strategy's replicas; equal ones for the same number of them."""
    replicas = strategy.num_replicas_in_sync
    return TensorFlowCollective(replicas) if replicas > 1 else ALONE


def of_plan(plan: Plan, process: Process, strategy: tf.distribute.Strategy) -> Collective[Addend]:
    """TensorFlow's own collective; see `pipeline.worker.collective.Make`."""
    return TensorFlowCollective(plan.workers, bucket_bytes=plan.bucket_bytes)


ALONE: Collective[Addend] = Alone()


# What Horovod's operations and ours fail with once a process is gone, which TensorFlow has no kind of error for.
_LEFT = re.compile(rf"Horovod has been shut down|gloo/transport/\w+/pair|{PeerLostError.__name__}:")


def lost_a_peer(error: BaseException) -> bool:
    """True for what TensorFlow raises in a process whose peers have gone."""
    kinds = (
        tf.errors.UnavailableError,
        tf.errors.AbortedError,
        tf.errors.CancelledError,
        tf.errors.DeadlineExceededError,
        PeerLostError,
    )
    left = isinstance(error, tf.errors.UnknownError) and _LEFT.search(error.message) is not None
    return isinstance(error, kinds) or left


def in_buckets(arrays: Mapping[int, tf.Tensor], bucket_bytes: int | None) -> list[list[int]]:
    """The places of arrays that travel together: the last first, since backpropagation makes their gradients first."""
    # What has no known size counts for nothing.
    sizes = {place: (array.shape.num_elements() or 0) * array.dtype.size for place, array in arrays.items()}
    limit, buckets, filled = bucket_of(sum(sizes.values()), bucket_bytes), list[list[int]](), 0
    for place, size in reversed(sizes.items()):
        if not buckets or filled > limit:
            buckets.append([])
            filled = 0
        buckets[-1].insert(0, place)
        filled += size
    return buckets


def _added(context: tf.distribute.ReplicaContext, arrays: list[Addend]) -> list[Addend]:
    """The sums over replicas of arrays of one type, and as their gradients the sums of the gradients. All are rows, or
    none.

    So does `ReplicaContext.all_reduce`, but it looks for variables in the graph behind its arguments, that of all
    replicas, and for each operation in a list: with a normalization in every layer, most of the time of tracing.
    """
    if any(isinstance(array, tf.IndexedSlices) for array in arrays):
        return _joined_rows(context, arrays)
    again = partial(_added, context)
    return with_sums_as_gradients(lambda local: reduced(context, list(local)), again, arrays)


def with_sums_as_gradients(
    add: Callable[[Sequence[tf.Tensor]], list[Addend]],
    add_gradients: Callable[[Sequence[Addend]], list[Addend]],
    arrays: Sequence[tf.Tensor],
) -> list[Addend]:
    """The sums of arrays, as whose gradients the sums of the gradients flow back."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def total(*local: tf.Tensor) -> tuple[list[Addend], Callable[..., list[Addend]]]:
        return add(local), lambda *gradients: add_gradients(gradients)

    with of_no_variables():
        added: list[Addend] = total(*arrays)
        return added


def by_type(arrays: Sequence[tf.Tensor], places: Iterable[int]) -> dict[tuple[int, ...], tf.Tensor]:
    """One vector for each type that the arrays in these places have, by the places of its parts."""
    alike = dict[tf.DType, list[int]]()
    for place in places:
        alike.setdefault(arrays[place].dtype, []).append(place)
    return {
        tuple(of_type): tf.concat([tf.reshape(arrays[place], [-1]) for place in of_type], 0)
        for of_type in alike.values()
    }


def parted(arrays: Sequence[tf.Tensor], vectors: Iterable[tuple[tuple[int, ...], tf.Tensor]]) -> dict[int, tf.Tensor]:
    """Returns what was made of vectors `by_type` in parts, of the shapes of the arrays in these places, by place."""
    parts = dict[int, tf.Tensor]()
    for places, vector in vectors:
        parts |= zip(places, tf.split(vector, [tf.size(arrays[place]) for place in places]), strict=True)
    return {
        place: tf.ensure_shape(tf.reshape(part, tf.shape(arrays[place])), arrays[place].shape)
        for place, part in parts.items()
    }


_depends_on_none = OfThread(False)


def of_no_variables() -> AbstractContextManager[None]:
    """Inside, in this thread, what has a gradient of its own depends on no variables, and none are looked for."""
    _search_by_thread()
    return _depends_on_none.held(True)


@cache
def _search_by_thread() -> None:
    """Makes TensorFlow's search for the variables between two lists of operations go by the thread, from now on."""
    usual = custom_gradients._get_dependent_variables

    def search(input_ops: Sequence[tf.Operation], output_ops: Sequence[tf.Operation]) -> list[tf.Variable]:
        return [] if _depends_on_none.value else usual(input_ops, output_ops)  # type: ignore[no-any-return]

    custom_gradients._get_dependent_variables = search


# Bytes of a replica's rows in a piece, the largest first: few pieces for many rows, and little padding for few.
PIECE_BYTES = (1 << 20, 1 << 16, 1 << 12)
# A larger piece is taken where so many of the next size would be needed in its place.
FULL_ENOUGH = 4

# A tensor, or a list of such.
Arrays = TypeVar("Arrays")
# What each replica of this process has.
_Local: TypeAlias = list[tf.Tensor]
# Returns the sums over all for each replica of this process.
Add: TypeAlias = Callable[[_Local], _Local]


def _joined_rows(context: tf.distribute.ReplicaContext, slices: Sequence[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
    """The sums over replicas of rows of one type: for each table those of the first replica, of the second, and so on,
    as one device has them for the global batch. Tables of the same width travel together.
    """
    strategy = context.strategy
    has_others = len(strategy.extended.worker_devices) < strategy.num_replicas_in_sync
    if not (has_others and isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)):
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


def _on_one_device(strategy: tf.distribute.Strategy, slices: Sequence[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
    pairs = [(one, one) for one in slices]
    return tf.distribute.ReductionToOneDevice().batch_reduce(tf.distribute.ReduceOp.SUM, pairs)  # type: ignore[no-any-return]


def _together(
    context: tf.distribute.ReplicaContext, slices: Sequence[tf.IndexedSlices], width: int, counts: tf.Tensor
) -> list[tf.IndexedSlices]:
    """The rows of tables of one width; `counts` [replicas, tables] says how many each replica has of each."""
    values = tf.concat([tf.reshape(one.values, [-1, width]) for one in slices], axis=0)
    indices = tf.concat([tf.cast(one.indices, tf.int64) for one in slices], axis=0)
    longest = tf.reduce_max(tf.reduce_sum(counts, axis=1))
    number = context.replica_id_in_sync_group
    of_all, indices_of_all = context.merge_call(_gathered, args=(number, values, indices, longest))
    ends = tf.cumsum(counts, axis=1)
    sums = []
    for table, one in enumerate(slices):
        rows = [
            (replica, slice(ends[replica, table] - counts[replica, table], ends[replica, table]))
            for replica in range(context.num_replicas_in_sync)
        ]
        summed = tf.concat([of_all[replica, rows_of_one] for replica, rows_of_one in rows], axis=0)
        where = tf.concat([indices_of_all[replica, rows_of_one] for replica, rows_of_one in rows], axis=0)
        shape = [-1, *one.values.shape[1:]]
        sums.append(tf.IndexedSlices(tf.reshape(summed, shape), tf.cast(where, one.indices.dtype), one.dense_shape))
    return sums


def reduced(context: tf.distribute.ReplicaContext, arrays: Arrays) -> Arrays:
    """The sums over replicas as TensorFlow makes them, whatever `global_batch` has answer others who ask."""
    reduce = type(context).all_reduce
    summed: Arrays = getattr(reduce, "answers_for", reduce)(context, tf.distribute.ReduceOp.SUM, arrays)
    return summed


def _gathered(
    strategy: tf.distribute.Strategy, number: tf.Tensor, values: tf.Tensor, indices: tf.Tensor, longest: tf.Tensor
) -> list[tf.distribute.DistributedValues]:
    """Values [replicas, rows, width], indices [replicas, rows] of all replicas, none of more than `longest`."""
    # Called for all replicas of this process together, since those of a loop in each could not meet.
    numbers, longest = _local(strategy, number), _local(strategy, longest)[0]
    add, count = partial(_reduced, strategy), strategy.num_replicas_in_sync
    return [
        _distributed(strategy, in_pieces(add, count, numbers, _local(strategy, rows), longest))
        for rows in (values, indices)
    ]


def _reduced(strategy: tf.distribute.Strategy, local: _Local) -> _Local:
    together = _distributed(strategy, local)
    return _local(strategy, strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, together, together))


def in_pieces(add: Add, count: int, numbers: _Local, rows: _Local, longest: tf.Tensor) -> _Local:
    """[count, rows, ...] for each that is here: the rows of all who add, from those [rows, ...] of who is here, whose
    numbers among all are `numbers`. None has more than `longest`.
    """
    shape = rows[0].shape[1:]
    row_bytes = math.prod(shape) * rows[0].dtype.size
    sizes = sorted({max(1, size // row_bytes) for size in PIECE_BYTES}, reverse=True)
    gathered = [tf.zeros([count, 0, *shape], local.dtype) for local in rows]
    done = tf.zeros([], tf.int64)

    def piece(size: int, done: tf.Tensor, gathered: _Local) -> tuple[tf.Tensor, _Local]:
        sent = []
        for number, all_rows in zip(numbers, rows, strict=True):
            local = all_rows[done : done + size]
            # One that has no more sends zeros.
            local = tf.pad(local, [[0, size - tf.shape(local)[0]]] + [[0, 0]] * (local.shape.rank - 1))
            local = tf.ensure_shape(local, [size, *all_rows.shape[1:]])
            position = tf.one_hot(number, count, dtype=local.dtype)
            sent.append(tf.reshape(position, [-1] + [1] * local.shape.rank) * local)
        return done + size, [tf.concat(pair, axis=1) for pair in zip(gathered, add(sent), strict=True)]

    for size, smaller in itertools.zip_longest(sizes, sizes[1:], fillvalue=0):
        # A larger piece for the rest too, where many of the next size would be needed in its place.
        until = longest - FULL_ENOUGH * smaller
        done, gathered = tf.while_loop(
            lambda done, _, until=until: done < until,
            partial(piece, size),
            (done, gathered),
            shape_invariants=(tf.TensorShape([]), [tf.TensorShape([count, None, *shape])] * len(rows)),
            parallel_iterations=1,
        )
    return gathered


def _local(strategy: tf.distribute.Strategy, value: tf.Tensor) -> _Local:
    return list(strategy.experimental_local_results(value))


def _distributed(strategy: tf.distribute.Strategy, local: _Local) -> tf.distribute.DistributedValues:
    return strategy.experimental_distribute_values_from_function(
        lambda context: local[context.replica_id_in_sync_group % len(local)]
    )

"""TensorFlow's own sums over replicas: by its rings, by NCCL, or on one device, as the strategy was made.

Gradients of tables are rows, which travel in pieces of a few fixed sizes. TensorFlow would gather them in one piece of
as many rows as a step has, but its collectives take one shape for all calls in a loop, and another number of rows, as
of a last batch that is shorter, aborts them for the process's life.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from pipeline.analyze.comparable import grouped
from pipeline.plan.division import bucket_of
from pipeline.plan.plan import Plan, Process
from pipeline.private import custom_gradients
from pipeline.worker.collective import Collective, Pausable
from pipeline.worker.layout import ReplicaPlace
from pipeline.worker.patched import OfThread
from pipeline.worker.shared_memory import PeerLostError

# What replicas add: gradients, of which those of embeddings may be rows alone, losses, counts, statistics.
Addend: TypeAlias = tf.Tensor | tf.IndexedSlices
# Of variables, which a step may leave out.
Gradients: TypeAlias = Sequence[Addend | None]
# What every process calls with values of equal types and shapes; each gets what all have agreed on.
Agree: TypeAlias = Callable[[Sequence[tf.Tensor | np.ndarray]], list[tf.Tensor]]
# Of a text that processes tell each other.
MOST_BYTES = 2_000


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
        number = context.replica_id_in_sync_group
        rows = partial(with_rows, lambda flat: joined(_of_replicas, [number, *flat]))
        return by_kind(arrays, partial(self._dense, context), rows)

    def sent_bytes(self, size: int) -> int:
        """2 (n - 1) / n of the bytes, in a ring (Patarasuk & Yuan, 2009) as where one device adds for all others."""
        return 2 * (self.replicas - 1) * size // self.replicas

    def _dense(self, context: tf.distribute.ReplicaContext, arrays: Sequence[tf.Tensor]) -> list[Addend]:
        summed = dict[int, Addend]()
        # What is sent together is packed into one tensor, which has one type.
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            alike = {place: array for place, array in enumerate(arrays) if array.dtype == dtype}
            for bucket in in_buckets(alike, self.bucket_bytes):
                summed |= zip(bucket, _added(context, [arrays[place] for place in bucket]), strict=True)
        return [summed[place] for place in range(len(arrays))]


class _OfProcess(TensorFlowCollective):
    # Nothing flows back through the sums.
    def sum(self, arrays: Sequence[Addend]) -> list[Addend]:
        return list(joined(lambda by_replica: list(map(tf.add_n, by_replica)), arrays))


def of_process(strategy: tf.distribute.Strategy) -> Collective[Addend]:
    """Adds over the replicas in this process, whatever others do."""
    replicas = len(strategy.extended.worker_devices)
    return _OfProcess(replicas) if replicas > 1 else ALONE


def over(strategy: tf.distribute.Strategy) -> Collective[Addend]:
    """TensorFlow's own collective of a strategy's replicas; equal ones for the same number of them."""
    replicas = strategy.num_replicas_in_sync
    return TensorFlowCollective(replicas) if replicas > 1 else ALONE


def of_plan(plan: Plan, process: Process, strategy: tf.distribute.Strategy) -> Collective[Addend]:
    """TensorFlow's own collective."""
    return TensorFlowCollective(plan.workers, bucket_bytes=plan.bucket_bytes)


ALONE: Collective[Addend] = Pausable()


# Kept for each strategy, of which a process has few, so that it is traced once.
@cache
def over_replicas(strategy: tf.distribute.Strategy, collective: Collective[Addend], of_first: bool = False) -> Agree:
    """Returns what gives each process the sums over replicas, or the first replica's values; all call it together."""

    def added(values: Sequence[tf.Tensor]) -> list[Addend]:
        is_added = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0) if of_first else True
        # It has a device, which the sum is made on; an argument has none.
        return collective.sum([tf.where(is_added, value, tf.zeros_like(value)) for value in values])

    def everywhere(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [strategy.experimental_local_results(one)[0] for one in strategy.run(added, args=(values,))]

    return tf.function(everywhere, reduce_retracing=True, autograph=False)  # type: ignore[no-any-return]


from_first = partial(over_replicas, of_first=True)


def texts(strategy: tf.distribute.Strategy, collective: Collective[Addend], where: ReplicaPlace, own: str) -> list[str]:
    """Returns the texts of all processes, cut to `MOST_BYTES`; all call this together."""
    codes = np.zeros((where.processes, MOST_BYTES))
    encoded = own.encode()[:MOST_BYTES]
    codes[where.number, : len(encoded)] = list(encoded)
    (sums,) = over_replicas(strategy, collective)([tf.constant(codes)])
    rows = (sums.numpy() / where.local).astype(np.uint8)
    return [row[row > 0].tobytes().decode(errors="replace") for row in rows]


def by_replica(strategy: tf.distribute.Strategy, local: Sequence[Any]) -> Any:
    """Gives each replica of this process a part, the first the first."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: local[context.replica_id_in_sync_group % len(local)]
    )


# What Horovod's operations and ours fail with once a process is gone, which TensorFlow has no kind of error for.
_LEFT = re.compile(rf"Horovod has been shut down|gloo/transport/\w+/pair|{PeerLostError.__name__}:")


def lost_a_peer(error: BaseException) -> bool:
    """True for what TensorFlow raises in a process whose peers have gone."""
    errors = tf.errors
    kinds = (errors.UnavailableError, errors.AbortedError, errors.CancelledError, errors.DeadlineExceededError)
    left = isinstance(error, errors.UnknownError) and _LEFT.search(error.message) is not None
    return isinstance(error, (*kinds, PeerLostError)) or left


def joined(join: Callable[..., list[tf.Tensor]], arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns what `join` makes of [array, replica] of all replicas of this process, for each of them."""

    def merged(strategy: tf.distribute.Strategy, *of_replicas: tf.Tensor) -> list[tf.Tensor]:
        return join([strategy.experimental_local_results(values) for values in of_replicas])

    return tf.distribute.get_replica_context().merge_call(merged, args=tuple(arrays))  # type: ignore[no-any-return]


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


def _added(context: tf.distribute.ReplicaContext, arrays: Sequence[tf.Tensor]) -> list[Addend]:
    # So does `ReplicaContext.all_reduce`, but it looks for variables in the graph behind its arguments, that of all
    # replicas: with a normalization in every layer, most of the time of tracing.
    reduce, kind = type(context).all_reduce, tf.distribute.ReduceOp.SUM
    # Whatever `global_batch` has answer others who ask.
    reduce = getattr(reduce, "answers_for", reduce)
    return with_sums_as_gradients(lambda local: reduce(context, kind, list(local)), partial(_added, context), arrays)


def with_sums_as_gradients(
    add: Callable[..., list[Addend]], add_gradients: Callable[..., list[Addend]], arrays: Sequence[tf.Tensor]
) -> list[Addend]:
    """The sums of arrays, as whose gradients the sums of the gradients flow back."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def total(*local: tf.Tensor) -> tuple[list[Addend], Callable[..., list[Addend]]]:
        return add(local), lambda *gradients: add_gradients(gradients)

    with of_no_variables().held(True):
        added: list[Addend] = total(*arrays)
        return added


def by_type(arrays: Sequence[tf.Tensor], places: Iterable[int]) -> dict[tuple[int, ...], tf.Tensor]:
    """One vector for each type that the arrays in these places have, by the places of its parts."""
    alike = grouped((arrays[place].dtype, place) for place in places)
    return {tuple(same): tf.concat([tf.reshape(arrays[place], [-1]) for place in same], 0) for same in alike.values()}


def parted(arrays: Sequence[tf.Tensor], vectors: Iterable[tuple[tuple[int, ...], tf.Tensor]]) -> dict[int, tf.Tensor]:
    """Returns what was made of vectors `by_type` in parts, of the shapes of the arrays in these places, by place."""
    parts = dict[int, tf.Tensor]()
    for places, vector in vectors:
        parts |= zip(places, tf.split(vector, [tf.size(arrays[place]) for place in places]), strict=True)
    return {
        place: tf.ensure_shape(tf.reshape(part, tf.shape(arrays[place])), arrays[place].shape)
        for place, part in parts.items()
    }


@cache
def of_no_variables() -> OfThread[bool]:
    """While True in a thread, what has a gradient of its own depends on no variables, and none are looked for."""
    usual, none = custom_gradients._get_dependent_variables, OfThread(False)
    custom_gradients._get_dependent_variables = lambda **between: [] if none.value else usual(**between)
    return none


# Bytes of a replica's rows in a piece, the largest first: few pieces for many rows, and little padding for few.
PIECE_BYTES = (1 << 20, 1 << 16, 1 << 12)
# A larger piece is taken where so many of the next size would be needed in its place.
FULL_ENOUGH = 4


def by_kind(
    arrays: Sequence[Addend], add: Callable[..., Sequence[Addend]], add_rows: Callable[..., Sequence[Addend]]
) -> list[Addend]:
    """The sums of arrays, of which dense ones and rows are added each in a way of their own."""
    summed = dict[int, Addend]()
    for add_some, are_rows in ((add, False), (add_rows, True)):
        places = [place for place, array in enumerate(arrays) if isinstance(array, tf.IndexedSlices) is are_rows]
        if places:
            summed |= zip(places, add_some([arrays[place] for place in places]), strict=True)
    return [summed[place] for place in range(len(arrays))]


def with_rows(gather: Callable[..., list[tf.Tensor]], slices: Sequence[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
    """The rows of the first replica, of the second, and so on, as one device has them for the global batch."""
    of_all = gather([tensor for one in slices for tensor in (one.values, one.indices)])
    return [
        tf.IndexedSlices(values, indices, one.dense_shape)
        for values, indices, one in zip(of_all[::2], of_all[1::2], slices, strict=True)
    ]


def _of_replicas(local: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    # For each array but the first those of all replicas; of those here, the first adds for all.
    (number, *others), *arrays = local
    strategy, here = tf.distribute.get_strategy(), 1 + len(others)
    rows, processes = [tf.concat(of_array, 0) for of_array in arrays], strategy.num_replicas_in_sync // here
    if processes == 1:
        return rows

    def add(value: tf.Tensor) -> tf.Tensor:
        together = by_replica(strategy, [value, *[tf.zeros_like(value)] * (here - 1)])
        summed = strategy.extended.reduce_to(tf.distribute.ReduceOp.SUM, together, together)
        return strategy.experimental_local_results(summed)[0]

    return gathered(add, number // here, processes, rows)


def gathered(add: Any, number: int | tf.Tensor, count: int, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """For each array those of all `count` who add, one after another; this is `number`. Those alike travel together."""
    lengths = tf.stack([tf.shape(array, tf.int64)[0] for array in arrays])
    # [who, array]
    counts = add(tf.one_hot(number, count, dtype=tf.int64)[:, None] * lengths)
    of_all = dict[int, tf.Tensor]()
    alike = grouped(((array.dtype, *array.shape[1:]), place) for place, array in enumerate(arrays))
    for places in alike.values():
        ends = tf.cumsum(tf.gather(counts, places, axis=1), axis=1)
        together = tf.concat([arrays[place] for place in places], 0)
        rows = _in_pieces(add, number, count, together, tf.reduce_max(ends[:, -1]))
        for column, place in enumerate(places):
            parts = [rows[who, ends[who, column] - counts[who, place] : ends[who, column]] for who in range(count)]
            of_all[place] = tf.concat(parts, 0)
    return [of_all[place] for place in range(len(arrays))]


def _in_pieces(add: Any, number: int | tf.Tensor, count: int, rows: tf.Tensor, longest: tf.Tensor) -> tf.Tensor:
    """[count, rows, ...]: the rows of all who add, of whom this is `number`; none has more than `longest`."""
    shape = rows.shape[1:]
    row_bytes = math.prod(shape) * rows.dtype.size
    sizes = sorted({max(1, size // row_bytes) for size in PIECE_BYTES}, reverse=True)
    done, of_all = tf.zeros([], tf.int64), tf.zeros([count, 0, *shape], rows.dtype)
    position = tf.reshape(tf.one_hot(number, count, dtype=rows.dtype), [-1] + [1] * rows.shape.rank)

    def piece(size: int, done: tf.Tensor, of_all: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        own = rows[done : done + size]
        # Who has no more sends zeros.
        own = tf.pad(own, [[0, size - tf.shape(own)[0]]] + [[0, 0]] * (own.shape.rank - 1))
        return done + size, tf.concat([of_all, add(position * tf.ensure_shape(own, [size, *shape]))], axis=1)

    for size, smaller in itertools.zip_longest(sizes, sizes[1:], fillvalue=0):
        # A larger piece for the rest too, where many of the next size would be needed in its place.
        until = longest - FULL_ENOUGH * smaller
        done, of_all = tf.while_loop(
            lambda done, _, until=until: done < until,
            partial(piece, size),
            (done, of_all),
            shape_invariants=(tf.TensorShape([]), tf.TensorShape([count, None, *shape])),
            parallel_iterations=1,
        )
    return of_all

"""TensorFlow's own sums over replicas: by its rings, by NCCL, or on one device, as the strategy was made."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import tensorflow as tf

from pipeline.plan.plan import Plan, Process
from pipeline.private import custom_gradients
from pipeline.worker.collective import Alone, Collective
from pipeline.worker.tensorflow import rows

# What replicas add: gradients, of which those of embeddings may be rows alone, losses, counts, statistics.
Addend: TypeAlias = tf.Tensor | tf.IndexedSlices


@dataclass(frozen=True)
class TensorFlowCollective:
    """What the replicas of a `tf.distribute.Strategy` add by `all_reduce`."""

    replicas: int
    # Why it adds in another's place.
    note: str = ""

    def sum(self, arrays: Sequence[Addend]) -> list[Addend]:
        """The sums; those of one type travel together."""
        context = tf.distribute.get_replica_context()
        summed = dict[int, Addend]()
        # What is sent together is packed into one tensor, which has one type.
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            places = [place for place, array in enumerate(arrays) if array.dtype == dtype]
            sums = _added(context, [arrays[place] for place in places])
            summed |= zip(places, sums, strict=True)
        return [summed[place] for place in range(len(arrays))]

    def sent_bytes(self, size: int) -> int:
        """2 (n - 1) / n of the bytes: so much travels in a ring (Patarasuk & Yuan, 2009), and where one device adds
        what n - 1 others send it, and sends them the sum.
        """
        return 2 * (self.replicas - 1) * size // self.replicas


@dataclass(frozen=True)
class OfProcess:
    """What the replicas of this process add, whatever others do."""

    replicas: int

    def sum(self, arrays: Sequence[Addend]) -> list[Addend]:
        """The sums; nothing flows back through them."""

        def added(strategy: tf.distribute.Strategy, *of_replicas: tf.Tensor) -> list[tf.Tensor]:
            return [tf.add_n(strategy.experimental_local_results(values)) for values in of_replicas]

        sums: list[Addend] = tf.distribute.get_replica_context().merge_call(added, args=tuple(arrays))
        return sums

    def sent_bytes(self, size: int) -> int:
        """All but the first replica send what they add to the first, which sends them the sum."""
        return 2 * (self.replicas - 1) * size // self.replicas


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
    return over(strategy)


ALONE: Collective[Addend] = Alone()


def _added(context: tf.distribute.ReplicaContext, arrays: list[Addend]) -> list[Addend]:
    """The sums over replicas of arrays of one type, and as their gradients the sums of the gradients.

    So does `ReplicaContext.all_reduce`, but it looks for variables in the graph behind its arguments, that of all
    replicas, and for each operation in a list: with a normalization in every layer, most of the time of tracing.
    """
    if any(isinstance(array, tf.IndexedSlices) for array in arrays):
        return _with_rows(context, arrays)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def total(*here: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., list[Addend]]]:
        summed = rows.reduced(context, list(here))
        return summed, lambda *gradients: _added(context, list(gradients))

    with of_no_variables():
        added: list[Addend] = total(*arrays)
        return added


def _with_rows(context: tf.distribute.ReplicaContext, arrays: list[Addend]) -> list[Addend]:
    """The sums over replicas of arrays of one type, of which some are rows alone."""
    sums = dict[int, Addend]()
    for are_rows in (False, True):
        places = [place for place, array in enumerate(arrays) if isinstance(array, tf.IndexedSlices) is are_rows]
        if not places:
            continue
        alike = [arrays[place] for place in places]
        summed = rows.added(context, alike) if are_rows else rows.reduced(context, alike)
        sums |= zip(places, summed, strict=True)
    return [sums[place] for place in range(len(arrays))]


class _Thread(threading.local):
    """What is known in this thread; each replica is traced in one of its own."""

    of_no_variables = False


_thread = _Thread()


@contextmanager
def of_no_variables() -> Iterator[None]:
    """Inside, in this thread, what has a gradient of its own depends on no variables, and none are looked for."""
    kept = _thread.of_no_variables
    if not isinstance(custom_gradients._get_dependent_variables, _Search):
        custom_gradients._get_dependent_variables = _Search(custom_gradients._get_dependent_variables)
    _thread.of_no_variables = True
    try:
        yield
    finally:
        _thread.of_no_variables = kept


@dataclass(frozen=True)
class _Search:
    """TensorFlow's search for the variables that lie between two lists of operations."""

    kept: Callable[..., list[tf.Variable]]

    def __call__(self, input_ops: Sequence[tf.Operation], output_ops: Sequence[tf.Operation]) -> list[tf.Variable]:
        return [] if _thread.of_no_variables else self.kept(input_ops, output_ops)

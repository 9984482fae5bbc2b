"""TensorFlow's own sums over replicas: by its rings, by NCCL, or on one device, as the strategy was made."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import tensorflow as tf

from pipeline.plan.plan import Plan, Process
from pipeline.worker.collective import Alone, Collective

# What replicas add: gradients, of which those of embeddings may be rows alone, losses, counts, statistics.
Addend: TypeAlias = tf.Tensor | tf.IndexedSlices


@dataclass(frozen=True)
class TensorFlowCollective:
    """What the replicas of a `tf.distribute.Strategy` add by `all_reduce`."""

    replicas: int

    def sum(self, arrays: Sequence[Addend]) -> list[Addend]:
        """The sums; those of one type travel together."""
        context = tf.distribute.get_replica_context()
        summed = dict[int, Addend]()
        # What is sent together is packed into one tensor, which has one type.
        for dtype in dict.fromkeys(array.dtype for array in arrays):
            places = [place for place, array in enumerate(arrays) if array.dtype == dtype]
            sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [arrays[place] for place in places])
            summed |= zip(places, sums, strict=True)
        return [summed[place] for place in range(len(arrays))]

    def sent_bytes(self, size: int) -> int:
        """2 (n - 1) / n of the bytes: so much travels in a ring (Patarasuk & Yuan, 2009), and where one device adds
        what n - 1 others send it, and sends them the sum.
        """
        return 2 * (self.replicas - 1) * size // self.replicas


def over(strategy: tf.distribute.Strategy) -> Collective[Addend]:
    """TensorFlow's own collective of a strategy's replicas; equal ones for the same number of them."""
    replicas = strategy.num_replicas_in_sync
    return TensorFlowCollective(replicas) if replicas > 1 else ALONE


def of_plan(plan: Plan, process: Process, strategy: tf.distribute.Strategy) -> Collective[Addend]:
    """TensorFlow's own collective; see `pipeline.worker.collective.Make`."""
    return over(strategy)


ALONE: Collective[Addend] = Alone()

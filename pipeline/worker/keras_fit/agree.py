"""Values that the processes of a training must agree on: the first process's, or the sum over all of them."""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf


# Kept for each strategy, of which a process has few, so that it is traced once.
@functools.cache
def from_first(strategy: tf.distribute.Strategy) -> Callable[[list[Any]], list[Any]]:
    """A function that every process calls with tensors of equal shapes, and that returns the first replica's."""

    def chosen(values: list[Any]) -> list[Any]:
        first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
        return [tf.where(first, value, tf.zeros_like(value)) for value in values]

    return _summed(strategy, chosen)


@functools.cache
def over_replicas(strategy: tf.distribute.Strategy) -> Callable[[list[Any]], list[Any]]:
    """A function that every process calls with tensors of equal shapes, and that returns their sums over replicas."""
    # An identity, because it has a device, which the sum is made on; an argument has none.
    return _summed(strategy, lambda values: [tf.identity(value) for value in values])


def _summed(
    strategy: tf.distribute.Strategy, part: Callable[[list[Any]], list[Any]]
) -> Callable[[list[Any]], list[Any]]:
    def on_replica(values: list[Any]) -> list[Any]:
        context = tf.distribute.get_replica_context()
        mine = part(values)
        summed = dict[int, Any]()
        # What is sent together is packed into one tensor, which has one type.
        for kind in dict.fromkeys(value.dtype for value in mine):
            these = [number for number, value in enumerate(mine) if value.dtype == kind]
            sums = context.all_reduce(tf.distribute.ReduceOp.SUM, [mine[number] for number in these])
            summed |= zip(these, sums, strict=True)
        return [summed[number] for number in range(len(mine))]

    def everywhere(values: list[Any]) -> list[Any]:
        summed = strategy.run(on_replica, args=(values,))
        return [strategy.experimental_local_results(value)[0] for value in summed]

    return tf.function(everywhere, reduce_retracing=True, autograph=False)  # type: ignore[no-any-return]

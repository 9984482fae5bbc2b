"""Values that the processes of a training must agree on: the first process's, or the sum over all of them."""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from pipeline.worker.collective import Collective
from pipeline.worker.tensorflow.collective import Addend

# Of a text that processes tell each other.
MOST_BYTES = 2_000

# What every process calls with values of equal types and shapes; each gets what all have agreed on.
Agree = Callable[[Sequence[tf.Tensor | np.ndarray]], list[tf.Tensor]]


# Kept for each strategy, of which a process has few, so that it is traced once.
@functools.cache
def from_first(strategy: tf.distribute.Strategy, collective: Collective[Addend]) -> Agree:
    """A function that every process calls with tensors of equal shapes, and that returns the first replica's."""

    def chosen(values: Sequence[tf.Tensor]) -> list[Addend]:
        first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
        return [tf.where(first, value, tf.zeros_like(value)) for value in values]

    return _summed(strategy, collective, chosen)


@functools.cache
def from_one(strategy: tf.distribute.Strategy, collective: Collective[Addend]) -> Agree:
    """As `from_first`, of the replica whose number comes before the tensors."""

    def chosen(values: Sequence[tf.Tensor]) -> list[Addend]:
        here = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, values[0])
        return [tf.where(here, value, tf.zeros_like(value)) for value in values[1:]]

    return _summed(strategy, collective, chosen)


@functools.cache
def over_replicas(strategy: tf.distribute.Strategy, collective: Collective[Addend]) -> Agree:
    """A function that every process calls with tensors of equal shapes, and that returns their sums over replicas."""
    # An identity, because it has a device, which the sum is made on; an argument has none.
    return _summed(strategy, collective, lambda values: [tf.identity(value) for value in values])


def texts(
    strategy: tf.distribute.Strategy,
    collective: Collective[Addend],
    mine: str,
    number: int,
    processes: int,
    local: int,
) -> list[str]:
    """What each of so many processes says, on all of them, which call this together with `local` replicas each.

    Of a text its first `MOST_BYTES` are told.
    """
    told = np.zeros((processes, MOST_BYTES))
    said = mine.encode()[:MOST_BYTES]
    told[number, : len(said)] = list(said)
    (sums,) = over_replicas(strategy, collective)([tf.constant(told)])
    rows = (sums.numpy() / local).astype(np.uint8)
    return [row[row > 0].tobytes().decode(errors="replace") for row in rows]


def _summed(
    strategy: tf.distribute.Strategy,
    collective: Collective[Addend],
    part: Callable[[Sequence[tf.Tensor]], list[Addend]],
) -> Agree:
    def everywhere(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        summed = strategy.run(lambda given: collective.sum(part(given)), args=(values,))
        return [strategy.experimental_local_results(value)[0] for value in summed]

    return tf.function(everywhere, reduce_retracing=True, autograph=False)  # type: ignore[no-any-return]

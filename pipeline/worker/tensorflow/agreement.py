"""Values that all processes of a training agree on: the first one's, sums over all, and shapes of examples."""

import functools
import json
from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf

from pipeline.data.errors import DataError
from pipeline.worker.checkpoint import State
from pipeline.worker.collective import Collective
from pipeline.worker.data.reading import Batch
from pipeline.worker.layout import ReplicaPlace
from pipeline.worker.state import on_all as state_on_all
from pipeline.worker.tensorflow.collective import Addend

# Of a text that processes tell each other.
MOST_BYTES = 2_000

# What every process calls with values of equal types and shapes; each gets what all have agreed on.
Agree = Callable[[Sequence[tf.Tensor | np.ndarray]], list[tf.Tensor]]


# Kept for each strategy, of which a process has few, so that it is traced once.
@functools.cache
def over_replicas(strategy: tf.distribute.Strategy, collective: Collective[Addend], of_first: bool = False) -> Agree:
    """Every process calls it with equal shapes, and gets the sums over replicas, or the first replica's values."""

    def added(values: Sequence[tf.Tensor]) -> list[Addend]:
        is_added = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0) if of_first else True
        # It has a device, which the sum is made on; an argument has none.
        return collective.sum([tf.where(is_added, value, tf.zeros_like(value)) for value in values])

    def everywhere(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return [strategy.experimental_local_results(one)[0] for one in strategy.run(added, args=(values,))]

    return tf.function(everywhere, reduce_retracing=True, autograph=False)  # type: ignore[no-any-return]


def from_first(strategy: tf.distribute.Strategy, collective: Collective[Addend]) -> Agree:
    """Every process calls it with equal shapes, and gets the first replica's."""
    return over_replicas(strategy, collective, of_first=True)


def texts(
    strategy: tf.distribute.Strategy, collective: Collective[Addend], where: ReplicaPlace, text: str
) -> list[str]:
    """Returns the texts of all processes, cut to `MOST_BYTES`; all call this together."""
    codes = np.zeros((where.processes, MOST_BYTES))
    encoded = text.encode()[:MOST_BYTES]
    codes[where.number, : len(encoded)] = list(encoded)
    (sums,) = over_replicas(strategy, collective)([tf.constant(codes)])
    rows = (sums.numpy() / where.local).astype(np.uint8)
    return [row[row > 0].tobytes().decode(errors="replace") for row in rows]


def on_all(state: State | None, strategy: tf.distribute.Strategy, collective: Collective[Addend]) -> State | None:
    """The first process's state on every process, all of which call this together."""

    return state_on_all(state, lambda words: from_first(strategy, collective)([words])[0].numpy())


# So much of what a process says of its examples is compared.
MOST = 700
EXPECTED = ("training examples of one shape", "validation examples of one shape", "as many examples")


def agreed(
    strategy: tf.distribute.Strategy,
    collective: Collective[Addend],
    where: ReplicaPlace,
    batch: Batch,
    held_out: Batch | None = None,
    classes: int | None = None,
    examples: Sequence[int] | None = None,
) -> int | None:
    """The most classes that any process has counted of example batches, or `DataError` on all where these differ.

    Where every process is to have all data, `examples` are how many it has of each part.
    """
    if where.processes == 1:
        return classes
    counts = "" if examples is None else " and ".join(f"{count:,}" for count in examples)
    facts = json.dumps([shapes(batch)[:MOST], shapes(held_out)[:MOST], counts, classes])
    of_all = [json.loads(text) for text in texts(strategy, collective, where, facts)]
    for place, expected in enumerate(EXPECTED):
        first = of_all[0][place]
        other = next((number for number, of_process in enumerate(of_all) if of_process[place] != first), None)
        if other is not None:
            received = f"{first} in the first and {of_all[other][place]} in process {other}"
            instead = "data that are the same in each, or shards that differ in nothing but which examples they hold"
            raise DataError(f"{expected} in all processes", received, instead)
    return max((of_process[3] for of_process in of_all if of_process[3] is not None), default=None)


def shapes(batch: Batch | None) -> str:
    """The shapes of an example, as a user reads them, or none.

    >>> shapes(({"a": tf.zeros((2, 6)), "b": tf.zeros((2, 3))}, tf.zeros(2)))
    "x {'a': [6], 'b': [3]}, y []"
    """
    if batch is None:
        return "none"
    parts = zip(("x", "y", "sample_weight"), keras.utils.unpack_x_y_sample_weight(batch), strict=True)
    return ", ".join(
        f"{name} {tf.nest.map_structure(lambda leaf: list(leaf.shape)[1:], part)}"
        for name, part in parts
        if part is not None
    )

"""What all processes must have alike before they train together: examples of one shape, and one number of classes."""

import json
from collections.abc import Sequence

import keras
import tensorflow as tf

from pipeline.data.errors import DataError
from pipeline.worker.collective import Collective
from pipeline.worker.input.part import Batch
from pipeline.worker.input.passes import Place
from pipeline.worker.keras_fit.agree import texts
from pipeline.worker.tensorflow.collective import Addend

# So much of what a process says of its examples is compared.
MOST = 700
EXPECTED = ("training examples of one shape", "validation examples of one shape", "as many examples")


def agreed(
    strategy: tf.distribute.Strategy,
    collective: Collective[Addend],
    where: Place,
    batch: Batch,
    held_out: Batch | None = None,
    classes: int | None = None,
    examples: Sequence[int] | None = None,
) -> int | None:
    """The most classes that any process has counted, where all have examples of one shape; all call this together.

    `batch` is an example batch in shape, and `held_out` that of the validation data. Where every process is to have all
    data, `examples` are how many it has of each part. Raises `DataError` on all.
    """
    if where.processes == 1:
        return classes
    counts = "" if examples is None else " and ".join(f"{count:,}" for count in examples)
    mine = json.dumps([shapes(batch)[:MOST], shapes(held_out)[:MOST], counts, classes])
    number = where.first // where.local
    told = [json.loads(text) for text in texts(strategy, collective, mine, number, where.processes, where.local)]
    for place, expected in enumerate(EXPECTED):
        first = told[0][place]
        other = next((number for number, said in enumerate(told) if said[place] != first), None)
        if other is not None:
            raise DataError(
                f"{expected} in all processes",
                f"{first} in the first and {told[other][place]} in process {other}",
                "data that are the same in each, or shards that differ in nothing but which examples they hold",
            )
    return max((said[3] for said in told if said[3] is not None), default=None)


def shapes(batch: Batch | None) -> str:
    """The shapes of an example, as a person reads them, or none.

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

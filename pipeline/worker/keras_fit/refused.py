"""What `fit` refuses data and labels for, as a `UserError`: alone, beside the model, and between processes."""

import contextlib
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from pipeline.data.errors import DataError
from pipeline.errors import UserError
from pipeline.worker import labels
from pipeline.worker.collective import Pausable
from pipeline.worker.input import taken
from pipeline.worker.input.passes import FitData, Passes, Place
from pipeline.worker.tensorflow import alike
from pipeline.worker.tensorflow.collective import Addend, over
from pipeline.worker.tensorflow.equality_check.comparison import check
from pipeline.worker.tensorflow.loop import Loop


def arrays(x: FitData, y: FitData, sample_weight: FitData, name: str) -> tuple[FitData, FitData, FitData]:
    """The data, of which lists of numbers have become arrays; `name` is which part they are."""
    with in_words():
        return taken.for_keras(x, y, sample_weight, name)


def check_alike(strategy: tf.distribute.Strategy, where: Place, train: Passes, held_out: Passes | None) -> None:
    """Refuses, on all processes, examples that differ in shape between them."""
    with in_words():
        alike.agreed(strategy, over(strategy), where, train.spec, None if held_out is None else held_out.spec)


def check_labels(model: keras.Model, train: Passes, held_out: Passes | None) -> None:
    """Refuses labels at hand that the model has no output for."""
    found = labels.outputs(model, train.spec)
    for name, data in (("training", train), ("validation", held_out)):
        if data is not None and data.labels is not None:
            labels.check_values(found, data.labels, name)


def warn_of_differences(
    loop: Loop, collective: Pausable[Addend], where: Place, train: Passes, note: Callable[[str], object]
) -> None:
    """Notes what all replicas make of a few examples otherwise than one device; all processes call it together."""
    found = check(loop, collective, where, train.few)
    if found.outcome == "different" and not found.noted:
        advice = found.advice.replace("train.gather=true", "gather=True").replace("train.check=off", "check=False")
        note(f"{found.said(where.replicas)} {advice}".replace("on a small", "On a small", 1))


@contextlib.contextmanager
def in_words() -> Iterator[None]:
    """Inside, what data or labels are refused for, before training or in the middle of a step, is a `UserError`."""
    try:
        yield
    except DataError as error:
        raise UserError(str(error)) from error
    except tf.errors.InvalidArgumentError as error:
        if (found := labels.wrong_in_step(error.message)) is None:
            raise
        raise UserError(found) from error

"""Says in words why a model, or its losses and metrics, take no batch of the data, when they are built for one."""

import contextlib
from collections.abc import Iterator, Mapping

import keras

# A saved model names the layers that are ours, which Keras knows once they are imported.
import pipeline.models  # noqa: F401
from pipeline.data.errors import DataError
from pipeline.worker import labels
from pipeline.worker.labels import Batch
from pipeline.worker.model_error import ModelError, reason

# What Keras, and layers, losses and metrics of a person's own, raise on shapes and types. TensorFlow's errors of what
# is computed, as of a peer that is lost, are others.
RAISED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError)
HALF = ("float16", "bfloat16")


@contextlib.contextmanager
def in_words(model: keras.Model, batch: Batch) -> Iterator[None]:
    """Inside, what a model raises while it is built for such a batch is a `ModelError`, with what to try."""
    try:
        yield
    except (ModelError, DataError):
        raise
    except RAISED as error:
        # Keras puts words of its own above what a model raises, which say to build it by hand.
        raised = error.__context__ or error if isinstance(error, RuntimeError) else error
        raise ModelError(
            f"{reason(raised).rstrip('.')}. Expected a model, losses and metrics that take a batch of the data, "
            f"received this from those of {type(model).__name__}. Try {_advice(raised, model, batch)}."
        ) from error


def _advice(error: BaseException, model: keras.Model, batch: Batch) -> str:
    x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
    if isinstance(error, KeyError) and isinstance(y, Mapping) and error.args and error.args[0] not in y:
        return f"labels for the output {error.args[0]} too, or a model without it; labels are there for {', '.join(y)}"
    if isinstance(error, TypeError) and _ends_in_half(model, x):
        return 'dtype="float32" in the layers that make outputs, which losses and metrics then take in full'
    return "it on one batch with Keras alone"


def _ends_in_half(model: keras.Model, x: Batch) -> bool:
    """Are outputs of the model of half width? Of a model that cannot be called it is not known."""
    try:
        outputs = labels.predicted(model, x)
    except RAISED:
        return False
    return any(keras.backend.standardize_dtype(output.dtype) in HALF for output in keras.tree.flatten(outputs))

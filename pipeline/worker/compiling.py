"""Compiles a model with what a run chooses and keeps the rest; says why a model takes no batch of the data."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras

# A saved model names the layers that are ours, which Keras knows once they are imported.
import pipeline.models  # noqa: F401
from pipeline.data.errors import DataError
from pipeline.worker import labels, rates
from pipeline.worker.labels import Batch
from pipeline.worker.model_error import ModelError, reason

# What a loss brings along, and what metrics do: given anew together.
TOGETHER = (("loss", "loss_weights"), ("metrics", "weighted_metrics"))


def check_made(model: object) -> None:
    """Refuses what no engine trains: what is no model, and a model whose steps must not be compiled."""
    if not isinstance(model, keras.Model):
        raise ModelError(f"Expected the model's function to return a keras.Model, received {type(model).__name__}.")
    if model.compiled and model.run_eagerly:
        instead = "run_eagerly=False; to debug, model.fit without this program"
        raise ModelError("a model whose steps may be compiled", "run_eagerly=True from model.build", instead)


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses Horovod's wrapper of an optimizer, under which Keras 3 trains each replica by itself, in silence."""
    for one in rates.within(optimizer):
        if any(kind.__module__.partition(".")[0] == "horovod" for kind in type(one).__mro__):
            expected = "an optimizer without Horovod's DistributedOptimizer, which averages nothing under Keras 3"
            instead = "the optimizer that it wraps, with strategy=multi_worker strategy.collective=horovod"
            raise ModelError(expected, f"{type(one).__name__} in it", instead)


def check_batches(model: keras.Model) -> None:
    """Refuses a model that takes batches of one size alone, as a stateful RNN does."""
    for tensor in keras.tree.flatten(getattr(model, "inputs", None) or ()):
        if tensor.shape[0] is not None:
            why = "since each replica has a part of a batch and the last one may be short"
            received = f"one that takes {tensor.shape[0]} alone (input {tensor.name})"
            instead = "keras.Input(shape) without a batch size, and stateful=False in recurrent layers"
            raise ModelError(f"a model that takes batches of any size, {why}", received, instead)


def compile_chosen(
    model: keras.Model, optimizer: Any, learning_rate: float | None, loss: Any, metrics: Any, own_steps: bool = False
) -> None:
    """Compiles with what is not None.

    A model that is not compiled gets Adam, and, unless it has steps of its own, sparse categorical cross-entropy and
    accuracy, of each output.
    """
    if model.compiled:
        chosen = model.optimizer if optimizer is None else keras.optimizers.get(optimizer)
    else:
        chosen = keras.optimizers.get("adam" if optimizer is None else optimizer)
        if not own_steps:
            loss = "sparse_categorical_crossentropy" if loss is None else loss
            metrics = _accuracy(model) if metrics is None else metrics
    check_optimizer(chosen)
    if learning_rate is not None:
        rates.set_rate(chosen, learning_rate)
    compile_anew(model, chosen, loss, metrics)


def _accuracy(model: keras.Model) -> list[Any]:
    """Returns accuracy for each output, as Keras takes it: one for all is refused where there are several."""
    outputs = len(keras.tree.flatten(getattr(model, "outputs", None) or [None]))
    return ["accuracy"] if outputs == 1 else [["accuracy"] for _ in range(outputs)]


def compile_anew(model: keras.Model, optimizer: Any, loss: Any, metrics: Any) -> None:
    """Compiles with the optimizer, and with loss and metrics that are not None; others stay, also in what is saved."""
    before = dict(model._compile_config.config) if model.compiled and hasattr(model, "_compile_config") else {}
    # One that does not scale the loss by now was not to.
    unscaled = {"auto_scale_loss": False} if model.compiled and optimizer is model.optimizer else {}
    model.compile(optimizer=optimizer, loss=loss, metrics=metrics, **unscaled)
    now = getattr(getattr(model, "_compile_config", None), "config", None)
    if now is None:
        return
    for names in TOGETHER:
        if all(now.get(name) is None for name in names):
            now.update({name: before.get(name) for name in names})
    # Found out anew wherever it is loaded: another backend's answer is another.
    now["jit_compile"] = "auto"


# What Keras, and layers, losses and metrics of a user's own, raise on shapes and types. TensorFlow's errors of what
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
    """True if outputs of the model are of half width; False for a model that cannot be called."""
    try:
        outputs = labels.predicted(model, x)
    except RAISED:
        return False
    return any(keras.backend.standardize_dtype(output.dtype) in HALF for output in keras.tree.flatten(outputs))

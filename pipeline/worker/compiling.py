"""Compiles a model with what a run chooses and keeps the rest, and says why a model takes no batch of the data."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import keras

# A saved model names the layers that are ours, which Keras knows once they are imported.
import pipeline.models  # noqa: F401
from pipeline.data.errors import DataError
from pipeline.errors import refuse
from pipeline.private_keras import compute_output_spec
from pipeline.worker import labels
from pipeline.worker.labels import Batch
from pipeline.worker.model_error import ModelError, reason
from pipeline.worker.variables import updating, within

# What a loss brings along, and what metrics do: given anew together.
TOGETHER = (("loss", "loss_weights"), ("metrics", "weighted_metrics"))
# A block's own call, and that with what it computes forgotten until the backward pass asks for it.
BlockCall: TypeAlias = Callable[..., Any]


def check_made(model: object) -> None:
    """Refuses what no engine trains: what is no model, and a model whose steps must not be compiled."""
    if not isinstance(model, keras.Model):
        raise ModelError(f"Expected the model's function to return a keras.Model, received {type(model).__name__}.")
    if model.compiled and model.run_eagerly:
        instead = "run_eagerly=False; to debug, model.fit without this program"
        raise ModelError("a model whose steps may be compiled", "run_eagerly=True from model.build", instead)


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses Horovod's wrapper of an optimizer, under which Keras 3 trains each replica by itself, in silence."""
    expected = "an optimizer without Horovod's DistributedOptimizer, which averages nothing under Keras 3"
    instead = "the optimizer that it wraps, with strategy=multi_worker strategy.collective=horovod"
    for one in within(optimizer):
        wraps = any(kind.__module__.partition(".")[0] == "horovod" for kind in type(one).__mro__)
        refuse((wraps, expected, f"{type(one).__name__} in it", instead), error=ModelError)


def check_batches(model: keras.Model) -> None:
    """Refuses a model that takes batches of one size alone, as a stateful RNN does."""
    for tensor in keras.tree.flatten(getattr(model, "inputs", None) or ()):
        expected = "a model that takes batches of any size, since each replica has a part of a batch and the last one "
        received = f"one that takes {tensor.shape[0]} alone (input {tensor.name})"
        instead = "keras.Input(shape) without a batch size, and stateful=False in recurrent layers"
        refuse((tensor.shape[0] is not None, f"{expected}may be short", received, instead), error=ModelError)


def compile_chosen(
    model: keras.Model, optimizer: Any, learning_rate: float | None, loss: Any, metrics: Any, own_steps: bool = False
) -> None:
    """Compiles with what is not None; what was not compiled gets Adam and, without `own_steps`, the usual loss."""
    usual = model.optimizer if model.compiled else "adam"
    chosen = keras.optimizers.get(usual if optimizer is None else optimizer)
    if not (model.compiled or own_steps):
        loss = "sparse_categorical_crossentropy" if loss is None else loss
        # As Keras takes it: one accuracy for all outputs is refused where there are several.
        outputs = len(keras.tree.flatten(getattr(model, "outputs", None) or [None]))
        accuracy = ["accuracy"] if outputs == 1 else [["accuracy"] for _ in range(outputs)]
        metrics = accuracy if metrics is None else metrics
    check_optimizer(chosen)
    if learning_rate is not None:
        _set_rate(chosen, learning_rate)
    # What is not chosen stays, also in what is saved.
    before = dict(model._compile_config.config) if model.compiled and hasattr(model, "_compile_config") else {}
    # One that does not scale the loss by now was not to.
    unscaled = {"auto_scale_loss": False} if model.compiled and chosen is model.optimizer else {}
    model.compile(optimizer=chosen, loss=loss, metrics=metrics, **unscaled)
    if (now := getattr(getattr(model, "_compile_config", None), "config", None)) is None:
        return
    for names in TOGETHER:
        if all(now.get(name) is None for name in names):
            now.update({name: before.get(name) for name in names})
    # Found out anew wherever it is loaded: another backend's answer is another.
    now["jit_compile"] = "auto"


def _set_rate(optimizer: keras.optimizers.Optimizer, learning_rate: float) -> None:
    """Gives an optimizer a fixed rate, also in place of a schedule. Raises `ModelError` for several optimizers."""
    optimizers = updating(optimizer)
    received = f"{type(optimizer).__name__}, whose optimizers have learning rates of their own"
    expected, instead = "a model with one optimizer for train.learning_rate", "these rates as arguments of model.build"
    refuse((len(optimizers) != 1, expected, received, instead), error=ModelError)
    (one,) = optimizers
    if isinstance(one._learning_rate, keras.Variable):
        one._learning_rate.assign(learning_rate)
        return
    named = {"name": "learning_rate", "dtype": keras.config.floatx(), "aggregation": "only_first_replica"}
    with keras.name_scope(one.name, caller=one):
        rate = keras.Variable(learning_rate, trainable=False, **named)
    one._track_variable(rate)
    # Where Keras has it, which saves variables by their places.
    one._variables.insert(1, one._variables.pop())
    one._learning_rate = rate


class _Scaled(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A schedule, or a function of no arguments, whose rates are all multiplied by one number."""

    def __init__(self, schedule: Any, scale: float) -> None:
        self.schedule, self._scale = schedule, scale

    def __call__(self, step: Any) -> Any:
        of_step = isinstance(self.schedule, keras.optimizers.schedules.LearningRateSchedule)
        return (self.schedule(step) if of_step else self.schedule()) * self._scale


def scale(optimizer: keras.optimizers.Optimizer, scale: float) -> None:
    """Multiplies the learning rate of each optimizer that updates weights, also one of a schedule."""
    for one in updating(optimizer):
        rate = one._learning_rate
        if isinstance(rate, keras.Variable):
            rate.assign(rate * scale)
        else:
            one._learning_rate = _Scaled(rate, scale)


def unscaled(optimizer: keras.optimizers.Optimizer) -> None:
    """Gives an optimizer back the schedules that it was made with, which load without this program."""
    for one in updating(optimizer):
        if isinstance(one._learning_rate, _Scaled):
            one._learning_rate = one._learning_rate.schedule


def forget(model: keras.Model, forgetful: Callable[[keras.layers.Layer, BlockCall], BlockCall], stateful: bool) -> None:
    """Calls a built model's blocks, layers of layers, through `forgetful`; `ModelError` where that saves nothing."""
    # Without `stateful`, blocks stay as they are that calling twice would change twice, as a normalization's averages.

    def averages(block: keras.layers.Layer) -> bool:
        return any("float" in keras.backend.standardize_dtype(one.dtype) for one in block.non_trainable_variables)

    blocks = [block for block in _blocks(model) if stateful or not averages(block)]
    why = "which keeps what goes into a block and computes the rest again"
    without = "" if stateful else " without batch statistics"
    expected = f"a model of several blocks, layers made of layers{without}, for train.remat=true, {why}"
    received = f"{model.name} with {len(blocks)}: it would keep as much as without"
    instead = "train.remat=false, or a smaller train.replica_batch"
    refuse((len(blocks) < 2, expected, received, instead), error=ModelError)

    def refuse_loss(name: str, loss: Any) -> None:
        expected = "blocks that add no loss as they are called for train.remat=true, which calls them again"
        raise ModelError(expected, f"{name}, which does", "train.remat=false")

    for block in blocks:
        # Past Keras's own setter: what is saved of a layer does not know of it.
        vars(block)["call"] = forgetful(block, block.call)
        for layer in block._flatten_layers():
            vars(layer)["add_loss"] = partial(refuse_loss, block.name)


def _blocks(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    for inner in layer._flatten_layers(include_self=False, recursive=False):
        if isinstance(inner, keras.Model):
            yield from _blocks(inner)
        # A recurrent layer is a loop, whose steps are not to be forgotten as one.
        elif not isinstance(inner, keras.layers.RNN | keras.layers.Bidirectional) and any(
            part.trainable_variables for part in inner._flatten_layers(include_self=False)
        ):
            yield inner


def overlooked(model: keras.Model, batch: Batch) -> Iterator[str]:
    """Yields notes on what a built model of a user's own class does to no effect; `batch` has the data's structure."""
    kind = type(model)
    # Training is a loop of this program's.
    names = ("fit", "make_train_function", "make_test_function")
    if uncalled := [name for name in names if getattr(kind, name) is not getattr(keras.Model, name)]:
        are = "is" if len(uncalled) == 1 else "are"
        yield f"{kind.__name__} has {' and '.join(uncalled)} of its own, which {are} not called: a train_step is."
    if kind.compute_metrics is keras.Model.compute_metrics:
        return
    symbols = keras.tree.map_structure(
        lambda leaf: keras.KerasTensor(leaf.shape, keras.backend.standardize_dtype(leaf.dtype)), batch
    )
    x, y, weights = keras.utils.unpack_x_y_sample_weight(symbols)
    try:
        y_pred = labels.predicted(model, x)
        returned = compute_output_spec(model.compute_metrics, x, y, y_pred, sample_weight=weights)
        kept = compute_output_spec(model.get_metrics_result)
    except RAISED:
        # Whatever is wrong is said where a step is traced.
        return
    if isinstance(returned, Mapping) and (unkept := sorted(set(returned) - set(kept))):
        yield (
            f"What compute_metrics of {kind.__name__} returns as {', '.join(unkept)} is not logged, since no metric of "
            f"the model has that name. Return it from get_metrics_result, which has the metrics of all replicas."
        )


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
    # A model that cannot be called has no outputs.
    with contextlib.suppress(*RAISED):
        outputs = keras.tree.flatten(labels.predicted(model, x)) if isinstance(error, TypeError) else []
        if any(keras.backend.standardize_dtype(output.dtype) in HALF for output in outputs):
            return 'dtype="float32" in the layers that make outputs, which losses and metrics then take in full'
    return "it on one batch with Keras alone"

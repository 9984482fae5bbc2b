"""Compiles a model with what a run chooses, so that what it does not choose stays, also in what is saved."""

from typing import Any

import keras

from pipeline.worker import rates
from pipeline.worker.model_error import ModelError

# What a loss brings along, and what metrics do: given anew together.
TOGETHER = (("loss", "loss_weights"), ("metrics", "weighted_metrics"))


def check_made(made: object) -> None:
    """Refuses what no engine trains: what is no model, and a model whose steps must not be compiled."""
    if not isinstance(made, keras.Model):
        raise ModelError(f"Expected the model's function to return a keras.Model, received {type(made).__name__}.")
    if made.compiled and made.run_eagerly:
        raise ModelError(
            "a model whose steps may be compiled",
            "run_eagerly=True from model.build",
            "run_eagerly=False; to debug, model.fit without this program",
        )


def check_optimizer(optimizer: keras.optimizers.Optimizer) -> None:
    """Refuses Horovod's wrapper of an optimizer, under which Keras 3 trains each replica by itself, in silence."""
    for one in rates.within(optimizer):
        if any(kind.__module__.partition(".")[0] == "horovod" for kind in type(one).__mro__):
            raise ModelError(
                "an optimizer without Horovod's DistributedOptimizer, which averages nothing under Keras 3",
                f"{type(one).__name__} in it",
                "the optimizer that it wraps, with strategy=multi_worker strategy.collective=horovod",
            )


def check_batches(made: keras.Model) -> None:
    """Refuses a model that takes batches of one size alone, as a stateful RNN does."""
    for tensor in keras.tree.flatten(getattr(made, "inputs", None) or ()):
        if tensor.shape[0] is not None:
            raise ModelError(
                "a model that takes batches of any size, since each replica has a part of a batch and the "
                "last one may be short",
                f"one that takes {tensor.shape[0]} alone (input {tensor.name})",
                "keras.Input(shape) without a batch size, and stateful=False in recurrent layers",
            )


def compile_chosen(
    made: keras.Model, optimizer: Any, learning_rate: float | None, loss: Any, metrics: Any, own_steps: bool = False
) -> None:
    """Compiles with what is not None.

    A model that is not compiled gets Adam, and, unless it has steps of its own, sparse categorical cross-entropy and
    accuracy, of each output.
    """
    if made.compiled:
        chosen = made.optimizer if optimizer is None else keras.optimizers.get(optimizer)
    else:
        chosen = keras.optimizers.get("adam" if optimizer is None else optimizer)
        if not own_steps:
            loss = "sparse_categorical_crossentropy" if loss is None else loss
            metrics = _accuracy(made) if metrics is None else metrics
    check_optimizer(chosen)
    if learning_rate is not None:
        rates.set_rate(chosen, learning_rate)
    compile_anew(made, chosen, loss, metrics)


def _accuracy(made: keras.Model) -> list[Any]:
    """Of each output, as Keras takes it: one for all is refused where there are several."""
    outputs = len(keras.tree.flatten(getattr(made, "outputs", None) or [None]))
    return ["accuracy"] if outputs == 1 else [["accuracy"] for _ in range(outputs)]


def compile_anew(made: keras.Model, optimizer: Any, loss: Any, metrics: Any) -> None:
    """Compiles with the optimizer, and with loss and metrics where they are not None.

    A compiled model keeps the others while it trains. Keras would leave them out of what it saves, and of copies.
    """
    before = dict(made._compile_config.config) if made.compiled and hasattr(made, "_compile_config") else {}
    # One that does not scale the loss by now was not to.
    unscaled = {"auto_scale_loss": False} if made.compiled and optimizer is made.optimizer else {}
    made.compile(optimizer=optimizer, loss=loss, metrics=metrics, **unscaled)
    now = getattr(getattr(made, "_compile_config", None), "config", None)
    if now is None:
        return
    for names in TOGETHER:
        if all(now.get(name) is None for name in names):
            now.update({name: before.get(name) for name in names})
    # Found out anew wherever it is loaded: another backend's answer is another.
    now["jit_compile"] = "auto"

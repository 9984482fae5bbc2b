"""Callbacks as Keras's `fit` calls them, its means of losses, and the copy of a model that callbacks evaluate."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import keras
import numpy as np
import tensorflow as tf

from pipeline.data.nested import Nested
from pipeline.worker.callbacks import TEST_BATCH_HOOKS, Callbacks, overrides
from pipeline.worker.data.reading import Batch
from pipeline.worker.fit.passes import UNTIL_IT_ENDS
from pipeline.worker.loop import Totals, TrainingLoop
from pipeline.worker.model_error import TrainingError
from pipeline.worker.tensorflow import tables


class KerasHooks(Callbacks):
    """The hooks, which also know the epoch and send everything that was restored at the start to all processes."""

    def __init__(
        self,
        spec: Nested[keras.KerasTensor],
        initial_epoch: int,
        verbose: int | str,
        callbacks: Sequence[keras.callbacks.Callback],
        loop: TrainingLoop,
        epochs: int,
        steps: int,
    ) -> None:
        """`spec` is a batch of what it trains on, in shape and type."""
        steps_per_epoch = None if steps == UNTIL_IT_ENDS else steps
        super().__init__(
            callbacks, loop, epochs, steps_per_epoch, verbose, partial(copied, loop.model, spec), tables.weights
        )  # fmt: skip
        self.epoch, self._initial_epoch = 0, initial_epoch
        self.every_test_batch = any(overrides(callback, TEST_BATCH_HOOKS) for callback in callbacks)

    @property
    def first_epoch(self) -> int:
        """Keras's: where a callback has restored a training, the epoch after it."""
        return self.model._initial_epoch or self._initial_epoch

    def call(self, hook: str, *arguments: int | Mapping[str, float]) -> None:
        """Runs `hook`; see `Callbacks`."""
        if hook == "on_epoch_begin":
            (epoch,) = arguments
            assert isinstance(epoch, int), "Keras's hook takes the epoch"
            self.epoch = epoch
        if hook in TEST_BATCH_HOOKS and not self.every_test_batch:
            return
        super().call(hook, *arguments)
        if hook == "on_train_begin" and self._shares:
            self._send_restored()

    def from_first(self, number: float) -> float:
        """The first process's number, on every process."""
        return number if self.loop.alone else float(self.loop.from_first([tf.constant([number], tf.float64)])[0][0])

    def history(self) -> keras.callbacks.History:
        """Returns the history of the epochs: on every process what the first one recorded."""
        recorded = self.model.history
        if self.loop.alone:
            return recorded
        record = json.dumps([recorded.epoch, recorded.history], default=_plain).encode() if self.loop.chief else b""
        length = int(self.from_first(len(record)))
        (text,) = self.loop.from_first([tf.constant(list(record or bytes(length)), tf.float64)])
        if not self.loop.chief:
            recorded.epoch, recorded.history = json.loads(bytes(text.numpy().astype(np.uint8)))
        return recorded

    def _send_restored(self) -> None:
        """All variables and the epoch: `BackupAndRestore` has read them in the first process alone."""
        self._send_values(self.loop.variables())
        self.model._initial_epoch = int(self.from_first(self.model._initial_epoch or 0)) or None


class KerasTotals(Totals):
    """Keras's means: of the total loss over examples, and of each output's loss over steps."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__(names)
        self._weights = np.zeros(len(names))

    def add(self, values: np.ndarray, sizes: np.ndarray) -> None:
        """Adds losses [steps, losses] of steps with so many examples [steps]."""
        weights = np.ones(values.shape)
        weights[:, 0] = sizes
        self._sums += (values * weights).sum(axis=0)
        self._weights += weights.sum(axis=0)

    def means(self) -> dict[str, float]:
        """The mean of each loss so far."""
        return dict(zip(self._names, (self._sums / np.maximum(self._weights, 1.0)).tolist(), strict=True))


def _plain(value: np.ndarray | float) -> object:
    return np.asarray(value).tolist()


def copied(model: keras.Model, batch: Batch) -> keras.Model:
    """A compiled model made once more, outside its strategy, and built for such a batch. Raises `TrainingError`."""
    copy = _made_again(model)
    config = model._compile_config.config
    copy.compile(
        optimizer="sgd",
        loss=config["loss"],
        loss_weights=config["loss_weights"],
        metrics=keras.tree.map_structure(_fresh, config["metrics"]),
        weighted_metrics=keras.tree.map_structure(_fresh, config["weighted_metrics"]),
    )
    copy._symbolic_build(data_batch=batch)
    return copy


def _made_again(model: keras.Model) -> keras.Model:
    """The model, not compiled, in the first of Keras's ways that takes it: layer by layer, as its class says, or from
    what it was made of.
    """
    ways: tuple[Callable[[], keras.Model], ...] = (
        lambda: keras.models.clone_model(model, clone_function=_layer_again, recursive=True),
        lambda: type(model).from_config(model.get_config()),
        lambda: type(model)(**model._auto_config.config),  # where all of that is plain values
    )
    reasons = []
    for way in ways:
        try:
            return way()
        except Exception as error:  # whatever a class of a user's own raises
            reasons.append(str(error))
    received = f"{type(model).__name__}, which it cannot ({reasons[1].splitlines()[0]})"
    instead = "get_config and from_config in its class, or to evaluate after fit"
    raise TrainingError("a model that Keras can copy, for callbacks that evaluate or predict", received, instead)


def _layer_again(layer: keras.layers.Layer) -> keras.layers.Layer:
    """A layer as its config says, or from what it was made of; one that has no state may be the same."""
    try:
        return type(layer).from_config(layer.get_config())
    except Exception:  # whatever a class of a user's own raises
        if layer._auto_config is not None:
            return type(layer)(**layer._auto_config.config)
        if not layer.variables:
            return layer
        raise


def _fresh(metric: object) -> object:
    """A metric without what it has counted."""
    return type(metric).from_config(metric.get_config()) if isinstance(metric, keras.metrics.Metric) else metric

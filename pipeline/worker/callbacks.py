"""Runs Keras callbacks once, in the first process, and lets every process obey what they decide.

A callback may end training, set the learning rate or change weights. After each hook those three are sent from the
first process to the others in one reduction; with one process nothing is sent.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from pipeline.worker.alone import Alone, weights_of
from pipeline.worker.loop import TrainingError

# What every process calls with arrays of equal types and shapes; each gets the first one's.
Agree: TypeAlias = Callable[[Sequence[Any]], list[Any]]

TRAIN_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
TEST_BATCH_HOOKS = ("on_test_batch_begin", "on_test_batch_end")


def check(callbacks: Sequence[object]) -> None:
    """Refuses what a run cannot call, or does itself. Raises `TrainingError`."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise TrainingError(
                "Expected no BackupAndRestore among train.callbacks, since a run writes checkpoints of its own and "
                "goes on from the last one, received one. Try checkpoint.every_epochs=1 in its place."
            )
        if type(callback).__module__.partition(".")[0] == "horovod":
            raise TrainingError(
                f"Expected no callback of Horovod's among train.callbacks, which all processes would have to call, and "
                f"whose work a run does itself, received {type(callback).__name__}. Try leaving it out."
            )
        if not isinstance(callback, keras.callbacks.Callback):
            raise TrainingError(f"Expected train.callbacks to be Keras callbacks, received {type(callback).__name__}.")


class Callbacks:
    """The hooks of a training, called on every process at the same moments and run on the first."""

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        send: Agree,
        chief: bool,
        alone: bool,
        epochs: int,
        steps: int | None,
        verbose: int | str = 0,
        plain: Callable[[], keras.Model] | None = None,
        weights: Callable[[keras.Model], list[np.ndarray]] = weights_of,
        optimizers: Callable[[], Sequence[keras.optimizers.Optimizer]] = tuple,
    ) -> None:
        """`send` gives all processes the first one's values; `steps` is the number of steps in an epoch; `alone` says
        that there is no other process.

        `verbose` is that of Keras's own fit, whose progress bar the first process then shows. `plain` makes the model
        once more, outside the strategy, for callbacks that evaluate, with the `weights` of the other one. The
        learning rates are those of the `optimizers`.
        """
        self.model, self.chief = model, chief
        self.own = list(callbacks)
        self._alone = Alone(model, plain or keras.Model, weights)
        self._optimizers = optimizers
        self._shares = bool(callbacks) and not alone
        self._batches_matter = any(map(_may_change_weights_at_batches, callbacks))
        self._send = send
        model.stop_training = False
        self._list = keras.callbacks.CallbackList(
            list(callbacks) if chief else [],
            add_history=True,
            add_progbar=chief and verbose != 0,
            model=model,
            verbose=verbose,
            epochs=epochs,
            steps=steps,
        )
        # Which of them ended training is known to the first process alone.
        self.watched = self._list.callbacks = Watched(self._list.callbacks, model)

    @property
    def restored_epoch(self) -> int | None:
        """The epoch, counted from 1, whose weights an `EarlyStopping` puts back at the end of training."""
        restored = [
            callback.best_epoch + 1
            for callback in self.own
            if isinstance(callback, keras.callbacks.EarlyStopping) and callback.best_weights is not None
        ]
        return restored[-1] if restored else None

    @property
    def first_epoch(self) -> int:
        """The epoch that training begins with, known once `on_train_begin` was called."""
        return 0

    def call(self, hook: str, *arguments: int | Mapping[str, float]) -> None:
        """Runs `hook`, such as "on_epoch_end", and makes its decisions everybody's."""
        watched = self._shares and (self._batches_matter or "batch" not in hook)
        before = self._weights() if watched and self.chief else []
        if self.chief:
            with self._alone.answers():
                getattr(self._list, hook)(*arguments)
        if self._shares:
            after = self._weights() if before else []
            changed = any(not np.array_equal(old, new) for old, new in zip(before, after, strict=True))
            self._obey(changed)

    def _obey(self, changed: bool) -> None:
        rates = [optimizer._learning_rate for optimizer in self._optimizers()]
        fixed = [rate for rate in rates if isinstance(rate, keras.Variable)]
        mine = [float(self.model.stop_training), float(changed), *(float(_value(rate)) for rate in fixed)]
        (decided,) = self._send([np.array(mine, np.float64)])
        stop, changed_there, *learning_rates = np.asarray(decided)
        self.model.stop_training = bool(stop)
        for rate, learning_rate in zip(fixed, learning_rates, strict=True):
            if np.float32(learning_rate) != np.float32(_value(rate)):
                rate.assign(learning_rate)
        if changed_there:
            self._send_values(self.model.weights)

    def _send_values(self, variables: list[keras.Variable]) -> None:
        for variable, value in zip(variables, self._send([_value(variable) for variable in variables]), strict=True):
            variable.assign(value)

    def _weights(self) -> list[np.ndarray]:
        return [_value(variable) for variable in self.model.weights]


class Watched(list[keras.callbacks.Callback]):
    """Callbacks; `stopped_by` is the class of the one that set `model.stop_training`, or that name where none did."""

    def __init__(self, callbacks: Sequence[keras.callbacks.Callback], model: keras.Model) -> None:
        super().__init__(callbacks)
        self._model, self.stopped_by = model, "model.stop_training"

    def __iter__(self) -> Iterator[keras.callbacks.Callback]:
        for callback in super().__iter__():
            before = self._model.stop_training
            yield callback
            if self._model.stop_training and not before:
                self.stopped_by = type(callback).__name__


def _value(variable: keras.Variable | float) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(variable))


def overrides(callback: keras.callbacks.Callback, hooks: Sequence[str]) -> bool:
    """Has the callback one of these hooks, as a method or, as a `LambdaCallback`, as a function it was given?

    >>> overrides(keras.callbacks.LambdaCallback(on_train_batch_end=print), TRAIN_BATCH_HOOKS)
    True
    >>> overrides(keras.callbacks.EarlyStopping(), TRAIN_BATCH_HOOKS)
    False
    """
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, hook), "__func__", None) is not getattr(base, hook) for hook in hooks)


def is_own(callback: keras.callbacks.Callback) -> bool:
    """Does a person's code run in it, and not Keras's alone?"""
    lambdas = isinstance(callback, keras.callbacks.LambdaCallback)
    return lambdas or not type(callback).__module__.startswith("keras.")


def _may_change_weights_at_batches(callback: keras.callbacks.Callback) -> bool:
    """A person's own hook between batches may do anything; Keras's own leave weights alone there."""
    return is_own(callback) and overrides(callback, TRAIN_BATCH_HOOKS)

"""Runs Keras callbacks once, in the first process, and lets every process obey what they decide.

A callback may end training, set the learning rate or change any variable that training goes on with. After each hook
the first two are sent from the first process to the others in one reduction, and then the variables that were changed;
with one process nothing is sent.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from pipeline.worker.alone import Alone, weights_of
from pipeline.worker.held import PLAIN, Plain, Variable, plain_values
from pipeline.worker.loop import TrainingError

# What every process calls with arrays of equal types and shapes; each gets the first one's.
Agree: TypeAlias = Callable[[Sequence[Any]], list[Any]]

# Sent from the first process in pieces of so many 8-byte numbers.
PIECE = 1 << 22
TRAIN_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
TEST_BATCH_HOOKS = ("on_test_batch_begin", "on_test_batch_end")


def check(callbacks: Sequence[object]) -> None:
    """Refuses what a run cannot call, or does itself. Raises `TrainingError`."""
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise TrainingError(
                "no BackupAndRestore among train.callbacks, since a run writes checkpoints of its own and "
                "goes on from the last one",
                "one",
                "checkpoint.every_epochs=1 in its place",
            )
        if type(callback).__module__.partition(".")[0] == "horovod":
            raise TrainingError(
                "no callback of Horovod's among train.callbacks, which all processes would have to call, and "
                "whose work a run does itself",
                type(callback).__name__,
                "leaving it out",
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
        variables: Callable[[], Sequence[Variable]] = tuple,
        value: Callable[[Variable], np.ndarray] = keras.ops.convert_to_numpy,
        metrics: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`send` gives all processes the first one's values; `steps` is the number of steps in an epoch; `alone` says
        that there is no other process.

        `verbose` is that of Keras's own fit, whose progress bar the first process then shows. `plain` makes the model
        once more, outside the strategy, for callbacks that evaluate, with the `weights` of the other one. The
        learning rates are those of the `optimizers`. All agree on the `variables`, of which `value` gives the values.
        Inside `metrics` the first process may read and change what metrics count; all enter it together.
        """
        self.model, self.chief = model, chief
        self.own = list(callbacks)
        self._alone = Alone(model, plain or keras.Model, weights, value)
        self._optimizers, self._variables, self._value, self._metrics = optimizers, variables, value, metrics
        self._shares = bool(callbacks) and not alone
        self._batches_matter = any(map(_may_change_weights_at_batches, callbacks))
        # What a step that is not yet traced reads, and code of a person's own may change.
        self._plain = plain_values([model]) if self._shares and any(map(is_own, callbacks)) else {}
        self._is_traced = False
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
        self._is_traced |= hook == "on_train_batch_end"
        watched = self._shares and self.chief and (self._batches_matter or "batch" not in hook)
        before = self._values() if watched else []
        words = {name: place.get() for name, place in self._plain.items()} if watched else {}
        with self._metrics() if self._is_of_own(hook) else contextlib.nullcontext():
            if self.chief:
                with self._alone.answers():
                    getattr(self._list, hook)(*arguments)
        if self._shares:
            after = self._values() if before else []
            self._obey([not _is_same(old, new) for old, new in zip(before, after, strict=True)], self._changed(words))

    def _is_of_own(self, hook: str) -> bool:
        """True if code of a person's own runs in a hook."""
        hooks = TRAIN_BATCH_HOOKS if hook in TRAIN_BATCH_HOOKS else (hook,)
        return any(is_own(callback) and overrides(callback, hooks) for callback in self.own)

    def _changed(self, before: Mapping[str, Plain]) -> dict[str, Plain]:
        """Numbers and words that were others `before`, by their names. Raises `TrainingError` for what is none."""
        now = {name: self._plain[name].get() for name in before}
        other = {name: value for name, value in now.items() if value is not before[name]}
        for name, value in other.items():
            if not isinstance(value, PLAIN) and not self._is_traced:
                raise TrainingError(
                    "callbacks to change variables and numbers that are there when training begins, of which "
                    "all processes learn",
                    f"{name.rpartition('/')[2]}, which one has made a {type(value).__name__}",
                    "making it in model.build",
                )
        return {name: value for name, value in other.items() if isinstance(value, PLAIN) and value != before[name]}

    def _obey(self, changed: list[bool], words: Mapping[str, Plain]) -> None:
        """Has all processes stop, take the first one's learning rates, and take its values of what was changed."""
        text = json.dumps(words).encode() if words else b""
        rates = [optimizer._learning_rate for optimizer in self._optimizers()]
        fixed = [rate for rate in rates if isinstance(rate, keras.Variable)]
        if changed:
            told = {id(rate) for rate in fixed}
            pairs = zip(self._variables(), changed, strict=True)
            changed = [is_changed and id(variable) not in told for variable, is_changed in pairs]
        mine = [self.model.stop_training, any(changed), len(text), *(_number(rate) for rate in fixed)]
        (decided,) = self._send([np.array(mine, np.float64)])
        stop, changed_there, length, *learning_rates = np.asarray(decided)
        self.model.stop_training = bool(stop)
        for rate, learning_rate in zip(fixed, learning_rates, strict=True):
            if np.float32(learning_rate) != np.float32(_number(rate)):
                rate.assign(learning_rate)
        if changed_there:
            variables = self._variables()
            (which,) = self._send([np.array(changed or [False] * len(variables), np.float64)])
            self._send_values([one for one, is_changed in zip(variables, np.asarray(which), strict=True) if is_changed])
        if length:
            found = json.loads(self._sent(text.ljust(int(length))))
            for name in found if not self.chief else ():
                self._plain[name].put(found[name])

    def _send_values(self, variables: Sequence[Variable]) -> None:
        """Gives variables the first process's values, of any type, which travel as their bytes."""
        values = [self._value(variable) for variable in variables]
        data, start = self._sent(b"".join(value.tobytes() for value in values)), 0
        for variable, value in zip(variables, values, strict=True):
            variable.assign(np.frombuffer(data, value.dtype, value.size, start).reshape(value.shape))
            start += value.nbytes

    def _sent(self, data: bytes) -> bytes:
        """The first process's bytes, of which all have as many."""
        words = np.frombuffer(data.ljust(-(-len(data) // 8) * 8, b"\0"), np.int64)
        pieces = [words[start : start + PIECE] for start in range(0, len(words), PIECE)]
        return b"".join(np.asarray(self._send([piece])[0]).tobytes() for piece in pieces)[: len(data)]

    def _values(self) -> list[np.ndarray]:
        return [self._value(variable) for variable in self._variables()]


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


def _number(rate: keras.Variable | float) -> np.ndarray:
    return np.array(keras.ops.convert_to_numpy(rate))


def _is_same(old: np.ndarray, new: np.ndarray) -> bool:
    """True if two values are the same to the last bit, as they are where they lie in the same memory."""
    if old.__array_interface__["data"] == new.__array_interface__["data"]:
        return True
    return np.array_equal(old.reshape(-1).view(np.uint8), new.reshape(-1).view(np.uint8))


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

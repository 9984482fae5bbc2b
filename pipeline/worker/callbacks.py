"""Runs Keras callbacks once, in the first process, and has every process follow what they decide.

A callback may end training, set the learning rate or change any variable that training goes on with: after each hook
the first process sends that to the others. Callbacks that evaluate or predict are answered by a copy of the model,
outside the strategy, whose replicas in other processes know nothing about it.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import keras
import numpy as np

from pipeline.errors import refuse
from pipeline.private_keras import keras_variables
from pipeline.worker.loop import TrainingLoop
from pipeline.worker.model_error import TrainingError
from pipeline.worker.patched import all_patched
from pipeline.worker.state import of_random_state, put_back_random_state, sent
from pipeline.worker.variables import PLAIN, Plain, Variable, held, kept_by_metrics, plain_values

# The values of a model's variables, in the order of a copy's.
Weights: TypeAlias = Callable[[keras.Model], list[np.ndarray]]
ANSWERED = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
REFUSED = ("fit", "train_on_batch")


class ModelCopy:
    """Answers what callbacks ask of a model with a copy, which `make` makes when it is first needed."""

    def __init__(self, loop: TrainingLoop, make: Callable[[], keras.Model], weights: Weights) -> None:
        self._model, self._value, self._make, self._weights = loop.model, loop.value, make, weights
        self._copy: keras.Model | None = None
        # Variables of losses and the like, and the copy's.
        self._pairs: list[tuple[Variable, Variable]] = []

    def answers(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model's methods are answered here, and `int` and `float` of a variable are those of its value."""
        answered: dict[str, object] = {name: partial(self._answer, name) for name in ANSWERED}
        answered |= {name: partial(_refuse, name) for name in REFUSED}
        # TensorFlow's variable of several copies is no number to Python.
        numbers = {
            "__int__": lambda variable: int(keras.ops.convert_to_numpy(variable)),
            "__float__": lambda variable: float(keras.ops.convert_to_numpy(variable)),
        }
        return all_patched([(self._model, answered), (keras_variables.Variable, numbers)])

    def _answer(self, name: str, *arguments: object, **named: object) -> object:
        if self._copy is None:
            # A model that is made draws from the random state that training goes on with.
            state = of_random_state()
            try:
                self._copy = self._make()
            finally:
                put_back_random_state(state)
            pairs = zip(_beside(self._model), _beside(self._copy), strict=False)
            self._pairs = [(own, its) for own, its in pairs if own is not its and tuple(own.shape) == tuple(its.shape)]
        for own, its in self._pairs:
            its.assign(self._value(own))
        for value, variable in zip(self._weights(self._model), self._copy.weights, strict=True):
            variable.assign(value)
        answer = getattr(self._copy, name)(*arguments, **named)
        for own, its in self._pairs:
            # A loss may change its own, wherever it is computed.
            if not np.array_equal(self._value(own), value := keras.ops.convert_to_numpy(its)):
                own.assign(value)
        return answer


def _refuse(name: str, *arguments: object, **named: object) -> None:
    instead = "a training of its own, or model.evaluate and model.predict, which are answered"
    raise TrainingError("callbacks to leave training to the run", f"a call of model.{name} in one", instead)


def _beside(model: keras.Model) -> list[Variable]:
    listed = [*model.variables, *model.metrics_variables, model.optimizer]
    return [*kept_by_metrics(model.metrics), *held([model], listed)]


TRAIN_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
TEST_BATCH_HOOKS = ("on_test_batch_begin", "on_test_batch_end")


def check(callbacks: Sequence[object]) -> None:
    """Refuses what a run cannot call, or does itself. Raises `TrainingError`."""
    for callback in callbacks:
        refuse(
            (isinstance(callback, keras.callbacks.BackupAndRestore), "no BackupAndRestore among train.callbacks, since "
             "a run writes checkpoints of its own and goes on from the last one", "one",
             "checkpoint.every_epochs=1 in its place"),
            (type(callback).__module__.partition(".")[0] == "horovod", "no callback of Horovod's among "
             "train.callbacks, which all processes would have to call, and whose work a run does itself",
             type(callback).__name__, "leaving it out"),
            error=TrainingError,
        )  # fmt: skip
        if not isinstance(callback, keras.callbacks.Callback):
            raise TrainingError(f"Expected train.callbacks to be Keras callbacks, received {type(callback).__name__}.")


class Callbacks:
    """The hooks of a training, called on every process at the same moments and run on the first."""

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        loop: TrainingLoop,
        epochs: int,
        steps: int | None,
        verbose: int | str = 0,
        plain: Callable[[], keras.Model] = keras.Model,
        weights: Weights = keras.Model.get_weights,
    ) -> None:
        """`plain` makes the model again, outside the strategy, for callbacks that evaluate."""
        self.loop, self.own = loop, list(callbacks)
        self.model = model = loop.model
        self._answering = ModelCopy(loop, plain, weights)
        self._shares = bool(callbacks) and not loop.alone
        # A user's own hook between batches may do anything; Keras's own leave weights alone there.
        self._batches_matter = any(is_own(one) and overrides(one, TRAIN_BATCH_HOOKS) for one in callbacks)
        # What a step that is not yet traced reads, and code of a user's own may change.
        self._plain = plain_values([model]) if self._shares and any(map(is_own, callbacks)) else {}
        self._is_traced = False
        model.stop_training = False
        run_here, has_bar = list(callbacks) if loop.chief else [], loop.chief and verbose != 0
        self._list = keras.callbacks.CallbackList(
            run_here, add_history=True, add_progbar=has_bar, model=model, verbose=verbose, epochs=epochs, steps=steps
        )
        # Which of them ended training is known to the first process alone.
        self.watched = self._list.callbacks = Watched(self._list.callbacks, model)
        # The epoch that training begins with, known once `on_train_begin` was called.
        self.first_epoch = 0

    def call(self, hook: str, *arguments: int | Mapping[str, float]) -> None:
        """Runs `hook`, such as "on_epoch_end", and makes its decisions everybody's."""
        self._is_traced |= hook == "on_train_batch_end"
        watched = self._shares and self.loop.chief and (self._batches_matter or "batch" not in hook)
        before = [self.loop.value(one) for one in self.loop.variables()] if watched else []
        words = {name: place.get() for name, place in self._plain.items()} if watched else {}
        hooks = TRAIN_BATCH_HOOKS if hook in TRAIN_BATCH_HOOKS else (hook,)
        runs_own = any(is_own(callback) and overrides(callback, hooks) for callback in self.own)
        with self.loop.metrics_at_hand() if runs_own else contextlib.nullcontext():
            if self.loop.chief:
                with self._answering.answers():
                    getattr(self._list, hook)(*arguments)
        if self._shares:
            after = [self.loop.value(one) for one in self.loop.variables()] if before else []
            self._obey([not _is_same(old, new) for old, new in zip(before, after, strict=True)], self._changed(words))

    def _changed(self, before: Mapping[str, Plain]) -> dict[str, Plain]:
        """Numbers and words that were others `before`, by their names. Raises `TrainingError` for what is none."""
        changed: dict[str, Plain] = {}
        for name, earlier in before.items():
            value = self._plain[name].get()
            if isinstance(value, PLAIN):
                changed |= {name: value} if value is not earlier and value != earlier else {}
            elif value is not earlier and not self._is_traced:
                expected = "callbacks to change variables and numbers that are there when training begins"
                received = f"{name.rpartition('/')[2]}, which one has made a {type(value).__name__}"
                raise TrainingError(f"{expected}, of which all processes learn", received, "making it in model.build")
        return changed

    def _obey(self, changed: Sequence[bool], words: Mapping[str, Plain]) -> None:
        rates = [optimizer._learning_rate for optimizer in self.loop.optimizers]
        fixed = [rate for rate in rates if isinstance(rate, keras.Variable)]
        pairs = zip(self.loop.variables() if changed else (), changed, strict=True)
        others = [is_changed and all(variable is not rate for rate in fixed) for variable, is_changed in pairs]
        places = [place for place, is_changed in enumerate(others) if is_changed]
        text = json.dumps([places, words]).encode() if places or words else b""
        numbers = [self.model.stop_training, len(text), *(_number(rate) for rate in fixed)]
        (decided,) = self.loop.from_first([np.array(numbers, np.float64)])
        stop, length, *learning_rates = np.asarray(decided)
        self.model.stop_training = bool(stop)
        for rate, learning_rate in zip(fixed, learning_rates, strict=True):
            if np.float32(learning_rate) != np.float32(_number(rate)):
                rate.assign(learning_rate)
        if not length:
            return
        places, words = json.loads(self._sent(text, int(length)))
        variables = self.loop.variables()
        self._send_values([variables[place] for place in places])
        for name, value in words.items() if not self.loop.chief else ():
            self._plain[name].put(value)

    def _send_values(self, variables: Sequence[Variable]) -> None:
        """Gives variables the first process's values, of any type, which travel as their bytes."""
        values = [self.loop.value(variable) for variable in variables]
        data, start = b"".join(value.tobytes() for value in values), 0
        data = self._sent(data, len(data))
        for variable, value in zip(variables, values, strict=True):
            variable.assign(np.frombuffer(data, value.dtype, value.size, start).reshape(value.shape))
            start += value.nbytes

    def _sent(self, data: bytes, size: int) -> bytes:
        return sent(data, size, lambda words: np.asarray(self.loop.from_first([words])[0]))


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
    in_one_place = old.__array_interface__["data"] == new.__array_interface__["data"]
    return in_one_place or np.array_equal(old.reshape(-1).view(np.uint8), new.reshape(-1).view(np.uint8))


def overrides(callback: keras.callbacks.Callback, hooks: Sequence[str]) -> bool:
    """True if the callback has one of these hooks, as a method or, in a `LambdaCallback`, as a function.

    >>> overrides(keras.callbacks.LambdaCallback(on_train_batch_end=print), TRAIN_BATCH_HOOKS)
    True
    >>> overrides(keras.callbacks.EarlyStopping(), TRAIN_BATCH_HOOKS)
    False
    """
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, hook), "__func__", None) is not getattr(base, hook) for hook in hooks)


def is_own(callback: keras.callbacks.Callback) -> bool:
    """True if a user's code runs in it, and not Keras's alone."""
    lambdas = isinstance(callback, keras.callbacks.LambdaCallback)
    return lambdas or not type(callback).__module__.startswith("keras.")

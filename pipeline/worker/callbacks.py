"""Runs Keras callbacks once, in the first process, and has every process follow what they decide.

After each hook the first process sends the others what a callback has changed of what training goes on with. Those
that evaluate or predict are answered by a copy of the model outside the strategy, unknown to other processes.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import keras
import numpy as np

from pipeline.errors import refuse
from pipeline.private_keras import keras_variables
from pipeline.worker.checkpoint import State
from pipeline.worker.loop import TrainingLoop
from pipeline.worker.model_error import TrainingError
from pipeline.worker.patched import all_patched
from pipeline.worker.state import of_random_state, on_all, put_back_random_state
from pipeline.worker.variables import PLAIN, Plain, Variable, held, kept_by_metrics, plain_values

# The values of a model's variables, in the order of a copy's.
Weights: TypeAlias = Callable[[keras.Model], list[np.ndarray]]
ANSWERED = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
REFUSED = ("fit", "train_on_batch")
TRAIN_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
TEST_BATCH_HOOKS = ("on_test_batch_begin", "on_test_batch_end")
# TensorFlow's variable of several copies is no number to Python.
NUMBERS = {
    "__int__": lambda variable: int(keras.ops.convert_to_numpy(variable)),
    "__float__": lambda variable: float(keras.ops.convert_to_numpy(variable)),
}


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
        # What answers for the model once it is asked, and pairs of variables of losses and the like, and those of it.
        self._make_copy, self._weights = plain, weights
        self._copy: keras.Model | None = None
        self._pairs: list[tuple[Variable, Variable]] = []
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
        loop = self.loop
        watched = self._shares and loop.chief and (self._batches_matter or "batch" not in hook)
        before = [loop.value(one) for one in loop.variables()] if watched else []
        words = {name: place.get() for name, place in self._plain.items()} if watched else {}
        hooks = TRAIN_BATCH_HOOKS if hook in TRAIN_BATCH_HOOKS else (hook,)
        runs_own = any(is_own(callback) and overrides(callback, hooks) for callback in self.own)
        with loop.metrics_at_hand() if runs_own else contextlib.nullcontext():
            if loop.chief:
                methods: dict[str, object] = {name: partial(self._answer, name) for name in ANSWERED}
                methods |= {name: partial(_refuse, name) for name in REFUSED}
                with all_patched([(self.model, methods), (keras_variables.Variable, NUMBERS)]):
                    getattr(self._list, hook)(*arguments)
        if self._shares:
            self._obey(before, self._changed(words))

    def _answer(self, name: str, *arguments: object, **named: object) -> object:
        if self._copy is None:
            # A model that is made draws from the random state that training goes on with.
            state = of_random_state()
            try:
                self._copy = self._make_copy()
            finally:
                put_back_random_state(state)
            pairs = zip(_beside(self.model), _beside(self._copy), strict=False)
            self._pairs = [(own, its) for own, its in pairs if own is not its and tuple(own.shape) == tuple(its.shape)]
        for own, its in self._pairs:
            its.assign(self.loop.value(own))
        for value, variable in zip(self._weights(self.model), self._copy.weights, strict=True):
            variable.assign(value)
        answer = getattr(self._copy, name)(*arguments, **named)
        for own, its in self._pairs:
            # A loss may change its own, wherever it is computed.
            if not np.array_equal(self.loop.value(own), value := keras.ops.convert_to_numpy(its)):
                own.assign(value)
        return answer

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

    def _obey(self, before: Sequence[np.ndarray], words: Mapping[str, Plain]) -> None:
        loop, all_rates = self.loop, [optimizer._learning_rate for optimizer in self.loop.optimizers]
        rates = [rate for rate in all_rates if isinstance(rate, keras.Variable)]
        places = [
            place for place, (variable, old) in enumerate(zip(loop.variables() if before else (), before, strict=True))
            if not _is_same(old, loop.value(variable)) and all(variable is not rate for rate in rates)
        ]  # fmt: skip
        numbers = [self.model.stop_training, bool(places or words), *map(_number, rates)]
        (decided,) = loop.from_first([np.array(numbers, np.float64)])
        stop, more, *learning_rates = np.asarray(decided)
        self.model.stop_training = bool(stop)
        for rate, learning_rate in zip(rates, learning_rates, strict=True):
            if np.float32(learning_rate) != np.float32(_number(rate)):
                rate.assign(learning_rate)
        if more:
            self._send(places, words)

    def _send(self, places: Iterable[int], words: Mapping[str, Plain]) -> None:
        """Gives all processes the first one's variables in these places, and its numbers and words."""
        variables, chief = self.loop.variables(), self.loop.chief
        values = {f"{place}": self.loop.value(variables[place]) for place in places if chief}
        state = self._on_all({"words": words}, values)
        for place, value in state.arrays.items():
            variables[int(place)].assign(value)
        for name, word in state.values["words"].items() if not chief else ():
            self._plain[name].put(word)

    def _on_all(self, values: dict[str, object], arrays: dict[str, np.ndarray]) -> State:
        own = State(values, arrays) if self.loop.chief else None
        state = on_all(own, lambda numbers: np.asarray(self.loop.from_first([numbers])[0]))
        assert state is not None, "the first process has one"
        return state


def _refuse(name: str, *arguments: object, **named: object) -> None:
    instead = "a training of its own, or model.evaluate and model.predict, which are answered"
    raise TrainingError("callbacks to leave training to the run", f"a call of model.{name} in one", instead)


def _beside(model: keras.Model) -> list[Variable]:
    listed = [*model.variables, *model.metrics_variables, model.optimizer]
    return [*kept_by_metrics(model.metrics), *held([model], listed)]


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
    """True if the callback has one of these hooks, as a method or, in a `LambdaCallback`, as a function."""
    base = keras.callbacks.Callback
    return any(getattr(getattr(callback, hook), "__func__", None) is not getattr(base, hook) for hook in hooks)


def is_own(callback: keras.callbacks.Callback) -> bool:
    """True if a user's code runs in it, and not Keras's alone."""
    lambdas = isinstance(callback, keras.callbacks.LambdaCallback)
    return lambdas or not type(callback).__module__.startswith("keras.")

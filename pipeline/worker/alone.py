"""Answers callbacks that evaluate and predict: with a copy of the model, outside the strategy, on the first process.

Keras's own `evaluate` would have all replicas compute, of which those of other processes know nothing. The copy has
the weights of the moment, computes what one device computes, and leaves the metrics of training as they are.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial

import keras
import numpy as np

from pipeline.private_keras import keras_variables
from pipeline.worker.held import Variable, held, kept_by_metrics
from pipeline.worker.loop import TrainingError
from pipeline.worker.state import of_random_state, put_back_random_state

ANSWERED = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
REFUSED = ("fit", "train_on_batch")


def weights_of(model: keras.Model) -> list[np.ndarray]:
    """The values of a model's weights."""
    return [np.asarray(keras.ops.convert_to_numpy(variable)) for variable in model.weights]


class Alone:
    """What callbacks ask of a model, answered by a copy that `make` makes when it is asked for first."""

    def __init__(
        self,
        model: keras.Model,
        make: Callable[[], keras.Model],
        weights: Callable[[keras.Model], list[np.ndarray]] = weights_of,
        value: Callable[[Variable], np.ndarray] = keras.ops.convert_to_numpy,
    ) -> None:
        """`weights` are the values of a model's variables, in the order that the copy has them, and `value` that of any
        other.
        """
        self._model, self._make, self._weights, self._value = model, make, weights, value
        self._copy: keras.Model | None = None
        # Variables of losses and the like, and the copy's.
        self._pairs: list[tuple[Variable, Variable]] = []

    @contextlib.contextmanager
    def answers(self) -> Iterator[None]:
        """Inside, the model's methods are answered here, and `int` and `float` of a variable are those of its value."""
        base = keras_variables.Variable
        kept = {name: getattr(base, name) for name in ("__int__", "__float__")}
        answered: dict[str, Callable[..., object]] = {name: partial(self._answer, name) for name in ANSWERED}
        answered |= {name: partial(self._refuse, name) for name in REFUSED}
        # Past Keras's own setter, which looks for weights in everything.
        vars(self._model).update(answered)
        for name, kind in (("__int__", int), ("__float__", float)):
            # TensorFlow's variable of several copies is no number to Python.
            setattr(base, name, lambda variable, kind=kind: kind(keras.ops.convert_to_numpy(variable)))
        try:
            yield
        finally:
            for name, method in kept.items():
                setattr(base, name, method)
            for name in answered:
                vars(self._model).pop(name, None)

    def _answer(self, name: str, *arguments: object, **named: object) -> object:
        answer = getattr(self._up_to_date(), name)(*arguments, **named)
        for mine, its in self._pairs:
            # A loss may change its own, wherever it is computed.
            if not np.array_equal(self._value(mine), made := keras.ops.convert_to_numpy(its)):
                mine.assign(made)
        return answer

    def _refuse(self, name: str, *arguments: object, **named: object) -> None:
        raise TrainingError(
            "callbacks to leave training to the run",
            f"a call of model.{name} in one",
            "a training of its own, or model.evaluate and model.predict, which are answered",
        )

    def _up_to_date(self) -> keras.Model:
        if self._copy is None:
            # A model that is made draws from the random state that training goes on with.
            state = of_random_state()
            try:
                self._copy = self._make()
            finally:
                put_back_random_state(state)
            pairs = list(zip(_beside(self._model), _beside(self._copy), strict=False))
            self._pairs = [
                (mine, its) for mine, its in pairs if mine is not its and tuple(mine.shape) == tuple(its.shape)
            ]
        for mine, its in self._pairs:
            its.assign(self._value(mine))
        for value, variable in zip(self._weights(self._model), self._copy.weights, strict=True):
            variable.assign(value)
        return self._copy


def _beside(model: keras.Model) -> list[Variable]:
    """The variables that a model's loss and metrics go by and that are no weights."""
    listed = [*model.variables, *model.metrics_variables, model.optimizer]
    return [*kept_by_metrics(model.metrics), *held([model], listed)]

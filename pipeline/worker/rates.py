"""The optimizers inside an optimizer, and their learning rates: another one, or a multiple of their own."""

from typing import Any

import keras

from pipeline.errors import refuse
from pipeline.worker.model_error import ModelError

# Those that update no weight themselves, and whose own learning rate is none.
HANDING_ON = (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)


def within(optimizer: keras.optimizers.Optimizer) -> tuple[keras.optimizers.Optimizer, ...]:
    """Returns the optimizers that an optimizer holds, each after those that it holds itself, and the optimizer last.

    >>> scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(name="inner"), name="outer")
    >>> [one.name for one in within(scaled)]
    ['inner', 'outer']
    """
    attributes = keras.tree.flatten(list(vars(optimizer).values()))
    held = [one for one in attributes if isinstance(one, keras.optimizers.Optimizer)]
    inner_ones = {id(one): one for inner in held for one in within(inner)}
    return (*inner_ones.values(), optimizer)


def updating(optimizer: keras.optimizers.Optimizer) -> tuple[keras.optimizers.Optimizer, ...]:
    """Returns those `within` an optimizer that update weights."""
    return tuple(one for one in within(optimizer) if not isinstance(one, HANDING_ON))


def set_rate(optimizer: keras.optimizers.Optimizer, learning_rate: float) -> None:
    """Gives an optimizer a fixed rate, also in place of a schedule. Raises `ModelError` for several optimizers."""
    optimizers = updating(optimizer)
    received = f"{type(optimizer).__name__}, whose optimizers have learning rates of their own"
    expected, instead = "a model with one optimizer for train.learning_rate", "these rates as arguments of model.build"
    refuse((len(optimizers) != 1, expected, received, instead), error=ModelError)
    (one,) = optimizers
    if isinstance(one._learning_rate, keras.Variable):
        one._learning_rate.assign(learning_rate)
        return
    with keras.name_scope(one.name, caller=one):
        rate = keras.Variable(
            learning_rate, dtype=keras.config.floatx(), trainable=False, aggregation="only_first_replica",
            name="learning_rate",
        )  # fmt: skip
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

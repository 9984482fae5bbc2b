"""The learning rate of an optimizer: another one, or a multiple of its own, also where it is a schedule."""

from typing import Any

import keras


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer that updates the weights: the one inside another that scales the loss, or the optimizer itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def with_learning_rate(optimizer: keras.optimizers.Optimizer, learning_rate: float) -> keras.optimizers.Optimizer:
    """The same optimizer with a fixed rate, also in place of a schedule, which Keras cannot assign over."""
    inner = innermost(optimizer)
    return type(inner).from_config(inner.get_config() | {"learning_rate": learning_rate})


class _Scaled(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A schedule whose rates are all multiplied by one number."""

    def __init__(self, schedule: keras.optimizers.schedules.LearningRateSchedule, scale: float) -> None:
        self.schedule, self._scale = schedule, scale

    def __call__(self, step: Any) -> Any:
        return self.schedule(step) * self._scale


def scale(optimizer: keras.optimizers.Optimizer, scale: float) -> None:
    """Multiplies an optimizer's learning rate, also one of a schedule."""
    inner = innermost(optimizer)
    rate = inner._learning_rate
    if isinstance(rate, keras.Variable):
        rate.assign(rate * scale)
    else:
        inner._learning_rate = _Scaled(rate, scale)


def unscaled(optimizer: keras.optimizers.Optimizer) -> None:
    """Gives an optimizer back the schedule that it was made with, which loads without this program."""
    inner = innermost(optimizer)
    if isinstance(inner._learning_rate, _Scaled):
        inner._learning_rate = inner._learning_rate.schedule

"""What Keras's `fit` and ours make of the same model and data."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import pipeline

History = keras.callbacks.History


def fitted(
    make: Callable[[], keras.Model], arguments: dict[str, Any], strategy: tf.distribute.Strategy | None = None,
    fit: Callable[..., History] = pipeline.fit,
) -> tuple[keras.Model, History]:  # fmt: skip
    """(a model that is made under a strategy, the history of fitting it); in the order of its data unless shuffled."""
    keras.utils.set_random_seed(3)
    with (strategy or tf.distribute.get_strategy()).scope():
        model = make()
    return model, fit(model, **{"verbose": 0, "shuffle": False} | arguments)


def by_keras(make: Callable[[], keras.Model], arguments: dict[str, Any]) -> tuple[keras.Model, History]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")
        return fitted(make, arguments, fit=keras.Model.fit)


def assert_same(ours: History, theirs: History, tolerance: float) -> None:
    assert list(ours.history) == list(theirs.history)
    assert ours.epoch == theirs.epoch
    for name, values in theirs.history.items():
        np.testing.assert_allclose(ours.history[name], values, tolerance, tolerance, err_msg=name)


def assert_same_weights(ours: keras.Model, theirs: keras.Model, tolerance: float = 1e-5) -> None:
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)

"""The model and the data that every choice is crossed on: of blocks, with a normalization, in a second."""

import keras
import numpy as np
import tensorflow as tf


@keras.saving.register_keras_serializable("crossed")
class Block(keras.layers.Layer):
    def __init__(self, units, **kept):
        super().__init__(**kept)
        self.units, self.inner = units, keras.layers.Dense(units, "relu")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return x + self.inner(x)

    def get_config(self):
        return super().get_config() | {"units": self.units}


def model(input_shape):
    """Blocks, which can be computed again, and a normalization."""
    layers = [Block(8), keras.layers.BatchNormalization(), Block(8), keras.layers.Dense(3, "softmax")]
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(8), *layers])


def arrays(examples=45, validation=13):
    """Examples that divide evenly over nothing."""
    x = np.random.default_rng(3).normal(size=(examples + validation, 5)).astype("float32")
    y = (x.sum(axis=1) > 0).astype("int32") + (x[:, 0] > 1)
    return (x[:examples], y[:examples]), (x[examples:], y[examples:])


def elements():
    return tuple(tf.data.Dataset.from_tensor_slices(part) for part in arrays())

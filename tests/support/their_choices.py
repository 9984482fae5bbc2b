"""What another package offers as choices: a strategy, a model and a data set, and some that fail."""

import numpy as np


def hierarchical(devices, packs):
    import tensorflow as tf

    operations = tf.distribute.HierarchicalCopyAllReduce(packs)
    return tf.distribute.MirroredStrategy([f"/device:{device}" for device in devices], cross_device_ops=operations)


def line(input_shape, num_classes, units):
    import keras

    layers = [keras.layers.Dense(units), keras.layers.Dense(num_classes, "softmax")]
    return keras.Sequential([keras.Input(input_shape), *layers])


def corners(examples):
    """Points, and which of their four numbers is the largest."""
    x = np.random.default_rng(0).normal(size=(examples, 4)).astype("float32")
    y = np.argmax(x, axis=1).astype("int32")
    return (x, y), (x[:64], y[:64])


def fails_strategy(devices):
    raise ValueError("the moon is full")


def fails_model(input_shape):
    raise ValueError("the moon is full")


def fails_data():
    raise ValueError("the moon is full")

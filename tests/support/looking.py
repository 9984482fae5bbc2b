"""Models whose training depends on several examples at a time: on pairs, means of a batch, the batch as a whole."""

from functools import partial

import keras
import odd
import tensorflow as tf
from keras import ops


def numbers(examples=64):
    """(x, y): float32 [examples, 6], and int32 [examples], each of 0 to 9; none to validate on."""
    return odd.numbers(examples), None


def minibatch(x):
    apart = ops.sum(ops.abs(x[:, None] - x[None]), axis=-1)
    return ops.concatenate([x, ops.sum(ops.exp(-apart), axis=1, keepdims=True)], axis=-1)


@tf.custom_gradient
def weighed(x):
    """The same, with a gradient that is divided by the largest of the batch."""
    return tf.identity(x), lambda gradient: gradient / (tf.reduce_max(tf.abs(gradient)) + 1e-6)


# What a layer makes of its batch.
WAYS = {
    "batch softmax": lambda x: x * ops.softmax(x, axis=0),
    "own normalization": lambda x: (x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 0.1),
    "minibatch": minibatch,
    "shared": lambda x: x / ops.cast(ops.shape(x)[0], x.dtype),
    "condition": lambda x: ops.cond(ops.sum(ops.abs(x)) > 16.0, lambda: 2.0 * x, lambda: x),
    "weighed": weighed,
}


@keras.saving.register_keras_serializable("looking")
class Looking(keras.layers.Layer):
    def __init__(self, way, **kwargs):
        super().__init__(**kwargs)
        self.way = way

    def call(self, x):
        return WAYS[self.way](x)


@keras.saving.register_keras_serializable("looking")
class RunningMean(keras.layers.Layer):
    """Keeps a mean of what it has seen, and passes that on as it is."""

    def __init__(self, aggregation="none", **kwargs):
        super().__init__(**kwargs)
        self.aggregation = aggregation

    def build(self, shape):
        self.mean = self.add_weight(shape[1:], "zeros", trainable=False, aggregation=self.aggregation, name="mean")

    def call(self, x, training=False):
        if training:
            self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(x, axis=0))
        return x


def pairs(y_true, y_pred):
    """A contrastive loss: examples of one class near, all others away."""
    z = ops.normalize(y_pred, axis=-1)
    logits = ops.matmul(z, ops.transpose(z)) / 0.5
    same = ops.cast(ops.equal(ops.reshape(y_true, (-1, 1)) % 2, ops.reshape(y_true, (1, -1)) % 2), z.dtype)
    return -ops.sum(same * ops.log_softmax(logits, axis=-1), axis=-1) / ops.sum(same, axis=-1)


@keras.saving.register_keras_serializable("looking")
class RawMean(RunningMean):
    """Keeps its mean in a variable of TensorFlow's, which Keras does not know of."""

    def build(self, shape):
        self.mean = tf.Variable(tf.zeros(shape[1:]), trainable=False)


@keras.saving.register_keras_serializable("looking")
class RunningMaximum(keras.layers.Layer):
    def build(self, shape):
        self.largest = self.add_weight(shape=(), initializer="ones", trainable=False, name="largest")

    def call(self, x, training=False):
        if training:
            self.largest.assign(ops.maximum(self.largest, 10.0 * ops.max(x)))
        return x


LAYERS = {
    **{way: partial(Looking, way) for way in WAYS},
    "running mean": RunningMean,
    "averaged mean": partial(RunningMean, "mean"),
    "raw mean": RawMean,
    "running maximum": RunningMaximum,
}


def model(layer="none", loss="sparse_categorical_crossentropy", dropout=0.0):
    """A compiled model with one of the layers above between two of its own."""
    looking = LAYERS.get(layer)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="tanh", name="before")(inputs)
    x = keras.layers.Dropout(dropout)(x)
    x = looking(name="looking")(x) if looking else x
    outputs = keras.layers.Dense(10, activation=None if loss == "pairs" else "softmax", name="after")(x)
    made = keras.Model(inputs, outputs)
    over_pairs = loss == "pairs"
    made.compile(keras.optimizers.SGD(0.05), pairs if over_pairs else loss, metrics=[] if over_pairs else ["accuracy"])
    return made

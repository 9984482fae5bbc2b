"""Models, losses, metrics, callbacks and data of a person's own, with the mistakes that people make most.

The line that fails ends with a comment that names its mistake.
"""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

X, Y = np.ones((8, 4), "float32"), np.ones(8, "int32")


def wrong_reshape(input_shape=(4,), num_classes=10):
    return keras.Sequential([keras.Input(input_shape), layers.Reshape((10, 10)), layers.Dense(num_classes)])  # Keras


def raised_from():
    try:
        return {}["width"]
    except KeyError as error:
        raise ValueError("no width was given") from error  # a cause


class Own(layers.Layer):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(self, x)


CALLS = {
    "product": lambda layer, x: tf.matmul(x, tf.ones((3, 3))),  # shapes in call
    "missing": lambda layer, x: x + layer.nowhere,  # an attribute
}


def checked(layer, x):
    assert x.shape[-1] == 3  # an assertion
    return x


def branched(layer, x):
    raise ValueError("the width must be odd\n  the width was 4")  # several lines


def with_layer(function):
    x = keras.Input((4,))
    return keras.Model(x, layers.Dense(10)(Own(function)(x)))


class Unfinished(keras.Model):
    def call(self, x):
        return self.head(x)  # a model of one's own


def loss_of_sevens(y, predicted):
    return tf.reduce_mean(tf.reshape(predicted, (7, -1)))  # a loss


class Counts(keras.metrics.Metric):
    def update_state(self, y, predicted, sample_weight=None):
        self.total.assign_add(1)  # a metric

    def result(self):
        return 0.0


class Looks(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        return logs["val_auc"]  # a callback


def shelf():
    yield X[0], Y[0]
    raise OSError("no shelf 7 in the archive")  # data


def trained(model, loss="mse", metrics=None, callbacks=(), data=None):
    model.compile("sgd", loss, metrics=metrics)
    data = data or tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    model.fit(data, verbose=0, shuffle=False, callbacks=list(callbacks))  # numbers without a row


def linear(outputs=1, rows=None):
    """A model without a mistake; with `rows`, of numbers that stand for so many things."""
    first = [layers.Embedding(rows, 2), layers.Flatten()] if rows else []
    return keras.Sequential([keras.Input((4,)), *first, layers.Dense(outputs)])


def from_shelf():
    signature = (tf.TensorSpec((4,)), tf.TensorSpec((), tf.int32))
    return tf.data.Dataset.from_generator(shelf, output_signature=signature).batch(4)


def wrapped(input_shape, num_classes, standing_in=True):
    """A classifier compiled with Horovod's wrapper of Adam, or with a class that is made in the same way."""
    made = keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(num_classes)])
    if standing_in:
        optimizer = type("Adam", (keras.optimizers.Adam,), {"__module__": "horovod._keras"})(0.01)
    else:
        import horovod.tensorflow.keras as hvd

        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    made.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), ["accuracy"])
    return made


def broadcasts():
    """A callback as Horovod's, which is called on every rank there."""
    kind = type("BroadcastGlobalVariablesCallback", (keras.callbacks.Callback,), {"__module__": "horovod.callbacks"})
    return kind()

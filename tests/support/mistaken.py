"""Models, losses, metrics, callbacks and data of a person's own, with the mistakes that people make most."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

X, Y = np.ones((8, 4), "float32"), np.ones(8, "int32")


def wrong_reshape(input_shape=(4,), num_classes=10):
    """A model's function that makes 10 x 10 of what is no 100."""
    return keras.Sequential([keras.Input(input_shape), layers.Reshape((10, 10)), layers.Dense(num_classes)])


def raised_from():
    """A model's function that says why, and of what."""
    try:
        return {}["width"]
    except KeyError as error:
        raise ValueError("no width was given") from error


class Product(layers.Layer):
    """A layer that multiplies by what does not fit."""

    def call(self, x):
        """Its product."""
        return tf.matmul(x, tf.ones((3, 3)))


class Missing(layers.Layer):
    """A layer that has not what it asks for."""

    def call(self, x):
        """Its sum."""
        return x + self.nowhere


class Checks(layers.Layer):
    """A layer that asserts, and says nothing."""

    def call(self, x):
        """What it was given."""
        assert x.shape[-1] == 3
        return x


class Branches(layers.Layer):
    """A layer whose own words take several lines."""

    def call(self, x):
        """Nothing."""
        raise ValueError("the width must be odd\n  the width was 4")


def with_layer(layer):
    """A model with a layer."""
    x = keras.Input((4,))
    return keras.Model(x, layers.Dense(10)(layer()(x)))


class Unfinished(keras.Model):
    """A model of one's own whose call asks for a layer that it has not made."""

    def call(self, x):
        """What is not there."""
        return self.head(x)


def loss_of_sevens(y, predicted):
    """A loss that fails when it is computed."""
    return tf.reduce_mean(tf.reshape(predicted, (7, -1)))


class Counts(keras.metrics.Metric):
    """A metric without the variable that it adds to."""

    def update_state(self, y, predicted, sample_weight=None):
        """Adds one."""
        self.total.assign_add(1)

    def result(self):
        """Nothing."""
        return 0.0


class Looks(keras.callbacks.Callback):
    """A callback that looks for what no log has."""

    def on_train_batch_end(self, batch, logs=None):
        """Looks."""
        return logs["val_auc"]


def shelf():
    """Data that end too early."""
    yield X[0], Y[0]
    raise OSError("no shelf 7 in the archive")


def trained(model, loss="mse", metrics=None, callbacks=(), data=None):
    """What Keras says of training it."""
    model.compile("sgd", loss, metrics=metrics)
    data = data or tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    model.fit(data, verbose=0, shuffle=False, callbacks=list(callbacks))


def linear(outputs=1, rows=None):
    """A model without a mistake; with `rows`, of numbers that stand for so many things."""
    first = [layers.Embedding(rows, 2), layers.Flatten()] if rows else []
    return keras.Sequential([keras.Input((4,)), *first, layers.Dense(outputs)])


def from_shelf():
    """The data of the shelf, as TensorFlow reads them."""
    signature = (tf.TensorSpec((4,)), tf.TensorSpec((), tf.int32))
    return tf.data.Dataset.from_generator(shelf, output_signature=signature).batch(4)

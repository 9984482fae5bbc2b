"""A training that goes on with more than weights: with what losses, regularizers, metrics and callbacks hold."""

import keras
import numpy as np
from keras import ops

register = keras.saving.register_keras_serializable("tests of what is beside a model")
BATCH, EPOCHS = 16, 3


def varying(value, name):
    """A variable that no model lists."""
    return keras.Variable(value, trainable=False, name=name)


@register
class Blend(keras.losses.Loss):
    """Squares and amounts, blended by a variable; divided by a number, which is a constant once it is traced."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.parts, self.divisor = {"alpha": [varying(0.0, "alpha")]}, 1.0

    def call(self, y_true, y_pred):
        alpha, apart = self.parts["alpha"][0], ops.cast(y_true, y_pred.dtype) - y_pred
        return ops.mean((1 - alpha) * ops.square(apart) + alpha * ops.abs(apart), -1) / self.divisor


@register
class Running(keras.losses.Loss):
    """Divides by a running mean of its own, of batches in validation too."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scale = varying(1.0, "scale")

    def call(self, y_true, y_pred):
        squares = ops.mean(ops.square(ops.cast(y_true, y_pred.dtype) - y_pred), -1)
        self.scale.assign(0.9 * self.scale + 0.1 * ops.stop_gradient(ops.mean(squares)))
        return squares / self.scale


@register
class Penalty(keras.regularizers.Regularizer):
    def __init__(self):
        self.weight = varying(0.0, "weight")

    def __call__(self, x):
        return self.weight * ops.sum(ops.square(x))

    def get_config(self):
        return {}


@register
class Above(keras.metrics.Metric):
    """The share of outputs above a threshold, which stays from epoch to epoch."""

    def __init__(self, name="above", **kwargs):
        super().__init__(name=name, **kwargs)
        self.threshold = varying(0.1, "threshold")
        self.found, self.count = (self.add_variable((), "zeros", name=name) for name in ("found", "count"))

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.found.assign_add(ops.sum(ops.cast(y_pred > self.threshold, "float32")))
        self.count.assign_add(ops.cast(ops.size(y_pred), "float32"))

    def result(self):
        return self.found / ops.maximum(self.count, 1.0)

    def reset_state(self):
        self.found.assign(0.0)
        self.count.assign(0.0)


@register
class Sizes(keras.layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.sizes = [keras.metrics.Mean(name="size")]

    def call(self, x):
        self.sizes[0].update_state(ops.abs(x))
        return x


@register
class Net(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counted = keras.metrics.Mean(name="counted")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.counted.update_state(ops.mean(ops.abs(y_pred), -1))
        return super().compute_loss(x, y, y_pred, sample_weight, training)


class Changing(keras.callbacks.Callback):
    """Changes all of it: some before a step is traced, some from what metrics have counted."""

    def __init__(self):
        super().__init__()
        self.told = keras.Variable(0.0, name="told")

    def on_train_begin(self, logs=None):
        self.model.loss.divisor, self.model.optimizer.momentum = 2.0, 0.5

    def on_epoch_begin(self, epoch, logs=None):
        self.told.assign_add(0.2)
        self.model.loss.parts["alpha"][0].assign(self.told.value)
        self.model.get_layer("inner").kernel_regularizer.weight.assign(0.01 * epoch)

    def on_epoch_end(self, epoch, logs=None):
        self.told.assign_add(0.1 * float(self.model.counted.result()))
        (above,) = (one for one in self.model._compile_metrics.metrics if one.name == "above")
        above.threshold.assign(0.1 + 0.2 * epoch)
        for variable in self.model.optimizer.variables:
            if "momentum" in variable.path:
                variable.assign(0.5 * variable)


def examples():
    """(x, y) twice: float32 [examples, 5] and [examples, 2]."""
    x = np.random.default_rng(5).normal(size=(83, 5)).astype("float32")
    y = x[:, :2] * 2 + 1
    return (x[:67], y[:67]), (x[67:], y[67:])


def drawn(model):
    """The model with weights that every backend draws alike."""
    random = np.random.default_rng(0)
    model.set_weights([0.4 * random.normal(size=weight.shape) for weight in model.get_weights()])
    return model


def net():
    """A compiled net, all of whose state is changed by `Changing`."""
    x = keras.Input((5,))
    inner = Sizes()(keras.layers.Dense(8, "tanh", kernel_regularizer=Penalty(), name="inner")(x))
    model = drawn(Net(x, keras.layers.Dense(2)(inner)))
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), Blend(), metrics=[Above()])
    return model


def running(input_shape):
    """A compiled net whose loss goes on with what it has seen."""
    model = drawn(keras.Sequential([keras.Input(input_shape), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]))
    model.compile(keras.optimizers.SGD(0.05), Running())
    return model

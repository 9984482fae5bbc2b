"""Models and data of a person's own, as the tests name them with `_target_`."""

import os
import shutil
import signal
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing


def numbered(examples=245, validation=61, shape=(8, 8, 1), classes=10, seed=3):
    """Arrays that do not divide evenly."""
    random = np.random.default_rng(seed)
    total = examples + validation
    x = random.normal(size=(total, *shape)).astype("float32")
    y = random.integers(0, classes, total).astype("int32")
    return (x[:examples], y[:examples]), (x[examples:], y[examples:])


def normalised(input_shape, num_classes, optimizer="sgd", bias=False):
    layers = keras.layers
    model = keras.Sequential([
        keras.Input(input_shape), layers.Conv2D(8, 3, use_bias=bias), layers.BatchNormalization(), layers.ReLU(),
        layers.Flatten(), layers.Dropout(0.0),
        layers.Dense(num_classes, activation="softmax", kernel_regularizer="l2"),
    ])  # fmt: skip
    made = {
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
        "adam": lambda: keras.optimizers.Adam(1e-3),
        "clipped": lambda: keras.optimizers.Adam(1e-3, global_clipnorm=0.1),
        "averaged": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9),
        "overwritten": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=7),
        "scheduled": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(1e-3, 5, 0.5)),
    }[optimizer]()
    model.compile(made, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


@keras.saving.register_keras_serializable("tests")
class Subclassed(keras.Model):
    """Two inputs, two outputs, a loss added in call."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.left = keras.layers.Dense(8, activation="relu")
        self.right = keras.layers.Dense(8, activation="relu")
        self.kind = keras.layers.Dense(3, activation="softmax")
        self.size = keras.layers.Dense(1)

    def call(self, inputs):
        joined = keras.ops.concatenate([self.left(inputs["left"]), self.right(inputs["right"])], axis=-1)
        self.add_loss(1e-3 * keras.ops.mean(keras.ops.square(joined)))
        return {"kind": self.kind(joined), "size": self.size(joined)}


def two_headed(reduction="sum_over_batch_size"):
    """A subclassed model with weighted losses; `reduction` is that of the second."""
    model = Subclassed()
    size = keras.losses.MeanSquaredError(reduction=reduction)
    losses = {"kind": keras.losses.SparseCategoricalCrossentropy(), "size": size}
    weights, metrics = {"kind": 1.0, "size": 0.25}, {"kind": ["accuracy"], "size": ["mae"]}
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), losses, weights, metrics)
    return model


def two_headed_data(examples=101, weighted=False):
    """Dictionaries in and out, with sample weights where asked for."""
    random = np.random.default_rng(5)
    x = {name: random.normal(size=(examples, 4)).astype("float32") for name in ("left", "right")}
    kind = random.integers(0, 3, examples).astype("int32")
    y = {"kind": kind, "size": (x["left"].sum(axis=1, keepdims=True) * 0.5).astype("float32")}
    weight = random.uniform(0.5, 2.0, examples).astype("float32")
    part = (x, y, {"kind": weight, "size": weight}) if weighted else (x, y)
    return part, part


def masked():
    layers = keras.layers
    hidden = [layers.Embedding(20, 8, mask_zero=True), layers.LSTM(8, return_sequences=True)]
    inputs, outputs = keras.Input((6,), dtype="int32"), layers.Dense(20, activation="softmax")
    model = keras.Sequential([inputs, *hidden, outputs])
    model.compile(keras.optimizers.SGD(0.1), loss="sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    return model


def padded_data(examples=61):
    """Sequences of different lengths, padded with 0; the label is the token itself."""
    random = np.random.default_rng(7)
    tokens = random.integers(1, 20, (examples, 6)).astype("int32")
    tokens[np.arange(6)[None, :] >= random.integers(1, 7, examples)[:, None]] = 0
    return (tokens, tokens), (tokens, tokens)


def tiny(input_shape, num_classes):
    layers = [keras.layers.Flatten(), keras.layers.Dense(num_classes, activation="softmax")]
    return keras.Sequential([keras.Input(input_shape), *layers])


def ballast(input_shape, num_classes):
    """A model whose checkpoints take longer to write than its steps to train."""
    model = tiny(input_shape, num_classes)
    model.add_weight(shape=(20_000_000,), trainable=False)
    return model


def raises(input_shape, num_classes):
    raise RuntimeError("the moon is not full")


def nan_data(value=np.nan, place=40):
    """Data with an example that is not a number, or too large for one to come of it, or for weights to follow it."""
    (x, y), held_out = numbered(64, 8)
    x[place] = value
    return (x, y), held_out


def empty_data():
    return (np.zeros((0, 4), "float32"), np.zeros((0,), "int32")), None


def stuck_data(shard, shards):
    while shard == shards - 1:
        time.sleep(1)
    return numbered()


class Meddling(keras.callbacks.Callback):
    """Halves the learning rate, zeroes the weights, and stops after two epochs."""

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate.numpy()) / 2
        if epoch == 1:
            self.model.stop_training = True
            self.model.set_weights([np.zeros_like(weight) for weight in self.model.get_weights()])


def recording(path):
    """A callback that writes which hooks it saw, with what."""

    def note(hook, detail):
        with Path(path).open("a") as lines:
            lines.write(f"{hook} {detail}\n")

    callback = keras.callbacks.LambdaCallback(
        on_train_begin=lambda logs: note("train_begin", callback.params["epochs"]),
        on_epoch_begin=lambda epoch, logs: note("epoch_begin", epoch),
        on_train_batch_end=lambda batch, logs: note("batch_end", f"{batch} {sorted(logs)}"),
        on_epoch_end=lambda epoch, logs: note("epoch_end", f"{epoch} {sorted(logs)}"),
        on_train_end=lambda logs: note("train_end", ""),
    )
    return callback


def removing(path):
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: shutil.rmtree(path, ignore_errors=True))


class Failing(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5:
            raise RuntimeError("six are enough")


class Halving(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.set_weights([weight * 0.5 for weight in self.model.get_weights()])


@keras.saving.register_keras_serializable("tests")
class SumOfLabels(keras.metrics.Metric):
    """Sum of labels, and of their squares, over everything seen in an epoch: tells a missing or doubled example."""

    def __init__(self, name="labels", **kwargs):
        super().__init__(name=name, **kwargs)
        self.total = self.add_variable((3,), "zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        y = keras.ops.cast(y_true, "float32")
        seen = [keras.ops.sum(keras.ops.ones_like(y)), keras.ops.sum(y), keras.ops.sum(keras.ops.square(y))]
        self.total.assign(self.total + keras.ops.stack(seen))

    def result(self):
        return self.total


def counting(input_shape):
    model = keras.Sequential([keras.Input(input_shape), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-9), loss="mse", metrics=[SumOfLabels()])
    return model


def serial_arrays(examples=50):
    serial = np.arange(examples).astype("float32")
    return (serial[:, None] / examples, serial), (serial[:, None] / examples, serial)


def serial_set(examples=50):
    return tuple(tf.data.Dataset.from_tensor_slices(part) for part in serial_arrays(examples))


def generated_set(examples=50):
    """The same as a data set that only this process's Python can make."""

    def part(x, y):
        spec = (tf.TensorSpec(x.shape[1:], x.dtype), tf.TensorSpec((), y.dtype))
        return tf.data.Dataset.from_generator(lambda: zip(x, y, strict=True), output_signature=spec)

    return tuple(part(x, y) for x, y in serial_arrays(examples))


def serial_shard(shard, shards, examples=50):
    """The same, each process taking an uneven shard of its own."""
    (x, y), _ = serial_arrays(examples)
    mine = (y % (shards + 1)).astype(int) % shards == shard
    return (x[mine], y[mine]), (x[mine], y[mine])


def serial_shard_set(shard, shards, examples=50):
    return tuple(tf.data.Dataset.from_tensor_slices(part) for part in serial_shard(shard, shards, examples))


# What a TPU cannot compile, and what fails once it is run.
ODD = {
    "boolean_mask": lambda x: tf.reduce_sum(tf.boolean_mask(x, x > 0)),
    "where": lambda x: tf.cast(tf.reduce_sum(tf.where(x > 0)), x.dtype),
    "unique": lambda x: tf.cast(tf.size(tf.unique(tf.reshape(x, [-1]))[0]), x.dtype),
    "reshape": lambda x: tf.reduce_sum(tf.reshape(x, [2 + 0 * tf.cast(tf.reduce_max(x), tf.int32), -1])),
    "infinite": lambda x: tf.debugging.check_numerics(x / 0.0, "bad numbers"),
    "text": lambda x: tf.cast(tf.strings.length(tf.strings.as_string(tf.cast(x, tf.float32))), x.dtype),
}


class Odd(keras.layers.Layer):
    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind

    def call(self, x):
        return x + ODD[self.kind](x)


def odd(input_shape, num_classes, kind="where"):
    layers = [keras.layers.Flatten(), Odd(kind, name="odd"), keras.layers.Dense(num_classes, activation="softmax")]
    return keras.Sequential([keras.Input(input_shape), *layers])


def odd_loss(input_shape, num_classes):
    def of_some(y_true, y_pred):
        return tf.reduce_mean(tf.boolean_mask(y_pred, tf.reshape(y_true, [-1]) > 3))

    model = tiny(input_shape, num_classes)
    model.compile("sgd", loss=of_some)
    return model


class Preempting(keras.callbacks.Callback):
    def __init__(self, after, number="SIGTERM"):
        super().__init__()
        self.after, self.number = list(after), number

    def on_train_batch_end(self, batch, logs=None):
        if self.after and int(self.model.optimizer.iterations.numpy()) >= self.after[0]:
            # What is left of it is part of a checkpoint.
            self.after = self.after[1:]
            os.kill(os.getpid(), getattr(signal, self.number))
            # The conductor hears of it, and says what is to be done.
            time.sleep(1.0)


def pausing(seconds):
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(seconds))


class Spinning(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        while epoch:
            pass


def gone_data(shard, shards):
    """Of three workers the last dies as soon as it reads its data, each time."""
    if shards == 3 and shard == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return serial_shard(shard, shards, 96)


def steep():
    """One weight, which gradient descent doubles the error of each step, until its rate is halved."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(1.5), loss="mse")
    return model


def steep_data():
    return (np.ones((64, 1), "float32"), np.ones((64, 1), "float32")), None


def sleepy(examples=128, milliseconds=2.0):
    """A data set whose `map` takes long for each example and computes nothing."""

    def waiting(x, y):
        return x, y

    def part(count):
        x = np.arange(count * 16, dtype="float32").reshape(count, 16) / (count * 16)
        made = tf.data.Dataset.from_tensor_slices((x, np.arange(count, dtype="int32") % 4))
        return made.apply(testing.sleep(int(1000 * milliseconds))).map(waiting)

    return part(examples), part(8)


@keras.saving.register_keras_serializable("tests")
class Waiting(keras.layers.Layer):
    def __init__(self, milliseconds, **kwargs):
        super().__init__(**kwargs)
        self.milliseconds = milliseconds

    def call(self, x):
        def wait(given):
            time.sleep(1e-3 * self.milliseconds)
            return given

        with tf.control_dependencies([tf.numpy_function(wait, [tf.constant(0.0)], tf.float32)]):
            return tf.identity(x)

    def get_config(self):
        return super().get_config() | {"milliseconds": self.milliseconds}


def unhurried(input_shape, num_classes, milliseconds=30.0):
    """A model whose steps mostly wait, and so take as long on a busy machine."""
    inputs = keras.Input(input_shape)
    x = Waiting(milliseconds)(keras.layers.Flatten()(inputs))
    return keras.Model(inputs, keras.layers.Dense(num_classes, activation="softmax")(x))


def busy(x, y, rounds=400):
    """Burns a core for some time for each example, with TensorFlow's operations."""
    size = tf.ones((64, 64)) * (tf.reduce_sum(x) * 0.0 + 0.01)
    burnt = tf.foldl(lambda so_far, _: tf.tanh(tf.matmul(so_far, size)), tf.range(rounds), size, back_prop=False)
    return x + tf.reduce_sum(burnt) * 0.0, y


def asleep(x, y):
    """Sleeps for each example; named so that it is known in a profile."""

    def wait(given):
        time.sleep(0.002)
        return given

    made = tf.numpy_function(wait, [x], tf.float32)
    made.set_shape(x.shape)
    return made, y


def through(function=None, examples=512):
    """A data set of a person's own, shuffled by itself, with one of the functions above as its last `map`."""
    random = np.random.default_rng(1)

    def part(count):
        x, y = random.normal(size=(count, 16)).astype("float32"), random.integers(0, 4, count).astype("int32")
        made = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(count, seed=7).map(lambda x, y: (x * 0.5, y))
        return made if function is None else made.map({"busy": busy, "asleep": asleep}[function])

    return part(examples), part(16)


def there_by_now(path):
    if not Path(path).exists():
        raise FileNotFoundError(f"no {path} yet")
    return numbered()

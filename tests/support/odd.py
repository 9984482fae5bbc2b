"""Data as people bring it by mistake, and models and callbacks that ask for what a run does not do."""

from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from scipy.sparse import csr_matrix


def numbers(examples=64):
    """(x, y): float32 [examples, 6], and int32 [examples], each of 0 to 9."""
    x = np.random.default_rng(0).normal(size=(examples, 6)).astype("float32")
    return x, (np.arange(examples) % 10).astype("int32")


def uneven(x):
    return [row[: 1 + place % 3] for place, row in enumerate(x.tolist())]


def labelled(y, label):
    y = y.copy()
    y[5] = label
    return y


def a_set(part):
    return tf.data.Dataset.from_tensor_slices(part)


ONE_HOT = np.eye(10, dtype="float32")
# What becomes of (x, y).
KINDS = {
    "as it should be": lambda x, y: (x, y),
    "lists": lambda x, y: (x.tolist(), y.tolist()),
    "label -1": lambda x, y: (x, labelled(y, -1)),
    "label 99": lambda x, y: (x, labelled(y, 99)),
    "text": lambda x, y: (x, np.array([f"class {label}" for label in y])),
    "text in objects": lambda x, y: (x, np.array([f"class {label}" for label in y], object)),
    "one-hot": lambda x, y: (x, ONE_HOT[y]),
    "unequal": lambda x, y: (x, y[:60]),
    "weights": lambda x, y: (x, y, np.ones(63, "float32")),
    "no y": lambda x, y: (x,),
    "rows": lambda x, y: (list(x), y),
    "sparse": lambda x, y: (csr_matrix(x), y),
    "ragged": lambda x, y: (tf.ragged.constant(uneven(x)), y),
    "uneven lists": lambda x, y: (uneven(x), y),
    "objects": lambda x, y: (x.astype(object), y),
    "rows in objects": lambda x, y: (np.fromiter(x, object), y),
    "dates": lambda x, y: (x, y.astype("datetime64[s]")),
    "one number": lambda x, y: (x, 3),
    "four": lambda x, y: (x, y, np.ones(64), 3),
    "weights of nothing": lambda x, y: (x, None, np.ones(64)),
    "none": lambda x, y: (x[:0], y[:0]),
    "generator": lambda x, y: ((row, label) for row, label in zip(x, y, strict=True)),
    "batched": lambda x, y: a_set((x, y)).batch(8),
    "set of -1": lambda x, y: a_set((x, labelled(y, -1))),
    "set of text": lambda x, y: a_set((x, [f"class {label}" for label in y])),
    "set of ragged": lambda x, y: a_set((tf.ragged.constant(uneven(x)), y)),
    "set of one-hot": lambda x, y: a_set((x, ONE_HOT[y])),
}


def data(kind):
    return KINDS[kind](*numbers()), None


def in_shards(shard, shards, kind):
    """A shard of which another process has another shape, or which is the only one with a class, or empty."""
    x, y = numbers()
    x, y = x[shard::shards], y[shard::shards]
    if kind == "width":
        x = x[:, : 6 - shard]
    if kind == "classes" and shard:
        y = y % 3
    if kind == "empty" and shard:
        x, y = x[:0], y[:0]
    held_out = None if kind == "validation" and shard else (x, y)
    return (x, y), held_out


def another_length(mark):
    """Fewer examples in whichever process comes second."""
    x, y = numbers()
    try:
        Path(mark).touch(exist_ok=False)
    except FileExistsError:
        x, y = x[:60], y[:60]
    return (x, y), None


def classifier(units=10, loss="sparse_categorical_crossentropy", activation="softmax", **compiled):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units, activation=activation, name="kinds")])
    model.compile(keras.optimizers.SGD(0.05), loss=loss, metrics=["accuracy"], **compiled)
    return model


def accumulating():
    model = classifier()
    model.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), model.loss)
    return model


class Asking(keras.callbacks.Callback):
    """Asks the model, after each epoch, for what a person asks for, and writes the answers down."""

    def __init__(self, path, what="evaluate"):
        super().__init__()
        self._path, self._what = Path(path), what

    def on_epoch_end(self, epoch, logs=None):
        x, y = numbers()
        model = self.model
        answer = {
            "evaluate": lambda: model.evaluate(x, y, verbose=0),
            "predict": lambda: [float(model.predict(x, verbose=0).sum())],
            "count": lambda: [int(model.optimizer.iterations), float(model.optimizer.learning_rate)],
            "fit": lambda: model.fit(x, y, verbose=0),
        }[self._what]()
        with self._path.open("a") as lines:
            lines.write(f"{answer}\n")

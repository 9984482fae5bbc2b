"""Strategies made one after the other in a process, as in a notebook, whatever became of the one before; as JSON."""

import json
from functools import cache

import keras
import numpy as np
import tensorflow as tf
import two_devices  # noqa: F401 # which are this process's
from loops import assert_same, assert_same_weights, fitted
from tensorflow.python.eager import context

from pipeline import strategies
from pipeline.errors import UserError

RANDOM = np.random.default_rng(0)
WORDS, NUMBERS, KINDS = RANDOM.integers(0, 5000, (200, 5)), RANDOM.random((200, 5), "float32"), np.arange(200) % 3
# Sequences as long as the longest of their batch, so that the rows of a step are as many as its words.
LENGTHS = RANDOM.integers(1, 9, 200)
SENTENCES = tf.data.Dataset.from_generator(
    lambda: (([7 + length] * length, kind) for length, kind in zip(LENGTHS, KINDS, strict=True)),
    output_signature=(tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int32)),
).padded_batch(48, ([None], []))
SENTENCES = SENTENCES.apply(tf.data.experimental.assert_cardinality(5))
STRATEGIES = {
    "mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    "multi_worker": lambda: strategies.multi_worker(("CPU:0", "CPU:1")),
}


def compiled(inputs, x):
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5, momentum=0.9, clipnorm=0.1), loss)
    return model


def embeddings():
    inputs = keras.Input((None,), dtype="int32")
    # The first table is sent in pieces of several sizes.
    tables = [keras.layers.Embedding(5000, width) for width in (300, 4, 4)]
    pooled = [keras.layers.GlobalAveragePooling1D()(table(inputs)) for table in tables]
    return compiled(inputs, keras.layers.Concatenate()(pooled))


def normalised():
    inputs = keras.Input((5,))
    return compiled(inputs, keras.layers.BatchNormalization()(inputs))


TRAINED = {
    "words": (embeddings, {"x": WORDS, "y": KINDS, "batch_size": 48, "epochs": 2}),
    "numbers": (normalised, {"x": NUMBERS, "y": KINDS, "batch_size": 48, "epochs": 2}),
    "sentences": (embeddings, {"x": SENTENCES, "epochs": 2}),
}


@cache
def alone(kind):
    return fitted(*TRAINED[kind])


def compare(name, kind):
    model, history = fitted(*TRAINED[kind], STRATEGIES[name]())
    one, expected = alone(kind)
    assert_same(history, expected, 1e-5)
    assert_same_weights(model, one)


def failing(name):
    labels = tf.data.Dataset.from_tensor_slices((NUMBERS, KINDS + 7)).batch(48)
    try:
        fitted(normalised, {"x": labels}, STRATEGIES[name]())
    except UserError as error:
        return str(error)
    return "it did not fail"


def main():
    said = []
    for name in STRATEGIES:
        for kind in TRAINED:
            compare(name, kind)
        said.append(failing(name))
    # What a peer that is lost, or an operation that fails while others wait for it, does to this process.
    context.context().abort_collective_ops(13, "something failed")
    compare("mirrored", "numbers")
    print(json.dumps([*said, failing("multi_worker")]))


if __name__ == "__main__":
    main()

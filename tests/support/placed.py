"""Trains models that are laid over devices, and says of each what it came to and what ran where; see test_devices."""

import json
import sys
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from pipeline.models import cnn, resnet20, transformer
from pipeline.private import context
from pipeline.strategies import model_parallel
from pipeline.worker.data import batches
from pipeline.worker.data.batches import Data
from pipeline.worker.layout import BatchLayout
from pipeline.worker.model_error import ModelError, TrainingError
from pipeline.worker.tensorflow import build
from pipeline.worker.tensorflow import placement as placing
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.size import BACKWARD, body_of

EXAMPLES, BATCH, STEPS = 256, 32, 20
ADAM = {"class_name": "Adam", "config": {"learning_rate": 1e-3, "global_clipnorm": 0.5, "use_ema": True}}


@keras.saving.register_keras_serializable(package="placed")
class Called(keras.Model):
    """A model that is no graph: it calls a layer twice, and adds a loss."""

    def __init__(self, **given):
        super().__init__(**given)
        self.first, self.again = layers.Dense(8), layers.Dense(8, use_bias=False)
        self.norm = layers.BatchNormalization()
        self.last = layers.Dense(10, kernel_regularizer="l2")

    def call(self, x, training=None):
        x = self.again(keras.ops.tanh(self.first(layers.Flatten()(x))))
        x = self.norm(self.again(x), training=training)
        self.add_loss(keras.ops.mean(x**2))
        return keras.ops.softmax(self.last(x))


@keras.saving.register_keras_serializable(package="placed")
class OwnStep(Called):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True))
            loss = keras.ops.mean(losses) + sum(self.losses)
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@keras.saving.register_keras_serializable(package="placed")
class Metered(layers.Dense):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x):
        x = super().call(x)
        self.mean.update_state(x)
        return x


class Astray(layers.Dense):
    """A layer that goes where it wants."""

    def call(self, x):
        with tf.device("CPU:0"):
            return super().call(x)


def astray():
    return keras.Sequential([keras.Input((12, 12, 1)), layers.Flatten(), layers.Dense(10), Astray(10)])


def normalized():
    """A convolutional net with batch normalization: operations are layers and functions, the last has a metric."""
    x = inputs = keras.Input((12, 12, 1))
    for filters in (8, 16):
        # Without a bias, whose gradient would be rounding alone, of which Adam makes whole steps.
        x = keras.ops.relu(layers.BatchNormalization()(layers.Conv2D(filters, 3, use_bias=False)(x)))
    x = layers.Dense(32, activation="relu")(layers.Flatten()(x))
    return keras.Model(inputs, Metered(10, activation="softmax")(x))


def recurrent():
    """Rows of a table, a loop within a layer, and a model within the model."""
    inner = keras.Sequential([keras.Input((16,)), layers.Dense(8, activation="relu"), layers.Dense(10)])
    x = inputs = keras.Input((16,), dtype="int32")
    x = layers.LSTM(16)(layers.Embedding(64, 16)(x))
    return keras.Model(inputs, layers.Softmax()(inner(x)))


def penalized():
    return keras.Sequential([
        keras.Input((12, 12, 1)), layers.Flatten(), layers.Dense(16, activity_regularizer="l2", name="squared"),
        layers.Dense(10, activation="softmax"),
    ])  # fmt: skip


def masked():
    words, numbers = keras.Input((16,), dtype="int32", name="words"), keras.Input((4,), name="numbers")
    x = layers.LSTM(8, return_sequences=True)(layers.Embedding(64, 8, mask_zero=True)(words))
    each = layers.Dense(10, activation="softmax", name="each")(x)
    x = layers.Concatenate()([layers.LSTM(8)(x), layers.Dense(8, activation="relu")(numbers)])
    return keras.Model([words, numbers], {"each": each, "all": layers.Dense(10, activation="softmax", name="all")(x)})


MODELS = {
    "cnn": lambda: cnn(input_shape=(12, 12, 1), num_classes=10, dropout=0.0),
    "normalized": normalized,
    "resnet20": lambda: resnet20(input_shape=(12, 12, 1), num_classes=10),
    "transformer": lambda: transformer(input_shape=(16,), num_classes=64),
    "recurrent": recurrent,
    "called": Called,
    "own": OwnStep,
    "astray": astray,
    "masked": masked,
    "penalized": penalized,
}


def examples(name):
    generator = np.random.default_rng(0)
    words = generator.integers(0, 64, (EXAMPLES, 16)).astype(np.int32)
    if name in ("transformer", "recurrent"):
        return words, (words if name == "transformer" else words[:, 0] % 10)
    if name == "masked":
        # A last batch of 5 examples, of which some micro-batch has none.
        words, labels = words[:197], (words[:197] % 10)
        weights = {"each": generator.random((197, 16), np.float32), "all": generator.random(197, np.float32)}
        return (words, generator.random((197, 4), np.float32)), {"each": labels, "all": labels[:, 0]}, weights
    return generator.random((EXAMPLES, 12, 12, 1), np.float32), generator.integers(0, 10, EXAMPLES).astype(np.int32)


def trained(name, replicas, parts, folder, pieces=None):
    adam = ADAM
    if pieces is not None:
        # A kernel's gradient is added up in another order: where it is near 0, Adam would make whole steps of that.
        adam = ADAM | {"config": ADAM["config"] | {"epsilon": 0.1}}
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    arrays = examples(name)
    devices = [[f"CPU:{replica * parts + part}" for part in range(parts)] for replica in range(replicas)]
    strategy = model_parallel(tuple(names[0] for names in devices))
    with placing.in_host_memory():
        model = build.model(MODELS[name], strategy, batches.spec(arrays), optimizer=adam)
    placement = placing.place(model, strategy, devices) if parts > 1 else None
    if (pieces or 1) > 1:
        placing.in_micro_batches(model, batches.spec(arrays), pieces)
    data = Data(arrays, BatchLayout(BATCH, replicas, 0, replicas, (len(keras.tree.flatten(arrays)[0]),)), True, 5)
    loop = Loop(model, strategy, data, [data])
    found = {}
    if placement is not None:
        rows = placing.listed(model, placement, loop.graph())
        context.context().enable_run_metadata()
        # What others ran before is let go.
        context.context().export_run_metadata()
        found = {"held": placing.held_bytes(rows, placement), "rows": [vars(row) for row in rows]}
    losses = loop.call(STEPS).losses[:, 0].tolist()
    if placement is not None:
        found |= ran_at(placement, loop)
    validated = loop.evaluate(4, lambda event: None)
    model.save(folder / "model.keras")
    weights = [np.asarray(keras.ops.convert_to_numpy(variable)).tolist() for variable in model.weights]
    return found | {"losses": losses, "validated": validated, "weights": weights}


def ran_at(placement, loop):
    """Operations of layers that ran where they were to, and elsewhere, as TensorFlow says after it has run them."""
    body, counted = body_of(loop.graph()), Counter()
    own = {operation.name for operation in body.get_operations()}
    for graphs in context.context().export_run_metadata().function_graphs:
        for graph in graphs.partition_graphs:
            for node in graph.node:
                # Constants are where they are read; what is sent and received is on both sides.
                if node.op in ("Const", "NoOp", "_Send", "_Recv", "_HostSend", "_HostRecv"):
                    continue
                name = node.name.split("while/body/_1/")[-1]
                # What TensorFlow's optimizers pass a constant on with.
                if node.op == "Identity" and name not in own:
                    continue
                call = placement.call_of(name)
                if call is not None:
                    planned = [device.rpartition(":device:")[2] for device in placement.on(placement.parts[call[0]])]
                    there = node.device.rpartition("device:")[2] in [name.rpartition("device:")[2] for name in planned]
                    counted[("backward" if BACKWARD in node.name else "forward") + " elsewhere" * (not there)] += 1
    context.context().disable_run_metadata()
    return {"ran": dict(counted)}


def main(folder, *cases):
    """Each case, saved in FOLDER/CASE, is MODEL,REPLICAS,PARTS or MODEL,REPLICAS,PARTS,MICRO_BATCHES."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    came = {}
    for case in cases:
        name, *numbers = case.split(",")
        there = Path(folder) / case
        there.mkdir()
        try:
            came[case] = trained(name, *map(int, numbers[:2]), there, *map(int, numbers[2:]))
        except (TrainingError, ModelError) as error:
            came[case] = {"refused": str(error)}
    print(json.dumps(came))


if __name__ == "__main__":
    main(*sys.argv[1:])

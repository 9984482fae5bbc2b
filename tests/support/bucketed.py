"""Asks of many models whether their gradients travel in one bucket, and compares what a batch makes of those that do.

`python bucketed.py`: a process of its own, since Keras takes one backend. Prints JSON.
"""

import json
import re
from functools import partial

import jax
import keras
import numpy as np
import on_jax
from keras import layers, losses

from pipeline.worker.jax import bucket, step
from pipeline.worker.jax.devices import BATCH as OVER

BATCH = 12


def models():
    """(name, whether it is to, a compiled model) of each."""

    def of(*stacked, inputs=(4, 4, 1), loss="sparse_categorical_crossentropy", metrics=("accuracy",), **given):
        model = keras.Sequential([keras.Input(inputs), *stacked])
        model.compile("adam", loss, metrics=list(metrics), **given)
        return model

    def dense(*stacked, **given):
        last = layers.Dense(5, activation="softmax")
        return of(layers.Flatten(), layers.Dense(7, activation="relu"), *stacked, last, **given)

    def functional():
        inputs = keras.Input((4, 4, 1))
        x = layers.Dense(6, activation=keras.activations.gelu)(layers.Flatten()(inputs))
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(6)(x)]))
        inner = keras.Sequential([keras.Input((6,)), layers.Dense(3), layers.RMSNormalization()])
        x = layers.Concatenate()([inner(x), layers.Dropout(0.0)(x)])
        model = keras.Model(inputs, layers.Dense(5, activation="softmax")(x))
        model.compile("adamw", losses.SparseCategoricalCrossentropy(), metrics=["accuracy"])
        return model

    def sliced():
        inputs = keras.Input((4, 4, 1))
        x = layers.Dense(5, activation="softmax")(layers.Flatten()(inputs))
        model = keras.Model(inputs, keras.ops.flip(x, axis=0))
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    def two():
        inputs = keras.Input((4, 4, 1))
        x = layers.Flatten()(inputs)
        model = keras.Model(inputs, [layers.Dense(1, name="a")(x), layers.Dense(1, name="b")(x)])
        model.compile("sgd", ["mse", "mse"])
        return model

    @keras.saving.register_keras_serializable()
    class Own(layers.Layer):
        def call(self, x):
            return x - keras.ops.mean(x, axis=0)

    class OwnModel(keras.Sequential):
        def compute_loss(self, *given, **named):
            return 2 * super().compute_loss(*given, **named)

    class OwnLoss(losses.Loss):
        def call(self, y, y_pred):
            return keras.ops.square(keras.ops.mean(y_pred, axis=0))

    class OwnMetric(keras.metrics.SparseCategoricalAccuracy):
        def update_state(self, y, y_pred, sample_weight=None):
            self.total.assign(keras.ops.maximum(self.total, keras.ops.max(y_pred)))

    def centred(x):
        return x - keras.ops.mean(x, axis=0)

    def spread(y, y_pred):
        return keras.ops.std(y_pred, axis=0)

    own = OwnModel([keras.Input((4, 4, 1)), layers.Flatten(), layers.Dense(5, activation="softmax")])
    own.compile("sgd", "sparse_categorical_crossentropy")
    softmax = partial(layers.Dense, 5, activation="softmax")
    flat = partial(lambda *stacked, **given: of(layers.Flatten(), *stacked, **given), metrics=())
    single = partial(layers.Dense, 1)
    yield from ((name, True, model) for name, model in (
        ("dense", dense()),
        ("functional", functional()),
        ("several metrics", dense(metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)])),
        ("no metrics", dense(metrics=[])),
        ("convolutional", of(layers.Conv2D(3, 2, activation="relu"), layers.GlobalMaxPooling2D(), softmax())),
        ("embedded", of(layers.Embedding(9, 4), layers.GlobalAveragePooling1D(), softmax(), inputs=(6,))),
        ("regression", flat(single(), loss="mse", metrics=["mae"])),
        ("binary", flat(single(), loss=losses.BinaryCrossentropy(from_logits=True), metrics=["mse"])),
        ("tokens", of(layers.Embedding(9, 4), softmax(), inputs=(6,))),
    ))  # fmt: skip
    yield from ((name, False, model) for name, model in (
        ("normalized", dense(layers.BatchNormalization())),
        ("dropped", dense(layers.Dropout(0.5))),
        ("noisy", dense(layers.GaussianNoise(0.1))),
        ("masked", of(layers.Embedding(9, 4, mask_zero=True), softmax(), inputs=(6,))),
        ("layer of one's own", dense(Own())),
        ("model of one's own", own),
        ("activation of one's own", dense(layers.Dense(4, activation=centred))),
        ("function as a layer", dense(layers.Lambda(centred))),
        ("over the batch", sliced()),
        ("softmax elsewhere", dense(layers.Softmax(axis=0))),
        ("loss of one's own", flat(layers.Dense(5), loss=OwnLoss())),
        ("loss as a function", flat(layers.Dense(5), loss=spread)),
        ("dice", flat(single(), loss="dice")),
        ("sum", dense(loss=losses.SparseCategoricalCrossentropy(reduction="sum"))),
        ("ignored", dense(loss=losses.SparseCategoricalCrossentropy(ignore_class=0))),
        ("metric elsewhere", flat(single(), loss="mse", metrics=[keras.metrics.CosineSimilarity(axis=0)])),
        ("regularized", dense(layers.Dense(4, kernel_regularizer="l2"))),
        ("activity", dense(layers.Dense(4, activity_regularizer="l2"))),
        ("area", flat(single(activation="sigmoid"), loss="binary_crossentropy", metrics=["auc"])),
        ("metric of one's own", dense(metrics=[OwnMetric()])),
        ("metric as a function", dense(metrics=[spread])),
        ("two outputs", two()),
        ("no axis", of(single(), layers.Reshape(()), inputs=(1,), loss="mse", metrics=[])),
        ("16 bits", flat(softmax(dtype="bfloat16"), metrics=["accuracy"])),
    ))  # fmt: skip


def batch_of(model, count):
    rng, shape = np.random.default_rng(count), model.inputs[0].shape[1:]
    x = rng.integers(0, 9, (count, *shape)) if len(shape) == 1 and shape[0] == 6 else rng.random((count, *shape))
    outputs = model.outputs[0].shape[1:]
    y = rng.integers(0, outputs[-1], (count, *outputs[:-1])) if outputs and outputs[-1] > 1 else rng.random((count, 1))
    y = (y, y) if len(model.outputs) > 1 else y.astype(np.int32 if y.dtype.kind == "i" else np.float32)
    return x.astype(np.int32 if x.dtype.kind == "i" else np.float32), y


def compared(model, mesh, *kinds):
    """How far what batches of some kinds make of a model is from what they make without, and what devices add up."""
    everywhere = step.everywhere(mesh)
    over = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(OVER))
    variables = step.variables_of(model)
    state = tuple([jax.device_put(one.value + 0, everywhere) for one in group] for group in variables)
    # As in the midst of an epoch.
    state[3][:] = [value + 3 for value in state[3]]
    far = {}
    for kind in kinds:
        batch = batch_of(model, count := BATCH - (kind == "short"))
        if kind == "weighted":
            batch = (*batch, np.linspace(0, 1, batch[1].size, dtype=np.float32).reshape(batch[1].shape))
        batch = jax.device_put(batch, over if count % 2 == 0 else everywhere)
        with_it, without = (
            jax.jit(partial(made_of, model, variables)) for made_of in (partial(bucket.made_of, mesh), step.made_of)
        )
        far[kind] = max(
            float(np.max(np.abs(np.asarray(one) - np.asarray(other)), initial=0))
            for one, other in zip(*(jax.tree.leaves(made(state, batch)) for made in (with_it, without)), strict=True)
        )
        if kind == "whole":
            sums = re.findall(r"= (.*) all-reduce\(", with_it.lower(state, batch).compile().as_text())
    return {"far": far, "sums": sums}


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    mirrored, one, cut = map(on_jax.mesh_of, ((2, 1), (1, 1), (1, 2)))
    found = {}
    for name, expected, model in models():
        model._symbolic_build(data_batch=batch_of(model, 2))
        model.optimizer.build(model.trainable_variables)
        found[name] = {"expected": expected, "fits": bucket.fits(model, step.variables_of(model), mirrored)}
        found[name]["others"] = any(bucket.fits(model, step.variables_of(model), mesh) for mesh in (one, cut))
        if expected:
            # What batches of the other kinds go without is one function for all models.
            found[name] |= compared(model, mirrored, "whole", *("short", "weighted") * (name == "functional"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

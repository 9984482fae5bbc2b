"""Trains models under JAX on meshes of this process's four devices, and prints what came as JSON.

`python on_jax.py FOLDER`: a process of its own, since Keras takes one backend. FOLDER has what TensorFlow has saved.
`python on_jax.py many_steps`, or `forgetting MESH ...`: that function's result instead.
"""

import json
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.models import cnn, mlp, transformer
from pipeline.worker.artifacts import save
from pipeline.worker.jax import data as reading
from pipeline.worker.jax import engine, step
from pipeline.worker.jax.data import DeviceData
from pipeline.worker.jax.devices import BATCH as OVER
from pipeline.worker.jax.devices import MODEL, derived_layout, seed_all, written_layout
from pipeline.worker.jax.loop import JaxLoop
from pipeline.worker.layout import BatchLayout

# To make code faster takes longer than to run it so few times.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
ENVIRON = {"KERAS_BACKEND": "jax", "XLA_FLAGS": QUICK}
# An epoch of mlp and more, seven of the others.
BATCH, CALLS = 16, (32, 18)
# Steps of a training that goes on with a saved model.
MORE = 20
BACKENDS, EXCHANGED = ("tensorflow", "jax"), ("mlp", "normalized", "cnn", "called", "transformer")
MESHES = {
    **dict.fromkeys(("one", "dropped", "stepped", "looped"), (1, 1)),
    "mirrored": (2, 1), "mirrored 4": (4, 1), "model": (1, 2), "both": (2, 2),
}  # fmt: skip


def examples(name):
    """(x, y) of a model by name, drawn from a seed: images that their labels lighten, or tokens that count up.

    An epoch of the smaller ones ends with a short batch.
    """
    rng = np.random.default_rng(7)
    if name == "transformer":
        tokens = (rng.integers(0, 64, (96, 1)) + rng.integers(1, 4, (96, 1)) * np.arange(17)).astype(np.int32) % 64
        return tokens[:, :-1], tokens[:, 1:]
    y = rng.integers(0, 10, {"cnn": 96, "mlp": 612}.get(name, 100), dtype=np.int32)
    return (rng.random((len(y), 8, 8, 1)) + y[:, None, None, None] / 10).astype(np.float32), y


def made(name, dropout=0.0):
    """A compiled model by name, whose weights NumPy has drawn from a seed, whatever its backend."""
    image = {"input_shape": (8, 8, 1), "num_classes": 10}
    model = {
        "transformer": lambda: transformer(
            input_shape=(16,), num_classes=64, blocks=2, width=64, heads=4, dropout=dropout
        ),
        "mlp": lambda: mlp(**image),
        "cnn": lambda: cnn(**image, filters=(8, 16), dense_units=64, dropout=dropout),
        "called": called,
        "normalized": lambda: convolutional(**image, dropout=dropout),
    }[name]()
    if not model.compiled:
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    rng = np.random.default_rng(3)
    for variable in model.trainable_variables:
        if len(variable.shape) > 1:
            variable.assign((rng.standard_normal(variable.shape) * 0.05).astype(np.float32))
    return model


def convolutional(input_shape, num_classes, dropout=0.5):
    """A small network with batch normalization and dropout."""
    layers = keras.layers
    inner = [layers.Conv2D(16, 3), layers.BatchNormalization(), layers.Flatten(), layers.Dense(32, activation="relu")]
    last = layers.Dense(num_classes, activation="softmax")
    return keras.Sequential([keras.Input(input_shape), *inner, layers.Dropout(dropout, seed=3), last])


@keras.saving.register_keras_serializable("on_jax")
class Doubled(keras.layers.Layer):
    """Doubles what it gets while it is trained."""

    def call(self, x, training=False):
        return 2 * x if training else x


@keras.saving.register_keras_serializable("on_jax")
class Called(keras.Model):
    """A model that hands `training` on to no layer, calls one twice, and adds its loss itself."""

    def __init__(self, **named):
        super().__init__(**named)
        self.doubled = Doubled()
        self.dense = keras.layers.Dense(4, activity_regularizer="l2")

    def call(self, x, training=False):
        x = self.doubled(keras.ops.reshape(x, (-1, 64)))
        once, twice = self.dense(x), self.dense(keras.ops.flip(x, 1))
        self.add_loss(keras.ops.mean(keras.ops.square(once - twice - 1)))
        return once


def called():
    model = Called()
    model(keras.ops.zeros((1, 8, 8, 1)))
    model.compile(keras.optimizers.SGD(0.01))
    return model


def mesh_of(shape):
    """A mesh of so many replicas of so many devices."""
    return Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), (OVER, MODEL))


def loop_over(make, arrays, shape, validates=False, change=lambda model: None, alike=False):
    """The loop over what `make` makes, which `change` is done to once it is built, on a mesh of that shape."""
    keras.utils.clear_session()
    seed_all(0)
    (replicas, parts), mesh, model = shape, mesh_of(shape), make()
    model._symbolic_build(data_batch=tuple(array[:2] for array in arrays))
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    change(model)
    engine.expect_loss(model, arrays)
    layout = BatchLayout(BATCH, replicas, 0, replicas, (len(arrays[1]),))
    cut = derived_layout(model, parts) if parts > 1 else {}
    train, validation = (DeviceData(arrays, layout, shuffle, 5) for shuffle in (True, False))
    return JaxLoop(model, mesh, train, validation if validates else None, cut=cut, alike=alike)


def trained(name, shape, dropout, alike):
    """What a model comes to after some steps on a mesh of that shape: losses, validation, bytes of a device, places."""
    loop = loop_over(lambda: made(name, dropout), examples(name), shape, validates=True, alike=alike)
    model = loop.model
    held = _held(model)
    losses = loop.call(CALLS[0]).losses[:, 0].tolist()
    found = {
        # By its first call already, which would hold the state twice else.
        "handed_on": held == _held(model),
        "losses": losses + loop.call(CALLS[1]).losses[:, 0].tolist(),
        "room": loop._train.room,
        "held": loop.held_bytes(),
        "cut": {path: list(axes) for path, axes in loop.cut.items()},
        "places": {one.path: str(one.value.sharding.spec) for one in (*model.variables, *model.optimizer.variables)},
        "digests": loop.replica_digests(),
    }
    if name == "mlp":
        before = loop.state().arrays
        with loop.put_back():
            loop.call(3)
        found["same"] = all(np.array_equal(array, before[key]) for key, array in loop.state().arrays.items())
        found["validated"] = loop.evaluate(3, lambda event: None)
    if shape == MESHES["both"]:
        found["refused"] = refused(model, loop.mesh)
    return found


def _held(model):
    """Where in memory the slots are of this process's first device; the weights of these models are NumPy's."""
    return [one.value.addressable_shards[0].data.unsafe_buffer_pointer() for one in model.optimizer.variables]


def refused(model, mesh):
    """What is said of written layouts that are wrong, and of a model with convolutions of groups of channels."""
    said = []
    for patterns in (
        {"kernel": [None, "model"]},
        {".*kernel": [None, "model"], model.trainable_variables[0].path: [None, "model"]},
        {model.trainable_variables[0].path: ["model"]},
    ):
        try:
            written_layout(model, patterns, mesh)
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    grouped, x = in_groups(), examples("cnn")[0]
    for shape in ((1, 2), (2, 1), (2, 2)):
        try:
            engine.expect_no_groups(model, mesh_of(shape), x)
            engine.expect_no_groups(grouped, mesh_of(shape), x)
        except ValueError as error:
            said.append(f"{shape}: {error}")
    return said


def in_groups():
    inner = keras.Sequential([keras.layers.Conv2D(4, 3), keras.layers.DepthwiseConv2D(3)])
    return keras.Sequential([keras.Input((8, 8, 1)), inner, keras.layers.Flatten(), keras.layers.Dense(10)])


def read():
    """What becomes of data that cannot be read, and of a thread whose steps nobody wants any longer."""
    mesh = mesh_of((1, 1))
    found, whole, strided = {}, (np.arange(100.0), np.arange(100)), np.arange(200, dtype=np.float32)[::2] / 2
    for name, arrays, beside in (
        ("whole", whole, True),
        ("whole, on one core", (whole[0].astype(np.float32), whole[1]), False),
        ("strided", (strided, whole[1]), False),
        ("too few", (whole[0], np.arange(50)), True),
        ("too few, on one core", (whole[0], np.arange(50, dtype=np.int32)), False),
    ):
        with mock.patch.object(reading, "has_core_beside", lambda beside=beside: beside):
            reads = reading.Reader(DeviceData(arrays, BatchLayout(BATCH, 1, 0, 1, (100,)), False, 5), mesh, 4)
        try:
            found[name] = [
                np.asarray(block.batches[0] if block.stacked else [block.batches[0]])[first : first + steps].tolist()
                for block, first, steps in reads.take(9)
            ]
        except IndexError as error:
            found[name] = str(error)
        reads.close()
        assert (reads._thread is not None) is beside
        if beside:
            (thread,) = reads._thread._threads
            thread.join(30)
            found[f"{name}, left"] = thread.is_alive()
    return found


def forgetting(name, forgets):
    """(losses, bytes that a step takes beside its arguments, digests) of a transformer, whose blocks compute again."""
    sizes = {"input_shape": (32,), "num_classes": 64, "blocks": 3, "width": 32, "heads": 2}
    tokens = np.random.default_rng(7).integers(0, 64, (64, 33), dtype=np.int32)
    loop = loop_over(
        lambda: transformer(dropout=0.3 * (name == "dropped"), **sizes), (tokens[:, :-1], tokens[:, 1:]),
        MESHES[name], change=engine.forget if forgets else lambda model: None,
    )  # fmt: skip
    losses = loop.call(4).losses[:, 0].tolist()
    (program,) = loop._train._compiled.values()
    temporary = program.memory_analysis().temp_size_in_bytes
    return {"losses": losses, "temporary": temporary, "digests": loop.replica_digests()}


def train(loop_of, folder):
    """Returns the losses of models that are trained from the same weights, and saves them in a folder as a run does."""
    found = {}
    for name in EXCHANGED:
        loop = loop_of(lambda name=name: made(name), examples(name))
        found[name] = loop.call(sum(CALLS)).losses[:, 0].tolist()
        (folder / name).mkdir(parents=True)
        save(loop.whole_model() if hasattr(loop, "whole_model") else loop.model, folder / name, lambda event: None)
    return found


def go_on(loop_of, folder):
    """Returns the losses of going on with each model of a folder, and the steps that its optimizer has made in all."""
    found = {}
    for name in EXCHANGED:
        loop = loop_of(lambda name=name: keras.saving.load_model(folder / name / "model.keras"), examples(name))
        found[name] = loop.call(MORE).losses[:, 0].tolist(), int(loop.model.optimizer.iterations)
    return found


def exchanged(folder):
    """Returns what comes of training, and of going on with what each backend has saved in a folder."""

    def loop_of(make, arrays):
        return loop_over(make, arrays, MESHES["one"])

    return {"train": train(loop_of, folder / "jax"), **{of: go_on(loop_of, folder / of) for of in BACKENDS}}


def many_steps(steps=1500, width=784, batch=128):
    """Returns the last loss of many steps, each in a call of its own, whose gradient two devices add up."""
    mesh = mesh_of(MESHES["mirrored"])
    weights = jax.device_put(np.eye(width, batch, dtype=np.float32), NamedSharding(mesh, PartitionSpec()))
    data = jax.device_put(np.full((batch, width), 0.1, np.float32), NamedSharding(mesh, PartitionSpec(OVER)))

    def descend(state, data):
        loss, gradient = jax.value_and_grad(lambda weights: jnp.mean(jnp.tanh(data @ weights) ** 2))(state[0])
        return (state[0] - 0.1 * gradient,), loss

    call = step.CompiledSteps(descend, mesh, (weights,), data, in_epoch=steps, alike=True)
    state, losses = (weights,), []
    for _ in range(steps):
        state, of_call = call(state, reading.ReadBlock(data, 1, batch, stacked=False), 0, 1)
        losses += of_call
    return float(losses[-1])


def main(what, *meshes):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2 if what == "many_steps" else 4)
    if meshes:
        found = {f"{name} {forgets}": forgetting(name, forgets) for name in meshes for forgets in (False, True)}
    elif what == "many_steps":
        found = many_steps()
    else:
        found = {"trained": all_trained(), "read": read(), "exchanged": exchanged(Path(what))}
    print(json.dumps(found))


def all_trained():
    """What each model comes to on each mesh."""
    found = {}
    for name, meshes, dropout in (
        ("mlp", ("one", "stepped", "mirrored", "both"), 0.0),
        ("normalized", ("one", "looped", "mirrored 4", "model", "both"), 0.5),
        ("normalized", ("one",), 0.0),
        ("cnn", ("one", "model"), 0.5),
        ("called", ("one", "mirrored"), 0.0),
        ("transformer", ("one", "stepped", "mirrored 4", "both"), 0.0),
    ):
        for mesh in meshes:
            # As on a GPU, where convolutions too are in a loop.
            with mock.patch.object(step, "on_cpu", lambda _, looped=mesh == "looped": not looped):
                key = f"{name} {mesh}{' dropped' * bool(dropout)}"
                found[key] = trained(name, MESHES[mesh], dropout, mesh == "stepped")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])

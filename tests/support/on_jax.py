"""Trains models under JAX on meshes of this process's four devices, and prints what came as JSON.

`python on_jax.py [MESH...]`: a process of its own, since Keras takes one backend. On MESHes that are named it trains
one model with and without `train.remat` instead.
"""

import json
import os
import sys
from unittest import mock

# To make code faster takes longer than to run it so few times.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# An epoch of mlp and more, seven of the others.
BATCH, CALLS = 16, (32, 18)
MESHES = {
    "one": (1, 1),
    "dropped": (1, 1),
    "stepped": (1, 1),
    "looped": (1, 1),
    "mirrored": (2, 1),
    "mirrored 4": (4, 1),
    "model": (1, 2),
    "both": (2, 2),
}


def examples(name):
    """(x, y) of a model by name, drawn from a seed; an epoch of the smaller ones ends with a short batch."""
    import numpy as np

    rng = np.random.default_rng(7)
    if name == "transformer":
        tokens = rng.integers(0, 64, (96, 17), dtype=np.int32)
        return tokens[:, :-1], tokens[:, 1:]
    count = {"cnn": 96, "mlp": 612}.get(name, 100)
    return rng.random((count, 8, 8, 1), np.float32), rng.integers(0, 10, count, dtype=np.int32)


def made(name, dropout=0.0):
    """A compiled model by name, whose weights NumPy has drawn from a seed, whatever its backend."""
    import numpy as np

    from pipeline.models import cnn, mlp, transformer

    if name == "transformer":
        model = transformer(input_shape=(16,), num_classes=64, blocks=2, width=64, heads=4, dropout=dropout)
    elif name == "mlp":
        model = mlp(input_shape=(8, 8, 1), num_classes=10)
    elif name == "cnn":
        model = cnn(input_shape=(8, 8, 1), num_classes=10, filters=(8, 16), dense_units=64, dropout=dropout)
    elif name == "called":
        model = called()
    else:
        model = convolutional((8, 8, 1), 10, dropout)
    if not model.compiled:
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    rng = np.random.default_rng(3)
    for variable in model.trainable_variables:
        if len(variable.shape) > 1:
            variable.assign((rng.standard_normal(variable.shape) * 0.05).astype(np.float32))
    return model


def convolutional(input_shape, num_classes, dropout=0.5):
    """A small network with batch normalization and dropout."""
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input(input_shape),
            layers.Conv2D(16, 3),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(32, activation="relu"),
            layers.Dropout(dropout, seed=3),
            layers.Dense(num_classes, activation="softmax"),
        ]
    )


def called():
    """A model that hands `training` on to no layer, calls one twice, and adds its loss itself."""
    import keras

    class Doubled(keras.layers.Layer):
        def call(self, x, training=False):
            return 2 * x if training else x

    class Called(keras.Model):
        def __init__(self):
            super().__init__()
            self.doubled = Doubled()
            self.dense = keras.layers.Dense(4, activity_regularizer="l2")

        def call(self, x, training=False):
            x = self.doubled(keras.ops.reshape(x, (-1, 64)))
            once, twice = self.dense(x), self.dense(keras.ops.flip(x, 1))
            self.add_loss(keras.ops.mean(keras.ops.square(once - twice - 1)))
            return once

    model = Called()
    model(keras.ops.zeros((1, 8, 8, 1)))
    model.compile(keras.optimizers.SGD(0.01))
    return model


def mesh_of(shape):
    """A mesh of so many replicas of so many devices."""
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from pipeline.worker.jax.devices import BATCH as OVER
    from pipeline.worker.jax.devices import MODEL

    return Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), (OVER, MODEL))


def loop_over(make, arrays, shape, validates=False, change=lambda model: None, alike=False):
    """The loop over what `make` makes, which `change` is done to once it is built, on a mesh of that shape."""
    import keras

    from pipeline.worker.jax import build, layouts
    from pipeline.worker.jax.data import DeviceData
    from pipeline.worker.jax.devices import seed_all
    from pipeline.worker.jax.loop import JaxLoop
    from pipeline.worker.layout import BatchLayout

    keras.utils.clear_session()
    seed_all(0)
    (replicas, parts), mesh, model = shape, mesh_of(shape), make()
    model._symbolic_build(data_batch=tuple(array[:2] for array in arrays))
    model.optimizer.build(model.trainable_variables)
    change(model)
    build._expect_loss(model, arrays)
    layout = BatchLayout(BATCH, replicas, 0, replicas, (len(arrays[1]),))
    cut = layouts.derived(model, parts) if parts > 1 else {}
    train, validation = (DeviceData(arrays, layout, shuffle, 5) for shuffle in (True, False))
    return JaxLoop(model, mesh, train, validation if validates else None, cut=cut, alike=alike)


def trained(name, shape, dropout, alike):
    """What a model comes to after some steps on a mesh of that shape: losses, validation, bytes of a device, places."""
    import numpy as np

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
    from pipeline.worker.jax import build, layouts

    said = []
    for patterns in (
        {"kernel": [None, "model"]},
        {".*kernel": [None, "model"], model.trainable_variables[0].path: [None, "model"]},
        {model.trainable_variables[0].path: ["model"]},
    ):
        try:
            layouts.written(model, patterns, mesh)
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    grouped, x = in_groups(), examples("cnn")[0]
    for shape in ((1, 2), (2, 1), (2, 2)):
        try:
            build.expect_no_groups(model, mesh_of(shape), x)
            build.expect_no_groups(grouped, mesh_of(shape), x)
        except ValueError as error:
            said.append(f"{shape}: {error}")
    return said


def in_groups():
    """A model with a convolution of groups of channels inside another."""
    import keras

    inner = keras.Sequential([keras.layers.Conv2D(4, 3), keras.layers.DepthwiseConv2D(3)])
    return keras.Sequential([keras.Input((8, 8, 1)), inner, keras.layers.Flatten(), keras.layers.Dense(10)])


def read():
    """What becomes of data that cannot be read, and of a thread whose steps nobody wants any longer."""
    import numpy as np

    from pipeline.worker.jax import reader as reading
    from pipeline.worker.jax.data import DeviceData
    from pipeline.worker.layout import BatchLayout

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
            reader = reading.Reader(DeviceData(arrays, BatchLayout(BATCH, 1, 0, 1, (100,)), False, 5), mesh, 4)
        try:
            found[name] = [
                np.asarray(block.batches[0] if block.stacked else [block.batches[0]])[first : first + steps].tolist()
                for block, first, steps in reader.take(9)
            ]
        except IndexError as error:
            found[name] = str(error)
        reader.close()
        assert (reader._thread is not None) is beside
        if beside:
            (thread,) = reader._thread._threads
            thread.join(30)
            found[f"{name}, left"] = thread.is_alive()
    return found


def forgetting(name, forgets):
    """(losses, bytes that a step takes beside its arguments, digests) of a transformer, whose blocks compute again."""
    import numpy as np

    from pipeline.models import transformer
    from pipeline.worker.jax.build import forget

    sizes = {"input_shape": (32,), "num_classes": 64, "blocks": 3, "width": 32, "heads": 2}
    tokens = np.random.default_rng(7).integers(0, 64, (64, 33), dtype=np.int32)
    loop = loop_over(
        lambda: transformer(dropout=0.3 * (name == "dropped"), **sizes), (tokens[:, :-1], tokens[:, 1:]),
        MESHES[name], change=forget if forgets else lambda model: None,
    )  # fmt: skip
    losses = loop.call(4).losses[:, 0].tolist()
    (compiled,) = loop._train._compiled.values()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return {"losses": losses, "temporary": temporary, "digests": loop.replica_digests()}


def main(*meshes):
    """Trains all of them, and prints what came."""
    os.environ["KERAS_BACKEND"] = "jax"
    if not meshes:
        os.environ["XLA_FLAGS"] = QUICK
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    if meshes:
        found = {f"{name} {forgets}": forgetting(name, forgets) for name in meshes for forgets in (False, True)}
    else:
        found = {"trained": all_trained(), "read": read()}
    print(json.dumps(found))


def all_trained():
    """What each model comes to on each mesh."""
    from pipeline.worker.jax import compiled

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
            with mock.patch.object(compiled, "on_cpu", lambda _, looped=mesh == "looped": not looped):
                key = f"{name} {mesh}{' dropped' * bool(dropout)}"
                found[key] = trained(name, MESHES[mesh], dropout, mesh == "stepped")
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])

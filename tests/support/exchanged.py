"""Trains models under one backend, or goes on with what either has saved, and prints the losses that came as JSON.

`python exchanged.py BACKEND train|go_on FOLDER`: a process of its own, since Keras takes one backend.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import on_jax

BACKENDS, NAMES = ("tensorflow", "jax"), ("mlp", "cnn", "transformer")
BATCH, STEPS, MORE = 16, 50, 20


def examples(name):
    """(x, y) of a model by name, drawn from a seed: images that their labels lighten, or tokens that count up."""
    import numpy as np

    rng = np.random.default_rng(7)
    if name == "transformer":
        tokens = (rng.integers(0, 64, (96, 1)) + rng.integers(1, 4, (96, 1)) * np.arange(33)).astype(np.int32) % 64
        return tokens[:, :-1], tokens[:, 1:]
    y = rng.integers(0, 10, 96, dtype=np.int32)
    return (rng.random((96, 12, 12, 1)) + y[:, None, None, None] / 10).astype(np.float32), y


def made(name, input_shape, num_classes):
    """A built-in model by name, whose weights NumPy has drawn from a seed, whatever its backend; without dropout."""
    import numpy as np

    from pipeline import models

    model = getattr(models, name)(input_shape=input_shape, num_classes=num_classes, dropout=0.0)
    rng = np.random.default_rng(3)
    for variable in model.trainable_variables:
        if len(variable.shape) > 1:
            variable.assign((rng.standard_normal(variable.shape) * 0.05).astype(np.float32))
    return model


def loop_of(backend, build, arrays, classes):
    """The engine's loop over the model that `build` names, as a config would, on one device."""
    if backend == "tensorflow":
        from loops import loop_over

        from pipeline.config import targets

        given = {"input_shape": arrays[0].shape[1:], "num_classes": classes}
        return loop_over(lambda: targets.call(build, "model.build", **given), arrays, batch=BATCH)
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from pipeline.worker.jax import build as building
    from pipeline.worker.jax.data import DeviceData
    from pipeline.worker.jax.loop import JaxLoop
    from pipeline.worker.layout import BatchLayout

    chosen = SimpleNamespace(optimizer=None, learning_rate=None, loss=None, metrics=None, rate_scale=1.0)
    plan = SimpleNamespace(model=SimpleNamespace(build=build), training=chosen)
    model = building.model(plan, SimpleNamespace(train=arrays, num_classes=classes, parts={}))
    mesh = Mesh(np.array(jax.devices()).reshape(1, 1), ("batch", "model"))
    layout = BatchLayout(BATCH, 1, 0, 1, (len(arrays[1]),))
    return JaxLoop(model, mesh, DeviceData(arrays, layout, True, 5), None)


def saved(folder, backend, name):
    """Where a backend has saved a model."""
    return Path(folder) / backend / name / "model.keras"


def trained(loop, steps):
    """The losses of some steps, and how many its optimizer has made in all."""
    losses = loop.call(steps).losses[:, 0].tolist()
    return {"losses": losses, "iterations": int(loop.model.optimizer.iterations)}


def train(backend, folder):
    """Trains each model from the same weights, and saves it as a run does."""
    from pipeline.worker.artifacts import save

    found = {}
    for name in NAMES:
        arrays = examples(name)
        classes = 64 if name == "transformer" else 10
        loop = loop_of(backend, {"_target_": "exchanged.made", "name": name}, arrays, classes)
        found[name] = trained(loop, STEPS)
        where = saved(folder, backend, name).parent
        where.mkdir(parents=True)
        save(loop.whole_model() if backend == "jax" else loop.model, where, lambda event: None)
    return found


def go_on(backend, folder):
    """Goes on with each model that either backend has saved, as a config that names the file does."""
    found = {}
    for name in NAMES:
        for of in BACKENDS:
            build = {"_target_": "keras.saving.load_model", "filepath": str(saved(folder, of, name))}
            loop = loop_of(backend, build, examples(name), 64 if name == "transformer" else 10)
            found[f"{name} of {of}"] = trained(loop, MORE)
    return found


def main(backend, what, folder):
    """Does one of the two, and prints what came."""
    os.environ["KERAS_BACKEND"] = backend
    if backend == "jax":
        os.environ["XLA_FLAGS"] = on_jax.QUICK
        import jax

        jax.config.update("jax_platforms", "cpu")
    print(json.dumps({"train": train, "go_on": go_on}[what](backend, folder)))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Trains a model under JAX with and without `train.remat`, on meshes of two devices, and writes what came.

`python forgetting.py OUT MESH...`: a process of its own, since Keras takes one backend. Prints nothing.
"""

import json
import os
import sys
from pathlib import Path

MESHES = {"one": (1, 1), "dropped": (1, 1), "mirrored": (2, 1), "model": (1, 2)}
STEPS = 4


def trained(shape, dropout, remat):
    """(losses, bytes that a step takes beside its arguments, digests) on a mesh of that shape."""
    import jax
    import keras
    import numpy as np
    from jax.sharding import Mesh

    from pipeline.models import transformer
    from pipeline.worker.jax import layouts
    from pipeline.worker.jax.build import forget
    from pipeline.worker.jax.data import DeviceData
    from pipeline.worker.jax.devices import BATCH, MODEL, seed_all
    from pipeline.worker.jax.loop import JaxLoop
    from pipeline.worker.layout import BatchLayout

    keras.utils.clear_session()
    seed_all(0)
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), (BATCH, MODEL))
    model = transformer(input_shape=(32,), num_classes=64, blocks=3, width=32, heads=2, dropout=dropout)
    tokens = np.random.default_rng(7).integers(0, 64, (64, 33), dtype=np.int32)
    arrays = tokens[:, :-1], tokens[:, 1:]
    model._symbolic_build(data_batch=tuple(array[:2] for array in arrays))
    if remat:
        forget(model)
    layout = BatchLayout(16, shape[0], 0, shape[0], (len(tokens),))
    cut = layouts.derived(model, shape[1]) if shape[1] > 1 else {}
    loop = JaxLoop(model, mesh, layouts.shardings(model, cut, mesh), DeviceData(arrays, layout, True, 5), None)
    losses = loop.call(STEPS).losses[:, 0].tolist()
    (compiled,) = loop._train._compiled.values()
    return {
        "losses": losses,
        "temporary": compiled.memory_analysis().temp_size_in_bytes,
        "digests": loop.replica_digests(),
    }


def main(out, *meshes):
    """Trains all of them, and writes what came as JSON."""
    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    found = {
        f"{name} {remat}": trained(MESHES[name], 0.3 * (name == "dropped"), remat)
        for name in meshes
        for remat in (False, True)
    }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

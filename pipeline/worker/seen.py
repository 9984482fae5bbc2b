"""Prints a backend's version, the GPUs it computes on, and the CUDA it needs, as JSON; what goes wrong is a traceback.

`python -m pipeline.worker.seen BACKEND`: a process of its own, since one that has used its devices is theirs.
"""

import json
import sys
import time
from importlib.util import find_spec

# The packages by which JAX computes on NVIDIA's GPUs, by the CUDA and cuDNN that they are built for.
PLUGINS = {"jax_cuda12_plugin": ("12", "9"), "jax_cuda13_plugin": ("13", "9")}


def _tensorflow() -> dict[str, object]:
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus]
    for device in tf.config.list_logical_devices():
        with tf.device(device.name):
            tf.linalg.matmul(tf.ones((8, 8)), tf.ones((8, 8))).numpy()
    built = tf.sysconfig.get_build_info()
    cuda = {name: built.get(f"{name}_version") if built.get("is_cuda_build") else None for name in ("cuda", "cudnn")}
    return {"version": tf.__version__, "gpus": names, **cuda}


def _jax() -> dict[str, object]:
    import jax

    devices = jax.local_devices()
    for device in devices:
        ones = jax.device_put(jax.numpy.ones((8, 8)), device)
        (ones @ ones).block_until_ready()
    names = [device.device_kind for device in devices if device.platform == "gpu"]
    cuda, cudnn = next((PLUGINS[name] for name in PLUGINS if find_spec(name)), (None, None))
    return {"version": jax.__version__, "gpus": names, "cuda": cuda, "cudnn": cudnn}


if __name__ == "__main__":
    began = time.monotonic()
    facts = {"tensorflow": _tensorflow, "jax": _jax}[sys.argv[1]]()
    print("\n" + json.dumps({"seconds": time.monotonic() - began, **facts}))

"""Prints what JAX makes of this host, as JSON: its version, the GPUs that it computes on, and the CUDA it is built for.

`python -m pipeline.worker.jax.seen`: a process of its own, since one that has used its devices is theirs.
"""

import json
import time
from importlib import metadata

# The packages by which JAX computes on NVIDIA's GPUs, by the CUDA and cuDNN that they are built for.
PLUGINS = {"jax-cuda12-plugin": ("12", "9"), "jax-cuda13-plugin": ("13", "9")}


def main() -> None:
    """Computes something on each device, and prints what there is. What goes wrong is a traceback."""
    began = time.monotonic()
    import jax

    devices = jax.local_devices()
    for device in devices:
        ones = jax.device_put(jax.numpy.ones((8, 8)), device)
        (ones @ ones).block_until_ready()
    names = [device.device_kind for device in devices if device.platform == "gpu"]
    cuda, cudnn = next((PLUGINS[name] for name in PLUGINS if _is_installed(name)), (None, None))
    seconds = time.monotonic() - began
    facts = {"seconds": seconds, "version": jax.__version__, "gpus": names, "cuda": cuda, "cudnn": cudnn}
    print("\n" + json.dumps(facts))


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()

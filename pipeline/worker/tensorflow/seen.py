"""Prints what TensorFlow makes of this host, as JSON: its version, the GPUs that it computes on, and the CUDA it needs.

`python -m pipeline.worker.tensorflow.seen`: a process of its own, since one that has used its devices is theirs.
"""

import json
import time


def main() -> None:
    """Computes something on each device, and prints what there is. What goes wrong is a traceback."""
    began = time.monotonic()
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    names = [tf.config.experimental.get_device_details(gpu).get("device_name", gpu.name) for gpu in gpus]
    for device in tf.config.list_logical_devices():
        with tf.device(device.name):
            tf.linalg.matmul(tf.ones((8, 8)), tf.ones((8, 8))).numpy()
    built = tf.sysconfig.get_build_info()
    cuda = {name: built.get(f"{name}_version") if built.get("is_cuda_build") else None for name in ("cuda", "cudnn")}
    seconds = time.monotonic() - began
    print("\n" + json.dumps({"seconds": seconds, "version": tf.__version__, "gpus": names, **cuda}))


if __name__ == "__main__":
    main()

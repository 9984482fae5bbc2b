"""Several devices of one process, a copy of the model on each, gradients summed after each step."""

import tensorflow as tf


def mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """A `MirroredStrategy` over `devices`, such as ("CPU:0", "CPU:1") or ("GPU:0", "GPU:1").

    Sums travel over NCCL between GPUs. Logical CPU devices share one memory, where adding on one device and
    copying back is as short as a sum can be.
    """
    names = [f"/device:{device}" for device in devices]
    if all(device.startswith("GPU") for device in devices):
        return tf.distribute.MirroredStrategy(names)
    return tf.distribute.MirroredStrategy(names, cross_device_ops=tf.distribute.ReductionToOneDevice())

"""One device through tf.distribute: variables and steps are pinned to it."""

import tensorflow as tf


def one_device(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """A `OneDeviceStrategy` on the first of `devices`, such as ("CPU:0",)."""
    return tf.distribute.OneDeviceStrategy(f"/device:{devices[0]}")

"""Gives this process two devices while tests are collected, before any runs an operation: they cannot change later."""

import tensorflow as tf

DEVICES = ("CPU:0", "CPU:1")
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * len(DEVICES)
)

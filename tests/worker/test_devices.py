"""A process's devices are as planned, and so is what TensorFlow makes of graphs on them."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

CALL = """
import tensorflow as tf
from pipeline.worker.tensorflow.devices import optimize_graphs_once
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
optimize_graphs_once()
assert len(tf.config.list_logical_devices("CPU")) == 2
x = tf.ones([4, 4])
print(float(tf.function(lambda: tf.reduce_sum(tf.nn.relu(x @ x + 1) @ x))()))
"""


@pytest.mark.slow
def test_graphs_for_cpus_are_optimized_once_and_not_for_other_devices():
    told = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "meta_optimizer=1", "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", CALL], env=os.environ | told, capture_output=True, text=True, check=True, timeout=300
    )
    assert ran.stdout == "320.0\n"
    lines = [line for line in ran.stderr.splitlines() if "Graph size after" in line]
    assert sum("remapper: " in line for line in lines) == 1
    assert not [line for line in lines if "memory_optimizer: " in line or "layout: " in line or "tfg_optimizer" in line]

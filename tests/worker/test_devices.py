"""A process's devices are as planned, and so is what TensorFlow makes of graphs on them."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, SUPPORT

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


SPINS = """
import os
from dataclasses import replace
from shipped_sizes import planned
from pipeline.private import context
from pipeline.worker.tensorflow.devices import prepare_devices
plan, own = planned("strategy=one_device"), tuple(os.sched_getaffinity(0))
for cores in (own[:1], own):
    prepare_devices(plan, replace(plan.processes[0], cores=cores))
    print(len(cores) == 1, context.context().config.experimental.disable_thread_spinning)
"""


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_look_out_for_work_before_they_sleep_unless_they_share_a_core():
    search = os.pathsep.join([str(ROOT), str(SUPPORT)])
    ran = subprocess.run(
        [sys.executable, "-c", SPINS], env=os.environ | {"PYTHONPATH": search}, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert ran.stdout == "True True\nFalse False\n", ran.stderr

"""A process's devices are as planned, and so is what TensorFlow makes of graphs on them."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, SUPPORT

GRAPHS = """
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


def ran(code: str, printed: str, **environment: str) -> list[str]:
    """What a process writes beside what it is to print."""
    of_tests = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(SUPPORT)])}
    process = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | of_tests | environment, capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    assert process.stdout == printed, process.stderr
    return process.stderr.splitlines()


@pytest.mark.slow
def test_graphs_for_cpus_are_optimized_once_and_not_for_other_devices():
    lines = ran(GRAPHS, "320.0\n", TF_CPP_MIN_LOG_LEVEL="0", TF_CPP_VMODULE="meta_optimizer=1")
    lines = [line for line in lines if "Graph size after" in line]
    assert sum("remapper: " in line for line in lines) == 1
    assert not [line for line in lines if "memory_optimizer: " in line or "layout: " in line or "tfg_optimizer" in line]


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_threads_look_out_for_work_before_they_sleep_unless_they_share_a_core():
    ran(SPINS, "True True\nFalse False\n")

"""How replicas add up in a step."""

import subprocess
import sys

import pytest
from conftest import ROOT

PROGRAM = """
import tensorflow as tf
from tensorflow.python.ops import op_selector

from pipeline.worker.tensorflow.collective import over

(cpu,) = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
walk, walks = op_selector.get_backward_walk_ops, []
op_selector.get_backward_walk_ops = lambda *given, **named: walks.append(given) or walk(*given, **named)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
collective = over(strategy)

@tf.function
def step(value):
    def replica():
        number = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
        here = value + number
        with tf.GradientTape() as tape:
            tape.watch(here)
            (total,) = collective.sum([tf.square(here)])
        return total, tape.gradient(total, here)
    return strategy.run(replica)

for made in step(tf.constant(3.0)):
    print([float(of_replica) for of_replica in strategy.experimental_local_results(made)])
print(len(walks))
"""


@pytest.mark.slow
def test_sums_over_replicas_have_sums_as_gradients_and_are_traced_without_a_walk_through_the_graph():
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    # 3^2 + 4^2; each replica's total has the gradient 1, whose sum is 2.
    assert said.stdout.splitlines() == ["[25.0, 25.0]", "[12.0, 16.0]", "0"]

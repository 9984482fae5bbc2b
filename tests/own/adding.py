"""What replicas of two processes add through shared memory, as JSON: `python adding.py DEVICES RANK PORT PORT`."""

import json
import sys

import tensorflow as tf

from pipeline.strategies import multi_worker
from pipeline.worker.tensorflow import agreement
from pipeline.worker.tensorflow.collective import over
from pipeline.worker.tensorflow.shared_memory import SharedMemoryCollective, join

TYPES = (tf.float32, tf.bfloat16, tf.float16, tf.float64, tf.int32, tf.int64)


def main(devices, rank, *ports):
    local, rank = int(devices), int(rank)
    tf.config.set_visible_devices([], "GPU")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * local)
    strategy = multi_worker(
        tuple(f"CPU:{number}" for number in range(local)), tuple(f"127.0.0.1:{port}" for port in ports), rank
    )
    own = over(strategy)

    def told(text):
        return agreement.texts(strategy, own, text, rank, 2, local)

    collective = SharedMemoryCollective(2 * local, local, join(rank, 2, told, 1e-4))
    print(json.dumps([many(strategy, collective), alone(strategy, collective)]))
    # Nobody ends before all are done.
    agreement.over_replicas(strategy, own)([tf.zeros([])])


def replica(collective, step):
    """What a replica adds: types and sizes of which some change from step to step, on the way back, and rows."""
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    here = [tf.cast(tf.fill([3, step + 1], number + 1), dtype) for dtype in TYPES] + [tf.cast(number, tf.float32)]
    with tf.GradientTape() as tape:
        value = tf.cast(number + 1, tf.float32) * tf.cast(step, tf.float32)
        tape.watch(value)
        # As batch statistics are: summed, used, and summed again on the way back.
        mean, square = collective.sum([value, value * value])
        loss = value * mean + square
    (gradient,) = collective.sum([tape.gradient(loss, value)])
    table = tf.IndexedSlices(tf.fill([number + step, 2], tf.cast(number, tf.float32)), tf.range(number + step), [9, 2])
    *sums, rows = collective.sum([*here, table])
    first = [tf.cast(tf.reduce_sum(total), tf.float64) for total in sums]
    weighed = tf.reduce_sum(rows.values[:, 0] * tf.cast(tf.range(tf.shape(rows.values)[0]), tf.float32))
    return tf.stack([*first, tf.cast(gradient, tf.float64), tf.cast(weighed, tf.float64)])


def many(strategy, collective):
    """What each replica has after each of three steps in one compiled loop."""

    @tf.function(autograph=False)
    def steps():
        def one(step, values):
            made = strategy.run(replica, args=(collective, step))
            return step + 1, values.write(step, tf.stack(strategy.experimental_local_results(made)))

        return tf.while_loop(lambda step, _: step < 3, one, (0, tf.TensorArray(tf.float64, 3)))[1].stack()

    return steps().numpy().tolist()


def alone(strategy, collective):
    """What is added outside of a graph."""
    made = strategy.run(lambda: collective.sum([tf.constant([1.5, 2.5])])[0])
    return strategy.experimental_local_results(made)[0].numpy().tolist()


if __name__ == "__main__":
    main(*sys.argv[1:])

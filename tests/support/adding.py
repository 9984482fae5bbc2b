"""What replicas of processes add through shared memory, as JSON: `python adding.py DEVICES HOSTS RANK PORT ...`."""

import hashlib
import json
import sys
from functools import partial

import numpy as np
import tensorflow as tf

from pipeline.strategies import multi_worker
from pipeline.worker.layout import ReplicaPlace
from pipeline.worker.shared_memory import join
from pipeline.worker.tensorflow.collective import over, over_replicas, texts
from pipeline.worker.tensorflow.hierarchical import SharedMemoryCollective, host_ring

TYPES = (tf.float32, tf.bfloat16, tf.float16, tf.float64, tf.int32, tf.int64)


def main(devices, hosts, rank, *ports):
    local, hosts, rank = int(devices), int(hosts), int(rank)
    tf.config.set_visible_devices([], "GPU")
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * local)
    strategy = multi_worker(
        tuple(f"CPU:{number}" for number in range(local)), tuple(f"127.0.0.1:{port}" for port in ports), rank
    )
    own, count = over(strategy), len(ports)
    host, on_host = rank * hosts // count, count // hosts

    tell_all = partial(texts, strategy, own, ReplicaPlace(rank * local, local, count * local))
    memory = join(rank, range(host * on_host, (host + 1) * on_host), tell_all, 1e-4)
    ring = host_ring(strategy, hosts) if hosts > 1 and rank % on_host == 0 else None
    # Between hosts nearly each array is a bucket.
    collective = SharedMemoryCollective(count * local, local, memory, host, hosts, ring, 20 if hosts > 1 else 0)
    print(json.dumps([many(strategy, collective, hosts), alone(strategy, collective)]))
    # Nobody ends before all are done.
    over_replicas(strategy, own)([tf.zeros([])])


def replica(collective, step, size):
    """What a replica adds: types and sizes of which some change from step to step, on the way back, and rows."""
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    here = [tf.cast(tf.fill([3, size], number + 1), dtype) for dtype in TYPES] + [tf.cast(number, tf.float32)]
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


def many(strategy, collective, hosts):
    """What each replica has after each of three steps in one compiled loop."""

    @tf.function(autograph=False)
    def steps():
        def one(step, values):
            # TensorFlow's ring takes one size in a loop.
            made = strategy.run(replica, args=(collective, step, step + 1 if hosts == 1 else 2))
            return step + 1, values.write(step, tf.stack(strategy.experimental_local_results(made)))

        return tf.while_loop(lambda step, _: step < 3, one, (0, tf.TensorArray(tf.float64, 3)))[1].stack()

    return steps().numpy().tolist()


def alone(strategy, collective):
    """What is added outside of a graph, and a hash of sums and rows of several rounds whose order decides last bits."""

    def added(collective):
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        drawn = tf.random.stateless_normal([300_003], [7, number])
        rows = tf.IndexedSlices(drawn[: 30_000 * (number + 1)], tf.range(30_000 * (number + 1)), [300_003])
        first, large, slices = collective.sum([tf.constant([1.5, 2.5]), drawn, rows])
        return first, large, slices.values, slices.indices

    def first_replicas(collective):
        made = tf.function(lambda: strategy.run(added, args=(collective,)), autograph=False)()
        return [strategy.experimental_local_results(one)[0].numpy() for one in made]

    made = [strategy.experimental_local_results(one)[0].numpy() for one in strategy.run(added, args=(collective,))]
    assert all(map(np.array_equal, made, first_replicas(collective)))
    # TensorFlow's ring adds in another order, and gathers rows in the same.
    of_ring = first_replicas(over(strategy))
    np.testing.assert_allclose(made[1], of_ring[1], rtol=1e-4, atol=1e-5)
    assert all(map(np.array_equal, made[2:], of_ring[2:]))
    return made[0].tolist(), [hashlib.sha256(one.tobytes()).hexdigest() for one in made[1:]]


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Trains on logical CPU devices that are taken for GPUs, whose batches are laid on them ahead, and prints what came.

`python fed.py REPLICAS ...`: the host is CPU:0, the replicas are on the next ones; with 0, one is there, without
strategy. Prints one line of JSON: for each number of replicas losses, sizes and validation of calls as they are, fed
ahead, and fed ahead from a position on, and where the loop's parts are.

`multi_worker` stands in a config for the strategy of that name, with the same done to it.
"""

import functools
import json
import sys
from unittest import mock

import numpy as np
import tensorflow as tf
from loops import loop_over

from pipeline import strategies
from pipeline.private import context
from pipeline.worker.layout import BEGINNING, Position
from pipeline.worker.tensorflow import feed, profile

# The last batch of an epoch has 11 examples; so many steps go through it twice, and the first two calls end before.
EXAMPLES, BATCH, CALLS = 107, 32, (2, 1, 3, 3)
IN_LOOP = ("Enter", "Merge", "Switch", "NextIteration", "LoopCond")


@functools.wraps(strategies.multi_worker)
def multi_worker(**given):
    """TensorFlow's strategy of several processes, fed ahead."""
    feed.feeds_ahead = lambda devices: True
    return strategies.multi_worker(**given)


def made():
    import keras

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def loop_of(replicas, position=BEGINNING):
    """The loop of a strategy over so many devices, on data drawn from a seed."""
    kind = tf.distribute.MirroredStrategy if replicas > 1 else lambda names: tf.distribute.OneDeviceStrategy(names[0])
    # TensorFlow takes the sums of a strategy for those of the one before, in which others may have come first.
    tf.distribute.MirroredStrategy._collective_key_base += 100
    strategy = kind([f"CPU:{1 + replica}" for replica in range(replicas)]) if replicas else strategies.default()
    rng = np.random.default_rng(2)
    arrays = rng.normal(size=(EXAMPLES, 8)).astype("float32"), rng.integers(0, 3, EXAMPLES, "int32")
    return loop_over(made, arrays, strategy, BATCH, seed=3, held_out=arrays, position=position)


def trained(loop, calls=CALLS):
    """What some calls and a validation between them came to."""
    first = loop.call(calls[0])
    held_out = loop.evaluate(3, lambda event: None)
    rest = [loop.call(count) for count in calls[1:]]
    losses = [loss for call in (first, *rest) for loss in call.losses[:, 0].tolist()]
    return {
        "losses": losses,
        "sizes": [size for call in (first, *rest) for size in call.sizes.tolist()],
        "waits": [wait for call in (first, *rest) for wait in call.waits.tolist()],
        "held_out": held_out,
    }


def in_loop_on_host(loop):
    """What of the compiled loop the host takes part in: the operations of its partition that are made each step."""
    context.enable_graph_collection()
    loop.call(2)
    graphs = [one for one in context.export_run_metadata().function_graphs if len(one.partition_graphs) > 1]
    partitions = {node.device: part for one in graphs for part in one.partition_graphs for node in part.node[:1]}
    looping = [part for part in partitions.values() if any(node.op in IN_LOOP for node in part.node)]
    assert looping, "the loop's graph is among them"
    return [f"{node.op} {node.name}" for part in looping for node in part.node if node.device.endswith("CPU:0")]


def came(replicas):
    found = {"plain": trained(loop_of(replicas)), "plain on host": replicas and in_loop_on_host(loop_of(replicas))}
    with mock.patch.object(feed, "feeds_ahead", return_value=True):
        found |= {"ahead": trained(loop_of(replicas)), "ahead on host": replicas and in_loop_on_host(loop_of(replicas))}
        # As a process that was killed after the second call goes on, which had read ahead of it.
        before = loop_of(replicas)
        before.call(CALLS[0])
        before.evaluate(3, lambda event: None)
        before.call(CALLS[1])
        after = loop_of(replicas, Position(0, BATCH * 3))
        after.set_state(before.state())
        found["resumed"] = [loss for count in CALLS[2:] for loss in after.call(count).losses[:, 0].tolist()]
        # As parts of steps are timed: on one batch, again and again.
        step = profile.first_step(after.train_data)
        call = after.on(profile.one_again(after.strategy, after.train_data), 2)
    traced = after._train.experimental_get_tracing_count()
    return found | {"again": [float(step[0]), len(step[1]), *call.sizes.tolist(), traced]}


def main(*numbers):
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * (1 + max(numbers)))
    print(json.dumps({number: came(number) for number in numbers}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Prints as JSON the dropout masks that replicas draw in each of three compiled steps: [step, replica, unit]."""

import json
import sys

import keras
import tensorflow as tf

from pipeline import strategies
from pipeline.worker.tensorflow.step import many


def main(name: str, replicas: int) -> None:
    """`name` is a strategy of ours."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    devices = tuple(f"CPU:{number}" for number in range(replicas))
    strategy = getattr(strategies, name)(devices)
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=7)

    def draw(examples, batch):
        kept = dropout(batch, training=True)
        context = tf.distribute.get_replica_context()
        own = tf.one_hot(context.replica_id_in_sync_group, replicas)[:, None] * kept
        return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

    batches = (tf.constant(float(replicas)), (tf.ones((1, 32)),) * replicas)
    data = tf.data.Dataset.from_tensors(batches).repeat()
    masks, *_ = many(strategy, draw)(iter(data), tf.constant(3))
    print(json.dumps(masks.numpy().tolist()))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

"""Adds over hosts by TensorFlow's ring, of one process of each host.

Its keys are its own: other groups of devices, which all processes have, are counted alike in each of them.
"""

from collections.abc import Sequence

import tensorflow as tf

from pipeline.private import cross_device_utils
from pipeline.worker.tensorflow.collective import in_pieces

# More than a strategy has groups.
FIRST_KEY = 1 << 20


class HostRing:
    """The ring of so many hosts, of which this process's is number `host`."""

    def __init__(self, strategy: tf.distribute.Strategy, host: int, hosts: int) -> None:
        device = strategy.extended.worker_devices[0]
        kinds = tf.distribute.experimental.CommunicationImplementation
        options = tf.distribute.experimental.CommunicationOptions(implementation=kinds.RING)
        keys = cross_device_utils.CollectiveKeys(FIRST_KEY)
        group = keys.get_group_key([device])
        # It draws another key for each call of a graph, which TensorFlow can tell from an earlier one.
        self._launcher = cross_device_utils.CollectiveReplicaLauncher(group, hosts, keys, device, options)
        self._host, self._hosts = host, hosts

    def sum(self, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums over hosts of arrays of equal shapes."""
        return [self._launcher.all_reduce(array) for array in arrays]

    def gather(self, arrays: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """For each array those of all hosts, one after another, along the first axis."""
        lengths = tf.stack([tf.shape(array, tf.int64)[0] for array in arrays])
        # [host, array]
        (counts,) = self.sum([tf.one_hot(self._host, self._hosts, dtype=tf.int64)[:, None] * lengths])
        of_all = []
        for place, array in enumerate(arrays):
            of_array = counts[:, place]
            (rows,) = in_pieces(self.sum, self._hosts, [self._host], [array], tf.reduce_max(of_array))
            of_all.append(tf.concat([rows[host, : of_array[host]] for host in range(self._hosts)], 0))
        return of_all

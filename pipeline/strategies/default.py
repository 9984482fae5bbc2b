"""No strategy: TensorFlow's plain placement on one device, which every speedup is measured against."""

import tensorflow as tf


def default() -> tf.distribute.Strategy:
    """TensorFlow's default strategy, which runs a step as if there were none.

    >>> default().num_replicas_in_sync
    1
    """
    return tf.distribute.get_strategy()

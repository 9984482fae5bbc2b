"""A data set whose `map` takes long, or does not."""

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing


def busy(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Burns a core for some time for each example."""
    size = tf.ones((64, 64)) * 0.01
    burnt = tf.foldl(lambda so_far, _: tf.tanh(tf.matmul(so_far, size)), tf.range(200), size * x[0], back_prop=False)
    return x + tf.reduce_sum(burnt) * 0.0, y


def through(slow: str | None = None) -> tuple[tf.data.Dataset, None]:
    """4,096 examples of 64 numbers in four classes; `slow` is None, "sleep" or "busy"."""
    random = np.random.default_rng(0)
    x, y = random.normal(size=(4096, 64)).astype("float32"), random.integers(0, 4, 4096).astype("int32")
    made = tf.data.Dataset.from_tensor_slices((x, y))
    if slow == "sleep":
        made = made.apply(testing.sleep(2_000))
    return (made.map(busy) if slow == "busy" else made), None

"""Several devices that share each copy of the model; what is here joins the copies."""

from collections.abc import Mapping, Sequence

import tensorflow as tf


def model_parallel(
    devices: tuple[str, ...],
    layout: Mapping[str, int | Sequence[str | None]] | None = None,
    micro_batches: int = 1,
) -> tf.distribute.Strategy:
    """No strategy for one copy, a `MirroredStrategy` over the first of the `devices` of each of several.

    What is on the others, by a `layout` or one that is derived, and in how many `micro_batches` a batch goes through
    them, is up to who builds the model. Sums are made on the
    device that a variable is on, and copied back from there.
    """
    if len(devices) == 1:
        return tf.distribute.get_strategy()
    names = [f"/device:{device}" for device in devices]
    return tf.distribute.MirroredStrategy(names, cross_device_ops=tf.distribute.ReductionToOneDevice())

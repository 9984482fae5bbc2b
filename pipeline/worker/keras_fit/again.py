"""Several strategies in one process, one after the other, as in a notebook whose cells are run again.

TensorFlow counts the sums of each strategy from the same number on, and takes those of equal number for one; and a step
that fails aborts them all for the process's life.
"""

import contextlib
import itertools
from collections.abc import Iterator
from weakref import WeakSet

import tensorflow as tf

from pipeline.errors import UserError

# How far apart the numbers of two strategies' groups of devices are; each has a few.
STRIDE = 1_000
_strategies = WeakSet[tf.distribute.Strategy]()
_bases = itertools.count(STRIDE, STRIDE)


@contextlib.contextmanager
def adding(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Inside, a strategy adds up apart from others of this process, those that are made later too.

    CPU devices of one process share a memory, and add there, without what an error would abort.
    """
    if strategy not in _strategies:
        _strategies.add(strategy)
        base = next(_bases)
        for kind in (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy):
            kind._collective_key_base = base
    kept = vars(strategy.extended).get("_cross_device_ops")
    # What a MirroredStrategy has where it was not told how to add.
    by_default = isinstance(strategy, tf.distribute.MirroredStrategy) and kept is strategy.extended._collective_ops
    in_memory = by_default and all("CPU" in device for device in strategy.extended.worker_devices)
    if in_memory:
        strategy.extended._cross_device_ops = tf.distribute.ReductionToOneDevice()
    try:
        yield
    except tf.errors.OpError as error:
        if "Restart your program to reset" not in error.message:
            raise
        reason = error.message.split("Collective ops is aborted by: ")[-1].splitlines()[0].rstrip(". ")
        raise UserError(
            "sums over replicas to work",
            f"TensorFlow's word that they are stopped in this process, by: {reason}",
            "starting the process anew; in a notebook, restarting the kernel",
        ) from error
    finally:
        if in_memory:
            strategy.extended._cross_device_ops = kept

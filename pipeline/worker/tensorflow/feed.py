"""Lays each replica's part of the next batches on its GPU while the steps before compute.

On a CPU TensorFlow's distributed iterator costs a fifth of a small step, for copying ahead what is in the same memory.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np
import tensorflow as tf

from pipeline.plan.estimate import AHEAD
from pipeline.private import CollectiveReplicaLauncher, is_op_determinism_enabled
from pipeline.worker.data.reading import Batch, Batches
from pipeline.worker.patched import patched


def feeds_ahead(devices: Sequence[str]) -> bool:
    """True if replicas on these devices have memory of their own, to which batches are copied."""
    return bool(devices) and all(tf.DeviceSpec.from_string(device).device_type == "GPU" for device in devices)


def iterator(strategy: tf.distribute.Strategy, steps: tf.data.Dataset) -> Batches:
    """Iterates over an endless data set of steps, as `Data.stream` has them; on devices ahead, `is_ahead` of it."""
    devices = _devices(strategy)
    if not feeds_ahead(devices):
        return iter(steps)

    def parts(examples: tf.Tensor, batches: tuple[Batch, ...]) -> tf.data.Dataset:
        came = tf.constant(math.nan, tf.float64) if is_op_determinism_enabled() else tf.timestamp()
        each = [tf.data.Dataset.from_tensors((came, examples, batch)) for batch in batches]
        return reduce(tf.data.Dataset.concatenate, each)

    # The parts of each step's local replicas one after the other, which go to their devices in turn.
    one_by_one = steps.flat_map(tf.autograph.experimental.do_not_convert(parts))
    one_by_one = one_by_one.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    if _is_default(strategy):
        return iter(one_by_one.apply(tf.data.experimental.prefetch_to_device(devices[0], AHEAD)))
    options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=AHEAD)
    return iter(strategy.distribute_datasets_from_function(lambda _: one_by_one, options))


def is_ahead(batches: Batches) -> bool:
    """True if an iterator gives each replica (when its batch came, examples of the global batch, its batch)."""
    spec: tuple[Any, ...] = batches.element_spec  # type: ignore[attr-defined]
    return len(spec) == 3


@contextlib.contextmanager
def without_host(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Inside, a loop over steps is traced that lies on devices alone, so that no step waits for the host."""
    # What it counts and keeps is on the first of them. The keys of its collectives, which the host draws for each call,
    # are there before it begins.
    usual = CollectiveReplicaLauncher._next_instance_key

    def on_device(launcher: CollectiveReplicaLauncher) -> tf.Tensor:
        key = usual(launcher)
        if tf.executing_eagerly():
            return key
        with key.graph.as_default(), tf.device(launcher._device):
            return tf.identity(key)

    with patched(CollectiveReplicaLauncher, {"_next_instance_key": on_device}), tf.device(_devices(strategy)[0]):
        yield


def waits(came: np.ndarray, began: float, ended: float) -> np.ndarray:
    """Seconds that each step of a call waited for its batch, from when batches came, and the call began and ended.

    No clock is read between steps, which would stop the device: all take as long as lets the last end with the call.
    """
    if not came.size:
        return came
    number = np.arange(came.size)
    came = np.maximum(came, began)
    step = max(0.0, float(np.min((ended - came) / (came.size - number))))
    begins = np.maximum.accumulate(came - number * step) + number * step
    # Times are seconds since 1970, of which differences are exact to a microsecond.
    waited: np.ndarray = np.maximum(0.0, np.diff(begins, prepend=began - step) - step)
    return waited


def _devices(strategy: tf.distribute.Strategy) -> tuple[str, ...]:
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        return ()
    if _is_default(strategy):
        # Where TensorFlow puts what nobody places.
        return ((tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU"))[0].name,)
    return strategy.extended.worker_devices  # type: ignore[no-any-return]


def _is_default(strategy: tf.distribute.Strategy) -> bool:
    return not tf.distribute.has_strategy() and strategy is tf.distribute.get_strategy()

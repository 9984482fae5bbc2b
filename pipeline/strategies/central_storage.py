"""Several devices of one process and one copy of the variables, which every device reads and one place updates."""

from collections.abc import Callable
from typing import TypeAlias

import tensorflow as tf

from pipeline.private import parameter_server_strategy, ps_values

Creator: TypeAlias = Callable[..., tf.Variable]


def central_storage(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """A `CentralStorageStrategy` that computes on `devices`, such as ("CPU:0", "CPU:1").

    The variables are in the host's memory; with a single device they are on that device.
    """
    return _CentralStrategy([f"/device:{device}" for device in devices])


class _CentralStrategy(tf.distribute.Strategy):  # type: ignore[misc]
    """TensorFlow's strategy, with variables that Keras 3 can use from several replicas."""

    def __init__(self, devices: list[str]) -> None:
        super().__init__(_CentralExtended(self, compute_devices=devices, parameter_device=None))


class _CentralExtended(parameter_server_strategy.ParameterServerStrategyExtended):  # type: ignore[misc]
    """The inside of TensorFlow's `CentralStorageStrategy`."""

    def _create_var_creator(self, next_creator: Creator, **kwargs: object) -> Creator:
        if self._num_replicas_in_sync == 1:
            return next_creator
        none, first = tf.VariableAggregation.NONE, tf.VariableAggregation.ONLY_FIRST_REPLICA
        aggregation = kwargs.get("aggregation", none)
        # Keras's moving statistics and random seeds name no aggregation: every replica computes the same value.
        aggregation = first if aggregation == none else aggregation
        return lambda **arguments: _Variable(self._container_strategy(), next_creator(**arguments), aggregation)


class _Variable(ps_values.AggregatingVariable):  # type: ignore[misc]
    """A variable that all replicas share, and that takes what Keras assigns to it from within them.

    Keras adds to a metric's total by assigning total + value. TensorFlow would sum what the replicas assign, the old
    total once for each; here what each of them adds is summed. What is the same on every replica is assigned by the
    first alone, which needs no meeting of the replicas and so may be part of a condition.
    """

    def assign(self, value: tf.Tensor, *args: object, **kwargs: object) -> tf.Variable:
        """Assigns `value`; from within replicas, what the variable's aggregation makes of their values."""
        replica = tf.distribute.get_replica_context()
        if replica is None or replica.strategy is not self._distribute_strategy:
            return super().assign(value, *args, **kwargs)
        if self._aggregation == tf.VariableAggregation.SUM:
            return self.assign_add(tf.cast(value, self.dtype) - self._v.read_value(), *args, **kwargs)
        if self._aggregation == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            first = tf.get_static_value(replica.replica_id_in_sync_group) == 0
            return self._v.assign(value, *args, **kwargs) if first else self
        return super().assign(value, *args, **kwargs)

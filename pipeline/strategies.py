"""The strategies that `conf/strategy/` describes: a function each, from device names to a `tf.distribute.Strategy`."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from pipeline.private import collective, parameter_server_strategy, parameter_server_strategy_v2, ps_values

Creator: TypeAlias = Callable[..., tf.Variable]
Resolver: TypeAlias = tf.distribute.cluster_resolver.ClusterResolver
Options: TypeAlias = tf.distribute.experimental.CommunicationOptions


def default() -> tf.distribute.Strategy:
    """TensorFlow's default strategy, which runs a step as if there were none."""
    return tf.distribute.get_strategy()


def one_device(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """A `OneDeviceStrategy` on the first of `devices`, such as ("CPU:0",)."""
    return tf.distribute.OneDeviceStrategy(f"/device:{devices[0]}")


def mirrored(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """A `MirroredStrategy` over `devices`, such as ("CPU:0", "CPU:1") or ("GPU:0", "GPU:1"), where NCCL sums.

    Logical CPU devices share one memory, where adding on one device and copying back is as short as a sum can be.
    """
    if all(device.startswith("GPU") for device in devices):
        return tf.distribute.MirroredStrategy([f"/device:{device}" for device in devices])
    return _summed_on_one(devices)


def model_parallel(
    devices: tuple[str, ...], layout: Mapping[str, int | Sequence[str | None]] | None = None, micro_batches: int = 1
) -> tf.distribute.Strategy:
    """No strategy for one copy, a `MirroredStrategy` over the first of the `devices` of each of several.

    What is on the others, by a `layout` or one that is derived, and in how many `micro_batches` a batch goes through
    them, is up to who builds the model. Sums are made on the device that a variable is on, and copied back from there.
    """
    return tf.distribute.get_strategy() if len(devices) == 1 else _summed_on_one(devices)


def _summed_on_one(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    names, one = [f"/device:{device}" for device in devices], tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(names, cross_device_ops=one)


def tpu(devices: tuple[str, ...], address: str | None = None) -> tf.distribute.Strategy:
    """A `TPUStrategy` over as many of the TPU's devices as `devices` names, such as ("TPU:0", "TPU:1").

    `address` is grpc://HOST:PORT of its worker, or local for this machine's; None leaves it to TensorFlow to find out.
    On CPU devices it is a rehearsal: a `MirroredStrategy`, which sums as the TPU would.
    """
    if all(device.startswith("CPU") for device in devices):
        return mirrored(devices)
    resolver = tf.distribute.cluster_resolver.TPUClusterResolver("local" if address is None else address)
    if address not in (None, "local"):
        tf.config.experimental_connect_to_cluster(resolver)
    topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    available = int(topology.num_tasks * topology.num_tpus_per_task)
    if available < len(devices):
        raise ValueError(
            f"Expected a TPU of {len(devices)} devices, received one of {available}. "
            f"Try hardware.devices_per_host={available}."
        )
    # Fewer replicas than devices take an assignment of their own: without one, TensorFlow makes one for each device.
    assignment = tf.tpu.experimental.DeviceAssignment.build(topology, num_replicas=len(devices))
    return tf.distribute.TPUStrategy(resolver, assignment if available > len(devices) else None)


def central_storage(devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """A `CentralStorageStrategy` that computes on `devices`, such as ("CPU:0", "CPU:1").

    The variables are in the host's memory; with a single device they are on that device.
    """
    return _CentralStrategy(devices)


class _CentralStrategy(tf.distribute.Strategy):  # type: ignore[misc]
    """TensorFlow's strategy, with variables that Keras 3 can use from several replicas."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        names = [f"/device:{device}" for device in devices]
        super().__init__(_CentralExtended(self, compute_devices=names, parameter_device=None))


class _CentralExtended(parameter_server_strategy.ParameterServerStrategyExtended):  # type: ignore[misc]
    def _create_var_creator(self, next_creator: Creator, **kwargs: object) -> Creator:
        if self._num_replicas_in_sync == 1:
            return next_creator
        aggregation, none = kwargs.get("aggregation"), (None, tf.VariableAggregation.NONE)
        # Keras's moving statistics and random seeds name no aggregation: every replica computes the same value.
        aggregation = tf.VariableAggregation.ONLY_FIRST_REPLICA if aggregation in none else aggregation
        return lambda **arguments: _CentralVariable(self._container_strategy(), next_creator(**arguments), aggregation)


class _CentralVariable(ps_values.AggregatingVariable):  # type: ignore[misc]
    """A variable that all replicas share, and that takes what Keras assigns to it from within them.

    Keras adds to a metric's total by assigning total + value, of which TensorFlow would sum the old total once for each
    replica. What is the same on all is assigned by the first alone, without a meeting, and so in a condition too.
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


def multi_worker(
    devices: tuple[str, ...], addresses: tuple[str, ...] = (), rank: int = 0, communication: str = "auto"
) -> tf.distribute.Strategy:
    """A `MultiWorkerMirroredStrategy` over the processes listening at `addresses`, this one being number `rank`.

    Every process holds the same number of `devices`. With no addresses it is a cluster of one. `communication` is
    auto, ring or nccl. Returns only when all processes have joined.
    """
    kind = tf.distribute.experimental.CommunicationImplementation(communication.upper())
    options = tf.distribute.experimental.CommunicationOptions(implementation=kind)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(addresses)}), task_type="worker", task_id=rank, rpc_layer="grpc"
    )
    return _MultiWorkerStrategy(resolver if addresses else None, options, devices)


class _MultiWorkerStrategy(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """TensorFlow's strategy, told which local devices to use: left alone it takes every GPU, or one CPU."""

    def __init__(self, resolver: Resolver | None, options: Options, devices: tuple[str, ...]) -> None:
        tf.distribute.Strategy.__init__(self, _MultiWorkerExtended(devices, self, resolver, options))


class _MultiWorkerExtended(collective.CollectiveAllReduceExtended):  # type: ignore[misc]
    def __init__(self, devices: tuple[str, ...], strategy: object, resolver: Resolver | None, options: Options) -> None:
        self._chosen = devices
        local = None if resolver else [f"/device:{device}" for device in devices]
        super().__init__(strategy, resolver, options, devices=local)

    def _initialize_local_devices(self, cluster_resolver: Resolver, worker_device: str) -> tuple[tuple[str, ...], str]:
        kind = self._chosen[0].split(":")[0]
        return tuple(f"{worker_device}/device:{device}" for device in self._chosen), kind


def parameter_server(
    coordinator: str, workers: tuple[str, ...], parameter_servers: tuple[str, ...]
) -> tf.distribute.Strategy:
    """A `ParameterServerStrategy`, for the coordinator to hand out steps under; all three are given as host:port.

    At the other addresses `serve` must run. Returns only when all have been reached. Each new variable goes to the
    server that holds the fewest bytes, and with it whatever is colocated with it, such as an optimizer's slots.
    """
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        _cluster(coordinator, workers, parameter_servers), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    return _ServerStrategy(resolver)


def serve(
    coordinator: str,
    workers: tuple[str, ...],
    parameter_servers: tuple[str, ...],
    address: str,
    config: tf.compat.v1.ConfigProto | None = None,
) -> tf.distribute.Server:
    """Starts the worker or parameter server at `address`, one of `workers` or `parameter_servers`, in this process."""
    job, addresses = ("worker", workers) if address in workers else ("ps", parameter_servers)
    cluster, place = _cluster(coordinator, workers, parameter_servers), addresses.index(address)
    return tf.distribute.Server(cluster, job_name=job, task_index=place, protocol="grpc", config=config)


def _cluster(coordinator: str, workers: tuple[str, ...], parameter_servers: tuple[str, ...]) -> tf.train.ClusterSpec:
    return tf.train.ClusterSpec({"chief": [coordinator], "worker": list(workers), "ps": list(parameter_servers)})


class _ServerStrategy(parameter_server_strategy_v2.ParameterServerStrategyV2):  # type: ignore[misc]
    """TensorFlow's strategy, with variables laid over the servers by size."""

    def __init__(self, resolver: Resolver) -> None:
        super().__init__(resolver)
        self._extended = _ServerExtended(self, resolver, None)
        tf.distribute.Strategy.__init__(self, self._extended)


class _ServerExtended(parameter_server_strategy_v2.ParameterServerStrategyV2Extended):  # type: ignore[misc]
    def __init__(self, *inside: object) -> None:
        super().__init__(*inside)
        self._bytes = [0] * self._num_ps

    def _create_variable_round_robin(self, next_creator: Callable[..., tf.Variable], **kwargs: object) -> tf.Variable:
        # In turn, as upstream has it, all kernels of a model are on one of two servers and all biases on the other.
        emptiest = self._variable_count = int(np.argmin(self._bytes))
        variable = super()._create_variable_round_robin(next_creator, **kwargs)
        self._bytes[emptiest] += variable.dtype.size * variable.shape.num_elements()
        return variable

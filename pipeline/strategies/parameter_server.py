"""Servers hold the variables, workers read and update them each at its own pace, and a coordinator hands out steps."""

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from pipeline.private import parameter_server_strategy_v2


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
    return tf.distribute.Server(
        _cluster(coordinator, workers, parameter_servers),
        job_name=job,
        task_index=addresses.index(address),
        protocol="grpc",
        config=config,
    )


def _cluster(coordinator: str, workers: tuple[str, ...], parameter_servers: tuple[str, ...]) -> tf.train.ClusterSpec:
    return tf.train.ClusterSpec({"chief": [coordinator], "worker": list(workers), "ps": list(parameter_servers)})


class _ServerStrategy(parameter_server_strategy_v2.ParameterServerStrategyV2):  # type: ignore[misc]
    """TensorFlow's strategy, with variables laid over the servers by size."""

    def __init__(self, resolver: tf.distribute.cluster_resolver.ClusterResolver) -> None:
        super().__init__(resolver)
        self._extended = _ServerExtended(self, resolver, None)
        tf.distribute.Strategy.__init__(self, self._extended)


class _ServerExtended(parameter_server_strategy_v2.ParameterServerStrategyV2Extended):  # type: ignore[misc]
    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        resolver: tf.distribute.cluster_resolver.ClusterResolver,
        partitioner: Callable[..., list[int]] | None,
    ) -> None:
        super().__init__(strategy, resolver, partitioner)
        self._bytes = [0] * self._num_ps

    def _create_variable_round_robin(self, next_creator: Callable[..., tf.Variable], **kwargs: object) -> tf.Variable:
        # In turn, as upstream has it, all kernels of a model are on one of two servers and all biases on the other.
        emptiest = self._variable_count = int(np.argmin(self._bytes))
        variable = super()._create_variable_round_robin(next_creator, **kwargs)
        self._bytes[emptiest] += variable.dtype.size * variable.shape.num_elements()
        return variable

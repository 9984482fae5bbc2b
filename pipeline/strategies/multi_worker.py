"""Several processes, on one machine or many: a copy of the model on each device of each, gradients all-reduced."""

import tensorflow as tf

from pipeline.private import collective


def multi_worker(
    devices: tuple[str, ...],
    addresses: tuple[str, ...] = (),
    rank: int = 0,
    communication: str = "auto",
) -> tf.distribute.Strategy:
    """A `MultiWorkerMirroredStrategy` over the processes listening at `addresses`, this one being number `rank`.

    Every process holds the same number of `devices`. With no addresses it is a cluster of one. `communication` is
    auto, ring or nccl. Returns only when all processes have joined.
    """
    kinds = tf.distribute.experimental.CommunicationImplementation
    options = tf.distribute.experimental.CommunicationOptions(implementation=kinds(communication.upper()))
    if not addresses:
        return _Strategy(None, options, devices)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": list(addresses)}), task_type="worker", task_id=rank, rpc_layer="grpc"
    )
    return _Strategy(resolver, options, devices)


class _Strategy(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]
    """TensorFlow's strategy, told which local devices to use: left alone it takes every GPU, or one CPU."""

    def __init__(
        self,
        resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
        options: tf.distribute.experimental.CommunicationOptions,
        devices: tuple[str, ...],
    ) -> None:
        tf.distribute.Strategy.__init__(self, _Extended(self, resolver, options, devices))


class _Extended(collective.CollectiveAllReduceExtended):  # type: ignore[misc]
    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        resolver: tf.distribute.cluster_resolver.ClusterResolver | None,
        options: tf.distribute.experimental.CommunicationOptions,
        devices: tuple[str, ...],
    ) -> None:
        self._chosen = devices
        local = None if resolver else [f"/device:{device}" for device in devices]
        super().__init__(strategy, resolver, options, devices=local)

    def _initialize_local_devices(
        self, cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        kind = self._chosen[0].split(":")[0]
        return tuple(f"{worker_device}/device:{device}" for device in self._chosen), kind

"""A TPU: a copy of the model on each of its devices, steps compiled by XLA, gradients summed between the chips."""

import tensorflow as tf

from pipeline.strategies.mirrored import mirrored


def tpu(devices: tuple[str, ...], address: str | None = None) -> tf.distribute.Strategy:
    """A `TPUStrategy` over as many of the TPU's devices as `devices` names, such as ("TPU:0", "TPU:1").

    `address` is grpc://HOST:PORT of its worker, or local for the TPU of this machine; None leaves it to TensorFlow to
    find out. On CPU devices it is a rehearsal: a `MirroredStrategy`, which sums as the TPU would. What else a TPU
    asks for, batches of one size and shapes that are known, is up to whoever feeds it.
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
    chosen = tf.tpu.experimental.DeviceAssignment.build(topology, num_replicas=len(devices))
    return tf.distribute.TPUStrategy(
        resolver, experimental_device_assignment=chosen if available > len(devices) else None
    )

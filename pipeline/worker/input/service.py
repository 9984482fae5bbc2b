"""Has other processes make batches: tf.data services, each of which makes every so-many-th batch, in order.

A service of several workers gives batches in whatever order they are done. So there is one service for each process,
a dispatcher and one worker, and batches are taken from them in turn: what is trained on is the same as without.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import tensorflow as tf

Server: TypeAlias = tf.data.experimental.service.DispatchServer | tf.data.experimental.service.WorkerServer


def serve(address: str) -> tuple[Server, Server]:
    """A tf.data service at `address`, HOST:PORT, with one worker, as long as what is returned is kept."""
    host, _, port = address.rpartition(":")
    made = tf.data.experimental.service
    dispatcher = made.DispatchServer(made.DispatcherConfig(port=int(port)))
    worker = made.WorkerServer(made.WorkerConfig(dispatcher_address=address, worker_address=f"{host}:%port%", port=0))
    return dispatcher, worker


def made_by(
    servers: Sequence[str], raw: tf.data.Dataset, make: Callable[[tf.data.Dataset], tf.data.Dataset]
) -> tf.data.Dataset:
    """What `make` makes of the endless data set `raw`, each element by the next of the servers."""
    mode = tf.data.experimental.service.ShardingPolicy.OFF
    parts = [
        make(raw.shard(len(servers), number)).apply(
            tf.data.experimental.service.distribute(processing_mode=mode, service=f"grpc://{server}")
        )
        for number, server in enumerate(servers)
    ]
    if len(parts) == 1:
        return parts[0]
    return tf.data.Dataset.choose_from_datasets(parts, tf.data.Dataset.range(len(parts)).repeat())

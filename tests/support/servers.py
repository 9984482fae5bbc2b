"""TensorFlow's tutorial "Parameter server training with ParameterServerStrategy", its cluster and its Model.fit part.

`python servers.py`: an in-process cluster of two workers and two servers. Prints a JSON line: the error of Keras's own
`fit`, the histories of ours, and how far the optimizer counted.
"""

import json
import socket
from functools import partial

import keras
import numpy as np
import tensorflow as tf

import pipeline
from pipeline.data import mnist5k
from pipeline.worker.tensorflow import loopback


def create_in_process_cluster(num_workers, num_ps):
    """The tutorial's: servers in this process, and the resolver that knows them."""
    loopback.listen_on_loopback_only()
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_workers + num_ps)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    cluster_dict = {"worker": [f"localhost:{port}" for port in ports[:num_workers]]}
    cluster_dict["ps"] = [f"localhost:{port}" for port in ports[num_workers:]]
    cluster_spec = tf.train.ClusterSpec(cluster_dict)
    # Workers need some inter_ops threads to work properly.
    worker_config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=num_workers + 1)
    for job, addresses in cluster_dict.items():
        for task in range(len(addresses)):
            tf.distribute.Server(cluster_spec, job_name=job, task_index=task, config=worker_config, protocol="grpc")
    return tf.distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")


def main():
    resolver = create_in_process_cluster(2, 2)
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(256 << 10, max_shards=2)
    strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=partitioner)

    x = tf.random.uniform((10, 10))
    # A column, unlike in the tutorial: Keras 3 adds no axis to a vector, on one device either.
    y = tf.random.uniform((10, 1))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).repeat().batch(64).prefetch(2)

    with strategy.scope():
        model = keras.models.Sequential([keras.layers.Dense(10)])
        model.compile(keras.optimizers.SGD(), loss="mse", steps_per_execution=10)

    said = {}
    try:
        model.fit(dataset, epochs=5, steps_per_epoch=20, verbose=0)
    except Exception as error:  # whatever upstream raises
        said["keras"] = str(error).splitlines()[0]
    history = pipeline.fit(model, dataset, epochs=5, steps_per_epoch=20, verbose=0)
    said["tutorial"] = history.history
    said["updates"] = int(model.optimizer.iterations.numpy())

    (images, digits), held_out = mnist5k()
    with strategy.scope():
        hidden = keras.layers.Conv2D(8, 3, strides=2, activation="relu")
        outputs = [keras.layers.Flatten(), keras.layers.Dense(10)]
        net = keras.Sequential([keras.layers.Input(images.shape[1:]), hidden, *outputs])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    stop = keras.callbacks.EarlyStopping(monitor="loss", min_delta=100.0, patience=1)
    fit = partial(pipeline.fit, net, verbose=0)
    said["digits"] = fit(images, digits, batch_size=32, epochs=2, validation_data=held_out).history
    said["stopped"] = fit(images[:320], digits[:320], epochs=5, callbacks=[stop]).history
    said["net_updates"] = int(net.optimizer.iterations.numpy())
    batches = tf.data.Dataset.from_tensor_slices((images[:245], digits[:245])).batch(32)
    said["batches"] = fit(batches, epochs=2, class_weight={digit: 1.0 + digit for digit in range(10)}).history
    try:
        fit(batches.filter(lambda x, y: True))
    except ValueError as error:
        said["unknown"] = str(error)
    said["predicted"] = float(np.mean(np.argmax(net(held_out[0]), -1) == held_out[1]))
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
    # Servers have no end of their own.
    import os

    os._exit(0)

"""TensorFlow's tutorials of training on several processes, as a person types them; prints JSON in the last line.

`python tutorial.py STEPS FOLDER` is one of the processes of "Multi-worker training with Keras"; `python tutorial.py` is
"Parameter server training with ParameterServerStrategy", its cluster of two workers and two servers in this process,
and its Model.fit part. Each comes to the error of Keras's own `fit`, and the histories of ours.
"""

import json
import os
import sys
from functools import partial

import keras
import numpy as np
import tensorflow as tf
from ports import reserved_ports

import pipeline
from pipeline.data import mnist5k
from pipeline.worker.tensorflow import loopback


def mnist_dataset(batch_size):
    """The tutorial's data, of the 4,000 digits that are here; with a seed, so that processes see the same."""
    (x_train, y_train), _ = mnist5k()
    keras.utils.set_random_seed(7)
    train_dataset = tf.data.Dataset.from_tensor_slices((x_train[..., 0], y_train.astype(np.int64)))
    return train_dataset.shuffle(60000).repeat().batch(batch_size)


def build_and_compile_cnn_model():
    keras.utils.set_random_seed(7)
    layers = keras.layers
    hidden = [layers.Conv2D(32, 3, activation="relu"), layers.Flatten(), layers.Dense(128, activation="relu")]
    model = keras.Sequential([layers.InputLayer((28, 28)), layers.Reshape((28, 28, 1)), *hidden, layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.001), loss, metrics=["accuracy"])
    return model


def arrays():
    """Arrays that do not divide evenly, shuffled, with validation and callbacks: what `fit` is called with."""
    (x, y), (x_held_out, y_held_out) = mnist5k()
    stop = keras.callbacks.EarlyStopping(monitor="loss", min_delta=100.0, patience=1, restore_best_weights=True)
    return {
        "x": x[:245, ..., 0],
        "y": y[:245],
        "epochs": 5,
        "class_weight": {digit: 1.0 + digit for digit in range(10)},
        "validation_data": (x_held_out[:61, ..., 0], y_held_out[:61]),
        "callbacks": [stop, keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 2)],
        "verbose": 0,
    }


def own_parts(rank, batch_size):
    """Digits that each process reads for itself: the even ones of a batch in the first, the odd ones in the second."""
    (x, y), _ = mnist5k()
    mine = tf.data.Dataset.from_tensor_slices((x[rank::2, ..., 0], y[rank::2])).repeat()
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return mine.batch(batch_size, drop_remainder=True).with_options(options)


def refused(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


class Stop(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.stop_training = True


def from_backup(strategy, folder):
    """(losses of two epochs, those of the second one alone, which went on from a backup of the first)."""
    (x, y), _ = mnist5k()
    histories = []
    for callbacks in (
        [],
        [keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False), Stop()],
        [keras.callbacks.BackupAndRestore(folder)],
    ):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            layers = [keras.Input((28, 28)), keras.layers.Flatten(), keras.layers.Dense(10, activation="softmax")]
            model = keras.Sequential(layers)
            model.compile("adam", loss="sparse_categorical_crossentropy")
        data = {"x": x[:99, ..., 0], "y": y[:99], "shuffle": False, "verbose": 0}
        histories.append(pipeline.fit(model, **data, epochs=2, callbacks=callbacks).history["loss"])
    return histories[0], histories[2]


def multi_worker(steps, folder):
    assert loopback.listen_on_loopback_only()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
    data = mnist_dataset(128)
    with strategy.scope():
        model = build_and_compile_cnn_model()
    told = {"keras": refused(lambda: model.fit(data, epochs=3, steps_per_epoch=steps, shuffle=False, verbose=0))[:80]}
    # The failed call has read a batch and no more; the data is made anew for the same order.
    told["tutorial"] = pipeline.fit(
        model, mnist_dataset(128), epochs=3, steps_per_epoch=steps, verbose=2 if rank == 0 else 0
    ).history
    with strategy.scope():
        model = build_and_compile_cnn_model()
    keras.utils.set_random_seed(9 + rank)
    history = pipeline.fit(model, **arrays())
    told["arrays"], told["epochs"] = history.history, history.epoch
    told["weights"] = float(sum(np.abs(each).sum() for each in model.get_weights()))
    told["own parts"] = pipeline.fit(
        model, own_parts(rank, 32), steps_per_epoch=8, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]
    ).history
    told["whole"], told["rest"] = from_backup(strategy, folder)
    told["different"] = refused(lambda: pipeline.fit(model, **(arrays() | {"epochs": 2 + rank})))
    told["unknown"] = refused(lambda: pipeline.fit(model, data.take(9).filter(lambda x, y: True), verbose=0))
    return told


def create_in_process_cluster(num_workers, num_ps):
    """The tutorial's: servers in this process, and the resolver that knows them."""
    loopback.listen_on_loopback_only()
    with reserved_ports(num_workers + num_ps) as ports:
        addresses = [f"localhost:{port}" for port in ports]
    cluster_dict = {"worker": addresses[:num_workers], "ps": addresses[num_workers:]}
    cluster_spec = tf.train.ClusterSpec(cluster_dict)
    # Workers need some inter_ops threads to work properly.
    worker_config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=num_workers + 1)
    for job, addresses in cluster_dict.items():
        for task in range(len(addresses)):
            tf.distribute.Server(cluster_spec, job_name=job, task_index=task, config=worker_config, protocol="grpc")
    return tf.distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")


def parameter_server():
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

    said = {"keras": refused(lambda: model.fit(dataset, epochs=5, steps_per_epoch=20, verbose=0))}
    said["tutorial"] = pipeline.fit(model, dataset, epochs=5, steps_per_epoch=20, verbose=0).history
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
    said["unknown"] = refused(lambda: fit(batches.filter(lambda x, y: True)))
    said["predicted"] = float(np.mean(np.argmax(net(held_out[0]), -1) == held_out[1]))
    return said


if __name__ == "__main__":
    print(json.dumps(multi_worker(int(sys.argv[1]), sys.argv[2]) if sys.argv[1:] else parameter_server()), flush=True)
    if not sys.argv[1:]:
        # Servers have no end of their own.
        os._exit(0)

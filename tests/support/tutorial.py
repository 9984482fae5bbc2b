"""TensorFlow's tutorial "Multi-worker training with Keras", one of its processes: `python tutorial.py STEPS FOLDER`.

Prints a JSON line, its last: the error of Keras's own `fit`, and the histories of ours.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

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


def main(steps, folder):
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
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

"""The lives of the rivals' processes: TensorFlow's own way, and Keras's on TensorFlow or JAX, to train what we train.

A rival is told how many steps to train, and answers with the examples and seconds of those after the warm-up.
Nothing of our training loop is used: only models, data and strategies are the same as ours.
"""

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

SHUFFLE_WINDOW = 1024
PACE_STEPS = 3
# (warm-up steps, timed steps) -> (examples over all replicas, seconds)
Stretch = Callable[[int, int], tuple[float, float]]


@dataclass(frozen=True)
class Spec:
    """One rival: what it trains and how. The first three fields are a function and its arguments, as in a config.

    With `threads` (intra_op, inter_op) and `cores` empty, TensorFlow decides. `addresses` of several processes make
    a cluster, which meets by Horovod where there is a `rendezvous` (host, port). `way` is loop, fit_arrays or
    fit_dataset, or coordinator (see `coordinated.py`), which counts by a metric where it is `measured`.
    `steps_per_call` counts for loops alone. With `synchronized`, BatchNormalization normalizes by the global batch. On
    JAX, which has no loop here, each of several `devices` has its share of the batch by
    `keras.distribution.DataParallel`.
    """

    strategy_build: dict[str, Any] | None
    model_build: dict[str, Any]
    data_build: dict[str, Any]
    way: str
    global_batch: int
    devices: int = 1
    addresses: tuple[str, ...] = ()
    cores: tuple[tuple[int, ...], ...] = ()
    threads: tuple[int, int] | None = None
    steps_per_call: int = 1
    synchronized: bool = False
    backend: str = "tensorflow"
    rendezvous: tuple[str, int] | None = None
    measured: bool = True


def main(spec: Spec, rank: int, pipe: Connection, log: str) -> None:
    """Lives process `rank` of a rival: says its pace, then answers each (warm-up, steps) until the pipe closes."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        train = _prepare_jax(spec) if spec.backend == "jax" else _prepare(spec, rank)
        train(0, 1)
        _, seconds = train(spec.steps_per_call, PACE_STEPS * spec.steps_per_call)
        pipe.send({"step_seconds": seconds / (PACE_STEPS * spec.steps_per_call)})
        while True:
            warmup, steps = pipe.recv()
            examples, seconds = train(warmup, steps)
            pipe.send({"examples": examples, "seconds": seconds})
    except EOFError:
        os._exit(0)
    except BaseException as error:
        traceback.print_exc()
        first = next(iter(str(error).strip().splitlines()), "")
        pipe.send({"error": f"{type(error).__name__}: {first}"})
        os._exit(1)


def _prepare(spec: Spec, rank: int) -> Stretch:
    """Cores, threads, devices, strategy, model and data, in the order that TensorFlow asks for."""
    if spec.cores and spec.cores[rank]:
        os.sched_setaffinity(0, spec.cores[rank])
    if spec.way == "coordinator":
        import coordinated

        return coordinated.prepare(spec, rank)
    import keras
    import tensorflow as tf

    from pipeline.config import targets

    if spec.threads:
        tf.config.threading.set_intra_op_parallelism_threads(spec.threads[0])
        tf.config.threading.set_inter_op_parallelism_threads(spec.threads[1])
    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * spec.devices)
    keras.utils.set_random_seed(0)
    strategy = _strategy(spec, rank)
    with tf.device("CPU:0"):
        (x, y), _ = targets.call(spec.data_build, "data.build")
    with strategy.scope():
        model = targets.call(spec.model_build, "model.build", input_shape=x.shape[1:], num_classes=10)
    for layer in model._flatten_layers() if spec.synchronized else ():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.synchronized = True
    if spec.way == "loop":
        return _loop(spec, strategy, model, x, y)
    with strategy.scope():
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return _fit(spec, model, x, y)


def _prepare_jax(spec: Spec) -> Stretch:
    """The same for Keras's `fit` on JAX, in one process."""
    import jax

    if spec.cores:
        os.sched_setaffinity(0, spec.cores[0])
    if spec.threads:
        # By which XLA sizes the thread pool of its CPU client.
        os.environ["NPROC"] = str(spec.threads[0])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", spec.devices)
    import keras

    from pipeline.config import targets

    keras.utils.set_random_seed(0)
    if spec.devices > 1:
        keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))
    train, _ = targets.call(spec.data_build, "data.build")
    x, y = getattr(train, "raw", train)
    classes = getattr(train, "num_classes", None) or 10
    model = targets.call(spec.model_build, "model.build", input_shape=x.shape[1:], num_classes=classes)
    if not model.compiled:
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return _fit(spec, model, x, y)


def _strategy(spec: Spec, rank: int) -> Any:
    """The strategy as a config names it, or as TensorFlow's guides make it where `strategy_build` is None."""
    import tensorflow as tf

    from pipeline.config import targets
    from pipeline.worker.tensorflow import loopback

    if spec.rendezvous:
        _join_by_horovod(spec.rendezvous, rank, len(spec.addresses))
        return tf.distribute.get_strategy()
    if spec.addresses:
        loopback.listen_on_loopback_only()
    if spec.strategy_build is not None:
        devices = tuple(f"CPU:{index}" for index in range(spec.devices))
        given = {"devices": devices, "addresses": spec.addresses, "rank": rank}
        return targets.call(spec.strategy_build, "strategy.build", **given)
    if spec.addresses:
        cluster, task = {"worker": list(spec.addresses)}, {"type": "worker", "index": rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
        return tf.distribute.MultiWorkerMirroredStrategy()
    if spec.devices > 1:
        return tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(spec.devices)])
    return tf.distribute.get_strategy()


def _join_by_horovod(rendezvous: tuple[str, int], rank: int, size: int) -> None:
    """What `horovodrun` tells a process of one machine, and what a script of Horovod's begins with."""
    os.environ |= {
        "HOROVOD_HOSTNAME": "here", "HOROVOD_RANK": f"{rank}", "HOROVOD_SIZE": f"{size}",
        "HOROVOD_LOCAL_RANK": f"{rank}", "HOROVOD_LOCAL_SIZE": f"{size}", "HOROVOD_CROSS_RANK": "0",
        "HOROVOD_CROSS_SIZE": "1", "HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous[0], "HOROVOD_GLOO_RENDEZVOUS_PORT": f"{rendezvous[1]}",
        "HOROVOD_GLOO_IFACE": "lo",
    }  # fmt: skip
    import horovod.tensorflow as hvd

    hvd.init()


def _loop(spec: Spec, strategy: Any, model: Any, x: Any, y: Any) -> Stretch:
    """The loop of TensorFlow's guide "Custom training with tf.distribute.Strategy", with several steps in a call.

    https://www.tensorflow.org/tutorials/distribute/custom_training
    With a rendezvous, that of Horovod's guide: https://horovod.readthedocs.io/en/stable/tensorflow.html
    """
    import keras
    import tensorflow as tf

    if spec.rendezvous:
        import horovod.tensorflow as hvd
    batch = spec.global_batch // (len(spec.addresses) if spec.rendezvous else 1)

    with strategy.scope():
        loss_object = keras.losses.SparseCategoricalCrossentropy(reduction="none")
        optimizer = keras.optimizers.Adam()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        optimizer.build(model.trainable_variables)
    if spec.rendezvous:
        held = [*model.variables, *optimizer.variables]
        hvd.broadcast_variables([variable.value for variable in held], root_rank=0)

    def train_step(inputs: Any) -> Any:
        images, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(images, training=True)
            losses = loss_object(labels, predictions)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        if spec.rendezvous:
            # What its DistributedGradientTape does, which fails of Keras 3's variables.
            gradients = [hvd.allreduce(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, predictions)
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def one(inputs: Any) -> Any:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(train_step, args=(inputs,)), axis=None)

    @tf.function  # type: ignore[untyped-decorator]
    def several(iterator: Any, count: Any) -> Any:
        total = tf.constant(0.0)
        for _ in tf.range(count):
            losses = strategy.run(train_step, args=(next(iterator),))
            total += strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)
        return total

    data = _batches(x, y, batch)
    iterator = iter(strategy.experimental_distribute_dataset(data))

    def train(steps: int) -> None:
        if spec.steps_per_call == 1:
            for _ in range(steps):
                loss = one(next(iterator))
            if steps:
                loss.numpy()
        else:
            for _ in range(-(-steps // spec.steps_per_call)):
                several(iterator, tf.constant(spec.steps_per_call)).numpy()

    return timed(train, spec)


def timed(train: Callable[[int], None], spec: Spec) -> Stretch:
    """Returns what times so many steps in whole calls, after some to warm up."""

    def stretch(warmup: int, steps: int) -> tuple[float, float]:
        train(warmup)
        began = time.perf_counter()
        train(steps)
        whole = -(-steps // spec.steps_per_call) * spec.steps_per_call
        return float(whole * spec.global_batch), time.perf_counter() - began

    return stretch


def _fit(spec: Spec, model: Any, x: Any, y: Any) -> Stretch:
    """`model.fit` over one epoch, timed by a callback between the starts of two of its steps."""
    import keras
    import numpy as np

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]
        """Notes when steps begin. It has no hook at a step's end, which would make Keras wait for its logs."""

        def __init__(self, warmup: int, steps: int) -> None:
            super().__init__()
            self.first, self.last = warmup, warmup + steps
            self.times: dict[int, float] = {}

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if batch in (self.first, self.last):
                if spec.backend == "jax":
                    import jax

                    # Steps that were begun still compute. Asked for its model, Keras gives it their values.
                    jax.block_until_ready([variable.value for variable in self.model.variables])
                self.times[batch] = time.perf_counter()

    endless = _batches(x, y, spec.global_batch) if spec.way == "fit_dataset" else None

    def stretch(warmup: int, steps: int) -> tuple[float, float]:
        clock, all_steps = Clock(warmup, steps), warmup + steps + 1
        if endless is not None:
            model.fit(endless, steps_per_epoch=all_steps, callbacks=[clock], verbose=0)
        else:
            chosen = np.arange(all_steps * spec.global_batch) % len(x)
            model.fit(x[chosen], y[chosen], batch_size=spec.global_batch, callbacks=[clock], verbose=0)
        return float(steps * spec.global_batch), clock.times[clock.last] - clock.times[clock.first]

    return stretch


def _batches(x: Any, y: Any, batch: int) -> Any:
    """Shuffled batches without end, float32 [batch, height, width, channel] in [0, 1] and int32 [batch]."""
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((x, y)).cache().shuffle(SHUFFLE_WINDOW, seed=0)
    return data.repeat().batch(batch).prefetch(tf.data.AUTOTUNE)

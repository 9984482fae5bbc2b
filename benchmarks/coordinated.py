"""The rival of asynchronous training: a bare ClusterCoordinator, as TensorFlow's guide writes its loop.

https://www.tensorflow.org/tutorials/distribute/parameter_server_training, with several steps in a closure.
"""

from typing import Any

from rivals import SHUFFLE_WINDOW, Spec, Stretch, timed


def prepare(spec: Spec, rank: int) -> Stretch:
    """Rank 0 of the addresses coordinates, the last one has the variables, and those between train."""
    import tensorflow as tf

    from pipeline.worker.tensorflow import loopback

    loopback.listen_on_loopback_only()
    tf.config.set_visible_devices([], "GPU")
    coordinator, *workers, server = spec.addresses
    cluster = tf.train.ClusterSpec({"chief": [coordinator], "worker": workers, "ps": [server]})
    if not rank:
        return _coordinate(spec, cluster)
    job, index = ("ps", 0) if rank > len(workers) else ("worker", rank - 1)
    config = tf.compat.v1.ConfigProto()
    if spec.threads and job == "worker":
        config.intra_op_parallelism_threads, config.inter_op_parallelism_threads = spec.threads
    started = tf.distribute.Server(cluster, job_name=job, task_index=index, protocol="grpc", config=config)
    # It computes nothing of its own, and lives as long as who times the coordinator.
    return lambda warmup, steps, server=started: (0.0, 0.0)  # type: ignore[misc]


def _coordinate(spec: Spec, cluster: Any) -> Stretch:
    import keras
    import tensorflow as tf

    from pipeline.config import targets

    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    keras.utils.set_random_seed(0)

    def batches() -> Any:
        train, _ = targets.call(spec.data_build, "data.build")
        if not isinstance(train, tf.data.Dataset):
            train = tf.data.Dataset.from_tensor_slices(train).cache()
        shuffled = train.shuffle(SHUFFLE_WINDOW).repeat()
        return shuffled.batch(spec.global_batch, drop_remainder=True).prefetch(tf.data.AUTOTUNE)

    shapes = tf.nest.map_structure(lambda leaf: tuple(leaf.shape[1:]), batches().element_spec[0])
    binary = isinstance(shapes, dict)
    with strategy.scope():
        model = targets.call(
            spec.model_build, "model.build", input_shape=shapes, **({} if binary else {"num_classes": 10})
        )
        losses = keras.losses.BinaryCrossentropy if binary else keras.losses.SparseCategoricalCrossentropy
        loss_object = losses(reduction="none")
        metric = keras.metrics.AUC() if binary else keras.metrics.SparseCategoricalAccuracy()
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)

    def train_step(inputs: Any) -> Any:
        examples, labels = inputs
        with tf.GradientTape() as tape:
            predictions = model(examples, training=True)
            labels = tf.reshape(labels, [-1, 1]) if binary else labels
            loss = tf.nn.compute_average_loss(loss_object(labels, predictions), global_batch_size=spec.global_batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        if spec.measured:
            metric.update_state(labels, predictions)
        return loss

    @tf.function  # type: ignore[untyped-decorator]
    def several(iterator: Any) -> Any:
        total = tf.constant(0.0)
        for _ in tf.range(spec.steps_per_call):
            losses = strategy.run(train_step, args=(next(iterator),))
            total += strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)
        return total

    iterator = iter(coordinator.create_per_worker_dataset(batches))

    def train(steps: int) -> None:
        scheduled = [coordinator.schedule(several, args=(iterator,)) for _ in range(-(-steps // spec.steps_per_call))]
        coordinator.join()
        if scheduled:
            scheduled[-1].fetch()

    return timed(train, spec)

"""Prints as JSON how far replicas of a model are from one device, in normalization and where some have no examples."""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

from pipeline import strategies
from pipeline.worker.tensorflow import build, custom_steps, step
from pipeline.worker.tensorflow.collective import over
from pipeline.worker.tensorflow.loss_scaling import normalization

REPLICAS = 2
ALONE = tf.distribute.get_strategy()
IMAGE, WORDS = (6, 6, 4), 7


def images():
    """Layers with kernels, in branches that each normalize over the batch."""
    x = keras.Input(IMAGE)
    volume = keras.layers.Reshape((6, 6, 2, 2))(x)
    branches = [
        keras.layers.Conv2D(3, 3)(x),
        keras.layers.Conv2D(4, 2, groups=2, dilation_rate=2)(x),
        keras.layers.DepthwiseConv2D(3)(x),
        keras.layers.SeparableConv2D(3, 3)(x),
        keras.layers.Conv2DTranspose(3, 3, strides=2)(x),
        keras.layers.SpectralNormalization(keras.layers.Conv2D(3, 2))(x, training=True),
        keras.layers.Conv2D(3, 1)(keras.layers.MaxPooling2D()(x)),
        keras.layers.Reshape((4, 4, 6))(keras.layers.Conv3D(3, (3, 3, 1))(volume)),
    ]
    pooled = [keras.layers.GlobalAveragePooling2D()(keras.layers.BatchNormalization()(branch)) for branch in branches]
    return keras.Model(x, keras.layers.Dense(2)(keras.layers.Concatenate()(pooled)))


def words():
    """Layers over sequences, of which some are masked."""
    x = keras.Input((WORDS,), dtype="int32")
    masked = keras.layers.Embedding(20, 4, mask_zero=True)(x)
    plain = keras.layers.Embedding(20, 4)(x)
    branches = [
        keras.layers.BatchNormalization()(masked),
        keras.layers.BatchNormalization(axis=1)(keras.layers.Conv1D(3, 3)(plain)),
        keras.layers.Conv1DTranspose(3, 3)(plain),
        keras.layers.LSTM(3, return_sequences=True)(masked),
        keras.layers.Bidirectional(keras.layers.GRU(3, return_sequences=True))(plain),
        keras.layers.MultiHeadAttention(2, 2)(masked, masked),
        keras.layers.UnitNormalization()(plain),
    ]
    pooled = [keras.layers.GlobalAveragePooling1D()(keras.layers.BatchNormalization()(branch)) for branch in branches]
    return keras.Model(x, keras.layers.Dense(2)(keras.layers.Concatenate()(pooled)))


def amplified():
    """A layer that amplifies the last digit of a mean."""
    x = keras.Input((WORDS,), dtype="int32")
    normalized = keras.layers.BatchNormalization()(keras.layers.Embedding(20, 4, mask_zero=True)(x))
    return keras.Model(x, keras.layers.Dense(2)(keras.layers.Flatten()(keras.layers.RMSNormalization()(normalized))))


def trained(make, strategy, batches):
    """(losses, weights, other state, metrics) after training on these batches, of which replicas get even shares."""
    replicas, (x, y) = strategy.num_replicas_in_sync, batches[0]

    def compiled():
        keras.utils.set_random_seed(1)
        model = make()
        model.compile(keras.optimizers.SGD(0.02), "mse", metrics=["mae"])
        return model

    model = build.model(compiled, strategy, (tf.constant(x), tf.constant(y)))

    def shares():
        for inputs, labels in batches:
            parts = zip(np.array_split(inputs, replicas), np.array_split(labels, replicas), strict=True)
            yield np.float32(len(inputs)), tuple(parts)

    one = (tf.TensorSpec([None, *x.shape[1:]], x.dtype), tf.TensorSpec([None, *y.shape[1:]], y.dtype))
    data = tf.data.Dataset.from_generator(shares, output_signature=(tf.TensorSpec([]), (one,) * replicas))
    together = step.Replicas(strategy, over(strategy))
    steps = custom_steps.training_steps(model, together)
    losses, _, _ = steps(iter(data), tf.constant(len(batches)))
    validate = step.validation_steps(model, together)
    validated, _, _ = validate(iter(data), tf.constant(len(batches)))
    results = {name: float(value) for name, value in model.get_metrics_result().items()}
    state = [
        keras.ops.convert_to_numpy(variable) for variable in model.trainable_variables + model.non_trainable_variables
    ]
    return [*losses.numpy().ravel(), *validated.numpy().ravel(), results["mae"]], state


def apart(make, strategy, batches):
    """(of losses and metrics, of the state) the largest difference from one device."""
    (ours, state), (theirs, reference) = (trained(make, under, batches) for under in (strategy, ALONE))
    differences = [np.max(np.abs(a - b), initial=0.0) for a, b in zip(state, reference, strict=True)]
    return float(np.max(np.abs(np.subtract(ours, theirs)))), float(np.max(differences))


def moments(strategy, mean, masked, axis, dtype):
    """(of mean, of variance, of their gradients) the largest relative difference from those in float64."""
    random = np.random.default_rng(5)
    # In order, so that replicas' means are apart.
    values = np.sort(random.normal(mean, 1.0, (37, 6, 5)), axis=0).astype("float32")
    mask = tf.constant(random.random((37, 6)) < 0.6) if masked else None
    with strategy.scope():
        layer = keras.layers.BatchNormalization(axis=axis, dtype=dtype)
        layer.build(values.shape)
        normalization.synchronize(keras.Sequential([keras.Input(values.shape[1:]), layer]), over(strategy))
    values = tf.cast(tf.cast(values, layer.compute_dtype), tf.float32)
    weights = [tf.constant(random.normal(size=values.shape[axis]), tf.float32) for _ in range(2)]

    def made(moments, values, mask, weights):
        with tf.GradientTape() as tape:
            tape.watch(values)
            found = moments(values, mask)
            total = tf.add_n([tf.reduce_sum(pair[0] * pair[1]) for pair in zip(found, weights, strict=True)])
        return *found, tape.gradient(total, values)

    bounds = [0, 11, 37]

    @tf.function(autograph=False)
    def step():
        def replica():
            number = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
            part = slice(bounds[number], bounds[number + 1])
            # Each replica's loss is a part of the whole.
            mine = [weight * share for weight, share in zip(weights, [[0.3, 0.7][number]] * 2, strict=True)]
            return made(layer._moments, values[part], None if mask is None else mask[part], mine)

        return strategy.run(replica)

    found_mean, variance, gradient = (strategy.experimental_local_results(value) for value in step())
    exact = [tf.cast(array, tf.float64) for array in (values, *weights)]
    reference = keras.layers.BatchNormalization(axis=axis, dtype="float64")
    reference.build(values.shape)
    expected = made(reference._moments, exact[0], mask, exact[1:])
    pairs = [(found_mean[0], expected[0]), (variance[1], expected[1]), (tf.concat(gradient, 0), expected[2])]
    return [float(np.max(np.abs(ours - theirs.numpy())) / np.max(np.abs(theirs))) for ours, theirs in pairs]


def main():
    """Prints {what: differences}."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)
    strategy = strategies.mirrored(tuple(f"CPU:{number}" for number in range(REPLICAS)))
    print(json.dumps(globals()[sys.argv[1]](strategy)))


def all_moments(strategy):
    """By what is normalized."""
    cases = [
        (1e3, False, -1, "float32"), (1e3, True, -1, "float32"), (1e3, False, 1, "float32"), (0.0, True, -1, "float32"),
        (1e3, False, -1, "mixed_bfloat16"), (1e3, False, -1, "mixed_float16"), (-1e4, False, 2, "float32"),
    ]  # fmt: skip
    return {str(case): moments(strategy, *case) for case in cases}


def all_layers(strategy):
    """By model; the last global batch leaves a replica without examples."""
    random = np.random.default_rng(7)
    sizes = (5, 1)
    labels = [random.normal(size=(size, 2)).astype("float32") for size in sizes]
    seen = [random.normal(size=(size, *IMAGE)).astype("float32") for size in sizes]
    read = [random.integers(0, 20, (size, WORDS)).astype("int32") for size in sizes]
    return {
        "images": apart(images, strategy, list(zip(seen, labels, strict=True))),
        "words": apart(words, strategy, list(zip(read, labels, strict=True))),
        "a single word": apart(amplified, strategy, [(np.eye(1, WORDS, dtype="int32"), label[:1]) for label in labels]),
    }


if __name__ == "__main__":
    main()

"""Normalization over the global batch is that of one device."""

import json

import keras
import numpy as np
import own
import pytest
import tensorflow as tf
import two_devices  # noqa: F401 # which are this process's
from conftest import QUICK
from run_events import weights

from pipeline.worker.tensorflow.collective import over
from pipeline.worker.tensorflow.loss_scaling import normalization


@pytest.mark.parametrize(("mean", "masked", "axis", "dtype"), [
    (1e3, False, -1, "float32"), (1e3, True, -1, "float32"), (1e3, False, 1, "float32"), (0.0, True, -1, "float32"),
    (1e3, False, -1, "mixed_bfloat16"), (1e3, False, -1, "mixed_float16"), (-1e4, False, 2, "float32"),
])  # fmt: skip
def test_mean_variance_and_gradients_keep_their_digits_where_the_mean_is_far_from_zero(
    mirrored, mean, masked, axis, dtype
):
    random = np.random.default_rng(5)
    # In order, so that replicas' means are apart.
    values = np.sort(random.normal(mean, 1.0, (37, 6, 5)), axis=0).astype("float32")
    mask = tf.constant(random.random((37, 6)) < 0.6) if masked else None
    with mirrored.scope():
        layer = keras.layers.BatchNormalization(axis=axis, dtype=dtype)
        layer.build(values.shape)
        normalization.synchronize(keras.Sequential([keras.Input(values.shape[1:]), layer]), over(mirrored))
    values = tf.cast(tf.cast(values, layer.compute_dtype), tf.float32)
    weights = [tf.constant(random.normal(size=values.shape[axis]), tf.float32) for _ in range(2)]

    def made(moments, values, mask, weights):
        with tf.GradientTape() as tape:
            tape.watch(values)
            mean_and_variance = moments(values, mask)
            pairs = zip(mean_and_variance, weights, strict=True)
            total = tf.add_n([tf.reduce_sum(moment * weight) for moment, weight in pairs])
        return *mean_and_variance, tape.gradient(total, values)

    @tf.function(autograph=False)
    def step():
        def replica():
            number = int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))
            part = slice(*[(0, 11), (11, 37)][number])
            # Each replica's loss is a part of the whole.
            share = [weight * [0.3, 0.7][number] for weight in weights]
            return made(layer._moments, values[part], None if mask is None else mask[part], share)

        return mirrored.run(replica)

    of_mean, of_variance, gradient = (mirrored.experimental_local_results(value) for value in step())
    exact = [tf.cast(array, tf.float64) for array in (values, *weights)]
    reference = keras.layers.BatchNormalization(axis=axis, dtype="float64")
    reference.build(values.shape)
    expected = made(reference._moments, exact[0], mask, exact[1:])
    for ours, theirs in zip((of_mean[0], of_variance[1], tf.concat(gradient, 0)), expected, strict=True):
        assert np.max(np.abs(ours - theirs.numpy())) < 1e-6 * np.max(np.abs(theirs))


@pytest.mark.slow
def test_batch_statistics_of_a_host_or_replica_are_averaged_over_all_and_change_what_is_learnt(pipeline):
    ran = pipeline(
        "-m", *QUICK, f"--config-dir={own.CONF}", "strategy=multi_worker", "workers=4",
        "strategy.devices_per_process=2",
        "model=normalised", "data=numbered", "train.steps=3", "train.global_batch=128", "train.steps_per_call=3",
        "train.batch_statistics=global,host,replica",
    ).ok()  # fmt: skip
    moving = {}
    for folder in ran.run_folders:
        # The state of all replicas of both processes is the same.
        assert len(weights(folder)) == 1
        whose = json.loads((folder / "plan.json").read_text())["batch_statistics"]
        model = keras.saving.load_model(folder / "model.keras")
        (layer,) = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
        moving[whose] = [np.asarray(layer.moving_mean), np.asarray(layer.moving_variance)]
    assert set(moving) == {"global", "host", "replica"}
    assert not np.array_equal(moving["host"][1], moving["replica"][1])
    for whose in ("host", "replica"):
        # The mean of means is that of all, as far as weights that were learnt otherwise let it.
        np.testing.assert_allclose(moving[whose][0], moving["global"][0], atol=1e-4)
        assert not np.allclose(moving[whose][1], moving["global"][1], atol=1e-7)
        np.testing.assert_allclose(moving[whose][1], moving["global"][1], rtol=1e-3)

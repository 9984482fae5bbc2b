"""Normalization over the global batch is that of one device, and replicas without examples change nothing."""

import json

import keras
import numpy as np
import own
import pytest
from conftest import QUICK
from run_events import weights
from scripts import came


@pytest.mark.slow
def test_mean_variance_and_gradients_keep_their_digits_where_the_mean_is_far_from_zero():
    for case, differences in came("normalized", "all_moments").items():
        assert max(differences) < 1e-6, case


@pytest.mark.slow
def test_replicas_without_examples_change_nothing_whatever_the_layers():
    for model, differences in came("normalized", "all_layers").items():
        assert max(differences) < 1e-5, model


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

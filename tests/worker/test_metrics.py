"""Metrics whose state is no sum are on several devices what they are on one, also after a restart, or are refused."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import QUICK, sampled
from keras import ops
from test_exact import assert_equal, last
from whole import Fading, Largest, deviation

import pipeline as ours
from pipeline import strategies

# While tests are collected, before any of them runs an operation: devices cannot change afterwards.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(61, 6)).astype("float32")
Y = (X[:, :2] + RANDOM.normal(size=(61, 2)) * 0.1).astype("float32")
WEIGHTS = RANDOM.uniform(0.5, 2.0, 61).astype("float32")
WHOLE = ("model.build._target_=whole.embedder", "data.build._target_=whole.grouped", "train.global_batch=16")


class Watching(keras.layers.Layer):
    """Has metrics of its own, of examples and of a number for the batch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.top, self.mean = Largest(name="top_inside"), keras.metrics.Mean(name="mean_inside")
        self.batches = keras.metrics.Mean(name="mean_of_batches")
        self.sums = keras.metrics.Mean(name="mean_of_sums")

    def call(self, x):
        self.top.update_state(None, x)
        self.mean.update_state(x)
        self.batches.update_state(ops.mean(x))
        self.sums.update_state(ops.sum(x))
        return x


class Tracking(keras.Model):
    """Has metrics of its own, as Keras's guides have them."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tracker, self.top = keras.metrics.Mean(name="tracked"), Largest(name="top_of_model")

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        self.tracker.update_state(loss)
        return loss

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.top.update_state(y, y_pred)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def model() -> keras.Model:
    x = Watching()(keras.layers.Dense(8, "tanh")(inputs := keras.Input((6,))))
    made = Tracking(inputs, keras.layers.Dense(2)(x))
    compiled = [
        Largest(), Largest(start=-5.0, name="low"), Largest(aggregation="mean", name="mean"),
        Largest(aggregation="only_first_replica", name="first"), Fading(), deviation, "mae",
        keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score(), keras.metrics.CosineSimilarity(),
    ]  # fmt: skip
    weighted = [Fading(name="fading_too"), "mse"]
    made.compile(keras.optimizers.SGD(0.01), "mse", metrics=compiled, weighted_metrics=weighted)
    return made


def trained(strategy: tf.distribute.Strategy, make: Callable[[], keras.Model] = model) -> dict[str, list[float]]:
    """The history of two epochs, twice: of the last batch of each one replica has the only example."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        made = make()
    for _ in range(2):
        history = ours.fit(
            made, X, Y, sample_weight=WEIGHTS, batch_size=20, epochs=2, verbose=0, shuffle=False,
            validation_data=(X[:37], Y[:37]),
        )  # fmt: skip
    assert not any("update_state" in vars(metric) for metric in [*made.metrics, *made._compile_metrics.metrics])
    return history.history  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mirrored", "central_storage"])
def test_what_is_no_sum_is_counted_on_the_global_batch_wherever_it_is_kept(kind):
    history = trained(getattr(strategies, kind)(("CPU:0", "CPU:1")))
    reference = trained(tf.distribute.get_strategy())
    assert len(reference) > 30
    for name, values in reference.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_commands_count_and_gather_over_processes_and_in_static_batches(pipeline):
    kinds = ("strategy=one_device", "strategy=mirrored workers=2", "strategy=multi_worker workers=2")
    for kind in kinds:
        ran = pipeline(*QUICK, *kind.split(), *WHOLE, "train.epochs=2", "train.gather=true")
        assert ran.code == 0, ran.err
        assert [result["notes"] for result in ran.results if not result["oversubscribed"] and result["notes"]] == []
    assert_equal(ran.run_folders, tolerance=1e-5)
    assert ran.result["metrics"]["most"] > 0 > ran.result["metrics"]["least"]


@pytest.mark.slow
def test_a_training_that_goes_on_in_mid_epoch_counts_on(pipeline, tmp_path):
    (strategy,) = sampled(("mirrored", "multi_worker"), 1)
    asked = (*QUICK, f"strategy={strategy}", "workers=2", *WHOLE, "train.gather=true", "train.steps_per_call=1",
             "checkpoint.every_steps=4", "train.deterministic=true")  # fmt: skip
    whole = pipeline(*asked, "train.epochs=2", "resume=never")
    assert whole.code == 0, whole.err
    mark = tmp_path / "died"
    died = pipeline(
        *asked, "train.epochs=2", "resume=never", f"train.callbacks=[{{_target_: whole.Dies, mark: {mark}}}]"
    )
    assert died.code == 0, died.err
    assert mark.exists()
    first, second = (last(folder, "epoch") for folder in died.run_folders)
    for name in ("loss", "metrics", "val_loss", "val_metrics"):
        assert first[name] == second[name], name


def test_asynchronous_workers_refuse_what_is_no_sum_and_gathering(pipeline, asked):
    ran = pipeline(*QUICK, "strategy=parameter_server", "workers=1", *WHOLE)
    assert ran.code == 1
    assert (
        "since the states of asynchronous workers are added, received largest (Largest), whose state is no" in ran.err
    )
    refused = asked("strategy=parameter_server", "train.gather=true", "mode=plan")
    assert refused.code == 2
    assert "Expected train.gather=false under asynchronous workers" in refused.err

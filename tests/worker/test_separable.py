"""Losses that scale as a sum or a mean, or as neither, are on two devices what they are on one, or are told of."""

import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import sampled
from keras import ops

import pipeline
from pipeline import strategies
from pipeline.worker.tensorflow import build
from pipeline.worker.tensorflow.loss_scaling import loss as losses
from pipeline.worker.tensorflow.loss_scaling import metrics
from pipeline.worker.tensorflow.loss_scaling.reduction import Reduction

# While tests are collected, before any of them runs an operation: devices cannot change afterwards.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(61, 6)).astype("float32")
Y = (X[:, :2] + RANDOM.normal(size=(61, 2)) * 0.1).astype("float32")
WEIGHTS = RANDOM.uniform(0.5, 2.0, 61).astype("float32")
CLASSES = RANDOM.integers(0, 3, 61)


@pytest.fixture(scope="module")
def mirrored() -> tf.distribute.Strategy:
    return strategies.mirrored(("CPU:0", "CPU:1"))


class ScalarMean(keras.losses.Loss):
    """One number for the batch, whatever its reduction says."""

    def call(self, y_true, y_pred):
        return ops.mean(ops.square(y_true - y_pred))


class ScalarSum(keras.losses.Loss):
    """One number for the batch, a sum."""

    def call(self, y_true, y_pred):
        return ops.sum(ops.square(y_true - y_pred))


def summed(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred))


def by_example(y_true, y_pred):
    return ops.sum(ops.abs(y_true - y_pred), -1)


LOSSES: dict[str, Callable[[], Any]] = {
    "summed": lambda: summed,
    "meant": lambda: lambda y, p: ops.mean(ops.square(y - p)),
    "by_example": lambda: by_example,
    "scalar_mean": ScalarMean,
    "scalar_sum": ScalarSum,
    "mean_called_sum": lambda: ScalarMean(reduction="sum"),
    "none": lambda: keras.losses.MeanSquaredError(reduction="none"),
    "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
    "mean_by_weight": lambda: keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"),
    "cosine": keras.losses.CosineSimilarity,
    "huber": lambda: "huber",
}


def many_headed() -> keras.Model:
    """A head for each kind of loss."""
    hidden = keras.layers.Dense(8, "tanh")(inputs := keras.Input((6,)))
    model = keras.Model(inputs, {name: keras.layers.Dense(2, name=name)(hidden) for name in LOSSES})
    weights = {name: 0.5 if name == "scalar_sum" else 1.0 for name in LOSSES}
    model.compile(keras.optimizers.SGD(1e-4), {name: made() for name, made in LOSSES.items()}, loss_weights=weights)
    return model


class Adding(keras.layers.Layer):
    """Adds something of its input to the loss, as `how` says."""

    def __init__(self, how: str, **kwargs):
        super().__init__(**kwargs)
        self.how = how

    def call(self, x, training=None):
        squares = 1e-2 * ops.square(x)
        if self.how == "sum":
            self.add_loss(ops.sum(squares))
        if self.how == "mean":
            self.add_loss(ops.mean(squares))
        if self.how == "by example":
            self.add_loss(ops.sum(squares, -1))
        if self.how == "in training" and training:
            self.add_loss([ops.sum(squares), ops.mean(squares)])
        if self.how == "as a whole":
            self.add_loss(ops.square(ops.mean(x)))
        return x


def adding(*how: str, normalised: bool = False) -> keras.Model:
    hidden = keras.layers.Dense(8, "tanh", activity_regularizer="l2", kernel_regularizer="l2")
    x = hidden(inputs := keras.Input((6,)))
    if normalised:
        x = keras.layers.BatchNormalization()(x)
    x = keras.layers.ActivityRegularization(l1=1e-3)(x)
    for kind in how:
        x = Adding(kind, name=kind.replace(" ", "_"))(x)
    return compiled(keras.Model(inputs, keras.layers.Dense(2)(x)), "mse")


class Own(keras.Model):
    """Computes its loss by itself."""

    how = "sum"

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if self.how == "sum":
            return summed(y, y_pred)
        if self.how == "mean":
            return ops.mean(ops.square(y - y_pred)) + ops.sum(self.losses)
        if self.how == "both":
            mean = super().compute_loss(x, y, y_pred, sample_weight, training)
            return mean + 0.1 * ops.mean(ops.square(y_pred))
        return correlated(y, y_pred) + 0.1 * ops.mean(ops.square(x))


def own(how: str) -> keras.Model:
    x = Adding("sum")(keras.layers.Dense(8, "tanh")(inputs := keras.Input((6,))))
    model = Own(inputs, keras.layers.Dense(2)(x))
    model.how = how
    return compiled(model, summed)


def compiled(model: keras.Model, loss: Any) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.005, momentum=0.9), loss)
    return model


def plain(loss: Any, outputs: int = 2) -> keras.Model:
    hidden = keras.layers.Dense(8, "tanh")(inputs := keras.Input((6,)))
    return compiled(keras.Model(inputs, keras.layers.Dense(outputs)(hidden)), loss)


def correlated(y_true, y_pred):
    """How far from correlated over the batch."""
    left, right = y_true - ops.mean(y_true, 0), y_pred - ops.mean(y_pred, 0)
    norm = ops.sqrt(ops.sum(left * left, 0) * ops.sum(right * right, 0) + 1e-6)
    return 1.0 - ops.mean(ops.sum(left * right, 0) / norm)


def contrastive(y_true, y_pred):
    """How much nearer examples of one class are than all examples (Chen et al., 2020, with labels)."""
    unit = y_pred / ops.sqrt(ops.sum(y_pred * y_pred, -1, keepdims=True) + 1e-6)
    alike = ops.cast(ops.equal(y_true[:, None], y_true[None, :]), "float32")
    near = ops.log_softmax(ops.matmul(unit, ops.transpose(unit)) / 0.5, -1)
    return -ops.sum(alike * near) / ops.sum(alike)


def in_order(y_true, y_pred):
    return ops.mean(ops.abs(ops.sort(y_pred, 0) - ops.sort(y_true, 0)))


def trained(
    strategy: tf.distribute.Strategy, make: Callable[[], keras.Model], y: Any, weights: Any, batch_size: int, **how: Any
) -> tuple[dict[str, list[float]], list[np.ndarray], list[str]]:
    """(history, weights, what was warned of) after two epochs and validations, with fewer examples in the last step."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = make()
    held_out = keras.tree.map_structure(lambda values: values[:37], (X, y))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        history = pipeline.fit(
            model, X, y, sample_weight=weights, batch_size=batch_size, epochs=2, verbose=0, shuffle=False,
            validation_data=held_out, **how,
        )  # fmt: skip
    told = [str(warning.message) for warning in said if "Expected" in str(warning.message)]
    return history.history, [np.array(weight) for weight in model.get_weights()], told


def assert_same(
    strategy: tf.distribute.Strategy,
    make: Callable[[], keras.Model],
    y: Any = Y,
    weights: Any = None,
    batch_size: int = 20,
    tolerance: float = 2e-6,
    **how: Any,
) -> None:
    """Is it one device's, to the last digits? Of a batch of 20 the last has one example, which one replica has."""
    ours = trained(strategy, make, y, weights, batch_size, **how)
    reference = trained(tf.distribute.get_strategy(), make, y, weights, batch_size, **how)
    for name, values in reference[0].items():
        np.testing.assert_allclose(ours[0][name], values, rtol=tolerance, atol=tolerance, err_msg=name)
    for weight, one in zip(ours[1], reference[1], strict=True):
        np.testing.assert_allclose(weight, one, rtol=0, atol=tolerance)
    assert ours[2] == []


@pytest.mark.slow
def test_compiled_losses_of_every_kind(mirrored):
    (weights,) = sampled((None, WEIGHTS), 1)
    assert_same(mirrored, many_headed, dict.fromkeys(LOSSES, Y), weights, tolerance=1e-5)


@pytest.mark.parametrize(("dtype", "reduction"), [("float16", "sum"), ("bfloat16", "sum_over_batch_size")])
def test_losses_of_half_width(mirrored, dtype, reduction):
    loss = keras.losses.MeanSquaredError(reduction=reduction, dtype=dtype)
    assert_same(mirrored, lambda: plain(loss), tolerance=4e-3)


@pytest.mark.parametrize("normalised", [pytest.param(False, marks=pytest.mark.slow), True])
def test_what_layers_add_and_activity_regularizers(mirrored, normalised):
    assert_same(mirrored, lambda: adding("sum", "mean", "by example", "in training", normalised=normalised))


# Others in each run of CI.
@pytest.mark.slow
@pytest.mark.parametrize("how", sampled(["sum", "mean", "both"], 2))
def test_losses_that_a_model_computes_by_itself(mirrored, how):
    assert_same(mirrored, lambda: own(how))


# Losses of a batch as a whole, and their labels.
WHOLE: dict[str, tuple[Callable[[], keras.Model], Any]] = {
    "correlated": (lambda: plain(correlated), Y),
    "in order": (lambda: plain(in_order), Y),
    "contrastive": (lambda: plain(contrastive, outputs=4), CLASSES),
    "of its own": (lambda: own("correlated"), Y),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(list(WHOLE), 2))
def test_losses_of_a_batch_as_a_whole_are_told_of_and_exact_where_outputs_are_gathered(mirrored, name):
    make, y = WHOLE[name]
    assert_same(mirrored, make, y, gather=True)
    _, _, (told,) = trained(mirrored, make, y, None, 16)
    assert told.startswith("Expected losses that are means or sums over examples, received ")
    assert told.endswith("Try train.gather=true, or gather=True in pipeline.fit.")


def asking(how: str) -> Callable[[Any, Any], Any]:
    """A loss that asks other replicas by itself: of each example beside those of all, of all, or for their number."""

    def loss(y_true, y_pred):
        replica = tf.distribute.get_replica_context()
        if how == "count":
            squares = ops.sum(ops.square(y_pred - ops.cast(ops.reshape(y_true, (-1, 1)), y_pred.dtype)))
            return squares / replica.all_reduce("sum", ops.cast(ops.shape(y_pred)[0], y_pred.dtype))
        labels, outputs = replica.all_gather(ops.reshape(y_true, (-1,)), 0), replica.all_gather(y_pred, 0)
        mine, own = (labels, outputs) if how == "whole" else (ops.reshape(y_true, (-1,)), y_pred)
        alike = ops.cast(ops.equal(mine[:, None], labels[None, :]), "float32")
        near = ops.log_softmax(ops.matmul(own, ops.transpose(outputs)), -1)
        return -ops.sum(alike * near, -1) / ops.sum(alike, -1)

    return loss


@pytest.mark.parametrize("how", ["pairs", *(pytest.param(how, marks=pytest.mark.slow) for how in ("whole", "count"))])
def test_a_loss_that_asks_other_replicas_by_itself_is_one_device_s_and_nothing_is_told(mirrored, how):
    for gather in (False, True):
        assert_same(mirrored, lambda: plain(asking(how), outputs=4), CLASSES, gather=gather)


def test_what_a_layer_adds_of_the_batch_as_a_whole_is_told_of(mirrored):
    _, _, (told,) = trained(mirrored, lambda: adding("as a whole"), Y, None, 20)
    assert "received what as_a_whole adds to the loss, which depends on the batch as a whole" in told


class Sampling(keras.Model):
    """A variational autoencoder: draws random numbers, drops out, and adds a sum and a mean to the loss."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = keras.layers.Dense(4), keras.layers.Dense(6)
        self.dropout, self.seeds = keras.layers.Dropout(0.3), keras.random.SeedGenerator(1)
        self.divergence = keras.metrics.Mean(name="divergence")

    def call(self, x, training=None):
        mean, scale = ops.split(self.encoder(self.dropout(x, training=training)), 2, axis=-1)
        divergence = -0.5 * ops.sum(1 + scale - ops.square(mean) - ops.exp(scale))
        drawn = mean + ops.exp(0.5 * scale) * keras.random.normal(ops.shape(mean), seed=self.seeds)
        made = self.decoder(drawn)
        self.add_loss([divergence, ops.mean(ops.square(x - made))])
        self.divergence.update_state(divergence)
        return made


def test_chance_does_not_hide_how_a_loss_scales(mirrored):
    def make() -> keras.Model:
        model = Sampling()
        model.compile("sgd")
        return model

    told: list[str] = []
    model, _ = build.model(make, mirrored, (tf.zeros((2, 6)),), note=told.append)
    assert losses.rules_of(model).added == dict.fromkeys((True, False), (Reduction.SUM, Reduction.MEAN))
    assert told == []
    # One number for the batch, whose mean over batches is no sum over examples.
    assert metrics.on_whole(model) == [model.divergence]


@pytest.mark.slow
def test_labels_that_count_for_nothing(mirrored):
    (weights,) = sampled((None, WEIGHTS), 1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    assert_same(mirrored, lambda: plain(loss, outputs=3), CLASSES, weights)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def test_a_loss_over_pairs_that_masks_examples_is_told_of_and_one_that_ignores_labels_is_not(mirrored, reduction):
    told: list[str] = []
    for loss in (
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0, reduction=reduction),
        keras.losses.Circle(reduction=reduction),
    ):
        assert told == []
        batch = (tf.zeros((2, 6)), tf.zeros(2, tf.int32))
        build.model(lambda made=loss: plain(made, outputs=3), mirrored, batch, note=told.append)
    assert "received the loss circle, which depends on the batch as a whole" in told[0]

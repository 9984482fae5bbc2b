"""Two replicas train what one device trains, whatever a model's losses and metrics are, or what differs is told.

One table holds what a model may have; `test_exact.py` has whole runs of every strategy, `test_equal.py` all that the
page on equality lists, `benchmarks/differential.py` models that are drawn.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import CONF, QUICK, sampled
from conftest import weights as weights_of
from keras import ops
from two_devices import DEVICES
from whole import Fading, Largest, contrastive, deviation

import pipeline
from pipeline import strategies
from pipeline.worker.tensorflow import build
from pipeline.worker.tensorflow import loss_scaling as losses
from pipeline.worker.tensorflow.collective import over
from pipeline.worker.tensorflow.loss_scaling import metrics, normalization
from pipeline.worker.tensorflow.loss_scaling.reduction import Reduction
from pipeline.worker.tensorflow.step import many

RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(61, 6)).astype("float32")
Y = (X[:, :2] + RANDOM.normal(size=(61, 2)) * 0.1).astype("float32")
WEIGHTS = RANDOM.uniform(0.5, 2.0, 61).astype("float32")
CLASSES = RANDOM.integers(0, 3, 61)


class Scalar(keras.losses.Loss):
    """One number for the batch, whatever its reduction says."""

    def __init__(self, total=ops.mean, **kwargs):
        super().__init__(**kwargs)
        self.total = total

    def call(self, y_true, y_pred):
        return self.total(ops.square(y_true - y_pred))


def summed(y_true, y_pred):
    return ops.sum(ops.square(y_true - y_pred))


# The others are rows of docs/equal.md.
LOSSES: dict[str, Callable[[], Any]] = {
    "scalar_mean": Scalar,
    "scalar_sum": lambda: Scalar(ops.sum),
    "mean_called_sum": lambda: Scalar(reduction="sum"),
    "none": lambda: keras.losses.MeanSquaredError(reduction="none"),
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
        added = {
            "sum": ops.sum(squares), "mean": ops.mean(squares), "by example": ops.sum(squares, -1),
            "in training": [ops.sum(squares), ops.mean(squares)], "as a whole": ops.square(ops.mean(x)),
        }  # fmt: skip
        if training or self.how != "in training":
            self.add_loss(added[self.how])
        return x


def adding(*how: str, normalised: bool = False, initial: str = "glorot_uniform") -> keras.Model:
    hidden = keras.layers.Dense(8, "tanh", True, initial, activity_regularizer="l2", kernel_regularizer="l2")
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
        if "nothing at first" in self.how:
            return ops.sum(y * y_pred) + ("partly" in self.how) * ops.mean(ops.square(y))
        if self.how == "mean":
            return ops.mean(ops.square(y - y_pred)) + ops.sum(self.losses)
        if self.how == "both":
            mean = super().compute_loss(x, y, y_pred, sample_weight, training)
            return mean + 0.1 * ops.mean(ops.square(y_pred))
        return correlated(y, y_pred) + 0.1 * ops.mean(ops.square(x))


def own(how: str) -> keras.Model:
    x = Adding("sum")(keras.layers.Dense(8, "tanh")(inputs := keras.Input((6,))))
    model = Own(inputs, keras.layers.Dense(2, kernel_initializer="zeros" if "nothing" in how else None)(x))
    model.how = how
    return compiled(model, summed)


def compiled(model: keras.Model, loss: Any) -> keras.Model:
    model.compile(keras.optimizers.SGD(0.005, momentum=0.9), loss)
    return model


def plain(loss: Any, outputs: int = 2, flat: bool = False) -> keras.Model:
    hidden = keras.layers.Dense(8, "tanh")(inputs := keras.Input((6,)))
    outcome = keras.layers.Dense(1 if flat else outputs)(hidden)
    return compiled(keras.Model(inputs, outcome[:, 0] if flat else outcome), loss)


def correlated(y_true, y_pred):
    """How far from correlated over the batch."""
    left, right = y_true - ops.mean(y_true, 0), y_pred - ops.mean(y_pred, 0)
    norm = ops.sqrt(ops.sum(left * left, 0) * ops.sum(right * right, 0) + 1e-6)
    return 1.0 - ops.mean(ops.sum(left * right, 0) / norm)


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


def measured(loss: Any = "mse", rate: float = 0.01) -> keras.Model:
    x = Watching()(keras.layers.Dense(8, "tanh")(inputs := keras.Input((6,))))
    made = Tracking(inputs, keras.layers.Dense(2)(x))
    compiled = [
        Largest(), Largest(start=-5.0, name="low"), Largest(aggregation="mean", name="mean"),
        Largest(aggregation="only_first_replica", name="first"), Fading(), deviation, "mae",
        keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score(), keras.metrics.CosineSimilarity(),
    ]  # fmt: skip
    weighted = [Fading(name="fading_too"), "mse"]
    made.compile(keras.optimizers.SGD(rate), loss, metrics=compiled, weighted_metrics=weighted)
    return made


@dataclass
class Case:
    """A model, its labels, weights of examples, and how it is trained; of a batch of 20 the last has one example."""

    make: Callable[[], keras.Model]
    y: Any = field(default_factory=lambda: Y)
    weights: Any = None
    batch_size: int = 20
    tolerance: float = 2e-6
    strategy: str = "mirrored"
    gather: bool = False
    fits: int = 1


def squared(reduction: str, dtype: str = "float32") -> keras.losses.Loss:
    return keras.losses.MeanSquaredError(reduction=reduction, dtype=dtype)


IGNORING = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
ADDED = ("sum", "mean", "by example", "in training")
# Losses of a batch as a whole, and their labels.
WHOLE: dict[str, tuple[Callable[[], keras.Model], Any]] = {
    "correlated": (lambda: plain(correlated), Y),
    "contrastive": (lambda: plain(contrastive, outputs=4), CLASSES),
    "of its own": (lambda: own("correlated"), Y),
    "of its own, partly nothing at first": (lambda: own("partly nothing at first"), Y),
}
EQUAL: dict[str, Case] = {
    "every loss": Case(many_headed, dict.fromkeys(LOSSES, Y), tolerance=1e-5),
    "every loss, weighed": Case(many_headed, dict.fromkeys(LOSSES, Y), WEIGHTS, tolerance=1e-5),
    "float16 sum": Case(lambda: plain(squared("sum", "float16")), tolerance=4e-3),
    "bfloat16 mean": Case(lambda: plain(squared("sum_over_batch_size", "bfloat16")), tolerance=4e-3),
    "one output a number": Case(lambda: plain(squared("sum"), flat=True), Y[:, 0]),
    "ignored labels": Case(lambda: plain(IGNORING, outputs=3), CLASSES),
    "ignored labels, weighed": Case(lambda: plain(IGNORING, outputs=3), CLASSES, WEIGHTS),
    "added": Case(lambda: adding(*ADDED)),
    "added, normalised": Case(lambda: adding(*ADDED, normalised=True)),
    "added, nothing at first": Case(lambda: adding(*ADDED, initial="zeros")),
    **{f"own {how}": Case(lambda how=how: own(how)) for how in ("sum", "mean", "both", "nothing at first")},
    **{f"gathered {name}": Case(make, y, gather=True) for name, (make, y) in WHOLE.items()},
    **{f"asking for {how}{', gathered' * gather}": Case(lambda how=how: plain(asking(how), 4), CLASSES, gather=gather)
       for how in ("pairs", "whole", "count") for gather in (False, True)},
    "metrics of a sum": Case(lambda: measured(squared("sum"), 5e-4), weights=WEIGHTS, tolerance=1e-5),
    **{f"metrics under {strategy}": Case(measured, weights=WEIGHTS, strategy=strategy, tolerance=1e-5, fits=2)
       for strategy in ("mirrored", "central_storage")},
}  # fmt: skip
FAST = ("float16 sum", "one output a number", "added, nothing at first", "own nothing at first", "asking for pairs")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in sampled(sorted({*EQUAL} - {*FAST}), 3)]


def trained(case: Case, strategy: tf.distribute.Strategy) -> tuple[dict[str, list[float]], keras.Model, list[str]]:
    """(history, model, what was warned of) after two epochs and validations."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = case.make()
    held_out = keras.tree.map_structure(lambda values: values[:37], (X, case.y))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(case.fits):
            history = pipeline.fit(
                model, X, case.y, sample_weight=case.weights, batch_size=case.batch_size, epochs=2, verbose=0,
                shuffle=False, validation_data=held_out, gather=case.gather,
            )  # fmt: skip
    assert not any("update_state" in vars(metric) for metric in model.metrics)
    notes = [str(warning.message) for warning in caught if "Expected" in str(warning.message)]
    return history.history, model, notes


@pytest.mark.parametrize("name", [*FAST, *SLOW])
def test_two_replicas_train_what_one_device_trains_and_nothing_is_told(name):
    case = EQUAL[name]
    history, model, notes = trained(case, getattr(strategies, case.strategy)(DEVICES))
    reference, one, _ = trained(case, tf.distribute.get_strategy())
    for key, values in reference.items():
        np.testing.assert_allclose(history[key], values, rtol=case.tolerance, atol=case.tolerance, err_msg=key)
    for weight, expected in zip(model.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=0, atol=case.tolerance)
    assert notes == []


@pytest.mark.parametrize(("case", "what", "instead"), [
    (Case(lambda: adding("as a whole")), "what as_a_whole adds to the loss", ""),
    *(pytest.param(Case(*one, batch_size=16), "compute_loss of Own" if "own" in name else "the loss ",
                   "train.gather=true, or gather=True", marks=pytest.mark.slow) for name, one in WHOLE.items()),
], ids=["added", *WHOLE])  # fmt: skip
def test_a_loss_of_the_batch_as_a_whole_is_told_of(mirrored, case, what, instead):
    _, _, (note,) = trained(case, mirrored)
    assert f"received {what}" in note
    assert instead in note


class Sampling(keras.Model):
    """Draws random numbers, drops out, and adds a sum and a mean to the loss."""

    def __init__(self):
        super().__init__()
        self.hidden, self.dropout = keras.layers.Dense(6), keras.layers.Dropout(0.3)
        self.seeds, self.divergence = keras.random.SeedGenerator(1), keras.metrics.Mean(name="divergence")

    def call(self, x, training=None):
        drawn = self.hidden(self.dropout(x, training=training))
        drawn += keras.random.normal(ops.shape(drawn), seed=self.seeds)
        divergence = ops.sum(ops.exp(drawn) - drawn)
        self.add_loss([divergence, ops.mean(ops.square(x - drawn))])
        self.divergence.update_state(divergence)
        return drawn


def test_chance_does_not_hide_how_a_loss_scales(mirrored):
    def make() -> keras.Model:
        model = Sampling()
        model.compile("sgd")
        return model

    told: list[str] = []
    model = build.model(make, mirrored, (tf.zeros((2, 6)),), note=told.append)
    assert losses.rules_of(model).added == dict.fromkeys((True, False), (Reduction.SUM, Reduction.MEAN))
    assert told == []
    # One number for the batch, whose mean over batches is no sum over examples.
    assert metrics.on_global_batch(model) == [model.divergence]


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
def test_losses_of_keras_over_the_batch_are_told_of_and_one_that_ignores_labels_is_not(mirrored, reduction):
    def notes(loss: keras.losses.Loss, y: tf.Tensor) -> list[str]:
        found: list[str] = []
        build.model(lambda: plain(loss, outputs=3), mirrored, (tf.zeros((2, 6)), y), note=found.append)
        return found

    classes, numbers = tf.zeros(2, tf.int32), tf.zeros((2, 3))
    ignoring_some = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0, reduction=reduction)
    assert notes(ignoring_some, classes) == []
    assert notes(keras.losses.CosineSimilarity(reduction=reduction), numbers) == []
    for loss, y in (
        (keras.losses.Circle(reduction=reduction), classes),
        (keras.losses.Dice(reduction=reduction), numbers),
        (keras.losses.CosineSimilarity(reduction=reduction, axis=0), numbers),
    ):
        (note,) = notes(loss, y)
        assert f"received the loss {loss.name}, which depends on the batch as a whole" in note


@pytest.mark.parametrize("kind", ["mirrored", "central_storage"])
def test_each_replica_draws_a_dropout_mask_of_its_own_and_the_first_that_of_one_device(kind):
    def masks(strategy: tf.distribute.Strategy) -> np.ndarray:
        """[step, replica, unit] of three steps."""
        replicas = strategy.num_replicas_in_sync
        with strategy.scope():
            dropout = keras.layers.Dropout(0.5, seed=7)

        def draw(examples: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            place = tf.one_hot(context.replica_id_in_sync_group, replicas)[:, None]
            return context.all_reduce(tf.distribute.ReduceOp.SUM, place * dropout(batch, training=True))

        batches = (tf.constant(float(replicas)), (tf.ones((1, 32)),) * replicas)
        drawn, *_ = many(strategy, draw)(iter(tf.data.Dataset.from_tensors(batches).repeat()), tf.constant(3))
        return drawn.numpy()

    drawn, alone = masks(getattr(strategies, kind)(DEVICES)), masks(strategies.one_device(DEVICES[:1]))
    np.testing.assert_array_equal(drawn[:, 0], alone[:, 0])
    assert len({mask.tobytes() for step in drawn for mask in step}) == 6


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
        "-m", *QUICK, f"--config-dir={CONF}", "strategy=multi_worker", "workers=4",
        "strategy.devices_per_process=2", "model=normalised", "data=numbered", "train.steps=3",
        "train.global_batch=128", "train.steps_per_call=3", "train.batch_statistics=global,host,replica",
    ).ok()  # fmt: skip
    moving = {}
    for folder in ran.run_folders:
        # The state of all replicas of both processes is the same.
        assert len(weights_of(folder)) == 1
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

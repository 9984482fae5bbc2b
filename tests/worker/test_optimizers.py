"""Each of Keras's optimizers trains on two devices what it trains on one, with what all of them can be asked for."""

import contextlib
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import sampled

import pipeline
from pipeline import strategies
from pipeline.worker.tensorflow import step

# While tests are collected, before any of them runs an operation: devices cannot change afterwards.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(61, 6)).astype("float32")
Y = RANDOM.integers(0, 3, 61)
KINDS = (
    "SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Adafactor", "Ftrl", "Lion", "Lamb",
    "Muon",
)  # fmt: skip


@pytest.fixture(scope="module")
def mirrored() -> tf.distribute.Strategy:
    return strategies.mirrored(("CPU:0", "CPU:1"))


def trained(
    strategy: tf.distribute.Strategy, optimizer: Callable[[], keras.optimizers.Optimizer], policy: str = "float32"
) -> tuple[list[float], list[np.ndarray]]:
    """(losses, weights) after three epochs of four steps, of which the last has fewer examples."""
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((6,)),
            keras.layers.Dense(8, "relu", kernel_constraint="max_norm", dtype=policy),
            keras.layers.Dense(3, "softmax", dtype="float32"),
        ])  # fmt: skip
        model.compile(optimizer(), "sparse_categorical_crossentropy")
    history = pipeline.fit(model, X, Y, batch_size=16, epochs=3, verbose=0, shuffle=False)
    return history.history["loss"], [np.array(weight) for weight in model.get_weights()]


def assert_same(mirrored: tf.distribute.Strategy, *given: object) -> None:
    ours, reference = trained(mirrored, *given), trained(tf.distribute.get_strategy(), *given)
    np.testing.assert_allclose(ours[0], reference[0], atol=1e-6, rtol=0)
    for weight, one in zip(ours[1], reference[1], strict=True):
        np.testing.assert_allclose(weight, one, atol=1e-6, rtol=0)


@pytest.mark.slow
# Others in each run of CI.
@pytest.mark.parametrize("kind", sampled(KINDS, 4))
def test_it_trains_the_same_with_clipping_decay_and_averages_that_overwrite_weights(mirrored, kind):
    made = getattr(keras.optimizers, kind)
    assert_same(
        mirrored,
        lambda: made(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=5, clipnorm=0.5, weight_decay=0.01),
    )


@pytest.mark.parametrize(("frequency", "scaled"), [(None, False), (1, True), (7, False), (7, True)])
def test_averages_overwrite_weights_when_they_would_on_one_device_also_where_the_loss_is_scaled(
    mirrored, frequency, scaled
):
    def averaged() -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=frequency)

    assert_same(mirrored, (lambda: keras.optimizers.LossScaleOptimizer(averaged())) if scaled else averaged)
    assert averaged().get_config()["ema_overwrite_frequency"] == frequency


def schedule() -> keras.optimizers.schedules.LearningRateSchedule:
    return keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.7)


@pytest.mark.parametrize(
    ("make", "policy", "replicas"),
    [
        (lambda: keras.optimizers.Adam(0.01, beta_1=0.7, beta_2=0.95, epsilon=1e-5), "float32", 1),
        (lambda: keras.optimizers.AdamW(schedule(), weight_decay=0.1, global_clipnorm=0.5), "float32", 2),
        *(
            pytest.param(*others, marks=pytest.mark.slow)
            for others in (
                (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(use_ema=True)), "mixed_float16", 2),
                (lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3), "float64", 2),
            )
        ),
    ],
)
def test_adam_is_traced_in_fewer_operations_and_trains_the_same_to_the_last_bit(
    mirrored, monkeypatch, make, policy, replicas
):
    strategy = mirrored if replicas > 1 else tf.distribute.get_strategy()
    brief = trained(strategy, make, policy)
    monkeypatch.setattr(step, "traced_briefly", contextlib.nullcontext)
    as_keras_does = trained(strategy, make, policy)
    assert brief[0] == as_keras_does[0]
    for weight, other in zip(brief[1], as_keras_does[1], strict=True):
        np.testing.assert_array_equal(weight, other)


def test_adam_takes_less_than_half_of_the_operations_that_keras_has_it_take():
    optimizer = keras.optimizers.Adam()
    variables = [keras.Variable(np.ones(3, "float32")) for _ in range(8)]
    optimizer.build(variables)

    def operations() -> int:
        gradients = [tf.ones(3)] * len(variables)
        traced = tf.function(lambda: optimizer.apply(gradients, variables), autograph=False).get_concrete_function()
        return len(traced.graph.get_operations())

    usual = operations()
    with step.updating(optimizer):
        assert operations() < 0.6 * usual
    assert operations() == usual


def test_rows_of_an_embedding_are_updated_as_keras_updates_them(monkeypatch):
    def learnt() -> list[np.ndarray]:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([
            keras.Input((4,), dtype="int32"), keras.layers.Embedding(9, 5), keras.layers.Flatten(),
            keras.layers.Dense(3, "softmax"),
        ])  # fmt: skip
        model.compile("adam", "sparse_categorical_crossentropy")
        x = np.random.default_rng(5).integers(0, 9, (24, 4))
        pipeline.fit(model, x, Y[:24], batch_size=8, epochs=2, verbose=0, shuffle=False)
        return [np.array(weight) for weight in model.get_weights()]

    brief = learnt()
    monkeypatch.setattr(step, "traced_briefly", contextlib.nullcontext)
    for weight, other in zip(brief, learnt(), strict=True):
        np.testing.assert_array_equal(weight, other)

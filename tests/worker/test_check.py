"""Before training, replicas and one device make the same small step, and what differs is told; both train alike."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import looking
import numpy as np
import own
import pytest
import steps
import tensorflow as tf
import two_devices  # noqa: F401 # which are this process's
import whole
from conftest import QUICK, one_of, sampled
from keras import layers, ops
from loops import checked, loop_over
from tensorflow.python.distribute import mirrored_run

from pipeline import models
from pipeline.data import synthetic
from pipeline.record.findings import Check
from pipeline.worker.collective import Pausable
from pipeline.worker.data import batches
from pipeline.worker.tensorflow import build
from pipeline.worker.tensorflow.collective import over
from pipeline.worker.tensorflow.loop import Loop


def pausable(strategy: tf.distribute.Strategy, make: Callable[[], keras.Model], part: Any, **named: Any) -> Loop:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    return loop_over(make, part, strategy, 4, False, collective=Pausable(over(strategy)), **named)


def found_of(strategy: tf.distribute.Strategy, make: Callable[[], keras.Model], part: Any, **named: Any) -> Check:
    return checked(pausable(strategy, make, part, **named), part)


def compiled(model: keras.Model, loss: Any = "sparse_categorical_crossentropy", **named: Any) -> keras.Model:
    model.compile(**({"optimizer": "sgd", "loss": loss} | named))
    return model


def dense(*between: Any, shape: tuple[int, ...] = (6,), **named: Any) -> keras.Model:
    inside = [layers.Dense(8, activation="tanh"), *between, layers.Flatten(), layers.Dense(10, activation="softmax")]
    return compiled(keras.Sequential([keras.Input(shape), *inside]), **named)


NUMBERS, _ = looking.numbers()
POINTS, UNLABELLED = steps.points()[0], steps.points(labelled=False)[0]
CHANCE = np.random.default_rng(1)
PICTURES = CHANCE.uniform(size=(8, 16, 16, 3)).astype("float32"), (np.arange(8) % 10).astype("int32")
WORDS = CHANCE.integers(0, 20, (8, 7)), (np.arange(8) % 10).astype("int32")
WEIGHTED = (*NUMBERS, CHANCE.uniform(0.1, 2.0, 64).astype("float32"))
ONES = NUMBERS[0], (np.arange(64) % 2).astype("float32")


@keras.saving.register_keras_serializable("checks")
class Noisy(layers.Layer):
    """Draws in ways that TensorFlow and NumPy have, from generators of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.seeds = how, keras.random.SeedGenerator(3)
        self.numbers = tf.random.Generator.from_seed(1) if how == "generator" else None

    def call(self, x: Any) -> Any:
        shape = ops.shape(x)
        drawn = {
            "keras": lambda: keras.random.normal(shape, seed=self.seeds),
            "tensorflow": lambda: tf.random.normal(shape) + tf.random.uniform(shape),
            "whole": lambda: tf.cast(tf.random.uniform(shape, 1, 3, tf.int32), x.dtype),
            "gamma": lambda: tf.random.gamma([], tf.ones_like(x)),
            "generator": lambda: self.numbers.normal(shape),
            "numpy": lambda: tf.reshape(
                tf.numpy_function(lambda n: np.random.normal(size=n), [shape], "double"), shape
            ),
        }
        return x + tf.cast(drawn[self.how](), x.dtype)


def attention() -> keras.Model:
    words = keras.Input((7,), dtype="int64")
    x = layers.Embedding(20, 8, mask_zero=True)(words)
    x = layers.MultiHeadAttention(2, 4, dropout=0.3)(x, x) + x
    x = layers.LayerNormalization()(x)
    x = layers.LSTM(6, dropout=0.2, recurrent_dropout=0.2, return_sequences=True)(x)
    x = layers.GlobalAveragePooling1D()(layers.Bidirectional(layers.GRU(4, return_sequences=True))(x))
    return compiled(keras.Model(words, layers.Dense(10, activation="softmax")(x)), metrics=["accuracy"])


def pictures(*first: Any) -> keras.Model:
    return compiled(keras.Sequential([
        keras.Input((16, 16, 3)), *first, layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(),
        layers.SpatialDropout2D(0.2), layers.SeparableConv2D(8, 3, strides=2), layers.GroupNormalization(2),
        layers.Conv2D(8, 3, use_bias=True), layers.BatchNormalization(), layers.GlobalAveragePooling2D(),
        layers.Dense(10, activation="softmax", kernel_regularizer="l2"),
    ]), optimizer="adam", metrics=["accuracy"])  # fmt: skip


VARIED = (
    layers.RandomFlip(), layers.RandomRotation(0.2), layers.RandomZoom(0.2), layers.RandomContrast(0.2),
    layers.RandomBrightness(0.2, value_range=(0, 1)), layers.RandomTranslation(0.1, 0.1), layers.RandomCrop(14, 14),
    layers.Resizing(16, 16), layers.GaussianNoise(0.1), layers.Rescaling(2.0),
)  # fmt: skip

# Models that replicas train as one device does, and their data.
EQUAL: dict[str, Callable[[], tuple[keras.Model, Any]]] = {
    "cnn": lambda: (models.cnn(input_shape=(16, 16, 3), num_classes=10), PICTURES),
    "mlp": lambda: (models.mlp(input_shape=(6,), num_classes=10), NUMBERS),
    "dropouts": lambda: (dense(layers.Dropout(0.5), layers.AlphaDropout(0.2), layers.GaussianDropout(0.3),
                               layers.GaussianNoise(0.5)), NUMBERS),
    "sums": lambda: (dense(layers.ActivityRegularization(l2=0.01), layers.SpectralNormalization(layers.Dense(4)),
                           metrics=[whole.Largest(start=0.0)]), NUMBERS),
    "pictures": lambda: (pictures(), PICTURES),
    "varied": lambda: (pictures(*[type(made).from_config(made.get_config()) for made in VARIED]), PICTURES),
    "words": lambda: (attention(), WORDS),
    "weights": lambda: (dense(weighted_metrics=["accuracy"], optimizer="adamw"), WEIGHTED),
    **{f"two, {way}": lambda way=way: (own.two_headed(way), own.two_headed_data(64, weighted=True)[0])
       for way in ("sum_over_batch_size", "sum", "mean_with_sample_weight")},
    "metrics": lambda: (compiled(keras.Sequential([keras.Input((6,)), layers.Dense(1, activation="sigmoid")]),
                                 "binary_crossentropy", metrics=["auc", "precision", "recall", "accuracy",
                                                                 keras.metrics.F1Score(threshold=0.5)]),
                        (ONES[0], ONES[1][:, None])),
    "own gan": lambda: (steps.gan(keras.layers.BatchNormalization()), UNLABELLED),
    "noise": lambda: (dense(*map(Noisy, ("keras", "tensorflow", "whole", "gamma", "generator", "numpy"))), NUMBERS),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [*sampled([name for name in EQUAL if name != "words"], 4), pytest.param("words", marks=pytest.mark.slow)],
)
def test_nothing_is_told_of_models_that_are_equal(name: str, mirrored):
    found = found_of(mirrored, lambda: EQUAL[name]()[0], EQUAL[name]()[1])
    assert (found.outcome, found.differences) == ("equal", []), found


# What is told of a layer, and where it begins.
OUTPUT = "layer looking, which does not treat each example by itself. Try a layer that does"
STATE = "looking/mean is assigned from each replica's own part of the batch. Try keras.layers.BatchNormalization"
FOUND = {
    **dict.fromkeys(("batch softmax", "own normalization", "minibatch", "shared"), ("output", "looking", OUTPUT)),
    **dict.fromkeys(("running mean", "averaged mean", "raw mean"), ("state", "looking", STATE)),
    "running maximum": ("state", "looking", "looking/largest is assigned from each replica's own part of the batch."),
    "weighed": ("gradient", "", "a gradient is made of a replica's part of the batch as a whole, at before/bias or "),
}
# A model that replicas train otherwise than one device, its data, and what is told first: its kind, name and cause.
DIFFERENT: dict[str, tuple[Callable[[], keras.Model], Any, str, str, str]] = {
    # What draws numbers hides nothing; that nothing else is needed is shown by one of them.
    **{layer: (partial(looking.model, layer, dropout=0.5), NUMBERS, *told) for layer, told in FOUND.items()},
    "batch softmax alone": (partial(looking.model, "batch softmax"), NUMBERS, "output", "looking", OUTPUT),
    "condition": (partial(looking.model, "condition"), NUMBERS, "output", "looking", OUTPUT),
    "own pairs": (partial(steps.classifier, "of_pairs"), POINTS, "loss", "loss", "no mean over examples, such as one"),
    "own running mean": (partial(steps.classifier, "centred", steps.Centred), POINTS, "state", "centre",
                         "is assigned from each replica's own part of"),
    "own minibatch": (lambda: steps.gan(looking.Looking("minibatch", name="looking")), UNLABELLED, "output",
                      "looking", "It begins in layer looking, which does not treat each example by itself"),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(list(DIFFERENT), 4))
def test_a_model_that_looks_at_its_batch_is_found_and_what_does_is_named(name: str, mirrored):
    make, part, what, named, words = DIFFERENT[name]
    found = found_of(mirrored, make, part)
    assert (found.outcome, found.noted) == ("different", False), found
    first, *_ = found.differences
    assert (first.what, named in first.name, first.relative > 0.01) == (what, True, True)
    assert words in f"{found.cause} {found.advice}"
    assert "train.check=off" in found.advice


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_loss_over_pairs_is_found_and_gathering_offered_which_makes_it_equal(dropout: float, mirrored):
    found = found_of(mirrored, lambda: looking.model(loss="pairs", dropout=dropout), NUMBERS)
    loss, *others = found.differences
    # A note tells of it already.
    assert found.noted
    assert (loss.what, loss.name) == ("loss", "loss")
    assert abs(loss.replicas - loss.one_device) > 0.1
    assert {difference.name for difference in others} >= {"before/kernel", "after/kernel"}
    assert "the loss is no mean over examples" in found.cause
    assert found.advice.startswith("Try train.gather=true")
    assert f"loss {loss.replicas:.4g} in place of {loss.one_device:.4g}, gradient of before/kernel by" in found.said(2)
    gathered = found_of(mirrored, lambda: looking.model(loss="pairs", dropout=dropout), NUMBERS, gather=True)
    assert gathered.outcome == "equal"


def test_threads_of_replicas_are_waited_for_no_longer_than_they_live(mirrored, monkeypatch):
    wait_for_stop, waits = tf.train.Coordinator.wait_for_stop, []

    def noted(coordinator: tf.train.Coordinator, timeout: float) -> bool:
        waits.append(timeout)
        return wait_for_stop(coordinator, timeout)

    monkeypatch.setattr(tf.train.Coordinator, "wait_for_stop", noted)
    # They may have ended before anybody looks.
    alive = mirrored_run._MirroredReplicaThread.is_alive
    monkeypatch.setattr(mirrored_run._MirroredReplicaThread, "is_alive", lambda one: not waits or alive(one))
    assert found_of(mirrored, dense, NUMBERS).outcome == "equal"
    assert waits
    assert max(waits) < 0.1


def test_a_step_that_forgets_an_exchange_is_found_by_its_gradients_loss_and_metrics(mirrored, monkeypatch):
    class Forgetting(Pausable[Any]):
        """Adds up nothing of the other replicas, whatever it was asked."""

        def sum(self, arrays: Any) -> Any:
            return list(arrays)

    loop = pausable(mirrored, looking.model, NUMBERS)
    forgets = Forgetting(over(mirrored))
    found = checked(loop, NUMBERS, forgets)
    assert {difference.what for difference in found.differences} == {"loss", "gradient"}
    monkeypatch.setattr(loop, "metrics", lambda: {"accuracy": 0.75})
    found = checked(loop, NUMBERS)
    (metric,) = found.differences
    assert (metric.what, metric.name, metric.replicas) == ("metric", "accuracy", 0.75)
    assert "What accuracy keeps is not added up over replicas" in found.cause


@pytest.mark.slow
def test_mixed_precision_is_no_difference_and_hides_none(mirrored):
    policy = one_of(("mixed_bfloat16", "mixed_float16"))
    keras.config.set_dtype_policy(policy)
    try:
        for name in ("dropouts", "pictures", "words"):
            found = found_of(mirrored, lambda name=name: EQUAL[name]()[0], EQUAL[name]()[1])
            assert found.outcome == "equal", (policy, name)
        for layer in ("batch softmax", "running mean"):
            told = found_of(mirrored, lambda layer=layer: looking.model(layer), NUMBERS)
            assert told.outcome == "different", (policy, layer)
    finally:
        keras.config.set_dtype_policy("float32")


def trained(strategy: tf.distribute.Strategy, make: Any, labelled: bool) -> Any:
    """(the model, what each epoch came to, losses of all steps); the last batch of 40 leaves a replica without any."""
    keras.utils.set_random_seed(0)
    train, held_out = steps.points(labelled=labelled)
    loop = loop_over(make, train, strategy, 13, seed=0, held_out=held_out, collective=Pausable(over(strategy)))
    assert loop.own is not None
    if strategy.num_replicas_in_sync > 1:
        found = checked(loop, train)
        assert (found.outcome, found.unsaid, found.differences) == ("equal", "", [])
    epochs, losses = [], []
    for _ in range(3):
        loop.reset_metrics()
        call = loop.call(loop.steps_per_epoch)
        losses += call.losses[:, 0].tolist()
        epochs.append(loop.metrics() | {f"val_{name}": value for name, value in loop.evaluate(2, print).items()})
    return loop.model, epochs, losses


SEPARABLE = {
    "gan": (lambda: steps.gan(noisy=False), False),
    "gan with batch normalization": (lambda: steps.gan(keras.layers.BatchNormalization(), noisy=False), False),
    "distiller": (steps.distiller, True),
    "keras's own step": (steps.by_keras, True),
    **{way: (partial(steps.classifier, way), True) for way in (
        "at_once", "persistent", "in_functions", "summed_loss", "averaged_by_hand", "clipped", "by_jacobian",
        "sharpness_aware", "several_times", "by_results", "penalized",
    )},
}  # fmt: skip


def test_a_sum_over_examples_is_told_and_a_mean_or_what_is_drawn_is_not(mirrored):
    said: list[str] = []
    put_right = partial(steps.classifier, "summed_loss")
    for make in (steps.gan, steps.distiller, steps.classifier, put_right):
        build.model(make, mirrored, batches.spec(UNLABELLED if make is steps.gan else POINTS), note=said.append)
    assert said == []
    build.model(partial(steps.classifier, "summed_by_hand"), mirrored, batches.spec(POINTS), note=said.append)
    assert len(said) == 1
    assert "received a sum in that of Classifier" in said[0]
    found = found_of(mirrored, partial(steps.classifier, "summed_by_hand"), POINTS)
    assert (found.outcome, found.noted) == ("different", True)


def test_what_a_compile_of_its_own_was_given_is_kept_and_nothing_else_is_taken(mirrored):
    class Student(keras.Sequential):
        def compile(self, optimizer, student_loss):
            super().compile(optimizer=optimizer, loss=student_loss)

    def student():
        model = Student([keras.layers.Dense(3)])
        model.compile("adagrad", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    spec = batches.spec(POINTS)
    assert isinstance(build.model(student, mirrored, spec).optimizer, keras.optimizers.Adagrad)
    with pytest.raises(build.ModelError, match=r"Student, whose compile is its own.*received train\.optimizer\."):
        build.model(student, mirrored, spec, "sgd")
    with pytest.raises(build.ModelError, match="received one that is not compiled"):
        build.model(lambda: Student([keras.layers.Dense(3)]), mirrored, spec)


@pytest.mark.parametrize("kind", [*sampled([kind for kind in SEPARABLE if kind != "several_times"], 1),
                                  pytest.param("several_times", marks=pytest.mark.slow)])  # fmt: skip
def test_two_replicas_train_what_one_device_trains_and_the_check_before_tells_and_changes_nothing(kind, mirrored):
    make, labelled = SEPARABLE[kind]
    one, one_epochs, one_losses = trained(tf.distribute.get_strategy(), make, labelled)
    two, two_epochs, two_losses = trained(mirrored, make, labelled)
    assert one_losses == pytest.approx(two_losses, rel=1e-5, abs=1e-5)
    for ours, reference in zip(two.variables, one.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), reference.numpy(), atol=1e-5, err_msg=ours.path)
    for ours, reference in zip(two_epochs, one_epochs, strict=True):
        assert ours == pytest.approx(reference, rel=1e-5, abs=1e-5)


# Of each family the smallest, and the least pixels on a side that it takes.
FAMILIES = {
    "VGG16": 32, "ResNet50": 32, "ResNet50V2": 32, "Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75,
    "MobileNet": 32, "MobileNetV2": 32, "MobileNetV3Small": 32, "DenseNet121": 32, "NASNetMobile": 32,
    "EfficientNetB0": 32, "EfficientNetV2B0": 32, "ConvNeXtTiny": 32,
}  # fmt: skip
# Of so many layers that each takes minutes.
DEEP = ("DenseNet121", "InceptionResNetV2", "NASNetMobile")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*sampled([name for name in FAMILIES if name not in DEEP], 1), *sampled(DEEP, 0)])
def test_models_of_keras_applications_train_on_two_replicas_and_are_saved(pipeline, name):
    shape = [FAMILIES[name], FAMILIES[name], 3]
    data = {"shape": shape, "num_classes": 2, "train_examples": 6, "validation_examples": 2}
    ran = pipeline(
        *QUICK, "strategy=mirrored", "workers=2", f"model.build._target_=keras.applications.{name}",
        "+model.build.weights=null", "+model.build.classes=2", "data=synthetic",
        *(f"data.build.{key}={value}" for key, value in data.items()), "train.replica_batch=1", "train.epochs=1",
        "train.learning_rate=0.0001", timeout=600,
    ).ok()  # fmt: skip
    (folder,) = ran.run_folders
    _, (x, y) = synthetic(**data)
    loaded = keras.saving.load_model(folder / "model.keras")
    assert loaded.evaluate(x, y, verbose=0, return_dict=True)["loss"] == pytest.approx(ran.result["val_loss"], rel=1e-4)

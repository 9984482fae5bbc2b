"""A model is built, with all that it was compiled with, by no more calls than that takes."""

from typing import Any

import keras
import mistaken
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import pipeline
from pipeline.worker.compiling import compile_chosen
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow import build


class Counted(layers.Layer):
    """Counts in how many calls of the model it is."""

    calls = 0

    def call(self, x: Any) -> Any:
        Counted.calls += 1
        return x


class Subclassed(keras.Model):
    """A model whose outputs nothing names before it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = keras.Sequential([Counted(), layers.Dense(3)])

    def call(self, x: Any) -> Any:
        return self.inside(x)


def compiled(model: keras.Model, loss: Any = "mse", **named: Any) -> keras.Model:
    model.compile("adam", loss, **named)
    return model


def functional() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, layers.Dense(3)(Counted()(inputs)))


def sequential() -> keras.Model:
    return keras.Sequential([keras.Input((4,)), Counted(), layers.Dense(3)])


@pytest.mark.parametrize(("make", "is_called"), [(functional, False), (sequential, False), (Subclassed, True)])
def test_a_model_that_names_its_outputs_is_not_called_to_build_its_losses_and_metrics(make, is_called):
    model = compiled(make(), metrics=["mae", "accuracy"], weighted_metrics=["mse"])
    Counted.calls = 0
    build.ready(model, tf.distribute.get_strategy(), (tf.zeros((2, 4)), tf.zeros((2, 3))), build.ALONE)
    assert bool(Counted.calls) is is_called
    assert model.optimizer.built
    assert model._compile_loss.built
    assert len(model.metrics_variables) == 8


def test_an_input_of_another_shape_is_refused_when_it_is_built():
    batch = tf.zeros((2, 5)), tf.zeros((2, 3))
    with pytest.raises((ValueError, ModelError), match="4"):
        build.ready(compiled(functional()), tf.distribute.get_strategy(), batch, build.ALONE)


def test_a_model_that_takes_batches_of_one_size_alone_is_refused_with_what_to_try():
    def of_one_size() -> keras.Model:
        inner = [layers.LSTM(4, stateful=True), layers.Dense(1)]
        return compiled(keras.Sequential([keras.Input(batch_shape=(8, 5, 3)), *inner]))

    words = r"any size, .* received one that takes 8 alone .* Try keras\.Input\(shape\) .* stateful=False"
    x, y = np.zeros((16, 5, 3), "float32"), np.zeros((16, 1), "float32")
    with pytest.raises(ModelError, match=words):
        build.model(of_one_size, tf.distribute.get_strategy(), (tf.constant(x[:2]), tf.constant(y[:2])))
    with pytest.raises(ModelError, match=words):
        pipeline.fit(of_one_size(), x, y, batch_size=8, verbose=0)


def with_an_output_more() -> keras.Model:
    inputs = keras.Input((4,))
    outputs = {name: layers.Dense(2, name=name)(inputs) for name in ("kept", "more")}
    return compiled(keras.Model(inputs, outputs), {"kept": "mse"}, metrics={"kept": "mae"})


def in_half() -> keras.Model:
    half = layers.Dense(5, activation="softmax", dtype="mixed_bfloat16")
    metric = keras.metrics.SparseTopKCategoricalAccuracy(2)
    return compiled(keras.Sequential([keras.Input((4,)), half]), "sparse_categorical_crossentropy", metrics=[metric])


def beside_the_labels(y: Any, y_pred: Any) -> Any:
    return keras.ops.concatenate([y, y_pred], axis=2)


NUMBERS = np.zeros((16, 3), "float32")
MISTAKES = {
    "an output without labels": (
        with_an_output_more, {"kept": np.zeros((16, 2), "float32")},
        "KeyError: 'more'.* from those of Functional\\. Try labels for the output more too, or a model",
    ),
    "a metric in half": (
        in_half, np.zeros(16, "int32"),
        'TypeError: .* from those of Sequential. Try dtype="float32" in the layers that make outputs',
    ),
    "a call": (
        lambda: compiled(mistaken.Unfinished()), NUMBERS,
        "AttributeError: .*head.* from those of Unfinished. Try it on one batch",
    ),
    "a metric": (
        lambda: compiled(functional(), metrics=[beside_the_labels]), NUMBERS,
        "ValueError: .* from those of Functional. Try it on one batch with",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_takes_no_batch_of_the_data_is_said_in_one_sentence(mistake):
    make, y, words = MISTAKES[mistake]
    x = np.zeros((16, 4), "float32")
    batch = keras.tree.map_structure(lambda array: tf.constant(array[:2]), (x, y))
    with pytest.raises(ModelError, match=f"^{words}"):
        build.model(make, tf.distribute.get_strategy(), batch)
    with pytest.raises(ModelError, match=f"^{words}"):
        pipeline.fit(make(), x, y, batch_size=8, verbose=0)


@pytest.mark.parametrize(("loss", "metrics", "wanted"), [
    (None, None, {"loss": 4.5, "mae": 3.0}),
    ("mae", None, {"loss": 3.0, "mae": 3.0}),
    (None, ["mse"], {"loss": 4.5, "mse": 9.0}),
    ("mae", ["mse"], {"loss": 3.0, "mse": 9.0}),
])  # fmt: skip
def test_a_saved_model_evaluates_as_it_was_trained(tmp_path, loss, metrics, wanted):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="ones")])
    compile_chosen(compiled(model, loss_weights=0.5, metrics=["mae"]), "sgd", None, loss, metrics)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for one in (model, loaded):
        assert one.evaluate(np.ones((8, 3)), np.zeros((8, 1)), verbose=0, return_dict=True) == pytest.approx(wanted)
    assert isinstance(loaded.optimizer, keras.optimizers.SGD)


class Derived(keras.Sequential):
    """A model whose `compute_metrics` returns a number that no metric has, and whose `fit` is its own."""

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        return {**results, "twice": 2 * results["loss"]}

    def fit(self, *args: Any, **named: Any) -> Any:
        return super().fit(*args, **named)


class Returned(Derived):
    """The same, with that number among the results of its metrics."""

    def get_metrics_result(self) -> Any:
        results = super().get_metrics_result()
        return {**results, "twice": 2 * results["loss"]}


@pytest.mark.parametrize(("kind", "named"), [(Derived, {"fit", "twice"}), (Returned, {"fit"})])
def test_what_a_models_class_does_to_no_effect_is_noted(kind, named):
    model, notes = compiled(kind([keras.Input((4,)), layers.Dense(3)])), list[str]()
    build.ready(model, tf.distribute.get_strategy(), (tf.zeros((2, 4)), tf.zeros((2, 3))), build.ALONE, notes.append)
    assert {name for name in ("fit", "twice") if any(f" {name} " in note for note in notes)} == named
    assert len(notes) == len(named)

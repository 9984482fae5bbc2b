"""What docs/equal.md says to be equal to one device is, row by row, and so are drawn models and Keras's optimizers.

What the page says not to be equal is tested where it says.
"""

import ast
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ROOT, sampled
from loops import assert_same, assert_same_weights, by_keras, fitted
from two_devices import DEVICES

from pipeline import strategies
from pipeline.worker.compiling import compile_chosen
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow.loss_scaling import updates

PAGE = (ROOT / "docs" / "equal.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
# Of the examples that layers are tried on.
SHAPES = {
    "vectors": ("numbers", (4,)),
    "series": ("numbers", (4, 3)),
    "images": ("numbers", (5, 5, 2)),
    "words": ("words", (4,)),
    "padded series": ("padded", (4, 3)),
}
BENCHMARKS = ROOT / "benchmarks"
# What differed once, each made as small as it could be; a name begins with the strategy.
KEPT = sorted((Path(__file__).parent / "cases").glob("*.json"))
# The same cases each time; others are for `benchmarks/differential.py`, for hours.
SEED = 7
CLASSES, HEADS = 3, {"numbers": "Dense(2)", "classes": "Dense(3)", "one-hot": "Dense(3, activation='softmax')",
                     "binary": "Dense(2, activation='sigmoid')"}  # fmt: skip


def rows(section: str) -> list[tuple[list[str], str]]:
    """(what is in backquotes in the first column, the second column) of each row of a section's table."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in SECTIONS[section].splitlines()
             if line.startswith("| `")]  # fmt: skip
    return [(re.findall(r"`(.+?)`", first), second) for first, second, *_ in found]


def words(section: str) -> list[str]:
    """All that is in backquotes in the first column."""
    return [one for found, _ in rows(section) for one in found]


@pytest.fixture(scope="module")
def differing(tmp_path_factory):
    """What trains a case on one device and on two replicas of a strategy, and judges whether they are equal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, BENCHMARKS))))
        compared, pair = (importlib.import_module(f"differing.{name}") for name in ("compared", "pair"))
        pairs = {}

        def judged(case, strategy="mirrored"):
            if strategy not in pairs:
                pairs[strategy] = pair.Pair(strategy, tmp_path_factory.mktemp("pair"))
            return compared.judged(case, pairs[strategy])

        yield judged
        for one in pairs.values():
            one.end()


def output(of: int, labels: str, **settings):
    """An output of a value for labels of a kind; by default numbers, under the mean squared error."""
    from differing.case import Output

    shape = {"numbers": (2,), "classes": (), "one-hot": (3,), "binary": (2,)}[labels]
    loss = {
        "numbers": "MeanSquaredError()",
        "classes": "SparseCategoricalCrossentropy(from_logits=True)",
        "one-hot": "CategoricalCrossentropy()",
        "binary": "BinaryCrossentropy()",
    }[labels]
    made = Output((f"keras.layers.{HEADS[labels]}",), of, labels, shape, CLASSES, f"keras.losses.{loss}", 1.0, (), ())
    return replace(made, **settings)


def case(**settings):
    """A small training of one dense layer, of which some settings are others."""
    from differing.case import Case, Input, Layer

    base = Case(
        (Input("numbers", (4,)),), (Layer('keras.layers.Dense(4, activation="tanh")', (0,)),), (output(1, "numbers"),),
        "keras.optimizers.SGD(0.1)", (), batch=8, examples=19, validation_examples=5, epochs=2, steps_per_call=2,
        weights=None, data="arrays", seed=3,
    )  # fmt: skip
    return replace(base, **settings)


def assert_equal(judged) -> None:
    assert judged.verdict.name in ("EQUAL", "WITHIN_NOISE"), judged.words


def test_the_page_says_the_digits_that_are_compared(differing):
    from differing.compared import TOLERANCE

    assert set(map(float, re.findall(r"\d?e-\d+", PAGE.partition("<!-- figures:")[0]))) == {TOLERANCE}


@pytest.mark.slow
@pytest.mark.parametrize("of", SHAPES)
def test_layers_of(of, differing):
    from differing.case import Input, Layer

    named = [one for found, second in rows("Layers") if second == of for one in found]
    named = sampled(named, (len(named) + 1) // 2)
    layers, ends = [], []
    for one in named:
        values = (0, 0) if one.startswith("MultiHeadAttention") else (0,)
        for word, inputs in ((one, values), ("Flatten()", (len(layers) + 1,)), ("Dense(2)", (len(layers) + 2,))):
            layers.append(Layer(f"keras.layers.{word}", inputs))
        ends.append(len(layers))
    if len(ends) > 1:
        layers.append(Layer("keras.layers.Average()", tuple(ends)))
    kind, shape = SHAPES[of]
    assert_equal(differing(case(
        # The last batch leaves a replica without examples.
        inputs=(Input(kind, shape),), layers=tuple(layers), outputs=(output(len(layers), "numbers"),), examples=17
    )))  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("labels", HEADS)
def test_losses_and_metrics_of(labels, differing):
    losses, metrics = (
        [one if one[0].islower() else f"keras.{section.lower()}.{one}"
         for found, second in rows(section) if second == labels for one in found]
        for section in ("Losses", "Metrics")
    )  # fmt: skip
    assert losses
    assert metrics
    outputs = [output(1, labels, loss=loss) for loss in losses]
    outputs[0] = replace(outputs[0], metrics=tuple(metrics), weighted_metrics=tuple(metrics[:1]))
    assert_equal(differing(case(outputs=tuple(outputs), weights="drawn")))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    *({"optimizer": f"keras.optimizers.{one}"} for one in sampled(words("Optimizers"), 3)),
    *({"callbacks": tuple(f"keras.callbacks.{one}" for one in found), "epochs": 4} for found, _ in rows("Callbacks")),
    *({found.arg: ast.literal_eval(found.value) for found in ast.parse(f"dict({data})").body[0].value.keywords}
      for data in sampled(words("Data"), 3)),
], ids=str)  # fmt: skip
def test_optimizers_callbacks_and_data(settings, differing):
    assert_equal(differing(case(**settings)))


@pytest.mark.parametrize("name", re.findall(r"`(tests/\S+::\S+)`", PAGE))
def test_what_is_not_equal_is_tested_where_the_page_says(name):
    path, _, function = name.partition("::")
    defined = [node.name for node in ast.parse((ROOT / path).read_text()).body if isinstance(node, ast.FunctionDef)]
    assert function in defined


@pytest.mark.slow
def test_what_differed_once_is_equal_or_refused_in_words(differing):
    from differing import case

    for path in KEPT:
        strategy = "multi_worker" if path.stem.startswith("multi_worker") else "mirrored"
        judged = differing(case.from_json(path.read_text()), strategy)
        assert judged.verdict.name in ("EQUAL", "TOLD"), (path.stem, judged.words)


@pytest.mark.slow
def test_models_that_are_drawn_train_what_one_device_trains(tmp_path):
    said = subprocess.run(
        [sys.executable, str(BENCHMARKS / "differential.py"), f"--seed={SEED}", "--count=4", "--json=found.json"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        timeout=1_500,
    )  # fmt: skip
    assert said.returncode == 0, said.stdout + said.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert rows.keys() == {"mirrored", "multi_worker"}
    for row in rows.values():
        assert sum(row["verdicts"].values()) == 4
        # Else it would be of no use: what is drawn is trained.
        assert row["verdicts"]["equal"] > 2


RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(61, 6)).astype("float32")
Y = RANDOM.integers(0, 3, 61)
FIT = {"x": X, "y": Y, "batch_size": 16, "epochs": 3}


def layers(policy: str = "float32") -> keras.Model:
    return keras.Sequential([
        keras.Input((6,)),
        keras.layers.Dense(8, "relu", kernel_constraint="max_norm", dtype=policy, name="body"),
        keras.layers.Dense(3, "softmax", dtype="float32", name="head"),
    ])  # fmt: skip


def with_optimizer(make, change=lambda model: None, policy="float32", of=layers):
    """A model with the optimizer that is made for its layers."""
    model = of(policy)
    model.compile(make(model), "sparse_categorical_crossentropy")
    change(model)
    return model


def assert_trained_as_by_keras(mirrored, make, callbacks=list, change=lambda model: None, reference=None):
    """Expects two replicas to train what Keras trains with the optimizer that `reference`, or `make`, makes."""

    def build(model):
        # As Keras does under a strategy: on one device a callback sees a function's optimizers from the first step on.
        model.optimizer.build(model.trainable_variables)

    expected, theirs = by_keras(lambda: with_optimizer(reference or make, build), FIT | {"callbacks": callbacks()})
    model, ours = fitted(lambda: with_optimizer(make, change), FIT | {"callbacks": callbacks()}, mirrored)
    assert_same(ours, theirs, 1e-5)
    assert_same_weights(model, expected)


class Slowed(keras.optimizers.SGD):
    """One that does not say all that it is made with, and is told more when it is there."""

    slowing, signs = 1.0, False

    def update_step(self, gradient, variable, learning_rate):
        gradient = keras.ops.sign(gradient) if self.signs else gradient
        super().update_step(gradient, variable, learning_rate / self.slowing)


def without_decay(rate: float, model: keras.Model, of_layer: bool) -> keras.optimizers.Optimizer:
    made = keras.optimizers.AdamW(rate, weight_decay=0.5, epsilon=1e-3)
    made.exclude_from_weight_decay(model.layers[0].trainable_variables if of_layer else None, ["bias"])
    return made


def slowed(rate: float, model: keras.Model) -> keras.optimizers.Optimizer:
    made = Slowed(rate, momentum=0.5)
    made.slowing, made.signs = 4.0, True
    return made


def scaled(rate: float, model: keras.Model) -> keras.optimizers.Optimizer:
    inner = keras.optimizers.SGD(rate, momentum=0.9)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=2)


def begun(rate: object, model: keras.Model) -> keras.optimizers.Optimizer:
    made = keras.optimizers.Adam(rate)
    made.build(model.trainable_variables)
    for variable in filter(lambda one: "velocity" in one.path, made.variables):
        variable.assign(keras.ops.ones(variable.shape))
    return made


# How an optimizer is made, and its rate.
MADE = {
    "names left out": (partial(without_decay, of_layer=False), 0.5), "own": (slowed, 0.5), "scaling": (scaled, 0.5),
    "variables left out": (partial(without_decay, of_layer=True), 0.5), "begun": (begun, 0.5),
    "scheduled": (begun, keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.7)), "called": (begun, lambda: 0.5),
}  # fmt: skip


@pytest.mark.parametrize("kind", sampled(list(MADE), 2))
def test_a_learning_rate_that_is_asked_for_changes_nothing_else_of_an_optimizer(mirrored, kind):
    make, rate = MADE[kind]

    def change(model: keras.Model) -> None:
        before = model.optimizer
        compile_chosen(model, None, 0.01, None, None)
        assert model.optimizer is before

    def at(rate: object) -> Callable[[keras.Model], keras.optimizers.Optimizer]:
        return lambda model: make(rate, model=model)

    assert_trained_as_by_keras(mirrored, at(rate), change=change, reference=at(0.01))


def test_an_optimizer_whose_schedule_gave_way_to_a_rate_is_saved_and_loaded_with_its_state(tmp_path):
    model = layers()
    model.compile(begun(keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.7), model), "mse")
    compile_chosen(model, None, 0.01, None, None)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").optimizer
    for one, other in zip(loaded.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_model_that_was_not_to_scale_its_loss_does_not():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        model.compile("sgd", "mse", auto_scale_loss=False)
        compile_chosen(model, None, 0.01, None, None)
        assert isinstance(model.optimizer, keras.optimizers.SGD)
        compile_chosen(model, "adam", 0.01, None, None)
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    finally:
        keras.config.set_dtype_policy("float32")


def two_rates(model: keras.Model) -> keras.optimizers.Optimizer:
    body, head = keras.optimizers.SGD(0.01, name="slow"), keras.optimizers.SGD(0.2, momentum=0.9, name="fast")
    return keras.optimizers.MultiOptimizer(lambda variable: body if "body" in variable.path else head)


def one_each(model: keras.Model) -> keras.optimizers.Optimizer:
    # One for each variable, made when the optimizer is built.
    return keras.optimizers.MultiOptimizer(
        lambda variable: keras.optimizers.Adam(0.05 if "bias" in variable.path else 0.01, name=variable.name)
    )


def by_names(model: keras.Model) -> keras.optimizers.Optimizer:
    averaged = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=3, name="averaged")
    several = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, name="several")
    idle = keras.optimizers.Lion(0.1, name="idle")
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(idle, {".*body/.*": averaged, ".*head/.*": several})
    )


def reducing() -> list[keras.callbacks.Callback]:
    return [keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=1.0)]


def averaging(kind: str, frequency: int | None, scaled: bool, model: keras.Model) -> keras.optimizers.Optimizer:
    averages = {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": frequency}
    made = getattr(keras.optimizers, kind)(0.01, clipnorm=0.5, weight_decay=0.01, **averages)
    return keras.optimizers.LossScaleOptimizer(made) if scaled else made


ACCUMULATED = keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=3)
AVERAGED = keras.optimizers.AdamW(0.01, weight_decay=0.1, clipnorm=0.5, gradient_accumulation_steps=2, use_ema=True,
                                  ema_momentum=0.8, ema_overwrite_frequency=2)  # fmt: skip
SCALED = keras.optimizers.LossScaleOptimizer(
    keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, use_ema=True), initial_scale=8.0
)


def again(made: keras.optimizers.Optimizer) -> Callable[[keras.Model], keras.optimizers.Optimizer]:
    return lambda model: type(made).from_config(made.get_config())


OPTIMIZERS = {
    "two": (two_rates, reducing, DEVICES), "by names": (by_names, reducing, DEVICES),
    "one each": (one_each, lambda: [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5)], DEVICES),
    "scaled together": (lambda model: keras.optimizers.LossScaleOptimizer(two_rates(model)), list, DEVICES),
    "accumulated on one": (again(ACCUMULATED), list, DEVICES[:1]), "averages": (again(AVERAGED), list, DEVICES),
    "scaled": (again(SCALED), list, DEVICES),
    # The others are rows of docs/equal.md.
    **{" ".join(map(str, one)): (partial(averaging, *one), list, DEVICES) for one in (
        ("SGD", None, False), ("SGD", 1, True), ("SGD", 7, False), ("SGD", 7, True),
        ("Lion", 5, False), ("Muon", 5, False),
    )},
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(list(OPTIMIZERS), 3))
def test_several_optimizers_accumulated_gradients_and_averages_train_what_they_do_in_keras(name):
    make, callbacks, devices = OPTIMIZERS[name]
    assert_trained_as_by_keras(strategies.mirrored(devices), make, callbacks)
    with pytest.raises(ModelError, match=r"received MultiOptimizer.*Try these rates as arguments of model.build"):
        compile_chosen(layers(), two_rates(layers()), 0.1, None, None)


def embedded(policy: str) -> keras.Model:
    inner = [keras.layers.Embedding(9, 5), keras.layers.Flatten(), keras.layers.Dense(3, "softmax")]
    return keras.Sequential([keras.Input((4,), dtype="int32"), *inner])


WORDS = {"x": np.random.default_rng(5).integers(0, 9, (24, 4)), "y": Y[:24], "batch_size": 8, "epochs": 2}


@pytest.mark.parametrize(("make", "policy", "replicas", "of", "data"), [
    (lambda: keras.optimizers.Adam(0.01, beta_1=0.7, beta_2=0.95, epsilon=1e-5), "float32", 1, layers, FIT),
    (lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.7), weight_decay=0.1,
                                    global_clipnorm=0.5), "float32", 2, layers, FIT),
    # Rows of a table are updated as Keras updates them.
    (keras.optimizers.Adam, "float32", 1, embedded, WORDS),
    (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(use_ema=True)), "mixed_float16", 2, layers, FIT),
    (lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3), "float64", 2, layers, FIT),
])  # fmt: skip
def test_adam_is_traced_in_fewer_operations_and_trains_the_same_to_the_last_bit(
    mirrored, monkeypatch, make, policy, replicas, of, data
):
    build = partial(with_optimizer, lambda model: make(), policy=policy, of=of)
    strategy = mirrored if replicas > 1 else None
    brief, losses = fitted(build, data, strategy)
    monkeypatch.setattr(updates, "_update", lambda one, known, *others: type(one).update_step(one, *others))
    as_keras_does, others = fitted(build, data, strategy)
    assert losses.history == others.history
    assert_same_weights(brief, as_keras_does, 0.0)


def test_adam_takes_less_than_half_of_the_operations_that_keras_has_it_take():
    optimizer = keras.optimizers.Adam()
    variables = [keras.Variable(np.ones(3, "float32")) for _ in range(8)]
    optimizer.build(variables)

    def operations() -> int:
        gradients = [tf.ones(3)] * len(variables)
        traced = tf.function(lambda: optimizer.apply(gradients, variables), autograph=False).get_concrete_function()
        return len(traced.graph.get_operations())

    usual = operations()
    with updates.updating(optimizer):
        assert operations() < 0.6 * usual
    assert operations() == usual

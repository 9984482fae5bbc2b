"""Data, models and callbacks as people bring them: built with no more calls than needed, or refused in one sentence."""

import functools
import json
import re
from typing import Any

import keras
import mistaken
import numpy as np
import odd
import pytest
import tensorflow as tf
import two_devices  # noqa: F401 # which are this process's
from conftest import QUICK, Ran, logged, sampled
from keras import layers

import pipeline as package
from pipeline.errors import UserError
from pipeline.worker.compiling import compile_chosen
from pipeline.worker.labels import far_from_dense
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow import build

MODEL = "model.build._target_=odd.classifier"
SMALL = (*QUICK, "train.epochs=2", "train.replica_batch=8", "workers=2")

# What is said of each kind of data, in a run and by `fit`; None: it trains what arrays train.
SAID = {
    "as it should be": None,
    "lists": None,
    "label -1": "received -1 for example 5 of the training data, 1 of 64 labels being others. Try ignore_class=-1 in",
    "label 99": "received 99 for example 5 of the training data, 1 of 64 labels being others. Try a model of 100 out",
    "text": "as y of the training data, received text, such as 'class 0'. Try numpy.unique",
    "text in objects": "as y of the training data, received text, such as 'class 0'. Try numpy",
    "one-hot": "as one-hot ones are. Try the loss categorical_crossentropy, or y.argmax(-1).",
    "unequal": "received 64 in x, 60 in y. Try",
    "weights": "received 64 in x, 64 in y, 63 in sample_weight. Try",
    "no y": "received data of x alone. Try (x, y)",
    "rows": "received a list of 64 arrays, which stands for as many inputs. Try numpy.stack(x).",
    "sparse": "received csr_matrix as x of the training data. Try .toarray().",
    "ragged": "received RaggedTensor as x of the training data. Try .to_tensor().",
    "uneven lists": "in x of the training data, received a list of others. Try keras.utils",
    "objects": "as x of the training data, received an array of objects (float). Try .astype",
    "rows in objects": "received an array of objects (ndarray). Try numpy.stack",
    "dates": "as y of the training data, received datetime64[s]. Try",
    "one number": "as y of the training data, received 3. Try numpy.array",
}
# What a run alone is given so.
OF_A_RUN = {
    "four": "training data as (x, y) or (x, y, sample_weight), received 4 of them. Try",
    "weights of nothing": "training data as (x, y) or (x, y, sample_weight), received y of None. Try zeros as",
    "none": "Expected training data with examples, received none.",
    "generator": "Expected training data that can be read again in each epoch, received a generator, which ends once",
    "batched": "received one of batches, x of [None, 6] and y of [None]. Try to leave out .batch, or dataset.unbatch",
    "set of -1": "received 1 that cannot: example 5 of the data set has label -1. Try data.num_classes=10 data.on",
    "set of text": "as y of the training data set, received text. Try keras.layers.StringLookup",
    "set of ragged": "Expected a training data set of dense tensors, received a RaggedTensorSpec in it. Try .to_tensor",
    "set of one-hot": "Expected class numbers as the labels of kinds",
}


def ended(ran: Ran) -> list[tuple[str | None, list[float]]]:
    """(what was said at the end, the loss of each epoch) of each point, in their order."""
    folders = sorted(ran.run_folders, key=lambda folder: int(folder.name.split("_")[0]))
    epochs = ([event["loss"] for event in logged(one, "epoch") if event["rank"] == 0] for one in folders)
    return [(logged(folder)[-1]["error"], losses) for folder, losses in zip(folders, epochs, strict=True)]


def of_kinds(kinds: Any) -> tuple[str, ...]:
    return ("data.build._target_=odd.data", f"+data.build.kind={','.join(repr(kind) for kind in kinds)}")


# Each is a run: others each time; and `fit` is given all that is in `SAID`.
DRAWN = ["as it should be", "lists", *sampled([kind for kind, words in SAID.items() if words], 6)]


@pytest.mark.parametrize(
    "said",
    [pytest.param({kind: SAID[kind] for kind in DRAWN}, marks=pytest.mark.slow),
     {kind: OF_A_RUN[kind] for kind in sampled(list(OF_A_RUN), 3)}],
    ids=["arrays", "sets"],
)  # fmt: skip
def test_a_run_says_of_data_that_cannot_be_trained_on_what_and_where_in_one_sentence(pipeline, said):
    ran = pipeline("-m", *SMALL, "strategy=mirrored", MODEL, *of_kinds(said), timeout=400).failed()
    whole = None
    for (kind, words), (error, losses) in zip(said.items(), ended(ran), strict=True):
        if words is None:
            whole = whole or losses
            assert error is None, kind
            assert losses == whole, kind
        else:
            assert not losses, kind
            assert str(error).startswith("Expected "), (kind, error)
            assert words in str(error), (kind, error)


def fitted(strategy: tf.distribute.Strategy, part: Any, make: Any = odd.classifier, **named: Any) -> list[float]:
    """The loss of each epoch."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make()
    data = dict(zip(("x", "y", "sample_weight"), part if isinstance(part, tuple) else (part,), strict=False))
    losses: list[float] = package.fit(model, **data, verbose=0, **named).history["loss"]
    return losses


# What `fit` alone is given so, beside `SAID`.
OF_FIT = {
    "no arrays": (lambda x, y: (x[:0], y[:0]), "Expected examples, received arrays of none. Try"),
    "no batches": (lambda x, y: odd.a_set((x, y)).take(5).batch(8, True), "Expected batches, received a _Batch"),
    "nothing left": (lambda x, y: odd.a_set((x, y)).filter(lambda a, b: b > 10).batch(8),
                     "that ended before the first batch. Try"),
    "set of -1": (lambda x, y: odd.a_set((x, odd.labelled(y, -1))).batch(8),
                  "Expected labels from 0 to 9, one for each output, received -1 in a batch. Try"),
    "single": (lambda x, y: odd.a_set((x, odd.ONE_HOT[y])), "received x of [6] and y of [10]. Try dataset.batch(32)."),
    **{kind: (lambda *part, make=odd.KINDS[kind]: make(*part).batch(8), OF_A_RUN[kind])
       for kind in ("set of one-hot", "set of text")},
} | {kind: (odd.KINDS[kind], words) for kind, words in SAID.items() if words is not None}  # fmt: skip


@pytest.mark.parametrize("kind", OF_FIT)
def test_fit_says_of_data_that_cannot_be_trained_on_what_and_where(kind: str, mirrored):
    make, words = OF_FIT[kind]
    part = make(*odd.numbers())
    with pytest.raises(UserError) as refused:
        fitted(mirrored, part, **({"batch_size": 16} if kind in SAID else {}))
    assert str(refused.value).startswith("Expected ")
    assert words in str(refused.value)


def test_labels_are_compared_with_the_loss_of_each_output(mirrored):
    def two_headed() -> keras.Model:
        inputs = keras.Input((6,))
        heads = {name: keras.layers.Dense(10, activation="softmax", name=name)(inputs) for name in ("numbers", "ones")}
        model = keras.Model(inputs, heads)
        model.compile("sgd", {"numbers": "sparse_categorical_crossentropy", "ones": "categorical_crossentropy"})
        return model

    x, y = odd.numbers()
    right = {"numbers": y, "ones": odd.ONE_HOT[y]}
    assert len(fitted(mirrored, (x, right), two_headed)) == 1
    narrow = functools.partial(odd.classifier, units=5)
    one_hot = functools.partial(odd.classifier, loss=keras.losses.CategoricalCrossentropy())
    for labels, make, held_out, words in (
        (right | {"ones": y}, two_headed, None, "Expected one-hot labels of ones, whose loss is "),
        (right | {"ones": y}, two_headed, None, " Try the loss sparse_categorical_cros"),
        (right | {"numbers": odd.labelled(y, 10)}, two_headed, None, "of numbers, received 10 for example 5"),
        (y, narrow, None, "Expected labels from 0 to 4, one for each output of kinds, received 5"),
        (y, one_hot, None, "Expected one-hot "),
        (y, one_hot, None, " or keras.utils.to_categorical(y, 10)"),
        (y, odd.classifier, (x, odd.labelled(y, 12)), "received 12 for example 5 of the validation data"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            fitted(mirrored, (x, labels), make, validation_data=held_out)


def test_labels_that_a_loss_would_broadcast_over_the_outputs_are_refused(mirrored):
    x, y = odd.numbers()
    # Ten examples a replica, as there are outputs: Keras compares each label with an output of every example.
    with pytest.raises(UserError, match=r"labels of the shape of kinds, .* received one number for outputs of 10. Try"):
        fitted(mirrored, (x, y), lambda: odd.classifier(loss="mse"), batch_size=20)
    for part, units in (((x, odd.ONE_HOT[y]), 10), ((x, y), 1), ((x, y[:, None]), 1)):
        make = functools.partial(odd.classifier, units, keras.losses.Huber(), "sigmoid")
        assert np.isfinite(fitted(mirrored, part, make, batch_size=20)).all()


def test_a_label_that_the_loss_leaves_out_and_a_model_without_labels_train(mirrored):
    x, y = odd.numbers()
    ignoring = keras.losses.SparseCategoricalCrossentropy(ignore_class=-1)
    assert np.isfinite(fitted(mirrored, (x, odd.labelled(y, -1)), lambda: odd.classifier(loss=ignoring))).all()
    inner = [layers.Dense(6), layers.ActivityRegularization(l2=0.1)]
    assert np.isfinite(
        fitted(mirrored, (x,), lambda: compiled(keras.Sequential([keras.Input((6,)), *inner]), None))
    ).all()


def test_classes_counted_from_labels_far_from_dense_are_told_with_what_to_type(pipeline):
    ran = pipeline(*SMALL, "strategy=mirrored", "model.build._target_=own.tiny", *of_kinds(["label 99"])).ok()
    assert ran.events("built")[0]["num_classes"] == 100
    (note,) = ran.result["notes"]
    assert "89 of which have no training example" in note
    assert "(1 example, the first is example 5). Try data.num_classes=10" in note
    assert note in ran.err + ran.out


def test_gaps_that_chance_makes_are_no_reason_to_warn():
    draw = np.random.default_rng(0).integers
    for classes, examples in ((2, 4), (10, 20), (100, 60), (1_000, 2_000), (50_000, 4_000)):
        assert far_from_dense(draw(0, classes, examples)) is None
    # Numbered from 1, and the rare ones of many classes.
    assert far_from_dense(np.arange(1, 11)) is None
    assert far_from_dense((np.random.default_rng(1).zipf(1.5, 5_000) - 1) % 2_000) is None
    for labels in (np.append(np.arange(10), 16), np.arange(0, 100, 10), np.array([0, 255])):
        assert "have no training example" in str(far_from_dense(labels))


@pytest.mark.slow
def test_what_differs_between_processes_is_refused_on_all_and_classes_are_those_of_all(pipeline, tmp_path):
    two = ("strategy=multi_worker", *SMALL, "measure.steps=0")
    ran = pipeline("-m", *two, "model.build._target_=own.tiny", "data.build._target_=odd.in_shards",
                   "+data.build.kind=width,validation,classes,empty")  # fmt: skip
    (wide, _), (held_out, _), (classes, _), (empty, _) = ended(ran)
    of_one_shape = "examples of one shape in all processes, received x [6], y [] in the first and"
    assert f"Expected training {of_one_shape} x [5]" in str(wide)
    assert f"Expected validation {of_one_shape} none" in str(held_out)
    assert classes is empty is None
    other = pipeline(*two, MODEL, "data.build._target_=odd.another_length", f"+data.build.mark={tmp_path / 'mark'}")
    assert "Expected as many examples in all processes, received 6" in other.err


@pytest.mark.parametrize("layout", ["mirrored", *(pytest.param(layout, marks=pytest.mark.slow)
                                    for layout in sampled(("multi_worker", "parameter_server"), 1))])  # fmt: skip
def test_callbacks_are_answered_by_a_copy_on_the_first_process(pipeline, tmp_path, layout):
    asked = ("evaluate", "predict", "count")
    asking = [f"{{_target_: odd.Asking, path: {tmp_path / what}, what: {what}}}" for what in asked]
    common = (*SMALL, f"strategy={layout}", MODEL, *of_kinds(["as it should be"]))
    ran = pipeline(*common, f"train.callbacks=[{', '.join(asking)}]").ok()
    (folder,) = ran.run_folders
    evaluated, predicted, counted = (
        [json.loads(line) for line in (tmp_path / what).read_text().splitlines()] for what in asked
    )
    # The weights after the last epoch are those that were saved.
    saved = keras.saving.load_model(folder / "model.keras", compile=False)
    saved.compile(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    assert len(evaluated) == 2
    assert evaluated[-1] == pytest.approx(saved.evaluate(*odd.numbers(), verbose=0), rel=1e-5)
    assert predicted == [[pytest.approx(64.0)], [pytest.approx(64.0)]]
    steps = 8 if layout == "parameter_server" else 4
    assert counted == [[steps, pytest.approx(0.05)], [2 * steps, pytest.approx(0.05)]]
    if layout != "parameter_server":
        pipeline(*common, "resume=never").ok()
        trained = [sorted(event["weights"] for event in logged(run, "finished")) for run in ran.run_folders]
        assert len(trained) == 2
        assert trained[0] == trained[1]


@pytest.mark.slow
def test_fit_answers_callbacks_and_refuses_a_training_inside_another(mirrored, tmp_path):
    class Lambda(keras.Model):
        """Not functional, and copied by its arguments."""

        def __init__(self, units: int = 10) -> None:
            super().__init__()
            self.kinds = keras.layers.Dense(units, activation="softmax")

        def call(self, x: Any) -> Any:
            return self.kinds(x)

    loss, metric = "sparse_categorical_crossentropy", keras.metrics.SparseCategoricalAccuracy
    for number, make in enumerate((odd.classifier, lambda: compiled(Lambda(), loss, metrics=[metric()]))):
        notes = tmp_path / f"{number}.txt"
        asked = fitted(mirrored, odd.numbers(), make, epochs=2, callbacks=[odd.Asking(notes)])
        assert asked == fitted(mirrored, odd.numbers(), make, epochs=2)
        losses = [json.loads(line)[0] for line in notes.read_text().splitlines()]
        assert len(losses) == 2
        # After an epoch the loss is below the mean over it.
        assert all(after < during for after, during in zip(losses, asked, strict=True))
    counted = tmp_path / "count.txt"
    fitted(mirrored, odd.numbers(), epochs=2, callbacks=[odd.Asking(counted, "count")])
    assert [json.loads(line)[0] for line in counted.read_text().splitlines()] == [2, 4]
    with pytest.raises(UserError, match=r"leave training to the run, received a call of model\.fit in one"):
        fitted(mirrored, odd.numbers(), callbacks=[odd.Asking(counted, "fit")])


def test_what_a_run_does_itself_or_not_at_all_is_said(pipeline):
    data, mirrored = of_kinds(["as it should be"]), ("strategy=mirrored", MODEL)
    backup = "train.callbacks=[{_target_: keras.callbacks.BackupAndRestore, backup_dir: backup}]"
    for arguments, words in (
        ((*mirrored, backup), "Try checkpoint.every_epochs=1 in its place."),
        ((*mirrored, "+model.build.run_eagerly=true"), "run_eagerly=True from model.build. Try run_eagerly=False;"),
        (("strategy=parameter_server", "model.build._target_=odd.accumulating"),
         "gradient_accumulation_steps=2. Try batches 2 times as large, or strategy=mirrored."),
    ):  # fmt: skip
        assert words in pipeline(*SMALL, *arguments, *data).failed().err
    jit = pipeline(*SMALL, *mirrored, "+model.build.jit_compile=true", *data).ok()
    assert any("jit_compile=True, which is left out" in text for run in jit.results for text in run.get("notes", []))


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


@pytest.mark.parametrize(("make", "is_called"), [
    (functional, False), (Subclassed, True),
    (lambda: keras.Sequential([keras.Input((4,)), Counted(), layers.Dense(3)]), False),
], ids=["functional", "subclassed", "sequential"])  # fmt: skip
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
        package.fit(of_one_size(), x, y, batch_size=8, verbose=0)


def with_an_output_more() -> keras.Model:
    inputs = keras.Input((4,))
    outputs = {name: layers.Dense(2, name=name)(inputs) for name in ("kept", "more")}
    return compiled(keras.Model(inputs, outputs), {"kept": "mse"}, metrics={"kept": "mae"})


def in_half() -> keras.Model:
    half = layers.Dense(5, activation="softmax", dtype="mixed_bfloat16")
    metric = keras.metrics.SparseTopKCategoricalAccuracy(2)
    return compiled(keras.Sequential([keras.Input((4,)), half]), "sparse_categorical_crossentropy", metrics=[metric])


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
        lambda: compiled(functional(), metrics=[lambda y, y_pred: keras.ops.concatenate([y, y_pred], axis=2)]), NUMBERS,
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
        package.fit(make(), x, y, batch_size=8, verbose=0)


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

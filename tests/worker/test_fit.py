"""`pipeline.fit` gives the history of Keras's own `fit` on one device, also under strategies that this fails with."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import keras
import looking
import numpy as np
import own
import pytest
import steps
import tensorflow as tf
import tutorial
import two_devices  # noqa: F401 # which are this process's
from conftest import ROOT, begun, printed, sampled
from loops import assert_same, assert_same_weights, by_keras, fitted
from ports import reserved_ports

import pipeline
from pipeline.errors import UserError
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow.collective import TensorFlowCollective
from pipeline.worker.tensorflow.loss_scaling.global_batch import GlobalBatch

RANDOM = np.random.default_rng(11)
X = RANDOM.normal(size=(61, 6)).astype("float32")
Y = RANDOM.integers(0, 3, 61)
WEIGHTS = RANDOM.uniform(0.5, 2.0, 61).astype("float32")
TWO = own.two_headed_data(61, weighted=True)[0]


def classifier(*inside: keras.layers.Layer, kind: Any = keras.Sequential, **compiled: Any) -> keras.Model:
    hidden = keras.layers.Dense(8, activation="relu", kernel_regularizer="l2")
    model = kind([keras.Input((6,)), hidden, *inside, keras.layers.Dense(3, activation="softmax")])
    optimizer, loss = keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy"
    model.compile(**{"loss": loss, "weighted_metrics": ["accuracy"], "optimizer": optimizer} | compiled)
    return model


class Squared(keras.Sequential):
    def compute_loss(self, x: Any, y: Any, y_pred: Any, *given: Any, **named: Any) -> Any:
        """A loss of its own beside the compiled one."""
        return super().compute_loss(x, y, y_pred, *given, **named) + keras.ops.mean(keras.ops.square(y_pred))


def normalised() -> keras.Model:
    return classifier(keras.layers.BatchNormalization(), steps_per_execution=3)


class Told(keras.utils.PyDataset):
    """Batches that are others after each epoch, as many as `sizes` says, and a note of each hook."""

    def __init__(self, sizes: list[int], notes: list[str] | None = None, **named: Any) -> None:
        super().__init__(**named)
        self.sizes, self.notes, self.ends = sizes, [] if notes is None else notes, 0

    def __len__(self) -> int:
        return self.sizes[min(self.ends, len(self.sizes) - 1)]

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.random.default_rng([self.ends, index]).normal(size=(4 + index % 3, 2)).astype("float32")
        return x, x @ np.array([[1.0], [2.0]], "float32")

    def on_epoch_begin(self) -> None:
        self.notes.append(f"{self.sizes} begin")

    def on_epoch_end(self) -> None:
        self.ends += 1
        self.notes.append(f"{self.sizes} end")


class Endless(Told):
    """The same without an end, and without a change."""

    @property
    def num_batches(self) -> None:
        return None

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        self.ends = 0
        return super().__getitem__(index)


def regression() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def noted(train: list[int], held_out: list[int], **named: Any) -> dict[str, Any]:
    """Arguments of data that are told of training and of validation in one list."""
    notes = list[str]()
    return {"x": Told(train, notes), "validation_data": Told(held_out, notes), "epochs": 4, **named}


class Stopping(keras.callbacks.Callback):
    """Ends training in one hook, of any number or of one."""

    def __init__(self, hook: str, at: int | None = None) -> None:
        super().__init__()
        self.at = at
        setattr(self, hook, self._stop)

    def _stop(self, number: object = None, logs: object = None) -> None:
        self.model.stop_training = self.at in (None, number)


def batched() -> tf.data.Dataset:
    keras.utils.set_random_seed(5)
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(61, seed=5).batch(16)


def generated():
    for _ in range(3):
        yield from ((X[start : start + 16], Y[start : start + 16]) for start in range(0, 61, 16))


ARRAYS = {"x": X, "y": Y, "batch_size": 16}
OF_MANY = {"workers": 2, "max_queue_size": 2}
# What is fitted, by how it is called; each is made anew for each call, of `make`, else of `classifier` or `regression`.
# Of data that has an `ends`, which is before its steps, a warning says so.
CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "class weights, validation split": lambda: {
        **ARRAYS, "batch_size": 7, "class_weight": {0: 2.0, 2: 0.5}, "validation_split": 0.3, "epochs": 2,
    },
    "dictionaries, two outputs, sample weights, validation data every second epoch": lambda: {
        **dict(zip(("x", "y", "sample_weight"), TWO, strict=True)), "batch_size": 16, "epochs": 4,
        "validation_data": TWO, "validation_freq": 2, "validation_batch_size": 9, "make": own.two_headed,
    },
    "early stopping": lambda: {
        "x": X, "y": Y, "epochs": 9, "validation_data": (X[:9], Y[:9]),
        "callbacks": [keras.callbacks.EarlyStopping(min_delta=9.0, patience=1, restore_best_weights=True)],
    },
    "batched data set, uneven last batch": lambda: {
        "x": batched(), "epochs": 3, "validation_data": batched(), "validation_steps": 2,
    },
    "data set without end": lambda: {
        "x": batched().repeat(), "epochs": 3, "steps_per_epoch": 5, "validation_steps": 3,
        "validation_data": tf.data.Dataset.from_tensor_slices((X, Y)).batch(9).repeat(),
    },
    "data set that ends before its steps": lambda: {"x": batched(), "epochs": 3, "steps_per_epoch": 3, "ends": True},
    "PyDataset of fewer, then more": lambda: {"x": Told([4, 2, 5, 1, 3]), "epochs": 3, "ends": True},
    "PyDataset in threads": lambda: {"x": Told([4, 3, 2], **OF_MANY), "epochs": 3, "ends": True},
    "PyDataset of less than its steps": lambda: {"x": Told([3]), "epochs": 3, "steps_per_epoch": 5, "ends": True},
    "PyDataset validated every second epoch": lambda: noted([3], [2, 3, 1], validation_freq=2),
    "batch normalisation, a last batch of one example": lambda: {
        **ARRAYS, "batch_size": 15, "epochs": 3, "validation_data": (X, Y), "make": normalised,
    },
    "a metric of several numbers": lambda: {
        "x": X, "y": np.eye(3)[Y], "epochs": 2, "validation_data": (X[:9], np.eye(3)[Y[:9]]),
        "make": lambda: classifier(loss="categorical_crossentropy", metrics=[keras.metrics.F1Score()]),
    },
    "float64 lists of arrays": lambda: {
        "x": X.astype("float64"), "y": Y[:, None], "sample_weight": WEIGHTS.astype("float64"), "epochs": 2,
    },
    "initial epoch, learning rates in the history": lambda: {
        "x": X, "y": Y, "epochs": 5, "initial_epoch": 2, "validation_freq": [3, 5], "validation_data": (X[:20], Y[:20]),
        "callbacks": [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)],
    },
    # Keras counts a step too many at the end of each pass over such data, which Adam would feel.
    "data set of unknown length, class weights": lambda: {
        "x": batched().filter(lambda x, y: True), "epochs": 2, "class_weight": {0: 1.0, 1: 3.0, 2: 1.0},
        "validation_data": batched().filter(lambda x, y: True),
        "make": lambda: classifier(optimizer=keras.optimizers.SGD(0.05, momentum=0.9)),
    },
    "its own loss": lambda: {**ARRAYS, "epochs": 2, "make": lambda: classifier(kind=Squared)},
    "epochs that share a pass": lambda: {"x": batched(), "epochs": 4, "steps_per_epoch": 2},
    "generator": lambda: {"x": generated(), "epochs": 2, "steps_per_epoch": 4},
    "PyDataset in processes": lambda: {"x": Told([3], use_multiprocessing=True), "epochs": 3, "shuffle": True},
    "PyDataset without end": lambda: {"x": Endless([3], **OF_MANY), "epochs": 3, "steps_per_epoch": 2},
    "PyDataset ended early": lambda: {"x": Told([5]), "epochs": 3, "callbacks": [Stopping("on_train_batch_end", at=1)]},
    "PyDataset validated in part": lambda: noted([3], [4], validation_steps=2),
}  # fmt: skip


def test_the_end_of_data_of_unknown_length_is_no_step(mirrored) -> None:
    for strategy in (None, mirrored):
        model, history = fitted(classifier, {"x": batched().filter(lambda x, y: True), "epochs": 3}, strategy)
        assert len(history.history["loss"]) == 3
        assert int(model.optimizer.iterations.numpy()) == 3 * 4


# Keras forks for processes.
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("call", sampled(list(CALLS), 3))
def test_history_and_hooks_of_data_are_those_of_keras_on_one_device(call: str, mirrored) -> None:
    make = CALLS[call]().get("make", regression if call.startswith("Py") else classifier)
    told = "Expected data for" if "ends" in CALLS[call]() else None

    def arguments() -> dict[str, Any]:
        return {name: value for name, value in CALLS[call]().items() if name not in ("make", "ends")}

    model, theirs = by_keras(make, given := arguments())
    for strategy, tolerance in ((None, 2e-6), (mirrored, 1e-5)):
        with pytest.warns(UserWarning, match=told) if told else contextlib.nullcontext():
            each, ours = fitted(make, our_own := arguments(), strategy)
        assert_same(ours, theirs, tolerance)
        assert_same_weights(each, model)
        assert getattr(our_own["x"], "notes", None) == getattr(given["x"], "notes", None)


def test_dropout_draws_what_it_draws_in_keras_on_one_device() -> None:
    arguments = {**ARRAYS, "epochs": 2}
    ours, theirs = (fit(lambda: classifier(keras.layers.Dropout(0.4)), arguments)[1] for fit in (fitted, by_keras))
    assert_same(ours, theirs, 2e-6)


def test_shuffled_arrays_are_seen_once_an_epoch_in_an_order_of_the_seed(mirrored) -> None:
    def history(strategy: tf.distribute.Strategy | None, seed: int) -> Any:
        def fit(*data: Any, **named: Any) -> Any:
            keras.utils.set_random_seed(seed)
            return pipeline.fit(*data, **named)

        return fitted(classifier, {"x": X, "y": Y, "epochs": 2, "shuffle": True}, strategy, fit)[1].history["loss"]

    one = history(None, 7)
    assert history(mirrored, 7) == pytest.approx(one, rel=1e-5)
    assert history(mirrored, 8) != pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("hook", sampled(["on_train_begin", "on_epoch_begin", "on_test_begin"], 1))
def test_a_training_that_a_hook_ends_has_the_history_and_the_weights_of_keras(hook: str) -> None:
    def arguments() -> dict[str, Any]:
        return {"x": X, "y": Y, "epochs": 3, "validation_data": (X[:9], Y[:9]), "callbacks": [Stopping(hook)]}

    (model, theirs), (stopped, ours) = by_keras(classifier, arguments()), fitted(classifier, arguments())
    assert_same(ours, theirs, 2e-6)
    assert stopped.optimizer.iterations == model.optimizer.iterations


@pytest.mark.slow
def test_fit_goes_on_where_it_was_left_and_leaves_the_model_to_keras(mirrored, tmp_path) -> None:
    make, arguments = normalised, {**ARRAYS, "epochs": 2}
    model, _ = by_keras(make, arguments)
    theirs = [model.fit(**arguments, shuffle=False, verbose=0) for _ in range(2)]

    alone, _ = fitted(make, arguments)
    assert_same(pipeline.fit(alone, **arguments, shuffle=False, verbose=0), theirs[0], 1e-5)
    assert_same(alone.fit(**arguments, shuffle=False, verbose=0), theirs[1], 1e-5)

    together, _ = fitted(make, arguments, mirrored)
    with mirrored.scope():
        assert_same(pipeline.fit(together, **arguments, shuffle=False, verbose=0), theirs[0], 1e-5)
    assert_same(pipeline.fit(together, **arguments, shuffle=False, verbose=0), theirs[1], 1e-5)
    assert int(together.optimizer.iterations.numpy()) == 24
    assert together.evaluate(X, Y, verbose=0) == pytest.approx(model.evaluate(X, Y, verbose=0), rel=1e-4)
    np.testing.assert_allclose(together.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-4)
    assert not any(layer.synchronized for layer in together.layers if "normal" in layer.name)
    together.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again.predict(X, verbose=0), together.predict(X, verbose=0), atol=1e-6)


def test_a_model_compiled_anew_trains_by_its_new_settings(mirrored) -> None:
    histories = []
    for fit, strategy in ((keras.Model.fit, None), (pipeline.fit, mirrored)):
        model, _ = fitted(classifier, ARRAYS, strategy, fit)
        with strategy.scope() if strategy else contextlib.nullcontext():
            model.layers[0].trainable = False
            model.compile(keras.optimizers.SGD(0.5), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
            histories.append(fit(model, **ARRAYS, shuffle=False, verbose=0, epochs=2))
    assert_same(histories[1], histories[0], 1e-5)


@pytest.mark.parametrize("steps_per_execution", sampled([1, 3], 1))
def test_callbacks_see_the_batches_that_they_see_in_keras(steps_per_execution: int, mirrored) -> None:
    theirs, ours = list[str](), list[str]()
    for hooks, fit, strategy in ((theirs, by_keras, ()), (ours, fitted, (mirrored,))):
        noting = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, hooks=hooks: hooks.append(f"train {batch} {sorted(logs)}"),
            on_test_begin=lambda logs, hooks=hooks: hooks.append("test"),
            on_test_batch_end=lambda batch, logs, hooks=hooks: hooks.append(f"test {batch}"),
            on_test_end=lambda logs, hooks=hooks: hooks.append(f"tested {sorted(logs)}"),
        )
        arguments = {**ARRAYS, "epochs": 2, "validation_data": (X, Y), "callbacks": [noting]}
        fit(lambda: classifier(steps_per_execution=steps_per_execution), arguments, *strategy)
    if steps_per_execution == 1:
        assert ours == theirs
    else:
        # Keras names a step that there is none of where a call ends with the epoch.
        assert ours[:2] == ["train 2 ['accuracy', 'loss']", "train 3 ['accuracy', 'loss']"]
        assert len(ours) == len(theirs)


def test_a_callback_of_keras_that_saves_every_so_many_batches_saves_those_that_it_saves_in_keras(tmp_path) -> None:
    saved = []
    for place, fit in ((tmp_path / "theirs", by_keras), (tmp_path / "ours", fitted)):
        name = str(place / "{epoch}-{batch}.weights.h5")
        each = keras.callbacks.ModelCheckpoint(name, save_freq=3, save_weights_only=True)
        fit(classifier, {**ARRAYS, "epochs": 3, "callbacks": [each]})
        saved.append(sorted(path.name for path in place.iterdir()))
    assert saved[0] == saved[1]
    assert len(saved[0]) == 4


@pytest.mark.parametrize("verbose", [0, 1, 2, "auto"])
def test_keras_own_bar_shows_the_progress(verbose: Any, capsys) -> None:
    history = pipeline.fit(classifier(), X, Y, epochs=2, verbose=verbose)
    shown = capsys.readouterr().out
    assert ("Epoch 2/2" in shown) == (verbose != 0)
    assert ("2/2" in shown.replace("Epoch 2/2", "")) == (verbose != 0)
    assert history.params == {"verbose": verbose, "epochs": 2, "steps": 2}


def test_text_trains_whatever_holds_it_and_is_refused_as_labels_with_how_to_number_them(mirrored) -> None:
    text = np.array(["a b", "b c", "c d", "a d"] * 8)
    kinds, histories = (tf.constant(text), text, text.astype("S"), text.astype(object), text.tolist()), []

    def of_words() -> keras.Model:
        words = keras.layers.TextVectorization(output_mode="multi_hot", vocabulary=["a", "b", "c", "d"])
        model = keras.Sequential([keras.Input((), dtype="string"), words, keras.layers.Dense(2, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    for x in kinds:
        _, made = fitted(of_words, {"x": x, "y": np.arange(32) % 2, "batch_size": 8}, mirrored)
        histories.append(made.history["loss"])
        with pytest.raises(UserError, match=r"'a b'.* Try numpy\.unique"):
            pipeline.fit(classifier(), x=X[:32], y=x, verbose=0)
    assert histories == [pytest.approx(histories[0], rel=1e-6)] * len(kinds)


def test_whole_numbers_of_64_bits_are_gathered_exactly(mirrored) -> None:
    numbers = np.array([2**53 + 1, -(2**60) + 3, 7, 2**62 + 1])

    def gathered(part):
        return GlobalBatch(TensorFlowCollective(2), part, tf.constant(0.5)).of(part)

    parts = mirrored.experimental_distribute_values_from_function(
        lambda context: tf.constant(numbers[2 * context.replica_id_in_sync_group :][:2])
    )
    for found in tf.function(lambda: mirrored.run(gathered, (parts,)))().values:
        assert found.numpy().tolist() == numbers.tolist()


@pytest.mark.parametrize(("make", "arguments", "words"), [
    (lambda: "a model", {}, "Expected a keras.Model, received str"),
    (steps.by_keras, {}, "Expected a model without a train_step of its own, received ByKeras"),
    (own.Subclassed, {}, "received one that is not. Try model.compile"),
    (lambda: classifier(run_eagerly=True), {}, "received run_eagerly=True. Try model.run_eagerly = False"),
    (lambda: classifier(jit_compile=True), {}, 'received jit_compile=True. Try jit_compile="auto"'),
    (classifier, {"shuffle": "batch"}, "received 'batch'. Try shuffle=False"),
    (classifier, {"callbacks": ["stop"]}, "Expected Keras callbacks, received str"),
    (classifier, {"validation_freq": "often"}, "received 'often'. Try validation_freq=1"),
    (classifier, {"x": batched(), "y": None, "batch_size": 8}, "received 8. Try dataset.batch"),
    (classifier, {"x": batched().repeat(), "y": None}, "data without end, received None. Try steps_per_epoch=100"),
    (classifier, {"x": batched().unbatch().map(lambda x, y: y), "y": None}, "Try dataset.batch"),
    (classifier, {"x": batched()}, "`y` should not be passed"),
    (classifier, {"x": tf.sparse.from_dense(X)}, "Expected dense arrays, received"),
])  # fmt: skip
def test_what_cannot_be_honoured_is_refused_in_words(make, arguments, words: str, mirrored) -> None:
    with mirrored.scope():
        model = make()
    with pytest.raises((UserError, ModelError, ValueError), match=words.replace("(", r"\(")):
        pipeline.fit(model, **({"x": X, "y": Y, "verbose": 0} | arguments))


@pytest.mark.parametrize(("layer", "words"), sampled([
    ("running maximum", r"differ from one device in state of looking/largest .* Try .* or check=False, if"),
    ("batch softmax", r"It begins in layer looking, which does not treat each example by itself\. .* or check=False"),
], 1))  # fmt: skip
def test_what_replicas_make_otherwise_than_one_device_is_warned_of_before_the_first_fit(layer, words, mirrored) -> None:
    def made() -> keras.Model:
        with mirrored.scope():
            return looking.model(layer)

    model, arguments = made(), {**ARRAYS, "verbose": 0}
    with pytest.warns(UserWarning, match=words) as told:
        pipeline.fit(model, **arguments)
    assert sum("differ from one device" in str(one.message) for one in told) == 1
    # Told once; and all warnings are errors.
    pipeline.fit(model, **arguments)
    with pytest.warns(UserWarning, match=words):
        pipeline.fit(made(), tf.data.Dataset.from_tensor_slices((X, Y)).batch(16), verbose=0)
    pipeline.fit(made(), **arguments, check=False)


def test_strategies_that_cannot_train_this_model_are_refused(mirrored) -> None:
    with pytest.raises(UserError, match="Try to make and compile the model inside `with strategy"):
        pipeline.fit(classifier(), X, Y, strategy=mirrored)
    metric = keras.metrics.MeanSquaredError()
    with mirrored.scope():
        model = classifier(metrics=[metric])
    with pytest.raises(UserError, match="received mean_squared_error/total, made outside it"):
        pipeline.fit(model, X, Y[:, None] / 3.0)
    central = tf.distribute.experimental.CentralStorageStrategy(["CPU:0", "CPU:1"])
    with central.scope():
        model = classifier()
    with pytest.raises(UserError, match=r"Try pipeline\.strategies\.central_storage"):
        pipeline.fit(model, X, Y)


@pytest.mark.slow
def test_another_backend_of_keras_is_refused_in_words_and_the_package_is_imported_without_tensorflow() -> None:
    code = """
import sys, pipeline
print('tensorflow' in sys.modules, 'fit' in pipeline.__all__)
import keras
try:
    pipeline.fit(keras.Sequential([keras.layers.Dense(1)]))
except pipeline.errors.UserError as error:
    print(error)
"""
    environ = {**os.environ, "KERAS_BACKEND": "jax"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.stdout.startswith("False True\n"), done.stderr
    assert "received KERAS_BACKEND=jax. Try KERAS_BACKEND=tensorflow" in done.stdout, done.stderr


@pytest.mark.slow
def test_the_multi_worker_tutorial_trains_on_two_processes_what_one_device_trains(tmp_path) -> None:
    steps = 4
    with reserved_ports(2) as ports:
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
        tasks = [json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}) for rank in range(2)]
        running = [begun("tutorial", steps, tmp_path / "backup", TF_CONFIG=task) for task in tasks]
        shown = printed(*running, timeout=240)
    assert ["Epoch 3/3" in each for each in shown] == [True, False]
    both = [json.loads(each.splitlines()[-1]) for each in shown]
    assert both[0]["keras"].startswith("ValueError: Attempt to convert a value (PerReplica")
    model = tutorial.build_and_compile_cnn_model()
    data = tutorial.mnist_dataset(128)
    alone = {"tutorial": model.fit(data, epochs=3, steps_per_epoch=steps, shuffle=False, verbose=0).history}
    model = tutorial.build_and_compile_cnn_model()
    keras.utils.set_random_seed(9)
    alone["arrays"] = pipeline.fit(model, **tutorial.arrays()).history
    assert "learning_rate" in alone["arrays"]
    (x, y), _ = tutorial.mnist5k()
    own_parts = pipeline.fit(model, x[:256, ..., 0], y[:256], shuffle=False, verbose=0).history
    alone["own parts"] = {"loss": own_parts["loss"]}
    for told in both:
        assert told["epochs"] == [0, 1]
        for kind, history in alone.items():
            for name, values in history.items():
                assert told[kind][name] == pytest.approx(values, rel=1e-5), (kind, name)
        assert told["weights"] == pytest.approx(both[0]["weights"], rel=1e-6)
        assert told["rest"] == pytest.approx(told["whole"][1:], rel=1e-5)
        assert "Expected every process to call fit with the same epochs, received 2 in the first" in told["different"]
        assert "Expected data whose number of batches is known beforehand for 2 processes" in told["unknown"]

"""Any number of workers trains what one device trains, to the last digits that arithmetic allows, and all goes on.

Callbacks decide once for all workers, input is weighed by class, and language models leave samples.
"""

import re
from itertools import islice
from types import SimpleNamespace
from typing import Any

import beside
import keras
import numpy as np
import pytest
import tensorflow as tf
import whole
from conftest import QUICK, Ran, logged, one_of, sampled
from conftest import weights as digests
from equality import assert_equal, last, sweep, weights

from pipeline.data import text
from pipeline.data.errors import DataError
from pipeline.data.examples import Examples, Leaf
from pipeline.worker.artifacts import TextSample, continued, sample_of, text_of
from pipeline.worker.data.conversion import weighed
from pipeline.worker.jax import data

EACH = "strategy=one_device,mirrored,central_storage,multi_worker"
# What is trained under each strategy; where it is swept, one value is drawn.
MODELS: dict[str, tuple[int, tuple[str | tuple[str, ...], ...]]] = {
    "momentum or adam with batch normalization, on 1 and 4 workers, of which some have no example": (
        8,
        (
            "strategy=one_device,default,mirrored,central_storage,multi_worker", "workers=1,4", "model=normalised",
            # The last batch of an epoch and of a validation has one.
            "data=numbered", "data.build.examples=225", "data.build.validation=33",
            ("model.build.optimizer=sgd", "model.build.optimizer=adam"),
        ),
    ),
    "clipping, moving averages, schedules, what the config makes, and class weights": (
        4,
        (
            EACH, "workers=null", "model=normalised", "data=numbered", "train.class_weight={0: 3.0, 4: 0.5}",
            (
                *(f"model.build.optimizer={name}" for name in ("clipped", "overwritten", "scheduled")),
                "train.optimizer={_target_: keras.optimizers.SGD, momentum: 0.9, gradient_accumulation_steps: 2}",
            ),
        ),
    ),
    "many inputs and outputs, weighted and added losses, every reduction": (
        4,
        (
            EACH, "workers=null", "model=two_headed", "data=two_headed",
            ("data.build.weighted=false", "data.build.weighted=true"),
            tuple(f"model.build.reduction={way}" for way in ("sum_over_batch_size", "sum", "mean_with_sample_weight")),
        ),
    ),
    "losses and metrics of the batch as a whole": (
        3, ("strategy=one_device,mirrored,multi_worker", "workers=null", *whole.NAMED[:2], "train.gather=true")
    ),
    "masked sequences": (4, (EACH, "workers=null", "model=masked", "data=padded")),
    # One process alone reads the whole log in its order; several read shards of it.
    "tables of which a step reads few rows, and an area under a curve": (
        3,
        (
            "strategy=one_device,mirrored,central_storage", "workers=null", "model=recommender", "data=clicks",
            "data.build.train_examples=2500", "data.build.validation_examples=1000",
        ),
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(list(MODELS), 4))
def test_every_strategy_trains_what_one_device_trains(pipeline, name):
    points, arguments = MODELS[name]
    drawn = [one if isinstance(one, str) else one_of(one) for one in arguments]
    (folders,) = sweep(pipeline, points, *drawn).values()
    assert_equal(folders)


DRAWN = "strategy={}".format(one_of(("mirrored", "central_storage", "multi_worker")))
# What replicas learn from data that has a signal, by how little of it would do: half the width trains too.
LEARNT: dict[str, tuple[str, float, tuple[str, ...]]] = {
    "clicks": ("auc", 0.78, (
        "strategy=multi_worker", "model=recommender", "data=clicks", "train.epochs=2", "train.replica_batch=128",
    )),
    "dropout seeds and gradients of 16 bits": ("accuracy", 0.9, (
        DRAWN, "train.gradient_bits=16", "data=digits", "model.build.filters=[8,16]", "train.learning_rate=0.005",
        "train.epochs=8",
    )),
    # Convolutions of half width take a CPU long.
    "mixed precision": ("accuracy", 0.5, (
        DRAWN, "train.precision={}".format(one_of(("mixed_bfloat16", "mixed_float16"))), "data=digits",
        "model.build.filters=[4,8]", "model.build.dense_units=32", "train.learning_rate=0.01", "train.epochs=5",
    )),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(list(LEARNT), 2))
def test_several_replicas_learn_and_have_nothing_to_note(pipeline, name):
    metric, least, arguments = LEARNT[name]
    result = pipeline(*QUICK, "workers=2", *arguments, "train.check=true").ok().result
    assert result["val_metrics"][metric] > least
    assert result["notes"] == []


TRAINED = (
    "data.build._target_=beside.examples", "data.shuffle=false", f"train.epochs={beside.EPOCHS}",
    f"train.global_batch={beside.BATCH}",
)  # fmt: skip
CHANGED = ("model.build._target_=beside.net", "train.callbacks=[{_target_: beside.Changing}]")
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def in_keras():
    """(weights, the last epoch's logs) of `beside.net` by Keras's own fit on one device."""
    (x, y), held_out = beside.examples()
    model = beside.net()
    history = model.fit(
        x, y, beside.BATCH, beside.EPOCHS, verbose=0, callbacks=[beside.Changing()], validation_data=held_out,
        validation_batch_size=beside.BATCH, shuffle=False,
    )  # fmt: skip
    return model.get_weights(), {name: values[-1] for name, values in history.history.items()}


@pytest.mark.parametrize("layout", [
    ("strategy=multi_worker", "workers=2"),
    *(pytest.param(one_of(layouts), marks=pytest.mark.slow) for layouts in (
        [("strategy=mirrored", "workers=2"), ("strategy=parameter_server", "workers=1")],
        [("strategy=one_device", "backend=jax"), ("strategy=multi_worker", "workers=2", "backend=jax")],
    )),
], ids=" ".join)  # fmt: skip
def test_whatever_a_callback_changes_trains_what_keras_trains(pipeline, in_keras, layout):
    expected, logs = in_keras
    ran: Ran = pipeline(*QUICK, *TRAINED, *CHANGED, *layout).ok()
    (folder,) = ran.run_folders
    for ours, theirs in zip(weights(folder), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=TOLERANCE, rtol=0)
    epoch = last(folder, "epoch")
    ours = {"loss": epoch["loss"], "val_loss": epoch["val_loss"], **epoch["metrics"]}
    ours |= {f"val_{name}": value for name, value in epoch["val_metrics"].items()}
    assert ours == pytest.approx(logs, rel=TOLERANCE, abs=TOLERANCE)
    assert len({digest for event in ran.events("finished") for digest in event["weights"]}) == 1


STEP = ("model.build._target_=steps.gan", "data.build._target_=steps.points", "+data.build.labelled=false",
        "train.epochs=3", "train.global_batch=8")  # fmt: skip
# What is trained, and by which callbacks before the one that kills.
KILLED = {
    "changed": ((*TRAINED, CHANGED[0]), "{_target_: beside.Changing}, "),
    "running": ((*TRAINED, "model.build._target_=beside.running", "train.gather=true"), ""),
    "of a batch as a whole": (whole.GATHERED, ""),
    "by a step of one's own": (STEP, ""),
}


@pytest.mark.slow
# `test_checkpoint.py` resumes the first two to the last bit in one process: another one in each run of CI.
@pytest.mark.parametrize("kind", [*sampled(["changed", "running"], 1), *list(KILLED)[2:]])
def test_a_training_that_was_killed_goes_on_with_all_of_it(pipeline, tmp_path, kind):
    strategy = one_of(("mirrored", "multi_worker"))
    trained, callbacks = KILLED[kind]
    # It is killed once, and so the second time it is not.
    ran: Ran = pipeline(
        "-m", *QUICK, *trained, f"strategy={strategy}", "workers=2", "sweep.repeats=2", "train.steps_per_call=1",
        "checkpoint.every_steps=4", "train.deterministic=true",
        f"train.callbacks=[{callbacks}{{_target_: dying.Dies, at: 11, marker: {tmp_path / 'died'}}}]",
    ).ok()  # fmt: skip
    assert sorted(result["restarts"] for result in ran.results) == [0, 1]
    ours, theirs = map(digests, ran.run_folders)
    assert ours == theirs
    first, second = (last(folder, "epoch") for folder in ran.run_folders)
    assert {**first, "seconds": 0, "time": 0} == {**second, "seconds": 0, "time": 0}


OWN = ("model.build._target_=own.normalised", "data.build._target_=own.numbered")
TWO = ("strategy=multi_worker", "workers=2")


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kinds"), [
    (("strategy={}".format(one_of(("mirrored", "multi_worker"))), "workers=3", "train.global_batch=12"),
     sampled(("serial_arrays", "serial_set", "serial_shard", "serial_shard_set"), 2)),
    # Workers that race, and of which the coordinator reads what Python generates.
    (("strategy=parameter_server", "workers=2", "train.replica_batch=4"),
     ["generated_set", *sampled(("serial_set", "serial_shard_set", "serial_shard"), 1)]),
], ids=["alike", "racing"])  # fmt: skip
def test_every_example_is_seen_once_an_epoch_however_the_data_comes(pipeline, layout, kinds):
    ran = pipeline(
        "-m", *QUICK, *layout, "model.build._target_=own.counting", "train.epochs=2", "train.steps_per_call=2",
        f"data.build._target_={','.join(f'own.{kind}' for kind in kinds)}",
    ).ok()  # fmt: skip
    serial = np.arange(50)
    once = {"labels_0": 50.0, "labels_1": float(serial.sum()), "labels_2": float((serial**2).sum())}
    for folder, kind in zip(ran.run_folders, kinds, strict=True):
        # Workers that race are handed out so many examples of a data set, whichever come next in the order of each.
        in_orders = "strategy=parameter_server" in layout and kind in ("serial_set", "serial_shard_set")
        for epoch in logged(folder, "epoch"):
            assert epoch["val_metrics"] == once, folder
            assert epoch["metrics"]["labels_0"] == 50, folder
            assert in_orders or epoch["metrics"] == once, folder


@pytest.mark.parametrize("layout", sampled([("strategy=mirrored", "workers=2"), TWO], 1))
def test_callbacks_run_once_in_keras_order_and_every_worker_obeys(pipeline, tmp_path, layout):
    notes = tmp_path / "notes.txt"
    ran = pipeline(
        *QUICK, *layout, *OWN, "train.epochs=4", "train.replica_batch=32", "train.steps_per_call=3",
        f"train.callbacks=[{{_target_: own.recording, path: {notes}}}, {{_target_: own.Meddling}}]",
    ).ok()  # fmt: skip
    batches = ["batch_end 2 ['accuracy', 'loss']", "batch_end 3 ['accuracy', 'loss']"]
    ends = [f"epoch_end {epoch} ['accuracy', 'loss', 'val_accuracy', 'val_loss']" for epoch in (0, 1)]
    assert notes.read_text().splitlines() == [
        "train_begin 4", "epoch_begin 0", *batches, ends[0], "epoch_begin 1", *batches, ends[1], "train_end ",
    ]  # fmt: skip
    assert ran.result["epochs"] == 2
    # The callback halved the learning rate after the first epoch and zeroed the weights after the second.
    rates = {event["learning_rate"] for event in ran.events("steps")}
    assert sorted(rates) == pytest.approx([0.025, 0.05])
    (folder,) = ran.run_folders
    saved = keras.saving.load_model(folder / "model.keras")
    assert all((np.asarray(weight) == 0).all() for weight in saved.get_weights())
    assert len(digests(folder)) == 1


@pytest.mark.slow
def test_measuring_changes_nothing_that_training_learns(pipeline, tmp_path):
    layout = one_of((("strategy=mirrored", "workers=2"), TWO))
    notes = tmp_path / "notes.txt"
    # Nothing measured; measured in the first steps; measured for longer than training lasts.
    ran = pipeline(
        "-m", *QUICK, *layout, *OWN, "measure.steps=0,2,40", "measure.repeats=2", "train.epochs=2",
        "train.replica_batch=16", "train.steps_per_call=3", "+model.build.optimizer=averaged",
        f"train.callbacks=[{{_target_: own.recording, path: {notes}}}]",
    ).ok()  # fmt: skip
    kinds, learnt, timed = (("steps", "losses"), ("epoch", "val_loss"), ("finished", "weights")), [], []
    for folder in ran.run_folders:
        chief = [event for event in logged(folder) if event.get("rank") == 0]
        learnt.append([(event[of], kind) for kind, of in kinds for event in chief if event["event"] == kind])
        timed.append([event["steps"] for event in chief if event["event"] == "measured"])
    assert learnt[0] == learnt[1] == learnt[2]
    assert timed[0] == []
    assert len(timed[1]) == len(timed[2]) == 2
    assert min(timed[2]) >= 40
    lines = notes.read_text().splitlines()
    assert lines == 3 * lines[: len(lines) // 3]


def test_what_was_trained_is_told_also_where_training_fails_while_it_is_timed(pipeline):
    ran = pipeline(
        *QUICK, *OWN, "workers=1", "measure.steps=20", "train.epochs=2", "train.replica_batch=16",
        "train.steps_per_call=1", "train.callbacks=[{_target_: own.Failing}]",
    ).failed()  # fmt: skip
    assert "six are enough" in ran.err
    assert [event["step"] for event in ran.events("steps")] == [1, 2, 3, 4, 5, 6]
    assert ran.events("measured") == []


@pytest.mark.slow
def test_keras_own_callbacks_work_on_several_processes(pipeline, tmp_path):
    callbacks = [
        "{_target_: keras.callbacks.EarlyStopping, patience: 0, min_delta: 100, restore_best_weights: true}",
        "{_target_: keras.callbacks.ReduceLROnPlateau, monitor: loss, patience: 0, min_delta: 100, factor: 0.5}",
        f"{{_target_: keras.callbacks.CSVLogger, filename: {tmp_path / 'log.csv'}}}",
        f"{{_target_: keras.callbacks.TensorBoard, log_dir: {tmp_path / 'board'}}}",
        f"{{_target_: keras.callbacks.ModelCheckpoint, filepath: {tmp_path / 'best.keras'}, save_best_only: true}}",
        f"{{_target_: keras.callbacks.ModelCheckpoint, filepath: {tmp_path / 'step.weights.h5'}, "
        "save_weights_only: true, save_freq: 2}",
        "{_target_: own.Halving}",
    ]
    ran = pipeline(*QUICK, *TWO, *OWN, "train.epochs=5", f"train.callbacks=[{', '.join(callbacks)}]", timeout=300).ok()
    assert ran.result["epochs"] == 2
    assert (tmp_path / "log.csv").read_text().count("\n") == 3
    assert list((tmp_path / "board").rglob("events.out.tfevents*"))
    assert (tmp_path / "best.keras").exists()
    assert (tmp_path / "step.weights.h5").exists()
    assert len(digests(ran.run_folders[0])) == 1
    ended = {name: ran.result[name] for name in ("planned_epochs", "stopped_by", "restored_epoch")}
    assert ended == {"planned_epochs": 5, "stopped_by": "EarlyStopping", "restored_epoch": 1}
    assert sum("EarlyStopping" in note for note in ran.result["notes"]) == 2


LENGTH, VOCABULARY = 8, 5
OUT = (None, LENGTH, VOCABULARY)
NAMES = tuple("abcde")
TOKENS = (np.arange(LENGTH)[None] % VOCABULARY, (np.arange(LENGTH)[None] + 1) % VOCABULARY)


def plan(tokens: int | None = None, temperature: float = 0.8, seed: int = 0) -> Any:
    training = SimpleNamespace(sample_tokens=tokens, sample_temperature=temperature, seed=seed)
    return SimpleNamespace(training=training, data=SimpleNamespace(name="digits"), model=SimpleNamespace(name="mlp"))


def of(out: object, example: Any = TOKENS, names: tuple[str, ...] | None = NAMES, **asked: Any) -> Any:
    """(what is to be written, the notes) of a model with such outputs."""
    notes: list[str] = []
    model: Any = SimpleNamespace(output_shape=out)
    return sample_of(plan(**asked), model, names, lambda: example, notes.append), notes


def test_a_language_model_is_to_write_a_hundred_tokens_or_as_many_as_were_asked_for():
    assert of(OUT)[0].tokens == 100
    assert of((None, None, VOCABULARY), tokens=7)[0].tokens == 7
    assert of(OUT, tokens=0) == (None, [])


@pytest.mark.parametrize(("out", "example", "names"), [
    ((None, 10), TOKENS, NAMES), ((None, LENGTH, VOCABULARY + 1), TOKENS, NAMES), ([OUT], TOKENS, NAMES),
    (OUT, TOKENS, None), (OUT, (TOKENS[0].astype(np.float32), TOKENS[1]), NAMES),
    (OUT, (TOKENS[0], TOKENS[1][:, 0]), NAMES), (OUT, ({"ids": TOKENS[0]}, TOKENS[1]), NAMES),
])  # fmt: skip
def test_another_model_writes_nothing_and_says_so_where_it_was_asked_to(out, example, names):
    assert of(out, example, names) == (None, [])
    writing, (note,) = of(out, example, names, tokens=50)
    assert writing is None
    assert "for train.sample_tokens=50, received data=digits and model=mlp. Try train.sample_tokens=null." in note


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_logits_say_at_a_temperature_and_by_the_seed_alone(temperature):
    logits = np.array([0.0, 1.0, 2.0, -1.0, 0.5])

    def drawn(seed: int, count: int) -> list[int]:
        tiled = np.tile(logits, (1, LENGTH, 1))
        return list(islice(continued(TOKENS[0][0], lambda _: tiled, temperature, np.random.default_rng(seed)), count))

    often = np.bincount(drawn(0, 20_000), minlength=VOCABULARY) / 20_000
    wanted = np.exp(logits / temperature)
    np.testing.assert_allclose(often, wanted / wanted.sum(), atol=0.015)
    assert drawn(0, 50) == drawn(0, 50) != drawn(1, 50)


def test_each_token_is_drawn_by_those_that_went_before_it():
    seen: list[list[int]] = []

    def logits(tokens: np.ndarray) -> np.ndarray:
        seen.append(tokens[0].tolist())
        return np.eye(VOCABULARY)[(tokens + 2) % VOCABULARY]

    assert list(islice(continued(np.array([0, 1, 2]), logits, 0.0, np.random.default_rng(0)), 3)) == [4, 1, 3]
    assert seen == [[0, 1, 2], [1, 2, 4], [2, 4, 1]]


@pytest.mark.parametrize("tokens", ["bytes", "characters"])
def test_what_was_read_as_tokens_is_written_as_it_was(tmp_path, tokens):
    said = "Größe: “naïve” café\n\t\\x41 — \x00ok " * 20
    (tmp_path / "said.txt").write_text(said)
    train, _ = text(str(tmp_path / "said.txt"), tokens=tokens, length=16)
    assert train.class_names is not None
    assert said.startswith(text_of(train.raw[0][:2].reshape(-1), train.class_names).rstrip("\ufffd"))


def test_the_file_says_what_was_given_what_was_made_of_it_and_how(tmp_path):
    told: list[object] = []
    TextSample(12, 0.0, 3, TOKENS[0][0], NAMES).write(
        lambda tokens: np.eye(VOCABULARY)[(tokens + 1) % VOCABULARY], tmp_path, told.append
    )
    assert (tmp_path / "sample.txt").read_text() == (
        "abcdeabc\n\n--- what the model made of it: 12 tokens, temperature 0, seed 3 ---\n\ndeabcdeabcde\n"
    )
    # Whoever watches sees that it gets on.
    assert len(told) == 12


SMALL = (
    *QUICK[1:], "model=transformer", "data=text", "model.build.blocks=1", "model.build.width=32", "train.steps=4",
    "model.build.heads=2", "data.build.length=16", "train.global_batch=32", "train.sample_tokens=20",
    "launch.startup_timeout=120", "tracking.system_metrics_seconds=0",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout", sampled([
    ("hardware=2cpu", "strategy=multi_worker", "workers=2"),
    ("hardware=2cpu", "strategy=parameter_server", "workers=2", "strategy.parameter_servers=1"),
    ("hardware=4cpu", "backend=jax", "strategy=model_parallel", "workers=1"),
], 2), ids=" ".join)  # fmt: skip
def test_a_run_of_a_language_model_leaves_a_sample_beside_its_model_and_in_mlflow(pipeline, layout):
    ran = pipeline(*SMALL, *layout).ok()
    (folder,) = ran.run_folders
    assert ran.result["sample"] == "sample.txt"
    assert ran.result["val_metrics"]["perplexity"] > 1
    # A path that is long goes on in the next line.
    assert re.search(rf"^sample +\S*\s*{re.escape(folder.name)}/sample\.txt$", ran.out, re.M)
    marked = r"(?s).+\n\n--- what the model made of it: 20 tokens, temperature 0.8, seed 0 ---\n\n.{1,20}\n+"
    assert re.fullmatch(marked, (folder / "sample.txt").read_text())
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{ran.folder / 'outputs' / 'mlflow.db'}")
    assert "sample.txt" in {each.path for each in client.list_artifacts(ran.result["mlflow_run_id"])}


WEIGHTS = {0: 0.5, 2: 4.0}
X = np.arange(12, dtype="float32").reshape(6, 2)
Y = np.array([0, 1, 2, 2, 7, 0], "int32")
LABELS = {
    "numbers": Y, "a column": Y[:, None], "floats": Y.astype("float32"), "one-hot": np.eye(8, dtype="float32")[Y]
}  # fmt: skip


def by_keras(y: np.ndarray) -> list[float]:
    """The weights that Keras gives a model for such labels, one at a time: its losses, where all are 1 without."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", lambda y_true, y_pred: 0.0 * y_pred[:, 0] + 1.0)
    each = [model.fit(X[at:][:1], y[at:][:1], class_weight=WEIGHTS, verbose=0) for at in range(6)]
    return [one.history["loss"][0] for one in each]


@pytest.mark.parametrize("kind", LABELS)
def test_arrays_data_sets_and_made_examples_get_the_weights_that_keras_gives(kind):
    y, expected = LABELS[kind], [0.5, 1.0, 4.0, 4.0, 1.0, 0.5]
    spec = (Leaf((2,), "float32"), Leaf(y.shape[1:], str(y.dtype)))
    decoded = weighed(Examples((X, y), spec, decode=lambda example: example), WEIGHTS)
    parsed = weighed(Examples((X, y), spec, parse=lambda batch: batch), WEIGHTS)
    for received in (
        by_keras(y),
        weighed((X, y), WEIGHTS)[2],
        weighed((X, y, np.full(6, 2.0)), WEIGHTS)[2] / 2,
        weighed((X, y, np.full((6, 1), 2.0)), WEIGHTS)[2][:, 0] / 2,
        data._weighed((X, y), WEIGHTS)[2],
        data._weighed((X, y, np.full((6, 1), 2.0)), WEIGHTS)[2][:, 0] / 2,
        [weight for *_, weight in weighed(tf.data.Dataset.from_tensor_slices((X, y)), WEIGHTS)],
        weighed(Examples((X, y), spec), WEIGHTS).raw[2],
        [decoded.decode((X[place], y[place]))[2] for place in range(6)],
        parsed.parse((X, y))[2],
    ):
        assert list(map(float, received)) == expected
    # A label beyond 32 bits is no small class.
    assert weighed((X, Y.astype(np.int64) + 2**32), WEIGHTS)[2].tolist() == [1.0] * 6


@pytest.mark.parametrize(("part", "words"), [
    ((X,), "received data of x alone"),
    ((X, {"a": Y, "b": Y}), "labels of 2 outputs"),
    ((X, X[:, :, None]), r"\[2, 1\]"),
])  # fmt: skip
def test_data_without_one_label_an_example_are_refused(part, words):
    with pytest.raises(DataError, match=words):
        weighed(part, WEIGHTS)


@pytest.mark.parametrize("given", "{0:-1} {0:x} {0:1,a:2} {} [1,2] {0:inf} {1.5:2} {0:0}".split())
def test_a_wrong_value_is_refused_in_words(asked, given):
    ran: Ran = asked(*QUICK, "mode=plan", f"train.class_weight={given}").failed(2)
    assert "Expected train.class_weight to give numbers of classes weights" in ran.err
    assert "Try train.class_weight='{0: 1.0, 1: 5.0}', or null." in ran.err

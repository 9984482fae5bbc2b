"""Any number of workers trains what one device trains, to the last digits that arithmetic allows, and all goes on."""

import beside
import keras
import numpy as np
import pytest
import whole
from conftest import QUICK, Ran, sampled
from conftest import weights as digests
from equality import assert_equal, last, sweep, weights

from pipeline.data import synthetic

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
@pytest.mark.parametrize("name", MODELS)
def test_every_strategy_trains_what_one_device_trains(pipeline, name):
    points, arguments = MODELS[name]
    drawn = [one if isinstance(one, str) else sampled(one, 1)[0] for one in arguments]
    (folders,) = sweep(pipeline, points, *drawn).values()
    assert_equal(folders)


DRAWN = "strategy={}".format(*sampled(("mirrored", "central_storage", "multi_worker"), 1))
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
        DRAWN, "train.precision={}".format(*sampled(("mixed_bfloat16", "mixed_float16"), 1)), "data=digits",
        "model.build.filters=[4,8]", "model.build.dense_units=32", "train.learning_rate=0.01", "train.epochs=5",
    )),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNT)
def test_several_replicas_learn_and_have_nothing_to_note(pipeline, name):
    metric, least, arguments = LEARNT[name]
    result = pipeline(*QUICK, "workers=2", *arguments, "train.check=true").ok().result
    assert result["val_metrics"][metric] > least
    assert result["notes"] == []


def test_asynchronous_workers_refuse_what_is_no_sum_and_gathering(pipeline, asked):
    ran = pipeline(*QUICK, "strategy=parameter_server", "workers=1", *whole.NAMED).failed()
    assert "received largest (Largest), whose state is no" in ran.err
    refused = asked("strategy=parameter_server", "train.gather=true", "mode=plan").failed(2)
    assert "Expected train.gather=false" in refused.err


# Of each family the smallest, and the least pixels on a side that it takes.
FAMILIES = {
    "VGG16": 32, "ResNet50": 32, "ResNet50V2": 32, "Xception": 71, "InceptionV3": 75, "InceptionResNetV2": 75,
    "MobileNet": 32, "MobileNetV2": 32, "MobileNetV3Small": 32, "DenseNet121": 32, "NASNetMobile": 32,
    "EfficientNetB0": 32, "EfficientNetV2B0": 32, "ConvNeXtTiny": 32,
}  # fmt: skip


@pytest.mark.slow
# Others in each run of CI: all of them take minutes.
@pytest.mark.parametrize("name", sampled(list(FAMILIES), 1))
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
    *(pytest.param(*sampled(layouts, 1), marks=pytest.mark.slow) for layouts in (
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
    (strategy,) = sampled(("mirrored", "multi_worker"), 1)
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

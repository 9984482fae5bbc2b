"""Models laid over devices under TensorFlow: where all of it is and runs, and that it learns what one device learns."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import sampled
from scripts import came

from pipeline.errors import UserError
from pipeline.plan.division import balanced, written
from pipeline.plan.size import Layer
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow import build

# Of one device, and of as many replicas of as many devices as follow.
QUICK = ("normalized,1,1", "normalized,1,2", "astray,1,2")
ALL = {
    "cnn": ("1,2", "1,4", "2,2"),
    "normalized": ("1,4", "2,2"),
    "resnet20": ("1,2", "1,4"),
    "transformer": ("1,2", "1,4", "2,2"),
    "recurrent": ("1,2", "2,2"),
    "called": ("1,2", "2,2"),
    "own": ("1,2", "2,2"),
}


def expect_planned(found, one, folder):
    """Holds a case to one device, to its plan, and to what it saved."""
    import placed  # noqa: F401 # whose classes the models are of

    np.testing.assert_allclose(found["losses"], one["losses"], rtol=0, atol=1e-5)
    for there, alone in zip(found["weights"], one["weights"], strict=True):
        np.testing.assert_allclose(there, alone, rtol=0, atol=1e-6)
    assert found["validated"] == pytest.approx(one["validated"], abs=1e-5)
    # After it has run: forward and backward, and not one elsewhere.
    assert found["ran"].keys() == {"forward", "backward"}
    for row in found["rows"]:
        if row["slots"]:
            assert row["forward"] > 0, row
            assert row["backward"] > 0, row
            # Adam's two, and an average of the weight.
            assert len(row["slots"]) == 3
    assert min(found["held"]) > 0
    saved = keras.saving.load_model(folder / "model.keras", compile=False)
    for loaded, there in zip(saved.weights, found["weights"], strict=True):
        np.testing.assert_array_equal(loaded, np.array(there, loaded.dtype))


@pytest.mark.slow
def test_weights_slots_and_both_passes_are_on_the_planned_of_two_devices_and_learn_what_one_learns(tmp_path):
    found = came("placed", tmp_path, *QUICK)
    expect_planned(found[QUICK[1]], found[QUICK[0]], tmp_path / QUICK[1])
    # A layer that says itself where it runs.
    assert re.fullmatch(
        r"Expected operation while/\S*/astray\S* on CPU:1, where its layer is planned, received it on CPU:0. Try .*",
        found[QUICK[2]]["refused"],
    )
    assert {row["devices"][0] for row in found[QUICK[1]]["rows"]} == {"CPU:0", "CPU:1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(tuple(ALL), 2))
def test_every_model_learns_on_every_mesh_what_one_device_learns(tmp_path, name):
    found = came("placed", tmp_path, f"{name},1,1", *(f"{name},{mesh}" for mesh in ALL[name]))
    for mesh in ALL[name]:
        case = f"{name},{mesh}"
        expect_planned(found[case], found[f"{name},1,1"], tmp_path / case)
        if name == "transformer":
            held = found[case]["held"]
            assert max(abs(np.array(held) / np.mean(held) - 1)) < 0.25


@pytest.mark.slow
def test_micro_batches_learn_what_whole_batches_learn_and_what_they_cannot_is_refused(tmp_path):
    # With dropout what they draw would be other masks.
    cases = [f"{name},{mesh},{count}" for name, mesh, count in (
        ("cnn", "1,2", 4), ("transformer", "1,2", 3), ("masked", "1,2", 4), ("masked", "2,2", 2),
    )]  # fmt: skip
    refused = {
        "normalized": "received one that keeps batch_normalization",
        "own": "which calls itself on whole batches",
    }
    found = came("placed", tmp_path, *(f"{case.split(',')[0]},1,1,1" for case in cases[:3]), *cases,
                 *(f"{name},1,2,2" for name in refused), "penalized,1,2,2")  # fmt: skip
    for case in cases:
        expect_planned(found[case], found[f"{case.split(',')[0]},1,1,1"], tmp_path / case)
    for name, words in refused.items():
        assert words in found[f"{name},1,2,2"]["refused"]
    assert "received squared, whose loss is that of a whole batch. Try" in found["penalized,1,2,2"]["refused"]


@pytest.mark.slow
def test_a_run_that_is_killed_and_goes_on_ends_with_the_weights_and_slots_of_one_device(pipeline, tmp_path):
    ran = pipeline(
        "-m", "strategy=one_device,model_parallel", "workers=1", "model=cnn", "data=digits",
        "hardware=4cpu", "hardware.rehearse=true", "train.global_batch=64", "train.steps=40",
        "train.steps_per_call=2", "checkpoint.every_steps=6", "tracking=none", "measure.steps=0",
        f"train.callbacks=[{{_target_: dying.Dies, at: 7, marker: '{tmp_path}/died_${{strategy.name}}'}}]",
    ).ok()  # fmt: skip
    assert [result["restarts"] for result in ran.results] == [1, 1]
    one, placed = (keras.saving.load_model(folder / "model.keras") for folder in ran.run_folders)
    for alone, there in zip(
        one.weights + one.optimizer.variables, placed.weights + placed.optimizer.variables, strict=True
    ):
        np.testing.assert_allclose(np.asarray(there), np.asarray(alone), rtol=0, atol=1e-6)
    listed = (ran.run_folders[1] / "placement.txt").read_text()
    assert [f"CPU:{number}" in listed for number in range(3)] == [True, True, False]
    assert "Each copy of the model is laid over 2 devices" in " ".join(ran.results[1]["notes"])


LAYERS = [
    Layer(*one) for one in (("stem", 4, 100, True), ("norm", 1, 0, False), ("relu", 0, 0, False),
                            ("middle", 10, 100, True), ("head", 100, 4, True))
]  # fmt: skip


def test_a_part_begins_with_a_kernel_and_costs_are_balanced_or_a_written_layout_is_followed_and_others_refused():
    assert balanced(LAYERS, 1) == [0] * 5
    assert balanced(LAYERS, 2) == [0, 0, 0, 0, 1]
    assert balanced(LAYERS, 3) == [0, 0, 0, 1, 2]
    with pytest.raises(UserError, match=r"of at least 4 layers .* received 3. Try strategy.devices_per_replica=3"):
        balanced(LAYERS, 4)
    assert written(LAYERS, {"head|stem": 1, "middle": 0}, 2) == [1, 1, 1, 0, 1]
    for layout, words in (
        ({"stem": 0, "tail": 1}, "received tail, which matches none of stem, norm, relu, middle, head. Try"),
        ({"stem": 0, "head": 1, "h.*": 1}, r"received head and h.\*, which both match head. Try"),
        ({"stem": 0, "relu": 1, "middle": 0}, "received one that leaves device 1 without. Try"),
    ):
        with pytest.raises(UserError, match=words):
            written(LAYERS, layout, 2)


def test_keras_own_distribution_is_refused():
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0"]))
    try:
        with pytest.raises(ModelError, match=r"Expected no keras\.distribution under .* received DataParallel. Try"):
            build.model(
                lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]),
                tf.distribute.get_strategy(),
                (tf.zeros((2, 4)), tf.zeros((2,), tf.int32)),
            )
    finally:
        keras.distribution.set_distribution(None)

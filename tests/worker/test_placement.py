"""Models laid over devices under TensorFlow: where all of it is and runs, and that it learns what one device learns."""

import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
from conftest import OWN, ROOT

from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow import build
from pipeline.worker.tensorflow.placement.balance import Load, balanced, written

# Of one device, and of as many replicas of as many devices as follow.
QUICK = ("normalized,1,1", "normalized,1,2")
ALL = {
    "cnn": ("1,2", "1,4", "2,2"),
    "normalized": ("1,4", "2,2"),
    "resnet20": ("1,2", "1,4"),
    "transformer": ("1,2", "1,4", "2,2"),
    "recurrent": ("1,2", "2,2"),
    "called": ("1,2", "2,2"),
    "own": ("1,2", "2,2"),
}


def came(folder, cases):
    """What each case came to, see `own/placed.py`."""
    paths = os.pathsep.join([str(ROOT), str(OWN), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(OWN / "placed.py"), str(folder / "came.json"), *cases]
    ran = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads((folder / "came.json").read_text())


def expect_planned(found, one, folder):
    """Holds a case to one device, to its plan, and to what it saved."""
    np.testing.assert_allclose(found["losses"], one["losses"], rtol=0, atol=1e-5)
    for placed, alone in zip(found["weights"], one["weights"], strict=True):
        np.testing.assert_allclose(placed, alone, rtol=0, atol=1e-6)
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
    for loaded, placed in zip(saved.weights, found["weights"], strict=True):
        np.testing.assert_array_equal(loaded, np.array(placed, loaded.dtype))


def test_weights_slots_and_both_passes_are_on_the_planned_of_two_devices_and_learn_what_one_learns(tmp_path):
    found = came(tmp_path, QUICK)
    expect_planned(found[QUICK[1]], found[QUICK[0]], tmp_path / QUICK[1])
    assert {row["devices"][0] for row in found[QUICK[1]]["rows"]} == {"CPU:0", "CPU:1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_every_model_learns_on_every_mesh_what_one_device_learns(tmp_path, name):
    sys.path.insert(0, str(OWN))
    import placed  # noqa: F401 # whose classes the models are of

    found = came(tmp_path, [f"{name},1,1", *(f"{name},{mesh}" for mesh in ALL[name])])
    for mesh in ALL[name]:
        case = f"{name},{mesh}"
        expect_planned(found[case], found[f"{name},1,1"], tmp_path / case)
        if name == "transformer":
            held = found[case]["held"]
            assert max(abs(np.array(held) / np.mean(held) - 1)) < 0.25


LOADS = [
    Load("stem", 4, 100, True),
    Load("norm", 1, 0, False),
    Load("relu", 0, 0, False),
    Load("middle", 10, 100, True),
    Load("head", 100, 4, True),
]


def test_a_part_begins_with_a_kernel_and_costs_are_balanced():
    assert balanced(LOADS, 1) == [0] * 5
    assert balanced(LOADS, 2) == [0, 0, 0, 0, 1]
    assert balanced(LOADS, 3) == [0, 0, 0, 1, 2]
    with pytest.raises(ModelError, match=r"of at least 4 layers .* received 3. Try strategy.devices_per_replica=3"):
        balanced(LOADS, 4)


def test_a_written_layout_is_followed_and_one_that_does_not_fit_is_refused():
    assert written(LOADS, {"head|stem": 1, "middle": 0}, 2) == [1, 1, 1, 0, 1]
    for layout, words in (
        ({"stem": 0, "tail": 1}, "received tail, which matches none of stem, norm, relu, middle, head. Try"),
        ({"stem": 0, "head": 1, "h.*": 1}, r"received head and h.\*, which both match head. Try"),
        ({"stem": 0, "relu": 1, "middle": 0}, "received one that leaves device 1 without. Try"),
    ):
        with pytest.raises(ModelError, match=words):
            written(LOADS, layout, 2)


def test_keras_own_distribution_is_refused(monkeypatch):
    chosen = keras.distribution.DataParallel(devices=["cpu:0"])
    monkeypatch.setattr(keras.distribution, "distribution", lambda: chosen)
    with pytest.raises(ModelError, match=r"Expected no keras\.distribution under backend=tensorflow"):
        build._check_distribution()

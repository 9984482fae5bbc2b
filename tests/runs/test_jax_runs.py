"""Whole runs of backend=jax, in processes that find no TensorFlow: measured, killed, gone on with on another mesh."""

import json
import os
import re
from importlib.util import find_spec

import keras
import numpy as np
import pytest
from conftest import OWN, ROOT

pytestmark = pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: pip install jax")

# What Python runs before all else: from here on there is no TensorFlow.
WITHOUT = """
import sys
class NoTensorFlow:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "tensorflow":
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, NoTensorFlow())
"""
SMALL = (
    "backend=jax", "model=mlp", "data=digits", "train.global_batch=64", "train.steps_per_call=2", "hardware=2cpu",
    "checkpoint.every_steps=4", "tracking=none", "tracking.system_metrics_seconds=0", "launch.startup_timeout=120",
)  # fmt: skip


def losses(folder):
    """The loss of each step, as it was told last."""
    found = {}
    for line in (folder / "events.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "steps" and event["group"] == "point":
            first = event["step"] - len(event["losses"]) + 1
            found |= {first + place: loss for place, loss in enumerate(event["losses"])}
    return [found[step] for step in sorted(found)]


@pytest.mark.slow
def test_a_run_without_tensorflow_that_is_killed_and_goes_on_on_another_mesh_trains_as_one_device_does(
    pipeline, tmp_path
):
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(WITHOUT)
    environ = {"PYTHONPATH": os.pathsep.join(map(str, (site, ROOT, OWN)))}
    dies = f"train.callbacks=[{{_target_: dying.Dies, at: 3, marker: {tmp_path / 'died'}}}]"

    killed = pipeline(*SMALL, "strategy=multi_worker", "workers=2", "train.steps=8", "measure.steps=0", dies, **environ)
    assert killed.code == 0, killed.err
    assert killed.result["restarts"] == 1
    assert killed.result["versions"].keys() == {"python", "jax", "jaxlib", "keras", "numpy"}
    (first,) = killed.run_folders
    model = keras.models.load_model(first / "model.keras")
    held_out = model.evaluate(*_validation(), verbose=0, return_dict=True)
    assert held_out["loss"] == pytest.approx(killed.result["val_loss"], abs=1e-5)

    on = pipeline(
        *SMALL, "strategy=model_parallel", "workers=1", "train.steps=16", "measure.steps=0", dies,
        f"resume={first.name}", "resume_changes=[train.steps]", **environ,
    )  # fmt: skip
    assert on.code == 0, on.err

    measured = pipeline(
        *SMALL, "strategy=mirrored", "workers=2", "train.steps=16", "measure.steps=4", "measure.repeats=2", dies,
        "output_dir=whole", **environ,
    )  # fmt: skip
    assert measured.code == 0, measured.err
    (whole,) = (tmp_path / "whole" / "runs").iterdir()
    result = json.loads((whole / "result.json").read_text())
    assert result["speedup"] > 0
    assert result["efficiency"] == pytest.approx(result["speedup"] / 2)
    (there,) = {folder for folder in (tmp_path / "outputs" / "runs").iterdir() if len(losses(folder)) == 16}
    np.testing.assert_allclose(losses(there), losses(whole), rtol=0, atol=1e-5)
    notes = " ".join(json.loads((there / "result.json").read_text())["notes"])
    assert "bytes of weights and of the optimizer's state" in notes


def _validation():
    from pipeline.data import digits

    return digits()[1]


@pytest.mark.slow
def test_a_sweep_over_both_engines_has_one_table_one_report_and_one_verdict_of_which_pays(pipeline, tmp_path):
    ran = pipeline(
        "-m", "backend=tensorflow,jax", "strategy=one_device", "model=mlp", "data=digits", "hardware=2cpu",
        "train.steps=20", "measure.steps=40", "measure.repeats=3", "train.check=off", "train.save=false",
        "sweep.name=engines", "tracking.system_metrics_seconds=0", "launch.startup_timeout=120",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert re.findall(r"engine (\w+)(?:, input-bound)?\n", ran.out) == ["tensorflow", "jax"]
    told = re.search(r"Of different engines \(tensorflow: point 0; jax: point 1\): each speedup is over one", ran.out)
    assert told, ran.out
    assert "Not comparable" not in ran.out
    assert "Left out of the verdict" not in ran.out
    # Which it is, this machine decides; that it is said, and of the one whose point is first, does not.
    said = " ".join(ran.out.split())
    if pays := re.search(r"So of the engines (\w+) pays: at its best it is [\d.]+ times as fast as (\w+)", said):
        assert set(pays.groups()) == {"tensorflow", "jax"}
        fastest = re.search(r"one_device(/jax)? on 1 worker \(point \d\) is the fastest", said)
        assert fastest
        assert bool(fastest[1]) is (pays[1] == "jax")
    else:
        assert re.search(r"A tie: .* Which engine pays cannot be told: \w+ and \w+ tie\.", said)
    folder = tmp_path / "outputs/sweeps/engines"
    verdict = next(line for line in ran.out.splitlines() if "is the fastest" in line or line.startswith("A tie"))
    assert verdict in (folder / "report.html").read_text()
    told = map(json.loads, (folder / "report/events.jsonl").read_text().splitlines())
    (mlflow,) = (event for event in told if event["event"] == "report")
    assert verdict in mlflow["tags"]["verdict"]
    # Each was held against one device of its own.
    baselines = [json.loads((folder / name / "result.json").read_text()) for name in ("0_one_device", "1_one_device")]
    assert [result.get("backend") for result in baselines] == [None, "jax"]
    assert {result["baseline_source"] for result in baselines} == {"measured in this run"}

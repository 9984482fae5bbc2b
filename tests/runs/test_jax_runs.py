"""Whole runs of backend=jax in an environment without TensorFlow: every mesh, killed, gone on with, and every verb."""

import json
import re
from importlib.util import find_spec

import keras
import numpy as np
import pytest
from conftest import efficiency_of, losses, sampled
from on_jax import QUICK

from pipeline.data import digits

pytestmark = [
    pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: pip install jax"),
    pytest.mark.slow,
]

PATIENT = ("tracking.system_metrics_seconds=0", "launch.startup_timeout=120")
SMALL = ("backend=jax", "hardware=4cpu", "train.global_batch=64", "tracking=none", *PATIENT)
MLP = (*SMALL, "model=mlp", "data=digits")
UNMEASURED = ("measure.steps=0", "measure.baseline=none")
IN_MEMORY = "Processes add gradients through shared memory."
BY_GLOO = "Gloo adds gradients, in place of shared memory: "
# As many steps as losses are compared over.
STEPS = 50


@pytest.fixture
def jax(pipeline, without_tensorflow):
    """Runs the command where there is no TensorFlow; it may not fail."""

    def run(*arguments):
        return pipeline(*arguments, python=without_tensorflow, XLA_FLAGS=QUICK).ok()

    return run


def trained(jax, name, *arguments, sweep="first"):
    """(losses, result) of each run of a sweep, in order, in a folder of its own."""
    ran = jax("-m", *arguments, *UNMEASURED, f"train.steps={STEPS}", f"output_dir={name}", f"sweep.name={sweep}")
    results = sorted((ran.folder / name / "sweeps" / sweep).glob("[0-9]*/result.json"))
    found = [([*losses(path.parent).values()], json.loads(path.read_text())) for path in results]
    assert {len(steps) for steps, _ in found} == {STEPS}
    return found


def compiled(folder):
    """What processes have compiled, by when it was written; each writes all, in place of what may be there."""
    return {path.name: path.stat().st_mtime_ns for path in (folder / "compiled").glob("*/*")}


def test_every_strategy_trains_as_one_device_does_and_compiles_nothing_the_second_time(jax, tmp_path):
    (one, _), *others = trained(jax, "all", *MLP, "strategy=one_device,mirrored", "workers=null")
    two = (*MLP, "strategy=mirrored,multi_worker", "workers=2")
    others += (of_two := trained(jax, "two", *two))
    others += trained(jax, "parts", *MLP, "strategy=model_parallel", "workers=1,2", "strategy.devices_per_replica=2")
    assert [(result["strategy"], result["replicas"]) for _, result in others] == [
        ("mirrored", 4), ("mirrored", 2), ("multi_worker", 2), ("model_parallel", 1), ("model_parallel", 2),
    ]  # fmt: skip
    for found, result in others:
        np.testing.assert_allclose(found, one, rtol=0, atol=1e-5, err_msg=result["strategy"])
        assert (IN_MEMORY in result["notes"]) == (result["strategy"] == "multi_worker")
        assert result["versions"].keys() == {"python", "jax", "jaxlib", "keras", "numpy"}
    kept = compiled(tmp_path / "two")
    again = trained(jax, "two", *two, sweep="again")
    assert compiled(tmp_path / "two") == kept != {}
    assert [found for found, _ in again] == [found for found, _ in of_two]


def test_prepared_files_train_as_the_arrays_that_they_were_made_of(jax):
    jax("prepare", "data=digits", "out=prepared", "processes=1")
    # Batches of all examples, which are in another order there.
    whole = (*SMALL, "model=mlp", f"train.global_batch={len(digits()[0][1])}", "strategy=mirrored", "workers=2")
    ((one, _),) = trained(jax, "one", *whole, "data=digits")
    ((read, _),) = trained(jax, "read", *whole, "data=tfrecord", "data.path=prepared")
    np.testing.assert_allclose(read, one, rtol=0, atol=1e-5)


@pytest.mark.parametrize("model", sampled(["normalized", "transformer"], 1))
def test_two_processes_train_other_models_as_one_device_does(jax, model):
    given = {
        "normalized": ("model=mlp", "model.build={_target_: on_jax.convolutional}", "data=digits"),
        "transformer": ("model=transformer", "data=text", "data.build.length=16", "model.build.blocks=2"),
    }[model]
    both = ("strategy=one_device,multi_worker", "workers=null", "hardware.devices_per_host=2")
    (one, _), (two, result) = trained(jax, "both", *SMALL, *given, *both)
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
    assert result["processes"] == 2
    assert any(note.startswith(BY_GLOO) and note.endswith(" in one bucket.") for note in result["notes"])


def test_processes_that_may_not_have_the_memory_add_by_gloo_and_say_so(pipeline, without_tensorflow, tmp_path):
    bounded = tmp_path / "python"
    # In blocks of 512 or 1024 bytes: less than four slots take.
    bounded.write_text(f'#!/bin/sh\nulimit -f 3000\nexec {without_tensorflow} "$@"\n')
    bounded.chmod(0o755)
    ran = pipeline(*MLP, *UNMEASURED, "train.steps=4", "strategy=multi_worker", "workers=2", python=bounded).ok()
    (said,) = (note for note in ran.result["notes"] if note.startswith(BY_GLOO))
    assert "rank 0 says: " in said


def test_a_run_that_is_killed_and_goes_on_on_another_mesh_trains_as_one_device_does(jax, tmp_path):
    dies = f"train.callbacks=[{{_target_: dying.Dies, at: 3, marker: {tmp_path / 'died'}}}]"
    small = (*MLP, "train.steps_per_call=2", "checkpoint.every_steps=4", dies)

    killed = jax(*small, "strategy=multi_worker", "workers=2", "train.steps=8", "measure.steps=0")
    assert killed.result["restarts"] == 1
    (first,) = killed.run_folders
    held_out = keras.models.load_model(first / "model.keras").evaluate(*digits()[1], verbose=0, return_dict=True)
    assert held_out["loss"] == pytest.approx(killed.result["val_loss"], abs=1e-5)

    goes_on = ("measure.steps=0", f"resume={first.name}", "resume_changes=[train.steps]")
    jax(*small, "strategy=model_parallel", "workers=1", "train.steps=16", *goes_on)
    anew = ("measure.steps=4", "measure.repeats=2", "output_dir=whole")
    measured = jax(*small, "strategy=mirrored", "workers=2", "train.steps=16", *anew)
    (whole,) = (measured.folder / "whole" / "runs").iterdir()
    result = json.loads((whole / "result.json").read_text())
    assert result["speedup"] > 0
    assert result["efficiency"] == efficiency_of(result)
    (there,) = {folder for folder in (tmp_path / "outputs" / "runs").iterdir() if len(losses(folder)) == 16}
    assert losses(there) == pytest.approx(losses(whole), rel=0, abs=1e-5)
    notes = " ".join(json.loads((there / "result.json").read_text())["notes"])
    assert "bytes of weights and of the optimizer's state" in notes


def test_a_sweep_its_report_a_comparison_and_a_prediction_need_no_tensorflow(jax, pipeline, without_tensorflow):
    measured = ("measure.steps=4", "measure.repeats=2", "train.steps=8")
    swept = jax("-m", *MLP, *measured, "strategy=mirrored", "workers=1,2", "tracking=sqlite", "sweep.name=both")
    (report,) = swept.folder.glob("outputs/sweeps/both/report.html")
    report.unlink()
    jax("report", "sweep=both")
    assert report.exists()
    runs = [str(path.parent) for path in sorted(swept.folder.glob("outputs/sweeps/both/**/result.json"))]
    assert len(runs) == 2
    assert "examples/s" in jax("compare", *runs).out
    jax("sync")
    assert "predicted" in jax("predict", *MLP, *measured, "strategy=mirrored", "workers=2").out
    well = pipeline("doctor", *MLP, python=without_tensorflow)
    assert well.code in (0, 1), well.out
    assert "JAX" in next(line for line in well.out.splitlines() if " backend " in line)
    assert "tensorflow" not in well.out.lower()
    refused = pipeline("model=mlp", "data=digits", python=without_tensorflow)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert "Expected the package tensorflow for backend=tensorflow, received a Python without it" in refused.err
    missed = pipeline("doctor", "model=mlp", python=without_tensorflow).failed(3)
    assert "Try python -m pip install 'distributed-keras-pipeline'" in missed.out


def test_a_sweep_over_both_engines_has_one_table_one_report_and_one_verdict_of_which_pays(pipeline, tmp_path):
    typed = ("backend=tensorflow,jax", "strategy=one_device", "model=mlp", "data=digits", "hardware=2cpu", *PATIENT)
    length = ("train.steps=20", "measure.steps=40", "measure.repeats=3", "train.check=off", "train.save=false")
    ran = pipeline("-m", *typed, *length, "sweep.name=engines").ok()
    # What this machine did beside it follows the engine: busy, unsteady.
    assert re.findall(r" engine (tensorflow|jax)(?:, [a-z -]+)*\n", ran.out) == ["tensorflow", "jax"]
    told = re.search(r"Of different engines \(tensorflow: point 0; jax: point 1\): each speedup is over one", ran.out)
    assert told, ran.out
    assert "Not comparable" not in ran.out
    assert "Left out of the verdict" not in ran.out
    # Which it is, this machine decides; that it is said, does not.
    said = " ".join(ran.out.split())
    assert re.search(r"Use one_device(/jax)? on 1 worker \(point \d\)", said)
    assert re.search(r"Of the engines \w+ pays: |Which engine pays is not known: ", said)
    folder = tmp_path / "outputs/sweeps/engines"
    # Each was held against one device of its own.
    baselines = [json.loads((folder / name / "result.json").read_text()) for name in ("0_one_device", "1_one_device")]
    assert [result.get("backend") for result in baselines] == [None, "jax"]
    assert {result["baseline_source"] for result in baselines} == {"measured in this run"}

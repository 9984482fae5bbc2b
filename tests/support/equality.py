"""Runs of several strategies, and whether they trained to the same weights."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from conftest import CONF, QUICK, Ran, logged, losses

# What is compared before training is another test's, and takes a fifth of a run.
STEPS = ("train.steps=20", "train.global_batch=32", "train.steps_per_call=5", "train.check=off")
TOLERANCE = 1e-5


def weights(folder: Path) -> list[np.ndarray]:
    return [np.asarray(each) for each in keras.saving.load_model(folder / "model.keras").get_weights()]


def last(folder: Path, kind: str) -> dict[str, Any]:
    return logged(folder, kind)[-1]


def sweep(pipeline, points: int, *arguments: str) -> dict[str, list[Path]]:
    """Runs a sweep with one device in it; returns the folders of its runs by what else was swept."""
    ran: Ran = pipeline("-m", *QUICK, *STEPS, f"--config-dir={CONF}", *arguments, timeout=900).ok()
    assert len([result for result in ran.results if result["status"] == "FINISHED"]) == points, ran.out
    for folder in ran.run_folders:
        result = json.loads((folder / "result.json").read_text())
        errors = [event["error"].lower() for event in logged(folder, "failed")]
        # TensorFlow parts processes where a machine stands still for ten seconds: they begin again.
        stood_still = bool(errors) and all("heartbeat" in error for error in errors)
        assert stood_still or result["oversubscribed"] or result["status"] != "FINISHED" or result["notes"] == []
    groups: dict[str, list[Path]] = {}
    for folder in ran.run_folders:
        plan = json.loads((folder / "plan.json").read_text())
        groups.setdefault(str(plan["model_build"]) + str(plan["data_build"]), []).append(folder)
    return groups


def assert_equal(folders: list[Path], tolerance: float = TOLERANCE) -> None:
    (one,) = [folder for folder in folders if "one_device" in folder.name]
    for folder in folders:
        for ours, reference in zip(weights(folder), weights(one), strict=True):
            np.testing.assert_allclose(ours, reference, atol=tolerance, rtol=0, err_msg=str(folder))
        assert losses(folder) == pytest.approx(losses(one), rel=tolerance, abs=tolerance), folder
        ours, reference = last(folder, "epoch"), last(one, "epoch")
        for name in ("metrics", "val_metrics", "loss", "val_loss"):
            assert ours[name] == pytest.approx(reference[name], rel=tolerance, abs=tolerance), folder
        replicas = {digest for event in logged(folder, "finished") for digest in event["weights"]}
        assert len(replicas) == 1, f"replicas differ in {folder}"

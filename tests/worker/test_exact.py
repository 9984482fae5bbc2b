"""Any number of workers trains what one device trains, to the last digits that arithmetic allows."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import own
import pytest
from conftest import QUICK, Ran, sampled

# What is compared before training is another test's, and takes a fifth of a run.
STEPS = ("train.steps=20", "train.global_batch=32", "train.steps_per_call=5", "train.check=off")
TOLERANCE = 1e-5


def weights(folder: Path) -> list[np.ndarray]:
    return [np.asarray(each) for each in keras.saving.load_model(folder / "model.keras").get_weights()]


def last(folder: Path, kind: str) -> dict[str, Any]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["event"] == kind][-1]


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [loss for event in lines if event["event"] == "steps" and event["rank"] == 0 for loss in event["losses"]]


def sweep(pipeline, points: int, *arguments: str) -> dict[str, list[Path]]:
    """Runs a sweep with one device in it; returns the folders of its runs by what else was swept."""
    ran: Ran = pipeline("-m", *QUICK, *STEPS, f"--config-dir={own.CONF}", *arguments, timeout=900)
    assert ran.code == 0, ran.out + ran.err
    finished = [result for result in ran.results if result["status"] == "FINISHED"]
    assert len(finished) == points, ran.out
    assert [result["notes"] for result in finished if not result["oversubscribed"] and result["notes"]] == []
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
        for name in ("metrics", "val_metrics"):
            assert ours[name] == pytest.approx(reference[name], rel=tolerance, abs=tolerance), folder
        for name in ("loss", "val_loss"):
            assert ours[name] == pytest.approx(reference[name], rel=tolerance, abs=tolerance), folder
        replicas = {digest for event in finished(folder) for digest in event["weights"]}
        assert len(replicas) == 1, f"replicas differ in {folder}"


def finished(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in lines if event["event"] == "finished"]


@pytest.mark.slow
def test_momentum_or_adam_with_batchnorm_on_1_and_4_workers_also_where_some_have_no_example(pipeline):
    (optimizer,) = sampled(("sgd", "adam"), 1)
    (folders,) = sweep(
        pipeline,
        8,
        "strategy=one_device,default,mirrored,central_storage,multi_worker",
        "workers=1,4",
        "model=normalised",
        "data=numbered",
        # The last batch of an epoch and of a validation has one.
        "data.build.examples=225",
        "data.build.validation=33",
        f"model.build.optimizer={optimizer}",
    ).values()
    assert_equal(folders)


@pytest.mark.slow
def test_clipping_moving_averages_and_schedules_mean_what_they_mean_on_one_device(pipeline):
    (optimizer,) = sampled(("clipped", "overwritten", "scheduled"), 1)
    groups = sweep(
        pipeline,
        4,
        "strategy=one_device,mirrored,central_storage,multi_worker",
        "workers=null",
        "model=normalised",
        "data=numbered",
        f"model.build.optimizer={optimizer}",
    )
    for folders in groups.values():
        assert_equal(folders)


@pytest.mark.slow
def test_many_inputs_and_outputs_weighted_losses_added_losses_and_every_reduction(pipeline):
    (weighted,) = sampled(("false", "true"), 1)
    (reduction,) = sampled(("sum_over_batch_size", "sum", "mean_with_sample_weight"), 1)
    groups = sweep(
        pipeline,
        4,
        "strategy=one_device,mirrored,central_storage,multi_worker",
        "workers=null",
        "model=two_headed",
        "data=two_headed",
        f"model.build.reduction={reduction}",
        f"data.build.weighted={weighted}",
    )
    for folders in groups.values():
        assert_equal(folders)


@pytest.mark.slow
def test_masked_sequences_count_by_what_is_not_masked(pipeline):
    (folders,) = sweep(
        pipeline,
        4,
        "strategy=one_device,mirrored,central_storage,multi_worker",
        "workers=null",
        "model=masked",
        "data=padded",
    ).values()
    assert_equal(folders)


@pytest.mark.slow
def test_tables_of_which_a_step_reads_few_rows_and_an_area_under_a_curve(pipeline):
    # One process alone reads the whole log in its order; several read shards of it.
    (folders,) = sweep(
        pipeline,
        3,
        "strategy=one_device,mirrored,central_storage",
        "workers=null",
        "model=recommender",
        "data=clicks",
        "data.build.train_examples=2500",
        "data.build.validation_examples=1000",
    ).values()
    assert_equal(folders)


@pytest.mark.slow
def test_the_recommender_finds_the_signal_on_several_processes(pipeline):
    ran = pipeline(
        *QUICK, "strategy=multi_worker", "workers=2", "model=recommender", "data=clicks", "train.epochs=2",
        "train.replica_batch=128",
    )  # fmt: skip
    assert ran.code == 0, ran.err
    assert ran.result["val_metrics"]["auc"] > 0.78
    assert ran.result["notes"] == []


@pytest.mark.slow
def test_dropout_seeds_and_half_width_gradients_train_too(pipeline):
    ran = pipeline(
        "-m",
        *QUICK,
        "strategy=mirrored,central_storage,multi_worker",
        "workers=2",
        "train.gradient_bits=16",
        "data=digits",
        "model.build.filters=[8,16]",
        "train.learning_rate=0.005",
        "train.epochs=8",
    )
    assert ran.code == 0, ran.err
    for result in ran.results:
        assert result["val_metrics"]["accuracy"] > 0.9
        assert result["notes"] == []


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses_to_the_last_bit(pipeline):
    (strategy,) = sampled(("mirrored", "multi_worker"), 1)
    ran = pipeline(
        "-m",
        *QUICK,
        f"strategy={strategy}",
        "workers=2",
        "train.deterministic=true",
        "data=digits",
        "model.build.filters=[8,16]",
        "train.check=off",
        "train.steps=20",
        "train.steps_per_call=4,7",
    )
    assert ran.code == 0, ran.err
    runs = [losses(folder) for folder in ran.run_folders]
    assert len(runs) == 2
    assert len(runs[0]) == 20
    assert runs[0] == runs[1]

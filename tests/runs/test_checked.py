"""What replicas cannot train as one device does is told before training, which goes on as if nothing had been tried."""

import json
import sqlite3

import pytest
from conftest import QUICK, logged, losses

MODEL = ("model.build._target_=looking.model", "data.build._target_=looking.numbers")
SMALL = (*MODEL, "measure.steps=0", "measure.baseline=none", "workers=2", "train.replica_batch=8", "train.epochs=2")


def trained(run):
    """The loss of each step, and the hashes of weights of the replicas of each process."""
    return losses(run), sorted(event["weights"] for event in logged(run, "finished"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker"])
def test_training_is_the_same_to_the_last_bit_with_the_check_and_without(pipeline, strategy):
    layer = "+model.build.layer=running mean"
    ran = pipeline("-m", "tracking=none", *SMALL, f"strategy={strategy}", "train.deterministic=true", layer,
                   "model.build.dropout=0.5", "train.check=true,off", timeout=400).ok()  # fmt: skip
    compared, plain = sorted(ran.run_folders, key=lambda folder: int(folder.name.split("_")[0]))
    assert trained(compared) == trained(plain)
    with_check, without = (json.loads((folder / "result.json").read_text()) for folder in (compared, plain))
    assert "check" not in without
    assert without["notes"] == [note for note in with_check["notes"] if "one device" not in note]
    assert with_check["check"]["outcome"] == "different"
    assert [difference["what"] for difference in with_check["check"]["differences"]] == ["state"]
    assert "warning: on a small batch 2 replicas differ from one device in state of looking/mean by" in ran.out


@pytest.mark.slow
def test_a_repeat_is_compared_by_what_the_first_run_found_if_that_was_equal_and_another_run_by_itself(pipeline):
    keys = ("strategy=mirrored", "train.deterministic=true", "sweep.repeats=2", "train.seed=0,1", "tracking=none")
    ran = pipeline("-m", *SMALL, *keys, timeout=400).ok()
    checks = {folder.name: json.loads((folder / "result.json").read_text())["check"] for folder in ran.run_folders}
    assert {check["outcome"] for check in checks.values()} == {"equal"}
    assert {name: check["seconds"] > 0.0 for name, check in checks.items()} == {
        "0_mirrored": True, "1_mirrored": True, "0_mirrored_2": False, "1_mirrored_2": False,
    }  # fmt: skip
    first, again = (trained(folder) for folder in sorted(ran.run_folders) if folder.name.startswith("0_"))
    assert first == again


@pytest.mark.slow
def test_a_loss_over_pairs_is_told_once_and_in_the_result_and_mlflow_and_strict_refuses_it(pipeline):
    pairs = (*SMALL, "strategy=mirrored", "+model.build.loss=pairs")
    ran = pipeline(*pairs).ok()
    (note,) = [note for note in ran.result["notes"] if "train.gather=true" in note]
    assert "received the loss pairs, which depends on the batch as a whole" in note
    assert ran.out.count("warning: Expected losses that are means") == 1
    assert "on a small batch" not in (ran.out + str(ran.result["notes"])).lower()
    assert "the loss is no mean over examples, such as one over pairs of them" in ran.result["check"]["cause"]
    with sqlite3.connect(ran.folder / "outputs" / "mlflow.db") as store:
        tags = dict(store.execute("select key, value from tags"))
        metrics = dict(store.execute("select key, value from latest_metrics"))
    assert tags["check"] == "different"
    assert note in tags["mlflow.note.content"]
    assert metrics["one_device/largest_difference"] == pytest.approx(
        max(difference["relative"] for difference in ran.result["check"]["differences"]), rel=1e-3
    )
    strict = pipeline(*pairs, "tracking=none", "train.check=strict").failed()
    assert "for train.check=strict, received others: " in strict.err
    (refused,) = [result for result in strict.results if result["status"] == "FAILED"]
    assert refused["error"].endswith("what it is meant to see.")
    assert refused["epochs"] is None


def test_a_model_that_is_equal_passes_the_strict_check_in_silence(pipeline):
    ran = pipeline(*QUICK, "model=cnn", "data=digits", "train.steps=4", "workers=2", "train.check=strict").ok()
    assert ran.result["check"]["outcome"] == "equal"
    assert ran.result["check"]["differences"] == []
    assert not [note for note in ran.result["notes"] if "one device" in note]

"""Input laid over workers, callbacks decided once, and what else a person's own model may bring."""

import keras
import numpy as np
import pytest
from conftest import QUICK, logged, sampled, weights

OWN = ("model.build._target_=own.normalised", "data.build._target_=own.numbered")
TWO = ("strategy=multi_worker", "workers=2")
LEARNT = (("steps", "losses"), ("epoch", "val_loss"), ("finished", "weights"))


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "kinds"), [
    (("strategy={}".format(*sampled(("mirrored", "multi_worker"), 1)), "workers=3", "train.global_batch=12"),
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


@pytest.mark.parametrize("layout", [("strategy=mirrored", "workers=2"), TWO])
def test_callbacks_run_once_in_keras_order_and_every_worker_obeys(pipeline, tmp_path, layout):
    notes, meddled = tmp_path / "notes.txt", tmp_path / "meddled.txt"
    ran = pipeline(
        *QUICK, *layout, *OWN, "train.epochs=4", "train.replica_batch=32", "train.steps_per_call=3",
        f"train.callbacks=[{{_target_: own.recording, path: {notes}}}, {{_target_: own.Meddling, path: {meddled}}}]",
    ).ok()  # fmt: skip
    batches = ["batch_end 2 ['accuracy', 'loss']", "batch_end 3 ['accuracy', 'loss']"]
    ends = [f"epoch_end {epoch} ['accuracy', 'loss', 'val_accuracy', 'val_loss']" for epoch in (0, 1)]
    assert notes.read_text().splitlines() == [
        "train_begin 4", "epoch_begin 0", *batches, ends[0], "epoch_begin 1", *batches, ends[1], "train_end ",
    ]  # fmt: skip
    assert len(meddled.read_text().splitlines()) == 2
    assert ran.result["epochs"] == 2
    # The callback halved the learning rate after the first epoch and zeroed the weights after the second.
    rates = {event["learning_rate"] for event in ran.events("steps")}
    assert sorted(rates) == pytest.approx([0.025, 0.05])
    (folder,) = ran.run_folders
    saved = keras.saving.load_model(folder / "model.keras")
    assert all((np.asarray(weight) == 0).all() for weight in saved.get_weights())
    assert len(weights(folder)) == 1


@pytest.mark.slow
def test_measuring_changes_nothing_that_training_learns(pipeline, tmp_path):
    (layout,) = sampled((("strategy=mirrored", "workers=2"), TWO), 1)
    notes = tmp_path / "notes.txt"
    # Nothing measured; measured in the first steps; measured for longer than training lasts.
    ran = pipeline(
        "-m", *QUICK, *layout, *OWN, "measure.steps=0,2,40", "measure.repeats=2", "train.epochs=2",
        "train.replica_batch=16", "train.steps_per_call=3", "+model.build.optimizer=averaged",
        f"train.callbacks=[{{_target_: own.recording, path: {notes}}}]",
    ).ok()  # fmt: skip
    learnt, timed = [], []
    for folder in ran.run_folders:
        chief = [event for event in logged(folder) if event.get("rank") == 0]
        learnt.append([(event[of], kind) for kind, of in LEARNT for event in chief if event["event"] == kind])
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
        "{_target_: own.halving}",
    ]
    ran = pipeline(*QUICK, *TWO, *OWN, "train.epochs=5", f"train.callbacks=[{', '.join(callbacks)}]", timeout=300).ok()
    assert ran.result["epochs"] == 2
    assert (tmp_path / "log.csv").read_text().count("\n") == 3
    assert list((tmp_path / "board").rglob("events.out.tfevents*"))
    assert (tmp_path / "best.keras").exists()
    assert (tmp_path / "step.weights.h5").exists()
    assert len(weights(ran.run_folders[0])) == 1
    ended = {name: ran.result[name] for name in ("planned_epochs", "stopped_by", "restored_epoch")}
    assert ended == {"planned_epochs": 5, "stopped_by": "EarlyStopping", "restored_epoch": 1}
    assert sum("EarlyStopping" in note for note in ran.result["notes"]) == 2


@pytest.mark.slow
def test_a_rehearsal_lays_out_two_hosts_with_four_devices_and_says_so(pipeline):
    ran = pipeline(
        *QUICK, "strategy=multi_worker", "hardware=2x4gpu", "hardware.rehearse=true", *OWN, "train.steps=4",
        "train.replica_batch=8",
    ).ok()  # fmt: skip
    names = ("processes", "replicas", "rehearsal", "oversubscribed")
    assert [ran.result[name] for name in names] == [2, 8, True, True]
    assert "rehearsal" in ran.out
    digests = [digest for event in ran.events("finished") for digest in event["weights"]]
    assert (len(digests), len(set(digests))) == (8, 1)

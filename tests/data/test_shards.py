"""Whole runs on TFRecord shards: each example once an epoch under every strategy, and nothing broken trained on."""

import html
import json
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import shards
from batch_layouts import stream
from conftest import QUICK, Ran, UnderWay, left_behind, logged, sampled
from own_files import encoded, write

from pipeline import data as sources
from pipeline.data.errors import DataError
from pipeline.data.records import Feature, Manifest, Shard
from pipeline.worker.data.loading import broken, refuse
from pipeline.worker.layout import BatchLayout
from pipeline.worker.model_error import TrainingError

# (Examples in each file, workers.)
LAYOUTS = (
    ((83,), 2), ((83,), 3), ((40, 43), 1), ((40, 43), 4), ((28, 28, 27), 3), ((28, 28, 27), 4), ((3, 80), 2),
    ((3, 80), 3), ((10, 11, 12, 13, 14, 15, 8), 2), ((10, 11, 12, 13, 14, 15, 8), 4),
)  # fmt: skip
COUNT = ("model.build._target_=own.counting", "train.epochs=2", "train.steps_per_call=1", "train.save=false",
         "train.check=off")  # fmt: skip
LABELS = 83


def prepared(folder: Path, *arguments: str, data: str = "data") -> tuple[str, ...]:
    return (*QUICK, *COUNT, "data=tfrecord", f"data.path={folder / data}", *arguments)


def expect_once_an_epoch(ran: Ran, *lost: Sequence[int], epochs: int = 2) -> None:
    """Each label but those lost was counted, added and squared once an epoch by the metric of each run."""
    for folder, broken_ones in zip(ran.ok().run_folders, lost, strict=True):
        labels = set(range(LABELS)) - set(broken_ones), range(LABELS, LABELS + 13)
        sums = [[len(each), sum(each), sum(label**2 for label in each)] for each in labels]
        # One that was ended after its last checkpoint is told again by who goes on.
        told = {event["epoch"]: event for event in logged(folder, "epoch")}
        seen = [[each[group][f"labels_{place}"] for place in range(3)]
                for each in told.values() for group in ("metrics", "val_metrics")]  # fmt: skip
        assert seen == pytest.approx(np.array(sums * epochs), rel=1e-6), folder


@pytest.mark.parametrize(("files", "said"), [
    ((40, 43), "2 files; each of 2 processes reads all of them, since they cannot be divided evenly"),
    pytest.param((21, 21, 21, 20), "4 files; each of 2 processes reads its own", marks=pytest.mark.slow),
])  # fmt: skip
def test_two_processes_read_each_record_once_an_epoch(pipeline, tmp_path, files, said):
    shards.write(tmp_path / "data", files, [13])
    ran = pipeline(*prepared(tmp_path, "strategy=multi_worker", "workers=2", "train.replica_batch=8"))
    expect_once_an_epoch(ran, ())
    assert said in ran.out


@pytest.mark.slow
@pytest.mark.parametrize(("how", "strategies"), [
    ("data.cache=none", ["mirrored", "multi_worker", "central_storage", "parameter_server"]),
    ("data.shard=file", ["multi_worker"]), ("data.service=2", sampled(("mirrored", "multi_worker"), 1)),
    ("data.cache=memory,file", sampled(("mirrored", "multi_worker"), 1)),
])  # fmt: skip
def test_every_record_is_read_once_an_epoch_however_it_is_read_under_every_strategy(
    pipeline, tmp_path, how, strategies
):
    ((files, workers),) = sampled(LAYOUTS, 1) if len(strategies) > 1 else [((10, 40, 20, 13), 3)]
    shards.write(tmp_path / "data", files, [13])
    several = ("-m", f"strategy={','.join(strategies)}", f"workers={workers}", how)
    ran = pipeline(*prepared(tmp_path, "train.replica_batch=4", "launch.max_restarts=0", *several), timeout=600)
    expect_once_an_epoch(ran, *[()] * len(strategies) * (1 + how.count(",")))


def test_too_few_files_are_refused_before_anything_is_started(asked, tmp_path):
    shards.write(tmp_path / "data", [40, 43])
    ran = asked(*prepared(tmp_path, "strategy=multi_worker", "workers=3", "data.shard=file")).failed(2)
    words = "Expected data.shard=file with a file for each of 3 processes, received 2. Try data.shard=element"
    assert words in ran.err


BROKEN = {
    "bit flipped": (lambda folder: shards.flip(folder, 1, (7, 20)),
     "00001-of-00003.tfrecord record 7 has a wrong checksum", [37]),
    "length flipped": (lambda folder: shards.flip(folder, 1, (7, 2)),
     "00001-of-00003.tfrecord record 7 has a length with a wrong checksum", [37]),
    "checksum of a length flipped": (lambda folder: shards.flip(folder, 1, (7, 9)),
     "00001-of-00003.tfrecord record 7 has a length with a wrong checksum", [37]),
    "several": (lambda folder: shards.flip(folder, 0, (0, 20), (1, 20), (29, 13)),
     "00000-of-00003.tfrecord record 0 has a wrong checksum; ", [0, 1, 29]),
    "cut": (lambda folder: shards.cut(folder, 2, 4), "00002-of-00003.tfrecord record 4 is cut off", range(74, 83)),
    "cut between two": (lambda folder: shards.cut(folder, 2, 4, byte=0),
     "00002-of-00003.tfrecord record 4 is not there: 13 were expected", range(74, 83)),
    "missing": (lambda folder: shards.file_of(folder, 1).unlink(),
     "00001-of-00003.tfrecord cannot be read (No such file or directory)", range(30, 70)),
    "another shape": (lambda folder: shards.put(folder, 1, 5, shards.record(35, np.ones(5, np.float32))),
     "00001-of-00003.tfrecord record 5 has 5 values of x, 4 of shape (4,) were expected", [35]),
    "NaN": (lambda folder: shards.put(folder, 1, 5, shards.record(35, np.array([1, np.nan, 1, 1], np.float32))),
     "00001-of-00003.tfrecord record 5 has NaN or infinity in x", [35]),
    "label": (lambda folder: shards.put(folder, 1, 5, shards.record(96)),
     "00001-of-00003.tfrecord record 5 has label 96, 0 to 95 were expected", [35]),
    "no example": (lambda folder: shards.put(folder, 1, 5, shards.records.framed(b"\xff" * 9)),
     "00001-of-00003.tfrecord record 5 is no tf.train.Example", [35]),
}  # fmt: skip


def break_data(folder: Path, kind: str) -> None:
    shards.write(folder, [30, 40, 13], [13], num_classes=96)
    # Labels count up to there, so that no class is without examples.
    manifest = folder / "manifest.json"
    values = json.loads(manifest.read_text())
    values["splits"]["train"][0]["classes"] = {str(label): 1 for label in range(96)}
    manifest.write_text(json.dumps(values))
    BROKEN[kind][0](folder)


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_named_with_its_file_and_record(tmp_path, kind):
    break_data(tmp_path / "data", kind)
    _, words, lost = BROKEN[kind]
    train, _ = sources.tfrecord(path=str(tmp_path / "data"))
    with pytest.raises(TrainingError, match=f"received {len(lost)} that cannot: ") as refused:
        refuse(broken(train, None, 0, 1, True), ())
    assert words in str(refused.value)


def test_class_numbers_that_were_prepared_as_floats_are_looked_at_and_quantities_are_not(tmp_path):
    labels = np.array([0, 2, 3, -1], np.float32)
    records = (shards.records.framed(shards.records.example({"y": label[None]})) for label in labels)
    data = write(tmp_path / "a.tfrecord", b"".join(records)).read_bytes()
    parts = {"train": (Shard("a.tfrecord", 4, len(data), ""),)}
    wrong = [(2, "has label 3, 0 to 2 were expected"), (3, "has label -1, 0 to 2 were expected")]
    for classes, flaws in ((3, wrong), (1, []), (None, [])):
        manifest = Manifest((Feature("y", (), "float32", "floats"),), parts, classes)
        (tmp_path / "manifest.json").write_text(manifest.to_json())
        train, _ = sources.tfrecord(path=str(tmp_path))
        assert [(flaw.first, flaw.why) for flaw in broken(train, None, 0, 1, True)] == flaws


def test_with_skip_what_is_broken_is_left_out_and_counted(pipeline, tmp_path):
    kinds = ("several", "cut")
    for kind in kinds:
        break_data(tmp_path / kind, kind)
    every = ",".join(str(tmp_path / kind) for kind in kinds)
    layout = ("strategy=multi_worker", "workers=2", "train.replica_batch=4", "data.on_error=skip")
    ran = pipeline(*QUICK, *COUNT, "-m", "data=tfrecord", f"data.path={every}", *layout, timeout=300).ok()
    (page,) = tmp_path.glob("outputs/sweeps/*/report.html")
    expect_once_an_epoch(ran, *(BROKEN[kind][2] for kind in kinds))
    for kind, result in zip(kinds, ran.results, strict=True):
        _, words, lost = BROKEN[kind]
        assert result["train_examples_skipped"] == len(lost)
        assert result["validation_examples_skipped"] == 0
        said = f"{len(lost)} training example{'s were' if len(lost) > 1 else ' was'} left out: "
        (note,) = [note for note in result["notes"] if said in note]
        assert words in note
        assert note in " ".join(ran.out.split())
        assert note in html.unescape(page.read_text())


@pytest.mark.slow
def test_another_process_on_a_broken_file_names_it_while_training(pipeline, tmp_path):
    # What changes once training has begun is met by whoever reads it.
    shards.write(tmp_path / "data", [500, 500])
    given = prepared(tmp_path, "strategy=multi_worker", "workers=2", "train.replica_batch=1", "data.shuffle_window=2")
    with UnderWay(tmp_path, *given) as run:
        run.until_told("steps", 3)
        for number in range(2):
            shards.flip(tmp_path / "data", number, *((place, 20) for place in range(350, 490)))
        ran = run.ended(120)
    assert ran.code == 1
    assert "received 140 that cannot" in ran.err
    assert "of-00002.tfrecord record 350 has a wrong checksum" in ran.err


LONG = (
    "strategy=multi_worker", "workers=2", "train.replica_batch=4", "train.epochs=40", "checkpoint.every_steps=7",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_on_shards_that_is_killed_goes_on_where_it_was(pipeline, tmp_path):
    (arguments,) = sampled([("data.shard=element",), ("data.shard=file", "data.service=1")], 1)
    shards.write(tmp_path / "data", [45, 38], [13])
    given = prepared(tmp_path, *LONG, "launch.max_restarts=0", *arguments)
    with UnderWay(tmp_path, *given) as run:
        run.until_told("checkpoint", 3)
    ran = pipeline(*given)
    expect_once_an_epoch(ran, (), epochs=40)
    assert ran.result["resumed"] == 1


@pytest.mark.slow
def test_a_data_server_that_is_killed_is_named_and_costs_no_example(tmp_path):
    shards.write(tmp_path / "data", [45, 38], [13])
    with UnderWay(tmp_path, *prepared(tmp_path, *LONG, "data.service=1", "launch.max_restarts=1")) as run:
        run.until_told("checkpoint", 2)
        (rank,) = [event["rank"] for event in run.told("started") if event["role"] == "data server"]
        run.harm(signal.SIGKILL, rank)
        ran = run.ended(150)
    expect_once_an_epoch(ran, (), epochs=40)
    assert "data server 2 was killed by SIGKILL. All processes are started again" in ran.out
    assert ran.result["restarts"] == 1
    assert not left_behind(tmp_path)


def test_images_of_the_manifest_are_decoded_varied_and_brought_to_a_size(tmp_path):
    pngs = [encoded(np.full((6, 4, 3), shade, np.uint8)) for shade in (0, 51, 255)]
    examples = (shards.records.example({"x": png, "y": np.array(label)}) for label, png in enumerate(pngs))
    made = write(tmp_path / "a.tfrecord", b"".join(map(shards.records.framed, examples))).read_bytes()
    features = (Feature("x", (6, 4, 3), "float32", "image"), Feature("y", (), "int32", "ints"))
    shard = Shard("a.tfrecord", 3, len(made), "", {"0": 1, "1": 1, "2": 1})
    (tmp_path / "manifest.json").write_text(Manifest(features, {"train": (shard,)}, 3).to_json())

    def images(**options):
        part, held_out = sources.tfrecord(path=str(tmp_path), **options)
        assert held_out is None
        ((_, ((x, y),)),) = stream(part, BatchLayout(3, 1, 0, 1, (3,)), False, 0).take(1)
        assert y.numpy().tolist() == [0, 1, 2]
        assert part.spec[0].shape == x.shape[1:]
        return x.numpy()

    np.testing.assert_allclose(images()[:, 0, 0, 0], [0, 0.2, 1], atol=1e-6)
    assert images(image_size=[3, 2], channels=1).shape == (3, 3, 2, 1)
    assert images(augment={"brightness": 0.3})[1].mean() != pytest.approx(0.2)
    with pytest.raises(DataError, match=r"Expected data\.build\.augment to have flip"):
        images(augment={"zoom": 1})

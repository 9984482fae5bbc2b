"""TFRecord files, prepared here or by TensorFlow Datasets: what is in them, what is broken, and whole runs on them."""

import html
import io
import json
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import shards
import tensorflow as tf
from batch_layouts import stream
from conftest import QUICK, Ran, UnderWay, left_behind, logged, one_of, sampled
from own_files import Array, broken, encoded, flipped, write

from pipeline import data as sources
from pipeline.data import DataError, records, tfds
from pipeline.data.examples import Broken, Examples
from pipeline.data.records import Feature, Manifest, Shard, load_manifest
from pipeline.worker.data import loading
from pipeline.worker.layout import BatchLayout
from pipeline.worker.model_error import TrainingError


def test_records_and_examples_are_those_that_tensorflow_writes(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    x, negative = np.linspace(-1, 1, 12, dtype=np.float32), np.array([-1, 0, 127, 128, 2**40], np.int64)
    features = {"x": x.reshape(3, 4), "y": np.array(7), "negative": negative, "image": b"\x00bytes\xff", "empty": b""}
    others = {"many": [b"one", b"two"], "true": np.array(True), "none": np.zeros(0, np.float32)}
    example = records.example(features | others)
    with tf.io.TFRecordWriter(str(theirs)) as writer:
        for data in (example, b"", b"x" * 1000):
            writer.write(data)
    ours.write_bytes(b"".join(map(records.framed, (example, b"", b"x" * 1000))))
    assert ours.read_bytes() == theirs.read_bytes()
    message = tf.train.Example.FromString(example)
    feature = message.features.feature
    assert list(feature["x"].float_list.value) == x.tolist()
    ints = {name: list(feature[name].int64_list.value) for name in ("negative", "many", "true")}
    assert ints == {"negative": negative.tolist(), "many": [], "true": [1]}
    texts = {name: list(feature[name].bytes_list.value) for name in ("image", "many")}
    assert texts == {"image": [b"\x00bytes\xff"], "many": [b"one", b"two"]}
    assert example == message.SerializeToString(deterministic=True)
    assert records.parsed(example)["y"] == [7]
    with pytest.raises(ValueError, match=r"is no tf\.train\.Example"):
        records.parsed(b"\xff\xff\xff")
    # A file that is cut off ends with what is broken.
    for left in (1, 11, 12, 30):
        data = b"".join(map(shards.record, range(3)))[: 2 * len(shards.record(0)) + left]
        assert [frame.broken for frame in records.frames(io.BytesIO(data))] == [None, None, "is cut off"]


def test_a_manifest_comes_back_as_it_was_and_others_are_refused_in_words():
    shard = Shard("train-00000-of-00001.tfrecord", 3, 171, "00ff", {"0": 1, "2": 2})
    made = Manifest((Feature("x/ids", (None, 3), "int32", "ints"),), {"train": (shard,)}, 3, ("a", "b", "c"))
    assert load_manifest("it", lambda path: made.to_json().encode()) == made
    assert made.classes("train") == {"0": 1, "1": 0, "2": 2}
    words = r"Expected it/manifest\.json to be a manifest of prepared data, received a file that is none"
    for text in ("{", "[]", "{}", made.to_json().replace('"format": 1', '"format": 2')):
        with pytest.raises(DataError, match=words):
            load_manifest("it", lambda path, text=text: text.encode())


# Once a process, which has a class of each name once; its tests may not come one after the other.
@pytest.fixture(scope="session")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets that the library has prepared: grey_squares, whose version 1.2.0 has splits train and test, and
    mixed, with images of several sizes and no keys."""
    import tensorflow_datasets as library

    folder = tmp_path_factory.mktemp("catalogue")

    class GreySquares(library.core.GeneratorBasedBuilder):
        """Squares of one grey."""

        VERSION = library.core.Version("1.2.0")
        SPLITS: ClassVar = {"train": 20, "test": 6}
        KEYS: ClassVar = ("image", "label")
        SIZES = 1

        def _info(self) -> Any:
            features = {
                "image": library.features.Image(shape=(4, 3, 3) if self.SIZES == 1 else (None, None, 3)),
                "label": library.features.ClassLabel(names=["even", "odd"]),
                "amount": np.float32,
            }
            return library.core.DatasetInfo(
                builder=self, features=library.features.FeaturesDict(features), supervised_keys=self.KEYS
            )

        def _split_generators(self, _: Any) -> Any:
            return {name: self._generate_examples(count) for name, count in self.SPLITS.items()}

        def _generate_examples(self, count: int) -> Any:
            for n in range(count):
                size = (4 + n % self.SIZES, 3, 3)
                yield n, {"image": np.full(size, n, np.uint8), "label": n % 2, "amount": n / 2}

    class Mixed(GreySquares):
        """Of several sizes."""

        SPLITS: ClassVar = {"train": 10}
        KEYS = None
        SIZES = 2

    for build in (GreySquares, Mixed):
        build(data_dir=str(folder)).download_and_prepare()
    return folder


def read(part: Examples) -> list[tuple[Array, Any]]:
    """The examples of a part of records, made as training makes them."""
    parsed, decode = [], tf.autograph.experimental.do_not_convert(part.decode)
    for segment in part.raw:
        of_segment = tf.data.TFRecordDataset(segment.path).skip(segment.first).take(segment.records)
        parsed += of_segment.map(decode).as_numpy_iterator()
    every = tf.stack(list(tf.data.TFRecordDataset(part.raw[0].path)))
    tf.map_fn(part.decode, every, fn_output_signature=part.spec)
    return parsed


def test_a_prepared_data_set_is_read_by_its_name_and_what_is_to_be_downloaded_prepared_first(catalogue, tmp_path):
    for name in ("grey_squares", "grey_squares:1.2.0", "grey_squares:1.*.*"):
        train, validation = tfds(name, data_dir=str(catalogue))
        assert (train.count, validation.count, train.class_names) == (20, 6, ("even", "odd"))
    assert train.spec == (tf.TensorSpec([4, 3, 3], tf.float32), tf.TensorSpec([], tf.int32))
    examples = read(train)
    assert sorted(round(float(x[0, 0, 0]) * 255) for x, _ in examples) == list(range(20))
    for x, y in examples:
        np.testing.assert_array_equal(x, np.full((4, 3, 3), x[0, 0, 0]))
        assert round(float(x[0, 0, 0]) * 255) % 2 == y
    assert not broken(train)
    assert train.digest == tfds("grey_squares", data_dir=str(catalogue))[0].digest != validation.digest
    for download in (True, False):
        assert tfds("grey_squares", data_dir=str(tmp_path), download=download)[0].count == 20


def test_a_folder_of_a_version_is_read_splits_may_be_parts_and_images_of_several_sizes(catalogue: Path) -> None:
    path = str(catalogue / "grey_squares/1.2.0")
    train, validation = tfds("mine", path=path, train_split="train[:30%]", validation_split="train[30%:]")
    assert (train.count, validation.count) == (6, 14)
    seen = [[round(float(x[0, 0, 0]) * 255) for x, _ in read(part)] for part in (train, validation)]
    assert sorted(seen[0] + seen[1]) == list(range(20))
    assert tfds("mine", path=path, validation_split=None)[1] is None
    (_, y), *_ = read(tfds("mine", path=path, keys=["image", "amount"])[0])
    assert y.dtype == np.float32
    # Images of several sizes are brought to one.
    arguments: Any = {"data_dir": str(catalogue), "keys": ["image", "label"], "validation_split": None}
    with pytest.raises(DataError, match=r"of one shape in mixed/1\.2\.0, received \['any', 'any', 3\] and \[\]\. Try"):
        tfds("mixed", **arguments)
    train, _ = tfds("mixed", image_size=[2, 5], **arguments)
    assert {x.shape for x, _ in read(train)} == {(2, 5, 3)}


def test_broken_records_of_a_prepared_data_set_are_named(catalogue: Path, tmp_path: Path) -> None:
    shutil.copytree(catalogue / "grey_squares/1.2.0", tmp_path / "1.2.0")
    train, validation = tfds("mine", path=str(tmp_path / "1.2.0"), train_split="train[:15]")
    file = Path(train.raw[0].path)
    whole = file.read_bytes()
    starts = [frame.start for frame in records.frames(io.BytesIO(whole))]
    cut = whole[: starts[5] + 20]
    for data, first, lost, why in (
        (flipped(whole, starts[3] + 20), 3, 1, "has a wrong checksum"), (cut, 5, 10, "is cut off"),
        (whole[: starts[5]], 5, 10, "is not there: 20 were expected"),
    ):  # fmt: skip
        file.write_bytes(data)
        flaws = broken(train)
        assert flaws == [Broken(str(file), first, lost, f"{file} record {first}", why, flaws[0].stop)]
        assert sum(each.records for each in train.without(flaws).raw) == 15 - lost
    # More records than its version has are none of the split.
    file.write_bytes(whole + records.framed(b"more"))
    assert broken(train) == []
    file.unlink()
    assert validation.look(validation, 0, 1, False) == []
    (flaw,) = train.look(train, 0, 1, False)
    assert (flaw.examples, flaw.name, flaw.why) == (15, str(file), "cannot be read (No such file or directory)")


@pytest.mark.parametrize(("name", "arguments", "words"), [
    ("mnist", {}, "Expected data.name=mnist to be prepared in {}, received none there. Try data.build.download=true"),
    ("grey_squares:2.0.0", {}, "Expected data.name=grey_squares:2.0.0 to be prepared in {}, received none there."),
    ("no such", {}, "Expected no such to be a data set of TensorFlow Datasets that can be had, received: Parsing"),
    ("nowhere", {"download": True}, "Expected nowhere to be a data set of TensorFlow Datasets that can be had"),
    ("a", {"path": ""}, "to be the folder of a version that TensorFlow Datasets prepared, received {} without fea"),
    ("grey_squares", {"train_split": "trian"}, "data.build.train_split to be a split of grey_squares/1.2.0 (train"),
    ("grey_squares", {"train_split": "train[5"}, "or a part of one, received train[5. Try data.build.train_split=tr"),
    ("grey_squares", {"train_split": "train[:0]"}, "Expected examples in data.build.train_split=train[:0] of"),
    ("grey_squares", {"keys": ["image"]}, "to be two features of grey_squares/1.2.0 (amount, image, label), receiv"),
    ("grey_squares", {"image_size": [0, 1]}, "Expected image_size to be a height and a width in pixels for data=tfds"),
    ("mixed", {"validation_split": None}, "received none, and it names none itself. Try 'data.build.keys=[image,la"),
    ("mixed", {"keys": ["image", "label"], "image_size": [2, 2]},
     "Expected a split validation or test in mixed/1.2.0, received train. Try"),
], ids=str)  # fmt: skip
def test_data_sets_that_cannot_be_had_are_refused_in_words_at_once(catalogue, name, arguments, words):
    # Which takes many seconds on a busy machine, once.
    import tensorflow_datasets  # noqa: F401

    start, folder = time.monotonic(), {"path": str(catalogue)} if "path" in arguments else {}
    with pytest.raises(DataError, match=re.escape(words.format(catalogue))):
        tfds(name, data_dir=str(catalogue), **arguments | folder)
    assert time.monotonic() - start < 10


def test_without_the_library_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(DataError, match=r"Try pip install 'distributed-keras-pipeline\[tfds\]'\."):
        tfds("mnist")


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


def test_two_processes_read_each_record_once_an_epoch_of_files_of_their_own_if_even_and_too_few_are_refused(
    pipeline, tmp_path
):
    for name, files in {"data": (40, 43), "even": (21, 21, 21, 20)}.items():
        shards.write(tmp_path / name, files, [13])
    typed = prepared(tmp_path, "strategy=multi_worker", "workers=2", "train.replica_batch=8")
    expect_once_an_epoch(ran := pipeline(*typed), ())
    assert "2 files; each of 2 processes reads all of them, since they cannot be divided evenly" in ran.out
    planned = pipeline(*typed, f"data.path={tmp_path / 'even'}", "mode=plan").ok()
    assert "4 files; each of 2 processes reads its own" in planned.out
    refused = pipeline(*typed, "workers=3", "data.shard=file").failed(2)
    words = "Expected data.shard=file with a file for each of 3 processes, received 2. Try data.shard=element"
    assert words in refused.err


@pytest.mark.slow
@pytest.mark.parametrize(("how", "strategies"), [
    ("data.cache=none", ["mirrored", "multi_worker", "central_storage", "parameter_server"]),
    ("data.shard=file", ["multi_worker"]), ("data.service=2", sampled(("mirrored", "multi_worker"), 1)),
    ("data.cache=memory,file", sampled(("mirrored", "multi_worker"), 1)),
])  # fmt: skip
def test_every_record_is_read_once_an_epoch_under_every_strategy(pipeline, tmp_path, how, strategies):
    files, workers = one_of(LAYOUTS) if len(strategies) > 1 else ((10, 40, 20, 13), 3)
    shards.write(tmp_path / "data", files, [13])
    several = ("-m", f"strategy={','.join(strategies)}", f"workers={workers}", how)
    ran = pipeline(*prepared(tmp_path, "train.replica_batch=4", "launch.max_restarts=0", *several), timeout=600)
    expect_once_an_epoch(ran, *[()] * len(strategies) * (1 + how.count(",")))


BROKEN = {
    "bit flipped": (lambda folder: shards.flip(folder, 1, (7, 20)),
     "00001-of-00003.tfrecord record 7 has a wrong checksum", [37]),
    "length flipped": (lambda folder: shards.flip(folder, 1, (7, 2)),
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
        loading.refuse(loading.broken(train, None, 0, 1, True), ())
    assert words in str(refused.value)


def test_class_numbers_that_were_prepared_as_floats_are_looked_at_and_quantities_are_not(tmp_path):
    labels = np.array([0, 2, 3, -1], np.float32)
    framed = (records.framed(records.example({"y": label[None]})) for label in labels)
    data = write(tmp_path / "a.tfrecord", b"".join(framed)).read_bytes()
    parts = {"train": (Shard("a.tfrecord", 4, len(data), ""),)}
    wrong = [(2, "has label 3, 0 to 2 were expected"), (3, "has label -1, 0 to 2 were expected")]
    for classes, flaws in ((3, wrong), (1, []), (None, [])):
        manifest = Manifest((Feature("y", (), "float32", "floats"),), parts, classes)
        (tmp_path / "manifest.json").write_text(manifest.to_json())
        train, _ = sources.tfrecord(path=str(tmp_path))
        assert [(flaw.first, flaw.why) for flaw in loading.broken(train, None, 0, 1, True)] == flaws


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_data_server_that_is_killed_is_named_and_costs_no_example(tmp_path):
    shards.write(tmp_path / "data", [45, 38], [13])
    layout = ("strategy=multi_worker", "workers=2", "train.replica_batch=4", "train.epochs=40")
    kept = ("checkpoint.every_steps=7", "data.service=1", "launch.max_restarts=1")
    with UnderWay(tmp_path, *prepared(tmp_path, *layout, *kept)) as run:
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

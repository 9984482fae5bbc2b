"""TFRecord files: written as TensorFlow writes them, those of TensorFlow Datasets, and what is broken about them."""

import io
import shutil
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf
from own_files import Array, broken
from shards import record

from pipeline.data import DataError, records, tfds
from pipeline.data.examples import Broken, Examples
from pipeline.data.records import Feature, Manifest, Shard, load_manifest

FEATURES = {
    "x": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "y": np.array(7),
    "negative": np.array([-1, 0, 127, 128, 2**40], np.int64),
    "image": b"\x00bytes\xff",
    "empty": b"",
    "many": [b"one", b"two"],
    "true": np.array(True),
    "none": np.zeros(0, np.float32),
}


def test_records_and_examples_are_those_that_tensorflow_writes(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    example = records.example(FEATURES)
    with tf.io.TFRecordWriter(str(theirs)) as writer:
        for data in (example, b"", b"x" * 1000):
            writer.write(data)
    ours.write_bytes(b"".join(map(records.framed, (example, b"", b"x" * 1000))))
    assert ours.read_bytes() == theirs.read_bytes()
    message = tf.train.Example.FromString(example)
    features = message.features.feature
    assert list(features["x"].float_list.value) == FEATURES["x"].ravel().tolist()
    ints = {name: list(features[name].int64_list.value) for name in ("negative", "many", "true")}
    assert ints == {"negative": [-1, 0, 127, 128, 2**40], "many": [], "true": [1]}
    texts = {name: list(features[name].bytes_list.value) for name in ("image", "many")}
    assert texts == {"image": [b"\x00bytes\xff"], "many": [b"one", b"two"]}
    assert example == message.SerializeToString(deterministic=True)
    assert records.parsed(example)["y"] == [7]
    with pytest.raises(ValueError, match=r"is no tf\.train\.Example"):
        records.parsed(b"\xff\xff\xff")
    # A file that is cut off ends with what is broken.
    for left in (1, 11, 12, 30):
        data = b"".join(map(record, range(3)))[: 2 * len(record(0)) + left]
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


def test_a_folder_of_a_version_is_read_and_splits_may_be_parts(catalogue: Path) -> None:
    path = str(catalogue / "grey_squares/1.2.0")
    train, validation = tfds("mine", path=path, train_split="train[:30%]", validation_split="train[30%:]")
    assert (train.count, validation.count) == (6, 14)
    seen = [[round(float(x[0, 0, 0]) * 255) for x, _ in read(part)] for part in (train, validation)]
    assert sorted(seen[0] + seen[1]) == list(range(20))
    assert tfds("mine", path=path, validation_split=None)[1] is None
    (_, y), *_ = read(tfds("mine", path=path, keys=["image", "amount"])[0])
    assert y.dtype == np.float32


def test_images_of_several_sizes_are_brought_to_one(catalogue: Path) -> None:
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
    flipped = bytearray(whole)
    flipped[starts[3] + 20] ^= 1
    cut = whole[: starts[5] + 20]
    for data, first, lost, why in (
        (bytes(flipped), 3, 1, "has a wrong checksum"), (cut, 5, 10, "is cut off"),
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
    ("a", {"path": "{}"}, "to be the folder of a version that TensorFlow Datasets prepared, received {} without fea"),
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
    given = {key: value.format(catalogue) if key == "path" else value for key, value in arguments.items()}
    # Which takes many seconds on a busy machine, once.
    import tensorflow_datasets  # noqa: F401

    start = time.monotonic()
    with pytest.raises(DataError) as refused:
        tfds(name, data_dir=str(catalogue), **given)
    assert words.format(catalogue) in str(refused.value)
    assert time.monotonic() - start < 10


def test_without_the_library_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(DataError, match=r"Try pip install 'distributed-keras-pipeline\[tfds\]'\."):
        tfds("mnist")

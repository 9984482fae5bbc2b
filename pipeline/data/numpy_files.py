"""Turns arrays that NumPy saved, an .npz file or a folder of .npy files, into training and validation arrays."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np

from pipeline.data import narrow
from pipeline.data.errors import DataError, expect_path
from pipeline.data.examples import Examples, Leaf, look_at_rows
from pipeline.data.narrow import Array
from pipeline.data.split import Rows, split

Part: TypeAlias = tuple[Array, Array]

# The names of a part's two arrays: after these.
TRAIN, VALIDATION = ("_train", ""), ("_validation", "_val", "_test")
# An .npz of so many bytes is read whole to find out that it is broken before anything starts: 0.1 s.
WHOLE_BYTES = 64 << 20
# Whole numbers that would be more classes than this, and than there are examples, are none.
_FEW_CLASSES = 1_000
# What NumPy and zipfile raise for files that are broken or none of theirs; NotImplementedError is zipfile's, for a way
# of compressing that it does not know.
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile, NotImplementedError)


def numpy(
    path: str | None = None, *, validation_fraction: float = 0.2, split_seed: int = 0, keep_dtype: bool = False
) -> tuple[Part | Examples, Part | Examples]:
    """The arrays of an .npz file, or of a folder of .npy files: x float32 [examples, ...], y int32 or float32.

    They are `x_train` and `y_train`, or `x` and `y`; with `x_validation` and `y_validation` (or `_val`, `_test`), or a
    part of them is held out, the same fraction of each class where y is classes. An x of bytes (uint8) is taken for
    images, divided by 255, and where it is [examples, height, width] it gets a channel; with `keep_dtype`, x is as it
    was saved. Whole numbers that int32, or for x float32, does not hold are int64. A y of text is classes, numbered in
    their order. Raises `DataError`.
    """
    where = Path(expect_path("numpy", path))
    x, y = _part(where, TRAIN)
    if _ending(where, VALIDATION) is not None:
        held_out = _part(where, VALIDATION)
        _check_alike(where, (x, y), held_out)
    else:
        train, validation = _rows(y, validation_fraction, split_seed)
        (x, y), held_out = (x[train], y[train]), (x[validation], y[validation])
    inputs = _inputs(where, [x, held_out[0]], keep_dtype)
    labels, names = _labels(where, [y, held_out[1]])
    parts = list(zip(inputs, labels, strict=True))
    if names is None:
        return parts[0], parts[1]
    missing = sorted(set(range(len(names))) - set(labels[0].tolist()))
    flaws = tuple(f"no training examples of class {names[number]}" for number in missing)
    return _named(parts[0], names, flaws), _named(parts[1], names, ())


def training_examples(path: str, validation_fraction: float = 0.2, split_seed: int = 0) -> int | None:
    """Returns how many examples `numpy` trains on, by the labels alone; None where it refuses what they are.

    Arrays of small files are read to their end to find them broken. Raises `DataError`.
    """
    where = Path(path)
    ending, held_out = _ending(where, TRAIN), _ending(where, VALIDATION)
    if ending is None:
        return None
    for name in (f"{name}{of}" for of in (ending, held_out) if of is not None for name in ("x", "y")):
        _expect_whole(where, name)
    y = _read(where, f"y{ending}")
    if not y.size:
        return None
    return len(y) if held_out is not None else len(_rows(_flat(y), validation_fraction, split_seed)[0])


def _named(part: Part, names: tuple[str, ...], flaws: tuple[str, ...]) -> Examples:
    """A part whose classes have names."""
    spec = tuple(Leaf(array.shape[1:], array.dtype.name) for array in part)
    return Examples(raw=part, spec=spec, num_classes=len(names), class_names=names, look=look_at_rows, flaws=flaws)


def _part(where: Path, endings: tuple[str, ...]) -> Part:
    """The two arrays of a part, as they were saved."""
    ending = _ending(where, endings)
    if ending is None:
        expected, received = f"arrays x_train and y_train, or x and y, in {where}", ", ".join(_names(where)) or "none"
        raise DataError(expected, received, f"numpy.savez('{where.stem}.npz', x=..., y=...)")
    x, y = (_read(where, f"{name}{ending}") for name in ("x", "y"))
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        received = f"x{ending} of shape {list(x.shape)} and y{ending} of {list(y.shape)}"
        raise DataError(f"one label for each example in {where}", received, "saving both anew")
    if len(x) == 0:
        raise DataError(f"examples in {where}", f"an x{ending} without any", "another data.path")
    return x, _flat(y)


def _rows(y: Array, validation_fraction: float, split_seed: int) -> tuple[Rows, Rows]:
    """The rows that train and those that validate, where nobody said so."""
    # Text, true or false, or whole numbers that are no more than classes could be.
    are_classes = y.ndim == 1 and y.dtype.kind in "iubUS"
    if are_classes and y.dtype.kind in "iu":
        are_classes = bool(y.min() >= 0 and y.max() < max(len(y), _FEW_CLASSES))
    return split(y if are_classes else np.zeros(len(y)), validation_fraction, split_seed)


def _flat(y: Array) -> Array:
    """Labels, of which classes of [examples, 1] are those of [examples]."""
    return y[:, 0] if y.dtype.kind in "iubUS" and y.ndim == 2 and y.shape[1] == 1 else y


def _inputs(where: Path, arrays: list[Array], keep_dtype: bool) -> list[Array]:
    """The x of each part in the type that is trained on."""
    x = arrays[0]
    if x.dtype.kind not in "fiub":
        received, instead = f"x of type {x.dtype}", "x.astype('float32')"
        if x.dtype.kind in "US":
            received, instead = "x of text", "the places of words in a vocabulary, or counts of them"
        raise DataError(f"numbers in {where}", received, instead)
    if keep_dtype:
        return arrays
    if x.dtype != np.uint8:
        return narrow.features(arrays, f"x of {where}")
    return [np.divide(array[..., None] if x.ndim == 3 else array, 255, dtype=np.float32) for array in arrays]


def _labels(where: Path, arrays: list[Array]) -> tuple[list[Array], tuple[str, ...] | None]:
    """The y of each part in the type that is trained on, and what classes are called, where they are text."""
    kind = arrays[0].dtype.kind
    if kind in "US" and arrays[0].ndim == 1:
        try:
            texts = [array.astype(str) if kind == "U" else np.char.decode(array, "utf-8") for array in arrays]
        except UnicodeDecodeError as error:
            raise DataError(f"y of {where} in UTF-8", error, "y.astype(str)") from error
        names = np.unique(np.concatenate(texts))
        return [np.searchsorted(names, text).astype(np.int32) for text in texts], tuple(names.tolist())
    if kind not in "fiub":
        received = f"y of type {arrays[0].dtype} and shape {list(arrays[0].shape[1:])} for each"
        instead = "numpy.unique(y, return_inverse=True)[1].reshape(y.shape), which numbers text"
        raise DataError(f"one class or number for each example in {where}", received, instead)
    if kind == "f":
        return [narrow.floats(array, np.float32, f"y of {where}") for array in arrays], None
    return narrow.whole(arrays, f"y of {where}"), None


def _check_alike(where: Path, train: Part, held_out: Part) -> None:
    """Refuses parts whose examples have other shapes or types."""
    for name, ours, theirs in zip(("x", "y"), train, held_out, strict=True):
        one, other = (f"{list(array.shape[1:])} {array.dtype}" for array in (ours, theirs))
        if ours.shape[1:] != theirs.shape[1:] or ours.dtype.kind != theirs.dtype.kind:
            received = f"{name} of {one} to train and of {other} to validate"
            raise DataError(f"examples of one shape and type in {where}", received, "saving both anew")


def _ending(where: Path, endings: tuple[str, ...]) -> str | None:
    """Returns the ending of the names of a part's arrays, where both are there."""
    names = _names(where)
    return next((ending for ending in endings if f"x{ending}" in names and f"y{ending}" in names), None)


def _names(where: Path) -> list[str]:
    """The names of the arrays that there are."""
    if where.is_dir():
        return sorted(path.stem for path in where.glob("*.npy"))
    if not where.is_file():
        raise DataError(f"{where} to be an .npz file, or a folder of .npy files", "no such file", "another data.path")
    with _opened(where) as arrays:
        return sorted(arrays)


def _read(where: Path, name: str) -> Array:
    """An array, as it was saved."""
    if where.is_dir():
        # Mapped first: a file that is shorter than it says is found before memory is taken for it.
        return np.array(_mapped(where / f"{name}.npy"))
    with _opened(where) as arrays:
        array: Array = arrays[name]
        return array


def _expect_whole(where: Path, name: str) -> None:
    """Refuses an array that is cut off, and of a small .npz one whose bytes have changed."""
    if where.is_dir():
        _mapped(where / f"{name}.npy")
    elif where.stat().st_size <= WHOLE_BYTES:
        with _opened(where) as arrays:
            assert arrays.zip is not None, "it is open"
            with arrays.zip.open(name if name in arrays.zip.namelist() else f"{name}.npy") as file:
                while file.read(1 << 20):
                    pass


def _mapped(path: Path) -> Array:
    """An array of a folder, of which nothing is read before it is used."""
    with _in_words(path):
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return array


@contextmanager
def _opened(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """The arrays of an .npz file."""
    with _in_words(path), path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError("no .npz, or cut off")
        file.seek(0)
        yield np.load(file, allow_pickle=False)


@contextmanager
def _in_words(path: Path) -> Iterator[None]:
    """Inside, what a file is broken by is a `DataError`."""
    try:
        yield
    except _UNREADABLE as error:
        expected, received = f"{path} to hold arrays that NumPy saved", f"a file that cannot be read ({error})"
        instead = "saving it anew, arrays of numbers alone"
        if "Object arrays" in str(error) or "Python objects" in str(error):
            expected = f"{path} to hold arrays of numbers or text"
            received = "Python's objects, which are not loaded"
            instead = "saving y.astype(str), or x.astype('float32'), in their place"
        raise DataError(expected, received, instead) from error

"""Reads arrays that NumPy saved, from an .npz file or a folder of .npy files, or counts their examples."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from pipeline.data.arrays import FEW_CLASSES, Array, Rows, split
from pipeline.data.errors import DataError

Part: TypeAlias = tuple[Array, Array]

# The names of a part's two arrays: after these.
TRAIN, VALIDATION = ("_train", ""), ("_validation", "_val", "_test")
# An .npz of so many bytes is read whole to find out that it is broken before anything starts: 0.1 s.
WHOLE_BYTES = 64 << 20
# What NumPy and zipfile raise for files that are broken or none of theirs; NotImplementedError is zipfile's, for a way
# of compressing that it does not know.
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile, NotImplementedError)


def training_examples(path: str, validation_fraction: float = 0.2, split_seed: int = 0) -> int | None:
    """Returns how many examples `numpy` trains on, by the labels alone; None where it refuses what they are.

    Arrays of small files are read to their end to find them broken. Raises `DataError`.
    """
    where = Path(path)
    ending, held_out = name_of(where, TRAIN), name_of(where, VALIDATION)
    if ending is None:
        return None
    names = [f"{name}{of}" for of in (ending, held_out) if of is not None for name in ("x", "y")]
    if where.is_dir():
        for name in names:
            _mapped(where / f"{name}.npy")
    elif where.stat().st_size <= WHOLE_BYTES:
        with _opened(where) as arrays:
            for name in names:
                with arrays.zip.open(name if name in arrays.zip.namelist() else f"{name}.npy") as file:
                    while file.read(1 << 20):
                        pass
    y = _read(where, f"y{ending}")
    if not y.size:
        return None
    return len(y) if held_out is not None else len(rows(_flat(y), validation_fraction, split_seed)[0])


def part(where: Path, endings: tuple[str, ...]) -> Part:
    """The two arrays of a part, as they were saved."""
    ending = name_of(where, endings)
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


def rows(y: Array, validation_fraction: float, split_seed: int) -> tuple[Rows, Rows]:
    """The rows that train and those that validate, where nobody said so."""
    return split(y if _are_classes(y) else np.zeros(len(y)), validation_fraction, split_seed)


def _flat(y: Array) -> Array:
    """Labels, of which classes of [examples, 1] are those of [examples]."""
    return y[:, 0] if y.dtype.kind in "iubUS" and y.ndim == 2 and y.shape[1] == 1 else y


def _are_classes(y: Array) -> bool:
    """True if labels are text, true or false, or whole numbers that are no more than classes could be."""
    if y.ndim != 1 or y.dtype.kind not in "iubUS":
        return False
    return y.dtype.kind not in "iu" or bool(y.min() >= 0 and y.max() < max(len(y), FEW_CLASSES))


def name_of(where: Path, endings: tuple[str, ...]) -> str | None:
    """Returns the ending of the names of a part's arrays, where both are there."""
    names = _names(where)
    return next((ending for ending in endings if f"x{ending}" in names and f"y{ending}" in names), None)


def _names(where: Path) -> list[str]:
    if where.is_dir():
        return sorted(path.stem for path in where.glob("*.npy"))
    if not where.is_file():
        raise DataError(f"{where} to be an .npz file, or a folder of .npy files", "no such file", "another data.path")
    with _opened(where) as arrays:
        return sorted(arrays)


def _read(where: Path, name: str) -> Array:
    if not where.is_dir():
        with _opened(where) as arrays:
            array: Array = arrays[name]
            return array
    # Mapped first: a file that is shorter than it says is found before memory is taken for it.
    return np.array(_mapped(where / f"{name}.npy"))


def _mapped(path: Path) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return array
    except _UNREADABLE as error:
        raise _broken(path, error) from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The arrays of an .npz file by their names."""
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError("no .npz, or cut off")
            file.seek(0)
            yield np.load(file, allow_pickle=False)
    except _UNREADABLE as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> DataError:
    if "Object arrays" in str(error) or "Python objects" in str(error):
        instead = "saving y.astype(str), or x.astype('float32'), in their place"
        return DataError(f"{path} to hold arrays of numbers or text", "Python's objects, which are not loaded", instead)
    received, instead = f"a file that cannot be read ({error})", "saving it anew, arrays of numbers alone"
    return DataError(f"{path} to hold arrays that NumPy saved", received, instead)

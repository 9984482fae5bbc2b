"""Turns arrays that NumPy saved, an .npz file or a folder of .npy files, into training and validation arrays."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.data.errors import DataError, expect_path
from pipeline.data.split import split

Array: TypeAlias = NDArray[Any]
Part: TypeAlias = tuple[Array, Array]

Made = TypeVar("Made")

# The names of a part's two arrays: after these.
TRAIN, VALIDATION = ("_train", ""), ("_validation", "_val", "_test")
# What NumPy and zipfile raise for files that are broken or none of theirs; NotImplementedError is zipfile's, for a way
# of compressing that it does not know.
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile, NotImplementedError)


def numpy(
    path: str | None = None,
    *,
    validation_fraction: float = 0.2,
    split_seed: int = 0,
    keep_dtype: bool = False,
) -> tuple[Part, Part]:
    """The arrays of an .npz file, or of a folder of .npy files: x float32 [examples, ...], y int32 or float32.

    They are `x_train` and `y_train`, or `x` and `y`; with `x_validation` and `y_validation` (or `_val`, `_test`), or a
    part of them is held out, the same fraction of each class where y is whole numbers. An x of bytes (uint8) is taken
    for images, divided by 255, and where it is [examples, height, width] it gets a channel; with `keep_dtype`, x is as
    it was saved. Raises `DataError`.
    """
    given = expect_path("numpy", path, "an .npz file, or a folder of .npy files,", "FILE.npz")
    where = Path(given)
    x, y = _part(where, TRAIN)
    if _name_of(where, VALIDATION) is not None:
        held_out = _part(where, VALIDATION)
        _check_alike(where, (x, y), held_out)
    else:
        groups = y if y.dtype.kind in "iub" and y.ndim == 1 else np.zeros(len(y))
        train, validation = split(groups, validation_fraction, split_seed)
        (x, y), held_out = (x[train], y[train]), (x[validation], y[validation])
    return _typed(where, (x, y), keep_dtype), _typed(where, held_out, keep_dtype)


def _part(where: Path, endings: tuple[str, ...]) -> Part:
    """The two arrays of a part, as they were saved."""
    ending = _name_of(where, endings)
    if ending is None:
        raise DataError(
            f"Expected arrays x_train and y_train, or x and y, in {where}, received "
            f"{', '.join(_names(where)) or 'none'}. Try numpy.savez('{where.stem}.npz', x=..., y=...)."
        )
    x, y = (_read(where, f"{name}{ending}") for name in ("x", "y"))
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise DataError(
            f"Expected one label for each example in {where}, received x{ending} of shape {list(x.shape)} and "
            f"y{ending} of {list(y.shape)}. Try saving both anew."
        )
    if len(x) == 0:
        raise DataError(f"Expected examples in {where}, received an x{ending} without any. Try another data.path.")
    # Classes of [examples, 1] are those of [examples].
    return x, y[:, 0] if y.dtype.kind in "iub" and y.ndim == 2 and y.shape[1] == 1 else y


def _typed(where: Path, part: Part, keep_dtype: bool) -> Part:
    """A part in the types that are trained on."""
    x, y = part
    for name, array in (("x", x), ("y", y)):
        if array.dtype.kind not in "fiub":
            raise DataError(
                f"Expected numbers in {where}, received {name} of type {array.dtype}. Try {name}.astype('float32')."
            )
    y = y.astype(np.float32 if y.dtype.kind == "f" else np.int32)
    if keep_dtype:
        return x, y
    if x.dtype != np.uint8:
        return x.astype(np.float32), y
    return np.divide(x[..., None] if x.ndim == 3 else x, 255, dtype=np.float32), y


def _check_alike(where: Path, train: Part, held_out: Part) -> None:
    """Refuses parts whose examples have other shapes or types."""
    for name, ours, theirs in zip(("x", "y"), train, held_out, strict=True):
        if ours.shape[1:] != theirs.shape[1:] or ours.dtype.kind != theirs.dtype.kind:
            raise DataError(
                f"Expected examples of one shape and type in {where}, received {name} of {list(ours.shape[1:])} "
                f"{ours.dtype} to train and of {list(theirs.shape[1:])} {theirs.dtype} to validate. "
                f"Try saving both anew."
            )


def _name_of(where: Path, endings: tuple[str, ...]) -> str | None:
    """How the names of a part's arrays end, where both are there."""
    names = _names(where)
    return next((ending for ending in endings if f"x{ending}" in names and f"y{ending}" in names), None)


def _names(where: Path) -> list[str]:
    """The names of the arrays that there are."""
    if where.is_dir():
        return sorted(path.stem for path in where.glob("*.npy"))
    if not where.is_file():
        raise DataError(
            f"Expected {where} to be an .npz file, or a folder of .npy files, received no such file. "
            f"Try another data.path."
        )
    return _opened(where, lambda arrays: sorted(arrays))


def _read(where: Path, name: str) -> Array:
    """An array, as it was saved."""
    if not where.is_dir():
        return _opened(where, lambda arrays: arrays[name])
    path = where / f"{name}.npy"
    try:
        # Mapped first: a file that is shorter than it says is found before memory is taken for it.
        return np.array(np.load(path, mmap_mode="r", allow_pickle=False))
    except _UNREADABLE as error:
        raise _broken(path, error) from error


def _opened(path: Path, use: Callable[[Mapping[str, Array]], Made]) -> Made:
    """What `use` makes of the arrays of an .npz file."""
    try:
        with path.open("rb") as file:
            if not zipfile.is_zipfile(file):
                raise ValueError("no .npz, or cut off")
            file.seek(0)
            return use(np.load(file, allow_pickle=False))
    except _UNREADABLE as error:
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> DataError:
    return DataError(
        f"Expected {path} to hold arrays that NumPy saved, received a file that cannot be read ({error}). "
        f"Try saving it anew, arrays of numbers alone."
    )

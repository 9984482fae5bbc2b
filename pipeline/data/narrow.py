"""Brings numbers into the types that are trained on, after a look at their range: none wraps or becomes infinite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pipeline.data.errors import DataError

Array: TypeAlias = NDArray[Any]

# Up to here float32 holds every whole number.
EXACT = 2**24


def lost(array: Array, dtype: DTypeLike) -> int | float | None:
    """Returns a number of an array that a narrower type does not hold; None where it holds all.

    Digits that are rounded away are no loss.

    >>> lost(np.array([1, 3_000_000_000]), np.int32), lost(np.array([0.1, np.inf]), np.float32)
    (3000000000, None)
    """
    wide, narrow = array.dtype, np.dtype(dtype)
    if not array.size or wide == narrow or wide.kind not in "iuf" or narrow.kind not in "iuf":
        return None
    finite = array[np.isfinite(array)] if wide.kind == "f" else array
    # In Python's numbers, which are compared as they are.
    limits = np.finfo(narrow) if narrow.kind == "f" else np.iinfo(narrow)
    least, greatest = np.asarray(limits.min).item(), np.asarray(limits.max).item()
    extremes = [finite.min().item(), finite.max().item()] if finite.size else []
    return next((value for value in extremes if not least <= value <= greatest), None)


def floats(array: Array, dtype: DTypeLike, name: str) -> Array:
    """Returns an array as floating-point numbers of a type. Raises `DataError` for one that it does not hold."""
    over = lost(array, dtype)
    if over is not None:
        instead = "dividing them by their largest, or another unit"
        raise DataError(f"numbers in {name} that {np.dtype(dtype)} holds", f"{over:g}", instead)
    return array.astype(dtype)


def whole(arrays: Sequence[Array], name: str) -> list[Array]:
    """Returns arrays of whole numbers as int32 where that holds all of them, else as int64. Raises `DataError`.

    >>> [array.dtype.name for array in whole([np.array([1]), np.array([3_000_000_000])], "y")]
    ['int64', 'int64']
    """
    for array in arrays:
        over = lost(array, np.int64)
        if over is not None:
            instead = f"{name}.astype('float32'), or numbers below {2**63}"
            raise DataError(f"whole numbers in {name} that int64 holds", over, instead)
    fits = all(lost(array, np.int32) is None for array in arrays)
    return [array.astype(np.int32 if fits else np.int64) for array in arrays]


def features(arrays: Sequence[Array], name: str) -> list[Array]:
    """Returns arrays of numbers as float32; whole numbers, as ids are, stay so where float32 would round them."""
    numbers = [array for array in arrays if array.dtype.kind in "iu" and array.size]
    exact = all(max(abs(int(array.min())), abs(int(array.max()))) <= EXACT for array in numbers)
    return [floats(array, np.float32, name) for array in arrays] if exact else whole(arrays, name)

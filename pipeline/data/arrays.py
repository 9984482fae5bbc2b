"""Nested structures of arrays, which of their rows train and which validate, and the types that numbers are trained in.

Rows are chosen by a seed alone. No number wraps or becomes infinite in a narrower type: its range is looked at before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pipeline.data.errors import DataError

T = TypeVar("T")
# One of something, or tuples, lists and dictionaries of such, as `tf.nest` has them.
Nested: TypeAlias = T | Sequence["Nested[T]"] | Mapping[str, "Nested[T]"]
Array: TypeAlias = NDArray[Any]
Rows: TypeAlias = NDArray[np.intp]

# In more rows than these, a value that is another in each row is no class. Whole numbers that would be more classes
# than these, and than there are rows, are none.
FEW_ROWS, FEW_CLASSES = 20, 1_000
# Up to here float32 holds every whole number.
EXACT = 2**24


def is_one_array(values: object) -> bool:
    """True for one array in lists, and not for a list of arrays.

    >>> is_one_array([[1, 2], [3, 4]]), is_one_array([np.ones(2), np.ones(2)])
    (True, False)
    """
    while isinstance(values, list | tuple):
        if not values:
            return True
        values = values[0]
    return np.isscalar(values)


def split(groups: np.ndarray, validation_fraction: float, split_seed: int) -> tuple[Rows, Rows]:
    """The rows that train and those that validate, each shuffled: the same fraction of every group is held out.

    `groups` has one number or text for each row, its class; rows without classes are all of one group. Raises
    `DataError`.

    >>> train, validation = split(np.arange(10) % 2, validation_fraction=0.2, split_seed=0)
    >>> len(train), sorted((validation % 2).tolist())
    (8, [0, 1])
    >>> [len(part) for part in split(np.arange(100), validation_fraction=0.2, split_seed=0)]
    [80, 20]
    >>> [len(split(np.zeros(178), fraction, 0)[1]) for fraction in (0.2, 0.0001, 0.9999)]
    [36, 1, 177]
    """
    check_split(validation_fraction, split_seed)
    rng = np.random.default_rng(split_seed)
    held = np.zeros(len(groups), dtype=bool)
    # Sorted once: a search through all rows for each of many groups would take minutes.
    order = np.argsort(groups, kind="stable")
    for members in np.split(order, np.flatnonzero(groups[order][1:] != groups[order][:-1]) + 1):
        # The nearest to its fraction that leaves some on either side.
        count = min(max(round(len(members) * validation_fraction), 1), len(members) - 1)
        held[rng.permutation(members)[:count]] = True
    if len(groups) > FEW_ROWS and not held.any():
        # Each row is a group of its own: these are quantities.
        return split(np.zeros(len(groups)), validation_fraction, split_seed)
    return rng.permutation(np.flatnonzero(~held)), rng.permutation(np.flatnonzero(held))


def check_split(validation_fraction: float, split_seed: int) -> None:
    """Refuses a share that holds out none or all, and a seed below 0. Raises `DataError`."""
    numbers = isinstance(validation_fraction, int | float) and isinstance(split_seed, int)
    if not numbers or not 0 < validation_fraction < 1 or split_seed < 0:
        expected = "a validation_fraction between 0 and 1 and a split_seed of at least 0"
        usual = "data.build.validation_fraction=0.2 data.build.split_seed=0"
        raise DataError(expected, f"{validation_fraction} and {split_seed}", usual)


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


def refuse_masked(values: object, name: str) -> None:
    """Refuses an array some of whose numbers are masked, as those that a netCDF file lacks: others would be trained on.

    >>> refuse_masked(np.ma.masked_array([1.0, 9.9e36], [False, True]), "x")
    Traceback (most recent call last):
    pipeline.data.errors.DataError: Expected a number in each place of x, received an array of which 1 is masked. \
Try .filled(0), or leaving out those examples.
    """
    if isinstance(values, np.ma.MaskedArray) and (count := int(np.sum(values.mask))):
        received = f"an array of which {count:,} {'is' if count == 1 else 'are'} masked"
        raise DataError(f"a number in each place of {name}", received, ".filled(0), or leaving out those examples")


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

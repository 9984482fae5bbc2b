"""Arrays: the rows that train and validate, types of numbers, none of which ever wraps, and files that NumPy saved."""

import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pipeline.data.errors import DataError

T = TypeVar("T")
# One of something, or tuples, lists and dictionaries of such, as `tf.nest` has them.
Nested: TypeAlias = T | Sequence["Nested[T]"] | Mapping[str, "Nested[T]"]
Array: TypeAlias = NDArray[Any]
Part: TypeAlias = tuple[Array, Array]
Rows: TypeAlias = NDArray[np.intp]

# In more rows than these, a value that is another in each row is no class. Whole numbers that would be more classes
# than these, and than there are rows, are none.
FEW_ROWS, FEW_CLASSES = 20, 1_000
# Up to here float32 holds every whole number.
EXACT = 2**24
# The names of a part's two arrays: after these.
TRAIN, VALIDATION = ("_train", ""), ("_validation", "_val", "_test")
# An .npz of so many bytes is read whole to find out that it is broken before anything starts: 0.1 s.
WHOLE_BYTES = 64 << 20
# What NumPy and zipfile raise for files that are broken or none of theirs; NotImplementedError is zipfile's, for a way
# of compressing that it does not know.
_UNREADABLE = (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile, NotImplementedError)


def is_one_array(values: object) -> bool:
    """True for one array in lists, `[[1, 2], [3, 4]]`, and not for a list of arrays."""
    while isinstance(values, list | tuple):
        if not values:
            return True
        values = values[0]
    return np.isscalar(values)


def split(groups: np.ndarray, validation_fraction: float, split_seed: int) -> tuple[Rows, Rows]:
    """The rows that train and those that validate, shuffled by a seed: the same fraction of every group is held out.

    `groups` has the class of each row; rows without classes are all of one group. Raises `DataError`.

    >>> [len(split(np.zeros(178), fraction, 0)[1]) for fraction in (0.2, 0.0001, 0.9999)]
    [36, 1, 177]
    """
    check_split(validation_fraction, split_seed)
    rng, held = np.random.default_rng(split_seed), np.zeros(len(groups), dtype=bool)
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
    """Returns a number of an array that a narrower type does not hold; None where it holds all, but for rounding.

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
    """Refuses an array of which some numbers are masked, as those that a netCDF file lacks. Raises `DataError`."""
    if isinstance(values, np.ma.MaskedArray) and (count := int(np.sum(values.mask))):
        received = f"an array of which {count:,} {'is' if count == 1 else 'are'} masked"
        raise DataError(f"a number in each place of {name}", received, ".filled(0), or leaving out those examples")


def floats(array: Array, dtype: DTypeLike, name: str) -> Array:
    """Returns an array as floating-point numbers of a type. Raises `DataError` for one that it does not hold."""
    if (over := lost(array, dtype)) is not None:
        instead = "dividing them by their largest, or another unit"
        raise DataError(f"numbers in {name} that {np.dtype(dtype)} holds", f"{over:g}", instead)
    return array.astype(dtype)


def whole(arrays: Sequence[Array], name: str) -> list[Array]:
    """Returns arrays of whole numbers as int32 where that holds all of them, else as int64. Raises `DataError`."""
    for array in arrays:
        if (over := lost(array, np.int64)) is not None:
            instead = f"{name}.astype('float32'), or numbers below {2**63}"
            raise DataError(f"whole numbers in {name} that int64 holds", over, instead)
    fits = all(lost(array, np.int32) is None for array in arrays)
    return [array.astype(np.int32 if fits else np.int64) for array in arrays]


def features(arrays: Sequence[Array], name: str) -> list[Array]:
    """Returns arrays of numbers as float32; whole numbers, as ids are, stay so where float32 would round them."""
    numbers = [array for array in arrays if array.dtype.kind in "iu" and array.size]
    exact = all(max(abs(int(array.min())), abs(int(array.max()))) <= EXACT for array in numbers)
    return [floats(array, np.float32, name) for array in arrays] if exact else whole(arrays, name)


def training_examples(path: str, validation_fraction: float = 0.2, split_seed: int = 0) -> int | None:
    """Returns how many examples `numpy` trains on; None where it refuses them. Raises `DataError` for broken files."""
    where = Path(path)
    ending, held_out = saved_ending(where, TRAIN), saved_ending(where, VALIDATION)
    if ending is None:
        return None
    names = [f"{name}{end}" for end in (ending, held_out) if end is not None for name in ("x", "y")]
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
    if not y.ndim or not y.size:
        return None
    return len(y) if held_out is not None else len(split_saved(_flat(y), validation_fraction, split_seed)[0])


def saved_part(where: Path, endings: tuple[str, ...]) -> Part:
    """The two arrays of a part, as they were saved."""
    ending = saved_ending(where, endings)
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


def saved_ending(where: Path, endings: tuple[str, ...]) -> str | None:
    """The ending of the names of a part's arrays, where both are there."""
    names = _names(where)
    return next((ending for ending in endings if f"x{ending}" in names and f"y{ending}" in names), None)


def _flat(y: Array) -> Array:
    """Labels, of which classes of [examples, 1] are those of [examples]."""
    return y[:, 0] if y.dtype.kind in "iubUS" and y.ndim == 2 and y.shape[1] == 1 else y


def split_saved(y: Array, validation_fraction: float, split_seed: int) -> tuple[Rows, Rows]:
    """The rows that train and those that validate; whole numbers that are more than classes could be are none."""
    are_classes = y.ndim == 1 and y.dtype.kind in "iubUS"
    if are_classes and y.dtype.kind in "iu":
        are_classes = bool(y.min() >= 0 and y.max() < max(len(y), FEW_CLASSES))
    return split(y if are_classes else np.zeros(len(y)), validation_fraction, split_seed)


def _names(where: Path) -> list[str]:
    if where.is_dir():
        return sorted(path.stem for path in where.glob("*.npy"))
    if not where.is_file():
        raise DataError(f"{where} to be an .npz file, or a folder of .npy files", "no such file", "another data.path")
    with _opened(where) as arrays:
        return sorted(arrays)


def _read(where: Path, name: str) -> Array:
    if where.is_dir():
        # Mapped first: a file that is shorter than it says is found before memory is taken for it.
        return np.array(_mapped(where / f"{name}.npy"))
    with _opened(where) as arrays:
        array: Array = arrays[name]
        return array


def _mapped(path: Path) -> Array:
    with _named_errors(path):
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
        return array


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The arrays of an .npz file by their names."""
    with _named_errors(path), path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise ValueError("no .npz, or cut off")
        file.seek(0)
        yield np.load(file, allow_pickle=False)


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except _UNREADABLE as error:
        if "Object arrays" in str(error) or "Python objects" in str(error):
            instead, objects = "saving y.astype(str), or x.astype('float32'), in their place", "Python's objects"
            expected = f"{path} to hold arrays of numbers or text"
            raise DataError(expected, f"{objects}, which are not loaded", instead) from error
        received, instead = f"a file that cannot be read ({error})", "saving it anew, arrays of numbers alone"
        raise DataError(f"{path} to hold arrays that NumPy saved", received, instead) from error

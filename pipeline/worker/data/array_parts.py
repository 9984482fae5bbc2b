"""Turns what a user gives as data into arrays of one length, whichever engine trains on them.

What can be told without reading is told here, in words: kinds, shapes, lengths.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import keras
import numpy as np

from pipeline.data.arrays import Nested, floats, is_one_array, refuse_masked
from pipeline.data.errors import DataError
from pipeline.data.examples import leaves

NAMES = ("x", "y", "sample_weight")
SEVERAL = "several inputs in a dictionary: ({'a': a, 'b': b}, y)"
PAD = "keras.utils.pad_sequences, which makes all of one length"
# What makes dense arrays of TensorFlow's others, by their class's name.
DENSE = {"SparseTensor": "tf.sparse.to_dense", "RaggedTensor": ".to_tensor()"}
# NumPy's types that no engine has: structures, objects, dates, and floats of more than 64 bits.
NO_NUMBERS = "VOmMgG"


@dataclasses.dataclass(frozen=True)
class Where:
    """An array of a part, as a message names it: `x`, `y["size"]`, ...; and which part it is."""

    path: str
    part: str

    def __str__(self) -> str:
        return f"{self.path} of the {self.part} data"

    def inside(self, key: object) -> "Where":
        """Returns where a part of it is."""
        return dataclasses.replace(self, path=f"{self.path}[{key!r}]")


def both(parts: Iterable[object]) -> tuple[object, object]:
    """(training, validation) of what a data set's function has returned. Raises `DataError`."""
    if isinstance(parts, Mapping):
        received = f"a {type(parts).__name__} of {', '.join(map(str, parts))}"
        instead = "return parts['train'], parts['validation']"
        raise DataError("data.build to return (train, validation)", received, instead)
    try:
        train, validation = parts
    except (TypeError, ValueError) as error:
        received = f"Expected data.build to return (train, validation), received {type(parts).__name__}."
        raise DataError(received) from error
    if hasattr(train, "__array__") and hasattr(validation, "__array__"):
        received = f"two arrays, of shapes {list(np.shape(train))} and {list(np.shape(validation))}"
        expected = "data.build to return (train, validation), each of them (x, y)"
        raise DataError(expected, received, "return (x, y), None")
    return train, validation


def part(value: object, name: str) -> tuple[Nested[np.ndarray], ...]:
    """A part as a tuple of arrays, nested as it came; lists of numbers become arrays. Raises `DataError`.

    `name` is "training" or "validation".
    """
    arrays_or_lists = tuple(value) if isinstance(value, list | tuple) else (value,)
    # (x, y, None) is (x, y).
    while arrays_or_lists and arrays_or_lists[-1] is None:
        arrays_or_lists = arrays_or_lists[:-1]
    absent = [path for path, values in zip(NAMES, arrays_or_lists, strict=False) if values is None]
    if not 1 <= len(arrays_or_lists) <= len(NAMES) or absent:
        received = f"{absent[0]} of None" if absent else f"{len(arrays_or_lists)} of them"
        instead = "zeros as y" if absent == ["y"] else SEVERAL
        expected = f"{name} data as (x, y) or (x, y, sample_weight)"
        raise DataError(expected, received if arrays_or_lists else "none", instead)
    of_part = tuple(
        arrays(without_lists(values, Where(path, name)), Where(path, name))
        for path, values in zip(NAMES, arrays_or_lists, strict=False)
    )
    check_lengths(of_part, name)
    return of_part


def without_lists(values: object, where: Where) -> object:
    """The same structure, with an array in place of each list of numbers, and a tuple in place of any other list."""
    if isinstance(values, Mapping):
        return {key: without_lists(inner, where.inside(key)) for key, inner in values.items()}
    if not isinstance(values, list | tuple):
        return values
    if not is_one_array(values):
        return tuple(without_lists(inner, where.inside(place)) for place, inner in enumerate(values))
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"rows of one length in {where}", "a list of others", f"{PAD}") from error
    # As Keras does with Python's floats.
    return floats(array, keras.config.floatx(), str(where)) if array.dtype == np.float64 else array


def arrays(values: object, where: Where) -> Nested[np.ndarray]:
    """The same structure, with arrays in place of what is like one. Raises `DataError`."""
    if isinstance(values, Mapping):
        return {key: arrays(inner, where.inside(key)) for key, inner in values.items()}
    if isinstance(values, tuple):
        return tuple(arrays(inner, where.inside(place)) for place, inner in enumerate(values))
    return _array(values, where)


def _array(values: object, where: Where) -> np.ndarray:
    """An array of numbers, or of text for x, with the examples along its first axis."""
    kind = type(values).__name__
    if kind in DENSE or hasattr(values, "tocsr"):
        raise DataError("dense arrays", f"{kind} as {where}", DENSE.get(kind, ".toarray()"))
    if values is None:
        raise DataError(f"an array as {where}", "None", "leaving it out, or zeros in its place")
    refuse_masked(values, str(where))
    array = np.asarray(values)
    if array.dtype.kind == "O":
        array = _of_objects(array, values, where)
    if not array.ndim:
        raise DataError(f"an array as {where}", _short(values), "numpy.array, with one row an example")
    if array.dtype.char in NO_NUMBERS:
        raise DataError(f"numbers as {where}", array.dtype, ".astype('float32'), or whatever stands for it")
    if array.dtype.kind in "US" and where.path.split("[")[0] != "x":
        instead = "numpy.unique(y, return_inverse=True)[1], which numbers classes from 0"
        raise DataError(f"numbers as {where}", f"text, such as {_texts(array.flat[:1])[0]!r}", instead)
    return array


def _of_objects(array: np.ndarray, values: object, where: Where) -> np.ndarray:
    """Text as text, that of TensorFlow's too; anything else that NumPy keeps as Python objects is refused."""
    if array.ndim and array.size and all(isinstance(value, str | bytes) for value in array.flat):
        return np.array(_texts(array.flat)).reshape(array.shape)
    if not array.ndim:
        instead = "numpy.array, or tf.data.Dataset.from_generator"
        raise DataError(f"arrays or a tf.data.Dataset as {where}", _short(values), instead)
    shapes = {np.shape(value) for value in array.flat}
    if shapes == {()}:
        how = ".astype('float32')"
    else:
        how = "numpy.stack, which makes one array of all" if len(shapes) == 1 else PAD
    kinds = ", ".join(sorted({type(value).__name__ for value in array.flat}))
    raise DataError(f"numbers as {where}", f"an array of objects ({kinds})", f"{how}")


def _texts(values: Iterable[str | bytes]) -> list[str]:
    return [value.decode(errors="replace") if isinstance(value, bytes) else str(value) for value in values]


def check_lengths(of_part: Sequence[Nested[np.ndarray] | None], name: str) -> None:
    """Refuses arrays of several lengths. Raises `DataError`."""
    named = {path: values for path, values in zip(NAMES, of_part, strict=False) if values is not None}
    lengths = {path: {len(leaf) for leaf in leaves(values)} for path, values in named.items()}
    if len(set[int]().union(*lengths.values())) <= 1:
        return
    x, y = named["x"], lengths.get("y", set())
    if isinstance(x, tuple) and y == {len(x)}:
        received = f"a list of {len(x)} arrays, which stands for as many inputs"
        raise DataError(f"x of the {name} data to be one array of {len(x)} examples", received, "numpy.stack(x)")
    counts = ", ".join(
        f"{' and '.join(f'{length:,}' for length in sorted(lengths_here))} in {path}"
        for path, lengths_here in lengths.items()
    )
    least = min(set[int]().union(*lengths.values()))
    instead = f"looking for those that are missing, or cutting all to {least:,}"
    raise DataError(f"as many examples in each array of the {name} data", counts, instead)


def _short(values: object) -> str:
    return repr(values) if isinstance(values, int | float | str) else f"a {type(values).__name__}"

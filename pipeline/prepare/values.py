"""Turns the values of examples into features of TFRecord files, by their kinds, shapes and labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.data import manifest, records
from pipeline.data.arrays import Nested, floats, is_one_array, refuse_masked
from pipeline.data.errors import DataError
from pipeline.data.manifest import Feature

# Vectors of integers up to so many values are stored as integers, which other readers of records expect; longer ones
# as bytes, which are read faster.
SHORT = 64
# Rows of arrays that are looked at together, so that little is copied.
LOOKED_AT = 4096
MOST = np.iinfo(np.int64).max
Labels = NDArray[np.int64]


def feature(name: str, array: np.ndarray, shape: Sequence[int]) -> Feature:
    """The feature that stores values of such an array. Raises `DataError` for what no record can hold.

    >>> feature("x", np.zeros((1, 28, 28), np.float32), (28, 28)).stored
    'floats'
    >>> [feature("x", np.zeros(1, kind), shape).stored for kind, shape in (("u1", ()), ("u1", (3,)), ("i4", (65,)))]
    ['ints', 'bytes', 'bytes']
    """
    kind, values = array.dtype, int(np.prod(shape, dtype=np.int64))
    if kind.kind not in "fiub" or kind.itemsize > 8:
        instead = "numbers in its place, such as the places of words in a vocabulary"
        raise DataError(f"{name} to be numbers of at most 8 bytes, or true and false", kind, instead)
    if kind == np.float32:
        stored = "floats"
    elif kind.kind == "f":
        stored = "bytes"
    elif not shape or kind in (np.uint32, np.uint64):
        # TensorFlow reads no unsigned numbers of 4 or 8 bytes out of bytes.
        stored = "ints"
    else:
        stored = "ints" if values <= SHORT and kind != np.uint8 else "bytes"
    return Feature(name, tuple(shape), kind.newbyteorder("=").name, stored)


def stored(value: np.ndarray, kind: str) -> bytes | np.ndarray:
    """An array as `records.example` takes it."""
    if kind != "bytes":
        return value
    return value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()


def flat(part: Nested[np.ndarray | float], split: str) -> dict[str, np.ndarray | float]:
    """The leaves of `(x, y)` or `(x, y, weight)` by the names of their features. Raises `DataError`."""
    check_names(part, split)
    assert isinstance(part, Sequence), "x, y and perhaps weights"
    leaves: dict[str, np.ndarray | float] = manifest.flat(tuple(_without_lists(values, split) for values in part))
    if not any(name == "x" or name.startswith("x/") for name in leaves):
        raise DataError(f"examples with an x for {split}", "none", "(x, y)")
    return {name: leaf for name, leaf in leaves.items() if leaf is not None}


def _without_lists(values: Nested[np.ndarray | float], split: str) -> Nested[np.ndarray | float]:
    """The same structure, with an array in place of each list of numbers; Python's floats are float32, as in Keras."""
    if isinstance(values, Mapping):
        return {key: _without_lists(inner, split) for key, inner in values.items()}
    if not isinstance(values, list | tuple):
        refuse_masked(values, split)
        return values
    # Of a tuple each is an input, as of a data set.
    if isinstance(values, tuple) or not is_one_array(values):
        return tuple(_without_lists(inner, split) for inner in values)
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"rows of one length in the lists of {split}", "others", "arrays of one shape") from error
    return floats(array, np.float32, f"the lists of {split}") if array.dtype == np.float64 else array


def labels_of(y: np.ndarray | None) -> Labels | None:
    """Labels as int64 where each is one whole number; None where they are something else.

    >>> labels_of(np.array([2, 0], np.uint8)), labels_of(np.array([0.5]))
    (array([2, 0]), None)
    """
    return None if y is None or y.dtype.kind not in "iu" or y.ndim != 1 else y.astype(np.int64)


def wrong_label(label: int, classes: int | None) -> str | None:
    """The fault of a label; None if it has none.

    >>> wrong_label(-1, None), wrong_label(3, 3), wrong_label(2, 3)
    ('has label -1, 0 or more was expected', 'has label 3, 0 to 2 was expected', None)
    """
    if label >= 0 and (classes is None or label < classes):
        return None
    return f"has label {label}, {'0 or more' if classes is None else f'0 to {classes - 1}'} was expected"


def in_words(features: Sequence[Feature]) -> str:
    """Features as a person reads them."""
    return ", ".join(f"{feature.name} of {feature.dtype} {list(feature.shape)}" for feature in features)


def check_names(node: object, split: str) -> None:
    """Refuses names that a TFRecord feature cannot have."""
    if isinstance(node, Mapping):
        for key, inner in node.items():
            if not isinstance(key, str) or not key or "/" in key or key.isdigit():
                expected = f"names of inputs and outputs that are text without /, and no numbers, for {split}"
                raise DataError(expected, f"{key!r}", "another name")
            check_names(inner, split)
    elif isinstance(node, tuple | list):
        for inner in node:
            check_names(inner, split)


def kind_of(value: object) -> str:
    """The kind of a value, in words."""
    if isinstance(value, tuple | list):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def is_label(feature: Feature) -> bool:
    """True for one whole number for each example."""
    return feature.stored == "ints" and feature.shape == () and feature.dtype != "bool"


@dataclass(frozen=True)
class Example:
    """An example made a record: its bytes, framed, and its label, None if it is no class. Or why it is broken.

    `size` is the height and width of its image, where it has an encoded one.
    """

    record: bytes | None
    label: int | None
    why: str | None = None
    size: tuple[int, int] | None = None


class Encoder:
    """Makes records of a stream's examples, which must all be as the first."""

    def __init__(self, split: str, classes: int | None) -> None:
        self._split, self._classes = split, classes
        self.features: tuple[Feature, ...] = ()
        self.labelled = False

    def make(self, example: object, name: str) -> Example:
        """One example as a record, or why it is broken. Raises `DataError` for what no record can hold."""
        if not isinstance(example, tuple | list) or len(example) not in (2, 3):
            received, instead = f"{name} as {kind_of(example)}", "yielding (x, y) of one example at a time"
            raise DataError("examples (x, y) or (x, y, weight)", received, instead)
        arrays = {leaf: np.asarray(value) for leaf, value in flat(tuple(example), self._split).items()}
        features = tuple(feature(leaf, array, array.shape) for leaf, array in arrays.items())
        if not self.features:
            self.features = features
            self.labelled = any(one.name == "y" and is_label(one) for one in features)
        why = None
        if features != self.features:
            why = f"has {in_words(features)}, {in_words(self.features)} as in the first was expected"
        for leaf, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                why = why or f"has NaN or infinity in {leaf}"
            if array.dtype == np.uint64 and array.size and array.max() > MOST:
                why = why or f"has a number in {leaf} that int64 does not hold"
        label = int(arrays["y"]) if self.labelled and not why else None
        why = why or (None if label is None else wrong_label(label, self._classes))
        if why:
            return Example(None, label, f"{name} {why}")
        data = records.example({one.name: stored(arrays[one.name], one.stored) for one in features})
        return Example(records.framed(data), label)

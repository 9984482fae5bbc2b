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
    # TensorFlow reads no unsigned numbers of 4 or 8 bytes out of bytes.
    as_ints = not shape or kind in (np.uint32, np.uint64) or (values <= SHORT and kind != np.uint8)
    stored = "floats" if kind == np.float32 else "ints" if kind.kind != "f" and as_ints else "bytes"
    return Feature(name, tuple(shape), kind.newbyteorder("=").name, stored)


def record(arrays: Mapping[str, np.ndarray], features: Sequence[Feature]) -> bytes:
    """One example as a record in its frame; bytes of arrays are little endian."""
    stored = {
        one.name: array if one.stored != "bytes" else array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        for one in features
        for array in [np.asarray(arrays[one.name])]
    }
    return records.framed(records.example(stored))


def flat(part: Sequence[Nested[np.ndarray | float]], split: str) -> dict[str, np.ndarray]:
    """The arrays of `(x, y)` or `(x, y, weight)` by the names of their features. Raises `DataError`."""
    leaves: dict[str, np.ndarray | float] = manifest.flat(tuple(_without_lists(values, split) for values in part))
    if not any(name == "x" or name.startswith("x/") for name in leaves):
        raise DataError(f"examples with an x for {split}", "none", "(x, y)")
    return {name: np.asarray(leaf) for name, leaf in leaves.items() if leaf is not None}


def _without_lists(values: Nested[np.ndarray | float], split: str) -> Nested[np.ndarray | float]:
    """The same structure, with an array in place of each list of numbers; Python's floats are float32, as in Keras."""
    if isinstance(values, Mapping):
        for key in values:
            if not isinstance(key, str) or not key or "/" in key or key.isdigit():
                expected = f"names of inputs and outputs that are text without /, and no numbers, for {split}"
                raise DataError(expected, f"{key!r}", "another name")
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


def labels_of(arrays: Mapping[str, np.ndarray]) -> Labels | None:
    """The labels y where each is one whole number; None where they are something else."""
    y = arrays.get("y")
    return None if y is None or y.dtype.kind not in "iu" or y.ndim != 1 else y.astype(np.int64)


def faults(arrays: Mapping[str, np.ndarray], classes: int | None) -> dict[int, str]:
    """Reasons not to train on examples by their rows, which are the first axis of the arrays."""
    whys: dict[int, str] = {}
    for name, array in arrays.items():
        for start in range(0, len(array), LOOKED_AT):
            block = array[start : start + LOOKED_AT]
            if array.dtype.kind == "f":
                bad, why = ~np.isfinite(block), f"has NaN or infinity in {name}"
            elif array.dtype == np.uint64:
                bad, why = block > MOST, f"has a number in {name} that int64 does not hold"
            else:
                break
            if bad.any():
                for row in np.flatnonzero(bad.reshape(len(block), -1).any(axis=1)).tolist():
                    whys.setdefault(start + row, why)
    labels = labels_of(arrays)
    return whys if labels is None else wrong_labels(labels, classes) | whys


def wrong_labels(labels: Labels, classes: int | None) -> dict[int, str]:
    """The faults of labels by their rows."""
    wrong = np.flatnonzero((labels < 0) | (labels >= (MOST if classes is None else classes)))
    right = "0 or more" if classes is None else f"0 to {classes - 1}"
    return {row: f"has label {labels[row]}, {right} was expected" for row in wrong.tolist()}


def in_words(features: Sequence[Feature]) -> str:
    """Features as a person reads them."""
    return ", ".join(f"{feature.name} of {feature.dtype} {list(feature.shape)}" for feature in features)


def kind_of(value: object) -> str:
    """The kind of a value, in words."""
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__


def is_label(feature: Feature) -> bool:
    """True for one whole number for each example."""
    return feature.name == "y" and feature.stored == "ints" and feature.shape == () and feature.dtype != "bool"


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
        arrays = flat(example, self._split)
        features = tuple(feature(leaf, array, array.shape) for leaf, array in arrays.items())
        if not self.features:
            self.features, self.labelled = features, any(map(is_label, features))
        if features != self.features:
            why = f"has {in_words(features)}, {in_words(self.features)} as in the first was expected"
        else:
            why = faults({leaf: array[None] for leaf, array in arrays.items()}, self._classes).get(0, "")
        if why:
            return Example(None, None, f"{name} {why}")
        return Example(record(arrays, features), int(arrays["y"]) if self.labelled else None)

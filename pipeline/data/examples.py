"""Examples that are made while they are read: what is cheap to order and divide, and what makes examples of it."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard, cast

import numpy as np

from pipeline.data.arrays import Nested, T
from pipeline.data.records import flat

# A function from tensors to a structure of tensors, which data go through while they are read.
Make: TypeAlias = Callable[..., Any]

# Rows of arrays that are looked at together; no label is larger than int64 holds.
LOOKED_AT = 4096
MOST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Segment:
    """Records of one TFRecord file: so many, from the `first` on. Byte `offset` is where record `at` starts."""

    path: str
    records: int
    first: int = 0
    offset: int = 0
    at: int = 0


@dataclass(frozen=True)
class Broken:
    """Examples that cannot be trained on: so many from `first` on, records of `path` or, where that is None, rows.

    `stop` is the byte after the last of them in the file, None where nothing of the file can be read after them.
    """

    path: str | None
    first: int
    examples: int
    name: str
    why: str
    stop: int | None = None


@dataclass(frozen=True)
class Leaf:
    """One array of an example, without TensorFlow what `tf.TensorSpec` says of it; None for sizes that differ."""

    shape: tuple[int | None, ...]
    dtype: str


@dataclass(frozen=True)
class Examples:
    """A part of the data whose examples are made while they are read.

    `raw` is a nested structure of arrays with the examples along the first axis, or segments of TFRecord files, whose
    elements are scalar strings. `parse` makes a batch of raw elements a batch of examples `(x, y)` or `(x, y, weight)`;
    then `decode` makes each of these what is trained, and `augment`, which is given an example and a seed, int32 [2],
    varies it anew in each epoch: TensorFlow's functions, traced once. `spec` is the structure of a finished example, a
    `Leaf` or a `tf.TensorSpec` for each array, without a batch axis.

    `look` is given these examples, the number of a share of them, how many shares there are, and whether to look
    through all of them or only at what is seen at once; it returns what is broken in the share. `flaws` are of the part
    as a whole, `notes` say how it was read, `digest` names its content; None: the arrays do.
    """

    raw: Any
    spec: Nested[Any]
    parse: Make | None = None
    decode: Make | None = None
    augment: Make | None = None
    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None
    look: Callable[["Examples", int, int, bool], list[Broken]] | None = None
    flaws: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    digest: str | None = None

    @property
    def in_files(self) -> bool:
        """True if they are records in files, read in order, and not arrays of which any row can be had."""
        return isinstance(self.raw, tuple) and {Segment} == {type(segment) for segment in self.raw}

    @property
    def is_made(self) -> bool:
        """True if the raw elements are the examples."""
        return not (self.in_files or self.parse or self.decode or self.augment)

    @property
    def element_spec(self) -> Nested[Any]:
        """The structure of a finished example in TensorFlow's words, as a `tf.data.Dataset` has it."""
        import tensorflow as tf

        return tf.nest.map_structure(
            lambda leaf: tf.TensorSpec(leaf.shape, leaf.dtype) if isinstance(leaf, Leaf) else leaf, self.spec
        )

    @property
    def image_files(self) -> bool:
        """True if they are files of encoded images, `raw["path"]`, with a label each, `raw["label"]`."""
        return isinstance(self.raw, Mapping) and set(self.raw) == {"path", "label"}

    @property
    def count(self) -> int:
        """The number of examples."""
        return sum(segment.records for segment in self.raw) if self.in_files else len(leaves(self.raw)[0])

    def without(self, broken: Sequence[Broken]) -> "Examples":
        """The same without what is broken."""
        if self.in_files:
            raw = tuple(part for segment in self.raw for part in _whole(segment, broken))
            return dataclasses.replace(self, raw=raw)
        return dataclasses.replace(self, raw=rows(self.raw, whole_rows(self.count, broken)))


def leaves(structure: Nested[T]) -> list[T]:
    """The arrays of a nested structure of dictionaries, tuples and lists."""
    if isinstance(structure, Mapping):
        return [leaf for key in sorted(structure) for leaf in leaves(structure[key])]
    if isinstance(structure, tuple | list):
        return [leaf for inner in structure for leaf in leaves(inner)]
    return [cast("T", structure)]


def rows(structure: Nested[np.ndarray], chosen: np.ndarray) -> Nested[np.ndarray]:
    """The chosen rows of each array of a nested structure."""
    if isinstance(structure, Mapping):
        return {key: rows(inner, chosen) for key, inner in structure.items()}
    if isinstance(structure, tuple | list):
        # A named tuple is made of parts one by one.
        make = getattr(structure, "_make", type(structure))
        return cast("Nested[np.ndarray]", make(rows(inner, chosen) for inner in structure))
    return cast("np.ndarray", cast("np.ndarray", structure)[chosen])


def share_of(count: int, number: int, shares: int) -> range:
    """The rows of one of several shares, which are all of about one size."""
    return range(number * count // shares, (number + 1) * count // shares)


def look_at_rows(examples: Examples, number: int, shares: int, thorough: bool = True) -> list[Broken]:
    """Returns the rows of arrays, in a share of them, that have NaN, infinity or a label that is no class."""
    share = share_of(examples.count, number, shares)
    arrays = {name: np.asarray(array)[share.start : share.stop] for name, array in flat(examples.raw).items()}
    whys = faults(arrays, examples.num_classes)
    return [Broken(None, share[row], 1, f"example {share[row]}", whys[row]) for row in sorted(whys)]


def faults(arrays: Mapping[str, np.ndarray], classes: int | None) -> dict[int, str]:
    """Reasons not to train on examples by their rows, which are the first axis of arrays; `y` may be their classes."""
    whys: dict[int, str] = {}
    if classes is not None and are_labels(y := arrays.get("y", ())):
        right = "0 or more" if classes == MOST else f"0 to {classes - 1}"
        for row in np.flatnonzero((y < 0) | (y >= classes)).tolist():
            whys[row] = f"has label {y[row]}, {right} were expected"
    for name, array in arrays.items():
        # Block by block, so that little is copied.
        for start in range(0, len(array) if array.dtype.kind == "f" else 0, LOOKED_AT):
            finite = np.isfinite(array[start : start + LOOKED_AT])
            if not finite.all():
                rows = start + np.flatnonzero(~finite.reshape(len(finite), -1).all(axis=1))
                whys |= dict.fromkeys(rows.tolist(), f"has NaN or infinity in {name}")
    return whys


def are_labels(y: Nested[np.ndarray]) -> TypeGuard[np.ndarray]:
    """True for integers, one for each example."""
    return not isinstance(y, Mapping | tuple | list) and (array := np.asarray(y)).dtype.kind in "iu" and array.ndim == 1


def whole_rows(count: int, broken: Sequence[Broken]) -> np.ndarray:
    """Returns a mask of the rows that are not broken, boolean [count]."""
    whole = np.ones(count, bool)
    for flaw in broken:
        whole[flaw.first : flaw.first + flaw.examples] = False
    return whole


def _whole(segment: Segment, broken: Sequence[Broken]) -> Iterator[Segment]:
    last = segment.first + segment.records
    for flaw in sorted((flaw for flaw in broken if flaw.path == segment.path), key=lambda flaw: flaw.first):
        if not segment.first < flaw.first + flaw.examples <= last + flaw.examples:
            continue
        if flaw.first > segment.first:
            yield dataclasses.replace(segment, records=flaw.first - segment.first)
        after = flaw.first + flaw.examples
        if flaw.stop is None or after >= last:
            return
        segment = Segment(segment.path, last - after, after, flaw.stop, after)
    if segment.records:
        yield segment

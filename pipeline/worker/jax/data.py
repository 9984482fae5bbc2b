"""A process's data as NumPy arrays, and the order in which steps take their examples, the same as under TensorFlow.

Every process reads everything; of each global batch a device is given its rows alone.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import keras
import numpy as np

from pipeline.config import targets
from pipeline.data import manifest, records
from pipeline.data.arrays import lost
from pipeline.data.errors import DataError, refuse
from pipeline.data.examples import Examples, leaves
from pipeline.data.files import opened
from pipeline.worker.data import array_parts
from pipeline.worker.data import broken as looked
from pipeline.worker.layout import BEGINNING, BatchLayout, Position
from pipeline.worker.model_error import TrainingError
from pipeline.worker.state import digest

# (x, y) or (x, y, weights): arrays, or structures of them, with the examples along the first axis.
Arrays: TypeAlias = tuple[Any, ...]
# Examples of whose epochs the orders are drawn at once: an epoch of few takes NumPy as long as one of some thousands.
DRAWN_AT_ONCE = 1 << 14
PARTS = {"train": "training", "validation": "validation"}


@dataclass(frozen=True)
class DeviceData:
    """Arrays, and how steps take their examples from them."""

    arrays: Arrays
    layout: BatchLayout
    shuffle: bool
    seed: int

    def steps(self, position: Position = BEGINNING) -> Iterator[np.ndarray]:
        """The rows of each step's global batch, int64 [examples], from the position on, epoch after epoch."""
        position = self.layout.settled(position)
        batch, first = self.layout.global_batch, position.examples
        examples = self.layout.examples
        many = max(1, DRAWN_AT_ONCE // max(1, examples))
        epochs = (range(start, start + many) for start in itertools.count(position.epoch, many))
        drawn = itertools.chain.from_iterable(orders(examples, self.seed, some) for some in epochs)
        for places in drawn if self.shuffle else itertools.repeat(np.arange(examples)):
            for step in range(self.layout.steps_after(first)):
                start = first + step * batch
                yield places[start : start + batch]
            first = 0


class ProcessData(looked.WholeData):
    """The data of a process, which reads everything, rid of what is broken."""

    num_classes: int | None = None
    class_names: tuple[str, ...] | None = None

    def made(self) -> tuple[Any, Any]:
        """Makes (training, validation) data that are read without TensorFlow."""
        train, validation = array_parts.both(targets.call(self._plan.data.build, "data.build", shard=0, shards=1))
        return _known(train, "train"), _known(validation, "validation")

    def counted(self, all_whole: bool) -> tuple[dict[str, bool], dict[str, int]]:
        """(whether others read something else, examples here) of each part."""
        counts = {name: 0 if part is None else _count(part) for name, part in self.whole.items()}
        return dict.fromkeys(counts, False), counts

    def finish(self) -> None:
        """Reads what is still in files, and weighs examples by their class, once all know what is broken."""
        train = self.whole["train"]
        self.class_names = getattr(train, "class_names", None)
        self.parts = {name: None if part is None else _arrays(part) for name, part in self.whole.items()}
        for name, arrays in self.parts.items():
            for leaf in leaves(arrays or ()):
                if isinstance(leaf, np.ndarray):
                    _check_range(leaf, PARTS[name])
        counted = looked.num_classes(train) or looked.num_classes(self.train)
        self.num_classes = self._plan.data.num_classes or counted
        if (class_weight := self._plan.training.class_weight) is not None:
            self.parts["train"] = _weighed(self.train, {int(label): weight for label, weight in class_weight.items()})

    @property
    def train(self) -> Arrays:
        """The training arrays."""
        return self.parts["train"]  # type: ignore[no-any-return]

    def digest(self) -> str:
        """Names the training data, as TensorFlow's engine does."""
        return getattr(self.whole["train"], "digest", None) or digest(leaves(self.train))


def _known(part: Any, name: str) -> Any:
    """A part of a kind that is read without TensorFlow: `Examples`, or a tuple of arrays. Raises `DataError`."""
    if part is None or (isinstance(part, Examples) and (part.is_made or part.in_files)):
        return part
    if hasattr(part, "__array__"):
        expected = f"the {PARTS[name]} data as (x, y), or (x,) alone, under backend=jax"
        raise DataError(expected, f"one array, of shape {list(np.shape(part))}", "return (x, y), None")
    if isinstance(part, Examples) or not isinstance(part, tuple | list):
        kind = "examples that TensorFlow makes" if isinstance(part, Examples) else f"a {type(part).__name__}"
        expected = f"the {PARTS[name]} data as arrays (x, y), or prepared files of them, under backend=jax"
        raise DataError(f"{expected}, which reads them without TensorFlow", kind, "backend=tensorflow, or numpy.array")
    return keras.tree.map_structure(_array, array_parts.part(part, PARTS[name]))


def _array(array: np.ndarray) -> np.ndarray:
    wrong, expected = array.dtype.kind not in "biuf" or array.dtype.itemsize > 8, "arrays of numbers under backend=jax"
    refuse((wrong, expected, array.dtype, ".astype('float32'), or whatever stands for it"))
    # JAX knows the byte order of this machine alone, and files may have another.
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _count(part: Any) -> int:
    return part.count if isinstance(part, Examples) else len(leaves(part)[0])


def _arrays(part: Any) -> Arrays:
    if not isinstance(part, Examples):
        return part  # type: ignore[no-any-return]
    if not part.in_files:
        return tuple(part.raw)
    expected = "prepared data of arrays under backend=jax, since encoded images and augmentation are TensorFlow's"
    encoded = part.decode is not None or part.augment is not None
    refuse((encoded, expected, "such", "backend=tensorflow, or preparing images as arrays"))
    return _of_records(part)


def _of_records(part: Examples) -> Arrays:
    """Prepared examples as arrays, in the order of their files."""
    spec = manifest.flat(part.spec)
    values: dict[str, list[np.ndarray]] = {name: [] for name in spec}
    for segment in part.raw:
        with opened(segment.path) as file:
            file.seek(segment.offset)
            records_of_segment = range(segment.first - segment.at, segment.first - segment.at + segment.records)
            for frame in itertools.islice(records.frames(file), records_of_segment.start, records_of_segment.stop):
                if frame.data is None:
                    received = f"record {frame.number}, which {frame.broken}"
                    instead = "data.on_error=skip, or preparing the data anew"
                    raise TrainingError(f"records that can be read in {segment.path}", received, instead)
                values_of_record = records.parsed(frame.data)
                for name, leaf in spec.items():
                    own = values_of_record[name]
                    in_bytes = bool(own) and isinstance(own[0], bytes)
                    array = np.frombuffer(own[0], leaf.dtype) if in_bytes else np.array(own, leaf.dtype)
                    values[name].append(array.reshape(leaf.shape))
    stacked: dict[str, Any] = {name: np.stack(arrays) for name, arrays in values.items()}
    parts: Any = manifest.nested(stacked)
    return tuple(parts)


def _check_range(array: np.ndarray, name: str) -> None:
    """Refuses numbers that JAX would wrap, or make infinite, in the type that it has in place of a wider one."""
    over = lost(array, np.dtype(jax.dtypes.canonicalize_dtype(array.dtype)))
    expected = f"numbers of 32 bits in the {name} data under backend=jax"
    instead = "backend=tensorflow, or .astype('float32') where they are quantities"
    refuse((over is not None, expected, f"{over} of {array.dtype}", instead))


def _weighed(arrays: Arrays, class_weight: Mapping[int, float]) -> Arrays:
    """(x, y, weights), in which examples are weighed by the class of their label, as Keras's `fit` does."""
    x, y, weight = keras.utils.unpack_x_y_sample_weight(arrays)
    labels = np.asarray(y) if isinstance(y, np.ndarray) else None
    if labels is None or labels.ndim > 2:
        expected = "a class, or a number for each class, as the label of an example for train.class_weight"
        raise DataError(expected, type(y).__name__, "train.class_weight=null, and weights in the data")
    if labels.ndim == 2:
        labels = labels[:, 0] if labels.shape[1] == 1 else labels.argmax(axis=1)
    numbers = np.rint(labels).astype(np.int64)
    table = np.array([class_weight.get(number, 1.0) for number in range(max(class_weight) + 1)], np.float32)
    weighted = (numbers >= 0) & (numbers < len(table))
    weights = np.where(weighted, table[np.where(weighted, numbers, 0)], np.float32(1))
    # Along the first axis of weights, which may be a column.
    return x, y, weights if weight is None else (np.asarray(weight, np.float32).T * weights).T


# Philox of four 32-bit words and ten rounds (Salmon et al., 2011).
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10
# The key that scrambles a stateless seed (tensorflow/core/kernels/stateless_random_ops.cc).
_SCRAMBLING = (0x3EC8F720, 0x02461E29)
_WORD = 0xFFFFFFFF


def orders(examples: int, seed: int, epochs: Sequence[int]) -> Iterator[np.ndarray]:
    """The places of examples in their order, int64 [examples], of each epoch; drawn from `seed` and the epoch alone.

    That of `tf.random.experimental.stateless_shuffle`: a Fisher-Yates shuffle whose draws are Philox's words.

    >>> [order.tolist() for order in orders(5, seed=0, epochs=[1, 2])]
    [[4, 3, 1, 0, 2], [3, 4, 0, 2, 1]]
    """
    mixed = _philox((*_words(seed), *_words(np.array(epochs, np.uint64)[:, None])), _SCRAMBLING)
    draws = max(0, examples - 1)
    blocks = np.arange(-(-draws // 4), dtype=np.uint64)
    words = np.stack(_philox((blocks & _WORD, blocks >> 32, *mixed[2:]), mixed[:2]), axis=2)
    jumps = words.reshape(len(epochs), -1)[:, :draws] % np.arange(examples, examples - draws, -1, dtype=np.uint64)
    for of_epoch in jumps.astype(np.int64):
        others = np.arange(examples)
        others[:draws] += of_epoch
        yield swapped(others)


def swapped(others: np.ndarray) -> np.ndarray:
    """The numbers from 0 on, int64, after each place in turn has swapped its own with that of a place at or after it.

    >>> swapped(np.array([2, 2, 2])).tolist()
    [2, 0, 1]
    """
    places = np.arange(len(others))
    # At its turn a place has what the place that swapped with it last had at its own turn.
    moved, had = np.flatnonzero(others > places), places.copy()
    had[others[moved]] = moved
    while not np.array_equal(had, before := had[had]):
        had = before
    # It takes what the last place before it that swapped with the same place left there.
    with_place, turns = np.divmod(np.sort(others * len(others) + places), max(1, len(others)))
    again = np.flatnonzero(with_place[1:] == with_place[:-1])
    taken = others.copy()
    taken[turns[again + 1]] = had[turns[again]]
    return taken


def _words(number: Any) -> tuple[Any, Any]:
    return number & _WORD, number >> 32 & _WORD


def _philox(counter: tuple[Any, ...], key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Four random words below 2**32 of a counter's four, or uint64 arrays of such, as the counter's first is."""
    first, second, third, fourth = counter
    low, high = key
    for _ in range(_ROUNDS):
        one, other = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second, third, fourth = other >> 32 ^ second ^ low, other & _WORD, one >> 32 ^ fourth ^ high, one & _WORD
        low, high = low + _WEYL[0] & _WORD, high + _WEYL[1] & _WORD
    return first, second, third, fourth

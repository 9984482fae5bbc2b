"""A process's data as arrays, the order in which steps take them, as TensorFlow's, and batches, which a thread makes.

With a single core they are made between steps: a thread would hold Python's lock while a step needs it to add up.
"""

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipeline.config import targets
from pipeline.data import records
from pipeline.data.arrays import lost
from pipeline.data.errors import DataError, refuse
from pipeline.data.examples import Examples, leaves
from pipeline.data.files import opened
from pipeline.plan.estimate import READY_BLOCKS
from pipeline.worker.data import loading
from pipeline.worker.jax.devices import BATCH, has_core_beside, on_cpu
from pipeline.worker.layout import BEGINNING, BatchLayout, Position
from pipeline.worker.model_error import TrainingError
from pipeline.worker.shared_memory import aligned
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
        batch, examples, first = self.layout.global_batch, self.layout.examples, position.examples
        many = max(1, DRAWN_AT_ONCE // max(1, examples))
        epochs = (range(start, start + many) for start in itertools.count(position.epoch, many))
        drawn = itertools.chain.from_iterable(orders(examples, self.seed, some) for some in epochs)
        for places in drawn if self.shuffle else itertools.repeat(np.arange(examples)):
            for step in range(self.layout.steps_after(first)):
                start = first + step * batch
                yield places[start : start + batch]
            first = 0


@dataclass(frozen=True)
class ReadBlock:
    """Batches of `examples` each [room, batch, ...], of which `steps` count; not `stacked`, a batch [batch, ...]."""

    batches: Any
    steps: int
    examples: int
    stacked: bool


class Reader:
    """The steps of a part of the data, from a position on; of a part that is read once, to its end."""

    def __init__(
        self, data: DeviceData, mesh: Mesh, room: int | None, position: Position = BEGINNING, once: bool = False
    ) -> None:
        """`room` is how many batches a block holds; None: each is alone."""
        self._data, self._mesh, self._room, self._once, self._position = data, mesh, room, once, position
        ahead, self._blocks_left = not on_cpu(mesh) or has_core_beside(), self._blocks()
        # Makes blocks one after another, of which some are ready or under way.
        self._thread, self._ahead = ThreadPoolExecutor(1) if ahead else None, deque[Future[ReadBlock]]()
        self._block, self._next = ReadBlock(None, 0, 0, False), 0
        # Seconds spent on waiting for a block so far.
        self.waited = 0.0

    def take(self, count: int) -> Iterator[tuple[ReadBlock, int, int]]:
        """The next `count` steps as (block, the first of them in it, how many)."""
        while count > 0:
            if self._next == self._block.steps:
                began = time.perf_counter()
                while self._thread is not None and len(self._ahead) < READY_BLOCKS + 2:
                    self._ahead.append(self._thread.submit(next, self._blocks_left))
                self._block = self._ahead.popleft().result() if self._ahead else next(self._blocks_left)
                self.waited, self._next = self.waited + time.perf_counter() - began, 0
            steps = min(count, self._block.steps - self._next)
            yield self._block, self._next, steps
            self._next, count = self._next + steps, count - steps

    def close(self) -> None:
        """Ends the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _blocks(self) -> Iterator[ReadBlock]:
        layout, steps = self._data.layout, self._data.steps(self._position)
        for size, alike in itertools.groupby(itertools.islice(steps, layout.steps) if self._once else steps, len):
            room = self._room if size == layout.global_batch else None
            while chosen := list(itertools.islice(alike, room or 1)):
                yield self._block_of(chosen, size, room)

    def _block_of(self, chosen: list[np.ndarray], size: int, room: int | None) -> ReadBlock:
        cut = BATCH if size % self._mesh.shape[BATCH] == 0 else None
        sharding = NamedSharding(self._mesh, PartitionSpec(None, cut) if room else PartitionSpec(cut))
        places = np.stack(chosen) if room else chosen[0]

        def placed(leaf: np.ndarray) -> Any:
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)

            def part(index: tuple[slice, ...]) -> np.ndarray:
                # Where JAX takes a device's rows over without a copy; those after the last are unread.
                own = places[index[: places.ndim]]
                values = aligned((room or len(own), *own.shape[1:], *leaf.shape[1:]), dtype)
                if leaf.flags.c_contiguous and leaf.dtype == dtype and own.max(initial=0) < len(leaf):
                    # Straight to their place; NumPy makes a copy first where places might not be in range.
                    leaf.take(own, 0, values[: len(own)], "clip")
                else:
                    values[: len(own)] = leaf[own]
                return values

            return jax.make_array_from_callback((room, size, *leaf.shape[1:])[not room :], sharding, part)

        return ReadBlock(keras.tree.map_structure(placed, self._data.arrays), len(chosen), size, room is not None)


def of_batch(data: DeviceData, examples: int, sharding: NamedSharding | None = None) -> Any:
    """The shapes of a batch of so many examples on the devices, in the types that JAX makes of theirs."""
    return keras.tree.map_structure(
        lambda leaf: jax.ShapeDtypeStruct(
            (examples, *leaf.shape[1:]), jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=sharding
        ),
        data.arrays,
    )


class ProcessData(loading.WholeData):
    """The data of a process, which reads everything, rid of what is broken."""

    def made(self) -> tuple[Any, Any]:
        """Makes (training, validation) data that are read without TensorFlow."""
        train, validation = loading.both(targets.call(self._plan.data.build, "data.build", shard=0, shards=1))
        return _known(train, "train"), _known(validation, "validation")

    def counted(self, all_whole: bool) -> tuple[dict[str, bool], dict[str, int]]:
        """(whether others read something else, examples here) of each part."""
        return dict.fromkeys(self.whole, False), {name: _count(part) for name, part in self.whole.items()}

    def finish(self) -> None:
        """Reads what is still in files, and weighs examples by their class, once all know what is broken."""
        train = self.whole["train"]
        self.class_names: tuple[str, ...] | None = getattr(train, "class_names", None)
        self.parts = {name: None if part is None else _arrays(part) for name, part in self.whole.items()}
        for name, arrays in self.parts.items():
            for leaf in filter(lambda leaf: isinstance(leaf, np.ndarray), leaves(arrays or ())):
                _check_range(leaf, PARTS[name])
        counted = loading.num_classes(train) or loading.num_classes(self.train)
        self.num_classes = self._plan.data.num_classes or counted
        if (class_weight := self._plan.training.class_weight) is not None:
            self.parts["train"] = _weighed(self.train, {int(label): weight for label, weight in class_weight.items()})

    @property
    def train(self) -> Any:
        """The training arrays."""
        return self.parts["train"]

    def digest(self) -> str:
        """Names the training data, as TensorFlow's engine does."""
        return getattr(self.whole["train"], "digest", None) or digest(leaves(self.train))


def _known(part: Any, name: str) -> Any:
    if part is None or (isinstance(part, Examples) and (part.is_made or part.in_files)):
        return part
    if hasattr(part, "__array__"):
        expected = f"the {PARTS[name]} data as (x, y), or (x,) alone, under backend=jax"
        raise DataError(expected, f"one array, of shape {list(np.shape(part))}", "return (x, y), None")
    kind = "examples that TensorFlow makes" if isinstance(part, Examples) else f"a {type(part).__name__}"
    expected = f"the {PARTS[name]} data as arrays (x, y), or prepared files of them, under backend=jax"
    instead = "backend=tensorflow, or numpy.array"
    refuse((not isinstance(part, tuple | list), f"{expected}, which reads them without TensorFlow", kind, instead))

    def own(array: np.ndarray) -> np.ndarray:
        wrong = array.dtype.kind not in "biuf" or array.dtype.itemsize > 8
        instead = ".astype('float32'), or whatever stands for it"
        refuse((wrong, "arrays of numbers under backend=jax", array.dtype, instead))
        # JAX knows the byte order of this machine alone, and files may have another.
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    return keras.tree.map_structure(own, loading.part(part, PARTS[name]))


def _count(part: Any) -> int:
    if part is None:
        return 0
    return part.count if isinstance(part, Examples) else len(leaves(part)[0])


def _arrays(part: Any) -> Arrays:
    if not isinstance(part, Examples):
        return part  # type: ignore[no-any-return]
    if not part.in_files:
        return tuple(part.raw)
    expected = "prepared data of arrays under backend=jax, since encoded images and augmentation are TensorFlow's"
    encoded = part.decode is not None or part.augment is not None
    refuse((encoded, expected, "such", "backend=tensorflow, or preparing images as arrays"))
    spec = records.flat(part.spec)
    values: dict[str, list[np.ndarray]] = {name: [] for name in spec}
    for segment in part.raw:
        with opened(segment.path) as file:
            file.seek(segment.offset)
            start = segment.first - segment.at
            for frame in itertools.islice(records.frames(file), start, start + segment.records):
                if frame.data is None:
                    received = f"record {frame.number}, which {frame.broken}"
                    instead = "data.on_error=skip, or preparing the data anew"
                    raise TrainingError(f"records that can be read in {segment.path}", received, instead)
                record = records.parsed(frame.data)
                for name, leaf in spec.items():
                    own = record[name]
                    in_bytes = bool(own) and isinstance(own[0], bytes)
                    array = np.frombuffer(own[0], leaf.dtype) if in_bytes else np.array(own, leaf.dtype)
                    values[name].append(array.reshape(leaf.shape))
    nested: Any = records.nested({name: np.stack(arrays) for name, arrays in values.items()})
    return tuple(nested)


def _check_range(array: np.ndarray, name: str) -> None:
    """Refuses numbers that JAX would wrap, or make infinite, in the type that it has in place of a wider one."""
    over = lost(array, np.dtype(jax.dtypes.canonicalize_dtype(array.dtype)))
    expected = f"numbers of 32 bits in the {name} data under backend=jax"
    instead = "backend=tensorflow, or .astype('float32') where they are quantities"
    refuse((over is not None, expected, f"{over} of {array.dtype}", instead))


def _weighed(arrays: Arrays, class_weight: Mapping[int, float]) -> Arrays:
    x, y, weight = keras.utils.unpack_x_y_sample_weight(arrays)
    expected = "a class, or a number for each class, as the label of an example for train.class_weight"
    wrong = not isinstance(y, np.ndarray) or y.ndim > 2
    refuse((wrong, expected, type(y).__name__, "train.class_weight=null, and weights in the data"))
    labels = y[:, 0] if y.shape[1:] == (1,) else y.argmax(axis=1) if y.ndim == 2 else y
    numbers = np.rint(labels).astype(np.int64)
    table = np.array([class_weight.get(number, 1.0) for number in range(max(class_weight) + 1)], np.float32)
    weighted = (numbers >= 0) & (numbers < len(table))
    weights = np.where(weighted, table[np.where(weighted, numbers, 0)], np.float32(1))
    # Along the first axis of weights, which may be a column.
    return x, y, weights if weight is None else (np.asarray(weight, np.float32).T * weights).T


# Philox of four 32-bit words and ten rounds (Salmon et al., 2011).
_MULTIPLIERS, _WEYL, _ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10
# The key that scrambles a stateless seed (tensorflow/core/kernels/stateless_random_ops.cc).
_SCRAMBLING = (0x3EC8F720, 0x02461E29)
_WORD = 0xFFFFFFFF


def orders(examples: int, seed: int, epochs: Sequence[int]) -> Iterator[np.ndarray]:
    """The places of examples in their order, int64 [examples], of each epoch; drawn from `seed` and the epoch alone.

    That of `tf.random.experimental.stateless_shuffle`: a Fisher-Yates shuffle whose draws are Philox's words.
    """
    numbers = np.array(epochs, np.uint64)[:, None]
    counter = (seed & _WORD, seed >> 32 & _WORD, numbers & _WORD, numbers >> 32 & _WORD)
    mixed = _philox(counter, _SCRAMBLING)
    draws = max(0, examples - 1)
    blocks = np.arange(-(-draws // 4), dtype=np.uint64)
    words = np.stack(_philox((blocks & _WORD, blocks >> 32, *mixed[2:]), mixed[:2]), axis=2)
    jumps = words.reshape(len(epochs), -1)[:, :draws] % np.arange(examples, examples - draws, -1, dtype=np.uint64)
    for of_epoch in jumps.astype(np.int64):
        others = np.arange(examples)
        others[:draws] += of_epoch
        yield swapped(others)


def swapped(others: np.ndarray) -> np.ndarray:
    """The numbers from 0 on, int64, after each place in turn has swapped its own with that of one at or after it."""
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


def _philox(counter: tuple[Any, ...], key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Four random words below 2**32 of a counter's four, or uint64 arrays of such, as the counter's first is."""
    (first, second, third, fourth), (low, high) = counter, key
    for _ in range(_ROUNDS):
        one, other = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, second, third, fourth = other >> 32 ^ second ^ low, other & _WORD, one >> 32 ^ fourth ^ high, one & _WORD
        low, high = low + _WEYL[0] & _WORD, high + _WEYL[1] & _WORD
    return first, second, third, fourth

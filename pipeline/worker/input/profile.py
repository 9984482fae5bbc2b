"""Times the input without the model, the model without the input, and the stages of the input, before training begins.

Nothing of it is trained: the input is made anew for it, and what steps change is put back.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import tensorflow as tf

from pipeline.data.examples import Examples
from pipeline.private import cache_op, prefetch_op, shuffle_op
from pipeline.record.events import StageCost
from pipeline.worker.input import batches
from pipeline.worker.input import reading as reads
from pipeline.worker.input.part import Batch, Batches, Part, Step
from pipeline.worker.loop import Call
from pipeline.worker.tensorflow import source
from pipeline.worker.tensorflow.loop import Data, Loop
from pipeline.worker.tensorflow.scheduled import AsyncSteps, ScheduledLoop
from pipeline.worker.tensorflow.source import Rows, Source

# What is timed is timed in so many pieces, so that it is known how much they differ.
PIECES = 4
# Steps before anything is timed, and those that tell how long one takes.
WARMUP_STEPS, PACE_STEPS = 2, 3
# How long what was made ahead is taken, at most: what is slow is not far ahead.
SETTLE_SECONDS = 1.0
# How long a stage's prefix is timed; one that is cached is read to its end before, for so long at most.
STAGE_SECONDS, FILL_SECONDS = 1.0, 10.0
# Examples of a person's data set that are taken together while its stages are timed.
CHUNK = 16

# (name, the input up to and with this stage, examples in an element of it)
Stage: TypeAlias = tuple[str, tf.data.Dataset, int]


class Profile:
    """The input and the model of a loop, each alone."""

    def __init__(self, loop: Loop, part: Part, shards: Sequence[Part]) -> None:
        """`part` is the training data, which nothing else reads; `shards` what asynchronous workers read of it."""
        data = loop.train_data
        part, shards = plain(part), [plain(shard) for shard in shards]
        # A window over what is read one after the other is filled before the first example leaves it, and whatever fits
        # into it comes from memory afterwards, until the next epoch: neither is what an example costs.
        ordered = not callable(reads.raw(part, data.shuffle, data.seed, data.reading))
        self._data = dataclasses.replace(data, part=part, shuffle=data.shuffle and ordered)
        self._loop, self._input_seconds = loop, 0.0
        self._alone: _Asynchronous | _Together = (
            _Asynchronous(loop, self._data, shards) if isinstance(loop, ScheduledLoop) else _Together(loop, self._data)
        )

    def model_pace(self) -> float:
        """Seconds of a step on one batch that is there, roughly. The first call compiles it.

        The model is timed before the input: batches are made ahead of those that are read, beside whatever comes next.
        """
        with self._loop.put_back():
            self._alone.train(WARMUP_STEPS)
            _, seconds = self._alone.train(PACE_STEPS)
        return seconds / PACE_STEPS

    def model(self, steps: int) -> tuple[list[float], list[float]]:
        """(examples, seconds) of pieces of so many steps on one batch that is there."""
        with self._loop.put_back():
            self._alone.train(1)
            return _pieces(self._alone.train, steps)

    def input_pace(self) -> float:
        """Seconds a step that reading its batch takes, roughly. The first call compiles it."""
        _fill(self._data.part)
        self._alone.read(1)
        self._read_away()
        _, seconds = self._alone.read(PACE_STEPS)
        self._input_seconds = seconds / PACE_STEPS
        return self._input_seconds

    def input(self, steps: int) -> tuple[list[float], list[float]]:
        """(examples, seconds) of pieces of so many steps, in which batches are read, and nothing else is done."""
        self._read_away()
        return _pieces(self._alone.read, steps)

    def costs(self) -> list[StageCost]:
        """What each stage of the input costs this process."""
        # Meanwhile what is read ahead of the last piece of input comes to its end.
        time.sleep(min(self._ahead * self._input_seconds, FILL_SECONDS))
        return costs(self._data)

    def _read_away(self) -> None:
        """Takes what was made ahead while nothing was timed, and would come at once."""
        began, count = time.monotonic(), 0
        while count < self._ahead and time.monotonic() < began + SETTLE_SECONDS:
            self._alone.read(1)
            count += 1

    @property
    def _ahead(self) -> int:
        """Steps whose batches may be made, or under way, ahead of those that were taken: kept, mapped, batched."""
        return self._data.reading.prefetch + 2 * reads.parallel() + 1


class _Together:
    """Steps that all replicas make together, as far as this process has a part in them."""

    def __init__(self, loop: Loop, data: Data) -> None:
        self._loop, self._data = loop, data
        self._read = tf.function(_read, autograph=False)
        self._batches: Batches | None = None
        self._cached: Batches | None = None

    def read(self, steps: int) -> tuple[float, float]:
        """(examples of the global batches, seconds) of so many steps' batches."""
        self._batches = self._batches or self._data.iterator()
        began = time.perf_counter()
        examples = float(self._read(self._batches, tf.constant(steps)))
        return examples, time.perf_counter() - began

    def train(self, steps: int) -> tuple[float, float]:
        """(examples, seconds) of so many steps on one batch."""
        if self._cached is None:
            self._cached = batches.again(_first(self._data), _stream(self._data).element_spec)
        return _sum([self._loop.on(self._cached, steps)])


class _Asynchronous:
    """Steps of asynchronous workers, each by itself."""

    def __init__(self, loop: ScheduledLoop, data: Data, shards: Sequence[Part]) -> None:
        self._loop, self._data = loop, data
        self._source = source.source(data, shards, loop.concurrent_steps)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(loop.strategy)
        self._batches = iter(self._coordinator.create_per_worker_dataset(self._source.made))
        self._read = tf.function(self._some, autograph=False)
        self._handed_out = 0
        self._async_steps: AsyncSteps | None = None

    def read(self, steps: int) -> tuple[float, float]:
        """(examples, seconds) of so many steps' batches for each worker, read by any of them."""
        began = time.perf_counter()
        calls = []
        # In as many calls as make it even, whoever is faster.
        for _ in range(PIECES * self._loop.concurrent_steps):
            count = -(-steps // PIECES)
            rows, edges = self._source.rows(self._handed_out, count)
            self._handed_out += count
            calls.append(self._coordinator.schedule(self._read, args=(self._batches, rows, edges)))
        self._coordinator.join()
        return float(sum(call.fetch() for call in calls)), time.perf_counter() - began

    def train(self, steps: int) -> tuple[float, float]:
        """(examples, seconds) of so many steps for each worker, on one batch."""
        loop = self._loop
        if self._async_steps is None:
            _, (batch,) = _first(self._data)
            source = Source(
                lambda: tf.data.Dataset.from_tensors(batch).repeat(), self._source_rows, lambda given, *_: next(given)
            )
            losses = 1 + len(loop.outputs)
            self._async_steps = AsyncSteps(
                loop.model, loop.strategy, source, loop.concurrent_steps, losses, loop.gradient_bits
            )
        began = time.perf_counter()
        wanted = steps * loop.concurrent_steps
        calls: list[Call] = []
        while (left := wanted - sum(call.steps for call in calls)) > 0:
            calls.append(self._async_steps.call(min(left, -(-steps // PIECES)), left))
        examples, _ = _sum(calls)
        return examples, time.perf_counter() - began

    def _source_rows(self, first: int, count: int) -> Rows:
        with tf.device("CPU:0"):
            return tf.zeros([0], tf.int64), tf.range(count + 1, dtype=tf.int64)

    def _some(self, given: Iterator[Batch], rows: tf.Tensor, edges: tf.Tensor) -> tf.Tensor:
        def one(index: tf.Tensor, examples: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            leaves = tf.nest.flatten(self._source.batch(given, rows, edges[index], edges[index + 1]))
            with tf.control_dependencies(leaves):
                return index + 1, examples + tf.cast(tf.shape(leaves[0])[0], tf.float32)

        return tf.while_loop(lambda index, _: index < tf.shape(edges)[0] - 1, one, (0, 0.0))[1]


def stages(data: Data) -> list[Stage]:
    """The input, stage by stage: each one with all that comes before it, but for "batch", whose examples are there."""
    part = data.part
    if isinstance(part, tf.data.Dataset):
        chain = [(name, _in_chunks(node), CHUNK) for name, node in _chain(part)]
        ready = tf.data.Dataset.from_tensors(next(iter(part))).repeat(data.layout.examples)
        return [*chain, ("batch", _stream(dataclasses.replace(data, part=ready)), data.layout._share)]
    if not isinstance(part, Examples) or part.is_made:
        return [("gather", _stream(data), _local(data))]
    bare = dataclasses.replace(part, parse=None, decode=None, augment=None)
    found, kept = [("read" if part.in_files else "gather", bare)], {}
    for name in ("parse", "decode", "augment"):
        if (function := getattr(part, name)) is not None:
            kept[name] = function
            found.append((name, dataclasses.replace(bare, **kept)))
    # What is not made yet has other labels, or none.
    unchecked = dataclasses.replace(data.reading, classes=None)
    return [
        (name, _stream(dataclasses.replace(data, part=stage, reading=unchecked)), _local(data)) for name, stage in found
    ]


def costs(data: Data) -> list[StageCost]:
    """What each stage adds to the seconds of an example, and of a step in this process: never less than nothing."""
    found, before = list[StageCost](), 0.0
    passing = _passing(data)
    for number, (name, made, examples) in enumerate(stages(data)):
        seconds = _seconds_per_element(made) / examples
        # What comes after a slow stage would otherwise get all that its time varies by.
        added = seconds if name == "batch" else max(0.0, seconds - before)
        before = max(seconds, before)
        count = passing[number] if number < len(passing) else examples
        found.append(StageCost(name, added, added * count))
    return found


def plain(part: Part) -> Part:
    """A data set without its own shuffles, and without what it keeps in files, as far as it can be made again without.

    They would be filled first, which is not what an example costs, and a file of the training's is not to be touched.
    """
    if not isinstance(part, tf.data.Dataset):
        return part
    made, left_out = None, False
    for node in _nodes(part):
        if isinstance(node, shuffle_op._ShuffleDataset) or _keeps_in_file(node):
            made, left_out = (made or node._input_dataset), True
        elif left_out:
            made = _again(node, made)
            if made is None:
                return part
        else:
            made = node
    return made.with_options(part.options()) if left_out and made is not None else part


def _again(node: tf.data.Dataset, given: tf.data.Dataset) -> tf.data.Dataset | None:
    """The stage made again, of another input; None where that is not known to be the same."""
    if isinstance(node, reads.AT_ONCE):
        return given
    if isinstance(node, prefetch_op._PrefetchDataset):
        return given.prefetch(int(node._buffer_size))
    if not isinstance(node, reads.MAPS):
        return None
    in_parts, function = isinstance(node._input_dataset.element_spec, tuple), reads.applied(node)

    def made(*element: Batch) -> Batch:
        return function(element if in_parts else element[0])

    calls = getattr(node, "_num_parallel_calls", None)
    again = given.map(tf.autograph.experimental.do_not_convert(made), num_parallel_calls=calls)
    again._map_func._person_s = node._map_func._func
    return again


def _nodes(part: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The data sets that one is made of, from the source on; what joins several is a source itself."""
    found = [part]
    while len(given := found[0]._inputs()) == 1:
        found.insert(0, given[0])
    return found


def _chain(part: tf.data.Dataset) -> list[tuple[str, tf.data.Dataset]]:
    """(name, data set) of each stage that may cost something."""
    return [(_name(node), node) for node in _nodes(part) if not isinstance(node, reads.AT_ONCE)]


def _name(node: tf.data.Dataset) -> str:
    """A stage as a person would write it.

    >>> _name(tf.data.Dataset.range(3)), _name(tf.data.Dataset.range(3).map(abs, num_parallel_calls=2))
    ('range', 'map(abs)')
    """
    kind = type(node).__name__.strip("_").removesuffix("Dataset").removesuffix("V2").removeprefix("Parallel")
    words = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in kind).strip("_")
    wrapped = getattr(node, "_map_func", None) or getattr(node, "_predicate", None)
    if wrapped is None:
        return words
    function = getattr(wrapped, "_person_s", None) or wrapped._func
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return f"{words}({getattr(function, '__name__', type(function).__name__)})"


def _keeps_in_file(node: tf.data.Dataset) -> bool:
    return isinstance(node, cache_op.CacheDataset) and bool(tf.get_static_value(node._filename))


def _fill(part: Part) -> None:
    """Reads a data set that keeps its examples in memory to the end, if that takes no longer than `FILL_SECONDS`."""
    if isinstance(part, tf.data.Dataset) and any(isinstance(node, cache_op.CacheDataset) for node in _nodes(part)):
        until = time.monotonic() + FILL_SECONDS
        for _ in part:
            if time.monotonic() > until:
                return


def _passing(data: Data) -> list[int]:
    """Examples of a step that pass through each stage of a data set in this process."""
    if not isinstance(data.part, tf.data.Dataset):
        return []
    chain = [node for _, node in _chain(data.part)]
    split = data.reading.servers or data.layout.local < data.layout.replicas
    opened = reads.opened(data.part) if split else data.part
    # Their input, and what comes before it.
    read = _nodes(opened.raw) if isinstance(opened, Examples) else chain
    return [data.layout._share if any(node is reader for reader in read) else _local(data) for node in chain]


def _local(data: Data) -> int:
    """Examples of a whole global batch that this process's replicas train."""
    return max(1, data.layout.global_batch * data.layout.local // data.layout.replicas)


def _stream(data: Data) -> tf.data.Dataset:
    return batches.stream(data.part, data.layout, data.shuffle, data.seed, reading=data.reading)


def _first(data: Data) -> Step:
    """(examples, batches) of the first step, after which nothing is made ahead, neither here nor in a data server."""
    made = _stream(dataclasses.replace(data, reading=dataclasses.replace(data.reading, servers=()))).take(1)
    options = tf.data.Options()
    # Its thread would hold up the end of the iterator.
    options.autotune.enabled = False
    examples, batches = next(iter(made.with_options(options)))
    return examples, batches


def _in_chunks(node: tf.data.Dataset) -> tf.data.Dataset:
    """Examples by the chunk, each as a 0, so that any go together: what is left is what it took to make them."""
    options = tf.data.Options()
    # Nothing is to be left out since its result is not looked at.
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    zero = tf.autograph.experimental.do_not_convert(lambda *_: tf.constant(0, tf.int8))
    return node.repeat().map(zero).batch(CHUNK).with_options(options)


def _seconds_per_element(made: tf.data.Dataset) -> float:
    """Seconds between two elements, once the first is there."""
    elements = iter(made)
    next(elements)
    began, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - began) < STAGE_SECONDS or not count:
        next(elements)
        count += 1
    return seconds / count


def _pieces(make: Callable[[int], tuple[float, float]], steps: int) -> tuple[list[float], list[float]]:
    examples, seconds = zip(*(make(steps) for _ in range(PIECES)), strict=True)
    return list(examples), list(seconds)


def _read(iterator: Batches, count: tf.Tensor) -> tf.Tensor:
    """Examples of the global batches of so many steps, once they are there."""

    def one(index: tf.Tensor, seen: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        examples, of_replicas = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(of_replicas)):
            return index + 1, seen + examples

    return tf.while_loop(lambda index, _: index < count, one, (0, 0.0))[1]


def _sum(calls: Sequence[Call]) -> tuple[float, float]:
    return float(sum(call.sizes.sum() for call in calls)), sum(call.seconds for call in calls)

"""Times the input without the model, and the model without the input, before training begins, or steps by XLA.

Nothing of it is trained: the input is made anew for it, and what steps change is put back.
"""

import copy
import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.private import cache_op, prefetch_op, shuffle_op
from pipeline.record.commands import Profile
from pipeline.record.events import Profiling
from pipeline.worker.data import batches, source
from pipeline.worker.data import reading as reads
from pipeline.worker.data.batches import Data
from pipeline.worker.data.reading import Batch, Batches, Part, Step
from pipeline.worker.data.source import Source
from pipeline.worker.model_error import ModelError
from pipeline.worker.tensorflow import feed
from pipeline.worker.tensorflow.collective import lost_a_peer
from pipeline.worker.tensorflow.loop import Loop
from pipeline.worker.tensorflow.scheduled import AsyncLoop

# What is timed is timed in so many pieces, so that it is known how much they differ.
PIECES = 4
# Steps before anything is timed, and those that tell how long one takes.
WARMUP_STEPS, PACE_STEPS = 2, 3
# How long what was made ahead is taken, at most: what is slow is not far ahead.
SETTLE_SECONDS = 1.0
# A data set that is kept in memory is read to its end before it is timed, for so long at most.
FILL_SECONDS = 10.0


def profiler(loop: Loop, part: Part, shards: Sequence[Part]) -> "Profiler":
    """Returns what times a loop's input and model, on data that nothing else reads: all, or `shards` of workers."""
    return _AsyncProfiler(loop, part, shards) if isinstance(loop, AsyncLoop) else Profiler(loop, part)


class Profiler:
    """The input and the model of a loop, each alone."""

    def __init__(self, loop: Loop, part: Part) -> None:
        self._loop, data, part = loop, loop.train_data, plain(part)
        # A window over what is read one after the other is filled before the first example leaves it, and what fits
        # into it comes from memory afterwards: neither is what an example costs.
        ordered = not callable(reads.raw(part, data.shuffle, data.seed, data.reading))
        self._data = dataclasses.replace(data, part=part, shuffle=data.shuffle and ordered)
        self._read = tf.function(_read, autograph=False)
        self._batches: Batches | None = None
        self._cached: Batches | None = None

    def timed(self, command: Profile) -> Profiling:
        """Returns the answer to such a command; the model is asked for first, since batches of input are made ahead."""
        if command.what == "model":
            with self._loop.put_back():
                self.train(WARMUP_STEPS if command.steps is None else 1)
                return _timings(command, self.train)
        if command.steps is None:
            _fill(self._data.part)
            # The first call compiles it.
            self.read(1)
        # What was made ahead while nothing was timed would come at once: kept, mapped, batched.
        until = time.monotonic() + SETTLE_SECONDS
        for _ in range(self._data.reading.prefetch + 2 * reads.parallel() + 1):
            if time.monotonic() < until:
                self.read(1)
        return _timings(command, self.read)

    def read(self, steps: int) -> tuple[float, float]:
        """(examples of the global batches, seconds) of so many steps' batches."""
        self._batches = self._batches or iter(self._data.stream())
        began = time.perf_counter()
        examples = float(self._read(self._batches, tf.constant(steps)))
        return examples, time.perf_counter() - began

    def train(self, steps: int) -> tuple[float, float]:
        """(examples, seconds) of so many steps on one batch."""
        self._cached = self._cached or one_again(self._loop.strategy, self._data)
        call = self._loop.on(self._cached, steps)
        return float(call.sizes.sum()), call.seconds


class _AsyncProfiler(Profiler):
    def __init__(self, loop: AsyncLoop, part: Part, shards: Sequence[Part]) -> None:
        super().__init__(loop, part)
        self._workers = loop.concurrent_steps
        self._source = source.source(self._data, [plain(shard) for shard in shards], self._workers)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(loop.strategy)
        self._shares = iter(self._coordinator.create_per_worker_dataset(self._source.made))
        self._read = tf.function(self._some, autograph=False)
        # Over the same model, on one batch from when it is timed first.
        self._on_one, self._is_fed = copy.copy(loop), False

    def read(self, steps: int) -> tuple[float, float]:
        began = time.perf_counter()
        # For each worker, read by any of them in as many calls as make it even, whoever is faster.
        calls = [
            self._coordinator.schedule(self._read, args=(self._shares, *self._source.rows(-(-steps // PIECES))))
            for _ in range(PIECES * self._workers)
        ]
        self._coordinator.join()
        return float(sum(call.fetch() for call in calls)), time.perf_counter() - began

    def train(self, steps: int) -> tuple[float, float]:
        if not self._is_fed:
            _, (batch,) = first_step(self._data)

            def again() -> tf.data.Dataset:
                # Made where it is called: a data set, other than a batch, does not travel to a worker.
                return tf.data.Dataset.from_tensors(batch).repeat()

            self._on_one.feed(Source(again, source.numbers(), lambda batches, *_: next(batches)), self._workers)
            self._is_fed = True
        began, examples, left = time.perf_counter(), 0.0, steps * self._workers
        while left > 0:
            call = self._on_one.call(min(left, -(-steps // PIECES)), left)
            examples, left = examples + float(call.sizes.sum()), left - call.steps
        return examples, time.perf_counter() - began

    def _some(self, batches: Iterator[Batch], rows: tf.Tensor, edges: tf.Tensor) -> tf.Tensor:
        def one(index: tf.Tensor, examples: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            leaves = tf.nest.flatten(self._source.batch(batches, rows, edges[index], edges[index + 1]))
            with tf.control_dependencies(leaves):
                return index + 1, examples + tf.cast(tf.shape(leaves[0])[0], tf.float32)

        return tf.while_loop(lambda index, _: index < tf.shape(edges)[0] - 1, one, (0, 0.0))[1]


def one_again(strategy: tf.distribute.Strategy, data: Data) -> Batches:
    """Returns the first batch, again and again, as the strategy's steps take it."""
    return feed.iterator(strategy, batches.again(first_step(data), data.stream().element_spec))


def plain(part: Part) -> Part:
    """Returns a data set without its own shuffles and caches in files, which would be filled first, as far as known."""
    if not isinstance(part, tf.data.Dataset):
        return part
    remade, left_out = part, False
    for node in _nodes(part):
        in_file = isinstance(node, cache_op.CacheDataset) and bool(tf.get_static_value(node._filename))
        if in_file or isinstance(node, shuffle_op._ShuffleDataset):
            remade, left_out = remade if left_out else node._input_dataset, True
        elif not left_out:
            remade = node
        # A stage whose kind is known is made again, of another input.
        elif isinstance(node, prefetch_op._PrefetchDataset):
            remade = remade.prefetch(int(node._buffer_size))
        elif isinstance(node, reads.MAPS):
            calls = getattr(node, "_num_parallel_calls", None)
            remade = remade.map(tf.autograph.experimental.do_not_convert(_mapping(node)), num_parallel_calls=calls)
        elif not isinstance(node, reads.AT_ONCE):
            return part
    return remade.with_options(part.options()) if left_out else part


def _mapping(node: tf.data.Dataset) -> Callable[..., Batch]:
    in_parts, function = isinstance(node._input_dataset.element_spec, tuple), reads.applied(node)
    return lambda *element: function(element if in_parts else element[0])


def _nodes(part: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The data sets that one is made of, from the source on; what joins several is a source itself."""
    nodes = [part]
    while len(inputs := nodes[0]._inputs()) == 1:
        nodes.insert(0, inputs[0])
    return nodes


def _fill(part: Part) -> None:
    """Reads a data set that keeps its examples in memory to the end, if that takes no longer than `FILL_SECONDS`."""
    if isinstance(part, tf.data.Dataset) and any(isinstance(node, cache_op.CacheDataset) for node in _nodes(part)):
        until = time.monotonic() + FILL_SECONDS
        for _ in part:
            if time.monotonic() > until:
                return


def first_step(data: Data) -> Step:
    """(examples, batches) of the first step, after which nothing is made ahead."""
    unserved = dataclasses.replace(data.reading, servers=())
    first = dataclasses.replace(data, reading=unserved).stream().take(1)
    options = tf.data.Options()
    # Its thread would hold up the end of the iterator.
    options.autotune.enabled = False
    examples, batches = next(iter(first.with_options(options)))
    return examples, batches


def _timings(command: Profile, make: Callable[[int], tuple[float, float]]) -> Profiling:
    if command.steps is None:
        return Profiling(command.what, make(PACE_STEPS)[1] / PACE_STEPS)
    examples, seconds = zip(*(make(command.steps) for _ in range(PIECES)), strict=True)
    return Profiling(command.what, examples=list(examples), seconds=list(seconds))


def _read(iterator: Batches, count: tf.Tensor) -> tf.Tensor:
    def one(index: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        examples, of_replicas = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(of_replicas)):
            return index + 1, total + examples

    return tf.while_loop(lambda index, _: index < count, one, (0, 0.0))[1]


# For `train.xla` both ways are timed in turn in at most so many rounds of so many seconds each, of one step or more;
# fewer rounds where they would take longer than so many seconds. Exchange and update are left to TensorFlow.
ROUNDS, ROUND_SECONDS, MOST_STEPS, MOST_SECONDS = 5, 0.2, 50, 4.0
# TensorFlow joins operations into such that XLA has no compiler for, and lays them out anew, before XLA is asked.
JOINS = ("remapping", "layout_optimizer")


def settle(loop: Loop, part: Part, choice: str) -> tuple[str, dict[str, Any]]:
    """Has XLA compile the loop's step, for `choice` "auto" if it is faster then; returns a note, and facts of `Built`.

    All processes call it together, and settle on the same. Raises `ModelError` where XLA fails and `choice` is "true".
    """
    batch = one_again(loop.strategy, dataclasses.replace(loop.train_data, part=plain(part), shuffle=False))
    by_tensorflow, left_out = loop.compiled_anew(), set[str]()
    by_xla = loop.compile_by(left_out)

    def seconds(steps: int, xla: bool) -> float:
        _for_xla(xla)
        return loop.on(batch, steps, by_xla if xla else by_tensorflow).seconds

    def not_by_xla(why: str, facts: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        _for_xla(False)
        # Anew, so that it is what it would be if nothing had been timed.
        loop.compile_by(None)
        return f"XLA compiles no step{why} (train.xla=auto).", facts

    with loop.put_back():
        try:
            # Traced first, so that the first call's time is that of compiling.
            by_xla.get_concrete_function(batch, tf.constant(1))  # type: ignore[attr-defined]
            compiling = seconds(1, xla=True)
        except (tf.errors.OpError, ValueError) as error:
            if lost_a_peer(error):
                raise
            message = str(error).strip().splitlines()[0]
            if choice != "auto":
                raise ModelError("a model that XLA compiles", message, "train.xla=false, or auto") from error
            return not_by_xla(f", since it fails: {message}", {"xla": False})
        without_some = f", without {', '.join(sorted(left_out))}, which it has no compiler for" if left_out else ""
        text = f"XLA compiled the step before training, in {compiling:.1f} s{without_some}"
        if choice != "auto":
            return f"{text}.", {"xla": True, "seconds_compiling": compiling}
        seconds(1, xla=False)
        # What all processes have the same of, as they are to make as many steps.
        paces = loop.added([seconds(2, xla) / 2 for xla in (False, True)])
        pace, both = paces[0] / loop.collective.replicas, sum(paces) / loop.collective.replicas
        steps = min(max(math.ceil(ROUND_SECONDS / pace), 1), MOST_STEPS)
        count = min(max(int(MOST_SECONDS / (steps * both)), 1), ROUNDS)
        rounds = [[seconds(steps, xla) for xla in (False, True)] for _ in range(count)]
    without, within = loop.added([statistics.median(of_one) for of_one in zip(*rounds, strict=True)])
    speedup = without / within
    facts = {"xla": speedup > 1, "seconds_compiling": compiling, "xla_speedup": speedup}
    if speedup > 1:
        return f"{text}, which makes it {speedup:.2f} times as fast (train.xla=auto).", facts
    return not_by_xla(f": it would be {speedup:.2f} times as fast, after compiling for {compiling:.1f} s", facts)


def seed(loop: Loop, value: int) -> None:
    """Seeds all random generators before training, and keeps what XLA has compiled."""
    # TensorFlow forgets all compiled functions when its own seed is set. That of XLA's stands since the process began.
    if loop.xla is None:
        keras.utils.set_random_seed(value)
    else:
        random.seed(value)
        np.random.seed(value)


def _for_xla(xla: bool) -> None:
    """Makes TensorFlow leave operations as they are from now on, where XLA compiles them, or join them as usual."""
    tf.config.optimizer.set_experimental_options(dict.fromkeys(JOINS, not xla))

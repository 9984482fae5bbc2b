"""The loop of an asynchronous training: its coordinator hands out steps, and workers race to make them.

Each step trains the batch that its number stands for, whoever makes it, and what it counted comes back with its result:
examples and metrics are those of the steps that were handed out, also where workers were lost and steps made again.
"""

import abc
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pipeline.data.examples import Examples
from pipeline.worker.input import batches, reading
from pipeline.worker.input.batches import BEGINNING, Position
from pipeline.worker.tensorflow import step as steps
from pipeline.worker.tensorflow.loop import Call, Data, Loop, TrainingError

# So many calls a worker are handed out ahead, so that it never waits for the next.
AHEAD = 2
LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Source:
    """What workers take their batches from.

    `made` makes a worker's data set, in a function that runs there. `rows` says which examples so many steps from a
    number on train: their places in arrays, and the edges between the batches. Steps are numbered from the position
    that the source begins at. `batch` is a step's batch, from the data set's iterator, the rows and two edges.
    """

    made: Callable[[], tf.data.Dataset]
    rows: Callable[[int, int], tuple[Any, Any]]
    batch: Callable[..., Any]


@dataclass(frozen=True)
class _Done:
    """One call's results as they came back: from which worker, how stale the variables were that it read, and how
    long each step waited for its batch, in seconds.
    """

    worker: int
    losses: np.ndarray
    sizes: np.ndarray
    stale: np.ndarray
    waits: np.ndarray
    metrics: list[np.ndarray]


class AsyncSteps:
    """Steps that are handed out, and what comes back of them. The metrics' state is kept here, and is exact."""

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        source: Source,
        workers: int,
        losses: int,
        gradient_bits: int = 32,
    ) -> None:
        """`losses` is the length of a step's loss vector."""
        self.model, self.concurrent_steps, self._losses = model, workers, losses
        self._extended = strategy.extended
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._rows = source.rows
        self._source = iter(self._coordinator.create_per_worker_dataset(source.made))
        model.reset_metrics()
        # The metrics' state before any batch, and now.
        self._fresh = [np.array(variable) for variable in model.metrics_variables]
        self._state = list(self._fresh)
        self._call = steps.scheduled_steps(model, strategy, source.batch, self._fresh, gradient_bits)
        self._results = tf.function(self._result_of, autograph=False)
        self._compiled: Any = None
        # Steps handed out since the race began, steps under way, and the calls that those are in.
        self._handed_out, self.pending, self._under_way = 0, 0, 0
        self._done: queue.Queue[_Done] = queue.Queue()
        self._since = 0.0
        # Steps of each worker, and those before a checkpoint that training goes on from.
        self._steps_of: Counter[int] = Counter()
        self._before: Counter[int] = Counter()
        self._examples = 0.0
        self._stale_sum, self._stale_most = 0.0, 0
        self._updates_before = self._updates()

    @property
    def warm(self) -> bool:
        """Has every worker made a step, and so has all that it needs for the next?"""
        return len(self._steps_of) == self.concurrent_steps

    def call(self, count: int, wanted: int = 0) -> Call:
        """The results of the next call that a worker has made.

        Calls of `count` steps are handed out until `wanted` steps are under way, a few for each worker at a time.
        """
        if not self.pending:
            self._since = time.perf_counter()
        wanted = max(count, wanted)
        while self.pending < wanted and self._under_way < AHEAD * self.concurrent_steps:
            self._hand_out(min(count, wanted - self.pending))
        done = self._next_done()
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        made = len(done.sizes)
        self.pending -= made
        self._under_way -= 1
        self._steps_of[done.worker] += made
        self._examples += float(done.sizes.sum())
        self._stale_sum += float(done.stale.sum())
        self._stale_most = max(self._stale_most, int(done.stale.max()))
        self._state = [
            total + (after - before)
            for total, after, before in zip(self._state, done.metrics, self._fresh, strict=True)
        ]
        return Call(done.losses, done.sizes, seconds, done.waits, done.worker)

    def validate(self, function: Any, iterator: Iterator[Any], count: int) -> tuple[np.ndarray, np.ndarray]:
        """Losses and examples of so many steps of `steps.validation_alone`, made here, which add to the metrics."""
        values, sizes, state = function(iterator, tf.constant(count), self._tensors(self._state))
        self._state = [each.numpy().astype(np.float64) for each in state]
        return values.numpy(), sizes.numpy()

    def reset_metrics(self) -> None:
        """Begins the metrics anew."""
        self._state = list(self._fresh)

    def results(self) -> dict[str, Any]:
        """The metrics, as the model gives them."""
        return self._results(self._tensors(self._state))  # type: ignore[no-any-return]

    def counts(self) -> dict[str, Any]:
        """What was counted so far, as plain values; steps under way are in none of it."""
        return {
            "steps_of": [(self._before + self._steps_of)[worker] for worker in range(self.concurrent_steps)],
            "examples": self._examples,
            "stale_sum": self._stale_sum,
            "stale_most": self._stale_most,
            "updates": self._updates() - self._updates_before,
        }

    def set_counts(self, counts: Mapping[str, Any]) -> None:
        """Goes on from what `counts` gave. Whose steps they were is forgotten where there are other workers now."""
        steps = counts["steps_of"]
        self._before = Counter(dict(enumerate(steps if len(steps) == self.concurrent_steps else [sum(steps)])))
        self._examples, self._stale_sum = counts["examples"], counts["stale_sum"]
        self._stale_most = counts["stale_most"]
        self._updates_before = self._updates() - counts["updates"]

    def state(self) -> list[np.ndarray]:
        """The metrics' state now."""
        return list(self._state)

    def set_state(self, state: Sequence[np.ndarray]) -> None:
        """Goes on from what `state` gave."""
        self._state = [np.array(each) for each in state]

    def facts(self) -> dict[str, Any]:
        """Staleness, what was counted, updates and whose steps they were."""
        steps_of = self._before + self._steps_of
        made = steps_of.total()
        return {
            "staleness_mean": self._stale_sum / max(made, 1),
            "staleness_max": self._stale_most,
            "steps": made,
            "examples": int(self._examples),
            "updates": self._updates() - self._updates_before,
            "worker_steps": [steps_of[worker] for worker in range(self.concurrent_steps)],
        }

    def _updates(self) -> int:
        return int(steps.innermost(self.model.optimizer).iterations.numpy())

    def _hand_out(self, count: int) -> None:
        rows, edges = self._rows(self._handed_out, count)
        if self._compiled is None:
            index = tf.TensorSpec([None], tf.int64)
            # As in `schedule`: without it TensorFlow warns that the step might run here.
            self._extended._being_scheduled = True
            self._compiled = tf.function(self._packed, autograph=False).get_concrete_function(
                self._source._values[0]._type_spec, index, index
            )
            self._extended._being_scheduled = False
        # Past the public `schedule`, which takes a compiled function alone and cannot say which call is done first.
        self._coordinator._cluster.schedule(self._make, args=(self._source, rows, edges), kwargs=None)
        self._handed_out += count
        self.pending += count
        self._under_way += 1

    def _make(self, source: Any, rows: Any, edges: Any) -> None:
        """Has a worker make a call, and waits for it, in the thread that TensorFlow keeps for that worker."""
        self._done.put(self._unpacked(self._compiled(source, rows, edges).numpy(), len(edges) - 1))

    def _packed(self, source: Any, rows: Any, edges: Any) -> Any:
        """All results in one tensor, since each is fetched on a way of its own."""
        *told, state = self._call(source, rows, edges)
        parts = [*told, *state]
        return tf.concat([tf.reshape(tf.cast(part, tf.float64), [-1]) for part in parts], 0)

    def _unpacked(self, packed: np.ndarray, count: int) -> _Done:
        ends = np.cumsum([1, count * self._losses, count, count, count, *(value.size for value in self._fresh)])
        worker, losses, sizes, stale, waits, *state = np.split(packed, ends[:-1])
        metrics = [part.reshape(value.shape) for part, value in zip(state, self._fresh, strict=True)]
        losses = losses.reshape(count, self._losses)
        return _Done(int(worker[0]), losses.astype(np.float32), sizes.astype(np.float32), stale, waits, metrics)

    def _next_done(self) -> _Done:
        while True:
            try:
                return self._done.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                # Raises what a call has failed with.
                self._coordinator.done()

    def _result_of(self, state: Sequence[Any]) -> Any:
        with keras.StatelessScope(zip(self.model.metrics_variables, state, strict=True)):
            # A metric may give its variable as it is, which has this state's value in here only.
            return tf.nest.map_structure(tf.convert_to_tensor, self.model.get_metrics_result())

    def _tensors(self, state: Sequence[np.ndarray]) -> list[Any]:
        with tf.device("CPU:0"):
            return [tf.constant(value, each.dtype) for value, each in zip(state, self._fresh, strict=True)]


class AsyncLoop(Loop):
    """What a loop is where a race makes its steps."""

    @property
    @abc.abstractmethod
    def async_steps(self) -> AsyncSteps:
        """The race that goes on."""

    @property
    def pending(self) -> int:  # type: ignore[override]
        """Steps under way."""
        return self.async_steps.pending

    @property
    def warm(self) -> bool:  # type: ignore[override]
        """Has every worker made a step?"""
        return self.async_steps.warm

    def facts(self) -> dict[str, Any]:
        """Staleness, updates and whose steps they were."""
        return self.async_steps.facts()

    def counts(self) -> dict[str, Any]:
        """What was counted of the race so far."""
        return self.async_steps.counts()

    def set_counts(self, counts: Mapping[str, Any]) -> None:
        """Goes on from what `counts` gave."""
        self.async_steps.set_counts(counts)

    def metrics_state(self) -> list[np.ndarray]:
        """The metrics' state, which the race keeps."""
        return self.async_steps.state()

    def set_metrics_state(self, state: Sequence[np.ndarray]) -> None:
        """Goes on from what `metrics_state` gave."""
        self.async_steps.set_state(state)

    def reset_metrics(self) -> None:
        """Begins the metrics anew, as for an epoch."""
        self.async_steps.reset_metrics()

    def _validation_function(self, padded: bool) -> Any:
        return steps.validation_alone(self.model)

    def _validate_some(self, validate: Any, iterator: Iterator[Any], count: int) -> tuple[np.ndarray, np.ndarray]:
        return self.async_steps.validate(validate, iterator, count)

    def _metric_results(self) -> dict[str, Any]:
        return self.async_steps.results()


class ScheduledLoop(AsyncLoop):
    """What an asynchronous training is made of, on its coordinator."""

    def __init__(
        self,
        model: keras.Model,
        strategy: tf.distribute.Strategy,
        train: Data,
        shards: Sequence[Any],
        workers: int,
        validation: Data | None = None,
        outputs: Sequence[str] = (),
        gradient_bits: int = 32,
        position: Position = BEGINNING,
    ) -> None:
        """`shards` holds the training data that each of the `workers` reads, or one part that all of them share."""
        super().__init__(model, strategy, train, validation, outputs)
        made = source(train, shards, workers, position)
        self._async_steps = AsyncSteps(model, strategy, made, workers, 1 + len(self.outputs), gradient_bits)
        self.concurrent_steps, self.gradient_bits = workers, gradient_bits

    @property
    def async_steps(self) -> AsyncSteps:
        """The race that goes on."""
        return self._async_steps

    def call(self, count: int, wanted: int = 0) -> Call:
        """The results of the next call that a worker has made; see `AsyncSteps.call`."""
        return self.async_steps.call(count, wanted)


def source(data: Data, shards: Sequence[Any], workers: int, position: Position = BEGINNING) -> Source:
    """What workers take their batches from: arrays by the places that a step stands for, data sets in turn.

    Arrays are trained once an epoch, each example, whoever is faster. Of a data set each worker reads its own shard,
    round and round, and takes as many examples as a step stands for.

    It begins at the position: exactly with arrays, and where one worker reads a data set. Several workers each begin
    as far into their shards as if all were as fast and all batches full. A data set that draws an order of its own
    each time it is read begins with the first one, as it does for a worker that was started again.
    """
    layout, position = data.layout, data.layout.settled(position)
    rows = _Rows(data, position)
    if isinstance(data.part, Examples) and not data.part.is_made:
        return _of_examples(data, position, rows)
    if not isinstance(data.part, tf.data.Dataset):
        part = data.part.raw if isinstance(data.part, Examples) else data.part
        with tf.device("CPU:0"):
            arrays = tf.nest.map_structure(tf.convert_to_tensor, part)
        return Source(lambda: tf.data.Dataset.from_tensors(arrays).repeat(), rows.of, _gathered)
    counts = [int(shard.cardinality()) for shard in shards] if len(shards) > 1 else [layout.examples // workers]
    if 0 in counts:
        raise TrainingError(
            f"Expected training examples for each of {workers} workers, received {layout.examples} and none for worker "
            f"{counts.index(0) + 1}. Try workers=1."
        )
    graphs = [graph(shard) for shard in shards]

    def made() -> tf.data.Dataset:
        parts = [from_graph(each, data.part.element_spec).with_options(data.part.options()) for each in graphs]
        if workers == 1:
            # In the order of one device, in which the last batch of an epoch is a smaller one.
            one = batches.stream(parts[0], layout, data.shuffle, data.seed, position, data.reading)
            return one.map(lambda _, mine: mine[0])
        worker = tf.cast(tf.distribute.coordinator.experimental_get_current_worker_index(), tf.int64)
        if len(parts) == 1:
            mine = parts[0].shard(workers, worker)
        else:
            chosen = tf.data.Dataset.from_tensors(worker).repeat()
            mine = tf.data.Dataset.choose_from_datasets(parts, chosen)
        window = min(max(1, layout.examples // workers), data.reading.window)

        def epoch(number: Any, trained: Any, steps: Any) -> tf.data.Dataset:
            ordered = batches.shuffled(mine, window, data.seed, number) if data.shuffle else mine
            return ordered.skip(trained // workers)

        endless = batches.epochs(layout, position, epoch).with_options(data.part.options())
        whole = endless.batch(layout.global_batch, drop_remainder=True)
        return whole.map(lambda *batch: reading.checked(batch, data.reading.classes)).prefetch(data.reading.prefetch)

    return Source(made, rows.of, _next)


def _of_examples(data: Data, position: Position, rows: "_Rows") -> Source:
    """Examples that are made in the step that trains them: of rows of arrays, or of records that a worker looks for.

    Each is trained once an epoch, whoever is faster: of records in files every worker reads all, and passes over those
    of other workers' steps.
    """
    make = reading.maker(data.part, data.seed, data.reading.classes)
    assert make is not None
    raw = reading.raw(data.part, data.shuffle, data.seed, data.reading)
    if not callable(raw):
        with tf.device("CPU:0"):
            arrays = tf.nest.map_structure(tf.convert_to_tensor, raw)

        def gathered(source: Any, places: Any, start: Any, stop: Any) -> Any:
            with tf.device("CPU:0"):
                return make(places[start], _gathered(source, places, start + 1, stop))

        return Source(lambda: tf.data.Dataset.from_tensors(arrays).repeat(), rows.after_epochs, gathered)
    layout = data.layout

    def numbered() -> tf.data.Dataset:
        made = batches.raw_stream(data.part, layout, data.shuffle, data.seed, position, data.reading)
        return made.map(lambda epoch, _, each: (epoch, each[0])).enumerate()

    def sought(source: Any, numbers: Any, start: Any, stop: Any) -> Any:
        wanted = numbers[0] + start

        def again() -> Any:
            # A step that another worker was lost with, and that this one has passed.
            return numbered().skip(wanted).take(1).get_single_element()[1]

        with tf.device("CPU:0"):
            number, found = tf.while_loop(
                lambda number, _: number < wanted, lambda *_: next(source), next(source), parallel_iterations=1
            )
            return make(*tf.cond(number == wanted, lambda: found, again))

    return Source(lambda: numbered().prefetch(data.reading.prefetch), rows.numbers, sought)


def graph(part: tf.data.Dataset) -> Any:
    """A data set as a graph that a worker can make it from, as tf.data's own service has it."""
    made = part._as_serialized_graph(strip_device_assignment=True)
    if b"PyFunc" in made.numpy():
        raise TrainingError(
            "Expected data that workers can read without this program's Python, received a data set made with "
            "from_generator, py_function or numpy_function. Try arrays, or a data set of files."
        )
    return made


def from_graph(made: Any, spec: Any) -> tf.data.Dataset:
    """The data set of a graph, with elements of `spec`."""
    return tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=made), spec)


class _Rows:
    """Which examples each step from a position on trains, by their places in arrays; for other data, how many."""

    def __init__(self, data: Data, position: Position) -> None:
        self._data, self._known = data, not isinstance(data.part, tf.data.Dataset)
        self._position, self._left = position, data.layout.steps_after(position.examples)
        self._order = cache(self._of_epoch)

    def of(self, first: int, count: int) -> tuple[Any, Any]:
        """(places of the examples, edges [count + 1] between the batches) of steps `first` to `first + count`."""
        return self._joined([self._places(*self._start(step)) for step in range(first, first + count)])

    def after_epochs(self, first: int, count: int) -> tuple[Any, Any]:
        """The same with the number of its epoch before each step's places."""
        starts = [self._start(step) for step in range(first, first + count)]
        return self._joined([np.concatenate([[epoch], self._places(epoch, start)]) for epoch, start in starts])

    def numbers(self, first: int, count: int) -> tuple[Any, Any]:
        """The number of the first step, and edges that add the others'."""
        with tf.device("CPU:0"):
            return tf.constant([first], tf.int64), tf.range(count + 1, dtype=tf.int64)

    def _places(self, epoch: int, start: int) -> np.ndarray:
        """Where a step's examples are in arrays; of other data, whose examples come as they are read, as many zeros."""
        stop = min(start + self._data.layout.global_batch, self._data.layout.examples)
        return self._order(epoch)[start:stop] if self._known else np.zeros(stop - start, np.int64)

    @staticmethod
    def _joined(places: list[np.ndarray]) -> tuple[Any, Any]:
        edges = np.cumsum([0, *map(len, places)])
        with tf.device("CPU:0"):
            return tf.constant(np.concatenate(places), tf.int64), tf.constant(edges, tf.int64)

    def _start(self, step: int) -> tuple[int, int]:
        """(the epoch of a step, the place in its order of the step's first example)."""
        size, begun = self._data.layout.global_batch, self._position
        if step < self._left:
            return begun.epoch, begun.examples + step * size
        more, place = divmod(step - self._left, self._data.layout.steps)
        return begun.epoch + 1 + more, place * size

    def _of_epoch(self, epoch: int) -> np.ndarray:
        layout, data = self._data.layout, self._data
        if not data.shuffle:
            return np.arange(layout.examples)
        self._order.cache_clear()
        with tf.device("CPU:0"):
            return np.array(batches.order(layout.examples, data.seed, tf.constant(epoch, tf.int64)))


def _gathered(source: Any, rows: Any, start: Any, stop: Any) -> Any:
    """The batch of the examples at `rows[start:stop]` of the arrays that `source` gives."""
    with tf.device("CPU:0"):
        return tf.nest.map_structure(lambda array: tf.gather(array, rows[start:stop]), next(source))


def _next(source: Any, rows: Any, start: Any, stop: Any) -> Any:
    """The next batch of `source`, cut to `stop - start` examples."""
    return tf.nest.map_structure(lambda leaf: leaf[: stop - start], next(source))

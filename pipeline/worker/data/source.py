"""The batches of asynchronous workers: any step's, by its number, whoever makes it."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.errors import refuse
from pipeline.worker.data import batches, reading
from pipeline.worker.data.batches import Data
from pipeline.worker.data.reading import Batch, Part, Spec
from pipeline.worker.layout import BEGINNING, Position
from pipeline.worker.model_error import TrainingError

# Of examples that the coordinator reads for its workers: TensorFlow's messages are below 2 GiB.
MOST_READ = 1 << 30
_PYTHONS = "from_generator, py_function or numpy_function"
_PREPARE = "python -m pipeline prepare data.build._target_=... out=prepared, then data=tfrecord data.path=prepared"

# Of each step its epoch and the places of its examples in arrays, int64, and the edges between, int64 [steps + 1].
Rows: TypeAlias = tuple[tf.Tensor, tf.Tensor]
# Gives the rows of so many steps, which follow those that it gave before.
Take: TypeAlias = Callable[[int], Rows]


@dataclass(frozen=True)
class Source:
    """The source of asynchronous workers' batches.

    `made` makes a worker's data set, in a function that runs there; `rows` says which examples the next steps train;
    `batch` is a step's batch, from the data set's iterator, the rows and two edges.
    """

    made: Callable[[], tf.data.Dataset]
    rows: Take
    batch: Callable[[Iterator[Batch], tf.Tensor, tf.Tensor, tf.Tensor], Batch]


def source(data: Data, shards: Sequence[Part], workers: int, position: Position = BEGINNING) -> Source:
    """Returns where workers take their batches from: arrays by the places of a step, once an epoch, whoever is faster.

    So is what Python makes, which is read here. Of a data set each worker reads its own shard, round and round, from
    where it would be if all workers were as fast.
    """
    layout, position = data.layout, data.layout.settled(position)
    if isinstance(data.part, tf.data.Dataset) and _is_of_python(data.part):
        data = dataclasses.replace(data, part=_read(data.part))
    rows = _taken_from(_steps(data, position))
    if not isinstance(data.part, tf.data.Dataset):
        return _of_examples(data, position, rows)
    part: tf.data.Dataset = data.part
    sizes = (int(tf.data.experimental.cardinality(shard)) for shard in shards)
    counts = [layout.examples // workers] if len(shards) == 1 else list(sizes)
    if 0 in counts:
        received = f"{layout.examples} and none for worker {counts.index(0) + 1}"
        raise TrainingError(f"training examples for each of {workers} workers", received, "workers=1")
    graphs = [graph(shard) for shard in shards]

    def made() -> tf.data.Dataset:
        parts = [from_graph(of_shard, part.element_spec).with_options(part.options()) for of_shard in graphs]
        if workers == 1:
            # In the order of one device, in which the last batch of an epoch is a smaller one.
            return dataclasses.replace(data, part=parts[0]).stream(position).map(lambda _, own: own[0])
        worker = tf.cast(tf.distribute.coordinator.experimental_get_current_worker_index(), tf.int64)
        own = parts[0].shard(workers, worker)
        if len(parts) > 1:
            own = tf.data.Dataset.choose_from_datasets(parts, tf.data.Dataset.from_tensors(worker).repeat())
        window = min(max(1, layout.examples // workers), data.reading.window)

        def epoch(number: tf.Tensor, trained: tf.Tensor, steps: tf.Tensor) -> tf.data.Dataset:
            ordered = batches.shuffled(own, window, data.seed, number) if data.shuffle else own
            return ordered.skip(trained // workers)

        endless = batches.epochs(layout, position, epoch).with_options(part.options())
        whole = endless.batch(layout.global_batch, drop_remainder=True)
        return whole.map(lambda *batch: reading.checked(batch, data.reading.classes)).prefetch(data.reading.prefetch)

    def batch(source: Iterator[Batch], rows: tf.Tensor, start: tf.Tensor, stop: tf.Tensor) -> Batch:
        return tf.nest.map_structure(lambda leaf: leaf[: stop - start - 1], next(source))

    return Source(made, rows, batch)


def _of_examples(data: Data, position: Position, rows: Take) -> Source:
    """Examples that are made in the step that trains them: of rows of arrays, or of records that a worker looks for."""
    # Each is trained once an epoch, whoever is faster: each worker reads all records, and passes over others' steps.
    make = reading.maker(data.part, data.seed, data.reading.classes) or (lambda number, batch: batch)
    raw = reading.raw(data.part, data.shuffle, data.seed, data.reading)
    if not callable(raw):
        with tf.device("CPU:0"):
            arrays = tf.nest.map_structure(tf.convert_to_tensor, raw)

        def gathered(source: Iterator[Batch], places: tf.Tensor, start: tf.Tensor, stop: tf.Tensor) -> Batch:
            with tf.device("CPU:0"):
                own = places[start + 1 : stop]
                return make(places[start], tf.nest.map_structure(lambda array: tf.gather(array, own), next(source)))

        return Source(lambda: tf.data.Dataset.from_tensors(arrays).repeat(), rows, gathered)

    def numbered() -> tf.data.Dataset:
        steps = data.raw_stream(position)
        return steps.map(lambda epoch, _, batches: (epoch, batches[0])).enumerate()

    def sought(source: Iterator[Batch], numbers: tf.Tensor, start: tf.Tensor, stop: tf.Tensor) -> Batch:
        number_of_step = numbers[0] + start

        def again() -> tuple[tf.Tensor, Batch]:
            # A step that another worker was lost with, and that this one has passed.
            return numbered().skip(number_of_step).take(1).get_single_element()[1]  # type: ignore[no-any-return]

        with tf.device("CPU:0"):
            number, next_batch = tf.while_loop(
                lambda number, _: number < number_of_step, lambda *_: next(source), next(source), parallel_iterations=1
            )
            return make(*tf.cond(number == number_of_step, lambda: next_batch, again))

    return Source(lambda: numbered().prefetch(data.reading.prefetch), numbers(), sought)


def graph(part: tf.data.Dataset) -> tf.Tensor:
    """A data set as a graph that a worker can make it from, as tf.data's own service has it."""
    expected, received = "data that workers can read without this program's Python", f"a data set made with {_PYTHONS}"
    refuse((_is_of_python(part), expected, received, f"arrays, or files: {_PREPARE}"), error=TrainingError)
    return part._as_serialized_graph(strip_device_assignment=True)


def _is_of_python(part: tf.data.Dataset) -> bool:
    return b"PyFunc" in part._as_serialized_graph(strip_device_assignment=True).numpy()


def _read(part: tf.data.Dataset) -> Nested[np.ndarray]:
    examples, size = list[list[np.ndarray]](), 0
    for example in part:
        examples.append([np.asarray(leaf) for leaf in tf.nest.flatten(example)])
        size += sum(leaf.nbytes for leaf in examples[-1])
        expected = (
            f"at most {MOST_READ:,} bytes of examples from {_PYTHONS}, which the coordinator reads for all workers"
        )
        refuse((size > MOST_READ, expected, "more", f"files: {_PREPARE}"), error=TrainingError)
    leaves = [np.stack(values) for values in zip(*examples, strict=True)]
    return tf.nest.pack_sequence_as(part.element_spec, leaves)  # type: ignore[no-any-return]


def from_graph(serialized: tf.Tensor, spec: Spec) -> tf.data.Dataset:
    """The data set of a graph, with elements of `spec`."""
    return tf.data.experimental.from_variant(tf.raw_ops.DatasetFromGraph(graph_def=serialized), spec)


def numbers() -> Take:
    """Gives the numbers of the next steps, for batches as they come."""
    return _taken_from(np.array([number]) for number in itertools.count())


def _taken_from(steps: Iterator[np.ndarray]) -> Take:
    def take(count: int) -> Rows:
        rows = list(itertools.islice(steps, count))
        with tf.device("CPU:0"):
            edges = tf.constant(np.cumsum([0, *map(len, rows)]), tf.int64)
            return tf.constant(np.concatenate(rows), tf.int64), edges

    return take


def _steps(data: Data, position: Position) -> Iterator[np.ndarray]:
    """Yields of each step its epoch, then the places of its examples in arrays; zeros for data that come as read."""
    layout, first, in_arrays = data.layout, position.examples, not isinstance(data.part, tf.data.Dataset)
    places = np.arange(layout.examples) if in_arrays else np.zeros(layout.examples, np.int64)
    for epoch in itertools.count(position.epoch):
        if data.shuffle and in_arrays:
            with tf.device("CPU:0"):
                places = np.array(batches.order(layout.examples, data.seed, tf.constant(epoch, tf.int64)))
        for step in range(layout.steps_after(first)):
            start = first + step * layout.global_batch
            yield np.concatenate([[epoch], places[start : start + layout.global_batch]])
        first = 0

"""Turns the data that Keras's `fit` takes into each step's batches for this process's replicas, pass after pass.

An element of a batched data set is a global batch, of which each replica trains its even share.
"""

import sys
from typing import Any

import keras
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.errors import UserError, refuse
from pipeline.private import ArrayDataAdapter, array_slicing, get_data_adapter
from pipeline.worker.data import inspection, source
from pipeline.worker.data.batches import Data
from pipeline.worker.data.reading import Batch, Batches, FitData, Spec, Step, pieces
from pipeline.worker.data.source import Source
from pipeline.worker.layout import BatchLayout, ReplicaPlace

OFF, FILE = tf.data.experimental.AutoShardPolicy.OFF, tf.data.experimental.AutoShardPolicy.FILE
UNTIL_IT_ENDS = sys.maxsize
OF_A_LENGTH = "dataset.apply(tf.data.experimental.assert_cardinality(batches)), or steps_per_epoch=100"


def place(strategy: tf.distribute.Strategy) -> ReplicaPlace:
    """Returns where this process stands among the replicas of a strategy."""
    if isinstance(strategy, tf.distribute.ParameterServerStrategy):
        several = strategy.num_replicas_in_sync
        expected = "workers with one device each, since each of them makes steps of its own"
        refuse((several > 1, expected, several, "more workers, each with one of the devices"))
        return ReplicaPlace(0, 1, 1)
    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant(context.replica_id_in_sync_group)
    )
    local = [int(number) for number in strategy.experimental_local_results(numbers)]
    return ReplicaPlace(min(local), len(local), strategy.num_replicas_in_sync)


class Passes:
    """Global batches in passes: of a data set of such, and of what Keras makes one of, generators and PyDatasets.

    After the last of a pass, the next one begins with the first. `steps` of one are None where it is `endless` or only
    reading tells. An epoch may be a part of a pass, as in Keras.
    """

    examples: int | None = None
    # Batches may differ in size, and be of any; see `BatchLayout`.
    last = "short"
    global_batch: int | None = None
    # Where they are arrays: of all examples.
    labels: Batch | None = None

    def __init__(
        self, adapter: Any, data: tf.data.Dataset, steps: int | None, endless: bool, where: ReplicaPlace
    ) -> None:
        """`adapter` is Keras's, which is told of epochs."""
        options, specs = data.options(), tf.nest.flatten(data.element_spec)
        wrong = [spec for spec in specs if not isinstance(spec, tf.TensorSpec) or not spec.shape.rank]
        instead = "dataset.batch, and tf.ensure_shape, .to_tensor() or tf.sparse.to_dense in dataset.map"
        refuse((wrong, "batches of dense tensors whose rank is known", next(iter(wrong), None), instead))
        fixed = [spec.shape[0] for spec in specs]
        self.adapter, self._data, self.steps, self.endless = adapter, data, steps, endless
        # Batches of the pass that began last; and if processes, each of which has its own, may find others.
        self.length, self.varies = steps, hasattr(adapter, "py_dataset")
        self.always_fed = where.replicas == 1 or all(size is not None and size >= where.replicas for size in fixed)
        # A batch in shape and type, for building a model.
        self.spec = _symbols(data.element_spec)
        # Each element is the global batch, read by every process: TensorFlow's auto-sharding by data.
        own = where.processes > 1 and options.experimental_distribute.auto_shard_policy in (OFF, FILE)
        shares = _own(data, where, fixed[0]) if own else _shared(data, where.first, where.local, where.replicas)
        if options.autotune.enabled is None:
            # Unless asked for: the tuner's thread holds up the end of an iterator, which is each epoch's, for seconds.
            untuned = tf.data.Options()
            untuned.autotune.enabled = False
            shares = shares.with_options(untuned)
        # A PyDataset, whose hooks may change what is read, is read ahead as far as Keras reads it.
        self._shares = shares if self.varies else shares.prefetch(2)

    @property
    def one_by_one(self) -> bool:
        """True if each call must make a single step, because the data may end after any."""
        return self.steps is None and not self.endless

    @property
    def layout(self) -> "Passes":
        """Itself: it has what `Loop` needs of a layout."""
        return self

    def sample(self, first: int, count: int) -> Batch:
        """Examples `first` to `first + count`, or as many made up where reading would leave a trace."""
        return inspection.examples_of(self._data.unbatch(), first, count, None)

    def begin(self) -> Batches:
        """Another pass: (examples, batches) of each step, as `Data.stream` has them."""
        if self.steps is not None:
            now = self.adapter.num_batches
            self.length = self.steps if now is None else min(self.steps, now)
        return iter(self._shares)

    def source(self, workers: int) -> Source:
        """Returns where asynchronous `workers` take their batches from."""
        few = self.one_by_one or (self.steps is not None and self.steps < workers)
        expected = f"data of a known number of batches, {workers} or more for as many workers"
        refuse((few, expected, "an unknown number" if self.one_by_one else self.steps, OF_A_LENGTH))
        graph, spec = source.graph(self._data), self._data.element_spec

        def made() -> tf.data.Dataset:
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            batches = source.from_graph(graph, spec)
            # Each worker reads its own share of the batches, round and round.
            own = batches.shard(workers, tf.cast(worker, tf.int64))
            return own.repeat().prefetch(2) if workers > 1 else batches.repeat()

        return Source(made, source.numbers(), lambda source, rows, start, stop: next(source))

    def reset(self) -> None:
        """Says that epochs will follow: Keras counts the batches of a pass, and tells of an epoch that has ended."""
        self.steps = self.adapter.num_batches
        self.adapter.on_epoch_end()

    def close(self) -> None:
        """Ends the threads or processes of a PyDataset that read ahead."""
        if (readers := getattr(self.adapter, "enqueuer", None)) is not None:
            readers.stop()

    def skip(self) -> None:
        """Leaves out one order of a shuffle: after a whole pass Keras makes an iterator that nobody reads."""
        iter(self._shares)


def passes(
    where: ReplicaPlace,
    x: FitData,
    y: FitData = None,
    sample_weight: FitData = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
    shuffle: bool | str = False,
    seed: int = 0,
    class_weight: dict[int, float] | None = None,
) -> Passes:
    """The passes over whatever Keras's `fit` takes as data; `steps` make an epoch, or all. Raises `UserError`."""
    kind, batched, py_dataset = type(x).__name__, isinstance(x, tf.data.Dataset), isinstance(x, keras.utils.PyDataset)
    refuse(
        (isinstance(x, tf.distribute.DistributedDataset | tf.distribute.DistributedIterator),
         "the tf.data.Dataset itself", kind,
         "to pass what strategy.experimental_distribute_dataset was given, batched by the global batch"),
        (batched and batch_size is not None, "no batch size for a data set, whose elements are global batches",
         batch_size, f"dataset.batch({batch_size}) and batch_size=None"),
        (py_dataset and shuffle and where.processes > 1, f"shuffle=False for a {kind} on {where.processes} processes, "
         "which would each shuffle it in an order of their own", f"shuffle={shuffle}",
         "to shuffle in its on_epoch_end, from a seed"),
    )  # fmt: skip
    # A data set is shuffled by its maker, and Keras warns of every other use of its default.
    adapter = get_data_adapter(
        x, y, sample_weight, batch_size, steps, shuffle=False if batched else shuffle, class_weight=class_weight
    )
    if isinstance(adapter, ArrayDataAdapter):
        return _Arrays(adapter, where, shuffle, seed)
    steps_known = adapter.num_batches
    instead = "looking at what it is made of: drop_remainder=True leaves out all of fewer examples than one batch"
    refuse((steps_known == 0, "batches", f"a {kind} of none", instead))
    data = adapter.get_tf_dataset()
    endless = int(data.cardinality()) == tf.data.INFINITE_CARDINALITY or (py_dataset and not steps_known)
    together = f"{where.processes} processes, which must end together"
    refuse(
        (steps is None and endless, "a number of steps for data without end", "None", "steps_per_epoch=100"),
        (steps_known is None and steps is None and where.processes > 1,
         f"data whose number of batches is known beforehand for {together}", f"{kind} of unknown length", OF_A_LENGTH),
    )  # fmt: skip
    return Passes(adapter, data, steps_known, endless, where)


class _Arrays(Passes):
    def __init__(self, adapter: ArrayDataAdapter, where: ReplicaPlace, shuffle: bool | str, seed: int) -> None:
        instead = "shuffle=False: the order of the examples within a batch changes no gradient"
        refuse((shuffle not in (True, False), "shuffle to be True or False", f"{shuffle!r}", instead))
        part = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
        part = keras.tree.lists_to_tuples(part)
        others = tf.RaggedTensor | tf.SparseTensor | array_slicing.TensorflowSparseWrapper
        for leaf in keras.tree.flatten(part):
            wrong = not hasattr(leaf, "dtype") or isinstance(leaf, others)
            refuse((wrong, "dense arrays", type(leaf).__name__, ".toarray(), .to_tensor() or tf.sparse.to_dense"))
        with tf.device("CPU:0"):
            self._part = tf.nest.map_structure(tf.convert_to_tensor, part)
        self.adapter, self.steps, self.length = adapter, adapter.num_batches, adapter.num_batches
        self.varies, self.endless, self.examples = False, False, adapter._num_samples
        refuse((not self.examples, "examples", "arrays of none", "looking at the shapes of x and y"))
        self.labels = keras.utils.unpack_x_y_sample_weight(self._part)[1]
        layout = BatchLayout(adapter.batch_size, where.replicas, where.first, where.local, (self.examples,))
        self._data, self.always_fed = Data(self._part, layout, bool(shuffle), seed), layout.always_fed
        self.spec = _symbols(self._part)
        self._stream: Batches | None = None

    def sample(self, first: int, count: int) -> Batch:
        return inspection.examples_of(self._part, first, count, None)

    def begin(self) -> Batches:
        self._stream = self._stream or iter(self._data.stream())
        return self._stream

    def source(self, workers: int) -> Source:
        return source.source(self._data, [self._part], workers)

    def skip(self) -> None:
        """Nothing: arrays have an order by the number of each pass."""


def _own(data: tf.data.Dataset, where: ReplicaPlace, size: int | None) -> tf.data.Dataset:
    """Each process reads its own batches, of which it trains its part of a global batch a step, as TensorFlow does."""
    # What ends would end at different steps.
    policy, replicas = data.options().experimental_distribute.auto_shard_policy, where.replicas
    if policy == FILE or int(data.cardinality()) != tf.data.INFINITE_CARDINALITY or not size or size % replicas:
        expected = f"data without end in batches of a fixed size that divides evenly over {replicas} replicas for "
        share = f"dataset.shard, dataset.repeat() and dataset.batch({replicas * 32}, drop_remainder=True) with "
        instead = "steps_per_epoch=100; or auto_shard_policy DATA, where each process reads all and trains its share"
        received = f"{policy.name} and {data.element_spec}"
        raise UserError(f"{expected}auto_shard_policy OFF", received, share + instead)
    part_of_each = data.rebatch(size // where.processes, drop_remainder=True)
    return _shared(part_of_each, 0, where.local, where.local, times=where.processes)


def _shared(data: tf.data.Dataset, first: int, local: int, parts: int, times: int = 1) -> tf.data.Dataset:
    """(examples of the global batch, the shares of `local` replicas from `first` on): `parts` share each element."""
    # `map` spreads a tuple over a function's arguments.
    whole = isinstance(data.element_spec, tuple)

    def cut(*element: Batch) -> Step:
        batch = element if whole else element[0]
        size = tf.shape(tf.nest.flatten(batch)[0], tf.int64)[0]
        edges = [size * (first + number) // parts for number in range(local + 1)]
        return tf.cast(size * times, tf.float32), pieces(batch, edges)

    return data.map(tf.autograph.experimental.do_not_convert(cut))


def _symbols(like: Spec | Batch) -> Nested[keras.KerasTensor]:
    dtype = keras.backend.standardize_dtype
    return tf.nest.map_structure(lambda leaf: keras.KerasTensor((2, *leaf.shape[1:]), dtype(leaf.dtype)), like)

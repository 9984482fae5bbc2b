"""Reads examples that are made while they are read: what is cheap in the order of an epoch, then what makes them.

Each process makes only the examples of its own replicas, or has tf.data services make every n-th batch each: one
service for each process, whose batches are taken in turn, since one of several workers gives them in any order.
"""

import dataclasses
import itertools
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from pipeline.data.arrays import Nested
from pipeline.data.examples import Examples, Segment
from pipeline.private import cardinality, dataset_ops, map_op, op_def_registry, prefetch_op, structure

# Arrays, or structures of them, with the examples along the first axis; examples that are made; single examples.
Part: TypeAlias = Nested[np.ndarray] | Examples | tf.data.Dataset
# Tensors with the examples along the first axis, as (x, y) or (x, y, weights); an example has no such axis.
Batch: TypeAlias = Nested[tf.Tensor]
# The size of a step's global batch, float32, and a batch for each of this process's replicas.
Step: TypeAlias = tuple[tf.Tensor, tuple[Batch, ...]]
Batches: TypeAlias = Iterator[Step]
# The structure of an example: what type and shape each tensor has.
Spec: TypeAlias = Nested[tf.TypeSpec]
# The sizes of an example's tensors, None for those that differ.
Shape: TypeAlias = Nested[tuple[int | None, ...]]
# What becomes of an element, of several elements side by side, or of a batch.
Function: TypeAlias = Callable[[Batch], Batch]
# What Keras's `fit` takes as data.
FitData: TypeAlias = Nested[np.ndarray | tf.Tensor] | tf.data.Dataset | keras.utils.PyDataset | Iterable[object] | None

# Records of one file that follow each other before those of the next one beside it, and what is read of one at a time.
BLOCK_RECORDS, BUFFER_BYTES = 16, 2**20

# Operations that count as stateful and yet give the same whenever they are run. What is called is looked into.
HARMLESS = ("Assert", "PartitionedCall", "StatefulPartitionedCall", "While", "If", "Case")
# Data sets that map, and those that hand on what they are given, at once or ahead of time.
MAPS = (map_op._MapDataset, map_op._ParallelMapDataset)
AT_ONCE = (dataset_ops._OptionsDataset, cardinality._AssertCardinalityDataset)
PASSING_ON = (prefetch_op._PrefetchDataset, *AT_ONCE)

# (number of the epoch, a batch of raw elements) -> a batch of examples
Make: TypeAlias = Callable[[tf.Tensor, Batch], Batch]
# Arrays, or a function from an epoch's number to a data set of raw elements.
Raw: TypeAlias = Batch | Callable[[tf.Tensor], tf.data.Dataset]


@dataclass(frozen=True)
class Reading:
    """Settings for reading a part: examples in the shuffle's window, files side by side, batches made ahead.

    Integer labels name so many `classes`, None: any. `servers` are tf.data services that make the batches.
    """

    window: int = 10_000
    files: int = 4
    prefetch: int = 2
    classes: int | None = None
    servers: tuple[str, ...] = ()


def opened(part: tf.data.Dataset) -> tf.data.Dataset | Examples:
    """A data set taken apart into what it reads and what its last `map`s make of it, where they draw on it alone."""
    # Itself where there are none: what is of Python's own, random or a variable is left to no other moment or process.
    functions, inner = list[Function](), part
    while isinstance(inner, PASSING_ON) or (isinstance(inner, MAPS) and is_pure(inner._map_func.function.graph)):
        functions = [applied(inner), *functions] if isinstance(inner, MAPS) else functions
        inner = inner._input_dataset
    leaves = tf.nest.flatten(part.element_spec)
    if not functions or not all(isinstance(leaf, tf.TensorSpec) for leaf in leaves):
        return part
    decode = partial(reduce, lambda example, function: function(example), functions)
    return Examples(inner, part.element_spec, decode=decode)


def applied(node: tf.data.Dataset) -> Function:
    """Returns a `map` as a function of one element."""
    function, element_spec, returned = node._map_func.function, node._input_dataset.element_spec, node.element_spec

    def one(element: Batch) -> Batch:
        leaves = function(*structure.to_tensor_list(element_spec, element))
        return structure.from_tensor_list(returned, leaves if isinstance(leaves, list | tuple) else [leaves])

    return one


def is_pure(graph: tf.Graph) -> bool:
    """True if all operations of a function give the same whenever they are run."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    kinds = {node.op: op_def_registry.get(node.op) for node in nodes if node.op not in HARMLESS}
    calls = {function.signature.name for function in definition.library.function}
    return all(name in calls or (kind is not None and not kind.is_stateful) for name, kind in kinds.items())


def raw(part: Part, shuffle: bool, seed: int, reading: Reading) -> Raw:
    """Returns what is cheap to read of a part: arrays, or a function from an epoch's number to raw elements."""
    inner = part.raw if isinstance(part, Examples) else part
    if isinstance(inner, tf.data.Dataset):
        return lambda number: inner
    if not isinstance(part, Examples):
        return part
    if part.in_files:
        return lambda number: _records(part, number, shuffle, seed, reading)
    return part.raw if part.augment is None else {"key": tf.range(part.count, dtype=tf.int64), "raw": part.raw}


def is_ready(part: Part) -> bool:
    """True if the raw elements of a part are examples already, which were looked at."""
    return not isinstance(part, tf.data.Dataset) and (not isinstance(part, Examples) or part.is_made)


def maker(part: Part, seed: int, classes: int | None) -> Make | None:
    """Returns what makes a batch of examples from raw elements; None where these are ready."""
    if is_ready(part):
        return None
    made_of = part if isinstance(part, Examples) else Examples((), ())
    parse, decode, augment, spec = made_of.parse, made_of.decode, made_of.augment, made_of.element_spec

    def make(number: tf.Tensor, batch: Any) -> Batch:
        key, raw = ((batch["key"],), batch["raw"]) if augment else ((), batch)
        examples = parse(raw) if parse else raw

        def one(elements: tuple[Batch, ...]) -> Batch:
            example = decode(elements[0]) if decode else elements[0]
            if augment is None:
                return example
            return augment(example, tf.random.fold_in(tf.random.fold_in([seed, 0], number), elements[1]))

        if decode or augment:
            examples = tf.map_fn(one, (examples, *key), fn_output_signature=spec)
        return checked(examples, classes)

    return make


def checked(batch: Batch, classes: int | None) -> Batch:
    """The batch, which must hold no NaN and no infinity, and integer labels below `classes` only."""
    checks = [tf.debugging.Assert(right, [words]) for right, words in conditions(batch, classes)]
    with tf.control_dependencies(checks):
        return tf.nest.map_structure(tf.identity, batch, expand_composites=True)


def conditions(batch: Batch, classes: int | None) -> list[tuple[tf.Tensor, str]]:
    """Returns what must be true of a batch, boolean scalars, each with the message where it is not."""
    floats = [leaf for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating]
    finite = [tf.reduce_all(tf.math.is_finite(leaf)) for leaf in floats]
    checks = [(tf.reduce_all(finite), NOT_FINITE)] if finite else []
    labels = batch[1] if isinstance(batch, tuple) and len(batch) > 1 else None
    are_labels = isinstance(labels, tf.Tensor) and labels.dtype.is_integer and labels.shape.rank in (1, 2)
    if labels is not None and classes is not None and are_labels:
        checks.append((tf.reduce_all((labels >= 0) & (labels < classes)), OUT_OF_RANGE.format(classes - 1)))
    return checks


NOT_FINITE = (
    "Expected training data of finite numbers, received NaN or infinity in an example. "
    "Try looking for it in what data.build returns, or leaving such examples out there."
)
OUT_OF_RANGE = (
    "Expected labels from 0 to {}, received another in an example. "
    "Try data.num_classes=NUMBER, or looking for it in what data.build returns."
)


def pieces(batch: Batch, edges: Iterable[int | tf.Tensor]) -> tuple[Batch, ...]:
    """The parts of a batch between each two of these places."""
    pairs = itertools.pairwise(edges)
    return tuple(tf.nest.map_structure(lambda leaf, rows=slice(*pair): leaf[rows], batch) for pair in pairs)


def parallel() -> int:
    """Batches that are made side by side: one for each core that this process may use."""
    return len(os.sched_getaffinity(0))


def cut(segments: Sequence[Segment], start: int, stop: int) -> tuple[Segment, ...]:
    """Records `start` to `stop` of all that the segments hold, in their order."""
    pieces = []
    for segment in segments:
        first, last = max(start, 0), min(stop, segment.records)
        if first < last:
            pieces.append(dataclasses.replace(segment, records=last - first, first=segment.first + first))
        start, stop = start - segment.records, stop - segment.records
    return tuple(pieces)


def _records(part: Examples, number: tf.Tensor, shuffle: bool, seed: int, reading: Reading) -> tf.data.Dataset:
    """Returns an epoch's records, as strings; where examples are augmented, each with a key of its file and place."""
    segments = part.raw
    # The number of a segment's first record, among those of all files.
    keys = [(zlib.crc32(one.path.rpartition("/")[2].encode()) << 31) + one.first for one in segments]
    numbers = [[one.offset, one.first - one.at, one.records, key] for one, key in zip(segments, keys, strict=True)]
    columns = (tf.constant([one.path for one in segments]), *tf.unstack(tf.constant(numbers, tf.int64), axis=1))
    if shuffle:
        places = tf.random.experimental.stateless_shuffle(tf.range(len(segments)), seed=[seed, number])
        columns = tuple(tf.gather(column, places) for column in columns)
    listed = tf.data.Dataset.from_tensor_slices(columns)

    def read(*file: tf.Tensor) -> tf.data.Dataset:
        path, offset, skipped, count, key = file
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=path[tf.newaxis], compression_type="", buffer_size=BUFFER_BYTES, byte_offsets=offset[tf.newaxis]
        )
        records = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string)).skip(skipped).take(count)
        if part.augment is None:
            return records
        return tf.data.Dataset.zip({"key": tf.data.Dataset.range(key, key + count), "raw": records})

    read = tf.autograph.experimental.do_not_convert(read)
    if not shuffle or len(segments) < 2:
        return listed.flat_map(read)
    beside = min(reading.files, len(segments))
    return listed.interleave(read, beside, BLOCK_RECORDS, num_parallel_calls=beside, deterministic=True)


Server: TypeAlias = tf.data.experimental.service.DispatchServer | tf.data.experimental.service.WorkerServer


def serve(address: str) -> tuple[Server, Server]:
    """A tf.data service at `address`, HOST:PORT, with one worker, as long as what is returned is kept."""
    (host, _, port), service = address.rpartition(":"), tf.data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=int(port)))
    return dispatcher, service.WorkerServer(service.WorkerConfig(address, f"{host}:%port%", port=0))


def made_by(servers: Sequence[str], raw: tf.data.Dataset, make: Callable[[Any], Any]) -> tf.data.Dataset:
    """Returns what `make` makes of the endless data set `raw`, each element by the next of the servers."""
    service = tf.data.experimental.service
    parts = [
        make(raw.shard(len(servers), number)).apply(service.distribute(service.ShardingPolicy.OFF, f"grpc://{server}"))
        for number, server in enumerate(servers)
    ]
    numbers = tf.data.Dataset.range(len(parts)).repeat()
    return parts[0] if len(parts) == 1 else tf.data.Dataset.choose_from_datasets(parts, numbers)

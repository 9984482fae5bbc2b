"""Makes the examples of a part once, and keeps them in memory, as arrays, or in a file, as records.

What varies examples anew in each epoch is left for then.
"""

import dataclasses
import fcntl
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tensorflow as tf

from pipeline.data import records
from pipeline.data.arrays import Nested
from pipeline.data.examples import Examples, Segment
from pipeline.worker.data import batches
from pipeline.worker.data.reading import Batch, Part
from pipeline.worker.layout import BatchLayout
from pipeline.worker.model_error import TrainingError

# Examples that are made at a time.
CHUNK = 512


def in_memory(part: Examples | tf.data.Dataset) -> Part:
    """The part as arrays, in its order; `Examples` are again those, of arrays, which may still be varied."""
    _expect_one_size(part)
    if not (chunks := list(_made(part))):
        return part
    arrays = tf.nest.map_structure(lambda *leaves: np.concatenate(leaves), *chunks)
    is_part = isinstance(part, Examples)
    return dataclasses.replace(part, raw=arrays, parse=None, decode=None, look=None) if is_part else arrays


def in_file(part: Examples | tf.data.Dataset, folder: Path, name: str) -> Examples:
    """The part as records of a file in `folder`, which is written if it is not there; `name` tells it from others."""
    # Several processes that want the same file wait for the first, and one that is killed leaves none.
    _expect_one_size(part)
    spec = part.element_spec
    path = folder / f"{hashlib.sha256(f'{name} {spec}'.encode()).hexdigest()[:16]}.tfrecord"
    folder.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _write(part, path)
    leaves = {str(place): leaf for place, leaf in enumerate(tf.nest.flatten(spec))}

    def parse(batch: tf.Tensor) -> Batch:
        parsed = tf.io.parse_example(batch, dict.fromkeys(leaves, tf.io.FixedLenFeature((), tf.string)))
        return tf.nest.pack_sequence_as(spec, [_from_bytes(parsed[name], leaf) for name, leaf in leaves.items()])

    varied = part if isinstance(part, Examples) else Examples((), spec)
    segment = Segment(str(path.resolve()), batches.count(part))
    return dataclasses.replace(
        varied, raw=(segment,), spec=spec, parse=parse, decode=None, look=None, flaws=(), digest=path.stem
    )


def _write(part: Examples | tf.data.Dataset, path: Path) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            for chunk in _made(part):
                for row in zip(*tf.nest.flatten(chunk), strict=True):
                    values = [one if isinstance(one, bytes) else np.asarray(one).tobytes() for one in row]
                    file.write(records.framed(records.example({str(at): one for at, one in enumerate(values)})))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        expected = f"Expected to be able to write the cache of the data to {path}, received: {error.strerror or error}."
        instead = "Try more space there, another output_dir, or data.cache=none."
        raise TrainingError(f"{expected} {instead}") from error


def _from_bytes(values: tf.Tensor, leaf: tf.TensorSpec) -> tf.Tensor:
    if leaf.dtype == tf.string:
        return values
    if leaf.dtype == tf.bool:
        return tf.cast(_from_bytes(values, tf.TensorSpec(leaf.shape, tf.uint8)), tf.bool)
    return tf.reshape(tf.io.decode_raw(values, leaf.dtype), [tf.shape(values)[0], *leaf.shape])


def _made(part: Examples | tf.data.Dataset) -> Iterator[Nested[np.ndarray]]:
    """The examples of a part in their order, some at a time: its structure, with arrays [examples, ...]."""
    plain = dataclasses.replace(part, augment=None) if isinstance(part, Examples) else part
    layout = BatchLayout(CHUNK, replicas=1, first=0, local=1, counts=(batches.count(part),))
    stream = batches.Data(plain, layout, shuffle=False, seed=0).stream().take(layout.steps)
    for _, (batch,) in stream.as_numpy_iterator():
        yield batch


def _expect_one_size(part: Examples | tf.data.Dataset) -> None:
    for leaf in tf.nest.flatten(part.element_spec):
        of_one_size = isinstance(leaf, tf.TensorSpec) and leaf.shape.is_fully_defined()
        if not of_one_size or (leaf.dtype == tf.string and leaf.shape.rank):
            received = f"a {type(leaf).__name__} of shape {leaf.shape} and {getattr(leaf.dtype, 'name', leaf.dtype)}"
            raise TrainingError("examples of one size to keep", received, "data.cache=none")

"""Reads what `python -m pipeline prepare` wrote: TFRecord shards of `tf.train.Example` beside a manifest."""

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from pipeline.data import files, manifest, pictures, records
from pipeline.data.arrays import Nested
from pipeline.data.errors import DataError, expect_path
from pipeline.data.examples import Broken, Examples, Leaf, Make, Segment, faults
from pipeline.data.manifest import Feature, Manifest
from pipeline.data.needed import check_image
from pipeline.errors import first_of


def tfrecord(
    *,
    path: str | None,
    image_size: Sequence[int] | None = None,
    channels: int | None = None,
    augment: Mapping[str, float] | bool | None = None,
) -> tuple[Examples, Examples | None]:
    """Prepared data: two parts whose examples are what the manifest says, parsed from their records as they are read.

    Encoded images become float32 [height, width, channels] in [0, 1], of the size that they have, or brought to
    `image_size`. `augment` varies the images `x` that train: see `pictures.augmenter`. Raises `DataError`.
    """
    path = expect_path("tfrecord", path)
    contents = manifest.load(path, files.read)
    if not contents.examples(manifest.TRAIN):
        anew = f"`python -m pipeline prepare data=SOURCE out={path}` anew"
        raise DataError(f"training examples in {path}", "a manifest without any", anew)
    features = []
    for one in contents.features:
        shape = one.shape
        if one.stored == "image":
            check_image("tfrecord", channels or 3, image_size)
            shape = (*(image_size or shape[:2]), channels or shape[2] or 3)
            if None in shape:
                expected = "images of one size, or a size that they are brought to"
                raise DataError(expected, f"{path} with images of several", "'data.build.image_size=[32,32]'")
        features.append(dataclasses.replace(one, shape=shape))
    contents = dataclasses.replace(contents, features=tuple(features))
    vary = pictures.augmenter(augment)
    x = next((feature for feature in features if feature.name == "x"), None)
    if vary and (x is None or x.dtype != "float32" or len(x.shape) != 3):
        raise DataError("images x of one size to augment", f"{path} without any", "data.build.augment=null")
    parts = [_part(contents, path, split, image_size is not None) for split in (manifest.TRAIN, manifest.VALIDATION)]
    varied: Make | None = (lambda example, seed: (vary(example[0], seed), *example[1:])) if vary else None
    return dataclasses.replace(parts[0], augment=varied), parts[1] if parts[1].raw else None


def _part(contents: Manifest, folder: str, split: str, resize: bool) -> Examples:
    shards = {f"{folder.rstrip('/')}/{one.file}": one for one in contents.splits.get(split, ()) if one.examples}

    def look(examples: Examples, number: int, shares: int, thorough: bool) -> list[Broken]:
        share = [*dict.fromkeys(segment.path for segment in examples.raw)][number::shares]
        sizes = ((path, shards[path].examples, shards[path].bytes) for path in share)
        return [flaw for of_file in sizes for flaw in broken(*of_file, thorough, partial(_why, contents, resize))]

    flaws: tuple[str, ...] = ()
    if contents.num_classes is not None and split == manifest.TRAIN:
        empty = [label for label, count in contents.classes(split).items() if not count]
        names = [contents.class_names[int(label)] if contents.class_names else label for label in empty]
        listed = first_of(names, between=", ", last=" and")
        flaws = (f"no training examples of class {listed} in {folder}/{manifest.FILE}",) if names else ()
    return Examples(
        raw=tuple(Segment(path, shard.examples) for path, shard in shards.items()),
        spec=manifest.nested({feature.name: Leaf(feature.shape, feature.dtype) for feature in contents.features}),
        parse=partial(_parsed, contents.features),
        decode=_decoder(contents.features, resize),
        num_classes=contents.num_classes,
        class_names=contents.class_names,
        look=look,
        flaws=flaws,
        digest=hashlib.sha256("".join(shard.sha256 for shard in shards.values()).encode()).hexdigest()[:16],
    )


def _parsed(features: Sequence[Feature], batch: Any) -> Nested[Any]:
    """A batch of examples, whose images are still encoded, of a batch of records."""
    # Only here: who reads without TensorFlow parses otherwise.
    import tensorflow as tf

    kinds = {"floats": tf.float32, "ints": tf.int64, "bytes": tf.string, "image": tf.string}
    shapes = {one.name: one.shape if one.stored in ("floats", "ints") else () for one in features}
    layout = {one.name: tf.io.FixedLenFeature(shapes[one.name], kinds[one.stored]) for one in features}
    tensors = tf.io.parse_example(batch, layout)
    for one in features:
        if one.stored == "bytes":
            # A length of its own for the batch, since an empty one does not tell it.
            decoded = tf.io.decode_raw(tensors[one.name], one.dtype)
            tensors[one.name] = tf.reshape(decoded, [tf.shape(batch)[0], *one.shape])
        elif one.stored != "image":
            tensors[one.name] = tf.cast(tensors[one.name], one.dtype)
    return manifest.nested({one.name: tensors[one.name] for one in features})


def _decoder(features: Sequence[Feature], resize: bool) -> Make | None:
    images = [feature for feature in features if feature.stored == "image"]

    def decode(example: Nested[Any]) -> Nested[Any]:
        leaves = manifest.flat(example)
        for one in images:
            leaves[one.name] = pictures.decoded(leaves[one.name], one.shape[2] or 3, _size(one), resize)
        return manifest.nested(leaves)

    return decode if images else None


def _size(feature: Feature) -> tuple[int, int]:
    return feature.shape[0] or 0, feature.shape[1] or 0


def broken(
    path: str, expected: int, nbytes: int | None, thorough: bool, why: Callable[[bytes], str | None]
) -> Iterator[Broken]:
    """Yields what is broken in a file of so many records, and of `nbytes` where that is known.

    A file of that size is read only if the look is thorough. `why` says what is wrong with the data of a record.
    """
    try:
        size = files.size_of(path)
        if nbytes in (None, size) and not thorough:
            return
        with files.opened(path) as file:
            # Without their data, which may be more than fits into memory.
            frames = [
                dataclasses.replace(frame, data=None, broken=frame.broken or why(frame.data or b""))
                for frame in records.frames(file)
            ]
    except OSError as error:
        yield Broken(path, 0, expected, path, f"cannot be read ({error.strerror or error})")
        return
    number = 0
    for frame, examples in zip(frames, _lost(frames, expected), strict=True):
        if frame.broken:
            yield Broken(path, number, examples, f"{path} record {number}", frame.broken, frame.stop)
        number += examples
    if number < expected:
        missing = f"is not there: {expected} were expected"
        yield Broken(path, number, expected - number, f"{path} record {number}", missing)
    elif number > expected or (nbytes not in (None, size) and not any(frame.broken for frame in frames)):
        yield Broken(path, 0, expected, path, f"has {size} bytes, {nbytes} were expected")


def _lost(frames: Sequence[records.Frame], expected: int) -> list[int]:
    """Returns how many records each frame stands for, by its bytes: a broken one may be the first of several."""
    counts = [1] * len(frames)
    whole = [frame.stop - frame.start for frame in frames if frame.stop is not None and not frame.broken]
    gaps = [place for place, frame in enumerate(frames) if frame.broken in (records.WRONG_LENGTH, records.CUT_OFF)]
    for place in gaps:
        missing, stop = expected - sum(counts), frames[place].stop
        if place == gaps[-1] or stop is None:
            counts[place] += max(0, missing)
        elif whole:
            guess = round((stop - frames[place].start) / statistics.median(whole)) - 1
            counts[place] += min(max(0, guess), max(0, missing))
    return counts


def _why(contents: Manifest, resize: bool, data: bytes) -> str | None:
    try:
        by_name = records.parsed(data)
    except ValueError as error:
        return str(error)
    for feature in contents.features:
        name, shape, kind, values = feature.name, feature.shape, np.dtype(feature.dtype), by_name.get(feature.name)
        if values is None:
            return f"has no {name}"
        in_bytes, size = feature.stored in ("bytes", "image"), math.prod(each or 0 for each in shape)
        count, length = 1 if in_bytes else size, size * kind.itemsize
        if len(values) != count or (in_bytes and not isinstance(values[0], bytes)):
            return f"has {len(values)} values of {name}, {count} of shape {shape} were expected"
        if feature.stored == "image":
            if why := pictures.fault(values[0], None if resize else _size(feature)):
                return f"has an image {name} that {why}"
            continue
        if in_bytes and len(values[0]) != length:
            return f"has {len(values[0])} bytes of {name}, {length} of shape {shape} were expected"
        array = np.frombuffer(values[0], kind) if in_bytes else np.asarray(values)
        if whys := faults({name: array}, contents.num_classes):
            return next(iter(whys.values()))
    return None

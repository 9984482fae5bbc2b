"""Reads what `python -m pipeline prepare` wrote: TFRecord shards of `tf.train.Example` beside a manifest."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pipeline.data import files, manifest, pictures, records
from pipeline.data.arrays import Nested
from pipeline.data.errors import DataError, expect_path
from pipeline.data.examples import Broken, Examples, Leaf, Segment
from pipeline.data.manifest import Feature, Manifest, Shard
from pipeline.data.needed import check_image
from pipeline.errors import first_of

if TYPE_CHECKING:
    import tensorflow as tf

    from pipeline.data.examples import Make


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
    contents = _with_images(contents, channels, image_size, path)
    vary = pictures.augmenter(augment)
    x = next((feature for feature in contents.features if feature.name == "x"), None)
    if vary and (x is None or x.dtype != "float32" or len(x.shape) != 3):
        raise DataError("images x of one size to augment", f"{path} without any", "data.build.augment=null")
    parts = [_part(contents, path, split, image_size is not None) for split in (manifest.TRAIN, manifest.VALIDATION)]
    varied: Make | None = (lambda example, seed: (vary(example[0], seed), *example[1:])) if vary else None
    return dataclasses.replace(parts[0], augment=varied), parts[1] if parts[1].raw else None


def _with_images(contents: Manifest, channels: int | None, image_size: Sequence[int] | None, path: str) -> Manifest:
    """The manifest with the shape that encoded images are to have."""
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
    return dataclasses.replace(contents, features=tuple(features))


def _part(contents: Manifest, folder: str, split: str, resize: bool) -> Examples:
    shards = [shard for shard in contents.splits.get(split, ()) if shard.examples]
    paths = [f"{folder.rstrip('/')}/{shard.file}" for shard in shards]
    shard_at = dict(zip(paths, shards, strict=True))

    def look(examples: Examples, number: int, shares: int, thorough: bool) -> list[Broken]:
        share = list(dict.fromkeys(segment.path for segment in examples.raw))[number::shares]
        return [flaw for path in share for flaw in _broken(contents, path, shard_at[path], thorough, resize)]

    flaws: tuple[str, ...] = ()
    if contents.num_classes is not None and split == manifest.TRAIN:
        empty = [label for label, count in contents.classes(split).items() if not count]
        names = [contents.class_names[int(label)] if contents.class_names else label for label in empty]
        listed = first_of(names, between=", ", last=" and")
        flaws = (f"no training examples of class {listed} in {folder}/{manifest.FILE}",) if names else ()
    return Examples(
        raw=tuple(Segment(path, shard.examples) for path, shard in shard_at.items()),
        spec=manifest.nested({feature.name: Leaf(feature.shape, feature.dtype) for feature in contents.features}),
        parse=_parser(contents.features),
        decode=_decoder(contents.features, resize),
        num_classes=contents.num_classes,
        class_names=contents.class_names,
        look=look,
        flaws=flaws,
        digest=hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()[:16],
    )


def _parser(features: Sequence[Feature]) -> Make:
    """Returns a function from a batch of records to a batch of examples, whose images are still encoded."""

    def parse(batch: tf.Tensor) -> Nested[tf.Tensor]:
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

    return parse


def _decoder(features: Sequence[Feature], resize: bool) -> Make | None:
    images = [feature for feature in features if feature.stored == "image"]
    decoders = {image.name: pictures.decoder(image.shape[2] or 3, _size(image), resize) for image in images}

    def decode(example: Nested[tf.Tensor]) -> Nested[tf.Tensor]:
        leaves = manifest.flat(example)
        return manifest.nested(leaves | {name: decoder(leaves[name]) for name, decoder in decoders.items()})

    return decode if decoders else None


def _size(feature: Feature) -> tuple[int, int]:
    return feature.shape[0] or 0, feature.shape[1] or 0


def _broken(contents: Manifest, path: str, shard: Shard, thorough: bool, resize: bool) -> Iterator[Broken]:
    """Yields what is broken in a shard. One of the right size is read only if the look is thorough."""
    try:
        size = files.size_of(path)
        if size == shard.bytes and not thorough:
            return
        with files.opened(path) as file:
            # Without their data, which may be more than fits into memory.
            reasons = [
                (dataclasses.replace(frame, data=None), frame.broken or _why(contents, frame.data or b"", resize))
                for frame in records.frames(file)
            ]
    except OSError as error:
        yield Broken(path, 0, shard.examples, path, f"cannot be read ({error.strerror or error})")
        return
    number, lost = 0, _lost([frame for frame, _ in reasons], shard.examples)
    for (frame, why), examples in zip(reasons, lost, strict=True):
        if why:
            yield Broken(path, number, examples, f"{path} record {number}", why, frame.stop)
        number += examples
    if number < shard.examples:
        short, why = shard.examples - number, f"is not there: {shard.examples} were expected"
        yield Broken(path, number, short, f"{path} record {number}", why)
    elif number > shard.examples or (size != shard.bytes and not any(why for _, why in reasons)):
        yield Broken(path, 0, shard.examples, path, f"has {size} bytes, {shard.bytes} were expected")


def _lost(frames: Sequence[records.Frame], expected: int) -> list[int]:
    """Returns how many records each frame stands for: a broken one may be the first of several.

    All together are as many as expected, where there is such a frame. Their bytes say how many each of them was.
    """
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


def _why(contents: Manifest, data: bytes, resize: bool) -> str | None:
    try:
        by_name = records.parsed(data)
    except ValueError as error:
        return str(error)
    for feature in contents.features:
        name, values, size = feature.name, by_name.get(feature.name), math.prod(each or 0 for each in feature.shape)
        if values is None:
            return f"has no {name}"
        is_one = feature.stored in ("bytes", "image")
        count = 1 if is_one else size
        if len(values) != count or (is_one and not isinstance(values[0], bytes)):
            return f"has {len(values)} values of {name}, {count} of shape {feature.shape} were expected"
        if feature.stored == "image":
            if why := pictures.fault(values[0], None if resize else _size(feature)):
                return f"has an image {name} that {why}"
            continue
        in_bytes, kind = feature.stored == "bytes", np.dtype(feature.dtype)
        if in_bytes and len(values[0]) != (expected := size * kind.itemsize):
            return f"has {len(values[0])} bytes of {name}, {expected} of shape {feature.shape} were expected"
        array = np.frombuffer(values[0], kind) if in_bytes else np.asarray(values)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            return f"has NaN or infinity in {name}"
        classes = contents.num_classes
        if classes is not None and name == "y" and not ((array >= 0) & (array < classes)).all():
            return f"has label {array.flat[0]}, 0 to {classes - 1} were expected"
    return None

"""Reads TFRecord files: those that `python -m pipeline prepare` wrote, and those of TensorFlow Datasets."""

import dataclasses
import hashlib
import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data import files, pictures, records
from pipeline.data.arrays import Nested
from pipeline.data.built_in import one_at_a_time
from pipeline.data.errors import WHAT, DataError, expect_path, refuse
from pipeline.data.examples import Broken, Examples, Leaf, Make, Segment, faults
from pipeline.data.folders import PREPARED, check_image
from pipeline.data.records import Feature, Manifest
from pipeline.errors import first_line, first_of

AUTO, HELD_OUT = "auto", ("validation", "test")


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
    contents = records.load_manifest(path, files.read)
    if not contents.examples(records.TRAIN):
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
    parts = [_part(contents, path, split, image_size is not None) for split in (records.TRAIN, records.VALIDATION)]
    varied: Make | None = (lambda example, seed: (vary(example[0], seed), *example[1:])) if vary else None
    return dataclasses.replace(parts[0], augment=varied), parts[1] if parts[1].raw else None


def _part(contents: Manifest, folder: str, split: str, resize: bool) -> Examples:
    shards = {f"{folder.rstrip('/')}/{one.file}": one for one in contents.splits.get(split, ()) if one.examples}

    def look(examples: Examples, number: int, shares: int, thorough: bool) -> list[Broken]:
        share = [*dict.fromkeys(segment.path for segment in examples.raw)][number::shares]
        sizes = ((path, shards[path].examples, shards[path].bytes) for path in share)
        return [flaw for of_file in sizes for flaw in broken(*of_file, thorough, partial(_why, contents, resize))]

    flaws: tuple[str, ...] = ()
    if contents.num_classes is not None and split == records.TRAIN:
        empty = [label for label, count in contents.classes(split).items() if not count]
        names = [contents.class_names[int(label)] if contents.class_names else label for label in empty]
        listed = first_of(names, between=", ", last=" and")
        flaws = (f"no training examples of class {listed} in {folder}/{records.MANIFEST}",) if names else ()
    return Examples(
        raw=tuple(Segment(path, shard.examples) for path, shard in shards.items()),
        spec=records.nested({feature.name: Leaf(feature.shape, feature.dtype) for feature in contents.features}),
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
    return records.nested({one.name: tensors[one.name] for one in features})


def _decoder(features: Sequence[Feature], resize: bool) -> Make | None:
    images = [feature for feature in features if feature.stored == "image"]

    def decode(example: Nested[Any]) -> Nested[Any]:
        leaves = records.flat(example)
        for one in images:
            leaves[one.name] = pictures.decoded(leaves[one.name], one.shape[2] or 3, _size(one), resize)
        return records.nested(leaves)

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
        if size == nbytes and not thorough:
            return
        with files.opened(path) as file:
            if nbytes is None and not thorough:
                return
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
    elif nbytes is not None and (number > expected or (size != nbytes and not any(frame.broken for frame in frames))):
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
        # Class numbers may have been prepared as floats; with a single class, a float is a quantity.
        classes = contents.num_classes or 0
        if name == "y" and not shape and classes > 1 and not 0 <= array[0] < classes:
            return f"has label {array[0]:g}, 0 to {classes - 1} were expected"
    return None


def tfds(
    name: str,
    *,
    path: str | None = None,
    data_dir: str | None = None,
    train_split: str = "train",
    validation_split: str | None = AUTO,
    keys: Sequence[str] | None = None,
    image_size: Sequence[int] | None = None,
    download: bool = False,
) -> tuple[Examples, Examples | None]:
    """A data set as `(x, y)`: images float32 [height, width, channels] in [0, 1], classes int32, the rest as it is.

    `name` is the library's, with a configuration and a version where that is wanted (`mnist:3.*.*`); `path` is the
    folder of a version instead, with `features.json` in it. Splits may be parts, `train[:80%]`; without a
    `validation_split`, None, there is no validation, and "auto" is validation or test. `keys` are the features that
    are x and y; None: those that the data set says. Images of several sizes are brought to `image_size`. Nothing is
    downloaded unless `download` says so. Raises `DataError`.
    """
    check_image("tfds", 3, image_size)
    builder = _builder(name, path, data_dir, download)
    kind = builder.info.file_format.value
    refuse((kind != "tfrecord", f"{builder.data_dir} to have TFRecord files", kind,
            "preparing it with file_format='tfrecord'"))  # fmt: skip
    train = _read(builder, train_split, "train_split", keys, image_size)
    if validation_split == AUTO:
        info = builder.info
        validation_split = next((split for split in HELD_OUT if split in info.splits), None)
        if validation_split is None:
            expected = f"a split {' or '.join(HELD_OUT)} in {info.full_name}"
            parts = "\"data.build.train_split='train[:80%]'\" \"data.build.validation_split='train[80%:]'\""
            raise DataError(expected, ", ".join(info.splits), f"{parts}, or data.build.validation_split=null")
    if validation_split is None:
        return train, None
    return train, _read(builder, validation_split, "validation_split", keys, image_size)


def _builder(name: str, path: str | None, data_dir: str | None, download: bool) -> Any:
    try:
        import tensorflow_datasets
        from tensorflow_datasets.core import read_only_builder
        from tensorflow_datasets.core.utils import file_utils
    except ImportError as error:
        received = f"none that can be imported ({error})"
        install = "pip install 'distributed-keras-pipeline[tfds]'"
        raise DataError("the package tensorflow-datasets for data=tfds", received, install) from error
    if path is not None and not Path(path, PREPARED).is_file():
        instead = "the folder that has it, as data.path=FOLDER/mnist/3.0.1"
        raise DataError(f"data.path to be {WHAT['tfds'][0]}", f"{path} without {PREPARED}", instead)
    folder = data_dir and os.path.expanduser(data_dir)
    try:
        if path is not None:
            return tensorflow_datasets.builder_from_directory(path)
        if not download:
            # The same function that others load by name with asks the network first.
            return read_only_builder.builder_from_files(name, data_dir=folder)
        builder = tensorflow_datasets.builder(name, data_dir=folder)
        # All processes of a host are here at once.
        with one_at_a_time(Path(f"{builder.data_dir}.lock")):
            builder.download_and_prepare()
        return builder
    except Exception as error:
        if isinstance(error, tensorflow_datasets.core.DatasetNotFoundError) and path is None and not download:
            where = ", ".join(map(str, file_utils.list_data_dirs(given_data_dir=folder)))
            instead = "data.build.download=true, or data.build.data_dir=FOLDER"
            raise DataError(f"data.name={name} to be prepared in {where}", "none there", instead) from error
        expected = f"Expected {path or name} to be a data set of TensorFlow Datasets that can be had, received: "
        instead = "data.name=mnist, or whatever its catalogue calls it, or data.path=FOLDER of one that is prepared"
        raise DataError(f"{expected}{first_line(error).rstrip('.')}. Try {instead}.") from error


def _read(builder: Any, split: str, key: str, keys: Sequence[str] | None, image_size: Sequence[int] | None) -> Examples:
    import tensorflow as tf

    info = builder.info
    try:
        instructions = info.splits[split].file_instructions
    except (KeyError, ValueError, AssertionError) as error:
        expected = f"data.build.{key} to be a split of {info.full_name} ({', '.join(info.splits)}) or a part of one"
        raise DataError(expected, split, f"data.build.{key}={next(iter(info.splits), 'train')}") from error
    segments = tuple(Segment(str(each.filename), each.take, each.skip) for each in instructions if each.take)
    totals = {str(each.filename): each.examples_in_shard for each in instructions}
    if not segments:
        raise DataError(f"examples in data.build.{key}={split} of {info.full_name}", "none", "another")
    chosen = _keys(info, keys)
    decode = _features_decoder(info, chosen, image_size)
    spec = tf.data.Dataset.from_tensors("").map(tf.autograph.experimental.do_not_convert(decode)).element_spec
    if not all(leaf.shape.is_fully_defined() for leaf in tf.nest.flatten(spec)):
        shapes = " and ".join(str([size or "any" for size in leaf.shape]) for leaf in tf.nest.flatten(spec))
        instead = "'data.build.image_size=[32,32]', which images are brought to"
        raise DataError(f"examples of one shape in {info.full_name}", shapes, instead)
    label = info.features[chosen[1]]
    # Which records of its files: a version is never changed.
    which = [(os.path.basename(segment.path), segment.first, segment.records) for segment in segments]
    return Examples(
        raw=segments,
        spec=spec,
        decode=decode,
        num_classes=getattr(label, "num_classes", None),
        class_names=tuple(label.names) if getattr(label, "names", None) else None,
        look=lambda examples, number, shares, thorough: [
            flaw
            for segment in examples.raw[number::shares]
            for whole in broken(segment.path, totals[segment.path], None, thorough, lambda data: None)
            if (flaw := _within(whole, segment)).examples
        ],
        digest=hashlib.sha256(repr((info.full_name, which)).encode()).hexdigest()[:16],
    )


def _keys(info: Any, keys: Sequence[str] | None) -> tuple[str, str]:
    chosen = (info.supervised_keys if keys is None else keys) or ()
    if len(chosen) != 2 or not all(isinstance(name, str) and name in info.features for name in chosen):
        # Two features that might be x and y: the first that is no class, and the first that is one.
        names = sorted(info.features, key=lambda name: (_is_class(info.features[name]), name))
        classes = [name for name in names if _is_class(info.features[name])]
        images = [name for name in names if len(info.features[name].shape or ()) == 3]
        likely = f"{(images or names)[0]},{(classes or names[::-1])[0]}"
        expected = f"data.build.keys to be two features of {info.full_name} ({', '.join(sorted(info.features))})"
        raise DataError(expected, list(chosen) or "none, and it names none itself", f"'data.build.keys=[{likely}]'")
    return chosen[0], chosen[1]


def _is_class(feature: object) -> bool:
    return hasattr(feature, "num_classes")


def _features_decoder(info: Any, keys: tuple[str, str], image_size: Sequence[int] | None) -> Make:
    import tensorflow as tf

    size = (image_size[0], image_size[1]) if image_size else None
    are_classes = _is_class(info.features[keys[1]])

    def inputs(x: tf.Tensor) -> tf.Tensor:
        is_image = x.dtype == tf.uint8 and x.shape.rank == 3
        return pictures.sized(tf.cast(x, tf.float32) / 255, size, resize=True) if is_image else x

    def targets(y: tf.Tensor) -> tf.Tensor:
        # Other whole numbers may be larger than int32 holds.
        return tf.cast(y, tf.int32) if y.dtype.is_integer and are_classes else y

    def decode(record: tf.Tensor) -> tuple[Nested[tf.Tensor], Nested[tf.Tensor]]:
        features = info.features.deserialize_example(record)
        return tf.nest.map_structure(inputs, features[keys[0]]), tf.nest.map_structure(targets, features[keys[1]])

    return decode


def _within(flaw: Broken, segment: Segment) -> Broken:
    first, last = max(flaw.first, segment.first), min(flaw.first + flaw.examples, segment.first + segment.records)
    return dataclasses.replace(flaw, first=first, examples=max(last - first, 0))

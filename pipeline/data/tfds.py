"""Turns what TensorFlow Datasets has prepared on this machine into examples that are read from its TFRecord files."""

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.data import pictures
from pipeline.data.arrays import Nested
from pipeline.data.built_in import one_at_a_time
from pipeline.data.errors import WHAT, DataError, refuse
from pipeline.data.examples import Broken, Examples, Make, Segment
from pipeline.data.needed import PREPARED, check_image
from pipeline.data.tfrecord import broken
from pipeline.errors import first_line

AUTO, VALIDATION = "auto", ("validation", "test")


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
    train = _part(builder, train_split, "train_split", keys, image_size)
    if validation_split == AUTO:
        info = builder.info
        validation_split = next((split for split in VALIDATION if split in info.splits), None)
        if validation_split is None:
            expected = f"a split {' or '.join(VALIDATION)} in {info.full_name}"
            parts = "\"data.build.train_split='train[:80%]'\" \"data.build.validation_split='train[80%:]'\""
            raise DataError(expected, ", ".join(info.splits), f"{parts}, or data.build.validation_split=null")
    if validation_split is None:
        return train, None
    return train, _part(builder, validation_split, "validation_split", keys, image_size)


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


def _part(builder: Any, split: str, key: str, keys: Sequence[str] | None, image_size: Sequence[int] | None) -> Examples:
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
    decode = _decoder(info, chosen, image_size)
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
        received = list(chosen) or "none, and it names none itself"
        raise DataError(expected, received, f"'data.build.keys=[{likely}]'")
    return chosen[0], chosen[1]


def _is_class(feature: object) -> bool:
    return hasattr(feature, "num_classes")


def _decoder(info: Any, keys: tuple[str, str], image_size: Sequence[int] | None) -> Make:
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

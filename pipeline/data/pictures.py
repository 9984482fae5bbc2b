"""Turns folders of images, one a class, into examples that TensorFlow decodes as they are read and Pillow looks at."""

import dataclasses
import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.data import folders
from pipeline.data.arrays import split
from pipeline.data.errors import DataError, expect_path
from pipeline.data.examples import Broken, Examples, Leaf, Make, share_of
from pipeline.data.folders import PICTURES, augmentation, check_image

# Height and width in pixels; the files of images, absolute, and the number of each one's class.
Size: TypeAlias = tuple[int, int]
Listed: TypeAlias = tuple[NDArray[np.str_], NDArray[np.int32]]

FORMATS = ("PNG", "JPEG", "GIF", "BMP")
# How red, green and blue make grey (ITU-R BT.601); green has the rest.
_RED, _BLUE = 0.299, 0.114
# The last chunk of every PNG, and what ends the last image of a GIF and the file. Pillow does without.
_END = {"PNG": b"\0\0\0\0IEND\xaeB`\x82", "GIF": b"\0;"}
UNREAD_BMP = "is a BMP with a palette of colours, packed, or not of 8, 24 or 32 bits a pixel: TensorFlow reads none"
CUT_OFF = "is cut off at its end"
# Where a BMP says at which byte its pixels begin, and how many bits each has, and how they are packed (0 and 3: not).
_BMP_START, _BMP_BITS, _BMP_PACKED = slice(10, 14), slice(28, 30), slice(30, 34)
# How the names of images end that are of another format, or that nothing here looks for.
UNREAD = (
    ".webp", ".jfif", ".jpe", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".ppm", ".pgm", ".pnm", ".tga",
    ".dcm", ".svg", ".ico",
)  # fmt: skip


def images(
    path: str | None = None,
    *,
    image_size: Sequence[int] | None = None,
    channels: int = 3,
    validation_fraction: float = 0.2,
    split_seed: int = 0,
    augment: Mapping[str, float] | bool | None = None,
    classes: Sequence[str] | None = None,
    validation_path: str | None = None,
) -> tuple[Examples, Examples]:
    """The images of a folder: float32 [height, width, channels] in [0, 1], and int32, the class.

    They are `path/CLASS/**/*.png` (or jpg, jpeg, gif, bmp), of which the same fraction of every class is held out; or
    `path/train/CLASS/...` with `path/validation/CLASS/...`, under any usual names (see `folders.role`), or in a folder
    of its own, `validation_path`. Classes are numbered from 0 in the order of their names, the same in both parts;
    `classes` names those that count. Every image gets `image_size`, a height and a width; where none is given, all must
    have that of the first. `augment` varies those that train: see `augmenter`. Raises `DataError`.
    """
    check_image("images", channels, image_size)
    vary = augmenter(augment)
    parts, numbers = folders.arranged(expect_path("images", path), classes, validation_path)
    (files, labels), unread = _listed(parts.train, numbers)
    train, held = split(labels, validation_fraction, split_seed)
    if parts.validation is None:
        held_out = files[held], labels[held]
    else:
        held_out, others = _listed(parts.validation, _known(parts.validation, numbers, classes, parts.train))
        unread += others
        train = np.random.default_rng(split_seed).permutation(len(files))
    size = (image_size[0], image_size[1]) if image_size else None
    if size is None:
        from PIL import Image

        for file in files:
            # Each format has errors of its own.
            with suppress(Exception), Image.open(file, formats=FORMATS) as image:
                size = image.height, image.width
                break
        else:
            raise DataError(f"images in {path}", f"{len(files)} files of which none can be read", "another data.path")
    resize = image_size is not None

    def decode(row: Mapping[str, Any]) -> tuple[Any, Any]:
        import tensorflow as tf

        return decoded(tf.io.read_file(row["path"]), channels, size, resize), row["label"]

    validation = Examples(
        raw=dict(zip(("path", "label"), held_out, strict=True)),
        spec=(Leaf((*size, channels), "float32"), Leaf((), "int32")),
        decode=decode,
        num_classes=len(numbers),
        class_names=tuple(numbers),
        look=partial(_look, None if image_size else size),
    )
    empty = [name for name, number in numbers.items() if number not in labels]
    flaws = tuple(f"no images ({', '.join(PICTURES)}) of class {name} in {parts.train / name}" for name in empty)
    varied: Make | None = (lambda example, seed: (vary(example[0], seed), example[1])) if vary else None
    raw, notes = {"path": files[train], "label": labels[train]}, (*parts.notes, *unread)
    return dataclasses.replace(validation, raw=raw, augment=varied, flaws=flaws, notes=notes), validation


def _known(folder: Path, classes: Mapping[str, int], chosen: Sequence[str] | None, train: Path) -> dict[str, int]:
    """The classes that a validation folder has; all of them must be of the training part."""
    names, _ = folders.class_folders(folder)
    others = [name for name in names if name not in classes]
    unknown = [name for name in others if any(folders.files_below(folder / name, PICTURES))]
    numbers = {name: classes[name] for name in names if name in classes}
    if (unknown and not chosen) or not numbers:
        offer = f"'data.build.classes=[{','.join(classes)}]', which leaves others out, or " if numbers else ""
        expected = f"{folder} to have classes that train ({', '.join(classes)})"
        raise DataError(expected, ", ".join(unknown) or "no folders", f"{offer}the same folders as in {train}")
    return numbers


def _listed(folder: Path, classes: Mapping[str, int]) -> tuple[Listed, tuple[str, ...]]:
    """The images of each class, by the names of their files, and a note on those of kinds that are not read."""
    paths, labels, unread = list[str](), list[int](), Counter[str]()
    for name, number in classes.items():
        for file in folders.files_below(folder / name, (*PICTURES, *UNREAD)):
            if not file.name.lower().endswith(PICTURES):
                unread[file.suffix.lower()] += 1
                continue
            _check_file(str(file))
            paths.append(str(file))
            labels.append(number)
    if not paths:
        raise DataError(f"images ({', '.join(PICTURES)}) in {folder}", "none", folders.LAYOUT)
    kinds = ", ".join(sorted(unread))
    notes = (f"Not read in {folder}: {unread.total():,} of {kinds}. Convert them to PNG or JPEG.",) if unread else ()
    return (np.array(paths, dtype=np.str_), np.array(labels, dtype=np.int32)), notes


def _check_file(path: str) -> None:
    """Refuses names that TensorFlow cannot open, and BMPs whose colours it would get wrong without a word."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise DataError("names of files in UTF-8", f"{os.fsencode(path)!r}", "renaming it") from error
    if not path.lower().endswith(".bmp"):
        return
    try:
        with open(path, "rb") as file:
            head = file.read(_BMP_BITS.stop)
            # From 24 bits a pixel on a BMP has no palette.
            few = head[:2] == b"BM" and int.from_bytes(head[_BMP_BITS], "little") < 24
            reason = fault(head + file.read()) if few else None
    except OSError:
        # It is found broken like any other file.
        return
    if reason == UNREAD_BMP:
        expected = "BMP files of 24 or 32 bits a pixel, or grey ones of 8"
        raise DataError(expected, f"{path}, which {reason}", "converting it to PNG")


def _look(size: Size | None, examples: Examples, number: int, shares: int, thorough: bool) -> list[Broken]:
    files = examples.raw["path"]
    # To see anything of an image, all of it must be read.
    share = share_of(len(files), number, shares) if thorough else range(0)

    def fault_of(row: int) -> str | None:
        try:
            return fault(Path(files[row]).read_bytes(), size)
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"

    with ThreadPoolExecutor() as pool:
        faults = [*zip(share, pool.map(fault_of, share), strict=True)]
    return [Broken(None, row, 1, str(files[row]), why) for row, why in faults if why]


def decoded(data: Any, channels: int, size: Size | None, resize: bool = False) -> Any:
    """An encoded image, a scalar string tensor, as float32 [height, width, channels] in [0, 1].

    PNG, JPEG, GIF and BMP are told apart by their bytes; of several images in a file it is the first. Transparency is
    left out, 16 bits become 8, and one channel is the luma of colours. For `size` and `resize` see `sized`.
    """
    import tensorflow as tf

    # With three channels alone it reads every format.
    image = tf.io.decode_image(data, channels=3, expand_animations=False)
    image = tf.cast(tf.ensure_shape(image, [None, None, 3]), tf.float32) / 255
    if channels == 1:
        red, green, blue = tf.split(image, 3, axis=-1)
        # Written so that grey comes out as it went in.
        image = green + _RED * (red - green) + _BLUE * (blue - green)
    return sized(image, size, resize)


def sized(image: Any, size: Size | None, resize: bool = False) -> Any:
    """An image, float32 [height, width, channels], of a size, if any: brought to it with `resize`, an error without."""
    import tensorflow as tf

    if size is None:
        return image
    if resize:
        # Without antialiasing, most pixels of a photograph would go unseen when it is made small.
        image = tf.image.resize(image, size, antialias=True)
    return tf.ensure_shape(image, [*size, image.shape[-1]])


def augmenter(options: Mapping[str, float] | bool | None) -> Make | None:
    """A function from an image, float32 [height, width, channels] in [0, 1], and a seed, int32 [2], to a varied image.

    `flip` mirrors every other image left to right; `shift` moves it by up to that share of its height and width, and
    what comes in is black; `brightness` is added, up to so much either way; `contrast` stretches around the mean, by up
    to so much either way. True takes all of them, None, False, or all at 0, gives None. Raises `DataError`.
    """
    chosen = augmentation(options)
    shift, brightness, contrast = (float(chosen.get(name, 0)) for name in ("shift", "brightness", "contrast"))

    def vary(image: Any, seed: Any) -> Any:
        import tensorflow as tf

        seeds = tf.unstack(tf.random.split(seed, 4))
        if chosen.get("flip"):
            image = tf.image.stateless_random_flip_left_right(image, seeds[0])
        if shift:
            shape = tf.shape(image)
            height, width, _ = tf.unstack(tf.cast(tf.round(shift * tf.cast(shape, tf.float32)), tf.int32))
            padded = tf.pad(image, [[height, height], [width, width], [0, 0]])
            image = tf.ensure_shape(tf.image.stateless_random_crop(padded, shape, seeds[1]), image.shape)
        if contrast:
            image = tf.image.stateless_random_contrast(image, 1 - contrast, 1 + contrast, seeds[2])
        if brightness:
            image = tf.image.stateless_random_brightness(image, brightness, seeds[3])
        return tf.clip_by_value(image, 0, 1)

    return vary if any(chosen.values()) else None


def fault(data: bytes, size: Size | None = None) -> str | None:
    """Returns what is wrong with an encoded image: it is none, cut off, of another size, or a PNG with flipped bits."""
    from PIL import Image

    if not data:
        return "is empty"
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            image.verify()
        # An image that was verified cannot be read any more.
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            image.load()
            kind, mode, (width, height) = str(image.format), image.mode, image.size
    except Exception as error:  # each format has errors of its own
        return f"is no PNG, JPEG, GIF or BMP that can be read ({str(error).partition(' <_io')[0]})"
    if _END.get(kind, b"") not in data:
        return CUT_OFF
    if kind == "BMP":
        start, bits, packed = (int.from_bytes(data[place], "little") for place in (_BMP_START, _BMP_BITS, _BMP_PACKED))
        if mode not in ("L", "RGB", "RGBA") or bits not in (8, 24, 32) or packed not in (0, 3):
            return UNREAD_BMP
        # Rows are filled up to four bytes.
        if len(data) < start + (width * bits + 31) // 32 * 4 * height:
            return CUT_OFF
    if size is not None and (height, width) != tuple(size):
        offer = f"data.build.image_size=[{size[0]},{size[1]}] brings all to one size"
        return f"is {height}x{width} pixels, not {size[0]}x{size[1]} ({offer})"
    return None

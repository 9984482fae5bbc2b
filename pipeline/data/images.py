"""Turns a folder of images, one folder inside it for each class, into examples that are decoded while they are read."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.data import folders, pictures
from pipeline.data.arrays import split
from pipeline.data.errors import DataError, expect_path
from pipeline.data.examples import Broken, Examples, Leaf, share_of
from pipeline.data.folders import PICTURES
from pipeline.data.needed import check_image, class_names

if TYPE_CHECKING:
    import tensorflow as tf

Listed: TypeAlias = tuple[NDArray[np.str_], NDArray[np.int32]]
"""The files of images, absolute, and the number of each one's class."""

# How the names of images end that are of another format, or that nothing here looks for.
UNREAD = (
    ".webp", ".jfif", ".jpe", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jp2", ".ppm", ".pgm", ".pnm", ".tga",
    ".dcm", ".svg", ".ico",
)  # fmt: skip
# A BMP has its bits a pixel in this byte; from so many on it has no palette.
_BMP_BITS_AT, _BMP_BITS = 28, 24


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
    have that of the first. `augment` varies those that train: see `pictures.augmenter`. Files are read when they are
    trained on. Raises `DataError`.
    """
    check_image("images", channels, image_size)
    vary = pictures.augmenter(augment)
    root = Path(expect_path("images", path)).absolute()
    chosen = class_names(classes)
    parts, numbers = folders.arranged(root, chosen, validation_path)
    (files, labels), unread = _listed(parts.train, numbers)
    train, held = split(labels, validation_fraction, split_seed)
    if parts.validation is None:
        held_out = files[held], labels[held]
    else:
        known = _known(parts.validation, numbers, chosen, parts.train)
        held_out, others = _listed(parts.validation, known)
        unread += others
        train = np.random.default_rng(split_seed).permutation(len(files))
    size = (image_size[0], image_size[1]) if image_size else _first_size(files, root)
    make = _maker(numbers, size, channels, resize=image_size is not None)
    empty = [name for name, number in numbers.items() if number not in labels]
    flaws = tuple(f"no images ({', '.join(PICTURES)}) of class {name} in {parts.train / name}" for name in empty)
    trained = make((files[train], labels[train]), vary, flaws)
    return dataclasses.replace(trained, notes=(*parts.notes, *unread)), make(held_out, None, ())


def _maker(
    classes: Mapping[str, int], size: pictures.Size, channels: int, resize: bool
) -> Callable[[Listed, pictures.Vary | None, tuple[str, ...]], Examples]:
    to_image = pictures.decoder(channels, size, resize)

    def decode(row: Mapping[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        import tensorflow as tf

        return to_image(tf.io.read_file(row["path"])), row["label"]

    def make(listed: Listed, vary: pictures.Vary | None, flaws: tuple[str, ...]) -> Examples:
        files, labels = listed

        def look(examples: Examples, number: int, shares: int, thorough: bool) -> list[Broken]:
            # To see anything of an image, all of it must be read.
            paths = examples.raw["path"]
            share = share_of(len(paths), number, shares) if thorough else range(0)
            return _broken(paths, share, None if resize else size)

        return Examples(
            raw={"path": files, "label": labels},
            spec=(Leaf((*size, channels), "float32"), Leaf((), "int32")),
            decode=decode,
            augment=(lambda example, seed: (vary(example[0], seed), example[1])) if vary else None,
            num_classes=len(classes),
            class_names=tuple(classes),
            look=look,
            flaws=flaws,
        )

    return make


def _known(folder: Path, classes: Mapping[str, int], chosen: Sequence[str], train: Path) -> dict[str, int]:
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
    paths: list[str] = []
    labels: list[int] = []
    unread = Counter[str]()
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
            head = file.read(_BMP_BITS_AT + 2)
            few = head[:2] == b"BM" and int.from_bytes(head[_BMP_BITS_AT:], "little") < _BMP_BITS
            file.seek(0)
            reason = pictures.fault(file.read()) if few else None
    except OSError:
        # It is found broken like any other file.
        return
    if reason == pictures.UNREAD_BMP:
        expected = "BMP files of 24 or 32 bits a pixel, or grey ones of 8"
        raise DataError(expected, f"{path}, which {reason}", "converting it to PNG")


def _first_size(files: NDArray[np.str_], root: Path) -> pictures.Size:
    from PIL import Image

    for file in files:
        try:
            with Image.open(file, formats=pictures.FORMATS) as image:
                return image.height, image.width
        except Exception:  # each format has errors of its own
            continue
    raise DataError(f"images in {root}", f"{len(files)} files of which none can be read", "another data.path")


def _broken(files: NDArray[np.str_], share: range, size: pictures.Size | None) -> list[Broken]:

    def fault(row: int) -> str | None:
        try:
            return pictures.fault(Path(files[row]).read_bytes(), size)
        except OSError as error:
            return f"cannot be read ({error.strerror or error})"

    with ThreadPoolExecutor() as pool:
        faults = [*zip(share, pool.map(fault, share), strict=True)]
    return [Broken(None, row, 1, str(files[row]), why) for row, why in faults if why]

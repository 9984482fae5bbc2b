"""Refuses arguments of what reads data of one's own with which it would find none, before any are read.

It asks the file system and looks at arguments alone: it takes a moment and no TensorFlow, whatever there is of data.
"""

import difflib
import glob
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.data import arrays, dialect, folders, manifest
from pipeline.data.errors import WHAT, DataError, expect_path, refuse
from pipeline.data.folders import PICTURES

# How the names of files end that are tables; the file of a version that TensorFlow Datasets prepared.
TABLES = (".csv", ".csv.gz", ".parquet")
PREPARED = "features.json"
CHANNELS = (1, 3)
# What `augment=true` means, and the options that there are.
USUAL = {"flip": True, "shift": 0.1, "brightness": 0.1, "contrast": 0.1}
# Those that find data without a path, and those that take a pattern for one.
WITHOUT, PATTERNS = ("text", "tfds"), ("csv", "text")
# The files that a reader takes in a folder, where it does not take all.
ENDINGS = {"images": PICTURES, "csv": TABLES, "numpy": (".npy",)}
# Files of a folder that are looked at before it is left to its reader.
MOST = 10_000
# Tables of a folder whose first rows are looked at.
FIRST_FILES = 20


def expect_data(arguments: Mapping[str, Any]) -> int | None:
    """Refuses a `data.build` with which a reader of ours would find no data; any other function is passed over.

    Returns how many examples it trains on, where its files say so at once.
    """
    package, _, reader = str(arguments["_target_"]).rpartition(".")
    if package != "pipeline.data" or reader not in WHAT:
        return None
    augmentation(arguments.get("augment"))
    if "channels" in arguments and (arguments["channels"] is not None or reader == "images"):
        check_image(reader, arguments["channels"], arguments.get("image_size"))
    split = {name: arguments[name] for name in ("validation_fraction", "split_seed") if name in arguments}
    if reader != "text" and "validation_fraction" in split:
        arrays.check_split(**{"split_seed": 0, **split})
    path = arguments.get("path")
    if path is None and reader in WITHOUT:
        return None
    location = expect_path(reader, path)
    if "://" in location:
        return None
    if reader == "tfrecord":
        return manifest.load(location).examples(manifest.TRAIN)
    _expect_files(reader, location)
    if reader == "images":
        folders.arranged(location, arguments.get("classes"), arguments.get("validation_path"))
    if reader == "csv":
        written = [arguments.get(name) for name in ("header", "separator", "decimal", "encoding")]
        for file in table_files(location)[:FIRST_FILES]:
            if not file.lower().endswith(".parquet"):
                dialect.find(file, *written)
    return arrays.training_examples(location, **split) if reader == "numpy" else None


def may_be_few(arguments: Mapping[str, Any], least: int) -> bool:
    """True if there are so few images or rows of tables that fewer than `least` may train; False of other data."""
    path, target = str(arguments["path"]), str(arguments["_target_"])
    if target not in ("pipeline.data.images", "pipeline.data.csv") or "://" in path:
        return False
    # Of each class that has two, at least half of this share trains: see `split`.
    enough = math.ceil(2 * least / (1 - float(arguments.get("validation_fraction", 0.2))))
    if target.endswith("images"):
        parts, _ = folders.arranged(path, arguments.get("classes"), arguments.get("validation_path"))
        files = folders.files_below(parts.train, PICTURES)
        return sum(1 for _ in itertools.islice(files, enough)) < enough
    rows = 0
    for file in folders.divided(path, table_files(path))[0]:
        if not file.lower().endswith(".parquet"):
            with dialect.opened(file) as lines:
                rows += sum(1 for _ in itertools.islice(lines, enough))
        else:
            from pyarrow import ArrowException, parquet

            try:
                rows += parquet.read_metadata(file).num_rows
            except (OSError, ArrowException):
                # Its reader says what is wrong.
                return True
        if rows >= enough:
            return False
    return True


def _expect_files(reader: str, path: str) -> None:
    what, example = WHAT[reader]
    where = Path(path)
    if not where.exists():
        if not (reader in PATTERNS and glob.has_magic(path) and glob.glob(path)):
            why, near = _absent(where, reader, example)
            raise DataError(f"data.path to be {what}", f"{path}, {why}", f"data.path={near}")
        return
    if not os.access(where, os.R_OK | (os.X_OK if where.is_dir() else 0)):
        instead = "giving yourself permission, or another data.path"
        raise DataError(f"to be able to read {path}", "no permission", instead)
    refuse(
        (where.is_file() and reader in ("images", "tfds"), f"data.path to be {what}", f"{path}, a file",
         f"data.path={where.parent}"),
        (reader == "tfds" and not (where / PREPARED).is_file(), f"data.path to be {what}", f"{path} without {PREPARED}",
         f"data.path={example}"),
    )  # fmt: skip
    if reader == "tfds":
        return
    endings = ENDINGS.get(reader, "") if where.is_dir() or reader == "csv" else ""
    files = [where] if where.is_file() else [*itertools.islice(folders.files_below(where), MOST)]
    if len(files) == MOST or any(file.name.lower().endswith(endings) for file in files):
        return
    received = f"{len(files):,} other{'s' * (len(files) > 1)}" if files else "none"
    what = f"files ({', '.join(endings)})" if endings else "files"
    raise DataError(f"{what} in data.path={path}", received, f"data.path={example}")


def table_files(path: str) -> list[str]:
    """Returns the files of tables at a path, in a folder or of a pattern, by name."""
    where = Path(path)
    if where.is_dir():
        candidates = [str(file) for file in where.iterdir() if not file.name.startswith(".")]
    else:
        candidates = [path] if where.is_file() else glob.glob(path)
    chosen = sorted(file for file in candidates if file.lower().endswith(TABLES))
    if not chosen:
        expected = f"{path} to be or to have files that end in {', '.join(TABLES)}"
        raise DataError(expected, candidates[0] if candidates else "no such file", "data.path=FILE.csv")
    return chosen


def _absent(where: Path, reader: str, example: str) -> tuple[str, object]:
    """Returns what a path lacks, and what to type: a path as a shell would write it, or the nearest name."""
    home = where.expanduser()
    if str(where).startswith("~") and home.exists():
        return "which only a shell takes for a folder of yours", home
    if glob.has_magic(str(where)) and (matches := sorted(glob.glob(str(where)))):
        return f"a pattern, which data={reader} does not take", matches[0]
    parent_folder = next(parent for parent in where.absolute().parents if parent.exists())
    missing = where.absolute().relative_to(parent_folder).parts
    names = os.listdir(parent_folder) if parent_folder.is_dir() and os.access(parent_folder, os.R_OK) else []
    closest = [*difflib.get_close_matches(missing[0], names, 1), *missing[1:]]
    near = Path(*where.parts[: -len(missing)], *closest)
    return f"where there is no {missing[0]} in {parent_folder}", near if closest and near.exists() else example


def check_image(data: str, channels: int, image_size: Sequence[int] | None) -> None:
    """Refuses a number of channels or a size that no image has, in words."""
    pixels = image_size is None or (
        isinstance(image_size, Sequence) and len(image_size) == 2
        and all(type(size) is int and size > 0 for size in image_size)
    )  # fmt: skip
    refuse(
        (channels not in CHANNELS, f"channels of 1 or 3 for data={data}", channels, "data.build.channels=3"),
        (not pixels, f"image_size to be a height and a width in pixels for data={data}", image_size,
         "'data.build.image_size=[32,32]'"),
    )  # fmt: skip


def augmentation(options: Mapping[str, float] | bool | None) -> dict[str, float]:
    """Returns the options of an augmentation. Raises `DataError` for what is none."""
    if options is None or isinstance(options, bool):
        return dict(USUAL) if options else {}
    usual = "'data.build.augment={flip: true, shift: 0.1, brightness: 0.1, contrast: 0.1}'"
    if not isinstance(options, Mapping):
        raise DataError("data.build.augment to be true or keys with values", options, usual)
    unknown, flip = [str(name) for name in options if name not in USUAL], options.get("flip", False)
    refuse(
        (unknown, f"data.build.augment to have {', '.join(USUAL)}", ", ".join(unknown), usual),
        (not isinstance(flip, bool), "data.build.augment.flip to be true or false", flip, usual),
    )
    for name, value in options.items():
        if name != "flip" and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1):
            key = f"data.build.augment.{name}"
            raise DataError(f"{key} to be from 0 to below 1", value, f"{key}=0.1")
    return dict(options)

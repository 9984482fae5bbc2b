"""Finds data at a path, and refuses arguments of what reads data of one's own with which it would find none.

It reads manifests, first rows of tables and saved arrays, and of images the names alone. Folders are parts (training,
validation, test) or classes by what is in them, and only then by their names.
"""

import difflib
import glob
import itertools
import math
import mimetypes
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.data import arrays, dialect, records
from pipeline.data.errors import WHAT, DataError, expect_path, refuse
from pipeline.errors import first_of

# How the names of files end that are pictures.
PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".bmp")
TRAIN, VALIDATION, TEST = "train", "validation", "test"
# Words in the name of a part.
_ROLES = {
    TRAIN: ("train", "training", "trn", "trainset"),
    VALIDATION: ("validation", "valid", "val", "validate", "valset", "dev", "devel", "eval", "evaluation", "holdout"),
    TEST: ("test", "testing", "tst", "testset"),
}
# What systems put beside data, in small letters; what begins with a dot is hidden, and needs no name here.
_SYSTEM = (
    "__macosx", "__pycache__", "@eadir", "$recycle.bin", "system volume information", "lost+found",
    "thumbs.db", "desktop.ini",
)  # fmt: skip
# What a folder has: examples themselves, folders of them, nothing at all, or files that are no examples.
_EXAMPLES, _FOLDERS, _EMPTY, _OTHER = "examples", "folders", "empty", "other"

LAYOUT = "data.path=FOLDER with a folder of images for each class: FOLDER/CLASS/1.png"
# How the names of files end that are tables; the file of a version that TensorFlow Datasets prepared.
TABLES = (".csv", ".csv.gz", ".parquet")
PREPARED = "features.json"
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
        return records.load_manifest(location).examples(records.TRAIN)
    _expect_files(reader, location)
    if reader == "images":
        arranged(location, arguments.get("classes"), arguments.get("validation_path"))
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
        parts, _ = arranged(path, arguments.get("classes"), arguments.get("validation_path"))
        return sum(1 for _ in itertools.islice(files_below(parts.train, PICTURES), enough)) < enough
    rows = 0
    for file in divided(path, table_files(path))[0]:
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
    files = [where] if where.is_file() else [*itertools.islice(files_below(where), MOST)]
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
        (channels not in (1, 3), f"channels of 1 or 3 for data={data}", channels, "data.build.channels=3"),
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


@dataclass(frozen=True)
class Parts:
    """The class folders of each part, None where a share of `train` is held out, and what a user should know."""

    train: Path
    validation: Path | None = None
    notes: tuple[str, ...] = ()


def role(name: str) -> str | None:
    """Returns the part that a name stands for: "train", "validation" or "test"; None where it names none of them.

    >>> [role(name) for name in ("Train", "valid", "seg_test", "TestingSet", "val2017", "cat", "trains", "train-test")]
    ['train', 'validation', 'test', 'test', 'validation', None, None, None]
    """
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
    matches = [part for part, names in _ROLES.items() if words & set(names)]
    return matches[0] if len(matches) == 1 else None


def parts(root: Path, classes: Sequence[str]) -> Parts:
    """Returns the parts in a folder of images; `classes` may name its own. Raises `DataError` for what is ambiguous."""
    kinds = _kinds(root)
    filled = _filled(kinds)
    holders = [name for name in filled if kinds[name] == _FOLDERS]
    trains = [name for name in holders if role(name) == TRAIN]
    if classes and set(classes) <= set(kinds):
        return Parts(root)
    if len(trains) == 1 and all(role(name) in (VALIDATION, TEST) for name in filled if name != trains[0]):
        # What validates is the validation part, else the test part, else none.
        train, notes = trains[0], _left_out(root, kinds)
        validations, tests = ([name for name in holders if role(name) == part] for part in (VALIDATION, TEST))
        for named in (validations, tests):
            if len(named) > 1:
                instead = f"data.path={root / train} data.build.validation_path={root / named[0]}"
                raise DataError(f"one folder to validate on in {root}", " and ".join(named), instead)
        chosen = next(iter((*validations, *tests)), None)
        others = [name for name in filled if name not in (train, chosen)]
        if others or (tests and not validations):
            unread = f"; {' and '.join(others)} {'is' if len(others) == 1 else 'are'} not read" if others else ""
            notes += (f"Of {root}, {train} trains and {chosen or f'a share of {train}'} validates{unread}.",)
        return Parts(_innermost(root / train), None if chosen is None else _innermost(root / chosen), notes)
    if holders and len(filled) == 1:
        inner = parts(root / filled[0], classes)
        return replace(inner, notes=(*_left_out(root, kinds), *inner.notes))
    flat_parts = len(filled) > 1 and not holders and all(map(role, filled))
    # Folders of folders may be parts where one is named so, or the same folders are in several of them.
    if not flat_parts and not any(map(role, holders)):
        below = [name for holder in holders for name, kind in _kinds(root / holder).items() if kind != _OTHER]
        if len(set(below)) == len(below):
            return Parts(root)
    raise _question(root, filled, holders)


def arranged(
    path: str, classes: Sequence[str] | str | None, validation_path: str | None
) -> tuple[Parts, dict[str, int]]:
    """Returns where the classes of each part are, and the classes by name, numbered from 0. Raises `DataError`."""
    root, chosen = Path(path).absolute(), [classes] if isinstance(classes, str) else list(map(str, classes or ()))
    for folder in (root, *([Path(validation_path)] if validation_path else [])):
        if not folder.is_dir():
            received = "a file" if folder.exists() else "no such folder"
            raise DataError(f"{folder} to be a folder of images by class", received, LAYOUT)
    division = parts(root, chosen)
    if validation_path is not None:
        division = replace(division, validation=_innermost(Path(validation_path).absolute()), notes=())
    folder = division.train
    names, notes = class_folders(folder, chosen)
    missing = ", ".join(sorted(set(chosen) - set(names)))
    refuse(
        (missing, f"data.build.classes to be folders in {folder}", missing, "data.build.classes=null, which takes all"),
        (len(names) < 2, f"two or more folders of images in {folder}, one a class",
         f"one, {names[0]}" if names else "none", LAYOUT),
    )  # fmt: skip
    return replace(division, notes=(*division.notes, *notes)), {name: number for number, name in enumerate(names)}


def divided(path: str | None, files: Sequence[str]) -> tuple[Sequence[str], Sequence[str], tuple[str, ...]]:
    """Returns the files that train, and those that validate where all, or their folders, are named as parts; notes."""
    root = Path(path or "")
    names = [Path(file).relative_to(root).parts[0] if root.is_dir() else Path(file).name for file in files]
    roles = [role(name) for name in names]
    if TRAIN not in roles or None in roles or len(set(roles)) < 2:
        return files, (), ()
    held = VALIDATION if VALIDATION in roles else TEST
    train, validation = (
        [file for file, own in zip(files, roles, strict=True) if own == part] for part in (TRAIN, held)
    )
    unread = "; test is not read" if TEST in roles and held != TEST else ""
    return train, validation, (f"Of the files in {path}, those of {TRAIN} train and of {held} validate{unread}.",)


def class_folders(folder: Path, chosen: Sequence[str] = ()) -> tuple[list[str], tuple[str, ...]]:
    """Returns the names of the folders that are classes, sorted, empty ones too, and notes on what is not read."""
    kinds = _kinds(folder)
    if chosen:
        return [name for name in sorted(chosen) if name in kinds], ()
    notes = _left_out(folder, kinds)
    loose = sum(entry.name.lower().endswith(PICTURES) for entry in _visible(folder) if entry.is_file())
    if loose:
        notes += (f"Not read in {folder}, since in no folder of a class: {loose} file{'s' * (loose > 1)}.",)
    if not _filled(kinds):
        return sorted(kinds), ()
    return sorted(name for name, kind in kinds.items() if not _is_no_class(name, kind)), notes


def _innermost(folder: Path) -> Path:
    """The folder of several folders that a folder leads to, through any that hold a single one."""
    kinds = _kinds(folder)
    filled = _filled(kinds)
    return _innermost(folder / filled[0]) if [kinds[name] for name in filled] == [_FOLDERS] else folder


def files_below(folder: Path, suffixes: Sequence[str] = ("",), above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yields the files in a folder and below it that end in `suffixes`, by name; none hidden, no links to `above`."""
    above |= {os.path.realpath(folder)}
    for entry in _visible(folder):
        if entry.is_dir():
            if not entry.is_symlink() or os.path.realpath(entry.path) not in above:
                yield from files_below(Path(entry.path), suffixes, above)
        # A link to a file that is not there is one that cannot be read.
        elif entry.name.lower().endswith(tuple(suffixes)) and (entry.is_file() or entry.is_symlink()):
            yield Path(entry.path)


def _visible(folder: Path, by_systems: bool = False) -> list[os.DirEntry[str]]:
    """The entries of a folder, by name, without what is hidden and what systems put there; or these alone."""
    try:
        with os.scandir(folder) as entries:
            of_kind = [entry for entry in entries if (entry.name.lower() in _SYSTEM) is by_systems]
            return sorted((one for one in of_kind if not one.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        instead = "giving yourself permission, or another data.path"
        raise DataError(f"to be able to read the folder {folder}", error.strerror, instead) from error


def _kinds(folder: Path) -> dict[str, str]:
    return {entry.name: _kind(Path(entry.path)) for entry in _visible(folder) if entry.is_dir()}


def _filled(kinds: dict[str, str]) -> list[str]:
    return [name for name, kind in kinds.items() if kind in (_EXAMPLES, _FOLDERS)]


def _kind(folder: Path) -> str:
    inside = _visible(folder)
    if any(entry.name.lower().endswith(PICTURES) and entry.is_file() for entry in inside):
        return _EXAMPLES
    below = (file for entry in inside if entry.is_dir() for file in files_below(Path(entry.path), PICTURES))
    if next(below, None) is not None:
        return _FOLDERS
    # Images of kinds that are not read make a class that lacks examples, which is told as such.
    kinds = [mimetypes.guess_type(file.name)[0] or "" for file in files_below(folder)]
    return _OTHER if kinds and not any(kind.startswith("image/") for kind in kinds) else _EMPTY


def _is_no_class(name: str, kind: str) -> bool:
    return kind == _OTHER or (kind == _EMPTY and role(name) is not None)


def _question(root: Path, filled: Sequence[str], holders: Sequence[str]) -> DataError:
    named, inner = (first_of(sorted(names), between=", ", last=" and") for names in (filled, holders))
    classes = f"'data.build.classes=[{','.join(sorted(filled))}]', if these are the classes"
    if not holders:
        received = f"{named}, which have images and no folders in them"
        instead = f"{classes}, or moving the images of each class into a folder"
        return DataError(f"folders of classes in {root}, or parts of such folders", received, instead)
    flat = [name for name in filled if name not in holders]
    train = next((name for name in holders if role(name) == TRAIN), None)
    held = next((name for name in holders if role(name) in (VALIDATION, TEST)), None)
    validation = f" data.build.validation_path={root / held}" if held else ""
    if train:
        offer = f"data.path={root / train}{validation}, or {classes}"
    elif held and len(flat) > 1:
        offer = f"'data.build.classes=[{','.join(flat)}]'{validation}"
    else:
        offer = f"{classes}, or data.path={root / holders[0]}, if that has them"
    received = f"{named}, of which {inner} have folders in them"
    return DataError(f"folders of classes in {root}, or train and validation, which have such folders", received, offer)


def _left_out(folder: Path, kinds: dict[str, str]) -> tuple[str, ...]:
    names = [entry.name for entry in _visible(folder, by_systems=True) if entry.is_dir()]
    names += [name for name, kind in kinds.items() if _is_no_class(name, kind)]
    return (f"Not read in {folder}, since without examples: {', '.join(sorted(names))}.",) if names else ()

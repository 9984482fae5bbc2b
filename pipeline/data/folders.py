"""Finds what the folders of a data set are: parts (training, validation, test), classes, or nothing to train on.

By what is in them, and only then by their names. It looks at names of files alone, and reads none.
"""

import mimetypes
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.data.errors import DataError, refuse
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

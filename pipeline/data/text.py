"""Turns text into sequences of tokens that a language model learns to continue: each token's label is the next one."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.data import folders
from pipeline.data.errors import DataError, expect_at_least, refuse
from pipeline.data.examples import Examples, Leaf
from pipeline.data.files import is_remote, read

Tokens: TypeAlias = NDArray[np.int32]

BYTES, CHARACTERS = "bytes", "characters"
# Between two documents, in their text.
_BETWEEN = "\n\n"
# What is not written as itself in the name of a byte.
_PRINTABLE = range(0x20, 0x7F)


def text(
    path: str | None = None, *, tokens: str = BYTES, length: int = 128, validation_fraction: float = 0.1
) -> tuple[Examples, Examples]:
    """Sequences packed one after another: x and y, int32 [length], where y is x one token further.

    `path` is a file of UTF-8 text, a folder of them or a pattern (`books/*.txt`), which are one text in the order of
    their names; None is the reference topics that ship with Python, some 480,000 characters. With `tokens` "bytes"
    there are 256 of them; "characters" are those that occur, in their order. The last `validation_fraction` of the text
    is held out, unless files or folders are named as parts (see `folders.role`); what is left over at the end of a
    part, shorter than `length` and the token after it, is left out. `class_names` has what each token stands for.
    Raises `DataError`.
    """
    refuse((tokens not in (BYTES, CHARACTERS), f"tokens of {BYTES} or {CHARACTERS} for data=text", tokens,
            "data.build.tokens=bytes"))  # fmt: skip
    expect_at_least("text", [("length", length, 1, 128)])
    refuse((not 0 < validation_fraction < 1, "validation_fraction between 0 and 1 for data=text", validation_fraction,
            "data.build.validation_fraction=0.1"))  # fmt: skip
    train_files, held_files, notes = folders.divided(path, [] if path is None else _files(path))
    if path is None:
        if importlib.util.find_spec("pydoc_data") is None:
            raise DataError("Python's reference topics", "a Python without pydoc_data", "data.path=FILE.txt")
        from pydoc_data.topics import topics

        texts = [_BETWEEN.join(topics[name] for name in sorted(topics))]
    else:
        texts = [_BETWEEN.join(map(_document, files)) for files in (train_files, held_files)]
    whole = "".join(texts)
    if tokens == BYTES:
        numbers: Tokens = np.frombuffer(whole.encode(), np.uint8).astype(np.int32)
        names = tuple(chr(byte) if byte in _PRINTABLE else f"\\x{byte:02x}" for byte in range(256))
    else:
        characters, places = np.unique(np.frombuffer(whole.encode("utf-32-le"), np.uint32), return_inverse=True)
        numbers, names = places.astype(np.int32), tuple(map(chr, characters.tolist()))
    if held_files:
        held_out = len(texts[1].encode() if tokens == BYTES else texts[1])
    else:
        held_out = round(len(numbers) * validation_fraction)
    parts = numbers[: len(numbers) - held_out], numbers[len(numbers) - held_out :]
    if min(map(len, parts)) <= length:
        expected = f"text of more than {length} {tokens} to train on and to validate with"
        instead = f"data.build.length={max(min(map(len, parts)) // 2, 1)}, or a longer text"
        raise DataError(expected, f"{len(parts[0]):,} and {len(parts[1]):,}", instead)
    # Sequences that follow on each other, and those a token after them, as views of the same array.
    raw = (
        tuple(part[first : first + (len(part) - 1) // length * length].reshape(-1, length) for first in (0, 1))
        for part in parts
    )
    spec = (Leaf((length,), "int32"),) * 2
    train, validation = (Examples(each, spec, num_classes=len(names), class_names=names) for each in raw)
    return dataclasses.replace(train, notes=notes), validation


def _document(file: str) -> str:
    try:
        return read(file).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        received = f"one that cannot be read so ({error})"
        raise DataError(f"{file} to be a file of UTF-8 text", received, "another data.path") from error


def _files(path: str) -> Sequence[str]:
    if is_remote(path):
        return [path]
    where = Path(path)
    candidates = folders.files_below(where) if where.is_dir() else [where] if where.is_file() else map(Path, glob(path))
    chosen = sorted(str(file) for file in candidates if not file.is_dir() and not file.name.startswith("."))
    if not chosen:
        raise DataError(f"{path} to be or to have files of text", "none", "data.path=FILE.txt")
    return chosen

"""Files by path, on this machine or on any file system that TensorFlow reaches (gs://, s3://, hdfs://).

TensorFlow is imported for the latter alone. Whatever goes wrong is an `OSError`.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO


def is_remote(path: str) -> bool:
    """True if it is an address of another file system.

    >>> is_remote("gs://bucket/folder"), is_remote("folder")
    (True, False)
    """
    return "://" in path


def opened(path: str) -> BinaryIO:
    """The file, open for reading bytes. Raises `OSError`."""
    if not is_remote(path):
        return Path(path).open("rb")
    size_of(path)
    with _gfile() as gfile:
        file: BinaryIO = gfile.GFile(path, "rb")
        return file


def size_of(path: str) -> int:
    """The file's bytes. Raises `OSError`."""
    if not is_remote(path):
        return Path(path).stat().st_size
    with _gfile() as gfile:
        return int(gfile.stat(path).length)


def text_of(path: str) -> str:
    """The file's text. Raises `OSError`."""
    with opened(path) as file:
        return file.read().decode()


def make_folder(path: str) -> None:
    """Makes a folder, and those above it, where it is not there."""
    if not is_remote(path):
        os.makedirs(path, exist_ok=True)
        return
    with _gfile() as gfile:
        gfile.makedirs(path)


def remove(path: str) -> None:
    """Removes a file."""
    if not is_remote(path):
        os.remove(path)
        return
    with _gfile() as gfile:
        gfile.remove(path)


def names(folder: str) -> list[str]:
    """The names of what is in a folder."""
    if not is_remote(folder):
        return os.listdir(folder)
    with _gfile() as gfile:
        files: list[str] = gfile.listdir(folder)
        return files


def read(path: str) -> bytes:
    """A file's bytes."""
    if not is_remote(path):
        return Path(path).read_bytes()
    with _gfile() as gfile, gfile.GFile(path, "rb") as file:
        data: bytes = file.read()
        return data


def write(path: str, fill: Callable[[IO[bytes]], object]) -> None:
    """Writes a file whole or not at all: on a disk under another name first, elsewhere as one object."""
    if is_remote(path):
        with _gfile() as gfile, gfile.GFile(path, "wb") as file:
            fill(file)
        return
    partial = f"{path}.partial"
    try:
        with open(partial, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(partial)
        raise
    folder = os.open(os.path.dirname(path) or ".", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _gfile() -> Iterator[Any]:
    """TensorFlow's file systems; inside, its errors are those of an operating system."""
    try:
        import tensorflow as tf
    except ImportError as error:
        raise OSError("only TensorFlow reaches such an address, and it is not installed") from error
    try:
        yield tf.io.gfile
    except tf.errors.OpError as error:
        raise OSError(error.message) from error

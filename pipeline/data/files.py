"""Files by path, here or, by TensorFlow alone, elsewhere (gs://, s3://, hdfs://). What goes wrong is an `OSError`."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import IO, Any, BinaryIO


def is_remote(path: str) -> bool:
    """True if it is an address of another file system, as gs://bucket/folder."""
    return "://" in path


def opened(path: str) -> BinaryIO:
    """The file, open for reading bytes."""
    with _system(path) as system:
        # Elsewhere, a file that is not there would be opened as well.
        system.stat(path)
        file: BinaryIO = system.GFile(path, "rb")
        return file


def size_of(path: str) -> int:
    """The file's bytes."""
    return int(_call("stat", path).length)


def read(path: str) -> bytes:
    """A file's bytes."""
    with _system(path) as system, system.GFile(path, "rb") as file:
        return bytes(file.read())


def _call(function: str, path: str) -> Any:
    with _system(path) as system:
        return getattr(system, function)(path)


# Makes a folder, and those above it, where it is not there; removes a file; returns the names of what is in a folder.
make_folder, remove, names = (partial(_call, function) for function in ("makedirs", "remove", "listdir"))


def write(path: str, fill: Callable[[IO[bytes]], object]) -> None:
    """Writes a file whole or not at all: on a disk under another name first, elsewhere as one object."""
    if is_remote(path):
        with _system(path) as system, system.GFile(path, "wb") as file:
            fill(file)
        return
    unfinished = f"{path}.partial"
    try:
        with open(unfinished, "wb") as file:
            fill(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.remove(unfinished)
        raise
    _sync_folder(os.path.dirname(path) or ".")


def _sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# This machine's files, by the functions that TensorFlow has for those of others.
_HERE = SimpleNamespace(
    GFile=open,
    stat=lambda path: SimpleNamespace(length=os.stat(path).st_size),
    makedirs=lambda path: os.makedirs(path, exist_ok=True),
    remove=os.remove,
    listdir=os.listdir,
)


@contextlib.contextmanager
def _system(path: str) -> Iterator[Any]:
    """The file system that a path is on; inside, TensorFlow's errors are those of an operating system."""
    if not is_remote(path):
        yield _HERE
        return
    try:
        import tensorflow as tf
    except ImportError as error:
        raise OSError("only TensorFlow reaches such an address, and it is not installed") from error
    try:
        yield tf.io.gfile
    except tf.errors.OpError as error:
        raise OSError(error.message) from error

"""Opens files where they are: on this machine, or on whatever file system TensorFlow reads (gs://, s3://, hdfs://)."""

from pathlib import Path
from typing import BinaryIO


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
    import tensorflow as tf

    size_of(path)
    file: BinaryIO = tf.io.gfile.GFile(path, "rb")
    return file


def size_of(path: str) -> int:
    """The file's bytes. Raises `OSError`."""
    if not is_remote(path):
        return Path(path).stat().st_size
    import tensorflow as tf

    try:
        return int(tf.io.gfile.stat(path).length)
    except tf.errors.OpError as error:
        raise OSError(error.message) from error


def text_of(path: str) -> str:
    """The file's text. Raises `OSError`."""
    with opened(path) as file:
        return file.read().decode()

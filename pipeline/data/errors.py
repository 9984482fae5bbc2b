"""The one error of the data sets, for whatever their user can put right."""

from collections.abc import Iterable
from functools import partial

from pipeline.errors import UserError
from pipeline.errors import refuse as refuse_with

# What each reader finds data in, and what to type as data.path.
WHAT = {
    "images": ("a folder of images by class", "FOLDER"),
    "csv": ("a CSV or Parquet file, a folder or a pattern", "FILE.csv"),
    "numpy": ("an .npz file or a folder of .npy files", "FILE.npz"),
    "text": ("a file of text, a folder or a pattern", "FILE.txt"),
    "tfrecord": ("a folder that `python -m pipeline prepare` filled", "FOLDER"),
    "tfds": ("the folder of a version that TensorFlow Datasets prepared", "FOLDER/mnist/3.0.1"),
}


class DataError(UserError):
    """A data set that is not there, cannot be read, or was asked for what it does not hold."""


refuse = partial(refuse_with, error=DataError)


def expect_at_least(data: str, limits: Iterable[tuple[str, float, float, float]]) -> None:
    """Refuses arguments that are too small, in words. Each limit is (argument, its value, the least, a usual one)."""
    for name, value, least, usual in limits:
        refuse((value < least, f"{name} of at least {least} for data={data}", value, f"data.build.{name}={usual}"))


def expect_path(data: str, path: str | None) -> str:
    """The `path` that was given. Where none was, it says what to give."""
    what, example = WHAT[data]
    refuse((not path, f"data.path to be {what} for data={data}", "none", f"data.path={example}"))
    return path or ""

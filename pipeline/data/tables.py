"""Turns tables, CSV or Parquet files, into examples: a label from one column, numbers from the others."""

from __future__ import annotations

import glob
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.data.errors import DataError, expect_path
from pipeline.data.examples import Broken, Examples, Leaf
from pipeline.data.split import split

if TYPE_CHECKING:
    import pandas

Array: TypeAlias = NDArray[Any]

SUFFIXES = (".csv", ".csv.gz", ".parquet")
# Whole numbers that would be more classes than this, and than there are rows, are none.
_FEW_CLASSES = 1_000


def csv(
    path: str | None = None,
    *,
    label: str | None = None,
    features: Sequence[str] | None = None,
    quantity: bool = False,
    standardize: bool = True,
    validation_fraction: float = 0.2,
    split_seed: int = 0,
) -> tuple[Examples, Examples]:
    """The rows of CSV or Parquet files: x float32 [columns], and y int32, the class, or float32, a quantity.

    `path` is a file, a folder of them or a pattern (`logs/*.csv`); several are one table, in the order of their names.
    The `label` is the last column unless named, `features` all others. Text, and true and false, are classes numbered
    in their order; whole numbers are classes as they are, unless they are said to be a `quantity`, as all other numbers
    are. `standardize` gives each feature the mean 0 and the standard deviation 1 over the rows that train. Missing
    numbers stay NaN, and are named when they are looked for; rows without anything are left out. Raises `DataError`.
    """
    table = _Table(_files(expect_path("csv", path, "a CSV or Parquet file, a folder or a pattern", "FILE.csv")))
    target = table.column(label)
    columns = table.features(features, target)
    x = np.column_stack([table.numbers(name, columns) for name in columns])
    y, names = table.labels(target, quantity)
    are_classes = y.dtype == np.int32
    train, held = split(y if are_classes else np.zeros(len(y)), validation_fraction, split_seed)
    x = _standardized(x, train) if standardize else x.astype(np.float32)
    make = _maker(table, (*columns, target), int(y.max()) + 1 if are_classes else None, names)
    return make(x, y, train), make(x, y, held)


def _maker(
    table: _Table, columns: Sequence[str], num_classes: int | None, names: tuple[str, ...] | None
) -> Callable[[Array, Array, Array], Examples]:
    """A function that makes examples of some rows of a table; `columns` are the features, and last the label."""

    def make(x: Array, y: Array, chosen: Array) -> Examples:
        def look(examples: Examples, number: int, of: int, thorough: bool) -> list[Broken]:
            values = np.column_stack(examples.raw)
            share = range(number * len(values) // of, (number + 1) * len(values) // of)
            wrong = ~np.isfinite(values[share.start : share.stop])
            found = [(share[row], columns[int(wrong[row].argmax())]) for row in np.flatnonzero(wrong.any(axis=1))]
            return [Broken(None, row, 1, table.place(chosen[row]), f"has no number in {name}") for row, name in found]

        return Examples(
            raw=(x[chosen], y[chosen]),
            spec=(Leaf((x.shape[1],), "float32"), Leaf((), y.dtype.name)),
            num_classes=num_classes,
            class_names=names,
            look=look,
        )

    return make


def _standardized(x: Array, train: Array) -> Array:
    """Each column with the mean and the standard deviation of its rows that train taken out.

    >>> _standardized(np.array([[1.0, 7.0], [3.0, 7.0], [5.0, 8.0]]), np.array([0, 1])).tolist()
    [[-1.0, 0.0], [1.0, 0.0], [3.0, 1.0]]
    """
    known = np.ma.masked_invalid(x[train].astype(np.float64))
    mean, deviation = (np.ma.filled(statistic, 0.0) for statistic in (known.mean(axis=0), known.std(axis=0)))
    # A column of one value is left as it is, but for its mean.
    return ((x - mean) / np.where(deviation > 0, deviation, 1)).astype(np.float32)


class _Table:
    """The rows of some files, and where each of them was."""

    def __init__(self, paths: Sequence[str]) -> None:
        import pandas

        self._paths = paths
        frames = [_read(path) for path in paths]
        names = list(frames[0].columns)
        for path, frame in zip(paths, frames, strict=True):
            if set(frame.columns) != set(names):
                differ = ", ".join(sorted(set(map(str, frame.columns)) ^ set(map(str, names))))
                raise DataError(
                    f"Expected files of the same columns, received {paths[0]} and {path}, of which only one has "
                    f"{differ}. Try a data.path of files that have all."
                )
        self._frame = pandas.concat(frames, ignore_index=True)[names]
        # Which file each row is from, and its number there.
        self._file = np.repeat(np.arange(len(frames)), [len(frame) for frame in frames])
        self._row = np.concatenate([frame.index.to_numpy() for frame in frames])
        if not len(self._frame):
            raise DataError(f"Expected rows in {', '.join(paths)}, received none. Try another data.path.")

    def place(self, row: int) -> str:
        """Where a row was: its file, and its line there, below that of the names; or its number in Parquet, from 0."""
        path, number = self._paths[self._file[row]], int(self._row[row])
        return f"{path} row {number}" if path.endswith(".parquet") else f"{path} line {number + 2}"

    def column(self, name: str | None) -> str:
        """The column of labels: the last, or the one that is named."""
        names = list(map(str, self._frame.columns))
        if name is not None and name not in names:
            raise DataError(
                f"Expected data.build.label to be a column of {self._paths[0]} ({', '.join(names)}), received {name}. "
                f"Try data.build.label={names[-1]}."
            )
        return names[-1] if name is None else name

    def features(self, chosen: Sequence[str] | None, label: str) -> list[str]:
        """The columns of features: all but the label, or those that are named."""
        others = [name for name in map(str, self._frame.columns) if name != label]
        unknown = [name for name in chosen or () if name not in others]
        if unknown or not others or (chosen is not None and not chosen):
            received = ", ".join(map(str, unknown)) or "none"
            offer = f"Try 'data.build.features=[{','.join(others)}]'." if others else "Try another data.path."
            raise DataError(
                f"Expected data.build.features to be columns of {self._paths[0]} besides the label {label} "
                f"({', '.join(others) or 'there are none'}), received {received}. {offer}"
            )
        return others if chosen is None else list(chosen)

    def numbers(self, name: str, chosen: Sequence[str]) -> Array:
        """A column of features, float64, with NaN where there is no number."""
        import pandas

        values = self._frame[name]
        if _is_number(values):
            return np.asarray(values.to_numpy(np.float64, na_value=np.nan))
        wrong = values[values.notna() & pandas.to_numeric(values.astype(object), errors="coerce").isna()]
        row = int((wrong if len(wrong) else values).index[0])
        numeric = [other for other in chosen if _is_number(self._frame[other])]
        offer = f"'data.build.features=[{','.join(numeric)}]'" if numeric else "another column"
        raise DataError(
            f"Expected numbers in column {name}, received {str(values[row])!r} in {self.place(row)}. "
            f"Try {offer}, or a number in its place."
        )

    def labels(self, name: str, quantity: bool) -> tuple[Array, tuple[str, ...] | None]:
        """The labels, int32 [rows] of classes or float32 [rows] of quantities, and what classes are called."""
        from pandas.api import types

        values = self._frame[name]
        if quantity or types.is_float_dtype(values):
            return self.numbers(name, [name]).astype(np.float32), None
        if values.isna().any():
            place = self.place(int(np.flatnonzero(values.isna())[0]))
            raise DataError(
                f"Expected a class in column {name} of every row, received none in {place}. Try removing that row."
            )
        if not types.is_integer_dtype(values):
            classes, numbers = np.unique(values.astype(str).to_numpy(object), return_inverse=True)
            return numbers.astype(np.int32), tuple(map(str, classes))
        least, most = int(values.min()), int(values.max())
        if least < 0 or most >= max(len(values), _FEW_CLASSES):
            raise DataError(
                f"Expected classes from 0 in column {name}, fewer than rows, received {least if least < 0 else most}. "
                f"Try data.build.quantity=true, or data.build.label=COLUMN."
            )
        return values.to_numpy(np.int32), None


def _is_number(values: pandas.Series) -> bool:
    from pandas.api import types

    return bool(types.is_numeric_dtype(values) or types.is_bool_dtype(values))


def _read(path: str) -> pandas.DataFrame:
    """A file's rows that hold anything, each under its number in the file, from 0."""
    import pandas

    try:
        if path.endswith(".parquet"):
            return pandas.read_parquet(path, dtype_backend="numpy_nullable").reset_index(drop=True)
        with warnings.catch_warnings():
            # Of rows that are longer than the line of names.
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            frame = pandas.read_csv(
                path, index_col=False, skip_blank_lines=False, dtype_backend="numpy_nullable", low_memory=False
            )
    except Exception as error:  # pandas and pyarrow have errors of their own, many of them
        reason = str(error).strip().removeprefix("Error tokenizing data. C error: ").rstrip(".")
        raise DataError(
            f"Expected {path} to be a table with a name above each column, received a file that cannot be read so "
            f"({reason}). Try putting it right, or another data.path."
        ) from error
    if all(_is_text_of_number(name) for name in frame.columns):
        raise DataError(
            f"Expected a first line of names in {path}, received numbers ({', '.join(frame.columns)}). "
            f"Try adding a line such as a,b,label."
        )
    return frame.dropna(how="all")


def _is_text_of_number(name: str) -> bool:
    try:
        float(name)
    except ValueError:
        return False
    return True


def _files(path: str) -> list[str]:
    """The files at a path, in a folder or of a pattern, by name."""
    where = Path(path)
    if where.is_dir():
        found = [str(file) for file in where.iterdir() if not file.name.startswith(".")]
    else:
        found = [path] if where.is_file() else glob.glob(path)
    chosen = sorted(file for file in found if file.endswith(SUFFIXES))
    if not chosen:
        received = f"{found[0]}" if found else "no such file"
        raise DataError(
            f"Expected {path} to be or to have files that end in {', '.join(SUFFIXES)}, received {received}. "
            f"Try data.path=FILE.csv."
        )
    return chosen

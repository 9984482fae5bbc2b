"""Turns files of rows into examples: CSV or Parquet tables, and arrays that NumPy saved."""

import dataclasses
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pipeline.data import arrays, dialect, folders
from pipeline.data.arrays import EXACT, FEW_CLASSES, FEW_ROWS, Array, Part, split
from pipeline.data.dialect import Dialect
from pipeline.data.errors import DataError, expect_path
from pipeline.data.examples import Broken, Examples, Leaf, look_at_rows, rows, share_of
from pipeline.data.folders import table_files

if TYPE_CHECKING:
    import pandas

# Columns that number the rows: whatever their whole numbers are, and where these count from 0 or 1.
_INDEX = ("index", "level_0")
_COUNTS = ("id", "row", "row_id", "rowid", "row_number", "rownames", "#")


def csv(
    path: str | None = None,
    *,
    label: str | None = None,
    features: Sequence[str] | None = None,
    quantity: bool = False,
    standardize: bool = True,
    validation_fraction: float = 0.2,
    split_seed: int = 0,
    header: bool | None = None,
    separator: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
) -> tuple[Examples, Examples]:
    """The rows of CSV or Parquet files: x float32 [columns], and y int32, the class, or float32, a quantity.

    `path` is a file, a folder of them or a pattern (`logs/*.csv`); several are one table, in the order of their names.
    The `label` is the last column unless named, `features` all others but row numbers. Text, and true and false, are
    classes numbered in their order; whole numbers are classes as they are, unless they are said to be a `quantity`, as
    all other numbers are. `standardize` gives each feature the mean 0 and the standard deviation 1 over the rows that
    train. Missing numbers stay NaN, and are named when they are looked for; rows without anything are left out. Files
    that are all named as parts, train.csv and test.csv, are these; else a part of each class is held out.

    How a CSV file is written is found by its first rows where it is not given, see `dialect.find`. Raises `DataError`.
    """
    location = expect_path("csv", path)
    trains, validates, file_notes = folders.divided(location, table_files(location))
    paths = [*trains, *validates]
    how = header, separator, decimal, encoding
    dialects = [None if each.lower().endswith(".parquet") else dialect.find(each, *how) for each in paths]
    table = _Table(paths, dialects, None if label is None else str(label))
    columns = table.features(None if features is None else list(map(str, features)))
    x = np.column_stack([table.numbers(name, columns) for name in columns])
    y, names = table.labels(quantity)
    are_classes = y.dtype == np.int32
    train, held = split(y if are_classes else np.zeros(len(y)), validation_fraction, split_seed)
    if validates:
        train, held = table.rows_of(range(len(trains)), split_seed), table.rows_of(range(len(trains), len(paths)), 0)
    if standardize:
        train_rows = np.ma.masked_invalid(x[train])
        mean, deviation = (np.ma.filled(each(axis=0), 0.0) for each in (train_rows.mean, train_rows.std))
        # A column of one value is left as it is, but for its mean.
        x = (x - mean) / np.where(deviation > 0, deviation, 1)
    examples = Examples(
        raw=(x.astype(np.float32), y), spec=(Leaf((len(columns),), "float32"), Leaf((), y.dtype.name)),
        num_classes=int(y.max()) + 1 if are_classes else None, class_names=names,
    )  # fmt: skip
    parts = [
        dataclasses.replace(
            examples, raw=rows(examples.raw, chosen), look=partial(_look, table, (*columns, table.label), chosen)
        )
        for chosen in (train, held)
    ]
    present = set(y[train].tolist() if names else ())
    flaws = tuple(f"no training examples of class {name}" for at, name in enumerate(names or ()) if at not in present)
    notes = (*file_notes, *table.notes(columns, features is None, rounds=not standardize))
    return dataclasses.replace(parts[0], notes=notes, flaws=flaws), parts[1]


def _look(
    table: "_Table", columns: Sequence[str], chosen: Array, examples: Examples, number: int, shares: int, thorough: bool
) -> list[Broken]:
    values = np.column_stack(examples.raw)
    share = share_of(len(values), number, shares)
    wrong = ~np.isfinite(values[share.start : share.stop])
    flaws = [(share[row], columns[int(wrong[row].argmax())]) for row in np.flatnonzero(wrong.any(axis=1))]
    return [Broken(None, row, 1, table.place(chosen[row]), f"has no number in {name}") for row, name in flaws]


class _Table:
    def __init__(self, paths: Sequence[str], dialects: Sequence[Dialect | None], label: str | None) -> None:
        import pandas

        self._paths, self._dialects = paths, dialects
        frames = [_read(path, written, label) for path, written in zip(paths, dialects, strict=True)]
        names = list(frames[0].columns)
        for path, frame in zip(paths, frames, strict=True):
            if set(frame.columns) != set(names):
                differ = ", ".join(sorted(set(map(str, frame.columns)) ^ set(map(str, names))))
                received = f"{paths[0]} and {path}, of which only one has {differ}"
                raise DataError("files of the same columns", received, "a data.path of files that have all")
        self._frame = pandas.concat(frames, ignore_index=True)[names]
        # Which file each row is from, and its number there.
        self._file = np.repeat(np.arange(len(frames)), [len(frame) for frame in frames])
        self._row = np.concatenate([frame.index.to_numpy() for frame in frames])
        self._lines: dict[int, list[int]] = {}
        if not len(self._frame):
            raise DataError(f"rows in {', '.join(paths)}", "none", "another data.path")
        self.label = _label(paths[0], list(map(str, names)), label)
        index = [name for name in names if all(name in frame.attrs.get("index", ()) for frame in frames)]
        # Of several files each numbers its own rows.
        numbering = [name for name in names if all(_numbers_rows(name, frame[name]) for frame in frames)]
        self._numbering = dict.fromkeys([*index, *numbering], "only numbers the rows") | dict.fromkeys(
            index, "is its index"
        )

    def rows_of(self, files: range, seed: int) -> Array:
        """Returns the rows of some files, shuffled."""
        return np.random.default_rng(seed).permutation(np.flatnonzero(np.isin(self._file, files)))

    def place(self, row: int) -> str:
        """Returns where a row was: its file, and the line there that it begins in; or its number in Parquet, from 0."""
        number, at = int(self._file[row]), int(self._row[row])
        path, written = self._paths[number], self._dialects[number]
        if written is None:
            return f"{path} row {at}"
        if number not in self._lines:
            self._lines[number] = dialect.lines(path, written)
        return f"{path} line {self._lines[number][at]}"

    def features(self, chosen: Sequence[str] | None) -> list[str]:
        """Returns the columns of features: those that are named, or all but the label and row numbers."""
        every = [name for name in map(str, self._frame.columns) if name != self.label]
        others = [name for name in every if name not in self._numbering] or every
        unknown = [name for name in chosen or () if name not in every]
        if chosen is None and not unknown:
            unknown = [f"no name above {name.replace('Unnamed: ', 'column ')}" for name in others if _is_unnamed(name)]
            others = [name for name in others if not _is_unnamed(name)]
        if unknown or not others or (chosen is not None and not chosen):
            expected = f"data.build.features to be columns of {self._paths[0]} besides the label {self.label}"
            instead = f"'data.build.features=[{','.join(others)}]'" if others else "another data.path"
            named = ", ".join(others) or "there are none"
            raise DataError(f"{expected} ({named})", ", ".join(unknown) or "none", instead)
        return others if chosen is None else list(chosen)

    def notes(self, features: Sequence[str], automatic: bool, rounds: bool) -> tuple[str, ...]:
        """Returns what a person should know of how these features were read and, where nobody named them, found."""
        dialects = {path: each for path, each in zip(self._paths, self._dialects, strict=True) if each is not None}
        unnamed = (path for path, each in dialects.items() if not each.named)
        remarks = [
            (name, f"{words}, and is no feature.")
            for name, words in self._numbering.items()
            if automatic and name not in features and name != self.label
        ]
        for name in features if rounds else ():
            if self._frame[name].dtype.kind in "iu" and self._frame[name].abs().max() > EXACT:
                instead = "If they are ids, number them from 0, or train on them with data=numpy, which keeps them."
                remarks.append((name, f"has whole numbers above 2^24, which float32 rounds. {instead}"))
        for name in sorted({name for each in dialects.values() for name in each.codes if name in features}):
            instead = "If they are codes, leave it out of data.build.features."
            remarks.append((name, f"has leading zeros, and is read as numbers. {instead}"))
        return (
            *(f"The first line of {path} is a row: columns are called by their places." for path in unnamed),
            *(f"Column {name} of {self._paths[0]} {words}" for name, words in remarks),
        )

    def numbers(self, name: str, chosen: Sequence[str]) -> Array:
        """Returns a column of features, float64, with NaN where there is no number."""
        values = self._frame[name]
        if not _is_number(values):
            import pandas

            wrong = values[values.notna() & pandas.to_numeric(values.astype(object), errors="coerce").isna()]
            row = int((wrong if len(wrong) else values).index[0])
            numeric = [other for other in chosen if _is_number(self._frame[other])]
            offer = f"'data.build.features=[{','.join(numeric)}]'" if numeric else "another column"
            if dialect.is_ambiguous(str(values[row])):
                offer = "data.build.decimal=comma, data.build.decimal=point"
            received = f"{str(values[row])!r} in {self.place(row)}"
            raise DataError(f"numbers in column {name}", received, f"{offer}, or a number in its place")
        numbers = np.asarray(values.to_numpy(np.float64, na_value=np.nan))
        over = np.flatnonzero(np.isfinite(numbers) & (np.abs(numbers) > np.finfo(np.float32).max))
        if len(over):
            received = f"{numbers[over[0]]} in {self.place(int(over[0]))}"
            instead = "another unit, or data.build.features without it"
            raise DataError(f"numbers in column {name} that float32 holds", received, instead)
        return numbers

    def labels(self, quantity: bool) -> tuple[Array, tuple[str, ...] | None]:
        """Returns the labels, int32 [rows] of classes or float32 [rows] of quantities, and what classes are called."""
        name, values = self.label, self._frame[self.label]
        if quantity or values.dtype.kind == "f":
            return self.numbers(name, [name]).astype(np.float32), None
        if values.isna().any():
            place = self.place(int(np.flatnonzero(values.isna())[0]))
            raise DataError(f"a class in column {name} of every row", f"none in {place}", "removing that row")
        if values.dtype.kind not in "iu":
            classes, numbers = np.unique(values.astype(str).to_numpy(object), return_inverse=True)
            if len(values) > FEW_ROWS and len(classes) == len(values):
                expected, received = f"classes in column {name}, fewer than rows", "another text in each row"
                raise DataError(expected, received, "data.build.label=COLUMN")
            return numbers.astype(np.int32), tuple(map(str, classes))
        least, greatest = int(values.min()), int(values.max())
        if least < 0 or greatest >= max(len(values), FEW_CLASSES):
            wrong, instead = least if least < 0 else greatest, "data.build.quantity=true, or data.build.label=COLUMN"
            raise DataError(f"classes from 0 in column {name}, fewer than rows", wrong, instead)
        return values.to_numpy(np.int32), None


def _label(path: str, names: Sequence[str], label: str | None) -> str:
    if label is not None and label not in names:
        expected = f"data.build.label to be a column of {path} ({', '.join(names)})"
        raise DataError(expected, label, f"data.build.label={names[-1]}")
    return label or next((name for name in reversed(names) if not _is_unnamed(name)), names[-1])


def _is_number(values: "pandas.Series") -> bool:
    return values.dtype.kind in "iufb"


def _is_unnamed(name: str) -> bool:
    return name.startswith("Unnamed: ")


def _numbers_rows(name: str, values: "pandas.Series") -> bool:
    """True if a column only numbers or names the rows, as pandas and R write them beside a table."""
    if name.startswith("Unnamed: 0"):
        return True
    if values.dtype.kind not in "iu" or not values.is_unique or values.isna().any():
        return False
    steps = values.to_numpy(np.int64)
    counts = len(steps) > 1 and steps[0] in (0, 1) and bool((np.diff(steps) == 1).all())
    return name.lower() in _INDEX or (counts and name.lower() in _COUNTS)


def _read(path: str, written: Dialect | None, label: str | None) -> "pandas.DataFrame":
    """Returns a file's rows that hold anything, each under its number in the file, from 0."""
    import pandas

    try:
        if written is None:
            frame = pandas.read_parquet(path, dtype_backend="numpy_nullable")
            index = [name for name in frame.index.names if name is not None and name not in frame.columns]
            # What databases write as decimals are numbers, and an index is columns too.
            frame = frame.reset_index(index).reset_index(drop=True).apply(_without_decimals)
            frame.attrs["index"] = index
            return frame
        target = _label(path, written.names, label)
        # What stands for a missing number may be the name of a class: NA, None, null.
        missing = {name: [""] if name == target else list(dialect.MISSING) for name in written.names}
        with warnings.catch_warnings():
            # Of rows that are longer than the line of names.
            warnings.simplefilter("error", pandas.errors.ParserWarning)
            frame = pandas.read_csv(
                path, sep=written.separator, header=0 if written.named else None, names=list(written.names),
                skiprows=written.skipped, encoding=written.encoding, decimal=written.decimal or ".",
                dtype={target: str}, na_values=missing, keep_default_na=False, index_col=False, skip_blank_lines=False,
                skipinitialspace=True, dtype_backend="numpy_nullable", low_memory=False,
            )  # fmt: skip
    except DataError:
        raise
    except Exception as error:  # pandas and pyarrow have errors of their own, many of them
        message = str(error).strip().removeprefix("Error tokenizing data. C error: ").rstrip(".")
        reason = (None if written is None else dialect.too_long(path, written)) or message
        expected = f"{path} to be a table with a name above each column"
        received = f"a file that cannot be read so ({reason})"
        raise DataError(expected, received, "putting it right, or another data.path") from error
    for name in written.names:
        if not _is_number(frame[name]):
            frame[name] = _converted(frame[name], path, written, name == target)
    empty = [name for name in frame.columns if _is_unnamed(name) and frame[name].isna().all()]
    return frame.drop(columns=empty).dropna(how="all")


def _without_decimals(values: "pandas.Series") -> "pandas.Series":
    from pandas.api import types

    if types.infer_dtype(values, skipna=True) != "decimal":
        return values
    whole = all(value == int(value) and abs(value) < 2**63 for value in values.dropna())
    return values.astype("Int64" if whole else "Float64")


def _converted(values: "pandas.Series", path: str, written: Dialect, is_label: bool) -> "pandas.Series":
    """Returns a column of text as numbers where all of it are numbers as the file writes them, else as it is."""
    import pandas

    values = values.str.strip()
    texts = values[values.notna() & ~values.isin(dialect.MISSING)]
    plain = pandas.to_numeric(texts.astype(object), errors="coerce")
    is_plain = written.decimal != "," and plain.notna().all()
    numbers = plain.tolist() if is_plain else dialect.numbers(texts, written.decimal or ".")
    if not len(texts) and values.nunique() < 2:
        return values.where(values.isna(), None)
    if not len(texts) or numbers is None:
        lower = values.str.lower()
        are_flags = is_label and lower.isin(("true", "false")).all()
        return (lower == "true").astype("boolean") if are_flags else values.replace("", None)
    unsaid = [] if is_plain or written.decimal else list(filter(dialect.is_ambiguous, texts))
    if unsaid and is_label:
        instead = "data.build.decimal=comma, or data.build.decimal=point, where thousands have a comma"
        raise DataError(f"a decimal sign that the numbers in {path} tell", unsaid[0], instead)
    if unsaid or (is_label and texts.str.fullmatch(dialect.CODE.pattern).any()):
        return values
    whole = texts.str.fullmatch(r"[+-]?\d{1,18}").all()
    return pandas.Series(numbers, texts.index).reindex(values.index).astype("Int64" if whole else "Float64")


def numpy(
    path: str | None = None, *, validation_fraction: float = 0.2, split_seed: int = 0, keep_dtype: bool = False
) -> tuple[Part | Examples, Part | Examples]:
    """The arrays of an .npz file, or of a folder of .npy files: x float32 [examples, ...], y int32 or float32.

    They are `x_train` and `y_train`, or `x` and `y`; with `x_validation` and `y_validation` (or `_val`, `_test`), or a
    part of them is held out, the same fraction of each class where y is classes. An x of bytes (uint8) is taken for
    images, divided by 255, and where it is [examples, height, width] it gets a channel; with `keep_dtype`, x is as it
    was saved. Whole numbers that int32, or for x float32, does not hold are int64. A y of text is classes, numbered in
    their order. Raises `DataError`.
    """
    where = Path(expect_path("numpy", path))
    x, y = arrays.saved_part(where, arrays.TRAIN)
    if arrays.saved_ending(where, arrays.VALIDATION) is not None:
        held_out = arrays.saved_part(where, arrays.VALIDATION)
    else:
        train, validation = arrays.split_saved(y, validation_fraction, split_seed)
        (x, y), held_out = (x[train], y[train]), (x[validation], y[validation])
    for name, ours, theirs in zip(("x", "y"), (x, y), held_out, strict=True):
        one, other = (f"{list(array.shape[1:])} {array.dtype}" for array in (ours, theirs))
        if ours.shape[1:] != theirs.shape[1:] or ours.dtype.kind != theirs.dtype.kind:
            received = f"{name} of {one} to train and of {other} to validate"
            raise DataError(f"examples of one shape and type in {where}", received, "saving both anew")
    inputs = _inputs(where, [x, held_out[0]], keep_dtype)
    labels, names = _labels(where, [y, held_out[1]])
    parts = list(zip(inputs, labels, strict=True))
    if names is None:
        return parts[0], parts[1]
    present = set(parts[0][1].tolist())
    flaws = tuple(f"no training examples of class {name}" for at, name in enumerate(names) if at not in present)
    # As they were saved, x of one part may be wider than that of the other.
    specs = [tuple(Leaf(array.shape[1:], array.dtype.name) for array in part) for part in parts]
    part = Examples(parts[0], specs[0], num_classes=len(names), class_names=names, look=look_at_rows, flaws=flaws)
    return part, dataclasses.replace(part, raw=parts[1], spec=specs[1], flaws=())


def _inputs(where: Path, parts: list[Array], keep_dtype: bool) -> list[Array]:
    x = parts[0]
    if x.dtype.kind not in "fiub":
        received, instead = f"x of type {x.dtype}", "x.astype('float32')"
        if x.dtype.kind in "US":
            received, instead = "x of text", "the places of words in a vocabulary, or counts of them"
        raise DataError(f"numbers in {where}", received, instead)
    if keep_dtype:
        return parts
    if x.dtype != np.uint8:
        return arrays.features(parts, f"x of {where}")
    return [np.divide(array[..., None] if x.ndim == 3 else array, 255, dtype=np.float32) for array in parts]


def _labels(where: Path, parts: list[Array]) -> tuple[list[Array], tuple[str, ...] | None]:
    kind = parts[0].dtype.kind
    if kind in "US" and parts[0].ndim == 1:
        try:
            texts = [array.astype(str) if kind == "U" else np.char.decode(array, "utf-8") for array in parts]
        except UnicodeDecodeError as error:
            raise DataError(f"y of {where} in UTF-8", error, "y.astype(str)") from error
        names = np.unique(np.concatenate(texts))
        return [np.searchsorted(names, text).astype(np.int32) for text in texts], tuple(names.tolist())
    if kind not in "fiub":
        received = f"y of type {parts[0].dtype} and shape {list(parts[0].shape[1:])} for each"
        instead = "numpy.unique(y, return_inverse=True)[1].reshape(y.shape), which numbers text"
        raise DataError(f"one class or number for each example in {where}", received, instead)
    if kind == "f":
        return [arrays.floats(array, np.float32, f"y of {where}") for array in parts], None
    return arrays.whole(parts, f"y of {where}"), None

"""Tables, as CSV and Parquet: however they are written, and what cannot be trained on."""

import io
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from own_files import TABLE, Array, broken, made, write

from pipeline.data import DataError, csv
from pipeline.data.examples import Examples


def table(part: Examples) -> Array:
    """The rows of a part, x and y together, sorted."""
    rows = np.column_stack(part.raw)
    return rows[np.lexsort(rows.T[::-1])]


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "T.CSV.GZ", "t.parquet"])
def test_a_table_is_numbers_and_classes(tmp_path: Path, name: str) -> None:
    frame = pd.read_csv(io.StringIO(TABLE))
    path = str(tmp_path / name)
    frame.to_parquet(path) if name.endswith("parquet") else frame.to_csv(path, index=False)
    train, validation = csv(path, standardize=False)
    assert (train.num_classes, train.class_names, train.count, validation.count) == (2, ("a", "b"), 16, 4)
    assert np.bincount(validation.raw[1]).tolist() == [2, 2]
    numbers = np.arange(20)
    wanted = np.column_stack([numbers, numbers**2 / 4, numbers % 3 == 0, numbers % 2])
    both = np.concatenate([table(train), table(validation)])
    np.testing.assert_array_equal(both[np.argsort(both[:, 0])], wanted)
    assert [(x.dtype.name, y.dtype.name) for x, y in made(train)[:1]] == [("float32", "int32")]
    assert train.is_made
    assert not broken(train)


def test_features_have_mean_0_and_deviation_1_over_the_rows_that_train_alone(tmp_path: Path) -> None:
    path = str(write(tmp_path / "t.csv", TABLE.encode()))
    raw = csv(path, standardize=False)
    train, validation = csv(path)
    np.testing.assert_allclose(train.raw[0].mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(train.raw[0].std(axis=0), 1, atol=1e-6)
    mean, deviation = raw[0].raw[0].mean(axis=0), raw[0].raw[0].std(axis=0)
    np.testing.assert_allclose(validation.raw[0], (raw[1].raw[0] - mean) / deviation, atol=1e-5)


def test_columns_are_chosen_and_files_are_one_table(tmp_path: Path) -> None:
    write(tmp_path / "logs/2.csv", b"b,a,y\n3,30,1.5\n4,40,2.5\n")
    write(tmp_path / "logs/1.csv", b"a,b,y\n10,1,0.5\n20,2,nan\n")
    write(tmp_path / "logs/notes.txt", b"none")
    write(tmp_path / "logs/.hidden.csv", b"c\n")
    for path in (f"{tmp_path}/logs", f"{tmp_path}/logs/?.csv"):
        train, validation = csv(path, label="y", features=["b", "a"], standardize=False, validation_fraction=0.25)
        both = np.concatenate([table(train), table(validation)])
        both = both[np.argsort(both[:, 0])]
        np.testing.assert_array_equal(both, [[1, 10, 0.5], [2, 20, np.nan], [3, 30, 1.5], [4, 40, 2.5]])
        assert (train.num_classes, train.raw[1].dtype.name) == (None, "float32")
    train, validation = csv(f"{tmp_path}/logs", label="b", features=["a"], standardize=False)
    assert (train.num_classes, train.raw[1].dtype.name) == (5, "int32")
    assert csv(f"{tmp_path}/logs", label="b", quantity=True)[0].raw[1].dtype == np.float32


def test_rows_without_numbers_are_named_by_the_lines_that_they_begin_in(tmp_path: Path) -> None:
    text = "a,b,y\n1,2,0.5\n,3,1\n\n4,,1\n5,6,\n7,8,9\n9,inf,9\n10,11,9\n\n12,13,NA\n14,15,nan\n\n"
    path = str(write(tmp_path / "t.csv", text.encode()))
    found = {each.name: each.why for part in csv(path) for each in broken(part, 3)}
    assert found == {
        f"{path} line 3": "has no number in a",
        f"{path} line 5": "has no number in b",
        f"{path} line 6": "has no number in y",
        f"{path} line 8": "has no number in b",
        f"{path} line 11": "has no number in y",
        f"{path} line 12": "has no number in y",
    }
    for part in csv(path):
        left = part.without(broken(part))
        assert not broken(left)
        assert np.isfinite(table(left)).all()
    frame = pd.DataFrame({"a": [1.0, np.nan, 3, 4, 5], "y": [0, 1, 0, 1, 0]})
    frame.to_parquet(tmp_path / "t.parquet")
    found = {each.name: each.why for part in csv(str(tmp_path / "t.parquet")) for each in broken(part)}
    assert found == {f"{tmp_path}/t.parquet row 1": "has no number in a"}
    text = 'a,note,y\n1,"one\ntwo",low\n,"three\n\nfour",low\n3,five,high\n4,six,\n'
    path = str(write(tmp_path / "t.csv", text.encode()))
    with pytest.raises(DataError, match=r"received none in .*t\.csv line 8"):
        csv(path, features=["a"])
    path = str(write(tmp_path / "t.csv", text.replace("six,", "six,low").encode()))
    parts = csv(path, features=["a"])
    assert [each.name for part in parts for each in broken(part)] == [f"{path} line 4"]


NUMBERS = [(n / 8 - 1, 1.5 * n, "low" if n % 3 else "high") for n in range(20)]


def table_of(*parts: Examples) -> Array:
    """The rows of all parts, sorted."""
    return np.array(sorted(np.concatenate([table(part) for part in parts]).tolist()))


def lines_of(row: str, head: str = "", numbers: Any = NUMBERS) -> str:
    return head + "".join(row.format(*values, n=n) + "\n" for n, values in enumerate(numbers))


def german(number: float) -> str:
    return f"{number:,.3f}".translate(str.maketrans(",.", ".,"))


# How a file is written, arguments that it takes, its classes, and the columns that are told of.
WRITTEN: list[tuple[str | bytes, dict[str, Any], list[str], list[str]]] = [
    (lines_of("{},{},{}"), {}, ["high", "low"], ["The first line"]),
    (lines_of("{},{},{}"), {"header": False, "label": 2, "features": [0, 1]}, ["high", "low"], ["The first line"]),
    (lines_of("{n},{},{},{}", ",a,b,y\n"), {}, ["high", "low"], ["Column Unnamed: 0"]),
    (lines_of("{n},{n},{},{},{}", "Unnamed: 0.1,Unnamed: 0,a,b,y\n"), {}, ["high", "low"],
     ["Column Unnamed: 0.1", "Column Unnamed: 0"]),
    (lines_of("{n},{},{},{}", "index,a,b,y\n"), {}, ["high", "low"], ["Column index"]),
    (lines_of("{n},{},{},{}", "Id,a,b,y\n"), {}, ["high", "low"], ["Column Id"]),
    (lines_of("row{n},{},{},{}", '"","a","b","y"\n'), {}, ["high", "low"], ["Column Unnamed: 0"]),
    (lines_of("{};{};{}", "a;b;y\n"), {}, ["high", "low"], []),
    (lines_of("{}\t{}\t{}", "a\tb\ty\n"), {}, ["high", "low"], []),
    (lines_of("{}|{}|{}", "a|b|y\n"), {}, ["high", "low"], []),
    (lines_of("{}  {}  {}", "a b y\n"), {"separator": "space"}, ["high", "low"], []),
    (lines_of("{}, {}, {}", "a, b, y\n"), {}, ["high", "low"], []),
    (lines_of("{},{},{},", "a,b,y,\n"), {}, ["high", "low"], []),
    ("\n\n" + lines_of("{},{},{}", "a,b,y\n"), {}, ["high", "low"], []),
    ("\ufeff" + lines_of("{},{},{}", "a,b,y\n"), {}, ["high", "low"], []),
    (lines_of("{},{},{}", "a,b,y\n").encode("utf-16"), {}, ["high", "low"], []),
    (lines_of("{},{},{}", "a,b,y\n").replace("low", "grün").encode("latin-1"), {"encoding": "latin-1"},
     ["grün", "high"], []),
    (lines_of("{};{};{}", "a;b;y\n").replace(".", ","), {}, ["high", "low"], []),
    (lines_of("{};{};{}").replace(".", ","), {}, ["high", "low"], ["The first line"]),
    (lines_of("{};{};{}", "a;b;y\n", [(german(a), german(b), y) for a, b, y in NUMBERS]), {}, ["high", "low"], []),
    (lines_of("{};{};{}", "a;b;y\n").replace("low", "NA"), {}, ["NA", "high"], []),
    (lines_of("{},{},{}", "a,b,y\n").replace("low", "None").replace("high", "null"), {}, ["None", "null"], []),
    (lines_of("{},{},{}", "a,b,y\n").replace("low", "007").replace("high", "012"), {}, ["007", "012"], []),
    (lines_of("{},{},{}", "a,b,y\n").replace("low", "true").replace("high", "FALSE"), {}, ["False", "True"], []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "arguments", "classes", "told"), WRITTEN, ids=lambda value: repr(value)[:24])
def test_a_table_is_read_however_it_is_written(tmp_path, text, arguments, classes, told):
    path = str(write(tmp_path / "t.csv", text if isinstance(text, bytes) else text.encode()))
    train, validation = csv(path, standardize=False, **arguments)
    assert train.class_names == tuple(classes)
    low = next(number for number, name in enumerate(classes) if name not in ("high", "null", "012", "False"))
    wanted = sorted([a, b, low if y == "low" else 1 - low] for a, b, y in NUMBERS)
    np.testing.assert_array_equal(table_of(train, validation), wanted)
    assert [note.partition(" of ")[0] for note in train.notes] == told


def test_tables_named_as_parts_are_the_parts(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", b"a,y\n1,cat\n2,dog\n")
    write(tmp_path / "test.csv", b"a,y\n3,cat\n4,emu\n")
    train, validation = csv(str(tmp_path), standardize=False)
    assert (table(train).tolist(), table(validation).tolist()) == ([[1, 0], [2, 1]], [[3, 0], [4, 2]])
    assert (len(train.notes), train.flaws) == (1, ("no training examples of class emu",))
    write(tmp_path / "val.csv", b"a,y\n3,cat\n4,dog\n")
    assert csv(str(tmp_path))[0].flaws == ()


def test_thousands_are_grouped_as_the_other_numbers_say_and_rounded_ids_and_leading_zeros_told(tmp_path: Path) -> None:
    for text in ('a,b,y\n0.5,"1,250",0\n1.5,"2,500",1\n', 'a,b,y\n"0,5",1.250,0\n"1,5",2.500,1\n'):
        parts = csv(str(write(tmp_path / "t.csv", text.encode())), standardize=False)
        np.testing.assert_array_equal(table_of(*parts), [[0.5, 1250, 0], [1.5, 2500, 1]])
    path = str(write(tmp_path / "t.csv", b"user,y\n16777217,0\n16777216,1\n3,0\n3000000001,1\n"))
    assert "user" in " ".join(csv(path, standardize=False)[0].notes)
    assert csv(path)[0].notes == ()
    path = str(write(tmp_path / "t.csv", b"zip,y\n00123,0\n04567,1\n99999,0\n12345,1\n"))
    assert "zip" in " ".join(csv(path)[0].notes)


BAD_TABLES = [
    (b"", {}, "Expected rows in {}, received none. Try another data.path."),
    (b"a,y\n", {}, "Expected rows in {}, received none. Try another data.path."),
    (b"a,b,y\n1,2,3\n1,2,3,4\n", {}, "cannot be read so (4 fields in line 3, 3 in the first). Try putting it right"),
    (b"a,y\n1,2,3\n1,2,3\n", {}, "cannot be read so (3 fields in line 2, 2 in the first)"),
    (b'a,note,y\n1,"one\ntwo",0\n2,"x",1,3\n', {}, "cannot be read so (4 fields in line 4, 3 in the first)"),
    (b'a,y\n1,0\n2,"0\n3,1\n', {}, "cannot be read so (a quote that nothing ends in line 3)"),
    (b"a,y\n1,gr\xfcn\n2,rot\n", {}, "received bytes that are none. Try data.build.encoding=latin-1, or"),
    (b"1,2\n3,4\n", {},
     "Expected a first line of names in {}, received 1, 2, which may be names or a row. Try data.build.header=false"),
    (b"2019,2020,y\n0.1,0.2,1.5\n", {}, "Try data.build.header=false, if it is a row, or data.build.header=true."),
    (b"a,a,y\n1,2,3\n", {}, "Expected columns of different names in {}, received a more than once. Try"),
    (b"a b y\n1 2 0\n3 4 1\n", {}, "but with spaces. Try data.build.separator=space."),
    (b"a,b,y\n0.5,'1,5',1\n", {"separator": "ab"}, "received 'ab'. Try data.build.separator=semicolon."),
    (b"a;y\n1,234;0\n5,678;1\n", {}, "received '1,234' in {} line 2. Try data.build.decimal=comma, data.bu"),
    (b"a;y\n1;1,234\n2;5,678\n", {}, "received 1,234. Try data.build.decimal=comma, or data.build.decimal=point"),
    (b"a;b;y\n0,5;0.5;1\n1,5;1.5;0\n", {}, "received 0,5 and 0.5. Try data.build.decimal=point"),
    (b"a,day,y\n1,2020-01-01,0\n2,2020-01-02,1\n", {},
     "received '2020-01-01' in {} line 2. Try 'data.build.features=[a]'"),
    (b"a,,y\n1,2,0\n2,5,1\n", {}, "received no name above column 1. Try 'data.build.features=[a]'."),
    (b"a,y\n1,NA\n2,NA\n", {}, "received none in {} line 2. Try removing"),
    (b"a,y\n1e300,0\n2,1\n", {}, "that float32 holds, received 1e+300 in {} line 2. Try another unit"),
    (b"a,y\n" + b"".join(b"%d,text %d\n" % (n, n) for n in range(30)), {},
     "received another text in each row. Try data.build.label=COLUMN."),
    (b"a,town,c,y\n1,2,3,0\n\n2,Oslo,3,0\n", {},
     "Expected numbers in column town, received 'Oslo' in {} line 4. Try 'data.build.features=[a,c]', or a number"),
    (b"a,y\n1,0\n2,\n", {}, "Expected a class in column y of every row, received none in {} line 3. Try removing"),
    (b"a,y\n1,0\n2,-1\n", {}, "Expected classes from 0 in column y, fewer than rows, received -1. Try data.build.q"),
    (b"a,y\n1,0\n2,250000\n", {}, "received 250000. Try data.build.quantity=true"),
    (b"a,y\n1,x\n2,z\n", {"quantity": True}, "Expected numbers in column y, received 'x' in {} line 2. Try another"),
    (b"a,y\n1,0\n", {"label": "z"},
     "Expected data.build.label to be a column of {} (a, y), received z. Try data.buil"),
    (b"a,y\n1,0\n", {"features": ["b"]}, "besides the label y (a), received b. Try 'data.build.features=[a]'."),
    (b"a,y\n1,0\n", {"features": ["y"]}, "besides the label y (a), received y."),
    (b"a,y\n1,0\n", {"features": []}, "besides the label y (a), received none."),
    (b"y\n1\n", {}, "besides the label y (there are none), received none. Try another data.path."),
    (b"a,y\n1,0\n", {"split_seed": -1}, "Expected a validation_fraction between 0 and 1 and a split_seed"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "arguments", "words"), BAD_TABLES, ids=lambda value: str(value)[:40])
def test_tables_that_cannot_be_trained_on_are_refused_in_words(tmp_path, text, arguments, words):
    path = str(write(tmp_path / "t.csv", text))
    with pytest.raises(DataError) as refused:
        csv(path, **arguments)
    assert words.format(path) in str(refused.value)


def test_tables_that_are_not_there_or_differ_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Expected data\.path to be a CSV or Parquet file.* Try data\.path=FILE\.csv"):
        csv(None)
    with pytest.raises(DataError, match=r"none\.csv to be or to have files that end in .*, received no such file\."):
        csv(str(tmp_path / "none.csv"))
    with pytest.raises(DataError, match=r"that end in \.csv, \.csv\.gz, \.parquet, received .*t\.xls\. Try"):
        csv(str(write(tmp_path / "t.xls", b"")))
    write(tmp_path / "t.parquet", b"PAR1 is how it begins")
    with pytest.raises(DataError, match=r"t\.parquet to be a table .*, received a file that cannot be read so"):
        csv(str(tmp_path / "t.parquet"))
    write(tmp_path / "two/1.csv", b"a,y\n1,0\n")
    write(tmp_path / "two/2.csv", b"b,y\n1,0\n")
    with pytest.raises(DataError, match=r"two/1\.csv and .*two/2\.csv, of which only one has a, b\. Try a data\.path"):
        csv(str(tmp_path / "two"))


@pytest.mark.parametrize(("labels", "expected", "classes"), [
    (["0.25", "1.25"], {0.25, 1.25}, None),
    (["0", "2"], {0, 2}, 3),
    (["0", "1" * 25], {0, np.float32("1" * 25)}, None),
])  # fmt: skip
def test_decimals_of_parquet_are_numbers(tmp_path, labels, expected, classes):
    frame = pd.DataFrame({"a": [Decimal("1.5"), None] * 20, "b": 1.0, "label": [*map(Decimal, labels)] * 20})
    frame.to_parquet(tmp_path / "t.parquet")
    train, _ = csv(str(tmp_path / "t.parquet"), standardize=False)
    x, y = train.raw
    assert set(y.tolist()) == expected
    assert train.num_classes == classes
    assert set(x[~np.isnan(x[:, 0]), 0].tolist()) == {1.5}


def test_the_index_of_a_parquet_table_is_no_feature_unless_it_is_named(tmp_path: Path) -> None:
    frame = pd.DataFrame({"key": np.arange(20) * 7, "a": np.arange(20) / 3, "label": [0, 1] * 10}).set_index("key")
    frame.to_parquet(tmp_path / "t.parquet")
    train, _ = csv(str(tmp_path / "t.parquet"))
    assert train.raw[0].shape[1] == 1
    assert [note.partition(" of ")[0] for note in train.notes] == ["Column key"]
    train, _ = csv(str(tmp_path / "t.parquet"), features=["key", "a"])
    assert train.raw[0].shape[1] == 2
    assert not train.notes

"""Tables, as CSV and Parquet, and arrays that NumPy saved: however they are written, and what cannot be trained on."""

import io
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import shards
from own_files import TABLE, Array, broken, encoded, flipped, made, picture, write

from pipeline.data import DataError, csv, numpy
from pipeline.data.arrays import training_examples
from pipeline.data.examples import Examples


def table(*parts: Examples) -> Array:
    """The rows of all parts, x and y together, sorted."""
    return np.array(sorted(np.concatenate([np.column_stack(part.raw) for part in parts]).tolist()))


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "T.CSV.GZ", "t.parquet"])
def test_a_table_is_numbers_and_classes_standardized_by_the_rows_that_train(tmp_path: Path, name: str) -> None:
    frame = pd.read_csv(io.StringIO(TABLE))
    path = str(tmp_path / name)
    frame.to_parquet(path) if name.endswith("parquet") else frame.to_csv(path, index=False)
    train, validation = csv(path, standardize=False)
    assert (train.num_classes, train.class_names, train.count, validation.count) == (2, ("a", "b"), 16, 4)
    assert np.bincount(validation.raw[1]).tolist() == [2, 2]
    numbers = np.arange(20)
    wanted = np.column_stack([numbers, numbers**2 / 4, numbers % 3 == 0, numbers % 2])
    np.testing.assert_array_equal(table(train, validation), wanted)
    assert [(x.dtype.name, y.dtype.name) for x, y in made(train)[:1]] == [("float32", "int32")]
    assert train.is_made
    assert not broken(train)
    # Else features have mean 0 and deviation 1 over the rows that train alone.
    for ours, raw in zip(csv(path), (train, validation), strict=True):
        features = (raw.raw[0] - train.raw[0].mean(axis=0)) / train.raw[0].std(axis=0)
        np.testing.assert_allclose(ours.raw[0], features, atol=1e-5)


def test_columns_are_chosen_and_files_are_one_table(tmp_path: Path) -> None:
    write(tmp_path / "logs/2.csv", b"b,a,y\n3,30,1.5\n4,40,2.5\n")
    write(tmp_path / "logs/1.csv", b"a,b,y\n10,1,0.5\n20,2,nan\n")
    write(tmp_path / "logs/notes.txt", b"none")
    write(tmp_path / "logs/.hidden.csv", b"c\n")
    for path in (f"{tmp_path}/logs", f"{tmp_path}/logs/?.csv"):
        train, validation = csv(path, label="y", features=["b", "a"], standardize=False, validation_fraction=0.25)
        both = table(train, validation)
        np.testing.assert_array_equal(both, [[1, 10, 0.5], [2, 20, np.nan], [3, 30, 1.5], [4, 40, 2.5]])
        assert (train.num_classes, train.raw[1].dtype.name) == (None, "float32")
    train, validation = csv(f"{tmp_path}/logs", label="b", features=["a"], standardize=False)
    assert (train.num_classes, train.raw[1].dtype.name) == (5, "int32")
    assert csv(f"{tmp_path}/logs", label="b", quantity=True)[0].raw[1].dtype == np.float32


def test_rows_without_numbers_are_named_by_the_lines_that_they_begin_in(tmp_path: Path) -> None:
    text = "a,b,y\n1,2,0.5\n,3,1\n\n4,,1\n5,6,\n7,8,9\n9,inf,9\n10,11,9\n\n12,13,NA\n14,15,nan\n\n"
    path = str(write(tmp_path / "t.csv", text.encode()))
    found = {each.name: each.why for part in csv(path) for each in broken(part, 3)}
    lines = {3: "a", 5: "b", 6: "y", 8: "b", 11: "y", 12: "y"}
    assert found == {f"{path} line {number}": f"has no number in {name}" for number, name in lines.items()}
    for part in csv(path):
        left = part.without(broken(part))
        assert not broken(left)
        assert np.isfinite(table(left)).all()
    pd.DataFrame({"a": [1.0, np.nan, 3, 4, 5], "y": [0, 1, 0, 1, 0]}).to_parquet(tmp_path / "t.parquet")
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


def lines_of(row: str, head: str = "") -> str:
    return head + "".join(row.format(*values, n=n) + "\n" for n, values in enumerate(NUMBERS))


# How a file is written, arguments that it takes, its classes, and the columns that are told of.
@pytest.mark.parametrize(("text", "arguments", "classes", "told"), [
    (lines_of("{},{},{}"), {}, ["high", "low"], ["The first line"]),
    (lines_of("{},{},{}"), {"header": False, "label": 2, "features": [0, 1]}, ["high", "low"], ["The first line"]),
    (lines_of("{n},{},{},{}", ",a,b,y\n"), {}, ["high", "low"], ["Column Unnamed: 0"]),
    (lines_of("{n},{n},{},{},{}", "Unnamed: 0.1,Unnamed: 0,a,b,y\n"), {}, ["high", "low"],
     ["Column Unnamed: 0.1", "Column Unnamed: 0"]),
    (lines_of("{n},{},{},{}", "index,a,b,y\n"), {}, ["high", "low"], ["Column index"]),
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
    (lines_of("{:,.3f};{:,.3f};{}", "a;b;y\n").translate(str.maketrans(",.", ".,")), {}, ["high", "low"], []),
    (lines_of("{};{};{}", "a;b;y\n").replace("low", "NA"), {}, ["NA", "high"], []),
    (lines_of("{},{},{}", "a,b,y\n").replace("low", "None").replace("high", "null"), {}, ["None", "null"], []),
    (lines_of("{},{},{}", "a,b,y\n").replace("low", "007").replace("high", "012"), {}, ["007", "012"], []),
    (lines_of("{},{},{}", "a,b,y\n").replace("low", "true").replace("high", "FALSE"), {}, ["False", "True"], []),
], ids=lambda value: repr(value)[:24])  # fmt: skip
def test_a_table_is_read_however_it_is_written(tmp_path, text, arguments, classes, told):
    path = str(write(tmp_path / "t.csv", text if isinstance(text, bytes) else text.encode()))
    train, validation = csv(path, standardize=False, **arguments)
    assert train.class_names == tuple(classes)
    low = next(number for number, name in enumerate(classes) if name not in ("high", "null", "012", "False"))
    wanted = sorted([a, b, low if y == "low" else 1 - low] for a, b, y in NUMBERS)
    np.testing.assert_array_equal(table(train, validation), wanted)
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
        np.testing.assert_array_equal(table(*parts), [[0.5, 1250, 0], [1.5, 2500, 1]])
    path = str(write(tmp_path / "t.csv", b"user,y\n16777217,0\n16777216,1\n3,0\n3000000001,1\n"))
    assert "user" in " ".join(csv(path, standardize=False)[0].notes)
    assert csv(path)[0].notes == ()
    path = str(write(tmp_path / "t.csv", b"zip,y\n00123,0\n04567,1\n99999,0\n12345,1\n"))
    assert "zip" in " ".join(csv(path)[0].notes)


@pytest.mark.parametrize(("text", "arguments", "words"), [
    (b"", {}, "Expected rows in {}, received none. Try another data.path."),
    (b"a,b,y\n1,2,3\n1,2,3,4\n", {}, "cannot be read so (4 fields in line 3, 3 in the first). Try putting it right"),
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
    (b"y\n1\n", {}, "besides the label y (there are none), received none. Try another data.path."),
    (b"a,y\n1,0\n", {"split_seed": -1}, "Expected a validation_fraction between 0 and 1 and a split_seed"),
], ids=lambda value: str(value)[:40])  # fmt: skip
def test_tables_that_cannot_be_trained_on_are_refused_in_words(tmp_path, text, arguments, words):
    path = str(write(tmp_path / "t.csv", text))
    with pytest.raises(DataError, match=re.escape(words.format(path))):
        csv(path, **arguments)


def test_tables_that_are_not_there_or_differ_are_named(tmp_path: Path) -> None:
    write(tmp_path / "two/1.csv", b"a,y\n1,0\n")
    write(tmp_path / "two/2.csv", b"b,y\n1,0\n")
    for path, words in (
        (None, r"Expected data\.path to be a CSV or Parquet file.* Try data\.path=FILE\.csv"),
        (tmp_path / "none.csv", r"none\.csv to be or to have files that end in .*, received no such file\."),
        (write(tmp_path / "t.xls", b""), r"that end in \.csv, \.csv\.gz, \.parquet, received .*t\.xls\. Try"),
        (write(tmp_path / "t.parquet", b"PAR1 is"), r"t\.parquet to be a table .*, received a file that cannot"),
        (tmp_path / "two", r"two/1\.csv and .*two/2\.csv, of which only one has a, b\. Try a data\.path"),
    ):
        with pytest.raises(DataError, match=words):
            csv(path and str(path))


def test_decimals_of_parquet_are_numbers_and_its_index_is_no_feature_unless_it_is_named(tmp_path: Path) -> None:
    for labels, classes in (("0.25", "1.25"), None), (("0", "2"), 3), (("0", "1" * 25), None):
        frame = pd.DataFrame({"a": [Decimal("1.5"), None] * 20, "b": 1.0, "label": [*map(Decimal, labels)] * 20})
        frame.to_parquet(tmp_path / "t.parquet")
        train, _ = csv(str(tmp_path / "t.parquet"), standardize=False)
        x, y = train.raw
        assert (set(y.tolist()), train.num_classes) == (set(map(np.float32, labels)), classes)
        assert set(x[~np.isnan(x[:, 0]), 0].tolist()) == {1.5}
    frame = pd.DataFrame({"key": np.arange(20) * 7, "a": np.arange(20) / 3, "label": [0, 1] * 10}).set_index("key")
    frame.to_parquet(tmp_path / "t.parquet")
    train, _ = csv(str(tmp_path / "t.parquet"))
    assert train.raw[0].shape[1] == 1
    assert [note.partition(" of ")[0] for note in train.notes] == ["Column key"]
    train, _ = csv(str(tmp_path / "t.parquet"), features=["key", "a"])
    assert train.raw[0].shape[1] == 2
    assert not train.notes


def arrays(count: int = 10, *ending: str) -> dict[str, Array]:
    """Grey images, whose first pixel is their number, and labels 0, 1, 0, 1, ..."""
    x = np.random.default_rng(count).integers(256, size=(count, 4, 3), dtype=np.uint8)
    x[:, 0, 0] = np.arange(count)
    end = "".join(ending)
    return {f"x{end}": x, f"y{end}": (np.arange(count) % 2)[:, None]}


def save(where: Path, saved: dict[str, Array]) -> str:
    """As one .npz file, or as .npy files in a folder."""
    if where.suffix == ".npz":
        np.savez(where, **saved)
    else:
        where.mkdir()
        for name, array in saved.items():
            np.save(where / f"{name}.npy", array)
    return str(where)


@pytest.mark.parametrize("name", ["data.npz", "folder"])
@pytest.mark.parametrize("ending", ["_validation", "_val", "_test"])
def test_arrays_are_the_parts_that_they_are_named(tmp_path: Path, name: str, ending: str) -> None:
    train, held = arrays(10, "_train"), arrays(4, ending)
    path = save(tmp_path / name, {**train, **held, "more": np.zeros(3)})
    (x, y), (x_validation, y_validation) = numpy(path)
    np.testing.assert_array_equal(x, train["x_train"][..., None] / np.float32(255))
    np.testing.assert_array_equal(x_validation, held[f"x{ending}"][..., None] / np.float32(255))
    assert (x.dtype.name, y.dtype.name, y.tolist()) == ("float32", "int32", [0, 1] * 5)
    assert y_validation.tolist() == [0, 1, 0, 1]
    assert training_examples(path) == 10


@pytest.mark.parametrize(("name", "ending"), [("data.npz", ""), ("folder", "_train")])
def test_a_part_of_arrays_is_held_out_where_none_is_for_validation(tmp_path: Path, name: str, ending: str) -> None:
    path = save(tmp_path / name, arrays(20, ending))
    (x, y), (x_validation, y_validation) = numpy(path, validation_fraction=0.3)
    assert np.bincount(y_validation).tolist() == [3, 3]
    assert training_examples(path, validation_fraction=0.3) == len(y)
    numbers = np.round(np.concatenate([x, x_validation])[:, 0, 0, 0] * 255).astype(int)
    assert sorted(numbers.tolist()) == list(range(20))
    np.testing.assert_array_equal(numbers % 2, np.concatenate([y, y_validation]))


def test_types_of_arrays(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", {"x": np.arange(20, dtype=np.int64).reshape(10, 2), "y": np.arange(10) / 2})
    (x, y), _ = numpy(path)
    assert (x.dtype.name, y.dtype.name, x.shape, training_examples(path)) == ("float32", "float32", (8, 2), 8)
    assert sorted((x[:, 0] / 4).tolist()) == sorted(y.tolist())
    assert numpy(path, keep_dtype=True)[0][0].dtype == np.int64
    path = save(tmp_path / "b.npz", arrays(10))
    (x, _), _ = numpy(path, keep_dtype=True)
    assert (x.dtype.name, x.shape[1:]) == ("uint8", (4, 3))
    path = save(tmp_path / "c.npz", {"x": np.ones((10, 4, 4, 3), np.float16), "y": np.arange(10) > 4})
    (x, y), _ = numpy(path)
    assert (x.dtype.name, x.max(), y.dtype.name, sorted(y.tolist())) == ("float32", 1, "int32", [0] * 4 + [1] * 4)


@pytest.mark.parametrize("kind", ["int64", "uint32", "uint64"])
def test_whole_numbers_that_32_bits_do_not_hold_keep_their_values(tmp_path: Path, kind: str) -> None:
    large = np.arange(3_000_000_000, 3_000_000_020, dtype=kind)
    saved = {"x": large[:, None], "y": large}
    for keep in (False, True):
        (x, y), (_, held) = numpy(save(tmp_path / f"{keep}.npz", saved), keep_dtype=keep)
        assert (len(y), len(held), y.dtype.name) == (16, 4, "int64")
        assert (x[:, 0].astype(int).tolist(), sorted([*y, *held])) == (y.tolist(), large.tolist())
    parts = {"x_train": large, "y_train": large, "x_val": np.ones(3, kind), "y_val": np.ones(3, kind)}
    (x, y), (_, held) = numpy(save(tmp_path / "parts.npz", parts))
    assert {array.dtype.name for array in (x, y, held)} == {"int64"}


@pytest.mark.parametrize("kind", ["U", "S"])
def test_text_labels_of_arrays_are_classes_in_their_order(tmp_path: Path, kind: str) -> None:
    y = np.array(["emu", "cat", "dog", "cat"] * 5).astype(kind)
    path = save(tmp_path / "a.npz", {"x": np.arange(20.0), "y": y[:, None]})
    train, held = numpy(path)
    assert training_examples(path) == 16
    assert (train.class_names, train.num_classes, train.count, held.count) == (("cat", "dog", "emu"), 3, 16, 4)
    for x, label in [*made(train), *made(held)]:
        assert train.class_names[label] == str(y[int(x)].decode() if kind == "S" else y[int(x)])
    parts = {"x_train": np.array([1.0, np.nan]), "y_train": y[:2], "x_val": np.arange(20.0), "y_val": y}
    train, held = numpy(save(tmp_path / "b.npz", parts))
    assert train.flaws == ("no training examples of class dog",)
    assert [each.why for each in broken(train)] == ["has NaN or infinity in x"]
    narrow = numpy(save(tmp_path / "c.npz", parts | {"x_val": np.arange(20, dtype="float16")}), keep_dtype=True)
    assert [part.spec[0].dtype for part in narrow] == ["float64", "float16"]


@pytest.mark.parametrize("name", ["data.npz", "folder"])
@pytest.mark.parametrize(("saved", "words"), [
    ({"images": np.ones(3)},
     "Expected arrays x_train and y_train, or x and y, in {}, received images. Try numpy.savez("),
    ({"x": np.ones((3, 2)), "y": np.ones(2)}, "received x of shape [3, 2] and y of [2]. Try saving both anew."),
    ({"x": np.ones(()), "y": np.ones(())}, "received x of shape [] and y of []."),
    ({"x": np.ones((0, 2)), "y": np.ones(0)}, "received an x without any. Try another data.path."),
    ({"x": np.array(["a", "b"] * 4), "y": np.zeros(8)},
     "Expected numbers in {}, received x of text. Try the places of words"),
    ({**arrays(4, "_train"), **{name: array[..., :1] for name, array in arrays(4, "_test").items()}},
     "received x of [4, 3] uint8 to train and of [4, 1] uint8 to validate. Try saving both anew."),
    ({"x": np.ones(4), "y": np.array([{}, [], 0, "a"], object)},
     "Python's objects, which are not loaded. Try saving y."),
    ({"x": np.array([1, 1e300]), "y": np.ones(2)}, "that float32 holds, received 1e+300. Try dividing them"),
    ({"x": np.ones(2), "y": np.array([1, -1e300])}, "that float32 holds, received -1e+300. Try dividing them"),
    ({"x": np.ones(2), "y": np.array([1, 2**63], np.uint64)}, "that int64 holds, received 9223372036854775808. Try"),
    ({"x": np.ones(2), "y": np.array([["a", "b"]] * 2)}, "y of type <U1 and shape [2] for each. Try numpy.unique("),
    ({"x": np.ones(2), "y": np.array([b"\xff", b"a"])}, "in UTF-8, received"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_arrays_that_cannot_be_trained_on_are_refused_in_words(tmp_path, name, saved, words):
    path = save(tmp_path / name, saved)
    # Counting refuses some too, and leaves the others to the reader.
    with pytest.raises(DataError, match=re.escape(words.format(path))):
        _ = training_examples(path), numpy(path)


def test_files_of_arrays_that_are_broken_or_not_there_are_named(tmp_path: Path) -> None:
    whole = Path(save(tmp_path / "whole.npz", arrays(1000))).read_bytes()
    for data in (b"", b"hello", whole[:-300], whole[:300], flipped(whole, 3000)):
        path = write(tmp_path / "broken.npz", data)
        with pytest.raises(DataError, match=rf"{path} to hold arrays that NumPy saved, received .* Try saving"):
            numpy(str(path))
    folder = Path(save(tmp_path / "folder", arrays(1000)))
    for data in (b"", b"hello", (folder / "x.npy").read_bytes()[:-300]):
        (folder / "x.npy").write_bytes(data)
        with pytest.raises(DataError, match=rf"Expected {folder}/x\.npy to hold arrays that NumPy saved, received"):
            numpy(str(folder))
    for path, words in ((str(tmp_path / "nowhere"), "no such file"), (None, r"none\. Try data\.path=FILE")):
        with pytest.raises(DataError, match=rf"to be an \.npz file.*received {words}"):
            numpy(path)


def test_broken_arrays_and_too_few_examples_are_refused_before_anything_starts(asked: Any, tmp_path: Path) -> None:
    whole = Path(save(tmp_path / "whole.npz", arrays(100))).read_bytes()
    write(tmp_path / "flipped.npz", flipped(whole, 600))
    shards.write(tmp_path / "prepared", [40, 43])
    for number in range(8):
        write(tmp_path / "pets" / "ab"[number % 2] / f"{number}.png", encoded(picture(number)))
    write(tmp_path / "t.csv", TABLE.encode())
    batch = "training data for at least one global batch of {}, received {} examples. Try {}, or data.on_error="
    few = "train.replica_batch=90"
    for arguments, words in (
        (["data=numpy", "data.path=flipped.npz"], "Expected flipped.npz to hold arrays that NumPy saved, received"),
        (["data=numpy", "data.path=whole.npz", few], batch.format(180, 80, "train.replica_batch=40")),
        (["data=tfrecord", "data.path=prepared", "train.global_batch=90"],
         batch.format(90, 83, "train.global_batch=82")),
        (["data=tfrecord", "data.path=nothing"], "Expected nothing/manifest.json, received no such file (No such file"),
        (["data=tfrecord", "data.path=null"], "Expected data.path to be a folder that `python -m pipeline prepare` "),
        (["data=synthetic", "data.build.train_examples=1", few], batch.format(180, 1, "more data")),
        (["data=images", "data.path=pets", few], batch.format(180, 6, "train.replica_batch=3")),
        (["data=csv", "data.path=t.csv", few], batch.format(180, 16, "train.replica_batch=8")),
    ):  # fmt: skip
        before = sorted(tmp_path.rglob("*"))
        ran = asked(*arguments, "strategy=mirrored", "workers=2", "tracking=none")
        assert (ran.code, ran.out, len(ran.err.splitlines())) == (2, "", 1)
        assert words in ran.err
        assert sorted(tmp_path.rglob("*")) == before
    # Left out with what is broken, they train on a smaller batch.
    ran = asked("data=numpy", "data.path=whole.npz", few, "data.on_error=skip", "mode=plan", "tracking=none").ok()

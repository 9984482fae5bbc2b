"""Arrays that NumPy saved: their parts, types and classes, and what cannot be trained on."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import shards
from own_files import TABLE, Array, broken, encoded, made, picture, write

from pipeline.data import DataError, numpy
from pipeline.data.arrays import training_examples


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


BAD_ARRAYS: list[tuple[dict[str, Array], str]] = [
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
]  # fmt: skip


@pytest.mark.parametrize("name", ["data.npz", "folder"])
@pytest.mark.parametrize(("saved", "words"), BAD_ARRAYS, ids=lambda value: value if isinstance(value, str) else "")
def test_arrays_that_cannot_be_trained_on_are_refused_in_words(tmp_path, name, saved, words):
    path = save(tmp_path / name, saved)
    with pytest.raises(DataError) as refused:
        numpy(path)
    assert words.format(path) in str(refused.value)


def test_files_of_arrays_that_are_broken_or_not_there_are_named(tmp_path: Path) -> None:
    whole = Path(save(tmp_path / "whole.npz", arrays(1000))).read_bytes()
    flipped = bytearray(whole)
    flipped[3000] ^= 1
    for data in (b"", b"hello", whole[:-300], whole[:300], bytes(flipped)):
        path = write(tmp_path / "broken.npz", data)
        with pytest.raises(DataError, match=rf"{path} to hold arrays that NumPy saved, received .* Try saving"):
            numpy(str(path))
    folder = Path(save(tmp_path / "folder", arrays(1000)))
    for data in (b"", b"hello", (folder / "x.npy").read_bytes()[:-300]):
        (folder / "x.npy").write_bytes(data)
        with pytest.raises(DataError, match=rf"Expected {folder}/x\.npy to hold arrays that NumPy saved, received"):
            numpy(str(folder))
    with pytest.raises(DataError, match=r"an \.npz file, or a folder of \.npy files, received no such file"):
        numpy(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match=r"data\.path to be an \.npz file.* received none\. Try data\.path=FILE"):
        numpy(None)


def test_broken_arrays_and_too_few_examples_are_refused_before_anything_starts(asked: Any, tmp_path: Path) -> None:
    whole = Path(save(tmp_path / "whole.npz", arrays(100))).read_bytes()
    flipped = bytearray(whole)
    flipped[600] ^= 1
    write(tmp_path / "flipped.npz", bytes(flipped))
    shards.write(tmp_path / "prepared", [40, 43])
    for number in range(8):
        write(tmp_path / "pets" / "ab"[number % 2] / f"{number}.png", encoded(picture(number)))
    write(tmp_path / "t.csv", TABLE.encode())
    pd.DataFrame({"x": np.arange(50) / 3, "y": [0.5, 1.5] * 25}).to_parquet(tmp_path / "t.parquet")
    batch = "training data for at least one global batch of {}, received {} examples. Try {}, or data.on_error="
    few = "train.replica_batch=90"
    for arguments, words in (
        (["data=numpy", "data.path=flipped.npz"], "Expected flipped.npz to hold arrays that NumPy saved, received"),
        (["data=numpy", "data.path=whole.npz", few], batch.format(180, 80, "train.replica_batch=40")),
        (["data=tfrecord", "data.path=prepared", "train.global_batch=90"],
         batch.format(90, 83, "train.global_batch=82")),
        (["data=synthetic", "data.build.train_examples=1", few], batch.format(180, 1, "more data")),
        (["data=images", "data.path=pets", few], batch.format(180, 6, "train.replica_batch=3")),
        (["data=csv", "data.path=t.csv", few], batch.format(180, 16, "train.replica_batch=8")),
        (["data=csv", "data.path=t.parquet", few], batch.format(180, 40, "train.replica_batch=20")),
    ):  # fmt: skip
        before = sorted(tmp_path.rglob("*"))
        ran = asked(*arguments, "strategy=mirrored", "workers=2", "tracking=none")
        assert (ran.code, ran.out, len(ran.err.splitlines())) == (2, "", 1)
        assert words in ran.err
        assert sorted(tmp_path.rglob("*")) == before
    # Left out with what is broken, they train on a smaller batch.
    ran = asked("data=numpy", "data.path=whole.npz", few, "data.on_error=skip", "mode=plan", "tracking=none").ok()

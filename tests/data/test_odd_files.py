"""Files with properties that real ones have and nobody thinks of."""

from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pipeline.data import DataError, csv, folders
from pipeline.prepare import sources, values
from pipeline.worker.data import array_parts, conversion


@pytest.mark.parametrize(("labels", "expected", "classes"), [
    (["0.25", "1.25"], {0.25, 1.25}, None),
    (["0", "2"], {0, 2}, 3),
    (["0", "1" * 25], {0, np.float32("1" * 25)}, None),
])  # fmt: skip
def test_decimals_of_parquet_are_numbers(
    tmp_path: Path, labels: list[str], expected: set[float], classes: int | None
) -> None:
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


def test_folders_behind_links_are_read_once(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data, elsewhere):
        folder.mkdir()
        (folder / "a.txt").write_text("a")
    (data / "linked").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(data)
    (elsewhere / "itself").symlink_to(elsewhere)
    assert list(folders.files_below(data)) == [data / "a.txt", data / "linked" / "a.txt"]


def test_parts_in_a_dictionary_are_refused_with_their_names() -> None:
    part = np.zeros((4, 2)), np.zeros(4)
    with pytest.raises(DataError, match=r"received a dict of train, test\. Try return parts\['train'\]"):
        array_parts.both({"train": part, "test": part})


def test_lists_of_numbers_are_prepared_as_arrays_and_tuples_as_inputs() -> None:
    encoder = values.Encoder("train", None)
    encoder.make(([[1.0, 2.0], [3.0, 4.0]], 1), "first")
    assert [(one.name, one.shape, one.dtype) for one in encoder.features] == [
        ("x", (2, 2), "float32"),
        ("y", (), "int64"),
    ]
    encoder = values.Encoder("train", None)
    encoder.make(((np.float32(1), np.float32(2)), 1), "first")
    assert [one.name for one in encoder.features] == ["x/0", "x/1", "y"]
    rows = sources.Arrays(([[1, 2]] * 50, [0, 1] * 25), "train", None)
    assert [(one.name, one.shape) for one in rows.features] == [("x", (2,)), ("y", ())]
    with pytest.raises(DataError, match="rows of one length"):
        sources.Arrays(([[1, 2], [1]], [0, 1]), "train", None)


def test_masked_numbers_are_refused_wherever_arrays_are_taken() -> None:
    masked, y = np.ma.masked_array(np.ones((4, 2)), [[True, False]] * 4), np.zeros(4)
    with pytest.raises(DataError, match="4 are masked"):
        conversion.part((masked, y), "training")
    with pytest.raises(DataError, match="4 are masked"):
        sources.Arrays((masked, y), "train", None)
    conversion.part((np.ma.masked_array(np.ones((4, 2))), y), "training")

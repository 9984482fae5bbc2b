"""Files with properties that real ones have and nobody thinks of."""

import gzip
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pipeline.data import csv, text


def test_a_packed_table_may_be_named_in_capitals(tmp_path: Path) -> None:
    path = tmp_path / "TABLE.CSV.GZ"
    path.write_bytes(gzip.compress(b"a,b,c\n" + b"1.5,2.5,0\n3.5,4.5,1\n" * 5))
    train, _ = csv(str(path))
    assert (train.num_classes, train.raw[0].shape[1]) == (2, 2)


@pytest.mark.parametrize(
    ("labels", "expected", "classes"),
    [
        (["0.25", "1.25"], {0.25, 1.25}, None),
        (["0", "2"], {0, 2}, 3),
        (["0", "1" * 25], {0, np.float32("1" * 25)}, None),
    ],
)
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


def test_the_mark_of_an_encoding_is_no_character(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abc " * 100, encoding="utf-8-sig")
    train, _ = text(str(tmp_path / "t.txt"), tokens="characters", length=8)
    assert train.class_names == (" ", "a", "b", "c")

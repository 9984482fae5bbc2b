"""Data of one's own: folders of images, arrays, tables, and what TensorFlow Datasets has prepared."""

import io
import shutil
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import shards
import tensorflow as tf
from PIL import Image

from pipeline.data import DataError, csv, images, numpy, pictures, tfds
from pipeline.data.examples import Broken, Examples
from pipeline.data.records import frames
from pipeline.data.saved_arrays import training_examples

Array = np.ndarray[Any, Any]


def broken(part: Examples, shares: int = 1) -> list[Broken]:
    """What is broken in a part, found by so many processes together."""
    assert part.look is not None
    return [each for number in range(shares) for each in part.look(part, number, shares, True)]


def made(part: Examples) -> list[tuple[Array, int]]:
    """The examples of a part, made as training makes them: in a graph, without AutoGraph."""
    dataset = tf.data.Dataset.from_tensor_slices(part.raw)
    if part.decode is not None:
        dataset = dataset.map(tf.autograph.experimental.do_not_convert(part.decode))
    assert tf.nest.map_structure(lambda spec: (spec.shape, spec.dtype), dataset.element_spec) == tf.nest.map_structure(
        lambda spec: (spec.shape, spec.dtype), part.spec
    )
    return list(dataset.as_numpy_iterator())


# ---- images


def picture(seed: int, height: int = 6, width: int = 5) -> Array:
    return np.random.default_rng(seed).integers(256, size=(height, width, 3), dtype=np.uint8)


def encoded(pixels: Array, kind: str = "PNG", mode: str = "RGB", **options: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Ten cats and five dogs, as PNG, one of each in a folder below."""
    for seed in range(15):
        below = "more/" if seed in (0, 10) else ""
        write(tmp_path / f"pets/{'cat' if seed < 10 else 'dog'}/{below}{seed}.PNG", encoded(picture(seed)))
    write(tmp_path / "pets/cat/.hidden.png", b"")
    write(tmp_path / "pets/.cache/1.png", b"")
    write(tmp_path / "pets/cat/notes.txt", b"they purr")
    return tmp_path / "pets"


def test_images_are_read_by_class_and_the_same_fraction_of_each_is_held_out(pets: Path) -> None:
    train, validation = images(str(pets))
    assert train.class_names == ("cat", "dog")
    assert (train.num_classes, train.count, validation.count) == (2, 12, 3)
    assert Counter(validation.raw["label"].tolist()) == {0: 2, 1: 1}
    seen = set()
    for part in (train, validation):
        for file, (x, y) in zip(part.raw["path"], made(part), strict=True):
            seed = int(Path(file).stem)
            seen.add(seed)
            np.testing.assert_array_equal(x, picture(seed).astype(np.float32) / np.float32(255))
            assert y == (seed >= 10)
    assert seen == set(range(15))
    again, other = images(str(pets))[0], images(str(pets), split_seed=1)[0]
    assert list(train.raw["path"]) == list(again.raw["path"]) != list(other.raw["path"])


def fill(root: Path, folders: str) -> str:
    """Five images in each of the folders; a name with a suffix is a file, and one that ends in / an empty folder."""
    for name in folders.split():
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True)
        elif path.suffix or path.name.startswith("."):
            write(path, encoded(picture(0)) if path.suffix == ".png" else b"no image")
        else:
            for seed in range(5):
                write(path / f"{seed}.png", encoded(picture(seed)))
    return str(root)


LAYOUTS = [
    # Folders, the folder that trains, examples that train and that validate, words of the notes.
    ("train/cat train/dog valid/cat valid/dog test/cat test/dog README.txt", "train", 10, 10, ["test is not read"]),
    ("training/cat training/dog testing/cat testing/dog", "training", 10, 10, ["testing validates"]),
    ("Train/cat Train/dog Val/dog", "Train", 10, 5, []),
    ("TRAIN/cat TRAIN/dog dev/cat", "TRAIN", 10, 5, []),
    ("train/cat train/dog", "train", 8, 2, []),
    ("train/cat train/dog validation/", "train", 8, 2, ["validation"]),
    ("train/cat train/dog test", "train", 8, 2, ["a share of train validates", "test is not read"]),
    ("photos/train/cat photos/train/dog photos/test/dog __MACOSX/photos/train/cat/._0.png", "photos/train", 10, 5,
     ["__MACOSX", "test validates"]),
    ("seg_train/seg_train/cat seg_train/seg_train/dog seg_test/seg_test/cat", "seg_train/seg_train", 10, 5,
     ["seg_test"]),
    ("archive/cat archive/dog", "archive", 8, 2, []),
    ("cat dog __MACOSX/cat __MACOSX/dog .git/cat .ipynb_checkpoints .DS_Store Thumbs.db labels.csv", "", 8, 2,
     ["__MACOSX"]),
    ("cat dog annotations/1.xml test/ 1.png", "", 8, 2, ["annotations, test", "1 file"]),
    ("cat/2022 dog/2021 dog/2023", "", 12, 3, []),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "train", "trained", "validated", "notes"), LAYOUTS)
def test_what_folders_are_is_found_by_what_is_in_them(
    tmp_path: Path, layout: str, train: str, trained: int, validated: int, notes: list[str]
) -> None:
    parts = images(fill(tmp_path, layout))
    assert [part.class_names for part in parts] == [("cat", "dog")] * 2
    assert [part.count for part in parts] == [trained, validated]
    assert {Path(name).relative_to(tmp_path / train).parts[0] for name in parts[0].raw["path"]} == {"cat", "dog"}
    for part in parts:
        assert [number for _, number in made(part)] == ["/dog/" in name for name in part.raw["path"]]
    assert not [words for words in notes if words not in " ".join(parts[0].notes)]
    assert bool(parts[0].notes) is bool(notes)


def test_folders_named_as_parts_are_classes_beside_others_that_are(tmp_path: Path) -> None:
    assert images(fill(tmp_path, "train plane car"))[0].class_names == ("car", "plane", "train")


AMBIGUOUS = [
    ("train test train.csv", "data.build.classes=[test,train]"),
    ("fold1/cat fold1/dog fold2/cat fold2/dog", "data.build.classes=[fold1,fold2]"),
    ("train/cat train/dog test/cat more/dog", "data.path=/train data.build.validation_path=/test"),
    ("train/cat train/dog val/cat dev/cat", "data.path=/train data.build.validation_path=/dev"),
    ("cat dog val/cat val/dog", "data.build.classes=[cat,dog] data.build.validation_path=/val"),
    ("val/cat val/dog test/cat", "data.build.classes=[test,val]"),
    ("train/cat train/dog valid/cat valid/emu", "data.build.classes=[cat,dog]"),
]


@pytest.mark.parametrize(("layout", "offer"), AMBIGUOUS)
def test_folders_that_may_be_parts_or_classes_are_asked_about_and_the_answer_is_taken(
    tmp_path: Path, layout: str, offer: str
) -> None:
    path = fill(tmp_path, layout)
    with pytest.raises(DataError) as refused:
        images(path)
    offered = str(refused.value).partition(" Try ")[2].replace("'", "")
    typed = offer.replace("=/", f"={path}/").split()
    assert offered.startswith(" ".join(typed))
    given = dict(word.removeprefix("data.").removeprefix("build.").split("=") for word in typed)
    answer: dict[str, Any] = {"path": path, **given}
    if "classes" in answer:
        answer["classes"] = answer["classes"].strip("[]").split(",")
    train, validation = images(**answer)
    assert train.class_names == tuple(answer.get("classes", ("cat", "dog")))
    assert validation.count


def test_images_are_brought_to_a_size_and_grey_stays_what_it_was(tmp_path: Path) -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    write(tmp_path / "a/1.png", encoded(grey, mode="L"))
    write(tmp_path / "a/2.png", encoded(picture(2, 33, 20)))
    write(tmp_path / "b/1.png", encoded(picture(1, 4, 4)))
    write(tmp_path / "b/2.png", encoded(grey, mode="L"))
    train, validation = images(str(tmp_path), image_size=[16, 16], channels=1)
    found = {
        Path(n).parts[-2:]: x for p in (train, validation) for n, (x, _) in zip(p.raw["path"], made(p), strict=True)
    }
    assert {x.shape for x in found.values()} == {(16, 16, 1)}
    np.testing.assert_allclose(found["a", "1.png"][..., 0], grey / 255, atol=1e-7)
    theirs = Image.fromarray(picture(2, 33, 20)).resize((16, 16), Image.Resampling.BILINEAR).convert("L")
    np.testing.assert_allclose(found["a", "2.png"][..., 0], np.asarray(theirs) / 255, atol=2 / 255)
    assert not broken(train)


KINDS = [
    ("PNG", "RGB"), ("PNG", "RGBA"), ("PNG", "L"), ("PNG", "LA"), ("PNG", "P"), ("PNG", "1"), ("PNG", "I;16"),
    ("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("BMP", "RGB"), ("BMP", "L"), ("GIF", "RGB"), ("GIF", "L"),
]  # fmt: skip


@pytest.mark.parametrize("channels", [1, 3])
def test_what_pillow_reads_of_every_kind_is_what_is_trained(channels: int) -> None:
    blocks = np.kron(picture(0), np.ones((8, 8, 1), np.uint8))
    for kind, mode in KINDS:
        if mode == "I;16":
            stream = io.BytesIO()
            Image.fromarray(blocks[..., 0].astype(np.uint16) * 257).save(stream, kind)
            data, theirs = stream.getvalue(), Image.fromarray(blocks[..., 0]).convert("RGB")
        else:
            data = encoded(blocks, kind, mode)
            theirs = Image.open(io.BytesIO(data)).convert("RGB")
        assert pictures.fault(data, (48, 40)) is None
        x = pictures.decoder(channels, (48, 40))(tf.constant(data)).numpy()
        wanted = np.asarray(theirs if channels == 3 else theirs.convert("L"), np.float32).reshape(48, 40, channels)
        np.testing.assert_allclose(x, wanted / 255, atol=3 / 255, err_msg=f"{kind} {mode}")


def test_of_several_images_in_a_file_it_is_the_first() -> None:
    first, second = Image.fromarray(picture(1)), Image.fromarray(picture(2))
    for kind in ("GIF", "PNG"):
        stream = io.BytesIO()
        first.save(stream, kind, save_all=True, append_images=[second])
        assert pictures.fault(stream.getvalue()) is None
        x = pictures.decoder(3, None)(tf.constant(stream.getvalue())).numpy()
        np.testing.assert_array_equal(np.round(x * 255), picture(1))


def test_broken_images_and_one_that_goes_away_are_named_with_what_is_wrong(pets: Path) -> None:
    train, _ = images(str(pets))
    path = Path(train.raw["path"][4])
    data = path.read_bytes()
    path.unlink()
    assert broken(train) == [Broken(None, 4, 1, str(path), "cannot be read (No such file or directory)")]
    path.write_bytes(data)
    png, jpeg = encoded(picture(0)), encoded(picture(0, 64, 64), "JPEG")
    flipped = bytearray(png)
    flipped[len(png) // 2] ^= 16
    faults = {
        "1.png": (b"", "is empty"),
        "2.png": (b"a text", "is no PNG, JPEG, GIF or BMP that can be read (cannot identify image file)"),
        "3.png": (png[:-40], "that can be read ("),
        "4.png": (bytes(flipped), "that can be read ("),
        "5.jpg": (jpeg[:-200], "that can be read (image file is truncated"),
        "6.png": (png[:-3], "is cut off at its end"),
        "7.png": (encoded(picture(0, 6, 7)), "is 6x7 pixels, not 6x5 (data.build.image_size=[6,5] brings all to one"),
        "8.gif": (encoded(picture(0), "GIF")[:-2], "is cut off at its end"),
        "9.jpg": (encoded(picture(0), "TIFF"), "is no PNG, JPEG"),
    }
    for name, (data, _) in faults.items():
        write(pets / "dog/zz" / name, data)
    write(pets / "dog/zz/whole.bmp", encoded(picture(0), "BMP"))
    found: dict[str, str] = {}
    for part in images(str(pets)):
        assert part.look is not None
        assert part.look(part, 0, 1, False) == []
        assert broken(part, 4) == broken(part)
        found |= {Path(each.name).name: each.why for each in broken(part)}
        assert {each.name: each.first for each in broken(part)} == {
            path: row for row, path in enumerate(part.raw["path"]) if Path(path).name in faults
        }
        assert not broken(part.without(broken(part)))
    assert set(found) == set(faults)
    assert not [name for name, (_, words) in faults.items() if words not in found[name]], found
    train, _ = images(str(pets), image_size=[6, 5])
    assert "7.png" not in " ".join(each.name for each in broken(train))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP"])
def test_what_is_not_found_broken_can_be_trained_wherever_it_is_cut(kind: str) -> None:
    data = encoded(picture(3, 12, 10), kind)
    decode = pictures.decoder(3, None)
    cuts = sorted({*range(1, len(data), max(1, len(data) // 40)), *range(len(data) - 15, len(data))})
    passed = [cut for cut in cuts if pictures.fault(data[:cut]) is None]
    # What ends the file after its last image is missed by nobody.
    assert len(passed) <= (kind == "GIF")
    for cut in passed:
        decode(tf.constant(data[:cut]))


def test_training_images_vary_by_the_seed_and_the_others_do_not(pets: Path) -> None:
    options = {"flip": True, "shift": 0.3, "brightness": 0.2, "contrast": 0.2}
    train, validation = images(str(pets), augment=options)
    assert train.augment is not None
    assert validation.augment is None
    x, y = made(train)[0]
    augment = tf.function(train.augment, autograph=False)
    seeds = tf.constant([[seed, 7] for seed in range(40)], tf.int32)
    varied = [augment((x, y), seed) for seed in seeds]
    mapped = tf.map_fn(lambda seed: train.augment((x, y), seed)[0], seeds, fn_output_signature=tf.float32)
    for (vx, vy), same, seed in zip(varied, mapped, seeds, strict=True):
        assert vx.shape == x.shape
        assert vy.numpy() == y
        assert 0 <= float(tf.reduce_min(vx)) <= float(tf.reduce_max(vx)) <= 1
        np.testing.assert_allclose(vx, same, atol=1e-6)
        np.testing.assert_array_equal(vx, augment((x, y), seed)[0])
    assert len({vx.numpy().tobytes() for vx, _ in varied}) > 30


def test_each_option_of_an_augmentation_does_what_it_says_and_all_at_0_is_none() -> None:
    x = tf.constant(picture(0) / 255, tf.float32)
    seeds = [tf.constant([seed, 0]) for seed in range(60)]

    def all_of(**options: Any) -> list[Array]:
        vary = pictures.augmenter(options)
        assert vary is not None
        return [vary(x, seed).numpy() for seed in seeds]

    flipped = {each.tobytes() for each in all_of(flip=True)}
    assert flipped == {x.numpy().tobytes(), x.numpy()[:, ::-1].tobytes()}
    moved = {
        np.pad(x, [(1, 1), (1, 1), (0, 0)])[top : top + 6, left : left + 5].tobytes()
        for top in range(3)
        for left in range(3)
    }
    assert {each.tobytes() for each in all_of(shift=0.2)} == moved
    inside = (x.numpy() > 0.2) & (x.numpy() < 0.8)
    deltas = [(each - x.numpy())[inside] for each in all_of(brightness=0.1)]
    assert max(np.ptp(delta) for delta in deltas) < 1e-6
    assert 0.05 < max(abs(float(delta.mean())) for delta in deltas) < 0.1
    middle = (x.numpy() > 0.3) & (x.numpy() < 0.7)
    means = x.numpy().mean(axis=(0, 1))
    slopes = [((each - means) / (x.numpy() - means))[middle] for each in all_of(contrast=0.1)]
    assert max(np.ptp(slope) for slope in slopes) < 1e-2
    assert 0.9 < min(float(slope.mean()) for slope in slopes) < max(float(slope.mean()) for slope in slopes) < 1.1
    assert pictures.augmenter(True) is not None
    assert pictures.augmenter({"flip": False, "shift": 0, "brightness": 0, "contrast": 0}) is None


@pytest.mark.parametrize(("arguments", "words"), [
    ({"path": None}, "Expected data.path to be a folder of images by class for data=images, received none. Try "),
    ({"path": "/nowhere"}, "Expected /nowhere to be a folder of images by class, received no such folder. Try "),
    ({"path": "cat/1.PNG"}, "to be a folder of images by class, received a file. Try data.path=FOLDER"),
    ({"path": "cat/more"}, "cat/more, one a class, received none. Try data.path=FOLDER"),
    ({"path": "cat"}, "Expected two or more folders of images in"),
    ({"channels": 4}, "Expected channels of 1 or 3 for data=images, received 4. Try data.build.channels=3."),
    ({"image_size": [3]}, "Expected image_size to be a height and a width in pixels for data=images, received [3]."),
    ({"image_size": [3, 0]}, "received [3, 0]. Try 'data.build.image_size=[32,32]'."),
    ({"image_size": 32}, "received 32. Try 'data.build.image_size=[32,32]'."),
    ({"validation_fraction": 1.0}, "Expected a validation_fraction between 0 and 1"),
    ({"augment": {"zoom": 1}}, "to have flip, shift, brightness, contrast, received zoom. Try"),
    ({"augment": {"shift": 1}}, "augment.shift to be from 0 to below 1, received 1. Try data.build.augment.shift"),
    ({"augment": {"flip": 1}}, "Expected data.build.augment.flip to be true or false, received 1."),
    ({"augment": 3}, "Expected data.build.augment to be true or keys with values, received 3."),
], ids=str)  # fmt: skip
def test_images_that_cannot_be_are_refused_in_words(pets: Path, arguments: dict[str, Any], words: str) -> None:
    given = {"path": str(pets), **arguments}
    if arguments.get("path"):
        given["path"] = str(pets / arguments["path"])
    with pytest.raises(DataError) as refused:
        images(**given)
    assert words in str(refused.value)


def test_a_class_without_images_is_a_flaw_of_the_training_part_and_folders_without_any_are_named(pets: Path) -> None:
    (pets / "emu").mkdir()
    train, validation = images(str(pets))
    assert train.class_names == ("cat", "dog", "emu")
    assert train.flaws == (f"no images (.png, .jpg, .jpeg, .gif, .bmp) of class emu in {pets}/emu",)
    assert validation.flaws == ()
    for file in pets.rglob("*.PNG"):
        file.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"received 15 files of which none can be read\. Try another data\.path"):
        images(str(pets))
    for file in pets.rglob("*.PNG"):
        file.unlink()
    words = rf"Expected images \(.*\) in {pets}, received none\. Try data\.path=FOLDER with"
    with pytest.raises(DataError, match=words):
        images(str(pets))


def test_a_class_that_is_only_validated_is_named(tmp_path: Path) -> None:
    path = fill(tmp_path, "train/cat train/dog val/cow")
    with pytest.raises(DataError, match=r"val to have classes that train \(cat, dog\), received cow\. Try the same"):
        images(path)


def test_a_bmp_whose_colours_would_be_wrong_is_refused(pets: Path) -> None:
    write(pets / "cat/grey.bmp", encoded(picture(0), "BMP", "L"))
    images(str(pets))
    for mode in ("P", "1"):
        write(pets / "cat/few.bmp", encoded(picture(0), "BMP", mode))
        words = r"or grey ones of 8, received .*few\.bmp, which is a BMP with a palette .* Try conv"
        with pytest.raises(DataError, match=words):
            images(str(pets))


# ---- numpy


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
    (x, y), (x_validation, y_validation) = numpy(save(tmp_path / name, {**train, **held, "more": np.zeros(3)}))
    np.testing.assert_array_equal(x, train["x_train"][..., None] / np.float32(255))
    np.testing.assert_array_equal(x_validation, held[f"x{ending}"][..., None] / np.float32(255))
    assert (x.dtype.name, y.dtype.name, y.tolist()) == ("float32", "int32", [0, 1] * 5)
    assert y_validation.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("ending", ["", "_train"])
def test_a_part_of_arrays_is_held_out_where_none_is_for_validation(tmp_path: Path, ending: str) -> None:
    saved = arrays(20, ending)
    (x, y), (x_validation, y_validation) = numpy(save(tmp_path / "a.npz", saved), validation_fraction=0.3)
    assert np.bincount(y_validation).tolist() == [3, 3]
    numbers = np.round(np.concatenate([x, x_validation])[:, 0, 0, 0] * 255).astype(int)
    assert sorted(numbers.tolist()) == list(range(20))
    np.testing.assert_array_equal(numbers % 2, np.concatenate([y, y_validation]))


def test_types_of_arrays(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npz", {"x": np.arange(20, dtype=np.int64).reshape(10, 2), "y": np.arange(10) / 2})
    (x, y), _ = numpy(path)
    assert (x.dtype.name, y.dtype.name, x.shape) == ("float32", "float32", (8, 2))
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
    saved = {"x": np.arange(20.0), "y": y[:, None]}
    train, held = numpy(save(tmp_path / "a.npz", saved))
    assert isinstance(train, Examples)
    assert isinstance(held, Examples)
    assert (train.class_names, train.num_classes, train.count, held.count) == (("cat", "dog", "emu"), 3, 16, 4)
    for x, label in [*made(train), *made(held)]:
        assert train.class_names[label] == str(y[int(x)].decode() if kind == "S" else y[int(x)])
    parts = {"x_train": np.array([1.0, np.nan]), "y_train": y[:2], "x_val": np.arange(20.0), "y_val": y}
    train, held = numpy(save(tmp_path / "b.npz", parts))
    assert isinstance(train, Examples)
    assert train.flaws == ("no training examples of class dog",)
    assert [each.why for each in broken(train)] == ["has NaN or infinity"]


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
def test_arrays_that_cannot_be_trained_on_are_refused_in_words(
    tmp_path: Path, name: str, saved: dict[str, Array], words: str
) -> None:
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


COUNTED = {
    "classes": {"x": np.ones((100, 2)), "y": np.arange(100)[:, None] % 7},
    "quantities": {"x": np.ones((100, 2)), "y": np.arange(100) / 3},
    "text": {"x": np.ones((100, 2)), "y": np.array(["a", "b", "c", "c"] * 25)},
    "held out": arrays(30, "_train") | arrays(9, "_val"),
}


@pytest.mark.parametrize("saved", COUNTED.values(), ids=COUNTED)
@pytest.mark.parametrize("name", ["data.npz", "folder"])
def test_examples_are_counted_as_they_are_trained_on(tmp_path: Path, name: str, saved: dict[str, Array]) -> None:
    path = save(tmp_path / name, saved)
    train, _ = numpy(path, validation_fraction=0.3)
    assert training_examples(path, validation_fraction=0.3) == (
        train.count if isinstance(train, Examples) else len(train[1])
    )


def test_broken_arrays_and_too_few_examples_are_refused_before_anything_starts(asked: Any, tmp_path: Path) -> None:
    whole = Path(save(tmp_path / "whole.npz", arrays(100))).read_bytes()
    flipped = bytearray(whole)
    flipped[600] ^= 1
    write(tmp_path / "flipped.npz", bytes(flipped))
    write(tmp_path / "cut.npz", whole[:-300])
    shards.write(tmp_path / "prepared", [40, 43])
    for number in range(8):
        write(tmp_path / "pets" / "ab"[number % 2] / f"{number}.png", encoded(picture(number)))
    write(tmp_path / "t.csv", TABLE.encode())
    pd.DataFrame({"x": np.arange(50) / 3, "y": [0.5, 1.5] * 25}).to_parquet(tmp_path / "t.parquet")
    batch = "training data for at least one global batch of {}, received {} examples. Try {}, or data.on_error="
    few = "train.replica_batch=90"
    for arguments, words in (
        (["data=numpy", "data.path=flipped.npz"], "Expected flipped.npz to hold arrays that NumPy saved, received"),
        (["data=numpy", "data.path=cut.npz"], "Expected cut.npz to hold arrays that NumPy saved, received"),
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


# ---- csv

TABLE = "height,weight,old,kind\n" + "".join(f"{n},{n * n / 4},{n % 3 == 0},{'ab'[n % 2]}\n" for n in range(20))


def table(part: Examples) -> Array:
    """The rows of a part, x and y together, sorted."""
    rows = np.column_stack(part.raw)
    return rows[np.lexsort(rows.T[::-1])]


@pytest.mark.parametrize("name", ["t.csv", "t.csv.gz", "t.parquet"])
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


def test_rows_without_numbers_are_named_by_their_lines(tmp_path: Path) -> None:
    text = "a,b,y\n1,2,0.5\n,3,1\n\n4,,1\n5,6,\n7,8,9\n9,inf,9\n10,11,9\n\n\n"
    path = str(write(tmp_path / "t.csv", text.encode()))
    found = {each.name: each.why for part in csv(path) for each in broken(part, 3)}
    assert found == {
        f"{path} line 3": "has no number in a",
        f"{path} line 5": "has no number in b",
        f"{path} line 6": "has no number in y",
        f"{path} line 8": "has no number in b",
    }
    for part in csv(path):
        left = part.without(broken(part))
        assert not broken(left)
        assert np.isfinite(table(left)).all()
    frame = pd.DataFrame({"a": [1.0, np.nan, 3, 4, 5], "y": [0, 1, 0, 1, 0]})
    frame.to_parquet(tmp_path / "t.parquet")
    found = {each.name: each.why for part in csv(str(tmp_path / "t.parquet")) for each in broken(part)}
    assert found == {f"{tmp_path}/t.parquet row 1": "has no number in a"}


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
def test_a_table_is_read_however_it_is_written(
    tmp_path: Path, text: str | bytes, arguments: dict[str, Any], classes: list[str], told: list[str]
) -> None:
    path = str(write(tmp_path / "t.csv", text if isinstance(text, bytes) else text.encode()))
    train, validation = csv(path, standardize=False, **arguments)
    assert train.class_names == tuple(classes)
    low = next(number for number, name in enumerate(classes) if name not in ("high", "null", "012", "False"))
    wanted = sorted([a, b, low if y == "low" else 1 - low] for a, b, y in NUMBERS)
    np.testing.assert_array_equal(table_of(train, validation), wanted)
    assert [note.partition(" of ")[0] for note in train.notes] == told


def test_thousands_are_grouped_by_what_the_other_numbers_say(tmp_path: Path) -> None:
    for text in ('a,b,y\n0.5,"1,250",0\n1.5,"2,500",1\n', 'a,b,y\n"0,5",1.250,0\n"1,5",2.500,1\n'):
        parts = csv(str(write(tmp_path / "t.csv", text.encode())), standardize=False)
        np.testing.assert_array_equal(table_of(*parts), [[0.5, 1250, 0], [1.5, 2500, 1]])


def test_missing_numbers_are_none_of_a_label_that_is_a_quantity(tmp_path: Path) -> None:
    path = str(write(tmp_path / "t.csv", b"a,y\n1,0.5\n2,NA\n3,1.5\n4,nan\n5,2.5\n"))
    found = {each.name: each.why for part in csv(path) for each in broken(part)}
    assert found == {f"{path} line 3": "has no number in y", f"{path} line 5": "has no number in y"}


def test_rows_are_named_by_the_line_that_they_begin_in(tmp_path: Path) -> None:
    text = 'a,note,y\n1,"one\ntwo",low\n,"three\n\nfour",low\n3,five,high\n4,six,\n'
    path = str(write(tmp_path / "t.csv", text.encode()))
    with pytest.raises(DataError, match=r"received none in .*t\.csv line 8"):
        csv(path, features=["a"])
    path = str(write(tmp_path / "t.csv", text.replace("six,", "six,low").encode()))
    parts = csv(path, features=["a"])
    assert [each.name for part in parts for each in broken(part)] == [f"{path} line 4"]


def test_tables_named_as_parts_are_the_parts(tmp_path: Path) -> None:
    write(tmp_path / "train.csv", b"a,y\n1,cat\n2,dog\n")
    write(tmp_path / "test.csv", b"a,y\n3,cat\n4,emu\n")
    train, validation = csv(str(tmp_path), standardize=False)
    assert (table(train).tolist(), table(validation).tolist()) == ([[1, 0], [2, 1]], [[3, 0], [4, 2]])
    assert (len(train.notes), train.flaws) == (1, ("no training examples of class emu",))
    write(tmp_path / "val.csv", b"a,y\n3,cat\n4,dog\n")
    assert csv(str(tmp_path))[0].flaws == ()


def test_ids_that_float32_rounds_and_leading_zeros_of_a_feature_are_told(tmp_path: Path) -> None:
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
def test_tables_that_cannot_be_trained_on_are_refused_in_words(
    tmp_path: Path, text: bytes, arguments: dict[str, Any], words: str
) -> None:
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


# ---- tfds


# Once a process, which has a class of each name once; its tests may not come one after the other.
@pytest.fixture(scope="session")
def catalogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two data sets that the library has prepared: grey_squares, whose version 1.2.0 has splits train and test, and
    mixed, with images of several sizes and no keys."""
    import tensorflow_datasets as library

    folder = tmp_path_factory.mktemp("catalogue")

    class GreySquares(library.core.GeneratorBasedBuilder):
        """Squares of one grey."""

        VERSION = library.core.Version("1.2.0")
        SPLITS: ClassVar = {"train": 20, "test": 6}
        KEYS: ClassVar = ("image", "label")
        SIZES = 1

        def _info(self) -> Any:
            features = {
                "image": library.features.Image(shape=(4, 3, 3) if self.SIZES == 1 else (None, None, 3)),
                "label": library.features.ClassLabel(names=["even", "odd"]),
                "amount": np.float32,
            }
            return library.core.DatasetInfo(
                builder=self, features=library.features.FeaturesDict(features), supervised_keys=self.KEYS
            )

        def _split_generators(self, _: Any) -> Any:
            return {name: self._generate_examples(count) for name, count in self.SPLITS.items()}

        def _generate_examples(self, count: int) -> Any:
            for n in range(count):
                size = (4 + n % self.SIZES, 3, 3)
                yield n, {"image": np.full(size, n, np.uint8), "label": n % 2, "amount": n / 2}

    class Mixed(GreySquares):
        """Of several sizes."""

        SPLITS: ClassVar = {"train": 10}
        KEYS = None
        SIZES = 2

    for build in (GreySquares, Mixed):
        build(data_dir=str(folder)).download_and_prepare()
    return folder


def read(part: Examples) -> list[tuple[Array, Any]]:
    """The examples of a part of records, made as training makes them."""
    parsed = []
    for segment in part.raw:
        records = tf.data.TFRecordDataset(segment.path).skip(segment.first).take(segment.records)
        parsed += list(records.map(tf.autograph.experimental.do_not_convert(part.decode)).as_numpy_iterator())
    records = tf.stack(list(tf.data.TFRecordDataset(part.raw[0].path)))
    tf.map_fn(part.decode, records, fn_output_signature=part.spec)
    return parsed


def test_a_prepared_data_set_is_read_by_its_name(catalogue: Path) -> None:
    for name in ("grey_squares", "grey_squares:1.2.0", "grey_squares:1.*.*"):
        train, validation = tfds(name, data_dir=str(catalogue))
        assert validation is not None
        assert (train.count, validation.count, train.num_classes) == (20, 6, 2)
    assert train.class_names == ("even", "odd")
    assert train.spec == (tf.TensorSpec([4, 3, 3], tf.float32), tf.TensorSpec([], tf.int32))
    examples = read(train)
    assert sorted(round(float(x[0, 0, 0]) * 255) for x, _ in examples) == list(range(20))
    for x, y in examples:
        np.testing.assert_array_equal(x, np.full((4, 3, 3), x[0, 0, 0]))
        assert round(float(x[0, 0, 0]) * 255) % 2 == y
    assert not broken(train)
    assert train.digest == tfds("grey_squares", data_dir=str(catalogue))[0].digest != validation.digest


def test_a_folder_of_a_version_is_read_and_splits_may_be_parts(catalogue: Path) -> None:
    path = str(catalogue / "grey_squares/1.2.0")
    train, validation = tfds("mine", path=path, train_split="train[:30%]", validation_split="train[30%:]")
    assert validation is not None
    assert (train.count, validation.count) == (6, 14)
    seen = [[round(float(x[0, 0, 0]) * 255) for x, _ in read(part)] for part in (train, validation)]
    assert sorted(seen[0] + seen[1]) == list(range(20))
    assert tfds("mine", path=path, validation_split=None)[1] is None
    (_, y), *_ = read(tfds("mine", path=path, keys=["image", "amount"])[0])
    assert y.dtype == np.float32


def test_images_of_several_sizes_are_brought_to_one(catalogue: Path) -> None:
    arguments: Any = {"data_dir": str(catalogue), "keys": ["image", "label"], "validation_split": None}
    with pytest.raises(DataError, match=r"of one shape in mixed/1\.2\.0, received \['any', 'any', 3\] and \[\]\. Try"):
        tfds("mixed", **arguments)
    train, _ = tfds("mixed", image_size=[2, 5], **arguments)
    assert {x.shape for x, _ in read(train)} == {(2, 5, 3)}


def test_what_is_to_be_downloaded_is_prepared_first(catalogue: Path, tmp_path: Path) -> None:
    train, _ = tfds("grey_squares", data_dir=str(tmp_path), download=True)
    assert train.count == 20
    assert tfds("grey_squares", data_dir=str(tmp_path))[0].count == 20


def test_broken_records_of_a_prepared_data_set_are_named(catalogue: Path, tmp_path: Path) -> None:
    shutil.copytree(catalogue / "grey_squares/1.2.0", tmp_path / "1.2.0")
    train, validation = tfds("mine", path=str(tmp_path / "1.2.0"), train_split="train[:15]")
    assert validation is not None
    file = Path(train.raw[0].path)
    whole = file.read_bytes()
    starts = [frame.start for frame in frames(io.BytesIO(whole))]
    flipped = bytearray(whole)
    flipped[starts[3] + 20] ^= 1
    file.write_bytes(bytes(flipped))
    (found,) = broken(train)
    assert (found.first, found.examples, found.name) == (3, 1, f"{file} record 3")
    assert sum(each.records for each in train.without([found]).raw) == 14
    file.write_bytes(whole[: starts[5] + 20])
    (found,) = broken(train)
    assert (found.first, found.examples, found.why) == (5, 10, "is cut off")
    file.write_bytes(whole[: starts[5]])
    (found,) = broken(train)
    assert (found.first, found.examples) == (5, 10)
    file.unlink()
    assert validation.look is not None
    assert train.look is not None
    assert validation.look(validation, 0, 1, False) == []
    (found,) = train.look(train, 0, 1, False)
    assert (found.examples, found.name, found.why) == (15, str(file), "cannot be read (No such file or directory)")


@pytest.mark.parametrize(("name", "arguments", "words"), [
    ("mnist", {}, "Expected data.name=mnist to be prepared in {}, received none there. Try data.build.download=true"),
    ("grey_squares:2.0.0", {}, "Expected data.name=grey_squares:2.0.0 to be prepared in {}, received none there."),
    ("no such", {}, "Expected no such to be a data set of TensorFlow Datasets that can be had, received: Parsing"),
    ("nowhere", {"download": True}, "Expected nowhere to be a data set of TensorFlow Datasets that can be had"),
    ("a", {"path": "{}"}, "to be the folder of a version that TensorFlow Datasets prepared, received {} without fea"),
    ("grey_squares", {"train_split": "trian"}, "data.build.train_split to be a split of grey_squares/1.2.0 (train"),
    ("grey_squares", {"train_split": "train[5"}, "or a part of one, received train[5. Try data.build.train_split=tr"),
    ("grey_squares", {"train_split": "train[:0]"}, "Expected examples in data.build.train_split=train[:0] of"),
    ("grey_squares", {"keys": ["image"]}, "to be two features of grey_squares/1.2.0 (amount, image, label), receiv"),
    ("grey_squares", {"image_size": [0, 1]}, "Expected image_size to be a height and a width in pixels for data=tfds"),
    ("mixed", {"validation_split": None}, "received none, and it names none itself. Try 'data.build.keys=[image,la"),
    ("mixed", {"keys": ["image", "label"], "image_size": [2, 2]},
     "Expected a split validation or test in mixed/1.2.0, received train. Try"),
], ids=str)  # fmt: skip
def test_data_sets_that_cannot_be_had_are_refused_in_words_at_once(
    catalogue: Path, name: str, arguments: dict[str, Any], words: str
) -> None:
    given = {key: value.format(catalogue) if key == "path" else value for key, value in arguments.items()}
    # Which takes many seconds on a busy machine, once.
    import tensorflow_datasets  # noqa: F401

    start = time.monotonic()
    with pytest.raises(DataError) as refused:
        tfds(name, data_dir=str(catalogue), **given)
    assert words.format(catalogue) in str(refused.value)
    assert time.monotonic() - start < 10


def test_without_the_library_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(DataError, match=r"Try pip install 'distributed-keras-pipeline\[tfds\]'\."):
        tfds("mnist")

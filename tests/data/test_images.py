"""Folders of images: which are classes and which parts, what is trained of each picture, and what is broken."""

import io
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import QUICK, logged, runs
from own_files import Array, broken, encoded, flipped, made, picture, write
from PIL import Image

from pipeline.data import DataError, folders, images, pictures
from pipeline.data.examples import Broken


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
    assert (train.class_names, train.num_classes, train.count, validation.count) == (("cat", "dog"), 2, 12, 3)
    assert Counter(validation.raw["label"].tolist()) == {0: 2, 1: 1}
    every = [pair for part in (train, validation) for pair in zip(part.raw["path"], made(part), strict=True)]
    assert {int(Path(file).stem) for file, _ in every} == set(range(15))
    for file, (x, y) in every:
        np.testing.assert_array_equal(x, picture(int(Path(file).stem)).astype(np.float32) / np.float32(255))
        assert y == (int(Path(file).stem) >= 10)
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


@pytest.mark.parametrize(("layout", "train", "trained", "validated", "notes"), [
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
    ("cat dog cat/5.WEBP dog/5.WEBP cat/notes.txt", "", 8, 2, ["2 of .webp"]),
])  # fmt: skip
def test_what_folders_are_is_found_by_what_is_in_them(tmp_path, layout, train, trained, validated, notes):
    parts = images(fill(tmp_path, layout))
    assert [part.class_names for part in parts] == [("cat", "dog")] * 2
    assert [part.count for part in parts] == [trained, validated]
    assert {Path(name).relative_to(tmp_path / train).parts[0] for name in parts[0].raw["path"]} == {"cat", "dog"}
    for part in parts:
        assert [number for _, number in made(part)] == ["/dog/" in name for name in part.raw["path"]]
    assert not [words for words in notes if words not in " ".join(parts[0].notes)]
    assert bool(parts[0].notes) is bool(notes)


@pytest.mark.parametrize(("layout", "offer"), [
    ("train test train.csv", "data.build.classes=[test,train]"),
    ("fold1/cat fold1/dog fold2/cat fold2/dog", "data.build.classes=[fold1,fold2]"),
    ("train/cat train/dog test/cat more/dog", "data.path=/train data.build.validation_path=/test"),
    ("train/cat train/dog val/cat dev/cat", "data.path=/train data.build.validation_path=/dev"),
    ("cat dog val/cat val/dog", "data.build.classes=[cat,dog] data.build.validation_path=/val"),
    ("val/cat val/dog test/cat", "data.build.classes=[test,val]"),
    ("train/cat train/dog valid/cat valid/emu", "data.build.classes=[cat,dog]"),
])  # fmt: skip
def test_folders_that_may_be_parts_or_classes_are_asked_about_and_the_answer_is_taken(tmp_path, layout, offer):
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
    # Beside others that are classes, folders named as parts are some too.
    assert images(fill(tmp_path / "all", "train plane car"))[0].class_names == ("car", "plane", "train")


def test_images_are_brought_to_a_size_and_grey_stays_what_it_was(tmp_path: Path) -> None:
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    write(tmp_path / "a/1.png", encoded(grey, mode="L"))
    write(tmp_path / "a/2.png", encoded(picture(2, 33, 20)))
    write(tmp_path / "b/1.png", encoded(picture(1, 4, 4)))
    write(tmp_path / "b/2.png", encoded(grey, mode="L"))
    train, validation = images(str(tmp_path), image_size=[16, 16], channels=1)
    every = (pair for part in (train, validation) for pair in zip(part.raw["path"], made(part), strict=True))
    found = {Path(name).parts[-2:]: x for name, (x, _) in every}
    assert {x.shape for x in found.values()} == {(16, 16, 1)}
    np.testing.assert_allclose(found["a", "1.png"][..., 0], grey / 255, atol=1e-7)
    theirs = Image.fromarray(picture(2, 33, 20)).resize((16, 16), Image.Resampling.BILINEAR).convert("L")
    np.testing.assert_allclose(found["a", "2.png"][..., 0], np.asarray(theirs) / 255, atol=2 / 255)
    assert not broken(train)


@pytest.mark.parametrize("channels", [1, 3])
def test_what_pillow_reads_of_every_kind_is_what_is_trained_the_first_of_several_in_a_file(channels: int) -> None:
    blocks = np.kron(picture(0), np.ones((8, 8, 1), np.uint8))
    modes = {"PNG": "RGB RGBA L LA P 1 I;16", "JPEG": "RGB L CMYK", "BMP": "RGB L", "GIF": "RGB L"}
    for kind, mode in ((one, mode) for one in modes for mode in modes[one].split()):
        if mode == "I;16":
            stream = io.BytesIO()
            Image.fromarray(blocks[..., 0].astype(np.uint16) * 257).save(stream, kind)
            data, theirs = stream.getvalue(), Image.fromarray(blocks[..., 0]).convert("RGB")
        else:
            data = encoded(blocks, kind, mode)
            theirs = Image.open(io.BytesIO(data)).convert("RGB")
        assert pictures.fault(data, (48, 40)) is None
        x = pictures.decoded(tf.constant(data), channels, (48, 40)).numpy()
        wanted = np.asarray(theirs if channels == 3 else theirs.convert("L"), np.float32).reshape(48, 40, channels)
        np.testing.assert_allclose(x, wanted / 255, atol=3 / 255, err_msg=f"{kind} {mode}")
    for kind in ("GIF", "PNG") if channels == 3 else ():
        data = encoded(picture(1), kind, save_all=True, append_images=[Image.fromarray(picture(2))])
        assert pictures.fault(data) is None
        np.testing.assert_array_equal(np.round(pictures.decoded(tf.constant(data), 3, None) * 255), picture(1))


def test_broken_images_and_one_that_goes_away_are_named_with_what_is_wrong(pets: Path) -> None:
    train, _ = images(str(pets))
    path = Path(train.raw["path"][4])
    data = path.read_bytes()
    path.unlink()
    assert broken(train) == [Broken(None, 4, 1, str(path), "cannot be read (No such file or directory)")]
    path.write_bytes(data)
    png, jpeg = encoded(picture(0)), encoded(picture(0, 64, 64), "JPEG")
    faults = {
        "1.png": (b"", "is empty"),
        "2.png": (b"a text", "is no PNG, JPEG, GIF or BMP that can be read (cannot identify image file)"),
        "3.png": (png[:-40], "that can be read ("),
        "4.png": (flipped(png, len(png) // 2, 16), "that can be read ("),
        "5.jpg": (jpeg[:-200], "that can be read (image file is truncated"),
        "6.png": (png[:-3], "is cut off at its end"),
        "7.png": (encoded(picture(0, 6, 7)), "is 6x7 pixels, not 6x5 (data.build.image_size=[6,5] brings all to one"),
        "8.gif": (encoded(picture(0), "GIF")[:-2], "is cut off at its end"),
        "9.jpg": (encoded(picture(0), "TIFF"), "is no PNG, JPEG"),
    }
    for name, (data, _) in faults.items():
        write(pets / "dog/zz" / name, data)
    write(pets / "dog/zz/whole.bmp", encoded(picture(0), "BMP"))
    (pets / "dog/zz/10.png").symlink_to("../annex/10.png")
    faults["10.png"] = b"", "cannot be read (No such file or directory)"
    found: dict[str, str] = {}
    for part in images(str(pets)):
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
    cuts = sorted({*range(1, len(data), max(1, len(data) // 40)), *range(len(data) - 15, len(data))})
    passed = [cut for cut in cuts if pictures.fault(data[:cut]) is None]
    # What ends the file after its last image is missed by nobody.
    assert len(passed) <= (kind == "GIF")
    for cut in passed:
        pictures.decoded(tf.constant(data[:cut]), 3, None)


def test_training_images_vary_by_the_seed_and_the_others_do_not(pets: Path) -> None:
    train, validation = images(str(pets), augment={"flip": True, "shift": 0.3, "brightness": 0.2, "contrast": 0.2})
    assert validation.augment is None
    x, y = made(train)[0]
    augment = tf.function(train.augment, autograph=False)
    seeds = tf.constant([[seed, 7] for seed in range(40)], tf.int32)
    varied, again = ([augment((x, y), seed) for seed in seeds] for _ in range(2))
    mapped = tf.map_fn(lambda seed: train.augment((x, y), seed)[0], seeds, fn_output_signature=tf.float32)
    assert {int(label) for _, label in varied} == {y}
    x_varied = np.array([image for image, _ in varied])
    assert 0 <= x_varied.min() <= x_varied.max() <= 1
    np.testing.assert_allclose(x_varied, mapped, atol=1e-6)
    np.testing.assert_array_equal(x_varied, [image for image, _ in again])
    assert len({image.tobytes() for image in x_varied}) > 30


def test_each_option_of_an_augmentation_does_what_it_says_and_all_at_0_is_none() -> None:
    x = tf.constant(picture(0) / 255, tf.float32)
    seeds = [tf.constant([seed, 0]) for seed in range(60)]

    def all_of(**options: Any) -> list[Array]:
        vary = pictures.augmenter(options)
        return [vary(x, seed).numpy() for seed in seeds]

    flipped = {each.tobytes() for each in all_of(flip=True)}
    assert flipped == {x.numpy().tobytes(), x.numpy()[:, ::-1].tobytes()}
    padded = np.pad(x, [(1, 1), (1, 1), (0, 0)])
    moved = {padded[top : top + 6, left : left + 5].tobytes() for top in range(3) for left in range(3)}
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
    path = arguments.get("path", "")
    with pytest.raises(DataError, match=re.escape(words)):
        images(**{**arguments, "path": None if path is None else str(pets / path)})


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
    path = fill(pets.parent / "parts", "train/cat train/dog val/cow")
    with pytest.raises(DataError, match=r"val to have classes that train \(cat, dog\), received cow\. Try the same"):
        images(path)


def test_a_bmp_whose_colours_would_be_wrong_is_refused(pets: Path) -> None:
    write(pets / "cat/grey.bmp", encoded(picture(0), "BMP", "L"))
    images(str(pets))
    words = r"or grey ones of 8, received .*few\.bmp, which is a BMP with a palette .* Try conv"
    for mode in ("P", "1"):
        write(pets / "cat/few.bmp", encoded(picture(0), "BMP", mode))
        with pytest.raises(DataError, match=words):
            images(str(pets))


@pytest.mark.slow
def test_images_that_fit_into_memory_are_decoded_once_and_the_same_is_trained_as_without(pipeline, tmp_path):
    for number in range(40):
        write(tmp_path / f"pets/{'cat' if number % 2 else 'dog'}/{number}.png", encoded(picture(number)))
    # After the first epoch there is nothing to read any more.
    gone = "train.callbacks=[{_target_: own.removing, path: pets}]"
    common = (*QUICK, "data=images", "data.path=pets", "data.build.augment=true", "model=mlp", "model.build.hidden=[8]",
              "strategy=mirrored", "workers=2", "train.replica_batch=4", "train.epochs=3", "train.deterministic=true",
              "resume=never")  # fmt: skip
    pipeline(*common, "data.cache=none").ok()
    pipeline(*common, gone).ok()
    losses = [[epoch["loss"] for epoch in logged(folder, "epoch")] for folder in runs(tmp_path)]
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def test_folders_behind_links_are_read_once(tmp_path: Path) -> None:
    data, elsewhere = (write(tmp_path / name / "a.txt", b"a").parent for name in ("data", "elsewhere"))
    (data / "linked").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(data)
    (elsewhere / "itself").symlink_to(elsewhere)
    assert list(folders.files_below(data)) == [data / "a.txt", data / "linked" / "a.txt"]

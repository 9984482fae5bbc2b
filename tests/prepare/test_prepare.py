"""Preparing data: what comes to be in the folder, what is refused, and what survives a kill, by the command itself."""

import hashlib
import io
import itertools
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import sources as own_sources
import tensorflow as tf
from conftest import SUPPORT, UnderWay, environment, left_behind
from distributed import LocalCluster
from own_files import encoded, flipped, picture, write

from pipeline.commands import prepare as command
from pipeline.commands.prepare import summary_lines
from pipeline.config.composing import config_of
from pipeline.config.schema import PrepareConfig
from pipeline.data import records, tfrecord
from pipeline.data.errors import DataError
from pipeline.data.records import Feature
from pipeline.errors import UserError
from pipeline.launch import LaunchError
from pipeline.prepare import cluster, filling, sources, work
from pipeline.prepare.folder import Folder, FolderState
from pipeline.worker.data import conversion, loading

OWN_SOURCE = "data.build._target_=sources."


def prepared(folder: Path, *overrides: str, processes: int = 1, say: Callable[[str], Any] = print) -> filling.Prepared:
    """What comes of a command, made in this process, which stands for workers that begin with nothing kept."""
    search = (str(SUPPORT), *sys.path)
    config = config_of(PrepareConfig, [f"out={folder}", *overrides])
    command.check(config, search)

    def on_each(function: Callable[..., Any], *arguments: Any) -> Iterator[Any]:
        for _ in range(processes):
            work._parts.cache_clear()
            work._source.cache_clear()
            yield function(*arguments)

    shows: Any = SimpleNamespace(say=say, begin=lambda *_: None, done=lambda _: None)
    workers: Any = SimpleNamespace(on_each=on_each, results=itertools.starmap)
    return filling.prepare(config, search, lambda: nullcontext(workers), shows)


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every shard."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.glob("*.tfrecord"))}


def stored(folder: Path, split: str = "train") -> list[dict[str, list[Any]]]:
    """The features of every record of a split, in order."""
    files = (io.BytesIO(path.read_bytes()) for path in sorted(folder.glob(f"{split}-*.tfrecord")))
    return [records.parsed(frame.data or b"") for file in files for frame in records.frames(file)]


def read_back(folder: Path) -> list[Any]:
    """Every example that trains, in nested structures of arrays, as TensorFlow reads it for training."""
    part, _ = tfrecord(path=str(folder))
    read = tf.data.TFRecordDataset([segment.path for segment in part.raw]).batch(7).map(part.parse).unbatch()
    if part.decode is not None:
        read = read.map(lambda *example: part.decode(example))
    return list(read.as_numpy_iterator())


def test_arrays_become_shards_of_each_example_once_and_a_manifest_that_says_what_they_are(pipeline, tmp_path):
    arrays = f"{OWN_SOURCE}arrays", "shards=4"
    ran = pipeline("prepare", *arrays, "out=d", "processes=2").ok()
    assert ran.err == ""
    made = records.load_manifest(str(tmp_path / "d"))
    assert made.features == (Feature("x", (4, 4, 1), "float32", "floats"), Feature("y", (), "int32", "ints"))
    assert (made.examples("train"), made.examples("validation"), made.num_classes) == (200, 40, 4)
    assert made.classes("train") == {"0": 50, "1": 50, "2": 50, "3": 50}
    assert {each.file: each.sha256 for split in made.splits.values() for each in split} == checksums(tmp_path / "d")
    assert all((tmp_path / "d" / each.file).stat().st_size == each.bytes for each in made.splits["train"])
    assert [each.examples for each in made.splits["train"]] == [50] * 4
    for said in ("200 examples, 4 shards", "0 50, 1 50, 2 50, 3 50", "python -m pipeline data=tfrecord data.path=d"):
        assert said in ran.out
    before = checksums(tmp_path / "d")
    assert {path.name for path in tmp_path.glob("d/*")} == {".prepare", "manifest.json", *before}
    assert [path.name for path in (tmp_path / "d/.prepare").iterdir()] == ["lock"]
    for split, (x, y) in zip(("train", "validation"), own_sources.arrays(), strict=True):
        shuffled = [(*each["x"], each["y"][0]) for each in stored(tmp_path / "d", split)]
        in_order = [(*row, int(label)) for row, label in zip(x.reshape(-1, 16).tolist(), y, strict=True)]
        assert sorted(shuffled) == sorted(in_order)
        assert shuffled != in_order
    # A shard that a finished folder lacks is made again.
    (tmp_path / "d/train-00002-of-00004.tfrecord").unlink()
    assert prepared(tmp_path / "d", *arrays).reused == 4
    assert checksums(tmp_path / "d") == before
    # One process makes the same bytes, and another seed makes others.
    for seed in (0, 1):
        prepared(tmp_path / f"seed {seed}", *arrays, f"seed={seed}")
        assert (checksums(tmp_path / f"seed {seed}") == before) is (seed == 0)


def test_workers_import_no_tensorflow_for_arrays_tables_and_images(tmp_path, photos):
    write(tmp_path / "table.csv", b"a,b\n" + b"".join(b"%d,%d\n" % (row, row % 2) for row in range(20)))
    builds = [
        *({"_target_": f"pipeline.data.{name}"} for name in ("digits", "mnist5k")),
        {"_target_": "pipeline.data.csv", "path": "table.csv"},
        {"_target_": "pipeline.data.images", "path": str(photos)},
    ]
    code = (
        "import sys; from pipeline.prepare import work\n"
        f"for build in {builds}:\n"
        "    job = work.ShardJob('d', build, num_classes=None, seed=0, validation_fraction=0.0, skip=False)\n"
        "    found = work.describe(job)\n"
        "    made = work.shard(job, 'train', 0, 1, found.digest)\n"
        "    assert made.shard.examples == found.parts['train'].examples, made\n"
        "assert not {'tensorflow', 'keras', 'hydra', 'dask', 'sklearn', 'mlxtend'} & set(sys.modules), 'slow'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), check=True)


def test_nested_arrays_of_every_kind_read_back_as_they_were(tmp_path):
    made = prepared(tmp_path / "d", f"{OWN_SOURCE}nested").manifest
    wanted, _ = own_sources.nested()
    found, leaves = read_back(tmp_path / "d"), records.flat(wanted)
    assert len(found) == 50
    for example in found:
        row = wanted[2].tolist().index(float(example[2]))
        for name, value in records.flat(example).items():
            np.testing.assert_array_equal(value, leaves[name][row], name)
            assert np.asarray(value).dtype == leaves[name].dtype, name
    assert {each.name: each.stored for each in made.features} == {
        "x/ids": "ints", "x/deep/double": "bytes", "x/deep/half": "bytes", "x/deep/scalar": "bytes",
        "x/places/0": "bytes", "x/places/1": "bytes", "x/places/2": "bytes", "x/places/3": "ints",
        "y/0": "floats", "y/1": "ints", "weight": "floats",
    }  # fmt: skip


def test_streams_are_gathered_once_and_shuffled_over_all_shards_of_their_split(tmp_path):
    made = prepared(tmp_path / "d", f"{OWN_SOURCE}stream", "shards=4", "validation_fraction=0.2")
    found = stored(tmp_path / "d") + stored(tmp_path / "d", "validation")
    assert sorted((*each["x/a"], each["y"][0]) for each in found) == sorted(
        (*x["a"].tolist(), int(y)) for x, y in own_sources.stream()
    )
    assert (made.manifest.examples("train"), made.manifest.classes("validation")) == (240, {"0": 20, "1": 20, "2": 20})
    assert all(len(each.classes) == 3 for each in made.manifest.splits["train"])
    made = prepared(tmp_path / "e", f"{OWN_SOURCE}two_streams")
    assert (made.manifest.examples("train"), made.manifest.examples("validation")) == (60, 12)
    assert made.manifest.class_names == ("a", "b", "c")
    broken = prepared(tmp_path / "f", f"{OWN_SOURCE}stream", "+data.build.broken=[1,7]", "data.on_error=skip").manifest
    assert (broken.examples("train"), broken.source["skipped"]) == (298, 2)
    # One that can be called for a part of its data is, in as many parts whoever calls it.
    for processes in (1, 2):
        prepared(tmp_path / f"{processes}", f"{OWN_SOURCE}data_set", "shards=2", processes=processes)
    assert checksums(tmp_path / "1") == checksums(tmp_path / "2")
    assert sorted(each["x"][0] for each in stored(tmp_path / "2")) == list(range(100))


def test_prepared_data_are_sharded_anew_by_copying_their_records_without_those_that_are_broken(tmp_path):
    prepared(tmp_path / "d", f"{OWN_SOURCE}arrays", "shards=2")
    again = ("data=tfrecord", f"data.path={tmp_path / 'd'}")
    made = prepared(tmp_path / "e", *again, "shards=7", "seed=3").manifest
    assert made.num_classes == 4
    assert len(made.splits["train"]) == 7
    for split in ("train", "validation"):
        ours, theirs = (sorted(map(repr, stored(tmp_path / name, split))) for name in "de")
        assert ours == theirs
    path = tmp_path / "d/train-00001-of-00002.tfrecord"
    path.write_bytes(flipped(path.read_bytes(), 40))
    with pytest.raises(DataError, match=r"00001-of-00002\.tfrecord record 0 has a wrong checksum"):
        prepared(tmp_path / "f", *again)
    made = prepared(tmp_path / "g", *again, "data.on_error=skip").manifest
    assert (made.examples("train"), made.source["skipped"]) == (199, 1)


@pytest.fixture
def photos(tmp_path) -> Path:
    """Images of two classes, PNG and JPEG."""
    for number in range(20):
        kind, name = ("png", "jpeg")[number % 2], ("cat", "dog")[number // 10]
        write(tmp_path / f"photos/{name}/{number % 10}.{kind}", encoded(picture(number), kind.upper()))
    return tmp_path / "photos"


def test_images_are_stored_as_the_bytes_of_their_files_and_a_source_that_has_changed_is_refused(tmp_path, photos):
    arguments = (f"{OWN_SOURCE}photos", f"+data.build.path={photos}", "shards=2")
    made = prepared(tmp_path / "d", *arguments).manifest
    assert made.features == (Feature("x", (6, 5, None), "float32", "image"), Feature("y", (), "int32", "ints"))
    assert made.class_names == ("cat", "dog")
    assert any("2 classes: cat 10, dog 10" in line for line in summary_lines(filling.Prepared(made, 0, 1.0, 1.0), "d"))
    wanted = {path.read_bytes(): int(path.parent.name == "dog") for path in photos.glob("*/*")}
    found = {bytes(each["x"][0]): each["y"][0] for each in stored(tmp_path / "d")}
    assert found == wanted
    assert all(x.shape == (6, 5, 3) and 0 <= x.min() <= x.max() <= 1 for x, _ in read_back(tmp_path / "d"))
    # A shard is made again, of the same source alone.
    (tmp_path / "d/train-00000-of-00002.tfrecord").unlink()
    next(photos.glob("cat/*.png")).unlink()
    with pytest.raises(DataError, match=r"received one that has changed since\. Try out=ANOTHER"):
        prepared(tmp_path / "d", *arguments)


def test_tables_train_once_they_are_prepared(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,kind\n" + "".join(f"{n},{n / 3},{'no yes'.split()[n % 2]}\n" for n in range(20)))
    made = prepared(tmp_path / "e", "data=csv", f"data.path={path}").manifest
    assert (made.class_names, made.examples("train"), made.examples("validation")) == (("no", "yes"), 16, 4)
    assert all(x.shape == (2,) and x.dtype == np.float32 for x, _ in read_back(tmp_path / "e"))
    path.write_text("a,kind\n" + "".join(f"{'' if n == 7 else n},{n % 2}\n" for n in range(20)))
    with pytest.raises(DataError, match=r"t\.csv line 9 has no number in a"):
        prepared(tmp_path / "f", "data=csv", f"data.path={path}")


@pytest.mark.slow
def test_files_of_another_kind_of_record_are_read_one_by_one_and_what_is_broken_left_out(tmp_path):
    source = f"{OWN_SOURCE}foreign_records", f"+data.build.folder={tmp_path}", "shards=2", "data.on_error=skip"
    framed = [records.framed(f"{number:02}".encode()) for number in range(20)]
    write(tmp_path / "0.tfrecord", b"".join(framed[:10]))
    for out, lost in (("d", ()), ("e", (13,))):
        numbers = (flipped(each, 15) if number in lost else each for number, each in enumerate(framed))
        write(tmp_path / "1.tfrecord", b"".join([*numbers][10:]))
        made = prepared(tmp_path / out, *source).manifest
        wanted = [float(number) for number in range(2, 20) if number not in lost]
        assert sorted(each["x"][0] for each in stored(tmp_path / out)) == wanted
        assert (made.examples("train"), made.source["skipped"]) == (len(wanted), len(lost))


def test_shards_are_as_large_as_asked_and_as_many_as_workers_divide(tmp_path):
    lines: list[str] = []
    made = prepared(tmp_path / "d", "data=digits", "shard_mib=0.1", "workers=4", say=lines.append).manifest
    assert len(made.splits["train"]) == 8
    assert all(each.bytes < 0.1 * 2**20 for each in made.splits["train"])
    assert "8 shards instead of 5, so that 4 workers have equally many." in lines


ASKED = (f"{OWN_SOURCE}slow_arrays", "+data.build.examples=20000", "shards=60")
SLOW = ("prepare", *ASKED, "processes=2", "out=d")


@pytest.mark.slow
def test_a_killed_command_leaves_no_process_and_the_same_one_goes_on_of_which_a_worker_is_killed(tmp_path):
    def shards() -> list[Path]:
        return sorted(tmp_path.glob("d/*.tfrecord"))

    with UnderWay(tmp_path, *SLOW) as run:
        run.until(lambda: len(shards()) >= 5, 60)
    assert not left_behind(tmp_path)
    assert not (tmp_path / "d/manifest.json").exists()
    there = {path: path.stat().st_mtime_ns for path in shards()}
    assert 5 <= len(there) < 60
    # What else a kill may leave: a shard that was being written, and one that was cut off.
    (tmp_path / "d/.train-00059-of-00060.tfrecord.0.partial").write_bytes(b"part")
    cut = min(there)
    os.truncate(cut, cut.stat().st_size - 1)
    del there[cut]
    parts = [*tmp_path.glob("d/.*.partial")]
    run.type(*SLOW)
    run.until(lambda: len(shards()) >= len(there) + 3, 60)
    # Its work is done by another.
    children = psutil.Process(run.process.pid).children()
    next(each for each in children if "spawn_main" in " ".join(each.cmdline())).kill()
    again = run.ended(120).ok()
    assert again.err == ""
    assert f"{len(there)} shards of an earlier command kept" in again.out or len(there) == 1
    assert {path: path.stat().st_mtime_ns for path in there} == there
    assert not set(parts) & {*tmp_path.glob("d/.*.partial")}
    # All is as a command has it that nothing has ended.
    prepared(tmp_path / "whole", *ASKED)
    assert checksums(tmp_path / "d") == checksums(tmp_path / "whole")
    assert (tmp_path / "d/manifest.json").read_text() == (tmp_path / "whole/manifest.json").read_text()
    assert not left_behind(tmp_path)


def test_a_killed_gathering_goes_on_with_the_pieces_that_are_there(tmp_path):
    folder = tmp_path / "d"
    prepared(folder, f"{OWN_SOURCE}two_streams")
    first = checksums(folder)
    # As a kill leaves it between the gathering and the shards.
    for path in folder.glob("[mt]*"):
        path.unlink()
    with closing(Folder(folder)) as held:
        config = config_of(PrepareConfig, [f"out={folder}", f"{OWN_SOURCE}two_streams"])
        held.begin(FolderState(filling._settings(config, (str(SUPPORT),))))
    prepared(folder, f"{OWN_SOURCE}two_streams")
    assert checksums(folder) == first


@pytest.mark.slow
@pytest.mark.parametrize(("number", "source", "begun"), [
    (signal.SIGINT, ("slow_arrays", "+data.build.examples=8000", "shards=60"), "d/*.tfrecord"),
    # While the source is read.
    (signal.SIGTERM, ("sleeping",), "asleep"),
])  # fmt: skip
def test_a_signal_ends_it_at_once_with_its_code_and_one_line(tmp_path, number, source, begun):
    run = UnderWay(tmp_path, "prepare", f"{OWN_SOURCE}{source[0]}", *source[1:], "processes=2", "out=d")
    run.until(lambda: any(tmp_path.glob(begun)), 60)
    run.harm(number)
    said = f"pipeline: Ended by {number.name}. The same command goes on.\n"
    assert run.ended(20).failed(128 + number).err == said
    assert not left_behind(tmp_path)


@pytest.mark.slow
def test_workers_that_always_die_are_given_up(pipeline):
    err = pipeline("prepare", f"{OWN_SOURCE}deadly", "out=d", "processes=1").failed().err
    assert "Expected Dask workers that live, received 4 that died one after the other" in err


def test_a_finished_folder_is_left_as_it_is_and_takes_the_command_that_began_it_alone_one_at_a_time(asked, tmp_path):
    # One whose source was refused has not begun it.
    with pytest.raises(DataError):
        prepared(tmp_path / "d", f"{OWN_SOURCE}unusable", "+data.build.because=empty")
    assert prepared(tmp_path / "d", "data=digits").reused == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("d/*.tfrecord")}
    ran = asked("prepare", "data=digits", "out=d", "processes=1")
    assert (ran.code, ran.err) == (0, "")
    assert "nothing to do: all 2 shards were there" in ran.out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("d/*.tfrecord")} == before
    with pytest.raises(UserError, match=r"d was begun with, seed=0, received seed=1\. Try out=ANOTHER, or seed=0"):
        prepared(tmp_path / "d", "data=digits", "seed=1")
    with pytest.raises(UserError, match=r"_target_=pipeline\.data\.digits, received data\.build\._target_=sources"):
        prepared(tmp_path / "d", f"{OWN_SOURCE}arrays")
    with closing(Folder(tmp_path / "d")), pytest.raises(UserError, match=r"that another is filling\. Try again"):
        prepared(tmp_path / "d", "data=digits")


def test_a_folder_with_other_files_is_refused(tmp_path):
    write(tmp_path / "notes.txt", b"mine")
    with pytest.raises(UserError, match=r"empty, or that this command began, received .* with other files"):
        prepared(tmp_path, "data=digits")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match=r"a folder that can be written to, received .*Not a directory"):
        prepared(tmp_path / "notes.txt/d", "data=digits")


@pytest.mark.parametrize(("arguments", "words"), [
    (["with_values", "data.build.values=[1.0,nan]"], r"example 1 of train has NaN or infinity in x\. Try"),
    (["with_values", "data.build.labels=[0,-1]"], r"example 1 of train has label -1, 0 or more were expected"),
    (["with_values", "data.num_classes=1"], r"example 1 of train has label 1, 0 to 0 were expected"),
    (["with_values", "data.num_classes=3"], r"each of 3 classes, received none of class 2"),
    (["stream", "data.build.broken=[7]"], r"example 7 of train has NaN or infinity in x/a"),
    (["unlike"], r"example 1 of train has x of float32 \[4\].*, x of float32 \[3\].* as in the first was expected"),
    (["unusable", "data.build.because=words"], r"Expected x to be numbers of at most 8 bytes, .*received <U1"),
    (["unusable", "data.build.because=uneven"], r"received for train: x of shape \(3, 2\), y of shape \(2,\)"),
    (["unusable", "data.build.because=name"], r"text without /, and no numbers, for train, received 'a/b'"),
    (["unusable", "data.build.because=empty"], r"Expected training data with examples, received none\."),
    (["endless"], r"received one without end\. Try dataset\.take\(examples\)\."),
    (["arrays", "validation_fraction=0.1"], r"validation_fraction=0 for a source that has a validation part"),
    (["arrays", "data.build.seed=null"], r"Expected sources\.arrays to return the same on every call"),
    (["arrays", "shards=201"], r"example in each of 201 shards, received 200\. Try shards=200"),
    (["arrays", "workers=300"], r"example for each of 300 workers, received 200\. Try workers=200"),
], ids=lambda each: " ".join(each) if isinstance(each, list) else "")  # fmt: skip
def test_a_source_that_cannot_be_trained_on_is_refused_and_named(arguments, words, tmp_path):
    name, *more = (f"+{each}" if each.startswith("data.build") else each for each in arguments)
    with pytest.raises(UserError, match=words) as refused:
        prepared(tmp_path / "d", f"{OWN_SOURCE}{name}", *more, processes=2)
    # More shards than examples are a mistake in what was typed.
    assert isinstance(refused.value, DataError) is ("Try shards=" not in words and "Try workers=" not in words)
    assert not (tmp_path / "d/manifest.json").exists()


def test_a_broken_image_is_named_and_can_be_left_out_and_a_class_without_images_is_named(tmp_path, photos):
    bad, cut = photos / "cat/4.png", photos / "dog/3.jpeg"
    bad.write_bytes(b"no image")
    cut.write_bytes(cut.read_bytes()[:-200])
    arguments = (f"{OWN_SOURCE}photos", f"+data.build.path={photos}", "shards=1")
    with pytest.raises(DataError, match=r"received some that cannot: .*4\.png is no PNG, JPEG, GIF or BMP") as said:
        prepared(tmp_path / "d", *arguments)
    assert str(cut) in str(said.value)
    made = prepared(tmp_path / "d", *arguments, "data.on_error=skip").manifest
    assert (made.examples("train"), made.source["skipped"]) == (18, 2)
    assert made.classes("train") == {"0": 9, "1": 9}
    assert any("2 examples that are broken" in line for line in summary_lines(filling.Prepared(made, 0, 1.0, 1.0), "d"))
    bad.unlink()
    cut.unlink()
    (photos / "eel").mkdir()
    with pytest.raises(DataError, match=r"each of 3 classes, received none of class eel"):
        prepared(tmp_path / "e", *arguments)


def test_an_error_in_a_function_is_one_message_that_names_it(pipeline, tmp_path):
    err = pipeline("prepare", "data.build._target_=sources.raising", "out=d", "processes=1").failed().err
    assert "Expected sources.raising to make data, received FileNotFoundError: no shelf 7 in the archive." in err
    assert err.count("\n") == 1
    assert "in raising" in (tmp_path / "d/.prepare/workers.log").read_text()


def test_a_scheduler_that_is_not_there_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "CONNECT_SECONDS", 0.5)
    words = r"a Dask scheduler at tcp://127\.0\.0\.1:1, received no answer"
    with pytest.raises(LaunchError, match=words), cluster.workers(1, "tcp://127.0.0.1:1", tmp_path):
        pass


@pytest.mark.slow
def test_a_choice_of_ones_own_folder_is_prepared_by_the_workers_of_a_scheduler_that_runs_already(pipeline, tmp_path):
    write(tmp_path / "conf/data/mine.yaml", b"name: mine\nbuild: {_target_: sources.arrays, examples: 20}\n")
    with LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None) as running:
        mine = ("--config-dir", "conf", "data=mine", "+data.build.classes=2")
        ran = pipeline("prepare", *mine, "out=d", "shards=4", f"scheduler={running.scheduler_address}").ok()
    assert ran.err == ""
    assert "2 classes: 0 10, 1 10" in ran.out
    ours = ("+data.build.examples=20", "+data.build.classes=2")
    prepared(tmp_path / "e", f"{OWN_SOURCE}arrays", *ours, "shards=4")
    assert checksums(tmp_path / "d") == checksums(tmp_path / "e")


def test_a_bar_is_drawn_on_a_terminal_and_taken_away(tmp_path):
    ours, theirs = pty.openpty()
    drawn = (f"{OWN_SOURCE}slow_arrays", "+data.build.examples=4000", "shards=20", "processes=1", "out=d")
    arguments = [sys.executable, "-m", "pipeline", "prepare", *drawn]
    process = subprocess.Popen(arguments, cwd=tmp_path, env=environment(TERM="xterm"), stdout=theirs, stderr=theirs)
    os.close(theirs)
    told = b""
    with suppress(OSError):  # how Linux says that the other end is closed
        while data := os.read(ours, 4096):
            told += data
    assert process.wait(timeout=60) == 0
    assert re.search(r"shards .*/20.* examples/s", told.decode())
    assert told.decode().rpartition("\x1b[?25h")[2].count("next") == 1


def test_help_names_the_sources_and_says_what_each_key_is(capsys):
    assert command.prepare(["--help"]) == 0
    said = capsys.readouterr().out
    assert "digits" in said
    for key in command.PrepareConfig.__dataclass_fields__:
        assert key == "data" or f"\n{key}: " in said


def test_lists_of_numbers_are_prepared_as_arrays_and_tuples_as_inputs() -> None:
    for example, features in (
        (([[1.0, 2.0], [3.0, 4.0]], 1), [("x", (2, 2), "float32"), ("y", (), "int64")]),
        (((np.float32(1), np.float32(2)), 1), [("x/0", (), "float32"), ("x/1", (), "float32"), ("y", (), "int64")]),
    ):
        encoder = sources.Encoder("train", None)
        encoder.make(example, "first")
        assert [(one.name, one.shape, one.dtype) for one in encoder.features] == features
    rows = sources.of_arrays(([[1, 2]] * 50, [0, 1] * 25), "train", None)
    assert [(one.name, one.shape) for one in rows.features] == [("x", (2,)), ("y", ())]
    with pytest.raises(DataError, match="rows of one length"):
        sources.of_arrays(([[1, 2], [1]], [0, 1]), "train", None)
    # Masked numbers are refused wherever arrays are taken.
    masked, y = np.ma.masked_array(np.ones((4, 2)), [[True, False]] * 4), np.zeros(4)
    with pytest.raises(DataError, match="4 are masked"):
        conversion.part((masked, y), "training")
    with pytest.raises(DataError, match="4 are masked"):
        sources.of_arrays((masked, y), "train", None)
    conversion.part((np.ma.masked_array(np.ones((4, 2))), y), "training")
    with pytest.raises(DataError, match=r"received a dict of train, test\. Try return parts\['train'\]"):
        loading.both({"train": (y, y), "test": (y, y)})

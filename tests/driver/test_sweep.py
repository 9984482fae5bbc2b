"""Sweeps that go on: what has finished is kept, what has failed is tried again, what is new is added."""

import json
import os
import random
import shlex
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICK, Ran, finish, left_behind, start

from pipeline.commands.train import options
from pipeline.config import config as configs
from pipeline.config.composing import Composed, Composer
from pipeline.config.schema import Config
from pipeline.driver import RunResult, resume, run_folders
from pipeline.driver.requests import Sweep, fingerprint, note_alone
from pipeline.driver.run import command_of
from pipeline.driver.run_folders import Lock
from pipeline.errors import UserError
from pipeline.record.files import Entry, read_sweep
from pipeline.record.results import Ending, Result

SMALL = ("data=digits", "model=mlp", "train.steps=4", "resume=auto", "train.check=off")
NAMED = ("-m", "sweep.name=mine", *QUICK, *SMALL)
SWEEP = Path("outputs/sweeps/mine")


def entries(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "sweep.json").read_text())["points"]


def written(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def entry_in(sweep: Sweep, about: str = "abc") -> Entry:
    return sweep.entry(0, "mirrored", about, [], 0, None)


@pytest.mark.parametrize("folder", ["sweeps/mine/0_mirrored.2", "sweeps/older/1_mirrored"])
def test_a_point_is_found_where_it_has_gone_on(tmp_path, folder):
    """In its own sweep, or with an earlier run in another one's."""
    made = Sweep(tmp_path / "sweeps/mine")
    (tmp_path / folder).mkdir(parents=True)
    made.note(entry_in(made), RunResult(Result(Ending("FAILED", "It was killed.")), tmp_path / folder))
    made.release()
    again = Sweep(made.folder)
    for entry in (*read_sweep(made.folder), entry_in(again)):
        assert (again.folder / entry.folder).resolve() == tmp_path / folder
    again.release()


def test_a_run_that_a_lost_file_does_not_list_is_not_taken_for_another(tmp_path):
    for name in ("0_mirrored", "3_mirrored_2", "notes_mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").touch()
    found = Sweep(tmp_path)
    assert [entry_in(found, about).folder for about in ("abc", "def")] == ["4_mirrored", "5_mirrored"]
    found.release()


def test_a_point_that_another_command_has_ended_is_noted_in_its_sweep_and_not_run_beside_that(tmp_path):
    made = Sweep(tmp_path / "sweeps/mine")
    entry = entry_in(made)
    made.write()
    made.release()
    folder, done = made.folder / entry.folder, Result(Ending("FINISHED"))
    # A later attempt, and a run that is of no sweep.
    tries = [folder, run_folders.make_another(folder), later := run_folders.make_another(folder)]
    assert [[*run_folders.attempts(tries[place])] for place in (0, 1)] == [tries, tries[1:]]
    (tmp_path / "alone").mkdir()
    for ended in (tmp_path / "alone", later):
        note_alone(ended, RunResult(done, ended))
    (noted,) = entries(made.folder)
    assert (noted["status"], noted["folder"]) == ("FINISHED", "0_mirrored.3")
    lock = Lock(later)
    with pytest.raises(UserError, match=r"received .*0_mirrored\.3, on which one still works\. Try again"):
        resume.find(Config(), None, tmp_path, only=later)
    lock.release()


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on_and_runs_nothing_twice(tmp_path):
    command = ("-m", "experiment=scaling", "tracking=none", "measure.repeats=1", "measure.steps=4", *SMALL)
    folder, seed = tmp_path / "outputs/sweeps/scaling_mlp_digits", os.environ["TEST_SEED"]

    def run(timeout: float = 240) -> Ran:
        return finish(start(tmp_path, *command), tmp_path, time.monotonic(), timeout)

    process = start(tmp_path, *command)
    time.sleep(random.Random(seed).uniform(0.5, 11.0))
    refused = run(120) if folder.exists() else None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not left_behind(tmp_path, 30)
    if refused is not None and process.returncode == -signal.SIGKILL:
        assert refused.code == 2, (seed, refused.err)
        assert "Expected the sweep scaling_mlp_digits to be at rest" in refused.err
    listed = entries(folder) if folder.exists() else []
    done = [folder / each["folder"] for each in listed if each["status"] == "FINISHED"]
    before = [written(each) for each in done]
    ran = run().ok()
    assert [written(each) for each in done] == before, seed
    points = entries(folder)
    assert [each["status"] for each in points] == ["FINISHED"] * len(points)
    assert len({each["folder"] for each in points}) == len(points) == len(list(folder.glob("*/result.json")))
    again = run(120).ok()
    assert f"{len(points)} of {len(points)} points have finished and are kept." in again.out
    assert again.seconds < ran.seconds or len(done) == len(points)
    assert not left_behind(tmp_path)


@pytest.mark.slow
def test_failed_points_are_tried_again_and_new_ones_added_and_what_is_typed_twice_is_two_points(pipeline, tmp_path):
    own = ("data.build._target_=own.there_by_now", f"+data.build.path={tmp_path}/late", "data.num_classes=10")
    pipeline(*NAMED, *own, "strategy=one_device", "workers=1").failed()
    assert [each["status"] for each in entries(tmp_path / SWEEP)] == ["FAILED"]
    (tmp_path / "late").touch()
    pipeline(*NAMED, *own, "strategy=one_device,one_device,mirrored,tpu", "workers=1").ok()
    points = entries(tmp_path / SWEEP)
    assert [each["status"] for each in points] == [*["FINISHED"] * 3, "REFUSED"]
    assert "Expected" in points[3]["error"]
    assert [each["place"] for each in points] == [0, 1, 2, 3]
    assert [each["folder"] for each in points[:2]] == ["0_one_device.2", "1_one_device"]
    # What became of the first attempt is still there.
    assert json.loads((tmp_path / SWEEP / "0_one_device/result.json").read_text())["status"] == "FAILED"
    # Of another day than the code.
    os.utime(tmp_path / SWEEP / "0_one_device.2/plan.json", (0, 0))
    third: Ran = pipeline(*NAMED, *own, "strategy=mirrored,one_device,one_device", "workers=1")
    assert "3 of 3 points have finished and are kept." in third.out
    assert third.out.count(" was written after points of this sweep had begun") == 1
    assert [result["status"] for result in third.results].count("FINISHED") == 3


@pytest.mark.slow
def test_repeats_run_in_rounds_and_each_round_measures_the_baseline_anew(pipeline, tmp_path):
    typed = ("sweep.name=mine", "sweep.repeats=2", "strategy=default,one_device", "workers=1", "tracking=none")
    ran: Ran = pipeline("-m", *typed, "measure.repeats=1", "measure.steps=2", *SMALL).ok()
    logs = (tmp_path / SWEEP).glob("*/events.jsonl")
    begun = sorted(logs, key=lambda log: json.loads(log.read_text().splitlines()[0])["time"])
    assert [log.parent.name for log in begun] == ["0_default", "1_one_device", "1_one_device_2", "0_default_2"]
    source = {each.name: json.loads((each / "result.json").read_text())["baseline_source"] for each in ran.run_folders}
    assert source["0_default"] == source["1_one_device_2"] == "measured in this run"
    assert source["1_one_device"].endswith("0_default")
    assert source["0_default_2"].endswith("1_one_device_2")
    assert "(3 of 4 done, about" in ran.out


@pytest.mark.parametrize("mode", ["plan", "predict"])
def test_what_starts_nothing_has_repeats_and_points_that_cannot_be_read(asked, tmp_path, mode):
    ran: Ran = asked("-m", f"mode={mode}", "sweep.repeats=2", "data=tfds,digits", "model=mlp", "workers=1")
    assert ran.code == (0 if mode == "plan" else 2), ran.err
    assert "data.name" in ran.err
    assert "Traceback" not in ran.err
    assert not list(tmp_path.glob("outputs/sweeps/*"))


@pytest.mark.parametrize(("experiment", "points"), [("strategies", 6), ("batch", 5), ("precision", 3)])
def test_every_ready_sweep_can_be_planned(asked, experiment, points):
    ran: Ran = asked(f"experiment={experiment}", "mode=plan", "model=mlp", "data=digits").ok()
    assert ran.out.count(" -- point ") == points


@pytest.mark.parametrize("typed", [
    ["-m", "experiment=strategies"],
    ["-m", "experiment=scaling", "measure.scaling=strong", "sweep.name=mine"],
    ["-m", "strategy=mirrored,multi_worker", "workers=1,2", "sweep.name=mine", "sweep.repeats=3"],
    ["-m", "train.learning_rate=0.1,0.2", "model.build.hidden=[8, 16]", "model=mlp"],
    ["--config-dir=own", "experiment=own", "train.epochs=1"],
], ids=lambda typed: typed[1])  # fmt: skip
def test_the_command_of_a_point_is_accepted_and_is_one_run_of_the_same_config(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own" / "experiment").mkdir(parents=True)
    (tmp_path / "own" / "experiment" / "own.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: mlp\nsweep: {name: own}\n"
        "hydra: {mode: MULTIRUN, sweeper: {params: {workers: '1,2'}}}\n"
    )
    configs.register(lambda: 2)

    def points(words: list[str]) -> list[tuple[Composed, Config]]:
        given = options(words)
        found = Composer("config", Config, given.config_dir).points(given.overrides, given.multirun)
        return [(point, configs.typed_as(Config, point.config, point.overrides)) for point in found]

    asked = points(typed)
    assert len(asked) > 1
    for point, config in asked:
        command = command_of(point.overrides, [word for word in typed if word.startswith("--")])
        ((again, same),) = points(shlex.split(command)[3:])
        assert again.sweep is None
        assert fingerprint(same) == fingerprint(config), command

"""Commands that go on: of a sweep what has not finished, or a run of the same config, or the one that is named."""

import dataclasses
import json
import os
import random
import shlex
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import QUICK, Ran, UnderWay, left_behind, logged, sampled, with_
from plans import config, machine

from pipeline.commands.train import options
from pipeline.config import config as configs
from pipeline.config.composing import Composed, Composer
from pipeline.config.schema import Config
from pipeline.driver import RunResult, resume, run_folders, start
from pipeline.driver.requests import Sweep, fingerprint, note_alone
from pipeline.driver.run import Run, command_of
from pipeline.driver.run_folders import Lock
from pipeline.driver.session import RunRequest
from pipeline.errors import UserError
from pipeline.plan import planning
from pipeline.plan.backends import with_xla
from pipeline.plan.plan import STEPS_THEN, Plan, as_long_as, from_values
from pipeline.record import log
from pipeline.record.files import Entry, read_sweep
from pipeline.record.results import Ending, Result

SMALL = ("data=digits", "model=mlp", "train.steps=4", "resume=auto", "train.check=off")
NAMED = ("-m", "sweep.name=mine", *QUICK, *SMALL)
SWEEP = Path("outputs/sweeps/mine")


def entries(folder: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["points"] if (path := folder / "sweep.json").exists() else []


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
    with pytest.raises(UserError, match="Expected the sweep mine to be at rest"):
        Sweep(made.folder)
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
    with UnderWay(tmp_path, *command):
        time.sleep(random.Random(seed).uniform(0.5, 11.0))
    assert not left_behind(tmp_path, 30)
    done = [folder / each["folder"] for each in entries(folder) if each["status"] == "FINISHED"]
    before = [written(each) for each in done]
    ran = UnderWay(tmp_path, *command).ended().ok()
    assert [written(each) for each in done] == before, seed
    points = entries(folder)
    assert [each["status"] for each in points] == ["FINISHED"] * len(points)
    assert len({each["folder"] for each in points}) == len(points) == len(list(folder.glob("*/result.json")))
    again = UnderWay(tmp_path, *command).ended().ok()
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
    before = written(tmp_path / SWEEP / "2_mirrored")
    third: Ran = pipeline(*NAMED, *own, "strategy=mirrored,one_device,one_device", "workers=1")
    assert "3 of 3 points have finished and are kept." in third.out
    assert written(tmp_path / SWEEP / "2_mirrored") == before
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


@pytest.mark.parametrize("typed", sampled([
    ["-m", "experiment=strategies"],
    ["-m", "experiment=scaling", "measure.scaling=strong", "sweep.name=mine"],
    ["-m", "strategy=mirrored,multi_worker", "workers=1,2", "sweep.name=mine", "sweep.repeats=3"],
    ["-m", "train.learning_rate=0.1,0.2", "model.build.hidden=[8, 16]", "model=mlp"],
    ["--config-dir=own", "experiment=own", "train.epochs=1"],
], 2), ids=lambda typed: typed[1])  # fmt: skip
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
    for point, one in asked:
        command = command_of(point.overrides, [word for word in typed if word.startswith("--")])
        ((again, same),) = points(shlex.split(command)[3:])
        assert again.sweep is None
        assert fingerprint(same) == fingerprint(one), command


def made(
    folder: Path, name: str, status: str | None = None, age: float = 0.0, planned: Plan | None = None, **more: Any
) -> Path:
    """A run's folder as a command left it; `status` None: killed outright."""
    run = folder / "runs" / name
    run.mkdir(parents=True)
    (run / "plan.json").write_text((planned or wanted()).to_json())
    logs(run, {"event": "run", "key": name})
    logs(run, {"event": "steps", "group": "point", "step": 7, "losses": [1.0], "seconds": 1.0})
    if more.get("saved") is not None:
        logs(run, {"event": "checkpoint", "step": more["saved"], "path": more.get("path", "")})
    if status:
        logs(run, {"event": "ended", "status": status})
    (run / "tracking.json").write_text(json.dumps({"store": {"uri": "sqlite:///mlflow.db"}, "run_id": f"id{name}"}))
    os.utime(run / "plan.json", (1_000_000 - age, 1_000_000 - age))
    return run


def logs(run: Path, event: dict[str, Any]) -> None:
    with (run / "events.jsonl").open("a") as log:
        log.write(json.dumps({"time": 1.0, "rank": 0, **event}) + "\n")


def wanted(strategy: str = "mirrored", workers: int = 2, **keys: Any) -> Plan:
    return planning.make(config(strategy, workers=workers, **keys), machine())


def resumed(folder: Path, asked: str = "auto", planned: Plan | None = None, **keys: Any) -> Run | None:
    earlier = resume.find(config(resume=asked, **keys), planned or wanted(), folder)
    if earlier is not None:
        earlier.release()
    return earlier


def found(*args: Any, **keys: Any) -> str | None:
    earlier = resumed(*args, **keys)
    return earlier and earlier.folder.name


@pytest.mark.parametrize(("status", "saved", "goes_on"), [
    (None, None, True),
    ("KILLED", None, True),
    ("PREEMPTED", 5, True),
    ("FAILED", 5, True),
    ("FAILED", None, False),
    ("FINISHED", 5, False),
])  # fmt: skip
def test_a_run_that_did_not_finish_is_gone_on_with(tmp_path, status, saved, goes_on):
    made(tmp_path, "one", status, saved=saved)
    assert found(tmp_path) == ("one" if goes_on else None)
    assert found(tmp_path, "never") is None


def test_the_last_one_of_the_same_config_counts_and_one_that_is_named(tmp_path):
    run = made(tmp_path, "old", age=9)
    made(tmp_path, "other", planned=wanted(train__seed=3))
    assert found(tmp_path) == "old"
    # By its folder, or its id in MLflow.
    assert found(tmp_path, str(run)) == found(tmp_path, "idol") == "old"
    made(tmp_path, "new", "FINISHED", age=5)
    assert found(tmp_path) is None
    # Timeouts, checkpoints and the machine make no other config.
    made(tmp_path, "one", planned=wanted(launch__heartbeat_timeout=3.0, checkpoint__every_steps=9))
    elsewhere = json.loads(wanted().to_json()) | {
        "machine": "another", "cache_bytes": 2**25, "link_gbps": 100.0, "memory_gib": 80.0,
    }  # fmt: skip
    assert found(tmp_path, planned=from_values(elsewhere)) == "one"
    assert found(tmp_path, planned=from_values(elsewhere | {"seed": 1})) is None


def test_a_run_whose_conductor_lives_is_left_alone_and_no_older_one_gone_on_with(tmp_path):
    made(tmp_path, "old", "KILLED", age=9, saved=5)
    lock, said = Lock(made(tmp_path, "one")), []
    assert resume.find(config(), wanted(), tmp_path, say=said.append) is None
    assert "runs/one" in said[0]
    with pytest.raises(UserError, match="on which one still works"):
        found(tmp_path, "one")
    lock.release()
    assert found(tmp_path) == "one"
    # Of somebody else's folder, which cannot be locked, nobody says that a command works on it.
    (tmp_path / "runs/one/run.lock").unlink()
    (tmp_path / "runs/one/run.lock").mkdir()
    with pytest.raises(UserError, match=r"Expected to be able to write .*one, received Is a directory"):
        found(tmp_path, "one")


def test_a_plan_is_read_once_however_many_commands_start_beside_it(tmp_path, monkeypatch):
    for number in range(9):
        made(tmp_path, f"other{number}", planned=wanted(train__seed=number + 1))
    made(tmp_path, "sweep/3", planned=wanted(train__seed=99))
    made(tmp_path, "one", "KILLED")
    read, paths = log.read_whole, list[str]()
    monkeypatch.setattr(log, "read_whole", lambda path: paths.append(path.name) or read(path))
    assert [found(tmp_path), paths.count("plan.json")] == ["one", 13]
    assert [found(tmp_path), paths.count("plan.json")] == ["one", 15]
    made(tmp_path, "two", "KILLED")
    assert [found(tmp_path), paths.count("plan.json")] == ["two", 18]


@pytest.mark.parametrize(("harm", "goes_on"), [
    (lambda run, index: run.rename(run.with_name("moved")), "moved"),
    (lambda run, index: shutil.move(run, run.parents[1] / "runs" / "kept" / "deep"), "deep"),
    (lambda run, index: shutil.rmtree(run), None),
    (lambda run, index: (run / "plan.json").unlink(), None),
    (lambda run, index: index.unlink(), "one"),
    (lambda run, index: index.write_text("no line\n{}\n[]\n"), "one"),
    (lambda run, index: index.write_text(index.read_text()[:-9]), "one"),
    (lambda run, index: index.chmod(0o400), "one"),
])  # fmt: skip
def test_what_a_person_does_to_folders_or_the_index_is_seen_by_the_next_command(tmp_path, harm, goes_on):
    run = made(tmp_path, "one", "KILLED")
    (tmp_path / "runs" / "kept").mkdir()
    assert found(tmp_path) == "one"
    harm(run, next(tmp_path.glob(".runs-*")))
    for _ in range(2):
        assert found(tmp_path) == goes_on
    made(tmp_path, "next", "KILLED", age=-5)
    for _ in range(2):
        assert found(tmp_path) == "next"


def test_a_run_that_goes_on_with_another_config_is_found_by_that_one_and_no_more_by_its_first(tmp_path):
    run, other = made(tmp_path, "one", "KILLED"), wanted(train__epochs=9)
    assert (found(tmp_path), found(tmp_path, planned=other)) == ("one", None)
    (run / "plan.json").write_text(other.to_json())
    run_folders.note(run, other, tmp_path)
    assert (found(tmp_path), found(tmp_path, planned=other)) == (None, "one")


def test_checkpoints_are_looked_for_where_the_last_one_was_written(tmp_path):
    # Of the last command, which wrote none, is the plan.
    new, old = (with_(wanted(), "checkpoint", folder=f"{tmp_path}/{name}") for name in ("new/runs_one", "old"))
    run = made(tmp_path, "one", planned=new, saved=5, path=f"{tmp_path}/old/step.json")
    request = RunRequest(config(output_dir=str(tmp_path)), run, [], None)
    for plan in (new, old):
        assert start._with_folder(plan, request, Run.from_log(run)).checkpoint.before == f"{tmp_path}/old"


def test_what_differs_is_named_and_may_be_forced_and_a_finished_run_goes_on_only_so(tmp_path):
    made(tmp_path, "one", "KILLED", planned=wanted(train__seed=3, data__build={"_target_": "a.b", "rows": 1}))
    now = wanted(train__seed=4, data__build={"_target_": "a.b", "rows": 2})
    with pytest.raises(UserError, match=r"received another data.build.rows, train.seed. Try .*resume_changes="):
        found(tmp_path, "one", planned=now)
    assert found(tmp_path, "one", planned=now, resume_changes=["train.seed", "data.build"]) == "one"
    made(tmp_path, "done", "FINISHED", saved=7)
    with pytest.raises(UserError, match="Expected a run that did not finish"):
        found(tmp_path, "done")
    assert found(tmp_path, "done", planned=wanted(train__epochs=99), resume_changes=["train.epochs"]) == "done"


@pytest.mark.parametrize("strategy", ["mirrored", "parameter_server"])
def test_a_run_without_a_length_is_finished_with_that_of_the_version_that_began_it(tmp_path, strategy):
    now = wanted(strategy)
    steps = STEPS_THEN * now.concurrent_steps
    values = json.loads(with_(now, "training", epochs=None, steps=steps).to_json())
    del values["usual_length"]
    run = made(tmp_path, "then", "KILLED", saved=7)
    (run / "plan.json").write_text(json.dumps(values))
    assert found(tmp_path, planned=now) == found(tmp_path, "then", planned=now) == "then"
    goes_on = as_long_as(now, values)
    assert (goes_on.training.epochs, goes_on.training.steps) == (None, steps)
    # And so once more, from the plan that this version leaves there.
    (run / "plan.json").write_text(goes_on.to_json())
    assert found(tmp_path, planned=now) == "then"
    assert as_long_as(now, json.loads(goes_on.to_json())) == goes_on
    # Who says how long means that.
    said = wanted(strategy, train__epochs=2)
    assert found(tmp_path, planned=said) is None
    assert as_long_as(said, values) == said


def test_repeats_that_all_processes_told_of_are_not_measured_again(tmp_path):
    two = wanted("multi_worker")
    run = made(tmp_path, "one", planned=two)
    told = {"event": "measured", "group": "point", "steps": 2, "examples": 64.0, "calls": [[2, 1]]}
    for repeat, rank in ((0, 0), (0, 1), (1, 0)):
        logs(run, {**told, "repeat": repeat, "rank": rank, "seconds": 1.0 + rank})
    earlier = resumed(tmp_path, "one", two)
    assert [each.seconds for each in earlier.measured(two, None).point] == [2.0]
    # Another machine times all of them again.
    for other in (dataclasses.replace(two, workers=3), with_(two, "hardware", machine="another")):
        assert earlier.measured(other, None).point == []


def test_what_auto_chose_for_xla_first_is_what_it_goes_on_with(tmp_path):
    choosing = wanted(train__xla="auto")
    run = made(tmp_path, "one", planned=choosing)
    for group, chosen in (("baseline", {"xla": False}), ("point", {"xla": True, "xla_speedup": 1.5}),
                          ("point", {"xla": False})):  # fmt: skip
        logs(run, {"event": "built", "group": group, **chosen})
    earlier = resumed(tmp_path, "one", choosing, train__xla="auto")
    assert (earlier.xla, earlier.xla_speedup) == (True, 1.5)
    assert [with_xla(choosing, xla).training.xla for xla in (True, False)] == ["true", None]
    assert with_xla(choosing, None) == choosing
    assert with_xla(wanted(), True) == wanted()


@pytest.mark.slow
def test_a_run_in_a_folder_of_ones_own_goes_on_without_timing_xla_and_is_kept_once_finished(pipeline, tmp_path):
    command = (
        *QUICK, "hydra.run.dir=mine", "model=mlp", "data=digits", "workers=2", "train.steps=4", "train.xla=auto",
        "train.callbacks=[{_target_: own.Preempting, after: [2], number: SIGTERM}]",
    )  # fmt: skip
    for name in ("mine", "mine.2"):
        chosen = []
        for code in (75, 0):
            ran = pipeline(*command).failed(code)
            assert ("resuming" in ran.out) == (code == 0)
            result = json.loads((tmp_path / name / "result.json").read_text())
            assert (result["status"], result["resumed"]) == (("PREEMPTED", 0) if code else ("FINISHED", 1))
            chosen.append((result["xla"], result["xla_speedup"]))
        assert chosen[0] == chosen[1]
        built = [event for event in logged(tmp_path / name, "built") if event["rank"] == 0]
        assert [event.get("xla_speedup") is not None for event in built] == [True, False]
    assert sorted(path.name for path in tmp_path.glob("mine*")) == ["mine", "mine.2"]
    assert json.loads((tmp_path / "mine/result.json").read_text())["status"] == "FINISHED"


def test_a_plan_in_the_folder_of_a_run_leaves_that_run_alone(asked, tmp_path):
    run = tmp_path / "mine"
    run.mkdir()
    (run / "events.jsonl").write_text("{}\n")
    (run / "result.json").write_text("{}")
    for wrong in ((), ("workers=0",), ("+nothing=1",)):
        asked("mode=plan", "model=mlp", "data=digits", "hydra.run.dir=mine", *wrong)
        assert (run / "result.json").read_text() == "{}"


def test_a_file_of_code_that_is_newer_than_a_run_is_named(tmp_path):
    (tmp_path / "mine.py").touch()
    (tmp_path / "plan.json").touch()
    # While an editor has it open.
    (tmp_path / ".#mine.py").symlink_to("ann@host.4711")
    own = config(model__build={"_target_": "mine.model"})
    os.utime(tmp_path / "mine.py", (1, 1))
    assert run_folders.newer_code(own, tmp_path, [str(tmp_path)]) is None
    os.utime(tmp_path / "plan.json", (0, 0))
    assert run_folders.newer_code(own, tmp_path, [str(tmp_path)]) == tmp_path / "mine.py"
    assert run_folders.newer_code(config(), tmp_path, [str(tmp_path)]) is None
    assert run_folders.newer_code(own, tmp_path / "nowhere", [str(tmp_path)]) is None

"""What runs wrote is read: results and other files, and what 0.1.0 left (tests/from_0_1_0, runs on two cores)."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
from any_value import any_of, few
from conftest import OLD, QUICK, ROOT, sampled
from hypothesis import given
from hypothesis import strategies as st
from plans import config, machine

from pipeline.analyze import comparable, history, step_model
from pipeline.commands.results import compare, settings_of
from pipeline.config.parts import SAYS, flat, leaves
from pipeline.config.schema import Config
from pipeline.driver import resume, run_folders
from pipeline.plan import plan, planning
from pipeline.record import files, results
from pipeline.record.events import Result as Told
from pipeline.record.files import Copied, Entry, PredictionLine, TrackingState, TrackingStore, read_sweep
from pipeline.record.log import read, read_json, write_json
from pipeline.record.results import Baseline, Result, Training
from pipeline.views import report


class Form(NamedTuple):
    """A file of a folder: its values, what writes and reads it, and texts that are none, read as `nothing`."""

    name: str
    values: st.SearchStrategy[Any]
    write: Callable[[Path, Any], object]
    read: Callable[[Path], Any]
    broken: tuple[str, ...]
    nothing: Any


def _whole(result: Result) -> Result:
    """The same of an asynchronous training, which alone has all values."""
    return replace(result, layout=replace(result.layout, asynchronous=True))


PLACE = attrgetter("place")
FORMS = [
    Form(results.FILE, any_of(Result).map(_whole), results.write, results.read, ("", "[]", "{"), None),
    Form(
        "baseline.json", any_of(Baseline), lambda folder, value: write_json(folder / "baseline.json", value),
        lambda folder: read_json(Baseline, folder / "baseline.json"),
        ("", "{}", '{"examples_per_second": [1.0]}'), None,
    ),
    Form(
        files.SWEEP,
        st.lists(any_of(Entry), max_size=3, unique_by=PLACE).map(lambda entries: sorted(entries, key=PLACE)),
        lambda folder, entries: files.write_sweep(folder, entries[::-1]), read_sweep,
        ("", "{}", '{"points": [{"place": 0}]}', '{"points": 1}'), [],
    ),
    Form(
        files.PREDICTIONS, st.lists(any_of(PredictionLine), max_size=2),
        lambda folder, lines: [files.append_prediction(folder, line) for line in lines], files.read_predictions,
        ("", '{"cut', '{"identity": "b"}\n'), [],
    ),
    Form(files.TRACKING, any_of(TrackingState), files.write_tracking, files.read_tracking, ("", "[]"), TrackingState()),
]  # fmt: skip
# What only an asynchronous training has.
OF_ASYNCHRONOUS = {"staleness_mean", "staleness_max", "steps", "examples", "updates", "worker_steps"}


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
@given(data=st.data())
@few
def test_a_file_is_read_as_it_was_written_and_one_that_is_broken_not_at_all(form, data):
    values = data.draw(form.values)
    with TemporaryDirectory() as name:
        folder = Path(name)
        assert form.read(folder) == form.nothing
        for text in form.broken:
            (folder / form.name).write_text(text)
            assert form.read(folder) == form.nothing
        # Lines are appended to what is there.
        form.write(folder, values)
        assert form.read(folder) == values


@given(result=any_of(Result).map(_whole))
@few
def test_what_a_later_version_adds_to_a_result_is_passed_over(result):
    values = results.to_values(result)
    assert values["version"] == results.VERSION
    assert results.from_values(values | {"version": 99, "flux": 1}) == result


def test_a_training_that_diverged_is_read_with_what_its_loss_came_to(tmp_path):
    results.write(tmp_path, Result(training=Training(loss=float("nan"), metrics={"accuracy": float("inf")})))
    read = results.read(tmp_path).training
    assert (str(read.loss), read.metrics) == ("nan", {"accuracy": float("inf")})


def test_a_result_of_0_1_0_is_read_and_comes_out_as_it_went_in():
    paths = sorted(OLD.glob("**/result.json"))
    assert paths
    for path in paths:
        then, result = json.loads(path.read_text()), results.read(path.parent)
        assert results.to_values(result) == {"version": results.VERSION} | then
        assert (result.ending.status, result.choices.data, result.training.parameters) == ("FINISHED", "digits", 9610)


@pytest.mark.parametrize("odd", [None, "?", [], {}, float("nan"), float("inf"), True, -1.0, [None, {"error": "?"}]])
def test_what_is_odd_is_not_known(odd):
    unknown = flat(Result())
    for name in leaves(Result):
        read = flat(results.from_values({name: odd}))
        assert {other: value for other, value in read.items() if other != name} == {
            other: value for other, value in unknown.items() if other != name
        }
        if not isinstance(odd, bool | str | float | dict):
            assert read[name] == unknown[name]


def test_the_docs_name_each_value_and_no_other():
    table = (ROOT / "docs" / "results.md").read_text().partition("## events.jsonl")[0]
    named = {"version"}
    for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        first, *others = re.findall(r"`(\w+)`", row)
        # `step_ms_p50`, `_p95`: what the first one ends with is another.
        stem = first.removesuffix("_p50").removesuffix("_low")
        named |= {first, *(f"{stem}{end}" if end[0] == "_" else end for end in others)}
    assert named == {"version", *leaves(Result)}


def test_fresh_results_have_all_values_whether_they_are_known_or_not_and_are_compared(pipeline, capsys):
    common = ("data=digits", "model=mlp", "measure.repeats=2", "measure.baseline=none", "tracking=none", "workers=1")
    ran = pipeline("-m", *common, "measure.patience=0", "train.steps=4", "strategy=one_device,default").ok()
    then = json.loads((OLD / "sweeps" / "both" / "1_mirrored" / "result.json").read_text())
    # One device has nothing to be compared with; of what is to be the same each time, other programs are no part.
    left = {"check", "backend", "collective", "devices", "sample", "seconds_driver", "other_work"}
    left |= {*results.XLA, *results.ENDED_EARLY}
    always = {"version", *leaves(Result)} - OF_ASYNCHRONOUS - left
    for folder, result in zip(ran.run_folders, ran.results, strict=True):
        assert result.keys() - {"seconds_driver", "other_work"} == always == {"version", *then}
        (told,) = (event for event, _ in read(folder / "events.jsonl") if isinstance(event, Told))
        assert told.values == result
    assert compare([str(folder) for folder in ran.run_folders]) == 0
    out = capsys.readouterr().out
    assert "strategy_build._target_" in out
    assert re.search("0 and 1: (not known|as fast)|times as fast", out)


def test_a_point_that_is_refused_leaves_why_and_what_was_chosen(asked):
    ran = asked("-m", *QUICK, "data=digits", "model=mlp", "strategy=tpu", "hardware=2cpu", "workers=2").failed(2)
    chosen = {"strategy": "tpu", "hardware": "2cpu", "model": "mlp", "data": "digits", "workers": 2}
    assert ran.result == {"version": results.VERSION, "status": "REFUSED", "error": ran.result["error"]} | chosen


def test_where_a_run_is_tracked_is_known_by_store_and_read_as_0_1_0_wrote_it(tmp_path):
    store, own, other = TrackingStore("sqlite", "sqlite:///a.db", "pipeline"), Copied("abc", "1", 9), Copied("d")
    state = TrackingState(store).with_copied("sqlite:///a.db", own).with_copied("http://there", other)
    assert state == TrackingState(store, {"sqlite:///a.db": own, "http://there": other})
    assert (state.copied, state.in_store("sqlite:///a.db"), state.in_store("http://nowhere")) == (own, own, Copied())
    old = OLD / "sweeps" / "both" / "1_mirrored"
    read = files.read_tracking(old)
    assert (read.copied.closed, read.store and read.store.experiment) == ("FINISHED", "old")
    files.write_tracking(tmp_path, read)
    now, then = (json.loads((folder / "tracking.json").read_text()) for folder in (tmp_path, old))
    assert now.items() >= then.items()


# As its runs were typed, but for the folder.
TYPED = (
    "workers=2", "data=digits", "model=mlp", "model.build.hidden=[16]", "train.deterministic=true", "train.epochs=4",
    "train.global_batch=32", "train.steps_per_call=1", "checkpoint.every_steps=10", "measure.steps=0",
    "measure.baseline=none", "tracking=none", "tracking.system_metrics_seconds=0", "launch.startup_timeout=120",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_that_0_1_0_left_in_mid_epoch_is_finished(pipeline, tmp_path):
    (strategy,) = sampled(("mirrored", "multi_worker"), 1)
    shutil.copytree(OLD / "runs" / strategy, tmp_path / "outputs" / "runs" / strategy)
    ran = pipeline(f"strategy={strategy}", *TYPED).ok()
    assert (ran.result["status"], ran.result["resumed"]) == ("FINISHED", 1)
    assert [event["step"] for event in ran.events("restored")] == [60]
    pipeline(f"strategy={strategy}", *TYPED, "resume=never", "output_dir=whole").ok()
    (log,) = tmp_path.glob("whole/runs/*/events.jsonl")
    whole = [event for line in log.read_text().splitlines() if (event := json.loads(line))["event"] == "epoch"]
    finished = ran.events("epoch")
    # 0.1.0 wrote the running loss of the epoch under way some steps too late, so that they counted twice.
    for name, epochs in (("val_loss", (0, 1, 2, 3)), ("loss", (0, 2, 3))):
        losses, others = ([run[epoch][name] for epoch in epochs] for run in (finished, whole))
        # Another processor may add up in another order.
        assert losses == pytest.approx(others, rel=1e-4)


def test_its_sweep_is_read_reported_compared_and_predicted_from(tmp_path):
    sweep = tmp_path / "sweeps" / "both"
    shutil.copytree(OLD / "sweeps" / "both", sweep)
    for path in sweep.glob("*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"folder": str(path.parent)}))
    assert [(entry.place, entry.status) for entry in read_sweep(sweep)] == [(place, "FINISHED") for place in range(4)]
    pair = [history.load(run_folders.find(name, tmp_path)) for name in ("1_mirrored", "3_multi_worker")]
    assert comparable.unlike(*pair) == []
    assert all(len(run.repeats) == 2 for run in pair)
    assert ("strategy", ("mirrored", "multi_worker")) in settings_of(pair)
    assert len(report.write(sweep).sweep.points) == 4
    page = (sweep / "report.html").read_text()
    assert all(name in page for name in ("mirrored", "multi_worker"))
    runs = history.finished(tmp_path, "both")
    assert len(runs) == 4
    cases = [step_model.case_of(timed_run.plan, timed_run.parameters) for timed_run in runs]
    assert {(case.workers, case.parameters) for case in cases} == {(1, 9610), (2, 9610)}
    assert {timed_run.plan.strategy.name for timed_run in runs} == {"mirrored", "multi_worker"}


def test_resuming_finds_the_run_it_left(tmp_path):
    shutil.copytree(OLD / "runs", tmp_path / "runs")
    planned = plan.from_json((OLD / "runs" / "mirrored" / "plan.json").read_text())
    earlier = resume.find(config(resume="auto"), planned, tmp_path)
    earlier.release()
    assert (earlier.folder.name, earlier.status, earlier.saved_step) == ("mirrored", "killed", 60)


def test_what_another_machine_has_timed_is_timed_again(tmp_path):
    shutil.copytree(OLD / "sweeps" / "both" / "1_mirrored", tmp_path / "runs" / "one")
    (tmp_path / "runs" / "one" / "result.json").unlink()
    planned = plan.from_json((tmp_path / "runs" / "one" / "plan.json").read_text())
    asked = config(resume="one", resume_changes=["train.epochs"])
    earlier = resume.find(asked, planned, tmp_path)
    earlier.release()
    assert len(earlier.measured(planned, None).point) == 2
    elsewhere = plan.from_json(json.dumps(json.loads(planned.to_json()) | {"machine": "another"}))
    assert earlier.measured(elsewhere, None).point == []


def test_an_earlier_plan_comes_out_as_it_went_in_and_keeps_its_names():
    for path in sorted(OLD.glob("**/plan.json")):
        then = json.loads(path.read_text())
        now = json.loads(plan.from_json(path.read_text()).to_json())
        assert now.pop("version") == plan.VERSION
        assert then.items() <= now.items()
        assert plan.identity(now) == plan.identity(then)
    # What a later version adds is passed over.
    planned = planning.make(config("mirrored", workers=2), machine())
    assert plan.from_values(json.loads(planned.to_json()) | {"version": 99, "flux": 1}) == planned


@pytest.mark.parametrize("kind", [plan.Plan, Config])
def test_each_field_says_what_it_is_part_of(kind):
    assert [name for name, field in leaves(kind).items() if SAYS not in field.metadata] == [], (
        "Say beside its definition what it is part of: part_of(...)"
    )

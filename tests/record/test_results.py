"""What became of a run, as result.json has it: written and read in one place, in this version and the one before."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from conftest import QUICK, ROOT
from older_runs import OLD

from pipeline.config.parts import flat, leaves
from pipeline.record import predictions, results, sweeps, tracking
from pipeline.record.findings import Check, Difference, Explanation, LostShare, Pace
from pipeline.record.log import read_json, write_json
from pipeline.record.predictions import FittedOn, PredictionLine, Scored
from pipeline.record.results import (
    Baseline,
    Choices,
    Cost,
    Ending,
    Environment,
    Input,
    Layout,
    Result,
    Speed,
    Staleness,
    Survival,
    Tracked,
    Training,
)
from pipeline.record.sweeps import Entry
from pipeline.record.tracking import Copied, TrackingState, TrackingStore

FITTED_ON = FittedOn(2, 1, ("mirrored",), ("mlp",), (1, 2), (1,), (64,), (9610,), "here", {"keras": "3"}, 0.01)
SCORED = Scored(
    examples_per_second=110.0, low=90.0, high=130.0, measured=100.0, error=0.1, held=True, fitted_on=FITTED_ON
)
WHOLE = Result(
    Ending("FAILED", "It was killed.", "point-0.log"),
    Choices("parameter_server", "2cpu", "mlp", "digits", "jax", "horovod"),
    Layout(2, 1, 1, 4, 2, 64, 64, "weak", "float32", True, True, True, 8),
    Speed(100.0, 90.0, 110.0, 1.0, 2.0, 3.0, 50.0, "measured in this run", 2.0, 1.8, 2.2, 1.0, 0.9375, 5, 10, 0.25),
    Input(0.2, {"worker 1": 0.2}, True, 3, 4),
    Training(
        3, 0.5, {"accuracy": 0.9}, 0.6, {"accuracy": 0.8}, 9610, 153_772, 1.5, 2.5, True, 1.25, 6.5, 0.75,
        "model.keras", "sample.txt", "EarlyStopping", 40, 5, 2,
    ),
    Staleness(0.5, 2, 10, 640, 11, {"worker 1": 10}),
    Survival(1, 2, 3, 4, 5, 0.75, 8),
    Cost(10.0, 2.0, 0.5, 300.0),
    Tracked("abc123", "MLflow does not hold all of it yet."),
    Environment("here", {"keras": "3"}),
    Pace(480.0, 9000.0, "input", 9000.0),
    Explanation(0.1, 0.0, 0.2, [LostShare("other", 0.1, 0.0, 0.2)], None, None, "Try less."),
    (SCORED,),
    ("What a reader should know.",),
    Check("different", [Difference("loss", "loss", 0.5, 1.0, 2.0)], "The loss is a sum.", "Try a mean.", "", 0.5),
)  # fmt: skip
# What only an asynchronous training has.
OF_ASYNCHRONOUS = {"staleness_mean", "staleness_max", "steps", "examples", "updates", "worker_steps"}


def test_a_result_is_read_as_it_was_written(tmp_path):
    # Each value differs from what stands for one that is not known.
    assert [name for name, value in flat(WHOLE).items() if value == flat(Result())[name]] == []
    results.write(tmp_path, WHOLE)
    assert results.read(tmp_path) == WHOLE
    assert json.loads((tmp_path / "result.json").read_text())["version"] == results.VERSION


def test_a_training_that_diverged_is_read_with_what_its_loss_came_to(tmp_path):
    results.write(tmp_path, Result(training=Training(loss=float("nan"), metrics={"accuracy": float("inf")})))
    read = results.read(tmp_path)
    assert read is not None
    assert str(read.training.loss) == "nan"
    assert read.training.metrics == {"accuracy": float("inf")}


def test_a_result_of_0_1_0_is_read_and_comes_out_as_it_went_in():
    files = sorted(OLD.glob("**/result.json"))
    assert files
    for path in files:
        then = json.loads(path.read_text())
        result = results.read(path.parent)
        assert result is not None
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


def test_what_is_no_result_is_none(tmp_path):
    assert results.read(tmp_path) is None
    for text in ("", "[]", "{"):
        (tmp_path / "result.json").write_text(text)
        assert results.read(tmp_path) is None


def test_what_a_later_version_adds_is_passed_over():
    assert results.from_values(results.to_values(WHOLE) | {"version": 99, "flux": 1}) == WHOLE


def test_the_docs_name_each_value_and_no_other():
    table = (ROOT / "docs" / "results.md").read_text().partition("## The other files")[0]
    named: set[str] = set()
    for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        first, *others = re.findall(r"`(\w+)`", row)
        # `step_ms_p50`, `_p95`: what the first one ends with is another.
        named |= {first, *(f"{first.removesuffix('_p50').removesuffix('_low')}{end}" if end[0] == "_" else end
                           for end in others)}  # fmt: skip
    assert named == {"version", *leaves(Result)}


def test_a_fresh_result_has_all_values_whether_they_are_known_or_not(pipeline):
    ran = pipeline(*QUICK, "data=digits", "model=mlp", "strategy=one_device", "workers=1", "train.steps=4").ok()
    then = json.loads((OLD / "sweeps" / "both" / "1_mirrored" / "result.json").read_text())
    # One device has nothing to be compared with; of what is to be the same each time, other programs are no part.
    left = {"check", "backend", "collective", "devices", "sample", "seconds_driver", "other_work"}
    left |= {*results.XLA, *results.ENDED_EARLY}
    always = {"version", *leaves(Result)} - OF_ASYNCHRONOUS - left
    assert ran.result.keys() - {"seconds_driver"} == always == {"version", *then}
    (told,) = ran.events("result")
    assert told["values"] == ran.result


def test_a_point_that_is_refused_leaves_why_and_what_was_chosen(asked):
    ran = asked("-m", *QUICK, "data=digits", "model=mlp", "strategy=tpu", "hardware=2cpu", "workers=2").failed(2)
    chosen = {"strategy": "tpu", "hardware": "2cpu", "model": "mlp", "data": "digits", "workers": 2}
    assert ran.result == {"version": results.VERSION, "status": "REFUSED", "error": ran.result["error"]} | chosen


def test_a_baseline_is_read_as_it_was_written_and_one_that_is_broken_not_at_all(tmp_path):
    path = tmp_path / "abc.json"
    kept = Baseline((100.0, 101.0), "outputs/runs/one", 8.0)
    write_json(path, kept)
    assert read_json(Baseline, path) == kept
    for text in ("", "{}", '{"examples_per_second": [1.0]}'):
        path.write_text(text)
        assert read_json(Baseline, path) is None


def test_predictions_are_read_as_they_were_written_and_what_is_none_is_passed_over(tmp_path):
    line = PredictionLine(identity="a", time=8.0, examples_per_second=1.0, low=0.5, high=2.0, fitted_on=FITTED_ON)
    predictions.append(tmp_path, line)
    with (tmp_path / predictions.FILE).open("a") as lines:
        lines.write('{"identity": "b"}\n{"cut')
    predictions.append(tmp_path, dataclasses.replace(line, identity="c"))
    assert predictions.read(tmp_path)[:1] == [line]


def test_a_sweep_is_read_as_it_was_written_and_one_that_is_broken_not_at_all(tmp_path):
    entries = [Entry(0, 0, "abc", "0_mirrored", ("workers=2",), "FINISHED", None, 1.5), Entry(1, 0, "d", "1_tpu", ())]
    sweeps.write(tmp_path, entries[::-1])
    assert sweeps.read(tmp_path) == entries
    for text in ("", "{}", '{"points": [{"place": 0}]}', '{"points": 1}'):
        (tmp_path / Path(sweeps.FILE)).write_text(text)
        assert sweeps.read(tmp_path) == []


def test_where_a_run_is_tracked_is_read_as_it_was_written_also_by_0_1_0(tmp_path):
    store, own, other = (
        TrackingStore("sqlite", "sqlite:///a.db", "pipeline", "file:///a"),
        Copied("abc", "1", 9),
        Copied("d"),
    )
    state = TrackingState(store, Copied(), {}).with_copied("sqlite:///a.db", own).with_copied("http://there", other)
    tracking.write(tmp_path, state)
    assert tracking.recall(tmp_path) == state == TrackingState(store, own, {"http://there": other})
    assert (state.in_store("sqlite:///a.db"), state.in_store("http://nowhere")) == (own, Copied())
    assert tracking.recall(tmp_path / "nothing") == TrackingState()
    old = OLD / "sweeps" / "both" / "1_mirrored"
    read = tracking.recall(old)
    assert (read.copied.closed, read.store and read.store.experiment) == ("FINISHED", "old")
    tracking.write(tmp_path, read)
    now, then = (json.loads((folder / "tracking.json").read_text()) for folder in (tmp_path, old))
    assert now.items() >= then.items()

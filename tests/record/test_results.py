"""Files that runs write are read: results, events, and those of 0.1.0 (tests/from_0_1_0); commands travel as JSON."""

import errno
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import attrgetter
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Any, Literal, Never, Union, get_args, get_origin, get_type_hints
from unittest import mock

import numpy as np
import pytest
from conftest import OLD, ROOT, one_of
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import config, machine

from pipeline.analyze import comparable, history, step_model
from pipeline.commands.results import compare, settings_of
from pipeline.config.parts import SAYS, flat, leaves
from pipeline.config.schema import Config, StartMethod
from pipeline.driver import run_folders
from pipeline.plan import plan, planning
from pipeline.record import commands, events, files, log, results
from pipeline.record.events import Event, EventBase, Run, Saved, Sized, Steps, Unknown, Warned
from pipeline.record.events import Result as Told
from pipeline.record.files import Copied, Entry, PredictionLine, TrackingState, TrackingStore, read_sweep
from pipeline.record.log import EventLog, from_line, from_plain, read, read_json, stamped, to_line, to_plain, write_json
from pipeline.record.results import Baseline, Result, Training
from pipeline.views import report

# Alike in every process that runs tests, and few: each field has other values in each.
few = settings(max_examples=5, database=None, deadline=None, derandomize=True)
TEXT = st.text(st.characters(codec="utf-8"), max_size=5)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    float: st.floats(allow_nan=False, allow_infinity=False),
    int: st.integers(-(2**53), 2**53),
}
PLAIN[object] = PLAIN[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), *PLAIN.values()),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)


def any_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type: a dataclass, Struct or named tuple with all its fields, a collection, or a plain one."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, UnionType):
        return st.one_of(map(any_of, inner))
    if origin in (dict, Mapping):
        return st.dictionaries(*map(any_of, inner), max_size=2)
    if origin is tuple and inner[-1] is not ...:
        return st.tuples(*map(any_of, inner))
    if origin in (list, tuple):
        return st.lists(any_of(inner[0]), max_size=2).map(origin)
    if hints := get_type_hints(kind):
        return st.builds(kind, **{name: any_of(hint) for name, hint in hints.items()})
    return st.from_type(kind)


PLACE = attrgetter("place")
# Files of a folder: values, what writes and reads them, and texts that are none, read as the last.
FORMS = {
    results.FILE: (
        # Of an asynchronous training, which alone has all values.
        any_of(Result).map(lambda result: replace(result, layout=replace(result.layout, asynchronous=True))),
        results.write, results.read, ("", "[]", "{"), None,
    ),
    "baseline.json": (
        any_of(Baseline), lambda folder, value: write_json(folder / "baseline.json", value),
        lambda folder: read_json(Baseline, folder / "baseline.json"),
        ("", "{}", '{"examples_per_second": [1.0]}'), None,
    ),
    files.SWEEP: (
        st.lists(any_of(Entry), max_size=3, unique_by=PLACE).map(lambda entries: sorted(entries, key=PLACE)),
        lambda folder, entries: files.write_sweep(folder, entries[::-1]), read_sweep,
        ("", "{}", '{"points": [{"place": 0}]}', '{"points": 1}'), [],
    ),
    files.PREDICTIONS: (
        st.lists(any_of(PredictionLine), max_size=2),
        lambda folder, lines: [files.append_prediction(folder, line) for line in lines], files.read_predictions,
        ("", '{"cut', '{"identity": "b"}\n'), [],
    ),
    files.TRACKING: (any_of(TrackingState), files.write_tracking, files.read_tracking, ("", "[]"), TrackingState()),
}  # fmt: skip


@pytest.mark.parametrize("file", FORMS)
@given(data=st.data())
@few
def test_a_file_is_read_as_it_was_written_and_one_that_is_broken_not_at_all(file, data):
    values, write, read, broken, nothing = FORMS[file]
    values = data.draw(values)
    with TemporaryDirectory() as name:
        folder = Path(name)
        assert read(folder) == nothing
        for text in broken:
            (folder / file).write_text(text)
            assert read(folder) == nothing
        # Lines are appended to what is there.
        write(folder, values)
        assert read(folder) == values


def test_results_events_and_plans_of_0_1_0_are_read_and_come_out_as_they_went_in_and_plans_keep_their_names():
    paths = sorted(OLD.glob("**/result.json"))
    assert paths
    for path in paths:
        then, result = json.loads(path.read_text()), results.read(path.parent)
        assert results.to_values(result) == {"version": results.VERSION} | then
        # What a later version adds is passed over.
        assert results.from_values(then | {"version": 99, "flux": 1}) == result
        assert (result.ending.status, result.choices.data, result.training.parameters) == ("FINISHED", "digits", 9610)
    for line in (line for path in OLD.glob("**/events.jsonl") for line in path.read_bytes().splitlines(keepends=True)):
        event, values = from_line(line), json.loads(line)
        assert not isinstance(event, Unknown), line
        if isinstance(event, Sized):
            assert event.size is not None
        else:
            assert to_plain(event).items() >= values.items()
    for path in OLD.glob("**/plan.json"):
        then = json.loads(path.read_text())
        now = json.loads(plan.from_json(path.read_text()).to_json())
        assert now.pop("version") == plan.VERSION
        assert then.items() <= now.items()
        assert plan.identity(now) == plan.identity(then)
    planned = planning.make(config("mirrored", workers=2), machine())
    assert plan.from_values(json.loads(planned.to_json()) | {"version": 99, "flux": 1}) == planned


@pytest.mark.parametrize("odd", [None, "?", [], {}, float("nan"), float("inf"), True, -1.0, [None, {"error": "?"}]])
def test_what_is_odd_is_not_known(odd):
    unknown = flat(Result())
    for name in leaves(Result):
        read = flat(results.from_values({name: odd}))
        assert read | {name: None} == unknown | {name: None}
        if not isinstance(odd, bool | str | float | dict):
            assert read[name] == unknown[name]


def test_fresh_results_have_all_values_and_are_compared_and_a_refused_one_says_why_and_what_it_was(pipeline, capsys):
    common = ("data=digits", "model=mlp", "measure.repeats=2", "measure.baseline=none", "tracking=none", "workers=1")
    ran = pipeline("-m", *common, "measure.patience=0", "train.steps=4", "strategy=one_device,default,tpu").ok()
    then = json.loads((OLD / "sweeps" / "both" / "1_mirrored" / "result.json").read_text())
    # One device has nothing to be compared with; of what is to be the same each time, other programs are no part.
    left = {"check", "backend", "collective", "devices", "sample", "seconds_driver", "other_work"}
    # Workers that race alone have these.
    left |= {"staleness_mean", "staleness_max", "steps", "examples", "updates", "worker_steps"}
    always = {"version", *leaves(Result)} - left - {*results.XLA, *results.ENDED_EARLY}
    *fresh, refused = ran.results
    for folder, result in zip(ran.run_folders, fresh, strict=True):
        # Whether they are known or not.
        assert result.keys() - {"seconds_driver", "other_work"} == always == {"version", *then}
        (told,) = (event for event, _ in read(folder / "events.jsonl") if isinstance(event, Told))
        assert told.values == result
    assert compare([str(folder) for folder in ran.run_folders]) == 0
    out = capsys.readouterr().out
    assert "strategy_build._target_" in out
    assert re.search("0 and 1: (not known|as fast)|times as fast", out)
    chosen = {"strategy": "tpu", "hardware": "auto", "model": "mlp", "data": "digits", "workers": 1}
    assert refused == {"version": results.VERSION, "status": "REFUSED", "error": refused["error"]} | chosen


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
    strategy = one_of(("mirrored", "multi_worker"))
    shutil.copytree(OLD / "runs" / strategy, tmp_path / "outputs" / "runs" / strategy)
    ran = pipeline(f"strategy={strategy}", *TYPED).ok()
    assert (ran.result["status"], ran.result["resumed"]) == ("FINISHED", 1)
    assert [event["step"] for event in ran.events("restored")] == [60]
    pipeline(f"strategy={strategy}", *TYPED, "resume=never", "output_dir=whole").ok()
    (log,) = tmp_path.glob("whole/runs/*/events.jsonl")
    whole = [event for line in log.read_text().splitlines() if (event := json.loads(line))["event"] == "epoch"]
    # 0.1.0 wrote the running loss of the epoch under way some steps too late, so that they counted twice.
    for name, epochs in (("val_loss", (0, 1, 2, 3)), ("loss", (0, 2, 3))):
        losses, others = ([run[epoch][name] for epoch in epochs] for run in (ran.events("epoch"), whole))
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
    assert {"mirrored", "multi_worker"} <= set(re.findall(r"\w+", (sweep / "report.html").read_text()))
    runs = history.finished(tmp_path, "both")
    assert len(runs) == 4
    cases = [step_model.case_of(timed_run.plan, timed_run.parameters) for timed_run in runs]
    assert {(case.workers, case.parameters) for case in cases} == {(1, 9610), (2, 9610)}
    assert {timed_run.plan.strategy.name for timed_run in runs} == {"mirrored", "multi_worker"}


@pytest.mark.parametrize("kind", [plan.Plan, Config])
def test_each_field_says_what_it_is_part_of(kind):
    silent = [name for name, field in leaves(kind).items() if SAYS not in field.metadata]
    assert silent == [], "Say beside its definition what it is part of: part_of(...)"


FIRST, SECOND, THIRD = (Steps(step, [0.5], time=1.0, group="point") for step in (1, 2, 3))


def test_the_docs_name_each_value_of_a_result_and_each_kind_of_event_that_is_logged_and_no_other():
    of_results, _, of_events = (ROOT / "docs" / "results.md").read_text().partition("## events.jsonl")
    named = {"version"}
    for row in re.findall(r"^\| (`.*?) \|", of_results, re.MULTILINE):
        first, *others = re.findall(r"`(\w+)`", row)
        # `step_ms_p50`, `_p95`: what the first one ends with is another.
        stem = first.removesuffix("_p50").removesuffix("_low")
        named |= {first, *(f"{stem}{end}" if end[0] == "_" else end for end in others)}
    assert named == {"version", *leaves(Result)}
    # `Event` lists them, so that the type checker finds who forgot one.
    assert set(EventBase.__subclasses__()) == set(get_args(Event)) == {*events.KINDS.values(), Unknown}
    rows = " ".join(re.findall(r"^\| (`.*?) \|", of_events.partition("\n## ")[0], re.MULTILINE))
    logged = [name for name, kind in events.KINDS.items() if kind not in events.PASSING]
    assert sorted(re.findall(r"`(\w+)`", rows)) == sorted(logged)


@pytest.mark.parametrize("kind", [*events.KINDS.values(), Unknown], ids=lambda kind: kind.__name__)
@given(data=st.data())
@few
def test_an_event_comes_out_as_it_went_in(kind, data):
    told = data.draw(any_of(kind))
    line = to_line(told)
    read = from_line(line)
    assert to_line(read) == line
    if kind is not Unknown:
        assert read == told
    values = json.loads(line)
    assert (values["time"], values["group"], values["rank"]) == (told.time, told.group, told.rank)


def test_who_passes_an_event_on_says_by_whom_and_when_it_was_told():
    assert stamped(Warned("Slow."), 8.0, "point", 3) == Warned("Slow.", time=8.0, group="point", rank=3)
    # An earlier moment, and a group, stay.
    earlier = Warned("Slow.", time=2.0, group="baseline")
    assert stamped(earlier, 8.0, "point") == earlier


@pytest.mark.parametrize("values", [
    {"time": 8.0, "event": "some new kind", "group": "point", "rank": 1, "value": [1, {"a": None}]},
    {"time": 8.0, "event": "steps", "group": "point", "rank": 1, "step": "not a number", "losses": []},
    {"time": 8.0, "event": "steps", "group": "point", "rank": 1, "step": True, "losses": [0.5]},
    {"time": 8.0, "event": "measured", "group": "point", "rank": 1, "repeat": 0},
    {"time": 8.0, "event": "measured", "repeat": 0, "examples": 1, "seconds": 1, "calls": [[1]]},
    {"time": 8.0, "event": "sized", "variables": "many"},
    {"time": 8.0, "event": "profiling", "what": "the moon"},
    {"time": "noon", "event": "warning", "group": 7, "rank": None, "text": "Slow."},
    {"time": 8.0, "event": ["steps"]},
    {"value": 1},
    {},
])  # fmt: skip
def test_what_is_not_known_or_odd_is_kept_as_it_is(values):
    event = from_plain(values)
    assert isinstance(event, Unknown)
    assert to_plain(event).items() >= values.items()
    assert json.loads(to_line(event)).items() >= values.items()
    if values.get("group") == "point":
        assert (event.time, event.group, event.rank) == (8.0, "point", 1)
    # What a later version adds to a kind is passed over.
    assert from_plain({"time": 8.0, "event": "saved", "path": "a", "bytes": 7}) == Saved("a", time=8.0)


def test_numbers_that_json_lacks_are_null_in_a_log_and_in_a_result_what_they_came_to(tmp_path):
    results.write(tmp_path, Result(training=Training(loss=float("nan"), metrics={"accuracy": float("inf")})))
    training = results.read(tmp_path).training
    assert (str(training.loss), training.metrics) == ("nan", {"accuracy": float("inf")})
    line = to_line(Steps(2, [math.nan, math.inf], metrics={"auc": -math.inf}, seconds=math.nan))
    values = json.loads(line)
    assert (values["losses"], values["metrics"], values["seconds"]) == ([None, None], {"auc": None}, None)
    assert all(map(math.isnan, from_line(line).losses))
    # One metric that is no number does not hide the others.
    odd = {"auc": 0.5, "yes": True, "said": "0.5", "none": None, "large": 10**400}
    metrics = from_plain({"event": "steps", "step": 1, "losses": [], "metrics": odd}).metrics
    assert (metrics.pop("auc"), metrics.pop("large")) == (0.5, math.inf)
    assert len(metrics) == 3
    assert all(map(math.isnan, metrics.values()))


@pytest.mark.parametrize(("value", "written"), [
    (PurePath("a/b"), "a/b"), (StartMethod.spawn, "spawn"), (np.float32(0.5), 0.5), (np.float64("nan"), None),
    (np.float32("inf"), None), (np.int64(3), 3),
    ({"deep": [np.int32(1), (StartMethod.spawn,)]}, {"deep": [1, ["spawn"]]}),
], ids=str)  # fmt: skip
def test_a_value_of_another_type_is_written_as_what_it_stands_for(tmp_path, value, written):
    assert json.loads(to_line(Run(params={"key": value})))["params"] == {"key": written}
    results.write(tmp_path, results.Result(choices=results.Choices(model=value)))
    there = log.read_whole(tmp_path / results.FILE)["model"]
    # A loss that is no number stays so in a result.
    assert there == written or (written is None and not math.isfinite(there))


@pytest.mark.parametrize("value", [object(), np.ones(2), 1j, [object()]], ids=lambda value: type(value).__name__)
def test_a_value_that_json_has_not_is_an_error_and_no_text_of_it(tmp_path, value):
    with pytest.raises(TypeError, match="JSON"):
        to_line(Run(params={"key": value}))
    with pytest.raises(TypeError, match="JSON"):
        results.write(tmp_path, results.Result(choices=results.Choices(model=value)))
    assert not (tmp_path / results.FILE).exists()


@pytest.mark.parametrize("line", [b"", b"\n", b"[1]\n", b"7\n", b'{"event": "ste\n', b"\xff\n"])
def test_a_line_without_an_object_is_no_event(line):
    assert from_line(line) is None


@pytest.mark.parametrize("whole", [[], [FIRST], [FIRST, SECOND]], ids=len)
@pytest.mark.parametrize("cut", [
    *(to_line(SECOND)[:size] for size in range(len(to_line(SECOND)))),
    *(b"x" * size for size in (log.BLOCK_BYTES - 1, log.BLOCK_BYTES, 3 * log.BLOCK_BYTES + 1)),
], ids=len)  # fmt: skip
def test_a_line_that_was_cut_short_is_not_replayed_and_gone_once_the_log_is_opened_again(tmp_path, whole, cut):
    path, lines = tmp_path / "events.jsonl", b"".join(map(to_line, whole))
    path.write_bytes(lines + cut)
    assert [event for event, _ in read(path)] == whole
    written = EventLog(path)
    written.append(THIRD)
    written.close()
    assert path.read_bytes() == lines + to_line(THIRD)
    assert [*read(path)][-1] == (THIRD, path.stat().st_size)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG])
def test_what_the_disk_does_not_take_is_written_once_it_does(tmp_path, monkeypatch, number):
    written = EventLog(path := tmp_path / "events.jsonl")
    with monkeypatch.context() as full:
        full.setattr(os, "write", mock.Mock(side_effect=OSError(number, os.strerror(number))))
        written.append(FIRST)
    written.append(SECOND)
    assert [event for event, _ in read(path)] == [FIRST, SECOND]


def test_threads_that_write_one_file_at_once_leave_it_whole_whoever_reads_it(tmp_path):
    path, texts = tmp_path / "baseline.json", [f"{number}" * 50_000 for number in range(3)]

    def write(text):
        for _ in range(200):
            log.write_whole(path, text)

    log.write_whole(path, texts[0])
    with ThreadPoolExecutor(len(texts)) as pool:
        writers = [pool.submit(write, text) for text in texts]
        while not all(writer.done() for writer in writers):
            assert path.read_text() in texts
        for writer in writers:
            writer.result()
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(("umask", "mode", "expected"), [(0o22, 0o666, 0o644), (0, log.SECRET, 0o600)])
def test_a_file_has_the_mode_that_it_should_and_one_that_fails_leaves_nothing(tmp_path, umask, mode, expected):
    before = os.umask(umask)
    try:
        log.write_whole(tmp_path / "file", "text", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == expected
    (tmp_path / "here").mkdir()
    with pytest.raises(OSError, match="directory"):
        log.write_whole(tmp_path / "here", "text", mode)
    assert sorted(os.listdir(tmp_path)) == ["file", "here"]


@pytest.mark.parametrize("name", commands.COMMANDS)
@given(data=st.data())
@few
def test_a_command_comes_out_as_it_went_in_stays_as_it_is_and_a_kind_of_event_answers_it(name, data):
    command = data.draw(any_of(commands.COMMANDS[name]))
    assert commands.from_json(command.to_json()) == command
    assert json.loads(command.to_json())["do"] == name
    assert command.__struct_config__.frozen
    answer = command.response_type()
    assert (answer in events.KINDS.values()) is (name not in ("begin", "leave", "exit"))
    assert answer is {"begin": Never, "measure": events.Measured}.get(name, answer)

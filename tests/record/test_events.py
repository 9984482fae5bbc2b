"""Commands travel as JSON; events as lines, of which the log has whole ones alone, whatever a crash has left."""

import errno
import json
import math
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePath
from typing import Never, get_args
from unittest import mock

import numpy as np
import pytest
from any_value import any_of, few
from conftest import ROOT
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.schema import StartMethod
from pipeline.record import commands, events, log, results
from pipeline.record.events import Event, EventBase, Run, Saved, Sized, Steps, Unknown, Warned
from pipeline.record.log import EventLog, from_line, from_plain, read, stamped, to_line, to_plain

OLD = ROOT / "tests" / "from_0_1_0"
FIRST, SECOND, THIRD = (Steps(step, [0.5], time=1.0, group="point") for step in (1, 2, 3))


def test_every_kind_is_listed_and_in_the_docs_if_it_is_logged():
    # `Event` lists them, so that the type checker finds who forgot one.
    assert set(EventBase.__subclasses__()) == set(get_args(Event)) == {*events.KINDS.values(), Unknown}
    page = (ROOT / "docs" / "results.md").read_text()
    table = page.partition("## events.jsonl")[2].partition("\n## ")[0]
    rows = re.findall(r"`(\w+)`", " ".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    assert sorted(rows) == sorted(name for name, kind in events.KINDS.items() if kind not in events.PASSING)


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


def test_every_line_of_0_1_0_is_read_and_written_as_it_was():
    for path in sorted(OLD.glob("**/events.jsonl")):
        for line in path.read_bytes().splitlines(keepends=True):
            event, values = from_line(line), json.loads(line)
            assert not isinstance(event, Unknown), line
            if isinstance(event, Sized):
                assert event.size is not None
            else:
                assert to_plain(event).items() >= values.items()


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


def test_numbers_that_json_lacks_are_written_as_null_and_read_as_none():
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
def test_a_command_comes_out_as_it_went_in_and_stays_as_it_is(name, data):
    command = data.draw(any_of(commands.COMMANDS[name]))
    assert commands.from_json(command.to_json()) == command
    assert json.loads(command.to_json())["do"] == name
    assert command.__struct_config__.frozen


def test_what_answers_a_command_is_a_kind_of_event():
    answers = {name: made.response_type() for name, made in commands.COMMANDS.items()}
    assert {name for name, answer in answers.items() if answer not in events.KINDS.values()} == {
        "begin",
        "leave",
        "exit",
    }
    assert (answers["begin"], answers["measure"]) == (Never, events.Measured)

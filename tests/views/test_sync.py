"""What is sent of event logs to MLflow, to real stores and servers that fail, what it shows, and what stays secret."""

import base64
import hashlib
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy
import tracked_runs
from conftest import finish, left_behind, start, until
from ports import free_port
from tracked_runs import BEGAN, Writer, _mlflow_settings, home, local, only_run, own_tracker, sent, sync, values

from pipeline.driver.run_folders import find
from pipeline.record.events import Ended, Event, Resumed, Run, Warned
from pipeline.record.files import read_tracking
from pipeline.record.log import from_plain, read, to_line
from pipeline.views.mlflow import remember, texts
from pipeline.views.mlflow.changes import Changes, LogState
from pipeline.views.mlflow.copies import Copy
from pipeline.views.mlflow.stores import open_client

__all__ = ["_mlflow_settings", "home", "own_tracker"]


def test_a_run_s_page_says_what_came_of_it_the_command_the_commit_who_ran_it_and_what_its_speed_is_not(home):
    command, commit = "python -m pipeline strategy=mirrored '`x`=<b>'", "3a0ee61939d3" + 28 * "0"
    tags = {"command": command, "git_commit": commit, "rehearsal": "true", "oversubscribed": "false"}
    origin = {"mlflow.user": "ann", "mlflow.source.name": "python -m pipeline", "mlflow.source.git.commit": commit}
    writer = Writer(home / "doubtful", tags=tags | origin)

    def said() -> list[str]:
        return str(sent(writer, home).data.tags["mlflow.note.content"]).split("\n\n")

    asked = "`python -m pipeline strategy=mirrored '?x?=<b>'`, commit `3a0ee61939d3`"
    doubt = "- **rehearsal**: logical devices stand for others, so the speed is not theirs."
    assert said() == [asked, doubt]
    measured = {
        "strategy": "mirrored", "workers": 2, "scaling": "weak", "precision": "float32", "rehearsal": True,
        "examples_per_second": 3412.3456, "examples_per_second_low": 3301.2, "examples_per_second_high": 3502.9,
        "speedup": 1.843721923847, "speedup_low": 1.79, "speedup_high": 1.9, "efficiency": 0.9218,
        "interval_confidence": 0.9375, "notes": ["Input-bound.", "Input-bound."],
    }  # fmt: skip
    writer.write({"time": BEGAN, "event": "result", "values": measured})
    result, *rest = said()
    assert "**1.84 times one device** (rehearsal, 1.79 to 1.90), 92% " in result
    assert " 3,412 examples/s (3,301 to 3,503) " in result
    assert rest == [asked, f"{doubt}\n- Input-bound."]
    writer.end("FAILED", "Worker 1 was killed.")
    assert said()[:2] == ["**Worker 1 was killed.**", result]
    run = only_run(local(home).uri, writer.key)
    assert run.info.user_id == run.data.tags["mlflow.user"] == "ann"
    # In digits that mean something, and both ends of an interval in one column.
    assert (run.data.metrics["speedup"], run.data.metrics["examples_per_second"]) == (1.844, 3412.0)
    ranges = {"speedup_range": "1.79 to 1.90", "examples_per_second_range": "3,301 to 3,503"}
    assert run.data.tags.items() >= (origin | ranges).items()


def test_runs_of_one_kind_have_names_of_their_own_by_which_they_are_found(home: Path) -> None:
    uri, names = local(home).uri, []
    for place, bracket in enumerate(("", "", " (rehearsal)")):
        writer = Writer(home / f"named{place}", name=f"mirrored-2-mlp-digits{bracket}")
        run = sent(writer, home)
        names.append(run.info.run_name)
        assert names[-1] == f"mirrored-2-mlp-digits-{run.info.run_id[:5]}{bracket}"
        (writer.folder / "result.json").write_text(json.dumps({"mlflow_run_id": run.info.run_id}))
        (home / "runs").mkdir(exist_ok=True)
        writer.folder.rename(home / "runs" / writer.folder.name)
    assert len(set(names)) == 3
    assert [find(name, home).name for name in names] == ["named0", "named1", "named2"]
    # A person's own name stays, also where a run is found again.
    tracked_runs.MlflowClient(uri).update_run(run.info.run_id, name="mine")
    (home / "runs" / "named2" / "tracking.json").unlink()
    writer.folder = home / "runs" / "named2"
    assert sent(writer, home).info.run_name == "mine"


def test_throughput_is_what_mlflow_is_sent_first(home: Path) -> None:
    """Its page that compares runs opens on the first metric that it was sent."""
    writer, uri = Writer(home / "first", params={"workers": 2}), local(home).uri

    def send(patient: bool) -> dict[str, float]:
        remember(writer.folder, local(home))
        copy = Copy(writer.folder, local(home))
        while copy.advance(patient):
            pass
        return only_run(uri, writer.key).data.metrics

    # The run is there at once.
    assert send(patient=True) == {}
    assert only_run(uri, writer.key).data.params == {"workers": "2"}
    writer.steps(1, 20)
    assert send(patient=True) == {}
    writer.write({"time": BEGAN + 20, "event": "measured", "group": "point", "repeat": 0, "examples": 64, "seconds": 1})
    metrics = send(patient=True)
    assert (next(iter(metrics)), len(metrics)) == ("examples_per_second", 3)
    assert sum(values(uri, only_run(uri, writer.key)).values()) == 22
    # One that is not measured, or that somebody waits for, does not keep its losses back.
    for name, last, patient in (("late", 40, True), ("asked", 2, False)):
        writer = Writer(home / name)
        writer.steps(1, last)
        assert len(send(patient)) == 1


def test_an_experiment_gets_its_page_once_and_a_persons_own_text_and_views_stay(home, monkeypatch):
    uri, view = local(home).uri, "mlflow.sharedViewState.speedup"
    client = open_client(uri, None)
    experiment = client.create_experiment("described", tags={"mlflow.note.content": "Ours."})

    def send(name: str) -> dict[str, str]:
        sent(Writer(home / name), home, "described")
        return client.get_experiment(experiment).tags

    first, note = send("described first"), "mlflow.note.content"
    assert first[note] == "Ours."
    assert json.loads(json.loads(first[view])["state"])["orderByKey"] == "metrics.`speedup`"
    client.set_experiment_tag(experiment, view, "changed")
    assert send("described second") == first | {view: "changed"}
    # A text that an earlier version of ours wrote is brought up to date.
    assert texts.missing({}, 0)[note] == texts.DESCRIPTION
    assert note not in texts.missing({note: "Then."}, 0)
    monkeypatch.setattr(texts, "EARLIER", (hashlib.sha256(b"Then.").hexdigest()[:12],))
    assert texts.missing({note: "Then."}, 0)[note] == texts.DESCRIPTION


def test_long_and_odd_values_reach_mlflow_cut_and_clean(home: Path) -> None:
    odd = {"long": "x" * 7000, "wide": "é" * 7000, "lone": "a\udcffb", "zero": "a\0b", "none": "", "n@me%": 1}
    writer = Writer(
        home / "odd",
        params=odd | {f"p{index}": "ü" * 6000 for index in range(60)},
        tags={"t" * 300: "v", "long": "y" * 9000, "a=b": "c"},
    )
    names = {"": 1, "a" * 300: 2, "../up": 3, "a//b": 4, "ünï": 5, "ok": float("nan"), "yes": True, "big": 10**400}
    writer.write({"time": BEGAN, "event": "steps", "step": 1, "losses": [], "metrics": names})
    run = sent(writer, home)
    cut = {"long": "x" * 6000, "wide": "é" * 6000, "lone": "a?b", "zero": "ab", "none": "", "n_me_": "1"}
    assert run.data.params.items() >= cut.items()
    assert len(run.data.params) == 66
    assert run.data.tags["t" * 250] == "v"
    long = f"train/{'a' * 244}"
    assert run.data.metrics == {"train": 1, long: 2, "train/_/up": 3, "train/a/b": 4, "train/ünï": 5}


def test_a_run_that_a_slow_server_made_after_all_is_deleted(home: Path) -> None:
    writer, client = Writer(home / "twins"), open_client(local(home).uri, None)
    experiment = client.create_experiment("twins")
    for _ in range(2):
        client.create_run(experiment, tags={"pipeline.key": writer.key})
    writer.end()
    assert sent(writer, home, "twins").info.status == "FINISHED"
    assert len(client.search_runs([experiment], run_view_type=tracked_runs.ViewType.ALL)) == 2


def test_sync_ends_runs_whose_driver_is_gone_and_no_others(home: Path) -> None:
    gone = Writer(home / "drivers" / "gone", pid=tracked_runs.NEVER)
    reused = Writer(home / "drivers" / "reused", pid=os.getpid())
    live = Writer(home / "drivers" / "live", time=time.time())
    elsewhere = Writer(home / "drivers" / "elsewhere", host="another", pid=tracked_runs.NEVER)
    writers = (gone, reused, live, elsewhere)
    for writer in writers:
        writer.steps(1, 3)
        remember(writer.folder, local(home))
    with gone.log.open("ab") as log:
        log.write(to_line(Warned(time=BEGAN + 4))[:20])
    (sent, lines), uri = sync(home / "drivers"), local(home).uri
    assert sent
    assert [only_run(uri, writer.key).info.status for writer in writers] == ["KILLED", "KILLED", "RUNNING", "RUNNING"]
    assert only_run(uri, gone.key).info.end_time == round(1000 * (BEGAN + 3))
    assert [line.partition(". ")[2] for line in lines[:4]] == [
        "It has no end, and only another knows whether it still runs: sync there.",
        "It has no end and its process is gone: set to KILLED.",
        "It still runs.",
        "It has no end and its process is gone: set to KILLED.",
    ]
    assert lines[4] == "Runs sent: 4; nothing new: 0; not sent: 0."
    assert sync(gone.folder) == (True, ["Runs sent: 0; nothing new: 1; not sent: 0."])
    assert len(values(uri, only_run(uri, gone.key))) == 3


def test_sync_fills_a_store_that_was_thrown_away_and_leaves_a_deleted_run_alone(tmp_path: Path) -> None:
    done, half = Writer(tmp_path / "runs" / "done"), Writer(tmp_path / "runs" / "half")
    losses = done.steps(1, 10)
    done.end()
    for writer in (done, half):
        remember(writer.folder, local(tmp_path))
    assert sync(tmp_path)[0]
    copied = f"sqlite:///{tmp_path}/other/mlflow.db"
    (tmp_path / "other").mkdir()
    # To another store, whose artifacts hold copies of the logs: no runs of their own.
    assert sync(tmp_path, uri=copied)[1][-1] == "Runs sent: 2; nothing new: 0; not sent: 0."
    assert sync(tmp_path, uri=copied)[1][-1] == "Runs sent: 0; nothing new: 2; not sent: 0."
    assert sync(tmp_path)[1][-1] == "Runs sent: 0; nothing new: 2; not sent: 0."

    tracked_runs.MlflowClient(copied).delete_run(only_run(copied, half.key).info.run_id)
    half.steps(1, 2)
    sent, lines = sync(tmp_path, uri=copied)
    assert (sent, "left alone" in lines[0]) == (True, True)

    # As a new process finds it: MLflow keeps connections to the file that was deleted.
    moved = f"sqlite:///{tmp_path}/new/../other/mlflow.db"
    (tmp_path / "new").mkdir()
    (tmp_path / "other" / "mlflow.db").unlink()
    for state in (writer.folder / "tracking.json" for writer in (done, half)):
        state.write_text(state.read_text().replace(copied, moved))
    assert sync(done.folder, uri=moved)[1][-1] == "Runs sent: 1; nothing new: 0; not sent: 0."
    assert values(moved, only_run(moved, done.key)) == Counter(losses)
    assert tracked_runs.files(moved, only_run(moved, done.key)) == {"events.jsonl"}
    # What is complete stays so where the store cannot be asked.
    nowhere, state = f"http://127.0.0.1:{free_port()}/moved", done.folder / "tracking.json"
    state.write_text(state.read_text().replace(moved, nowhere))
    assert sync(done.folder, uri=nowhere) == (True, ["Runs sent: 0; nothing new: 1; not sent: 0."])


def test_what_a_later_command_makes_again_is_sent_once_the_run_goes_on_and_that_of_a_sweep_has_no_metrics():
    state = LogState()

    def changed(event: Event) -> Changes:
        state.changes = Changes()
        state.take(event)
        return state.changes

    def points(**event: Any) -> list[tuple[str, int]]:
        changes = changed(from_plain({"time": 9.0, "group": "point", "rank": 0, **event}))
        return [(point.name, point.step) for point in changes.metrics]

    changed(Run(params={"workers": 2}, time=1.0))
    call = {"event": "steps", "losses": [0.3, 0.2], "metrics": {"accuracy": 0.5}, "seconds": 1.0}
    assert ("train/loss", 4) in points(**call, step=4)
    assert changed(Ended("PREEMPTED", time=9.0)).end == ("KILLED", 9000)
    resumed = changed(Resumed({"workers": 4}, time=10.0))
    assert resumed.reopened
    assert resumed.tags.items() >= {"error": "", "resumed/workers": "4"}.items()
    assert not state.ended
    assert points(**call, step=3) == []
    assert points(**call, step=5) == [("train/loss", 5), ("train/accuracy", 5)]
    assert points(event="epoch", epoch=1, step=5, loss=0.1) != []
    # Fewer workers may end an epoch that they make again at another step.
    assert points(event="epoch", epoch=1, step=5, loss=0.1) == points(event="epoch", epoch=1, step=7, loss=0.1) == []
    repeat = {"event": "measured", "repeat": 0, "examples": 8.0, "seconds": 1.0}
    assert [points(**repeat), points(**repeat)] == [[("examples_per_second", 0)], []]
    assert points(event="result", values={"speedup": 2.0})[0] == ("speedup", 1)
    # Its points have them; an earlier version told them too.
    told = {"values": {"speedup": 2.0}, "tags": {"best": "mirrored", "confidence": None}, "text": "A tie.", "files": {}}
    report = changed(from_plain({"time": 9.0, "event": "report"} | told))
    assert report.metrics == []
    assert report.tags == {"best": "mirrored", "confidence": "", "mlflow.note.content": "A tie."}


SHORT = (
    "model=mlp", "data=digits", "workers=1", "train.steps=40", "train.steps_per_call=4", "measure.steps=0",
    "measure.baseline=none", "train.save=false", "tracking.system_metrics_seconds=1", "tracking.drain_timeout=200",
)  # fmt: skip


def whole(uri: str, log: Path) -> Any:
    """The run of a log in a store, which has every point of the log once."""
    state = LogState()
    for event, _ in read(log):
        state.take(event)
    run = only_run(uri, str(state.run and state.run.key))
    points = {(each.name, each.value, each.time_ms, each.step): 1 for each in state.changes.metrics}
    assert values(uri, run) == Counter(points)
    return run


def test_a_new_store_is_made_without_a_wait_for_the_disk_at_each_change_and_used_with_one(tmp_path: Path) -> None:
    levels: list[int] = []

    def closed(connection: Any, record: object) -> None:
        levels.append(connection.execute("PRAGMA synchronous").fetchone()[0])

    sqlalchemy.event.listen(sqlalchemy.Pool, "close", closed)
    try:
        open_client(f"sqlite:///{tmp_path}/outputs/mlflow.db", None)
        engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path}/outputs/mlflow.db")
        with engine.connect() as connection:
            assert connection.execute(sqlalchemy.text("SELECT name FROM sqlite_master")).fetchone()
        engine.dispose()
        assert (set(levels[:-1]), levels[-1]) == ({0}, 2)
    finally:
        sqlalchemy.event.remove(sqlalchemy.Pool, "close", closed)


@pytest.mark.slow
def test_four_runs_that_make_the_store_at_once_have_every_point_of_their_logs_in_it_once(tmp_path: Path) -> None:
    for process in [start(tmp_path, *SHORT, f"train.seed={seed}") for seed in range(4)]:
        finish(process, tmp_path, time.monotonic(), 400).ok()
    logs, uri = sorted(tmp_path.glob("outputs/runs/*/events.jsonl")), f"sqlite:///{tmp_path}/outputs/mlflow.db"
    assert len(logs) == 4
    for log in logs:
        result = json.loads((log.parent / "result.json").read_text())
        assert result["tracking_note"] is None
        run = whole(uri, log)
        assert (run.info.run_id, run.info.status) == (result["mlflow_run_id"], "FINISHED")
        assert sum(name == "train/loss" for name, *_ in values(uri, run)) == 40
    assert not list(tmp_path.glob("outputs/mlflow.db.new*"))
    assert not left_behind(tmp_path)


@pytest.mark.slow
def test_a_server_that_loses_answers_stands_still_or_is_killed_has_a_run_with_every_point_once(tmp_path, own_tracker):
    server = tracked_runs.Server(tmp_path).start()
    ill, lost = threading.Event(), ["/api/2.0/mlflow/runs/create", "/api/2.0/mlflow/runs/log-batch"]

    def between(request: tracked_runs.Request) -> tuple[int, bytes] | None:
        """Passes requests on to the real server; the first answers are lost, and while `ill` is set they are 500."""
        answer = request.passed_on(server.uri)
        if request.path in lost:
            lost.remove(request.path)
            return None
        return (500, b"") if ill.is_set() else answer

    def each_process(do: Callable[[psutil.Process], None]) -> None:
        """Does it to the server, which begins by starting others."""
        first = psutil.Process(server._process.pid)
        for process in (first, *first.children(recursive=True)):
            do(process)

    writer, said = Writer(tmp_path / "run"), tmp_path / "tracker.log"

    def all_sent() -> bool:
        return bool(read_tracking(writer.folder).copied.offset == writer.log.stat().st_size)

    try:
        with tracked_runs.serving(between) as uri:
            own_tracker.follow(writer.folder, tracked_runs.store(uri))
            expected = writer.steps(1, 1500)
            until(lambda: read_tracking(writer.folder).copied.offset, 60)
            assert not lost
            ill.set()
            expected += writer.steps(1501, 2600)
            until(lambda: "answers with error 500" in said.read_text(), 30)
            ill.clear()
            until(all_sent, 60)
            # It stands still, longer than a request is waited for.
            each_process(psutil.Process.suspend)
            expected += writer.steps(2601, 4500)
            until(lambda: "does not answer in time" in said.read_text(), 30)
            assert not all_sent()
            each_process(psutil.Process.resume)
            expected += writer.steps(4501, 5000)
            until(all_sent, 60)
            # It is killed, and comes back later.
            server.stop(signal.SIGKILL)
            expected += writer.steps(5001, 6000)
            until(lambda: "answers with error 502" in said.read_text(), 30)
            server.start()
            writer.end()
            until(lambda: read_tracking(writer.folder).copied.closed, 60)
            for _ in range(2):
                run = only_run(server.uri, writer.key)
                assert values(server.uri, run) == Counter(expected)
                assert run.info.status == "FINISHED"
                assert sync(writer.folder) == (True, ["Runs sent: 0; nothing new: 1; not sent: 0."])
                # From the start, as if nothing were known of what was sent.
                (writer.folder / "tracking.json").unlink()
                remember(writer.folder, tracked_runs.store(uri))
                assert sync(writer.folder)[0]
    finally:
        each_process(psutil.Process.resume)
        server.stop()


NAME, PASSWORD, TOKEN = "ann-3d6f", "s3cret-b19c!", "t0ken-77aa"
BASIC = base64.b64encode(f"{NAME}:{PASSWORD}".encode()).decode()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, tracked_runs.Server, list[Any]]]:
    """(address, the MLflow server behind it, what was asked of it): it answers only to the name or the token."""
    server = tracked_runs.Server(tmp_path_factory.mktemp("guarded")).start()
    asked: list[str | None] = []

    def guard(request: tracked_runs.Request) -> tuple[int, bytes]:
        asked.append(login := request.headers.get("Authorization"))
        is_known = login in (f"Basic {BASIC}", f"Bearer {TOKEN}")
        return request.passed_on(server.uri) if is_known else (401, f"Who is {login}?".encode())

    with tracked_runs.serving(guard) as uri:
        yield uri, server, asked
    server.stop()


@pytest.mark.slow
@pytest.mark.parametrize(("environ", "header"), [
    ({"MLFLOW_TRACKING_USERNAME": NAME, "MLFLOW_TRACKING_PASSWORD": PASSWORD}, f"Basic {BASIC}"),
    ({"MLFLOW_TRACKING_TOKEN": TOKEN}, f"Bearer {TOKEN}"),
])  # fmt: skip
def test_who_logs_in_from_the_environment_leaves_the_secret_nowhere(tmp_path, asked, guarded, environ, header):
    uri, server, logins = guarded
    logins.clear()
    if runs := len(environ) == 2:
        where = ("tracking=server", f"tracking.uri={uri}")
        ran = finish(start(tmp_path, *SHORT, *where, **environ), tmp_path, time.monotonic(), 120)
        assert ran.result["tracking_note"] is None
    else:  # What a run does not send, `sync` does.
        writer = Writer(tmp_path / "outputs/runs/run")
        writer.steps(1, 40)
        writer.end()
        remember(writer.folder, tracked_runs.store(uri))
        ran = asked("sync", **environ)
        assert ran.out.splitlines()[-1] == "Runs sent: 1; nothing new: 0; not sent: 0."
    assert ran.ok().err == "" or runs
    assert set(logins) == {header}
    (log,) = tmp_path.glob("outputs/runs/*/events.jsonl")
    whole(server.uri, log)
    # Another who logs in with what the server does not know, so that its answer repeats it.
    wrong = {name: f"{text}-wrong" for name, text in environ.items()}
    refused = asked("sync", f"uri={uri.replace('127.0.0.1', 'localhost')}", **wrong).failed()
    assert "401" in refused.out
    printed = ran.out + ran.err + refused.out + refused.err
    # Nor does a run that fails or is refused leave it.
    for case, code in (("model.build._target_=own.raises", 1), ("workers=0", 2)) if runs else ():
        failed = finish(start(tmp_path, *SHORT, *where, case, **environ), tmp_path, time.monotonic(), 120).failed(code)
        printed += failed.out + failed.err
    secrets = [*(text for name, text in environ.items() if not name.endswith("USERNAME")), BASIC]
    assert not [word for word in secrets if word in printed]
    assert len(list(tmp_path.rglob("point-0.log"))) == 2 * runs
    # Databases and archives included.
    files = [path for folder in (tmp_path, server.folder) for path in folder.rglob("*") if path.is_file()]
    assert not [path for path in files for word in secrets if word.encode() in path.read_bytes()]

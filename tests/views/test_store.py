"""Whole runs and the store: four at once into a fresh one, a server that stops, and what must stay secret."""

import base64
import json
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import sqlalchemy
from conftest import finish, left_behind, start
from tracked_runs import Request, Server, Writer, _mlflow_settings, only_run, own_tracker, serving, store, sync, values
from under_way import until

from pipeline.record.files import read_tracking
from pipeline.record.log import read
from pipeline.views.mlflow import Tracker, remember
from pipeline.views.mlflow.changes import LogState
from pipeline.views.mlflow.stores import open_client

__all__ = ["_mlflow_settings", "own_tracker"]

SHORT = (
    "model=mlp", "data=digits", "workers=1", "train.steps=40", "train.steps_per_call=4", "measure.steps=0",
    "measure.baseline=none", "train.save=false", "tracking.system_metrics_seconds=1",
    "tracking.drain_timeout=60",
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
    uri = f"sqlite:///{tmp_path}/outputs/mlflow.db"
    try:
        open_client(uri, None)
        assert set(levels) == {0}
        levels.clear()
        engine = sqlalchemy.create_engine(uri)
        with engine.connect() as connection:
            assert connection.execute(sqlalchemy.text("SELECT name FROM sqlite_master")).fetchone()
        engine.dispose()
        assert levels == [2]
    finally:
        sqlalchemy.event.remove(sqlalchemy.Pool, "close", closed)


@pytest.mark.slow
def test_four_runs_that_make_the_store_at_once_have_every_point_of_their_logs_in_it_once(tmp_path: Path) -> None:
    began = time.monotonic()
    started = [start(tmp_path, *SHORT, f"train.seed={seed}") for seed in range(4)]
    ran = [finish(process, tmp_path, began, 200) for process in started]
    assert [each.code for each in ran] == [0] * 4, [each.err for each in ran]
    logs = sorted(tmp_path.glob("outputs/runs/*/events.jsonl"))
    assert len(logs) == 4
    uri = f"sqlite:///{tmp_path}/outputs/mlflow.db"
    for log in logs:
        result = json.loads((log.parent / "result.json").read_text())
        assert result["tracking_note"] is None
        run = whole(uri, log)
        assert (run.info.run_id, run.info.status) == (result["mlflow_run_id"], "FINISHED")
        assert sum(name == "train/loss" for name, *_ in values(uri, run)) == 40
    assert not list(tmp_path.glob("outputs/mlflow.db.new*"))
    assert not left_behind(tmp_path)


@pytest.mark.slow
def test_a_server_that_loses_answers_stands_still_or_is_killed_half_way_has_one_run_with_every_point_once(
    tmp_path: Path, own_tracker: Tracker
) -> None:
    server = Server(tmp_path).start()
    ill, lost = threading.Event(), ["/api/2.0/mlflow/runs/create", "/api/2.0/mlflow/runs/log-batch"]

    def between(request: Request) -> tuple[int, bytes] | None:
        """Passes requests on to the real server; the first answers are lost, and while `ill` is set they are 500."""
        answer = request.passed_on(server.uri)
        if request.path in lost:
            lost.remove(request.path)
            return None
        return (500, b"") if ill.is_set() else answer

    def processes() -> list[psutil.Process]:
        """The server's, which begins by starting others."""
        first = psutil.Process(server._process.pid)  # type: ignore[union-attr]
        return [first, *first.children(recursive=True)]

    try:
        with serving(between) as uri:
            writer = Writer(tmp_path / "run")
            said = tmp_path / "tracker.log"

            def all_sent() -> bool:
                return bool(read_tracking(writer.folder).copied.offset == writer.log.stat().st_size)

            own_tracker.follow(writer.folder, store(uri))
            expected = writer.steps(1, 1500)
            until(lambda: read_tracking(writer.folder).copied.offset, 60)
            assert not lost
            ill.set()
            expected += writer.steps(1501, 2600)
            until(lambda: "answers with error 500" in said.read_text(), 30)
            ill.clear()
            until(all_sent, 60)
            # It stands still, longer than a request is waited for.
            for each in processes():
                each.suspend()
            expected += writer.steps(2601, 4500)
            until(lambda: "does not answer in time" in said.read_text(), 30)
            assert not all_sent()
            for each in processes():
                each.resume()
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
            remember(writer.folder, store(uri))
            assert sync(writer.folder)[0]
            assert values(server.uri, only_run(server.uri, writer.key)) == Counter(expected)
    finally:
        for each in processes():
            each.resume()
        server.stop()


NAME, PASSWORD, TOKEN = "ann-3d6f", "s3cret-b19c!", "t0ken-77aa"
BASIC = base64.b64encode(f"{NAME}:{PASSWORD}".encode()).decode()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Server, list[Any]]]:
    """(address, the MLflow server behind it, what was asked of it): it answers only to the name or the token."""
    server = Server(tmp_path_factory.mktemp("guarded")).start()
    asked: list[str | None] = []

    def guard(request: Request) -> tuple[int, bytes]:
        asked.append(login := request.headers.get("Authorization"))
        is_known = login in (f"Basic {BASIC}", f"Bearer {TOKEN}")
        return request.passed_on(server.uri) if is_known else (401, f"Who is {login}?".encode())

    with serving(guard) as uri:
        yield uri, server, asked
    server.stop()


LOGINS = {
    "password": ({"MLFLOW_TRACKING_USERNAME": NAME, "MLFLOW_TRACKING_PASSWORD": PASSWORD}, f"Basic {BASIC}"),
    "token": ({"MLFLOW_TRACKING_TOKEN": TOKEN}, f"Bearer {TOKEN}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("login", LOGINS)
def test_who_logs_in_from_the_environment_leaves_the_secret_nowhere(
    tmp_path: Path, asked: Any, guarded: tuple[str, Server, list[Any]], login: str
) -> None:
    uri, server, logins = guarded
    environ, header = LOGINS[login]
    logins.clear()
    runs = login == "password"
    if runs:
        began, where = time.monotonic(), ("tracking=server", f"tracking.uri={uri}")
        ran = finish(start(tmp_path, *SHORT, *where, **environ), tmp_path, began, 120)
        assert ran.result["tracking_note"] is None
    else:  # What a run does not send, `sync` does.
        writer = Writer(tmp_path / "outputs/runs/run")
        writer.steps(1, 40)
        writer.end()
        remember(writer.folder, store(uri))
        ran = asked("sync", **environ)
    ran.ok()
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

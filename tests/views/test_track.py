"""Event logs to MLflow runs: real stores, real servers, real processes that are harmed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import tracked_runs
from conftest import ROOT, until
from ports import free_port
from tracked_runs import BEGAN, NEVER, Writer, _mlflow_settings, home, local, only_run, own_tracker, tracker, values

from pipeline.record.files import Kept, forget_agents, read_tracking, run_id_of
from pipeline.views.mlflow import Tracker, remember, stores
from pipeline.views.mlflow.sync_runs import LogFollower

__all__ = ["_mlflow_settings", "home", "own_tracker", "tracker"]


def whole_run(folder: Path) -> tuple[Writer, list[tracked_runs.Value]]:
    """A log with every kind of event but its end, and by hand what MLflow must make of it."""
    at, second, base = ({"group": group, "rank": rank} for group, rank in (("point", 0), ("point", 1), ("baseline", 0)))
    params = {"data": "digits", "workers": 2, "global_batch": 128, "seed": None}
    writer = Writer(folder, params=params, tags={"sweep": "s", "good": True})
    (folder / "hydra").mkdir()
    for name in ("plan.json", "point-0.log", "hydra/config.yaml", "model.keras", "result.json"):
        (folder / name).write_text("{}")
    built = {"parameters": 1234, "input_shape": [8, 8, 1], "num_classes": 10, "train_examples": 100}
    metrics, val_metrics = {"accuracy": 0.5, "../top@5 (50%)": 1}, {"accuracy": 0.75}
    writer.write(
        {"time": BEGAN + 1, "event": "joined", **at, "devices": ["CPU:0"]},
        {"time": BEGAN + 2, "event": "built", **at, **built, "validation_examples": 20, "data_digest": "ab12"},
        {"time": BEGAN + 2, "event": "built", **base, **built, "data_digest": "other"},
        {"time": BEGAN + 3, "event": "measured", **at, "repeat": 0, "examples": 640, "seconds": 2.0},
        {"time": BEGAN + 3, "event": "measured", **second, "repeat": 0, "examples": 640, "seconds": 4.0},
        {"time": BEGAN + 4, "event": "measured", **base, "repeat": 0, "examples": 64, "seconds": 1.0},
        {"time": BEGAN + 8, "event": "steps", **at, "epoch": 1, "step": 4, "losses": [4.0, 3.0, None, 1.0],
         "metrics": metrics | {"loss": 9.0}, "examples": 128, "seconds": 4.0, "learning_rate": 0.1},
        {"time": BEGAN + 9, "event": "epoch", **at, "epoch": 1, "step": 4, "loss": 2.5, "metrics": metrics,
         "val_loss": 2.0, "val_metrics": val_metrics, "seconds": 5.0},
        {"time": BEGAN + 10, "event": "system", **at, "host": "host/0", "values": {"cpu_percent": 50.0, "gpu": None}},
        {"time": BEGAN + 10, "event": "system", **base, "host": "host/0", "values": {"cpu_percent": 1}},
        {"time": BEGAN + 15, "event": "system", **at, "host": "host/0", "values": {"cpu_percent": 60.0}},
        {"time": BEGAN + 16, "event": "warning", **at, "text": "Slow disk."},
        {"time": BEGAN + 16, "event": "some new kind", **at, "value": 1},
        {"time": BEGAN + 16, "event": "steps", **at, "losses": "not a list", "step": "nor a number"},
        {"time": BEGAN + 17, "event": "saved", **at, "path": "model.keras"},
        {"time": BEGAN + 18, "event": "result", "values": {
            "status": "FINISHED", "error": None, "rehearsal": True, "oversubscribed": False, "workers": 2, "repeats": 1,
            "examples_per_second": 320.0, "examples_per_second_low": 300.0, "speedup": 5.0, "efficiency": 2.5,
            "baseline_examples_per_second": 64.0, "step_ms_p50": 100.0, "step_ms_p99": None, "seconds_training": 5.0,
            "loss": 2.5, "metrics": {"accuracy": 0.5}, "val_loss": 2.0, "val_metrics": val_metrics,
            "stopped_by": "EarlyStopping", "stopped_at": 4, "restored_epoch": None}},
    )  # fmt: skip

    # MLflow sorts parameters as texts, so numbers are metrics too. Of a timed repeat first, then the median of all.
    expected = [
        ("train/workers", 2.0, 0, 0), ("train/global_batch", 128.0, 0, 0),
        ("examples_per_second", 320.0, 3, 0), ("examples_per_second", 320.0, 18, 1),
        ("one_device/examples_per_second", 64.0, 4, 0), ("one_device/examples_per_second", 64.0, 18, 1),
        ("train/loss", 4.0, 5, 1), ("train/loss", 3.0, 6, 2), ("train/loss", 1.0, 8, 4),
        ("train/accuracy", 0.5, 8, 4), ("train/_/top_5 _50__", 1.0, 8, 4), ("train/learning_rate", 0.1, 8, 4),
        ("train/examples_per_second", 32.0, 8, 4), ("train/epoch", 1.0, 9, 4), ("train/epoch_loss", 2.5, 9, 4),
        ("val/loss", 2.0, 9, 4), ("val/accuracy", 0.75, 9, 4),
        ("system/host_0/cpu_percent", 50.0, 10, 0), ("system/host_0/cpu_percent", 60.0, 15, 1),
        ("examples_per_second_low", 300.0, 18, 0), ("speedup", 5.0, 18, 0), ("efficiency", 2.5, 18, 0),
        ("step/ms_p50", 100.0, 18, 0), ("time/seconds_training", 5.0, 18, 0),
    ]  # fmt: skip
    return writer, [(name, value, round(1000 * (BEGAN + seconds)), step) for name, value, seconds, step in expected]


@pytest.mark.slow
def test_a_follower_that_is_stopped_or_killed_is_reported_and_follows_all_runs_once_it_is_back(tmp_path, own_tracker):
    first, second, third = (Writer(tmp_path / name) for name in ("first", "second", "third"))
    own_tracker.begin()
    follower = own_tracker._process
    follower.send_signal(signal.SIGSTOP)
    for _ in range(500):  # More than a pipe takes.
        own_tracker.follow(first.folder, local(tmp_path))
    own_tracker.follow(second.folder, local(tmp_path))
    follower.send_signal(signal.SIGCONT)
    assert own_tracker.drain(second.folder, 20) == (True, None)
    follower.kill()
    follower.wait()
    losses = first.steps(1, 3)
    ended = f"The tracking process has ended; see {tmp_path / 'tracker.log'}."
    assert own_tracker.drain(first.folder, 10) == (False, ended)
    own_tracker.follow(third.folder, local(tmp_path))
    assert own_tracker.drain(first.folder, 20) == own_tracker.drain(third.folder, 20) == (True, None)
    uri = str(local(tmp_path).uri)
    assert {value for value in values(uri, only_run(uri, first.key)) if value[0] == "train/loss"} == set(losses)
    assert only_run(uri, third.key).info.status == "RUNNING"
    own_tracker.close()
    assert only_run(uri, third.key).info.status == "KILLED"


@pytest.mark.slow
def test_a_followed_run_is_in_mlflow_once_and_so_after_every_later_sync(home: Path, tracker: Tracker) -> None:
    writer, expected = whole_run(home / "whole")
    uri = local(home).uri
    client = tracked_runs.MlflowClient(uri)
    tracker.follow(writer.folder, local(home))
    assert tracker.drain(writer.folder, 60) == (True, None)
    run_id = run_id_of(writer.folder)
    assert client.get_run(run_id).info.status == "RUNNING"
    writer.end()
    assert tracker.drain(writer.folder, 30) == (True, None)

    run = only_run(uri, writer.key)
    assert run.info.run_id == run_id
    assert values(uri, run) == Counter(expected)
    times = [round(1000 * time) for time in (BEGAN, BEGAN + 9999)]
    assert [run.info.status, run.info.start_time, run.info.end_time] == ["FINISHED", *times]
    assert run.info.run_name == f"whole-{run_id[:5]}"
    assert client.get_experiment(run.info.experiment_id).name == "pipeline"
    assert run.info.artifact_uri.startswith(local(home).artifacts)
    assert run.data.params == {"data": "digits", "workers": "2", "global_batch": "128", "seed": "None"}
    tags = {"sweep": "s", "good": "true", "parameters": "1234", "rehearsal": "true", "stopped_by": "EarlyStopping"}
    assert run.data.tags.items() >= (tags | {"status": "FINISHED"}).items()
    assert run.data.tags["mlflow.note.content"] == (
        "**5.00 times one device** (rehearsal), 250% efficiency: 320 examples/s with 2 workers, "
        "validation accuracy 0.75.\n\n- Slow disk."
    )
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == ("digits", "ab12")
    assert json.loads(data.dataset.profile)["train_examples"] == 100
    kept = {"plan.json", "result.json", "events.jsonl", "model.keras", "logs/point-0.log", "hydra/config.yaml"}
    assert tracked_runs.files(uri, run) == kept

    assert tracked_runs.sync(writer.folder) == (True, ["Runs sent: 0; nothing new: 1; not sent: 0."])
    # From the start, as if nothing were known of what was sent; twice.
    for _ in range(2):
        (writer.folder / "tracking.json").unlink()
        remember(writer.folder, local(home))
        sent, lines = tracked_runs.sync(writer.folder)
        assert (sent, lines[0]) == (True, f"{writer.folder}: 18 events sent, run {run_id}.")
        again = only_run(uri, writer.key)
        assert values(uri, again) == Counter(expected)
        assert again.data.to_dictionary() == run.data.to_dictionary()
        assert (again.info.status, again.info.end_time) == (run.info.status, run.info.end_time)
        assert len(again.inputs.dataset_inputs) == 1
    # It is on the disk once; removed, it is gone from there and from the store, and nothing else is.
    there = Path(again.info.artifact_uri.removeprefix("file://"))
    assert (there / "model.keras").samefile(writer.folder / "model.keras")
    experiments = len(client.search_experiments())
    assert (stores.remove(writer.folder), stores.remove(writer.folder)) == (1, 0)
    assert not there.parent.exists()
    assert (writer.folder / "model.keras").read_text() == "{}"
    assert client.search_runs([run.info.experiment_id], run_view_type=tracked_runs.ViewType.ALL) == []
    assert len(client.search_experiments()) == experiments


def test_who_followed_a_driver_that_is_gone_leaves_killed_neither_what_another_has_taken_over_nor_what_trains_on(home):
    uri = local(home).uri

    def ended(writer: Writer, driver: int) -> str:
        remember(writer.folder, local(home))
        follower = LogFollower()
        follower.name(writer.folder)
        follower.end(driver, round(1000 * (BEGAN + 99)))
        return str(only_run(uri, writer.key).info.status)

    writer = Writer(home / "taken over", pid=1)
    writer.steps(1, 4)
    assert ended(writer, 1) == "KILLED"
    # Who comes in its place says so, and who followed the one before may be the one that sends it.
    writer.write({"time": BEGAN + 5, "event": "attached", "pid": 2, "host": "another"})
    losses = writer.steps(6, 8)
    assert ended(writer, 1) == "RUNNING"
    assert ended(writer, 2) == "KILLED"
    assert all(values(uri, only_run(uri, writer.key))[loss] == 1 for loss in losses)
    detached = Writer(home / "detached", pid=1)
    detached.steps(1, 2)
    (detached.folder / "plan.json").write_text(json.dumps({"detach": True, "orphan_timeout": 1e6}))
    Kept("127.0.0.1:7", "secret").write(detached.folder)
    assert ended(detached, 1) == "RUNNING"
    detached.write({"time": BEGAN + 3, "event": "attached", "pid": NEVER, "host": os.uname().nodename})
    assert "It trains on without a driver: python -m pipeline attach" in tracked_runs.sync(detached.folder)[1][0]
    forget_agents(detached.folder)
    assert ended(detached, NEVER) == "KILLED"


@pytest.mark.slow
def test_a_follower_whose_driver_is_gone_leaves_killed_as_of_then_and_ends_with_its_folder_or_without(tmp_path: Path):
    """A driver that is killed later is gone in the same way; that nothing is left of it, test_survival has."""
    driver = subprocess.Popen(["true"])
    driver.wait()
    began, writer, uri = time.time(), Writer(tmp_path / "run", pid=driver.pid), local(tmp_path).uri
    writer.steps(1, 2)
    remember(writer.folder, local(tmp_path))
    command = [sys.executable, "-m", "pipeline.views.mlflow.sync_runs", str(driver.pid)]
    for _ in range(2):
        with tempfile.TemporaryFile() as names:
            names.write(os.fsencode(writer.folder) + b"\0")
            names.flush()
            subprocess.run(command, stdin=names, timeout=100, check=True, cwd=ROOT)
        if writer.folder.exists():
            run = only_run(uri, writer.key)
            assert (run.info.status, len(values(uri, run))) == ("KILLED", 2)
            assert began - 1 < run.info.end_time / 1000 < time.time()
            assert tracked_runs.sync(writer.folder) == (True, ["Runs sent: 0; nothing new: 1; not sent: 0."])
            assert only_run(uri, writer.key).info.end_time == run.info.end_time
            shutil.rmtree(tmp_path)


def test_the_follower_outlives_the_signals_of_a_terminal_and_sends_its_log_alone(home: Path, tracker: Tracker) -> None:
    writer = Writer(home / "signals")
    tracker.follow(writer.folder, local(home))
    assert tracker.drain(writer.folder, 60) == (True, None)
    pid = tracker._process.pid
    assert os.getsid(pid) == pid
    # Once nobody waits; in the session's own group of the scheduler too, where the kernel has such groups.
    until(lambda: os.getpriority(os.PRIO_PROCESS, pid) >= 10)
    group = Path(f"/proc/{pid}/autogroup")
    until(lambda: not group.exists() or not (said := group.read_text()) or int(said.split()[-1]) >= 10)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert tracked_runs.sync(writer.folder)[1][0] == f"{writer.folder}: another process is sending it now."
    # More than a request takes, and a line that is not whole yet, which is neither sent nor lost.
    losses, uri = writer.steps(1, 1500), local(home).uri
    with writer.log.open("ab", buffering=0) as log:
        log.write(b'{"time": 1, "event": "ended", "sta')
        tracker.drain(writer.folder, 1)
        assert only_run(uri, writer.key).info.status == "RUNNING"
        log.write(b'tus": "FAILED", "error": "Out of memory."}\n')
    assert tracker.drain(writer.folder, 30) == (True, None)
    run = only_run(uri, writer.key)
    assert values(uri, run) == Counter(losses)
    assert (run.info.status, run.info.end_time, run.data.tags["error"]) == ("FAILED", 1000, "Out of memory.")


def test_ill_servers_are_named_cost_the_driver_no_more_than_its_timeouts_and_no_password_is_kept(tmp_path):
    """One wants another login, one is down, one hangs, one is broken, and one is a file that is no store."""
    over, logins, log = threading.Event(), list[str | None](), tmp_path / "tracker.log"

    def refuses(request: tracked_runs.Request) -> tuple[int, bytes]:
        logins.append(request.headers.get("Authorization"))
        return 401, b""

    def hangs(request: tracked_runs.Request) -> None:
        over.wait(30)

    nowhere = f"http://127.0.0.1:{free_port()}"
    (tmp_path / "mlflow.db").write_text("This is no database. " * 100)
    (tmp_path / "folder.db").mkdir()
    serving = tracked_runs.serving
    with serving(refuses) as refusing, serving(hangs) as hanging, serving(lambda request: (503, b"")) as breaking:
        problems = {refusing: "401", nowhere: f"No MLflow server answers at {nowhere}.", breaking: "with error 503"}
        problems[hanging] = f"The MLflow server at {hanging} does not answer in time."
        problems[f"sqlite:///{tmp_path}/mlflow.db"] = "file is not a database"
        problems[f"sqlite:///{tmp_path}/folder.db"] = "Is a directory"
        runs = {uri: Writer(tmp_path / f"run{place}") for place, uri in enumerate(problems)}
        with tracked_runs.tracking(log, MLFLOW_HTTP_REQUEST_TIMEOUT="1") as tracker:
            for uri, writer in runs.items():
                writer.end()
                login = "ann:s3cret%21@" * (uri == refusing)
                tracker.follow(writer.folder, tracked_runs.store(uri.replace("//", f"//{login}")))
                # Known to fail, so that there is nothing to wait for.
                began = time.monotonic()
                until(lambda folder=writer.folder: read_tracking(folder).copied.problem, 60)
                drained, problem = tracker.drain(writer.folder, 0.5)
                assert not drained
                assert problems[uri] in str(problem)
                assert "s3cret" not in str(problem)
                assert time.monotonic() - began < 20
            began = time.monotonic()
            tracker.close()
            assert time.monotonic() - began < 20
        over.set()
    assert json.loads((runs[refusing].folder / "tracking.json").read_text())["store"]["uri"] == refusing
    assert logins[0] == "Basic YW5uOnMzY3JldCE="  # ann:s3cret!
    told = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "s3cret" not in told
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_a_follower_that_gets_on_is_waited_for_as_long_as_the_caller_waits(tmp_path: Path) -> None:
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / "sitecustomize.py").write_text("import time\nwhile time.process_time() < 3: pass\n")
    writer = Writer(tmp_path / "run")
    writer.end()
    with tracked_runs.tracking(tmp_path / "tracker.log", PYTHONPATH=str(busy)) as tracker:
        tracker.follow(writer.folder, local(tmp_path))
        began = time.monotonic()
        assert tracker.drain(writer.folder, 60.0, lambda: False) == (False, "The tracking process is not done yet.")
        assert time.monotonic() - began < 30
        assert tracker.drain(writer.folder, 1.0) == (True, None)
    assert only_run(local(tmp_path).uri, writer.key).info.status == "FINISHED"


def test_a_run_without_tracking_is_sent_only_where_a_store_is_named(tmp_path: Path, own_tracker: Tracker) -> None:
    writer = Writer(tmp_path / "run")
    writer.end()
    own_tracker.follow(writer.folder, tracked_runs.store(None, "later"))
    assert own_tracker.drain(writer.folder, 1) == (True, None)
    assert own_tracker._process is None
    assert tracked_runs.sync(tmp_path)[0]
    sent, lines = tracked_runs.sync(writer.folder)
    assert not sent
    assert lines[-1].startswith("Runs without tracking: 1. Try uri=sqlite:////")
    uri = local(tmp_path).uri
    assert tracked_runs.sync(writer.folder, uri=uri)[0]
    run = only_run(uri, writer.key)
    assert tracked_runs.MlflowClient(uri).get_experiment(run.info.experiment_id).name == "later"
    assert Path(run.info.artifact_uri.removeprefix("file://")).is_relative_to(tmp_path)

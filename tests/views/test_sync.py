"""What `sync` sends of event logs to MLflow, to real stores and servers, and what MLflow shows of it."""

import hashlib
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import tracked_runs
from ports import free_port
from tracked_runs import BEGAN, MlflowClient, Writer, _mlflow_settings, home, local, only_run, sent, sync, values

from pipeline.driver.run_folders import find
from pipeline.record.events import Ended, Event, Resumed, Run, Warned
from pipeline.record.log import from_plain, to_line
from pipeline.views.mlflow import remember, texts
from pipeline.views.mlflow.changes import Changes, LogState
from pipeline.views.mlflow.copies import Copy
from pipeline.views.mlflow.stores import open_client

__all__ = ["_mlflow_settings", "home"]

NEVER = 2**22 + 1  # More than the kernel's largest process number.


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
    for figures in ("**1.84 times one device** (rehearsal, 1.79 to 1.90), 92% ", " 3,412 examples/s (3,301 to 3,503) "):
        assert figures in result
    assert rest == [asked, f"{doubt}\n- Input-bound."]
    writer.end("FAILED", "Worker 1 was killed.")
    assert said()[:2] == ["**Worker 1 was killed.**", result]
    run = only_run(local(home).uri, writer.key)
    assert run.info.user_id == run.data.tags["mlflow.user"] == "ann"
    assert run.data.tags.items() >= origin.items()
    # In digits that mean something, and both ends of an interval in one column.
    assert (run.data.metrics["speedup"], run.data.metrics["examples_per_second"]) == (1.844, 3412.0)
    assert run.data.tags["speedup_range"] == "1.79 to 1.90"
    assert run.data.tags["examples_per_second_range"] == "3,301 to 3,503"


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
    MlflowClient(uri).update_run(run.info.run_id, name="mine")
    (home / "runs" / "named2" / "tracking.json").unlink()
    writer.folder = home / "runs" / "named2"
    assert sent(writer, home).info.run_name == "mine"


def test_throughput_is_what_mlflow_is_sent_first(home: Path) -> None:
    """Its page that compares runs opens on the first metric that it was sent."""
    writer, uri = Writer(home / "first", params={"workers": 2}), local(home).uri
    remember(writer.folder, local(home))

    def send(patient: bool) -> dict[str, float]:
        copy = Copy(writer.folder, local(home))
        while copy.advance(patient):
            pass
        metrics: dict[str, float] = only_run(uri, writer.key).data.metrics
        return metrics

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
        remember(writer.folder, local(home))
        writer.steps(1, last)
        assert len(send(patient)) == 1


def test_an_experiment_gets_its_page_once_and_a_persons_own_text_and_views_stay(home, monkeypatch):
    uri, view = local(home).uri, "mlflow.sharedViewState.speedup"
    client = open_client(uri, None)
    experiment = client.create_experiment("described", tags={"mlflow.note.content": "Ours."})

    def send(name: str) -> dict[str, str]:
        sent(Writer(home / name), home, "described")
        tags: dict[str, str] = client.get_experiment(experiment).tags
        return tags

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
    assert len(run.data.params) == 66
    assert run.data.params["long"] == "x" * 6000
    assert run.data.params["wide"] == "é" * 6000
    assert [run.data.params[name] for name in ("lone", "zero", "none", "n_me_")] == ["a?b", "ab", "", "1"]
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
    gone = Writer(home / "drivers" / "gone", pid=NEVER)
    reused = Writer(home / "drivers" / "reused", pid=os.getpid())
    live = Writer(home / "drivers" / "live", time=time.time())
    elsewhere = Writer(home / "drivers" / "elsewhere", host="another", pid=NEVER)
    writers = (gone, reused, live, elsewhere)
    for writer in writers:
        writer.steps(1, 3)
        remember(writer.folder, local(home))
    with gone.log.open("ab") as log:
        log.write(to_line(Warned(time=BEGAN + 4))[:20])
    sent, lines = sync(home / "drivers")
    uri = local(home).uri
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

    client = MlflowClient(copied)
    client.delete_run(only_run(copied, half.key).info.run_id)
    half.steps(1, 2)
    sent, lines = sync(tmp_path, uri=copied)
    assert sent
    assert "left alone" in lines[0]

    # As a new process finds it: MLflow keeps connections to the file that was deleted.
    moved = f"sqlite:///{tmp_path}/new/../other/mlflow.db"
    (tmp_path / "new").mkdir()
    (tmp_path / "other" / "mlflow.db").unlink()
    for writer in (done, half):
        text = (writer.folder / "tracking.json").read_text()
        (writer.folder / "tracking.json").write_text(text.replace(copied, moved))
    assert sync(done.folder, uri=moved)[1][-1] == "Runs sent: 1; nothing new: 0; not sent: 0."
    assert values(moved, only_run(moved, done.key)) == Counter(losses)
    assert tracked_runs.files(moved, only_run(moved, done.key)) == {"events.jsonl"}
    # What is complete stays so where the store cannot be asked.
    nowhere, state = f"http://127.0.0.1:{free_port()}/moved", done.folder / "tracking.json"
    state.write_text(state.read_text().replace(moved, nowhere))
    assert sync(done.folder, uri=nowhere) == (True, ["Runs sent: 0; nothing new: 1; not sent: 0."])


def test_the_command_line_says_what_it_sent_in_lines_and_its_exit_code(tmp_path: Path, asked: Any) -> None:
    writer = Writer(tmp_path / "outputs" / "runs" / "run", pid=NEVER)
    remember(writer.folder, local(tmp_path / "outputs"))
    said = asked("sync").ok()
    assert said.err == ""
    first, last = said.out.splitlines()
    assert first.startswith("outputs/runs/run: 1 event sent, run ")
    assert first.endswith("It has no end and its process is gone: set to KILLED.")
    assert last == "Runs sent: 1; nothing new: 0; not sent: 0."

    nowhere = f"http://127.0.0.1:{free_port()}"
    refused = asked("sync", f"uri={nowhere}").failed()
    assert refused.err == ""
    assert refused.out.splitlines()[0] == f"outputs/runs/run: not sent. No MLflow server answers at {nowhere}."


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
    assert points(**repeat) == [("examples_per_second", 0)]
    assert points(**repeat) == []
    (speed, *_) = points(event="result", values={"speedup": 2.0})
    assert speed == ("speedup", 1)
    # Its points have them; an earlier version told them too.
    told = {"values": {"speedup": 2.0}, "tags": {"best": "mirrored", "confidence": None}, "text": "A tie.", "files": {}}
    report = changed(from_plain({"time": 9.0, "event": "report"} | told))
    assert report.metrics == []
    assert report.tags == {"best": "mirrored", "confidence": "", "mlflow.note.content": "A tie."}

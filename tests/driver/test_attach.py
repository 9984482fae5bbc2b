"""What a run's folder keeps for another driver, what of it is told again, and which runs none can attach to."""

import dataclasses
import io
import json
import os
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from conftest import QUICK, with_
from omegaconf import OmegaConf
from plans import config, machine

from pipeline.analyze.measure import Repeat
from pipeline.commands import running
from pipeline.config import config as configs
from pipeline.config.schema import Config
from pipeline.driver import RunResult, resume, run_folders
from pipeline.driver.group import Group, Replay
from pipeline.driver.session import Preemption, Session
from pipeline.driver.timing import Measurements
from pipeline.driver.watch import RunFailed
from pipeline.errors import UserError
from pipeline.launch import LaunchError, cluster_of, hosts, local, outlives
from pipeline.launch.agents import channel, dialling, messages, remote
from pipeline.launch.signals import Interrupted
from pipeline.plan import planning
from pipeline.plan.plan import from_json
from pipeline.record import commands, events
from pipeline.record.events import Calibrated, Exited, Signalled, Steps, Unreachable
from pipeline.record.files import AGENTS, Kept, forget_agents, trains_on
from pipeline.record.log import read_json, to_line, write_json
from pipeline.record.results import Baseline, Ending, Result
from pipeline.views.mlflow import Tracker
from pipeline.views.terminal import console_on
from pipeline.views.terminal.live import Terminal

CONFIG = config("multi_worker", workers=2)
PLAN = planning.make(CONFIG, machine())
AGENT = Kept("127.0.0.1:7", "secret")


def left(directory: Path | str) -> resume.Handover:
    configs.register()
    measured = Measurements(
        point=[Repeat(640.0, 2.0, (0.1, 0.2), (0.0,))],
        built=events.Built(9610, notes=["Counted."]),
        lost={"train": [events.Lost("a", 3, 1, "a.png", "is cut off")]},
        steps_per_call=7,
        notes=["It was lost."],
    )
    written, known = OmegaConf.to_yaml(OmegaConf.structured(CONFIG)), Baseline((1.0, 2.0), "there")
    attempt = PLAN.to_json(), 5.0, 0, measured, "last", 2, "point-1.log"
    return resume.Handover(written, str(directory), *attempt, ["workers=2"], known=known, ask_size=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder as a driver that was killed has left it."""
    run = tmp_path / "outputs" / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "plan.json").write_text(PLAN.to_json())
    (run / "events.jsonl").write_bytes(
        to_line(events.Run("key", time=1.0)) + to_line(Steps(7, [0.5], time=2.0, group="point"))
    )
    return run


def test_what_is_kept_is_read_as_it_was_written_and_the_token_by_nobody_else(tmp_path):
    AGENT.with_job("point", 1).with_job("baseline", 2).with_job("baseline", 3).write(tmp_path)
    assert Kept.read(tmp_path) == Kept("127.0.0.1:7", "secret", {"point": [1], "baseline": [2, 3]})
    assert (tmp_path / AGENTS).stat().st_mode & 0o777 == 0o600
    handed = left("/nowhere")
    write_json(tmp_path / resume.FILE, handed)
    assert read_json(resume.Handover, tmp_path / resume.FILE) == handed
    assert from_json(handed.plan) == PLAN
    assert configs.typed_as(Config, OmegaConf.create(handed.config)) == CONFIG
    resume.forget(tmp_path)
    assert not [*tmp_path.iterdir()]
    assert Kept.read(tmp_path) is read_json(resume.Handover, tmp_path / resume.FILE) is None


def groups(replay, *events):
    """Returns what the next events of each group of a run are, whose jobs have some events together."""
    waiting, common = list(events), (Path(), lambda event: None, Preemption(), replay)
    job = SimpleNamespace(events=lambda timeout: [waiting.pop(0) for _ in waiting[:]])
    cluster = SimpleNamespace(start=lambda *_: job)
    both = {name: Group(cluster, PLAN, name, *common) for name in ("point", "baseline")}
    return lambda name: both[name]._events()


def test_processes_are_not_started_in_a_folder_that_was_removed(tmp_path):
    with pytest.raises(RunFailed, match="the run's folder") as failed:
        Group(local.LocalCluster(CONFIG.cluster, {}), PLAN, "point", tmp_path / "gone", [].append, Preemption())
    assert not failed.value.lost


def test_what_is_in_the_log_is_told_again_in_its_order_and_never_written_twice():
    first, second, late = (Steps(step, [0.5], time=10.0 + step, group="point") for step in (1, 2, 3))
    paced = Calibrated(0.1, time=10.5, group="baseline")
    asked = Signalled(2, time=12.5)
    live: list[bool] = []
    replay = Replay([first, paced, second, asked], 10.0, lambda: live.append(True))
    gone = Exited(0, time=14.0, group="point")
    following = groups(replay, second, late, gone)
    assert replay.clock() == 10.0
    assert following("point") == [first]
    assert (replay.clock(), replay.is_logged(first)) == (11.0, True)
    assert (following("baseline"), following("point"), live) == ([paced], [second], [])
    # What an agent sends again is not told again; what ends a process is no line of the log.
    assert (following("point"), live) == ([late, gone], [True])
    assert replay.clock() > 1e9
    assert not replay.is_logged(late)
    # The driver emits the same at another time, as often as it did.
    again = msgspec.structs.replace(asked, time=99.0)
    assert [replay.is_logged(again), replay.is_logged(again)] == [True, False]
    assert not replay.is_logged(events.Explained(None, time=99.0))
    # What another attempt tells is all new.
    replay = Replay([first, second], 10.0)
    assert groups(replay)("point") == [first]
    replay.drop()
    assert groups(replay)("point") == []


def test_a_job_that_is_taken_over_gives_no_command_twice_and_misses_who_has_no_part_of_it(tmp_path):
    # Agents that hear what is said, and say nothing.
    said, taken = list[tuple[str, Any]](), (4, {"a": messages.Held(2, {0: 3})})
    lines = SimpleNamespace(left=False, known={}, send=lambda *message: said.append(message), over=lambda number: None)
    cluster = SimpleNamespace(agents=lines, return_seconds=1, local=None)
    job = remote.RemoteJob(cluster, PLAN, "point", tmp_path, {0: "a", 1: "b"}, taken)
    assert job.number == 4
    for _ in range(2):
        job.send(commands.Load("here"))
    assert not said
    job.send(commands.Begin())
    assert [(name, json.loads(message.command)["do"]) for name, message in said] == [("a", "begin")]
    job._find_unreachable()
    assert {event.rank: msgspec.structs.replace(event, time=0.0) for event in job._waiting} == {
        0: Exited(3, group="point", rank=0),
        1: Unreachable("b", PLAN.launch.heartbeat_timeout, group="point", rank=1),
    }
    # Who leaves ends nothing.
    lines.left = True
    job.stop(0.0)
    assert len(said) == 1


def test_who_attaches_where_no_agent_is_finds_none(tmp_path, monkeypatch):
    monkeypatch.setattr(dialling, "ATTACH_SECONDS", 0.5)
    cluster = hosts.DetachedCluster(config().cluster, os.environ)
    assert not cluster.attach(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        Kept(f"127.0.0.1:{taken.getsockname()[1]}", channel.new_token().decode()).write(tmp_path)
        with pytest.raises(LaunchError, match="Expected to be able to listen at"):
            cluster.attach(tmp_path)
    assert not cluster.attach(tmp_path)
    cluster.close(0)


def test_clusters_whose_processes_end_with_their_command_refuse_to_detach():
    for name in ("env", "mpi"):
        with pytest.raises(LaunchError, match=rf"received cluster={name}\. Try launch\.detach=false"):
            cluster_of(dataclasses.replace(config().cluster, name=name), os.environ, detach=True)
        assert not outlives(name, True)
    assert [outlives("hosts", False), outlives("local", False), outlives("local", True)] == [True, False, True]


def test_what_a_detached_plan_starts_is_said_and_what_to_type_where_none_is_attached_to(asked, tmp_path, folder):
    typed = ("workers=2", "strategy=multi_worker", "model=mlp", "data=digits", *QUICK, "launch.detach=true")
    planned = asked("mode=plan", *typed).ok().out
    assert all(words in planned for words in ("pipeline.launch 127.0.0.1:PORT", "--detach"))
    assert [path.name for path in tmp_path.glob("outputs/*/*")] == ["mine"]
    told = asked("-m", "workers=1,2", "launch.detach=true", *QUICK).failed(2)
    assert "Expected one run with launch.detach=true, received a sweep" in told.err
    told = asked("attach", "mine").failed(2)
    assert "received outputs/runs/mine, whose processes have ended with it" in told.err
    lock = run_folders.Lock(folder)
    assert "outputs/runs/mine, on which one still works" in asked("attach", "mine").err
    lock.release()
    # Processes that are gone, and with them what was to be met.
    write_json(folder / resume.FILE, left(tmp_path))
    told = asked("attach", "outputs/runs/mine").failed(2)
    assert "they have ended. Try python -m pipeline workers=2, which goes on from the last checkpoint" in told.err
    assert not (folder / resume.FILE).exists()
    with (folder / "events.jsonl").open("ab") as log:
        log.write(to_line(events.Ended("FAILED", "It failed.", time=3.0)))
    told = asked("attach", "mine")
    assert "which has ended as FAILED. The same command goes on from its last checkpoint" in told.err


def test_whoever_attaches_works_in_the_folder_of_the_run_s_command_and_comes_back(tmp_path, monkeypatch, folder):
    (there := tmp_path / "there").mkdir()
    run, here, seen = left(there), os.getcwd(), []
    write_json(folder / resume.FILE, run)
    session = Session((), {}, lambda: Terminal(console_on(io.StringIO())), Tracker)
    monkeypatch.setattr(
        local.LocalCluster, "attach", lambda cluster, folder: bool(seen.append(os.getcwd())) or len(seen) > 1
    )
    with pytest.raises(UserError, match="received none of"), resume.attach(folder, session):
        pass
    assert (os.getcwd(), seen) == (here, [str(there)])
    write_json(folder / resume.FILE, run)
    with resume.attach(folder, session) as supervisor:
        assert os.getcwd() == str(there)
        supervisor.run.release()
    assert os.getcwd() == here


@pytest.mark.parametrize(("ended", "code"), [(True, 0), (False, 75)])
def test_a_signal_that_comes_once_the_run_has_ended_leaves_its_exit_code(monkeypatch, folder, ended, code):
    def attached(folder, session, end):
        if ended:
            session.results[0, 0] = RunResult(Result(Ending("FINISHED")), str(folder))
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(resume, "attach", attached)
    assert running.attach([str(folder)]) == code


def test_what_a_killed_command_has_left_is_in_the_way_of_those_who_ask_for_its_ports(folder):
    output, listening = folder.parents[1], planning.listening(PLAN, ["here:7000", "here:7001"])
    (folder / "plan.json").write_text(listening.to_json())

    def in_the_way(port, plan=PLAN):
        return [*resume.in_the_way(plan, port, output)] == [folder]

    # Its processes have ended.
    assert not in_the_way(7001)
    AGENT.write(folder)
    assert [in_the_way(7001), in_the_way(7002), in_the_way(None)] == [True, False, False]
    one, other = (with_(listening, "hardware", host_names=(name,)) for name in "ab")
    (folder / "plan.json").write_text(one.to_json())
    assert [in_the_way(7001, one), in_the_way(7001, other)] == [True, False]
    lock = run_folders.Lock(folder)
    assert not in_the_way(7001)
    lock.release()
    (folder / "plan.json").write_text(json.dumps(json.loads(listening.to_json()) | {"detach": True}))
    assert not in_the_way(7001)


@pytest.mark.parametrize("name", ["auto", "mine"])
def test_a_run_that_trains_on_as_long_as_its_processes_wait_is_not_gone_on_with_beside_them(folder, name):
    now = time.time()
    assert not trains_on(folder, now)
    AGENT.write(folder)
    # One that was not meant to.
    assert not trains_on(folder, now)
    values = json.loads(PLAN.to_json()) | {"detach": True, "orphan_timeout": 6000.0}
    (folder / "plan.json").write_text(json.dumps(values))
    assert (trains_on(folder, now), trains_on(folder, now + 7000)) == (True, False)
    search = config("multi_worker", workers=2, resume=name), PLAN, folder.parents[1]
    with pytest.raises(UserError, match=r"whose processes train on .* Try python -m pipeline attach .*mine, or"):
        resume.find(*search)
    # It is locked no more; and once its processes are gone, it is gone on with.
    forget_agents(folder)
    resume.find(*search).release()

"""Agents that start processes for a command, and what becomes of them when it goes, or their host does."""

import dataclasses
import os
import resource
import signal
import threading
import time
import zlib
from pathlib import Path

import conftest
import pytest
from conftest import ROOT, left_behind, with_, working_in
from plans import config, machine

from pipeline.launch import LaunchError
from pipeline.launch.agents import dialling
from pipeline.launch.agents.agent import Agent, Lines
from pipeline.launch.agents.dialling import DiallingCluster
from pipeline.launch.agents.endpoint import DRIVER, Endpoint
from pipeline.launch.agents.messages import Close, Start, from_bytes
from pipeline.launch.agents.remote import RemoteJob
from pipeline.launch.hosts import HostsCluster
from pipeline.launch.standby import state_of
from pipeline.plan import planning
from pipeline.record.events import Event, Signalled, Steps, Unheard
from pipeline.record.files import Kept
from pipeline.record.log import from_plain


class Here:
    """A host whose processes are none: it notes what is started, and ended with how much patience."""

    def __init__(self) -> None:
        self.did, self.signals, self.emits = list[str](), list[int](), list[Event]()

    def inventory(self):
        return machine()

    def start(self, plan, group, folder, ranks):
        self.did.append(f"start {group}")
        return self

    def send(self, command):
        self.did.append(type(command).__name__.lower())

    def stop(self, grace):
        self.did.append(f"stop {grace:g}")

    def events(self, timeout):
        emitted, self.emits = self.emits, []
        return emitted

    def sources(self):
        return []


ONE = planning.make(config("one_device"), machine())


class OneHost(DiallingCluster):
    """A host whose agent is a thread, of a command that may be gone."""

    count, here = 1, None

    def __init__(self, leaves: bool = False):
        super().__init__(config().cluster, os.environ)
        self.leaves = leaves

    def listens_at(self):
        return "127.0.0.1:0"

    def begin(self, address):
        self.here = agent(self, address, "a", 0)


def agent(cluster, address, name, order):
    """A host that a thread is the agent of."""
    here, endpoint = Here(), Endpoint(name, cluster.token)
    channel, leaves = endpoint.dial(DRIVER, address), getattr(cluster, "leaves", False)
    serving = Agent(channel, here, order, "127.0.0.1", lambda end, patience: end.away > patience, leaves)

    def serve():
        here.did.append(f"ended with {serving.serve(lambda: here.signals[0] if here.signals else None)}")
        endpoint.close(1.0)

    threading.Thread(target=serve, daemon=True).start()
    return here


def until(true, *jobs):
    """Waits for what comes while jobs are heard."""
    conftest.until(lambda: true() or any(job.events(0.05) and False for job in jobs), 20)


def test_what_a_killed_command_has_left_on_hosts_is_ended_before_another_starts_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(dialling, "ATTACH_SECONDS", 8.0)
    first, second, third = (OneHost() for _ in range(3))
    first.gather()
    job = first.start(ONE, "point", tmp_path)
    until(lambda: first.here.did == ["start point"], job)
    # As its process ends, nothing is said.
    first.agents.endpoint.close()
    second.gather()
    said: list[str] = []
    second.serve(said.append, lambda: None)
    second.end_earlier(tmp_path)
    assert first.here.did == ["start point", "stop 0", "ended with 0"]
    assert said == [f"What an earlier command, which was killed, has left of {tmp_path} is ended."]
    assert Kept.read(tmp_path) is None
    # Who does not answer is told of, and hears of it whenever it does.
    job = second.start(ONE, "point", tmp_path)
    until(lambda: second.here.did, job)
    second.agents.endpoint.close()
    left = Kept.read(tmp_path)
    assert (left.agents, left.token.encode()) == (["a"], second.agents.endpoint.token)
    dataclasses.replace(left, agents=["a", "b"]).write(tmp_path)
    third.serve(said.append, lambda: None)
    third.end_earlier(tmp_path)
    assert second.here.did[-1] == "ended with 0"
    assert said[-1].startswith("b did not answer")
    late = Endpoint("b", left.token.encode())
    channel = late.dial(DRIVER, left.address)
    heard = []
    until(lambda: heard.extend(from_bytes(received.data) for received in channel.take()) or heard)
    assert heard == [Close(0)]
    late.close()
    for cluster in (first, second, third):
        cluster.close(0)


def steps(first: int, last: int) -> list[Steps]:
    """The events of some steps."""
    return [Steps(step, [1.0 / step], time=1.0 + step, group="point") for step in range(first, last + 1)]


def heard(job: RemoteJob, last: int) -> list[int]:
    """The steps that a job hears of, once that is the last, those of earlier processes too."""
    found: list[int] = []

    def reached() -> bool:
        for event in job.events(0.05):
            lines = map(from_plain, event.events) if isinstance(event, Unheard) else [event]
            # As `Run.missed`: what an agent was not sure of comes again.
            found.extend(line.step for line in lines if isinstance(line, Steps) and line.step > [0, *found[-1:]][-1])
        return found[-1:] == [last]

    until(reached)
    return found


def is_heard(checkpoints: Path) -> bool:
    """True if no file beside the checkpoints has lines that wait for a driver."""
    return not any(path.stat().st_size for path in checkpoints.glob("*"))


def test_steps_that_no_command_hears_are_heard_by_the_next_however_the_agent_ends(tmp_path):
    one = with_(ONE, "checkpoint", folder=str(tmp_path / "checkpoints"))
    first, second, third = (OneHost() for _ in range(3))
    first.gather()
    job = first.start(one, "point", tmp_path)
    until(lambda: first.here.did == ["start point"], job)
    first.here.emits += steps(1, 100)
    assert heard(job, 100) == [*range(1, 101)]
    until(lambda: is_heard(tmp_path / "checkpoints"), job)
    first.agents.endpoint.close()
    first.here.emits += steps(101, 20_000)
    until(lambda: not first.here.emits)
    second.gather()
    second.serve(lambda text: None, lambda: None)
    second.end_earlier(tmp_path)
    assert first.here.did[-1] == "ended with 0"
    job = second.start(one, "point", tmp_path)
    assert heard(job, 20_000) == [*range(101, 20_001)]
    # Those of processes that are given up, by the next ones.
    second.agents.ending.add(job.number)
    second.here.emits += steps(20_001, 20_100)
    until(lambda: not second.here.emits)
    job.stop(0.0)
    job = second.start(one, "point", tmp_path)
    assert heard(job, 20_100) == [*range(20_001, 20_101)]
    # An agent that is killed removes nothing.
    until(lambda: is_heard(tmp_path / "checkpoints"), job)
    second.agents.endpoint.close()
    second.here.emits += steps(20_101, 20_200)
    until(lambda: not second.here.emits)
    third.gather()
    job = third.start(one, "point", tmp_path)
    assert heard(job, 20_200) == [*range(20_101, 20_201)]
    third.close(0)
    until(lambda: third.here.did[-1] == "ended with 0")
    for cluster in (first, second):
        cluster.close(0)


def test_lines_that_a_full_disk_has_no_room_for_are_not_torn(tmp_path):
    lines = Lines(ONE, "point", [0], tmp_path)
    lines.append(b"a line\n")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(OSError, match="No space"):
            lines.append(b"another line\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    lines.append(b"more\n")
    assert (lines.next(), lines.more) == (b"a line\nmore\n", False)
    lines.heard()
    lines.close()
    assert not list(tmp_path.glob("unheard*"))


def test_of_a_host_that_is_taken_away_the_command_is_told_and_gives_it_no_more_processes(tmp_path):
    made = OneHost(leaves=True)
    made.gather()
    job = made.start(ONE, "point", tmp_path)
    until(lambda: made.here.did == ["start point"], job)
    made.here.signals.append(signal.SIGTERM)
    told = []
    until(lambda: told.extend(event for event in job.events(0.05) if isinstance(event, Signalled)) or told)
    assert (told[0].signal, told[0].group, told[0].rank) == (signal.SIGTERM, "point", 0)
    # Its processes are there until the command has had them leave.
    assert made.agents.is_there("a")
    assert not made.agents.takes("a")
    another = made.start(ONE, "point", tmp_path)
    another.events(0.5)
    assert made.here.did == ["start point"]
    job.stop(3.0)
    until(lambda: made.here.did == ["start point", "stop 3", f"ended with {128 + signal.SIGTERM}"])
    # What comes in its place, once it has hung up, is given what waits.
    until(lambda: not made.agents.is_there("a"))
    made.here.signals.clear()
    made.begin(made.address)
    until(lambda: made.here.did == ["start point"], another)
    made.close(0)


@pytest.mark.parametrize(("strategy", "did"), [("parameter_server", ["stop 0"]), ("multi_worker", ["leave", "stop 0"])])
def test_of_a_host_that_is_taken_away_without_a_command_its_own_processes_save_where_they_are_needed(strategy, did):
    planned = planning.make(config(strategy, workers=2, launch__preempt_timeout=0.5), machine())
    made = OneHost(leaves=True)
    made.gather()
    start = Start(1, "point", zlib.compress(planned.to_json().encode()), [1])
    assert planned.processes[1].role == "worker"
    made.agents.send("a", start)
    until(lambda: made.here.did == ["start point"])
    made.agents.endpoint.close()
    made.here.signals.append(signal.SIGTERM)
    until(lambda: made.here.did[-1].startswith("ended"))
    assert made.here.did[: len(did) + 1] == ["start point", *did]
    assert made.here.did[-1] == "ended with 143"


def test_one_machine_by_two_names_is_refused(monkeypatch):
    made = HostsCluster(config(cluster__hosts=["a", "b"]).cluster, os.environ)
    monkeypatch.setattr(made, "listens_at", lambda: "127.0.0.1:0")
    monkeypatch.setattr(made, "begin", lambda address: [agent(made, address, *place) for place in (("a", 0), ("b", 1))])
    with pytest.raises(LaunchError, match="different machines, received a and b, which are one"):
        made.inventory()
    made.close(2)


def by_ssh(folder: Path, script: str, *names: str, **options: object) -> HostsCluster:
    """Hosts on which a stand-in for ssh starts agents."""
    ssh = folder / "ssh"
    ssh.write_text(f"#!/bin/sh\n{script}\n")
    ssh.chmod(0o755)
    options = {"ssh": [str(ssh)], "conductor": "127.0.0.1:0", **options}
    return HostsCluster(config(cluster__hosts=[*names], cluster__options=options).cluster, os.environ)


def test_hosts_that_ssh_gets_no_answer_of_are_given_up_and_whatever_ssh_is_doing_for_others_is_ended(tmp_path):
    (tmp_path / "pids").mkdir()
    # Each of its processes, and the one that it has started, sleeps.
    script = f"sleep 600 &\ntouch {tmp_path}/pids/$$ {tmp_path}/pids/$!\nwait"
    made = by_ssh(tmp_path, script, *(f"host{number}" for number in range(40)), timeout=2.0)
    # That it does not dial is said of one that ssh has started.
    made.dial_seconds, began = 20.0, time.monotonic()
    words = r"an agent on host\d+, received: no end of it within 2 s\. Try .*, 127.* try .*=HOST:PORT"
    with pytest.raises(LaunchError, match=words):
        made.inventory()
    made.close(2)
    assert time.monotonic() - began < 40
    assert len(os.listdir(tmp_path / "pids")) > 5
    assert not [pid for pid in os.listdir(tmp_path / "pids") if state_of(int(pid)) not in ("", "Z")]


def test_ssh_ends_once_its_agent_has_dialled_and_is_not_waited_for_any_more(tmp_path):
    environment = {"PYTHONPATH": str(ROOT)}
    script = 'for command; do :; done\nexec sh -c "$command"'
    made = by_ssh(tmp_path, script, "localhost", directory=str(tmp_path), environment=environment)
    try:
        made.inventory()
        # Its fork server, and what looks after that, have begun.
        until(lambda: len(working_in(tmp_path)) > 2)
        began = time.monotonic()
        made.end()
        assert time.monotonic() - began < 5
    finally:
        made.close(2)
    assert not left_behind(tmp_path, patience=60)

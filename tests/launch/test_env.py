"""`cluster=env`: the same command in several places, each told by the environment which of them it is."""

import dataclasses
import json
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from conftest import Ran, finish, left_behind, start
from plans import config
from under_way import events, losses, until

from pipeline.errors import UserError
from pipeline.launch import LaunchError
from pipeline.launch.agents.agent import on_cores
from pipeline.launch.env import tasks_of
from pipeline.plan.machine import Machine
from pipeline.plan.planning import make

SMALL = ("model=mlp", "data=digits", "measure.steps=0", "tracking=none", "train.deterministic=true",
         "train.check=off")  # fmt: skip
TWO = ("strategy=multi_worker", "train.steps=30", "checkpoint.every_steps=5", *SMALL)
# Long enough to be ended in the middle.
LONG = ("strategy=multi_worker", "train.steps=1500", "checkpoint.every_steps=50", "train.steps_per_call=10", *SMALL)


class Started:
    """One command a task, each in a folder of its own; `kinds` has how many tasks of each there are."""

    def __init__(self, folder: Path, **kinds: int) -> None:
        self.folder, self.commands = folder, dict[tuple[str, int], subprocess.Popen[str]]()
        self._held: list[socket.socket] = [socket.create_server(("127.0.0.1", 0)) for _ in range(sum(kinds.values()))]
        ports = iter([held.getsockname()[1] for held in self._held])
        self.cluster = {kind: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for kind, count in kinds.items()}
        for held in self._held:
            held.close()

    def type(self, kind: str, index: int, *arguments: str, **environ: str) -> None:
        """Types the command of one task."""
        home = self.folder / f"{kind}{index}"
        home.mkdir(exist_ok=True)
        said = {"cluster": self.cluster, "task": {"type": kind, "index": index}}
        self.commands[kind, index] = start(home, "cluster=env", *arguments, TF_CONFIG=json.dumps(said), **environ)

    def type_all(self, *arguments: str) -> None:
        """Types the command of every task."""
        for kind, addresses in self.cluster.items():
            for index in range(len(addresses)):
                self.type(kind, index, *arguments)

    def ended(self, kind: str, index: int, timeout: float = 240.0) -> Ran:
        """How the command of a task ended."""
        return finish(self.commands[kind, index], self.folder / f"{kind}{index}", time.monotonic(), timeout)

    def steps(self) -> int:
        """How far the chief's run is."""
        told = events(self.folder, "checkpoint", "*/outputs/runs/*")
        return max((event.get("step") or 0 for event in told), default=0)

    def end(self) -> None:
        """Ends what is left."""
        for command in self.commands.values():
            if command.poll() is None:
                command.kill()
                command.communicate()


@pytest.fixture
def begun(tmp_path):
    made: list[Started] = []

    def begin(**kinds: int) -> Started:
        made.append(Started(tmp_path, **kinds))
        return made[-1]

    yield begin
    for each in made:
        each.end()
        for kind, index in each.commands:
            assert not left_behind(tmp_path / f"{kind}{index}")


@pytest.mark.slow
def test_a_hand_made_tf_config_in_two_terminals_trains_to_the_losses_of_one(pipeline, begun):
    alone = pipeline(*TWO, "workers=2")
    tasks = begun(chief=1, worker=1)
    tasks.type_all(*TWO)
    ran, other = tasks.ended("chief", 0), tasks.ended("worker", 0)
    assert (ran.code, other.code) == (0, 0), ran.err + other.err
    assert losses(ran.result) == losses(alone.result)
    assert ran.result["workers"] == 2
    # It has the logs of both, and the other leaves nothing.
    assert (ran.run_folders[0] / "point-1.log").exists()
    assert not (other.folder / "outputs" / "runs").exists()
    assert "worker 0 at 127.0.0.1" in other.out
    assert other.out.rstrip().endswith("has ended with 0.")


@pytest.mark.slow
def test_workers_and_a_parameter_server_are_tasks_and_the_chief_coordinates(begun):
    tasks = begun(chief=1, worker=2, ps=1)
    tasks.type_all("strategy=parameter_server", "train.steps=40", "tracking=none", "model=mlp", "data=digits")
    ran = tasks.ended("chief", 0)
    assert ran.code == 0, ran.err
    assert ran.result["workers"] == 2
    assert ran.result["steps"] >= 40
    assert [tasks.ended(*task).code for task in (("worker", 0), ("worker", 1), ("ps", 0))] == [0, 0, 0]


@pytest.mark.slow
def test_a_sweep_is_conducted_by_one_and_leaves_tasks_out_where_it_needs_fewer(begun):
    tasks = begun(worker=2)
    sweep = ("-m", "strategy=one_device,multi_worker", "workers=2", "train.steps=10", *SMALL)
    tasks.type_all(*sweep)
    ran = tasks.ended("worker", 0)
    assert ran.code == 0, ran.err
    assert [(each["strategy"], each["workers"]) for each in ran.results] == [("one_device", 1), ("multi_worker", 2)]
    other = tasks.ended("worker", 1)
    assert other.code == 0
    assert not list(other.folder.glob("outputs/*/*"))


@pytest.mark.slow
def test_a_task_and_then_the_conductor_that_are_killed_and_typed_again_go_on_from_the_last_checkpoint(pipeline, begun):
    alone = pipeline(*LONG, "workers=2")
    tasks = begun(chief=1, worker=1)
    tasks.type_all(*LONG)
    for role, others, reached in (("worker", "chief", 100), ("chief", "worker", 500)):
        until(lambda reached=reached: tasks.steps() >= reached)
        assert tasks.commands[others, 0].poll() is None
        tasks.commands[role, 0].kill()
        tasks.commands[role, 0].communicate()
        tasks.type(role, 0, *LONG)
    ran, other = tasks.ended("chief", 0), tasks.ended("worker", 0)
    assert (ran.code, other.code) == (0, 0), ran.err
    assert losses(ran.result) == losses(alone.result)
    # The first command's restart, and the second one's going on with what that left.
    assert (ran.result["restarts"], ran.result["resumed"]) == (1, 1)
    assert "was lost" in other.out


@pytest.mark.slow
def test_a_scheduler_that_takes_the_machine_of_one_task_preempts_the_run(begun):
    tasks = begun(chief=1, worker=1)
    tasks.type_all(*LONG)
    until(lambda: tasks.steps() >= 100)
    tasks.commands["worker", 0].send_signal(signal.SIGTERM)
    ran, other = tasks.ended("chief", 0), tasks.ended("worker", 0)
    assert (ran.code, other.code) == (75, 75), ran.err
    assert ran.result["status"] == "PREEMPTED"
    assert "SIGTERM to worker 1" in ran.result["error"]


@pytest.mark.slow
def test_tasks_that_never_come_are_named_and_a_refused_command_ends_them_all(begun):
    tasks = begun(chief=1, worker=1)
    tasks.type("chief", 0, *TWO, "cluster.options.timeout=4")
    ran = tasks.ended("chief", 0)
    assert ran.code == 1
    assert f"Expected worker 0 at {tasks.cluster['worker'][0]} to be there, received no answer for 4 s." in ran.err
    tasks.type_all(*TWO, "workers=3")
    refused, other = tasks.ended("chief", 0), tasks.ended("worker", 0)
    assert "Expected no more processes that train than the 2 that were started" in refused.err
    assert (refused.code, other.code) == (2, 2)


def said(cluster: object, kind: object = "worker", index: object = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_environments_of_tensorflow_vertex_and_sagemaker_say_the_same():
    two = ["a:1", "b:2"]
    first = tasks_of(said({"worker": two}))
    assert [task.address for task in first.tasks] == two
    assert first.own == first.driver
    other = tasks_of(said({"worker": ["b:2"], "chief": ["a:1"], "ps": ["c:3"]}, "ps"))
    assert [task.kind for task in other.tasks] == ["chief", "worker", "ps"]
    assert (other.own.address, other.driver.address) == ("c:3", "a:1")
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:2"]}
    vertex = tasks_of({"CLUSTER_SPEC": json.dumps({"cluster": pools, "task": {"type": "workerpool1", "index": 0}})})
    assert (vertex.own.address, vertex.driver.address) == ("b:2", "a:1")
    sage = tasks_of({"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"})
    assert [task.address for task in sage.tasks] == ["algo-1:2222", "algo-2:2222"]
    assert sage.own.index == 1


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "Expected TF_CONFIG .* received none of them. Try cluster=local"),
        ({"TF_CONFIG": "{"}, "Expected TF_CONFIG to be JSON"),
        ({"TF_CONFIG": "[]"}, "Expected TF_CONFIG to have a cluster and a task"),
        (said({"worker": "a:1"}), "to list the addresses of worker, received 'a:1'"),
        (said({"worker": ["a"]}), "to be HOST:PORT, received 'a'"),
        (said({"worker": ["a:99999"]}), "to be HOST:PORT, received 'a:99999'"),
        (said({"worker": ["a:1", "a:1"]}), "each address of TF_CONFIG once"),
        (said({"worker": ["a:1"]}, index=1), "to be one of worker 0 at a:1, received type 'worker' with index 1"),
        (said({"gpu": ["a:1"]}, "gpu"), "to be chief, worker, ps or evaluator, received gpu"),
        (said({"ps": ["a:1"]}, "ps"), "one chief or none, and a worker"),
        ({"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "b"}, "with SM_CURRENT_HOST in it, received .* and b"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused_in_words(environ, words):
    with pytest.raises(LaunchError, match=words):
        tasks_of(environ)


def test_an_evaluator_that_the_cluster_does_not_name_says_that_it_has_nothing_to_do(asked, tmp_path):
    told = asked("cluster=env", **said({"worker": ["a:1", "b:2"]}, "evaluator"))
    assert told.code == 0, told.err
    assert told.out == "evaluator 0 has nothing to do: validation runs where training does.\n"
    assert not list(tmp_path.iterdir())


def test_a_plan_has_a_process_for_each_task_and_refuses_more():
    def machine(*tasks: str, hosts: int = 1, gpus: int = 0) -> Machine:
        return Machine("host", (0, 1, 2, 3), 16.0, "A processor", ("H100",) * gpus, hosts=hosts, tasks=tasks)

    auto = dataclasses.replace(config("multi_worker", "4cpu").hardware, name="auto", hosts=None, devices_per_host=None)
    two = dataclasses.replace(config("multi_worker", "4cpu"), hardware=auto)
    assert [process.devices for process in make(two, machine("chief", "worker")).processes] == [("CPU:0", "CPU:1")] * 2
    assert make(dataclasses.replace(two, workers=2), machine("chief", "worker")).processes[1].devices == ("CPU:0",)
    on_hosts = make(two, machine("worker", "worker", hosts=2))
    assert [(process.host, len(process.devices)) for process in on_hosts.processes] == [(0, 4), (1, 4)]
    with pytest.raises(UserError, match=r"than the 2 that were started, received 3 for workers=3. Try workers=2"):
        make(dataclasses.replace(two, workers=3), machine("chief", "worker"))
    with pytest.raises(UserError, match="Expected a chief among the tasks"):
        make(config("parameter_server", "4cpu"), machine("worker", "ps"))
    with pytest.raises(UserError, match="Expected no more parameter servers than the 0"):
        make(config("parameter_server", "4cpu"), machine("chief", "worker", "worker"))


def test_cores_that_a_host_has_not_are_those_that_it_has():
    plan = make(config("multi_worker", "4cpu", 2), Machine("host", (0, 1, 2, 3), 16.0, "A processor"))
    assert on_cores(plan, [1], (0, 1, 2, 3)) == plan
    count = len(plan.processes[1].cores)
    assert on_cores(plan, [1], tuple(range(8, 16))).processes[1].cores == tuple(range(8, 8 + count))
    assert on_cores(plan, [0, 1], (9,)).processes[1].cores == ()

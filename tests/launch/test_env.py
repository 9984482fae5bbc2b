"""`cluster=env` and `cluster=mpi`: the same command in several places, each told by the environment which it is."""

import dataclasses
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import QUICK, Ran, UnderWay, final_losses, launched, left_behind, until
from plans import config
from ports import reserved_ports

from pipeline.config.schema import ClusterConfig
from pipeline.errors import UserError
from pipeline.launch import LaunchError
from pipeline.launch.agents.agent import on_cores
from pipeline.launch.env import EnvCluster, tasks_of
from pipeline.launch.mpi import Meeting, MpiCluster
from pipeline.plan.machine import Machine
from pipeline.plan.planning import make
from pipeline.record.log import read_json

SMALL = (*QUICK, "model=mlp", "data=digits", "train.deterministic=true")
# Long enough to be harmed in the middle.
LONG = ("strategy=multi_worker", "train.steps=1500", "checkpoint.every_steps=50", "train.steps_per_call=10", *SMALL)
CHIEF = ("chief", 0)
FEW = ("model=mlp", "data=digits", "measure.steps=0", "tracking=none", "train.deterministic=true", "train.steps=30")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed: apt-get install openmpi-bin"
)


class Tasks:
    """One command a task, each in a folder of its own; `kinds` has how many tasks of each there are."""

    def __init__(self, folder: Path, **kinds: int) -> None:
        with reserved_ports(sum(kinds.values())) as ports:
            left = iter(ports)
            self.cluster = {kind: [f"127.0.0.1:{next(left)}" for _ in range(count)] for kind, count in kinds.items()}
        self.commands = {
            (kind, index): UnderWay(folder / f"{kind}{index}")
            for kind, addresses in self.cluster.items()
            for index in range(len(addresses))
        }

    def type(self, *arguments: str, only: tuple[str, int] | None = None) -> None:
        """Types the command of every task, or of one."""
        for task, command in self.commands.items():
            if only in (None, task):
                command.type("cluster=env", *arguments, **said(self.cluster, *task))

    def until_saved(self, step: int) -> None:
        """Waits until the first task has a checkpoint of a step; a command that ends before says why."""
        first, *_ = commands = [*self.commands.values()]
        until(lambda: first.step("checkpoint") >= step or any(each.process.poll() is not None for each in commands))
        for each in commands:
            assert each.process.poll() is None, "\n".join(each.process.communicate())

    def ended(self, code: int = 0) -> list[Ran]:
        """How the commands of all tasks ended: with that code."""
        ended = [command.ended(240) for command in self.commands.values()]
        assert {ran.code for ran in ended} == {code}, "".join(ran.out + ran.err for ran in ended)
        return ended


@pytest.fixture
def begun(tmp_path):
    made: list[Tasks] = []

    def begin(**kinds: int) -> Tasks:
        made.append(Tasks(tmp_path, **kinds))
        return made[-1]

    yield begin
    for command in [command for tasks in made for command in tasks.commands.values()]:
        command.kill()
        assert not left_behind(command.folder)


@pytest.mark.slow
def test_a_hand_made_tf_config_trains_to_the_losses_of_one_host_whichever_task_is_preempted_or_killed(pipeline, begun):
    alone = pipeline(*LONG, "workers=2")
    tasks = begun(worker=2)
    tasks.type(*LONG)
    # A scheduler takes the machine of one.
    tasks.until_saved(100)
    tasks.commands["worker", 1].harm(signal.SIGTERM)
    left, other = tasks.ended(75)
    assert left.result["status"] == "PREEMPTED"
    assert "SIGTERM to worker 1" in left.result["error"]
    # It has the logs of both, and the other leaves nothing.
    assert (left.run_folders[0] / "point-1.log").exists()
    assert not (other.folder / "outputs" / "runs").exists()
    tasks.type(*LONG)
    for task, step in ((("worker", 1), 300), (("worker", 0), 600)):
        tasks.until_saved(step)
        tasks.commands[task].kill()
        tasks.type(*LONG, only=task)
    ran, other = tasks.ended()
    assert final_losses(ran.result) == final_losses(alone.result)
    # The second command's restart, and twice going on with what the one before left.
    assert [ran.result[name] for name in ("restarts", "resumed", "workers")] == [1, 2, 2]
    assert "worker 1 at 127.0.0.1" in other.out
    assert "was lost" in other.out
    assert other.out.rstrip().endswith("has ended with 0.")


@pytest.mark.slow
def test_the_chief_conducts_a_sweep_and_leaves_tasks_out_where_a_point_needs_fewer(begun):
    tasks = begun(chief=1, worker=2, ps=1)
    tasks.type("-m", "strategy=parameter_server,one_device,multi_worker", "workers=2", "train.steps=40", *SMALL[:-1])
    ran, *others = tasks.ended()
    assert [(each["strategy"], each["workers"]) for each in ran.results] == [
        ("parameter_server", 2), ("one_device", 1), ("multi_worker", 2),
    ]  # fmt: skip
    assert ran.results[0]["steps"] >= 40
    assert not [path for other in others for path in other.folder.glob("outputs/*/*")]


@pytest.mark.slow
def test_tasks_that_never_come_are_named_and_a_refused_command_ends_them_all(begun):
    tasks = begun(chief=1, worker=1)
    tasks.type(*LONG, "cluster.options.timeout=4", only=CHIEF)
    ran = tasks.commands[CHIEF].ended(240).failed()
    assert f"Expected worker 0 at {tasks.cluster['worker'][0]} to be there, received no answer for 4 s." in ran.err
    tasks.type(*LONG, "workers=3")
    refused, _ = tasks.ended(2)
    assert "Expected no more processes that train than the 2 that were started" in refused.err


def said(cluster: object, kind: object = "worker", index: object = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def test_environments_of_tensorflow_vertex_and_sagemaker_say_the_same():
    two = ["a:1", "b:2"]
    first = tasks_of(said({"worker": two}))
    assert [task.address for task in first.tasks] == two
    assert first.own == first.tasks[0]
    other = tasks_of(said({"worker": ["b:2"], "chief": ["a:1"], "ps": ["c:3"]}, "ps"))
    assert [task.kind for task in other.tasks] == ["chief", "worker", "ps"]
    assert (other.own.address, other.tasks[0].address) == ("c:3", "a:1")
    pools = {"workerpool0": ["a:1"], "workerpool1": ["b:2"]}
    vertex = tasks_of({"CLUSTER_SPEC": json.dumps({"cluster": pools, "task": {"type": "workerpool1", "index": 0}})})
    assert (vertex.own.address, vertex.tasks[0].address) == ("b:2", "a:1")
    sage = tasks_of({"SM_HOSTS": '["algo-2", "algo-1"]', "SM_CURRENT_HOST": "algo-2"})
    assert [task.address for task in sage.tasks] == ["algo-1:2222", "algo-2:2222"]
    assert sage.own.index == 1


@pytest.mark.parametrize(("environ", "words"), [
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
])  # fmt: skip
def test_an_environment_that_makes_no_sense_is_refused_in_words(environ, words):
    with pytest.raises(LaunchError, match=words):
        tasks_of(environ)


def test_an_evaluator_that_the_cluster_does_not_name_says_that_it_has_nothing_to_do(asked, tmp_path):
    told = asked("cluster=env", **said({"worker": ["a:1", "b:2"]}, "evaluator")).ok()
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


def test_what_this_task_runs_alone_starts_at_once_and_opens_no_channel(tmp_path):
    cluster = EnvCluster(ClusterConfig("env"), said({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}))
    cluster.local = SimpleNamespace(start=lambda *arguments: arguments, close=lambda code: None)
    plan = make(config("one_device", "1cpu"), Machine("host", (0,), 16.0, "A processor"))
    assert cluster.start(plan, "baseline", tmp_path) == (plan, "baseline", tmp_path)
    cluster.close(0)
    assert "agents" not in vars(cluster)


def test_cores_that_a_host_has_not_are_those_that_it_has():
    plan = make(config("multi_worker", "4cpu", 2), Machine("host", (0, 1, 2, 3), 16.0, "A processor"))
    assert on_cores(plan, [1], (0, 1, 2, 3)) == plan
    count = len(plan.processes[1].cores)
    assert on_cores(plan, [1], tuple(range(8, 16))).processes[1].cores == tuple(range(8, 8 + count))
    assert on_cores(plan, [0, 1], (9,)).processes[1].cores == ()


def typed(folder: Path, processes: int, *arguments: str) -> Ran:
    return launched(folder, *MPIRUN, "-n", f"{processes}", sys.executable, "-m", "pipeline", "cluster=mpi", *arguments)


@pytest.mark.slow
@needs_mpirun
def test_two_and_four_processes_train_to_the_losses_of_one_host(tmp_path):
    both = ("-m", "strategy=multi_worker", "workers=2,4", "sweep.name=both", *FEW)
    alone = UnderWay(tmp_path / "here", *both).ended(240).ok()
    # In the first point two of the places have nothing to do.
    ran = typed(tmp_path / "there", 4, *both).ok()
    assert [final_losses(result) for result in ran.results] == [final_losses(result) for result in alone.results]
    assert [result["hosts"] for result in ran.results] == [2, 4]
    assert (ran.run_folders[1] / "point-3.log").exists()
    assert not list((tmp_path / "there/outputs/mpi").iterdir())
    assert not left_behind(tmp_path / "there")


@needs_mpirun
def test_what_is_refused_ends_all_of_them_in_words(tmp_path):
    ran = typed(tmp_path, 2, "strategy=mirrored", "workers=9999", *FEW)
    assert ran.code != 0
    assert "Traceback" not in ran.err
    assert "Expected" in ran.err
    assert not left_behind(tmp_path)


def test_without_a_launcher_it_is_refused_in_words_and_planned_all_the_same(asked):
    refused = asked("cluster=mpi", "strategy=multi_worker", "workers=2", *FEW).failed(2)
    assert "Expected a process that an MPI launcher has started" in refused.err
    assert "Try `mpirun --bind-to none -n 2 python -m pipeline cluster=mpi ...`, or cluster=local." in refused.err
    planned = asked("mode=plan", "cluster=mpi", "strategy=multi_worker", "workers=2", *FEW).ok()
    assert "mpirun --bind-to none -n " in planned.out


def test_where_they_meet_is_for_nobody_else(tmp_path):
    options = {"folder": f"{tmp_path}/mpi"}
    place = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "7"}
    made = MpiCluster(ClusterConfig("mpi", options=options), place)
    made.begin("127.0.0.1:80")
    (path,) = (tmp_path / "mpi").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_json(Meeting, path) == Meeting("127.0.0.1:80", made.token.decode())
    made.end()
    assert not os.listdir(path.parent)
    made.close(0)

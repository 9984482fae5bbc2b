"""`cluster=env`: the same command in several places; `cluster=hosts`: agents that ssh starts on network namespaces."""

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import conftest
import numpy as np
import pretend_slurm
import psutil
import pytest
from conftest import QUICK, Ran, UnderWay, final_losses, left_behind, listening, once_in_mlflow, sampled, until
from namespaces import Hosts, made
from plans import config
from ports import reserved_ports

from pipeline.config.schema import ClusterConfig
from pipeline.errors import UserError
from pipeline.launch import LaunchError
from pipeline.launch.agents.agent import on_cores
from pipeline.launch.env import EnvCluster, tasks_of
from pipeline.plan.machine import Machine
from pipeline.plan.planning import make

SMALL = (*QUICK, "model=mlp", "data=digits", "train.deterministic=true")
# Long enough to be harmed in the middle.
LONG = ("strategy=multi_worker", "train.steps=1500", "checkpoint.every_steps=50", "train.steps_per_call=10", *SMALL)
CHIEF = ("chief", 0)


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


@pytest.mark.waits
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


# To MLflow too.
TRACKED = (*QUICK[1:], "strategy=multi_worker", "model=mlp", "data=digits", "train.deterministic=true")
# So many calls' events go with a checkpoint.
RECENT = 64
ON_TWO = (*TRACKED, "train.steps_per_call=5", "workers=2", "train.steps=2500", "checkpoint.every_steps=50")
ON_JAX = (
    "backend=jax", "model=mlp", "data=digits", "train.global_batch=64", "train.steps=50", "measure.steps=0",
    "measure.baseline=none", "tracking=none", "launch.startup_timeout=120",
)  # fmt: skip
TWO_ON_JAX = (*ON_JAX, "strategy=multi_worker", "workers=2", "hardware.devices_per_host=1")
# Each host has a core of its own, which other work of this machine waits for, where that may be asked for.
PYTHON = """#!/bin/sh
chrt --rr 1 true 2>/dev/null && first="chrt --rr 1"
case "$(ip -brief address)" in
    *{second}/*) exec $first taskset -c {other} {python} "$@" ;;
    *) exec $first taskset -c {one} {python} "$@" ;;
esac
"""
# 4.5 MB of gradients, which two examples take a few milliseconds to compute.
WIDE = (
    "strategy=multi_worker", "model=mlp", "model.build.hidden=[1024,1024]", "data=digits", "train.replica_batch=2",
    "train.optimizer=sgd", "train.steps=6", "train.steps_per_call=1", "train.save=false", "train.check=off",
    "hardware.devices_per_host=1", "hardware.threads_per_device=1", "tracking=none", "measure.repeats=3",
)  # fmt: skip


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    folder = tmp_path / "ssh"
    folder.mkdir()
    with made(folder, 2) as hosts:
        yield hosts
        until(lambda: not hosts.left(), 30)


def unharmed(pipeline: Callable[..., Ran], *arguments: str) -> Path:
    """The folder of a run on this machine."""
    (folder,) = pipeline(*arguments, "tracking=none", "output_dir=alone").ok().folder.glob("alone/runs/*")
    return folder


def saved(folder: Path) -> int:
    """The step of a run's last checkpoint."""
    return max((int(path.name.split("-")[1]) for path in folder.glob("checkpoints/step-*.json")), default=0)


@pytest.mark.waits
def test_two_hosts_train_to_the_losses_of_one_whatever_becomes_of_their_link_and_of_drivers(pipeline, two, tmp_path):
    alone = unharmed(pipeline, *ON_TWO)
    hosts = (*ON_TWO, *two.options())
    run = UnderWay(tmp_path, *hosts, "launch.heartbeat_timeout=15")
    run.until(lambda: run.step() >= 100)
    # Killed outright; nobody hears of more steps than a checkpoint tells of before it is typed again.
    run.kill()
    (folder,) = run.runs
    heard = run.step()
    until(lambda: saved(folder) >= heard + 5 * (RECENT + 20))
    run.type(*hosts, "launch.heartbeat_timeout=15")
    run.until(lambda: run.told("restored"))
    run.more(100)
    # Read once: it trains on.
    logged = [*conftest.losses(folder)]
    assert logged == [*range(1, max(logged) + 1)]
    # Where the hosts reach it, and nowhere else.
    assert listening([psutil.Process(run.process.pid)]) == {two.gateway}
    # Shorter than anybody's patience.
    two.cut(2)
    time.sleep(6)
    two.mend(2)
    run.more(100)
    # Its driver killed outright, and another in its place.
    run.kill()
    run.type("attach", folder.name)
    run.more(100)
    assert not run.restarted()
    # Longer, and mended while the restart waits for the host.
    two.cut(2)
    run.until(run.restarted, 60)
    a, b = two.addresses
    assert f"worker 1 on {b}" in run.restarted()[0]
    time.sleep(3)
    two.mend(2)
    run.more(100)
    # For good.
    two.cut(2)
    began = time.monotonic()
    ran = run.ended(120).failed()
    assert time.monotonic() - began < 60
    assert f"nothing was heard of {b} for" in ran.err
    two.mend(2)
    # And where one host goes on without the other.
    run.type(*hosts, "launch.elastic=true", "launch.heartbeat_timeout=10")
    run.until(lambda: len(run.told("resumed")) == 2)
    run.more(100)
    two.cut(2)
    ran = run.ended().ok()
    two.mend(2)
    result = json.loads((folder / "result.json").read_text())
    assert (result["resumed"], result["workers_at_end"]) == (2, 1)
    assert "training goes on with 1 worker" in run.restarted()[-1]
    (*_, alone_from) = [event["step"] for event in run.told("restored")]
    ours, theirs = ([*conftest.losses(each).items()][:alone_from] for each in (folder, alone))
    assert (len(ours), ours) == (alone_from, theirs)
    told = [line["step"] - before for line in run.told("steps") for before in range(len(line["losses"]))]
    # What was made again is told again; what an agent has sent twice is not.
    assert len(told) - len(set(told)) == result["steps_repeated"]
    once_in_mlflow(tmp_path, result, 2500, len({line["epoch"] for line in run.told("epoch")}))
    assert f"on 2 hosts ({a}, {b})" in ran.out
    assert all((folder / f"point-{rank}.log").exists() for rank in (0, 1))
    processes = json.loads((folder / "plan.json").read_text())["processes"]
    assert [process["address"].rpartition(":")[0] for process in processes] == [a, b]


@pytest.mark.waits
def test_gradients_of_two_processes_a_host_leave_in_buckets_and_train_to_the_losses_of_one_host_whoever_is_harmed(
    pipeline, two, tmp_path
):
    two.limit(2, "50mbit", latency="1s")
    wide = (
        *TRACKED, "workers=4", "strategy.devices_per_process=1", "model.build.hidden=[256,256]", "train.steps=600",
        "train.steps_per_call=10",
    )  # fmt: skip
    # Added in the same order: inside hosts first.
    alone = unharmed(pipeline, *wide, "hardware=2x2cpu")
    # Of 340 kB, which take most of a step to send.
    hosts = (
        *wide, *two.options(), "tracking=none", "strategy.bucket_bytes=20000", "checkpoint.every_steps=20",
        "launch.heartbeat_timeout=8", "hardware.devices_per_host=2", "launch.max_restarts=3", "cluster.base_port=23456",
    )  # fmt: skip
    run = UnderWay(tmp_path, *hosts)
    # The one that adds to the other host's, and those that are handed their host's sums.
    harms = ((2, signal.SIGKILL), (1, signal.SIGKILL), (3, signal.SIGSTOP))
    for count, (rank, number) in enumerate(sampled(harms, 1), 1):
        run.more(30)
        run.harm(number, rank)
        run.until(lambda count=count: len(run.restarted()) == count, 60)
        assert f"worker {rank} on {two.addresses[rank // 2]}" in run.restarted()[-1]
    # Killed outright, and typed again at once: the agents of the first are ended, and none trains beside another,
    # or keeps its ports.
    run.more(10)
    before, restored = len(two.left()), len(run.told("restored"))
    run.kill()
    run.type(*hosts)
    # Once all have joined; the steps that nobody heard are logged before.
    run.until(lambda: len(run.told("restored")) > restored)
    assert len(two.left()) == before
    ran = run.ended().ok()
    assert "multi_worker by shared_memory" in ran.out
    result, one = (json.loads((each / "result.json").read_text()) for each in (*run.runs, alone))
    assert result["collective"] == one["collective"] == "shared_memory"
    assert not [note for note in result["notes"] if "in place of shared memory" in note]
    assert conftest.losses(run.runs[0]) == conftest.losses(alone)
    assert final_losses(result) == final_losses(one)


@pytest.mark.skipif(find_spec("jax") is None, reason="jax is not installed: pip install jax")
@pytest.mark.waits
def test_two_hosts_and_two_nodes_of_slurm_train_on_jax_as_one_device_does(pipeline, two, tmp_path):
    def trained(name, *arguments, **environ):
        """The loss of each step, and the hosts that its processes were on."""
        pipeline(*arguments, f"output_dir={name}", **environ).ok()
        (run,) = (tmp_path / name / "runs").iterdir()
        processes = json.loads((run / "plan.json").read_text())["processes"]
        return [*conftest.losses(run).values()], {str(each["address"]).rpartition(":")[0] for each in processes}

    one, _ = trained("one", *ON_JAX, "strategy=one_device")
    assert len(one) == 50
    losses, on = trained("two", *TWO_ON_JAX, *two.options())
    assert on == set(two.addresses)
    np.testing.assert_allclose(losses, one, rtol=0, atol=1e-5)
    if why := pretend_slurm.missing():
        pytest.skip(f"no Slurm can be started here: {why}")
    with pretend_slurm.pretend_slurm() as slurm:
        losses, _ = trained("nodes", *TWO_ON_JAX, "cluster=slurm", "hardware.hosts=2", **slurm.environ)
    np.testing.assert_allclose(losses, one, rtol=0, atol=1e-5)


@pytest.mark.timed
def test_what_a_slower_link_takes_is_predicted_from_what_the_doctor_measured_and_called_communication(
    pipeline, two, tmp_path
):
    cores = sorted(os.sched_getaffinity(0))
    python = tmp_path / "python"
    one, other = cores[0], cores[-1]
    python.write_text(PYTHON.format(second=two.addresses[1], one=one, other=other, python=sys.executable))
    python.chmod(0o755)
    on = (*two.options(), f"cluster.options.python={python}")
    assert pipeline("doctor", "--only", "link", *on).code in (0, 1)
    pipeline("-m", "workers=1,2", "sweep.name=fast", "measure.steps=20", "measure.baseline=none", *WIDE, *on).ok()
    for rate, gbps, steps in sampled((("1gbit", 1.0, 20), ("100mbit", 0.1, 4)), 1):
        # Nothing is dropped that waits for less than a second, so that the link is slow, and nothing else.
        two.limit(2, rate, latency="1s")
        assert pipeline("doctor", "--only", "link", *on).code in (0, 1)
        pipeline("predict", "predict.sweep=fast", "workers=2", *WIDE, *on).ok()
        pipeline("workers=2", "measure.explain=true", f"measure.steps={steps}", *WIDE, *on).ok()
        folder = max((tmp_path / "outputs" / "runs").iterdir(), key=lambda path: path.name)
        result = json.loads((folder / "result.json").read_text())
        link_gbps = json.loads((folder / "plan.json").read_text())["link_gbps"]
        assert 0.7 * gbps < link_gbps < gbps
        (prediction,) = result["predictions"]
        assert abs(prediction["error"]) < 0.2, (rate, prediction)
        assert result["explained"]["bound"] == "communication", (rate, result["explained"])
        lost = {part["name"]: part["share"] for part in result["explained"]["parts"]}
        assert lost["communication"] > 0.5, (rate, lost)
    assert Path(tmp_path / "outputs" / "links.json").exists()

"""`cluster=hosts`: agents that ssh starts on network namespaces, which stand for hosts; on JAX also nodes of Slurm."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import conftest
import numpy as np
import pretend_slurm
import psutil
import pytest
from conftest import QUICK, Ran, UnderWay, final_losses, listening, once_in_mlflow, until
from namespaces import Hosts, made

# To MLflow too.
SMALL = (*QUICK[1:], "strategy=multi_worker", "model=mlp", "data=digits", "train.deterministic=true")
# So many calls' events go with a checkpoint.
RECENT = 64
LONG = (*SMALL, "train.steps_per_call=5", "workers=2", "train.steps=2500", "checkpoint.every_steps=50")
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
WITHIN = 0.2


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


@pytest.mark.slow
@pytest.mark.waits
def test_two_hosts_train_to_the_losses_of_one_whatever_becomes_of_their_link_and_of_drivers(pipeline, two, tmp_path):
    alone = unharmed(pipeline, *LONG)
    hosts = (*LONG, *two.options())
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


@pytest.mark.slow
@pytest.mark.waits
def test_gradients_of_two_processes_a_host_leave_in_buckets_and_train_to_the_losses_of_one_host_whoever_is_harmed(
    pipeline, two, tmp_path
):
    two.limit(2, "50mbit", latency="1s")
    wide = (
        *SMALL, "workers=4", "strategy.devices_per_process=1", "model.build.hidden=[256,256]", "train.steps=600",
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
    for count, (rank, number) in enumerate(harms, 1):
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
@pytest.mark.slow
def test_two_hosts_and_two_nodes_of_slurm_train_on_jax_as_one_device_does(pipeline, tmp_path):
    def trained(name, *arguments, **environ):
        """The loss of each step, and the hosts that its processes were on."""
        pipeline(*arguments, f"output_dir={name}", **environ).ok()
        (run,) = (tmp_path / name / "runs").iterdir()
        processes = json.loads((run / "plan.json").read_text())["processes"]
        return [*conftest.losses(run).values()], {str(each["address"]).rpartition(":")[0] for each in processes}

    one, _ = trained("one", *ON_JAX, "strategy=one_device")
    assert len(one) == 50
    (tmp_path / "ssh").mkdir()
    with made(tmp_path / "ssh", 2) as hosts:
        two, on = trained("two", *TWO_ON_JAX, *hosts.options())
        assert on == set(hosts.addresses)
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-5)
    if why := pretend_slurm.missing():
        pytest.skip(f"no Slurm can be started here: {why}")
    with pretend_slurm.pretend_slurm() as slurm:
        nodes, _ = trained("nodes", *TWO_ON_JAX, "cluster=slurm", "hardware.hosts=2", **slurm.environ)
    np.testing.assert_allclose(nodes, one, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.timed
def test_what_a_slower_link_takes_is_predicted_from_what_the_doctor_measured_and_called_communication(
    pipeline, tmp_path
):
    (tmp_path / "ssh").mkdir()
    cores = sorted(os.sched_getaffinity(0))
    with made(tmp_path / "ssh", 2) as hosts:
        python = tmp_path / "python"
        one, other = cores[0], cores[-1]
        python.write_text(PYTHON.format(second=hosts.addresses[1], one=one, other=other, python=sys.executable))
        python.chmod(0o755)
        on = (*hosts.options(), f"cluster.options.python={python}")
        assert pipeline("doctor", "--only", "link", *on).code in (0, 1)
        pipeline("-m", "workers=1,2", "sweep.name=fast", "measure.steps=20", "measure.baseline=none", *WIDE, *on).ok()
        for rate, gbps, steps in (("1gbit", 1.0, 20), ("100mbit", 0.1, 4)):
            # Nothing is dropped that waits for less than a second, so that the link is slow, and nothing else.
            hosts.limit(2, rate, latency="1s")
            assert pipeline("doctor", "--only", "link", *on).code in (0, 1)
            pipeline("predict", "predict.sweep=fast", "workers=2", *WIDE, *on).ok()
            pipeline("workers=2", "measure.explain=true", f"measure.steps={steps}", *WIDE, *on).ok()
            folder = max((tmp_path / "outputs" / "runs").iterdir(), key=lambda path: path.name)
            result = json.loads((folder / "result.json").read_text())
            link_gbps = json.loads((folder / "plan.json").read_text())["link_gbps"]
            assert 0.7 * gbps < link_gbps < gbps
            (prediction,) = result["predictions"]
            assert abs(prediction["error"]) < WITHIN, (rate, prediction)
            assert result["explained"]["bound"] == "communication", (rate, result["explained"])
            lost = {part["name"]: part["share"] for part in result["explained"]["parts"]}
            assert lost["communication"] > 0.5, (rate, lost)
    assert Path(tmp_path / "outputs" / "links.json").exists()

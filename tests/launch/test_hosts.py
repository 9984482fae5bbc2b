"""`cluster=hosts`: agents that ssh starts on network namespaces, which stand for hosts."""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import listening, once_in_mlflow
from namespaces import Hosts, made
from under_way import UnderWay, losses

SMALL = ("model=mlp", "data=digits", "measure.steps=0", "tracking=none", "train.deterministic=true")
TWO = ("strategy=multi_worker", "workers=2", *SMALL)
LONG = ("train.steps=2500", "checkpoint.every_steps=50", "train.steps_per_call=10")


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    folder = tmp_path / "ssh"
    folder.mkdir()
    with made(folder, 2) as hosts:
        yield hosts
        until = time.monotonic() + 30
        while left := hosts.left():
            assert time.monotonic() < until, left
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.waits
def test_two_hosts_train_to_the_losses_of_one_whatever_becomes_of_their_link(pipeline, two, tmp_path):
    alone = pipeline(*TWO, *LONG, "output_dir=alone")
    assert alone.code == 0, alone.err
    logged = [argument for argument in (*TWO, *LONG) if argument != "tracking=none"]
    under = UnderWay(tmp_path, *logged, *two.options(), "launch.heartbeat_timeout=15")
    under.until(lambda: under.step() >= 100)
    # Shorter than anybody's patience.
    two.cut(2)
    time.sleep(6)
    two.mend(2)
    under.more(100)
    assert not under.restarted()
    # Its driver killed outright, and another in its place.
    under.kill()
    (run,) = tmp_path.glob("outputs/runs/*")
    under.type("attach", run.name)
    under.more(100)
    assert not under.restarted()
    # Longer, and mended while the restart waits for the host.
    two.cut(2)
    under.until(under.restarted, 60)
    a, b = two.addresses
    assert f"worker 1 on {b}" in under.restarted()[0]
    time.sleep(3)
    two.mend(2)
    ran = under.ended()
    assert ran.code == 0, ran.err
    result = json.loads((tmp_path / ran.run_folders[0] / "result.json").read_text())
    one = json.loads(next((tmp_path / "alone").rglob("result.json")).read_text())
    assert losses(result) == losses(one)
    assert (result["restarts"], result["resumed"]) == (1, 0)
    told = [line["step"] - before for line in under.told("steps") for before in range(len(line["losses"]))]
    # What was made again is told again; what an agent has sent twice is not.
    assert len(told) - len(set(told)) == result["steps_repeated"]
    once_in_mlflow(tmp_path, result, 2500, len({line["epoch"] for line in under.told("epoch")}))
    assert f"on 2 hosts ({a}, {b})" in ran.out
    assert all((ran.run_folders[0] / f"point-{rank}.log").exists() for rank in (0, 1))
    processes = json.loads((ran.run_folders[0] / "plan.json").read_text())["processes"]
    assert [process["address"].rpartition(":")[0] for process in processes] == [a, b]


@pytest.mark.slow
@pytest.mark.waits
def test_two_hosts_of_two_processes_each_train_to_the_losses_of_one_whichever_process_is_killed(
    pipeline, two, tmp_path
):
    four = ("strategy=multi_worker", "workers=4", "strategy.devices_per_process=1", *SMALL, *LONG, "train.steps=600")
    alone = pipeline(*four, "output_dir=alone")
    assert alone.code == 0, alone.err
    buckets = "strategy.bucket_bytes=4096"
    under = UnderWay(tmp_path, *four, *two.options(), buckets, "hardware.devices_per_host=2", "launch.max_restarts=2")
    # The one that adds to the other host's, and one that is handed its host's sums.
    for count, rank in enumerate((2, 1), 1):
        under.more(100)
        pids = [line["pid"] for line in under.told("started") if line["rank"] == rank]
        os.kill(pids[-1], signal.SIGKILL)
        under.until(lambda count=count: len(under.restarted()) == count, 60)
        assert f"worker {rank} on {two.addresses[rank // 2]}" in under.restarted()[-1]
    ran = under.ended()
    assert ran.code == 0, ran.err
    assert "multi_worker by shared_memory" in ran.out
    result = json.loads((tmp_path / ran.run_folders[0] / "result.json").read_text())
    one = json.loads(next((tmp_path / "alone").rglob("result.json")).read_text())
    assert result["collective"] == one["collective"] == "shared_memory"
    assert not [note for note in result["notes"] if "in place of shared memory" in note]
    for key in ("loss", "val_loss"):
        # Added in another order: inside hosts first.
        assert result[key] == pytest.approx(one[key], rel=1e-4)


@pytest.mark.slow
@pytest.mark.waits
def test_gradients_that_leave_in_buckets_over_a_slow_link_train_to_the_losses_of_one_host_whoever_is_killed_or_stopped(
    pipeline, two, tmp_path
):
    two.limit(2, "50mbit", latency="1s")
    wide = (*TWO, "model.build.hidden=[256,256]", "train.steps=240", "train.steps_per_call=10")
    alone = pipeline(*wide, "output_dir=alone")
    assert alone.code == 0, alone.err
    # Of 340 kB, which take most of a step to send.
    buckets = ("strategy.bucket_bytes=20000", "checkpoint.every_steps=20", "launch.heartbeat_timeout=8")
    under = UnderWay(tmp_path, *wide, *two.options(), *buckets)
    for count, number in enumerate((signal.SIGKILL, signal.SIGSTOP), 1):
        under.more(30)
        pids = [line["pid"] for line in under.told("started") if line["rank"] == 1]
        os.kill(pids[-1], number)
        under.until(lambda count=count: len(under.restarted()) == count, 60)
        assert f"worker 1 on {two.addresses[1]}" in under.restarted()[-1]
    ran = under.ended()
    assert ran.code == 0, ran.err
    result = json.loads((tmp_path / ran.run_folders[0] / "result.json").read_text())
    one = json.loads(next((tmp_path / "alone").rglob("result.json")).read_text())
    assert losses(result) == losses(one)


@pytest.mark.slow
@pytest.mark.waits
def test_a_host_that_stays_away_ends_the_run_in_under_a_minute_which_goes_on_later_or_elastically_without_it(
    two, tmp_path
):
    ports = "cluster.base_port=23456"
    under = UnderWay(tmp_path, *TWO, *LONG, *two.options(), ports)
    under.until(lambda: under.step() >= 100)
    # Where the hosts reach it, and nowhere else.
    assert listening([psutil.Process(under.process.pid)]) == {two.gateway}
    # Killed outright, and typed again at once: the agents of the first are ended, and none trains beside another,
    # or keeps its ports.
    under.kill()
    before = len(two.left())
    under = UnderWay(tmp_path, *TWO, *LONG, *two.options(), ports)
    under.until(lambda: under.told("resumed"))
    under.more(100)
    assert len(two.left()) == before
    began = time.monotonic()
    two.cut(2)
    ran = under.ended(120)
    assert time.monotonic() - began < 60
    assert ran.code == 1
    assert f"nothing was heard of {two.addresses[1]} for" in ran.err
    two.mend(2)
    again = UnderWay(tmp_path, *TWO, *LONG, *two.options(), "launch.elastic=true", "launch.heartbeat_timeout=10")
    # What the first had logged is in the same file.
    again.until(lambda: len(again.told("resumed")) == 2)
    logged = len(again.told("steps"))
    again.until(lambda: len(again.told("steps")) > logged)
    two.cut(2)
    ran = again.ended()
    assert ran.code == 0, ran.err
    result = json.loads((ran.run_folders[0] / "result.json").read_text())
    assert (result["resumed"], result["workers_at_end"]) == (2, 1)
    assert "training goes on with 1 worker" in " ".join(again.restarted())
    two.mend(2)

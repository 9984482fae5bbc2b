"""`cluster=hosts`: agents that ssh starts on network namespaces, which stand for hosts."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import Hosts, made

SMALL = ("model=mlp", "data=digits", "measure.steps=0", "tracking=none", "train.deterministic=true")
TWO = ("strategy=multi_worker", "workers=2", *SMALL)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Hosts]:
    folder = tmp_path / "ssh"
    folder.mkdir()
    with made(folder, 2) as hosts:
        yield hosts
        until = time.monotonic() + 10
        while left := hosts.left():
            assert time.monotonic() < until, left
            time.sleep(0.1)


def losses(result: dict) -> tuple:
    return result["loss"], result["val_loss"], result["metrics"], result["val_metrics"]


@pytest.mark.slow
def test_two_hosts_train_to_the_losses_of_one_and_leave_nothing(pipeline, two, tmp_path):
    alone = pipeline(*TWO, "train.steps=30", "output_dir=alone")
    assert alone.code == 0, alone.err
    ran = pipeline(*TWO, "train.steps=30", *two.options(), "output_dir=outputs")
    assert ran.code == 0, ran.err
    result = json.loads(next((tmp_path / "outputs").rglob("result.json")).read_text())
    one = json.loads(next((tmp_path / "alone").rglob("result.json")).read_text())
    assert losses(result) == losses(one)
    a, b = two.addresses
    assert f"on 2 hosts ({a} and {b})" in ran.out or f"({a}, {b})" in ran.out
    folder = ran.run_folders[0]
    assert "Warned" not in (folder / "events.jsonl").read_text()
    for rank in (0, 1):
        assert (folder / f"point-{rank}.log").exists()
    processes = json.loads((folder / "plan.json").read_text())["processes"]
    assert [process["address"].rpartition(":")[0] for process in processes] == [a, b]

"""What tests start in less time is what a person starts: the same words, weights and processes."""

import json
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import QUICK, Ran, finish, left_behind, start, until

TRAINED = (
    "strategy=multi_worker",
    "workers=2",
    "model=mlp",
    "data=digits",
    "train.steps=30",
    "train.deterministic=true",
)


def watched(folder: Path, cold: bool) -> tuple[Ran, set[int]]:
    """How a command ended, and whose children its fork server was."""
    folder.mkdir()
    began, found = time.monotonic(), set[int]()
    process = start(folder, *QUICK, *TRAINED, cold=cold)
    while process.poll() is None and not found:
        for log in folder.glob("outputs/runs/*/events.jsonl"):
            events = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
            pids = [event["pid"] for event in events if event["event"] == "started"]
            with suppress(psutil.NoSuchProcess):
                found |= {psutil.Process(pid).parent().ppid() for pid in pids}
        time.sleep(0.05)
    return finish(process, folder, began, 120), found - {process.pid}


@pytest.mark.slow
def test_processes_of_a_fork_server_that_was_warm_train_what_those_of_a_cold_one_do_to_the_last_bit(tmp_path):
    (cold, others), (warm, more) = (watched(tmp_path / str(cold), cold) for cold in (True, False))
    assert (cold.code, warm.code) == (0, 0), cold.err + warm.err
    assert others | more == set()
    for kind, field in (("steps", "losses"), ("finished", "weights"), ("epoch", "val_loss")):
        ours, theirs = (sorted((event["rank"], event[field]) for event in ran.events(kind)) for ran in (cold, warm))
        assert ours == theirs != []
    assert not left_behind(warm.folder)


def test_a_command_that_ends_without_a_run_leaves_no_fork_server(tmp_path):
    process = start(tmp_path, "workers=none")
    (server,) = until(psutil.Process(process.pid).children, 10)
    finish(process, tmp_path, time.monotonic(), 60).failed(2)
    assert server.wait(10) is None
    assert not left_behind(tmp_path)


@pytest.mark.parametrize("words", [("mode=plan", "strategy=mirrored", "hardware=4gpu"), ("train.epoch=3",)])
def test_a_command_that_is_asked_says_what_one_that_is_started_does(asked, tmp_path, words):
    ran = asked(*words)
    real = finish(start(tmp_path, *words, cold=True), tmp_path, time.monotonic(), 60)
    assert (ran.code, ran.out, ran.err) == (real.code, real.out, real.err)

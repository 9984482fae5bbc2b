"""A run whose conductor goes and another comes ends as if it had never gone, and MLflow has everything of it once."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import own
import psutil
import pytest
from conftest import command_line, finish, left_behind, listening, once_in_mlflow, start, working_in
from run_events import events

# Twelve steps an epoch, two a call.
COMMAND = (
    f"--config-dir={own.CONF}", "data=digits", "model=tiny", "train.epochs=40", "train.global_batch=128",
    "train.steps_per_call=2", "train.deterministic=true", "measure.steps=2", "measure.repeats=2",
    "measure.baseline=fresh", "strategy=multi_worker", "workers=2", "checkpoint.every_steps=100",
    "train.check=off",
)  # fmt: skip
# Time for what happens meanwhile; nothing is computed otherwise.
SLOWLY = ("train.callbacks=[{_target_: own.Pausing, seconds: 0.15}]",)
STEPS, EPOCHS = 480, 40


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where the commands run; whatever has been left there is ended, and told."""
    yield tmp_path
    if left := left_behind(tmp_path, patience=120):
        for process in working_in(tmp_path):
            process.kill()
        pytest.fail(f"left behind: {left}")


def step(folder: Path) -> int:
    return max((event["step"] for event in events(folder, "steps")), default=0)


def until(process: Any, true: Callable[[], object], seconds: float = 180.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def trained(events: list[dict[str, Any]]) -> tuple[dict[int, float], list[dict], list[str]]:
    """The loss of each step, each once; what epochs came to; the weights."""
    steps = [
        (event["step"] - len(event["losses"]) + place + 1, loss)
        for event in events
        if event["event"] == "steps" and event["group"] == "point"
        for place, loss in enumerate(event["losses"])
    ]
    assert len(steps) == len(dict(steps))
    epochs = [
        {key: event[key] for key in ("epoch", "loss", "metrics", "val_loss", "val_metrics")}
        for event in events
        if event["event"] == "epoch"
    ]
    (weights,) = {weight for event in events if event["event"] == "finished" for weight in event["weights"]}
    return dict(steps), epochs, [weights]


@pytest.mark.slow
@pytest.mark.waits
def test_a_detached_run_outlives_its_conductors_and_ends_as_an_unharmed_one(folder):
    sane = folder / "sane"
    sane.mkdir()
    # Meanwhile, since the other mostly waits.
    began, unharmed = time.monotonic(), start(sane, *COMMAND, "tracking=none")
    # Killed outright in mid-training.
    first = start(folder, *COMMAND, *SLOWLY, "launch.detach=true")
    until(first, lambda: step(folder) >= 40)
    (run,) = folder.glob("outputs/runs/*")
    assert (run / "agents.json").stat().st_mode & 0o777 == 0o600
    token = json.loads((run / "agents.json").read_text())["token"]
    assert not [process for process in psutil.process_iter() if token in command_line(process)]
    assert listening(working_in(folder)) == {"127.0.0.1"}
    first.kill()
    first.communicate()
    before = step(folder)
    time.sleep(3)
    assert step(folder) == before
    refused = start(folder, *COMMAND, *SLOWLY, "launch.detach=true")
    _, err = refused.communicate(timeout=60)
    assert (refused.returncode, "whose processes train on without a driver" in err) == (2, True), err
    # Left by Ctrl-C.
    second = start(folder, "attach", run.name)
    until(second, lambda: step(folder) >= before + 40)
    other = start(folder, "attach", run.name)
    assert "on which one still works" in other.communicate(timeout=60)[1]
    second.send_signal(signal.SIGINT)
    out, err = second.communicate(timeout=60)
    assert second.returncode == 130, (out, err)
    assert f"outputs/runs/{run.name} trains on: `python -m pipeline attach outputs/runs/{run.name}`" in err
    assert (run / "agents.json").exists()
    third = finish(start(folder, "attach", run.name), folder, time.monotonic(), 240)
    assert third.code == 0, (third.out, third.err)
    finish(unharmed, sane, began, 240).ok()
    assert trained(events(folder)) == trained(events(sane))
    assert sorted(trained(events(folder))[0]) == list(range(1, STEPS + 1))
    result, other_result = (
        json.loads(next(at.glob("outputs/runs/*/result.json")).read_text()) for at in (folder, sane)
    )
    same = (
        "status", "error", "workers", "loss", "val_loss", "metrics", "val_metrics", "epochs", "parameters", "resumed",
        "restarts", "rollbacks", "steps_repeated", "repeats", "steps_per_call", "saved", "checkpoint_step",
    )  # fmt: skip
    assert {key: result[key] for key in same} == {key: other_result[key] for key in same}
    assert result["speedup"] > 0
    # As long as it took, with nobody there.
    assert result["seconds_training"] > 0.15 * STEPS / 2
    assert (run / "model.keras").exists()
    assert not [path.name for path in run.iterdir() if path.name in ("agents.json", "attempt.json")]
    assert (run / "point-1.log").exists()
    once_in_mlflow(folder, result, STEPS, EPOCHS)

"""A run whose conductor goes and another comes ends as if it had never gone, and MLflow has everything of it once."""

import json
import signal
import time

import own
import psutil
import pytest
from conftest import command_line, left_behind, listening, once_in_mlflow, working_in
from run_events import events, logged, losses, weights
from under_way import UnderWay

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


@pytest.mark.slow
@pytest.mark.waits
def test_a_detached_run_outlives_its_conductors_and_ends_as_an_unharmed_one(tmp_path):
    # Meanwhile, since the other mostly waits.
    unharmed = UnderWay(tmp_path / "sane", *COMMAND, "tracking=none")
    command, folder = (*COMMAND, *SLOWLY, "launch.detach=true"), tmp_path / "detached"
    first, other = UnderWay(folder, *command), UnderWay(folder)
    try:
        first.until(lambda: first.step() >= 40)
        (run,) = first.runs
        assert (run / "agents.json").stat().st_mode & 0o777 == 0o600
        token = json.loads((run / "agents.json").read_text())["token"]
        assert not [process for process in psutil.process_iter() if token in command_line(process)]
        assert listening(working_in(folder)) == {"127.0.0.1"}
        # Killed outright in mid-training.
        first.kill()
        before = first.step()
        time.sleep(3)
        assert first.step() == before
        other.type(*command)
        assert "whose processes train on without a driver" in other.ended(60).failed(2).err
        # Left by Ctrl-C.
        first.type("attach", run.name)
        first.more(40)
        other.type("attach", run.name)
        assert "on which one still works" in other.ended(60).err
        first.harm(signal.SIGINT)
        left = first.ended(60).failed(130)
        assert f"outputs/runs/{run.name} trains on: `python -m pipeline attach outputs/runs/{run.name}`" in left.err
        assert (run / "agents.json").exists()
        first.type("attach", run.name)
        result, other_result = (command.ended(240).ok().result for command in (first, unharmed))
    finally:
        # Whatever has been left there is ended, and told.
        if there := left_behind(folder, patience=120):
            for process in working_in(folder):
                process.kill()
            pytest.fail(f"left behind: {there}")
    (alone,) = unharmed.runs
    # Each step once.
    told = [event["step"] for event in events(folder, "steps") if event["group"] == "point"]
    assert (len(told), [*losses(run)]) == (len(set(told)), [*range(1, STEPS + 1)])
    assert (losses(run), weights(run), len(weights(run))) == (losses(alone), weights(alone), 1)
    keys = ("epoch", "loss", "metrics", "val_loss", "val_metrics")
    epochs, others = ([[event[key] for key in keys] for event in logged(each, "epoch")] for each in (run, alone))
    assert epochs == others
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

"""A run that is preempted, killed, harmed, left alone or resumed elsewhere ends with what it would have trained."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import (
    CONF,
    QUICK,
    Ran,
    UnderWay,
    command_line,
    events,
    finish,
    left_behind,
    listening,
    logged,
    losses,
    once_in_mlflow,
    one_of,
    start,
    weights,
    working_in,
)
from kills import chosen, run, unharmed_in

# What is left to chance follows from it; a failure names it, and TEST_SEED=... has it again.
SEED = os.environ["TEST_SEED"]
# Other ones in each run of CI.
CELLS = 2
# Twelve steps an epoch.
SMALL = (
    *QUICK, f"--config-dir={CONF}", "data=digits", "model=tiny", "train.epochs=3", "train.global_batch=128",
    "train.steps_per_call=2", "train.deterministic=true",
)  # fmt: skip
ONE, MIRRORED, TWO = (
    ("strategy=one_device", "workers=1"),
    ("strategy=mirrored", "workers=2"),
    ("strategy=multi_worker", "workers=2"),
)
# Of which an unharmed run is made for several tests.
LAYOUT = one_of((ONE, MIRRORED, TWO))


def preempting(*after: int, number: str = "SIGTERM") -> str:
    return f"train.callbacks=[{{_target_: own.Preempting, after: {list(after)}, number: {number}}}]"


def again(folder: Path, *command: str) -> Ran:
    """A command to its end, which is a good one."""
    return finish(start(folder, *command), folder, time.monotonic(), 120).ok()


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of the run to which nothing happens, made once for all tests that compare with it."""
    return cache(lambda *arguments: again(tmp_path_factory.mktemp("sane"), *SMALL, *arguments).run_folders[0])


def trained(run: Path) -> tuple[list[str], dict[int, float]]:
    return weights(run), losses(run)


@pytest.mark.slow
def test_a_signal_that_comes_once_a_run_has_finished_does_not_have_it_trained_again(tmp_path):
    command = UnderWay(tmp_path, *SMALL, *ONE, "train.epochs=1", cold=True)
    while not list(tmp_path.glob("outputs/runs/*/result.json")):
        assert command.process.poll() is None
        time.sleep(0.001)
    command.harm(signal.SIGTERM)
    ran = command.ended(60)
    # On a busy machine the signal comes when it has done with signals, and only ends.
    assert ran.code in (0, -signal.SIGTERM), ran.err
    assert ran.result["status"] == "FINISHED"
    assert not left_behind(tmp_path)


@pytest.mark.slow
def test_a_preempted_run_leaves_with_75_and_is_ended_by_the_same_command_or_one_that_names_it(pipeline, unharmed):
    sane = unharmed(*LAYOUT)
    command = (*SMALL, *LAYOUT, preempting(7, 20, number="SIGUSR2"), "checkpoint.every_steps=6")

    def left(saved: range) -> Ran:
        ran = pipeline(*command).failed(75)
        result = ran.result
        assert (result["status"], result["checkpoint_step"] in saved) == ("PREEMPTED", True), result
        assert "The run was preempted by SIGUSR2 to chief 0. The last checkpoint is of step" in ran.err
        return ran

    # A call is two steps; what was asked after the seventh has come by the end of the eighth or of the next.
    left(range(8, 11))
    ran = left(range(20, 23))
    assert (ran.result["steps_repeated"], "resuming" in ran.out) == (0, True)
    (first,) = ran.run_folders
    # A checkpoint that was cut; from the one before it comes by the twentieth step again.
    last = sorted(first.glob("checkpoints/*.npz"))[-1]
    last.write_bytes(last.read_bytes()[:-500])
    assert "was passed over for the one before" in left(range(20, 23)).out
    # From a folder that is not used any more.
    ran = pipeline(*command, "checkpoint.folder=elsewhere").ok()
    result = ran.result
    assert (result["status"], result["resumed"], result["steps_repeated"] > 0) == ("FINISHED", 3, True)
    assert 0 < result["goodput"] < 1
    assert re.search("going on from step 2[02]", ran.out)
    assert [*ran.folder.glob(f"elsewhere/runs_{first.name}/*.json")]
    assert trained(first) == trained(sane)
    pipeline(*command, f"resume={first}").failed(2)
    longer = pipeline(*command, "train.epochs=4", f"resume={first.name}", "resume_changes=[train.epochs]").ok()
    # Those refused have no folder.
    assert longer.run_folders == [first]
    assert [*losses(first)][-1] == 48


@pytest.mark.slow
def test_term_to_all_that_a_command_has_started_or_to_one_process_leaves_with_75_as_well(tmp_path):
    with UnderWay(tmp_path) as run:
        for who in ("all", "worker"):
            run.type(*SMALL, *TWO, "train.epochs=500")
            run.more(20)
            before = run.step()
            # As Slurm does with all that it has started: the fork server, which processes outlive, the tracker too.
            there = [child.pid for child in psutil.Process(run.process.pid).children(recursive=True)]
            if who == "worker":
                run.harm(signal.SIGTERM, rank=1)
            for pid in [run.process.pid, *there] * (who == "all"):
                os.kill(pid, signal.SIGTERM)
            ran = run.ended(60).failed(75)
            assert ran.seconds < 30
            assert ran.result["checkpoint_step"] >= before
            assert f"SIGTERM to {'worker 1' if who == 'worker' else ''}" in ran.err
            assert not left_behind(tmp_path)


@pytest.mark.slow
def test_a_run_that_is_killed_outright_loses_an_epoch_at_most_and_mlflow_has_one_run_with_every_step_once(
    tmp_path, unharmed
):
    # Epochs of nine seconds, of which a checkpoint takes less than a hundredth. MLflow makes its store meanwhile.
    slowly = "train.callbacks=[{_target_: own.pausing, seconds: 1.5}]"
    command = (*SMALL[1:], *LAYOUT, slowly, "tracking=sqlite", "tracking.drain_timeout=60")
    with UnderWay(tmp_path, *command) as killed:
        killed.until(lambda: killed.step() >= 28, 90)
    # What writes to MLflow may be making the store, and ends within its own limit after that (`follow.HARD_SECONDS`).
    assert not left_behind(tmp_path, patience=120)
    ran = again(tmp_path, *command)
    assert "was killed" in ran.out or "killed at step" in ran.out
    assert ran.result["resumed"] == 1
    # A machine so busy that TensorFlow misses heartbeats starts the processes again, from the same checkpoint.
    assert {event["step"] for event in ran.events("restored")} == {24}
    assert trained(*ran.run_folders) == trained(unharmed(*LAYOUT))
    once_in_mlflow(tmp_path, ran.result, 36, 3)


@pytest.mark.slow
def test_what_a_killed_conductor_had_not_heard_is_told_by_the_checkpoint(tmp_path):
    command = (*SMALL, *ONE, "checkpoint.every_steps=4", "train.epochs=8")
    with UnderWay(tmp_path, *command) as killed:
        killed.until(lambda: killed.step("checkpoint") >= 28, 90)
    (log,) = tmp_path.glob("outputs/runs/*/events.jsonl")
    # As if it had not read its pipe for a while: an epoch of 12 steps and more.
    lines = log.read_text().splitlines(keepends=True)
    heard = [line for line in lines if (json.loads(line).get("step") or 0) <= 10]
    log.write_text("".join(heard))
    ran = again(tmp_path, *command)
    told = [event["step"] - place for event in ran.events("steps") for place in range(len(event["losses"]))]
    assert sorted(told) == list(range(1, 97))
    assert [event["epoch"] for event in ran.events("epoch")] == list(range(1, 9))
    assert "told" not in ran.events("restored")[0]


@pytest.mark.slow
def test_another_number_of_workers_and_another_strategy_go_on_with_the_same_losses(pipeline, unharmed):
    sane = unharmed(*ONE)
    every = preempting(7, 17, 27)
    ran = pipeline(*SMALL, *MIRRORED, every)
    (folder,) = ran.run_folders
    for layout in (("strategy=multi_worker", "workers=4"), ONE):
        assert ran.code == 75, ran.err
        ran = pipeline(*SMALL, *layout, every, f"resume={folder.name}")
    assert ran.code == 75
    ran = pipeline(*SMALL, *TWO, every, f"resume={folder.name}").ok()
    mine, theirs = losses(folder), losses(sane)
    assert mine.keys() == theirs.keys()
    assert [mine[step] for step in sorted(mine)] == pytest.approx([theirs[step] for step in sorted(theirs)], abs=1e-5)


@pytest.mark.slow
def test_of_three_workers_one_never_comes_back_and_two_go_on(pipeline):
    command = (
        *QUICK, "strategy=multi_worker", "workers=3", "launch.elastic=true", "model.build._target_=own.counting",
        "data.build._target_=own.gone_data", "train.epochs=2", "train.global_batch=24",
    )  # fmt: skip
    ran = pipeline(*command, "measure.steps=2", "measure.repeats=1").ok()
    assert "The throughput is that of 2 workers." in ran.result["notes"]
    assert "It did not come back: training goes on with 2 workers, on the same global batches of 24." in ran.out
    assert ran.result["workers"] == 3
    assert ran.result["workers_at_end"] == 2
    assert ran.events("epoch")[-1]["metrics"]["labels_0"] == 96
    few = pipeline(*command, "launch.min_workers=3", "launch.max_restarts=1").failed()
    assert "worker 2 was killed by SIGKILL" in few.err


@pytest.mark.slow
def test_a_training_that_diverges_stops_or_goes_back_with_half_the_rate(pipeline):
    layout, restarts = one_of(((ONE, 2), (TWO, 1)))
    command = (
        *QUICK, *layout, "model.build._target_=own.ballast", "data.build._target_=own.nan_data",
        "+data.build.value=1e18", "+data.build.place=20", "data.shuffle=false", "train.global_batch=8",
        "train.steps_per_call=1", "checkpoint.every_steps=1", "train.epochs=1",
    )  # fmt: skip
    stopped = pipeline(*command).failed()
    assert "at step 3. Try a smaller train.learning_rate, train.on_divergence=rollback" in stopped.err
    # Its writing was still under way when training failed.
    assert list(stopped.run_folders[0].glob("checkpoints/step-0000000002-*.json"))
    back = pipeline(
        *command, "train.on_divergence=rollback", f"launch.max_restarts={restarts}", "resume=never"
    ).failed()
    assert back.out.count("Training goes back to the last good checkpoint, with 0.5 of the learning rate.") == restarts
    assert back.out.count("going on from step 2") == restarts


def test_a_training_that_went_back_converges_with_half_the_rate(pipeline):
    steep = ("model.build._target_=own.steep", "data.build._target_=own.steep_data", "train.global_batch=4")
    length = ("train.steps_per_call=1", "train.epochs=2", "checkpoint.every_steps=2", "train.divergence_factor=1000")
    ran = pipeline(*QUICK, *ONE, *steep, *length, "train.on_divergence=rollback").ok()
    assert ran.result["rollbacks"] == 1
    assert ran.result["loss"] < 1e-3
    assert {event["learning_rate"] for event in ran.events("steps")} == {1.5, 0.75}


@pytest.mark.slow
def test_the_whole_job_killed_ten_times_in_a_row_ends_as_if_nothing_had_happened(pipeline, unharmed, tmp_path):
    print(f"TEST_SEED={SEED}", file=sys.stderr)
    rng = random.Random(SEED)
    command = (*ONE, "checkpoint.every_steps=3", "train.steps_per_call=1", "train.epochs=60")
    for _ in range(10):
        process = start(tmp_path, *SMALL, *command)
        # From its first line to the middle of training.
        with suppress(subprocess.TimeoutExpired):
            _, said = process.communicate(timeout=rng.uniform(0.2, 2.0))
            # It was through before it was harmed.
            assert process.returncode == 0, said
            break
        process.kill()
        process.communicate()
        assert not left_behind(tmp_path, patience=10)
    again(tmp_path, *SMALL, *command)
    folders = [log.parent for log in tmp_path.glob("outputs/runs/*/events.jsonl")]
    assert [trained(folder) for folder in folders] == [trained(unharmed(*command))] * len(folders)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(CELLS))
def test_whoever_is_harmed_at_whatever_moment_the_run_ends_with_the_same_weights(place, harmless, tmp_path):
    cell = chosen(SEED, CELLS)[place]
    print(f"TEST_SEED={SEED}: {cell}", file=sys.stderr)
    outcome = run(cell, harmless, tmp_path)
    assert "ok: " in outcome, f"TEST_SEED={SEED} {cell}: {outcome}"


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, ...]]:
    return partial(unharmed_in, tmp_path_factory.mktemp("unharmed"))


# Twelve steps an epoch, two a call.
DETACHED = (
    f"--config-dir={CONF}", "data=digits", "model=tiny", "train.epochs=40", "train.global_batch=128",
    "train.steps_per_call=2", "train.deterministic=true", "measure.steps=2", "measure.repeats=2",
    "measure.baseline=fresh", "strategy=multi_worker", "workers=2", "checkpoint.every_steps=100",
    "train.check=off",
)  # fmt: skip
# Time for what happens meanwhile; nothing is computed otherwise.
SLOWLY = ("train.callbacks=[{_target_: own.pausing, seconds: 0.15}]",)
STEPS, EPOCHS = 480, 40


@pytest.mark.waits
def test_a_detached_run_outlives_its_conductors_and_ends_as_an_unharmed_one(tmp_path):
    # Meanwhile, since the other mostly waits.
    unharmed = UnderWay(tmp_path / "sane", *DETACHED, "tracking=none")
    command, folder = (*DETACHED, *SLOWLY, "launch.detach=true"), tmp_path / "detached"
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

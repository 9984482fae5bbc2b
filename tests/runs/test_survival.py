"""A run that is preempted, killed, harmed or resumed elsewhere ends with what it would have trained."""

import functools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own
import psutil
import pytest
from conftest import QUICK, Ran, finish, left_behind, sampled, start
from kills import Unharmed, chosen, run
from run_events import events, losses, weights

# What is left to chance follows from it; a failure names it, and TEST_SEED=... has it again.
SEED = os.environ["TEST_SEED"]
# Other ones in each run of CI.
CELLS = 3
# Twelve steps an epoch; whether replicas are one device is another test's.
SMALL = (
    *QUICK, f"--config-dir={own.CONF}", "data=digits", "model=tiny", "train.epochs=3", "train.global_batch=128",
    "train.steps_per_call=2", "train.deterministic=true", "train.check=off",
)  # fmt: skip
ONE, MIRRORED, TWO = (
    ("strategy=one_device", "workers=1"),
    ("strategy=mirrored", "workers=2"),
    ("strategy=multi_worker", "workers=2"),
)


def preempting(*after: int, number: str = "SIGTERM") -> str:
    return f"train.callbacks=[{{_target_: own.Preempting, after: {list(after)}, number: {number}}}]"


@pytest.fixture(scope="module")
def unharmed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of the run to which nothing happens, made once for all tests that compare with it."""

    @functools.cache
    def ran(*arguments: str) -> Path:
        folder = tmp_path_factory.mktemp("sane")
        ended = finish(start(folder, *SMALL, *arguments), folder, time.monotonic(), 120).ok()
        return only(ended)

    return ran


def only(ran: Ran) -> Path:
    (folder,) = ran.folder.glob("outputs/runs/*")
    return folder


@pytest.mark.slow
def test_a_preempted_run_leaves_with_75_and_the_same_command_ends_it_with_the_same_weights(pipeline, unharmed):
    (layout,) = sampled((ONE, TWO), 1)
    sane = unharmed(*layout)
    command = (*SMALL, *layout, preempting(7, 30, number="SIGUSR2"))
    codes, saved = [], []
    for _ in range(3):
        ran = pipeline(*command)
        codes.append(ran.code)
        result = json.loads((only(ran) / "result.json").read_text())
        saved.append(result["checkpoint_step"])
        if ran.code == 75:
            assert result["status"] == "PREEMPTED"
            assert "The run was preempted by SIGUSR2 to chief 0. The last checkpoint is of step" in ran.err
            assert "Traceback" not in ran.err
    # A call is two steps; what was asked after the seventh has come by the end of the eighth or of the next.
    assert codes == [75, 75, 0]
    assert [8 <= saved[0] <= 10, 30 <= saved[1] <= 32] == [True] * 2
    assert "resuming" in ran.out
    assert result["status"] == "FINISHED"
    assert result["resumed"] == 2
    assert result["steps_repeated"] == 0
    assert 0 < result["goodput"] < 1
    assert weights(only(ran)) == weights(sane)
    assert losses(only(ran)) == losses(sane)


@pytest.mark.slow
def test_term_to_all_that_a_command_has_started_or_to_one_process_leaves_with_75_as_well(tmp_path):
    command = (*SMALL, *TWO, "train.epochs=500")
    for number, who in enumerate(("all", "worker")):
        process = start(tmp_path, *command)
        try:
            wait_for_step(tmp_path, 20 * (number + 1), commands=number + 1)
            pids = {event["role"]: event["pid"] for event in live(tmp_path)[-1] if event["event"] == "started"}
            before = last_step(tmp_path)
            asked = time.monotonic()
            # As Slurm does with all that it has started: the fork server, which processes outlive, the tracker too.
            there = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            for pid in [process.pid, *there] if who == "all" else [pids["worker"]]:
                os.kill(pid, signal.SIGTERM)
            ran = finish(process, tmp_path, asked, 60)
        finally:
            process.kill()
        assert ran.code == 75, ran.err
        assert ran.seconds < 30
        (result,) = ran.results
        assert result["checkpoint_step"] >= before
        assert f"SIGTERM to {'worker 1' if who == 'worker' else ''}" in ran.err
        assert not left_behind(tmp_path)


def live(folder: Path) -> list[list[dict[str, Any]]]:
    """The events of each command of the only run, as far as they are written."""
    found: list[list[dict[str, Any]]] = [[]]
    for event in events(folder):
        found += [[]] if event["event"] == "resumed" else []
        found[-1].append(event)
    return found


def last_step(folder: Path, kind: str = "steps") -> int:
    return max((event["step"] for event in live(folder)[-1] if event["event"] == kind), default=0)


def wait_for_step(folder: Path, step: int, kind: str = "steps", commands: int = 1) -> None:
    until = time.monotonic() + 90
    while len(live(folder)) < commands or last_step(folder, kind) < step:
        assert time.monotonic() < until
        time.sleep(0.02)


def killed_at(step: int, folder: Path, command: tuple[str, ...], kind: str = "steps") -> None:
    """Runs a command until it has made a step, or a checkpoint of it, and kills it outright."""
    process = start(folder, *command)
    try:
        wait_for_step(folder, step, kind)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_conductor_killed_outright_is_resumed_and_mlflow_has_one_run_with_every_step_once(tmp_path):
    command = (*SMALL[1:], *ONE, "checkpoint.every_steps=4", "tracking=sqlite", "train.epochs=8")
    command = tuple(each for each in command if each != "tracking=none")
    killed_at(20, tmp_path, command, "checkpoint")
    # What writes to MLflow may be making the store, and ends within its own limit after that (`follow.HARD_SECONDS`).
    assert not left_behind(tmp_path, patience=120)
    ran = finish(start(tmp_path, *command), tmp_path, time.monotonic(), 120).ok()
    assert "was killed" in ran.out or "killed at step" in ran.out
    if "tracking_note" in ran.result:
        # On a machine that is busy with other things, the tracker may have run out of time; the rest is sent later.
        subprocess.run([sys.executable, "-m", "pipeline", "sync"], cwd=tmp_path, check=True, capture_output=True)
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
    (run_,) = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert run_.info.status == "FINISHED"
    points = client.get_metric_history(run_.info.run_id, "train/loss")
    assert [point.step for point in sorted(points, key=lambda each: each.step)] == list(range(1, 97))
    assert len(client.get_metric_history(run_.info.run_id, "val/loss")) == 8
    assert ran.result["resumed"] == 1


@pytest.mark.slow
def test_by_default_a_run_that_is_killed_outright_loses_no_more_than_the_epoch_under_way(tmp_path, unharmed):
    (layout,) = sampled((ONE, MIRRORED, TWO), 1)
    sane = unharmed(*layout)
    # Epochs of nine seconds, of which a checkpoint takes less than a hundredth.
    command = (*SMALL, *layout, "train.callbacks=[{_target_: own.Pausing, seconds: 1.5}]")
    killed_at(28, tmp_path, command)
    ran = finish(start(tmp_path, *command), tmp_path, time.monotonic(), 120).ok()
    # A machine so busy that TensorFlow misses heartbeats starts the processes again, from the same checkpoint.
    assert {event["step"] for event in ran.events("restored")} == {24}
    assert weights(only(ran)) == weights(sane)
    assert losses(only(ran)) == losses(sane)


@pytest.mark.slow
def test_what_a_killed_conductor_had_not_heard_is_told_by_the_checkpoint(tmp_path):
    command = (*SMALL[1:], *ONE, "checkpoint.every_steps=4", "train.epochs=8", "train.steps_per_call=2")
    killed_at(28, tmp_path, command, "checkpoint")
    (log,) = tmp_path.glob("outputs/runs/*/events.jsonl")
    # As if it had not read its pipe for a while: an epoch of 12 steps and more.
    lines = log.read_text().splitlines(keepends=True)
    heard = [line for line in lines if (json.loads(line).get("step") or 0) <= 10]
    log.write_text("".join(heard))
    ran = finish(start(tmp_path, *command), tmp_path, time.monotonic(), 120).ok()
    told = [event["step"] - place for event in ran.events("steps") for place in range(len(event["losses"]))]
    assert sorted(told) == list(range(1, 97))
    assert [event["epoch"] for event in ran.events("epoch")] == list(range(1, 9))
    assert "told" not in ran.events("restored")[0]


@pytest.mark.slow
def test_a_killed_process_is_started_again_from_the_last_checkpoint(pipeline, unharmed):
    sane = unharmed(*MIRRORED)
    ran = pipeline(
        *SMALL, *MIRRORED, preempting(21, number="SIGKILL"), "checkpoint.every_steps=4", "launch.max_restarts=1"
    ).failed()
    # It dies at that step each time: once more than it is started again.
    assert "All processes are started again, 1 of 1 times (launch.max_restarts)" in ran.out
    assert "chief 0 was killed by SIGKILL" in ran.err
    assert ran.results[0]["restarts"] == 1
    assert losses(only(ran)) == {step: loss for step, loss in losses(sane).items() if step <= max(losses(only(ran)))}


@pytest.mark.slow
def test_a_checkpoint_that_was_cut_leaves_the_one_before_and_that_is_said(pipeline, unharmed):
    sane = unharmed(*ONE)
    command = (*SMALL, *ONE, preempting(20), "checkpoint.every_steps=6")
    ran = pipeline(*command)
    assert ran.code == 75, ran.err
    last = sorted(only(ran).glob("checkpoints/*.npz"))[-1]
    last.write_bytes(last.read_bytes()[:-500])
    ran = pipeline(*command)
    # It comes by the twentieth step again, where it is preempted again.
    assert ran.code == 75
    assert "was passed over for the one before" in ran.out
    # From a folder that is not used any more.
    ran = pipeline(*command, "checkpoint.folder=elsewhere").ok()
    assert weights(only(ran)) == weights(sane)
    assert ran.results[0]["steps_repeated"] > 0
    assert "going on from step 20" in ran.out or "going on from step 22" in ran.out
    assert list(ran.folder.glob(f"elsewhere/runs_{only(ran).name}/*.json"))


@pytest.mark.slow
def test_a_finished_run_is_not_resumed_and_a_changed_one_is_refused_or_named(pipeline):
    command = (*SMALL, *ONE, preempting(5), "checkpoint.every_epochs=1")
    left = pipeline(*command)
    assert left.code == 75
    first = only(left)
    changed = pipeline(*command, "train.learning_rate=0.01", f"resume={first.name}").failed(2)
    assert f"Expected the config of outputs/runs/{first.name}" in changed.err
    assert "received another train.learning_rate. Try the same, or resume_changes=[train.learning_rate]" in changed.err
    pipeline(*command, "train.learning_rate=0.01", f"resume={first.name}", "resume_changes=[train.learning_rate]").ok()
    pipeline(*command, f"resume={first}").failed(2)
    again = pipeline(*SMALL, *ONE, "train.steps=3", "train.epochs=null")
    assert again.code == 0
    once_more = pipeline(*SMALL, *ONE, "train.steps=3", "train.epochs=null")
    assert once_more.code == 0
    assert "resuming" not in once_more.out
    assert len(list(first.parent.iterdir())) == 3  # those refused have none
    nonsense = pipeline(*SMALL, *ONE, "resume=nonsense").failed(2)
    assert (
        "Expected resume to be auto, never, or a run's folder, name or id in MLflow, received nonsense" in nonsense.err
    )


@pytest.mark.slow
def test_another_number_of_workers_and_another_strategy_go_on_with_the_same_losses(pipeline, unharmed):
    sane = unharmed(*ONE)
    every = preempting(7, 17, 27)
    ran = pipeline(*SMALL, *MIRRORED, every)
    folder = only(ran)
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
    ran = pipeline(
        *QUICK, "strategy=multi_worker", "workers=3", "launch.elastic=true", "model.build._target_=own.counting",
        "data.build._target_=own.gone_data", "train.epochs=2", "train.global_batch=24",
        "measure.steps=2", "measure.repeats=1",
    ).ok()  # fmt: skip
    assert "The throughput is that of 2 workers." in ran.result["notes"]
    assert "It did not come back: training goes on with 2 workers, on the same global batches of 24." in ran.out
    assert ran.result["workers"] == 3
    assert ran.result["workers_at_end"] == 2
    assert ran.events("epoch")[-1]["metrics"]["labels_0"] == 96
    few = pipeline(
        *QUICK, "strategy=multi_worker", "workers=3", "launch.elastic=true", "model.build._target_=own.counting",
        "data.build._target_=own.gone_data", "train.epochs=2", "train.global_batch=24", "launch.min_workers=3",
        "launch.max_restarts=1",
    ).failed()  # fmt: skip
    assert "worker 2 was killed by SIGKILL" in few.err


@pytest.mark.parametrize(
    ("layout", "restarts"), [(ONE, 2), pytest.param(TWO, 1, marks=pytest.mark.slow)], ids=["one", "two"]
)
def test_a_training_that_diverges_stops_or_goes_back_with_half_the_rate(pipeline, layout, restarts):
    command = (
        *QUICK, *layout, "model.build._target_=own.ballast", "data.build._target_=own.exploding_data",
        "data.shuffle=false", "train.global_batch=8", "train.steps_per_call=1", "checkpoint.every_steps=1",
        "train.epochs=1",
    )  # fmt: skip
    stopped = pipeline(*command).failed()
    assert "at step 3. Try a smaller train.learning_rate, train.on_divergence=rollback" in stopped.err
    # Its writing was still under way when training failed.
    assert list(only(stopped).glob("checkpoints/step-0000000002-*.json"))
    back = pipeline(
        *command, "train.on_divergence=rollback", f"launch.max_restarts={restarts}", "resume=never"
    ).failed()
    assert back.out.count("Training goes back to the last good checkpoint, with 0.5 of the learning rate.") == restarts
    assert back.out.count("going on from step 2") == restarts


def test_a_training_that_went_back_converges_with_half_the_rate(pipeline):
    ran = pipeline(
        *QUICK, *ONE, "model.build._target_=own.steep", "data.build._target_=own.steep_data", "train.global_batch=4",
        "train.steps_per_call=1", "train.epochs=2", "checkpoint.every_steps=2", "train.on_divergence=rollback",
        "train.divergence_factor=1000",
    ).ok()  # fmt: skip
    assert ran.result["rollbacks"] == 1
    assert ran.result["loss"] < 1e-3
    assert {event["learning_rate"] for event in ran.events("steps")} == {1.5, 0.75}


@pytest.mark.slow
def test_the_whole_job_killed_twenty_times_in_a_row_ends_as_if_nothing_had_happened(pipeline, unharmed, tmp_path):
    print(f"TEST_SEED={SEED}", file=sys.stderr)
    rng = random.Random(SEED)
    arguments = ("checkpoint.every_steps=3", "train.steps_per_call=1", "train.epochs=60")
    sane = unharmed(*ONE, *arguments)
    kills = 0
    while kills < 20:
        process = start(tmp_path, *SMALL, *ONE, *arguments)
        # From its first line to the middle of training.
        began, patience = time.monotonic(), rng.uniform(0.2, 2.0)
        while time.monotonic() < began + patience and process.poll() is None:
            time.sleep(0.01)
        if process.poll() is not None:
            # It was through before it was harmed.
            _, said = process.communicate()
            assert process.returncode == 0, said
            break
        process.kill()
        process.communicate()
        kills += 1
        assert not left_behind(tmp_path, patience=10)
    finish(start(tmp_path, *SMALL, *ONE, *arguments), tmp_path, time.monotonic(), 120).ok()
    folders = [log.parent for log in tmp_path.glob("outputs/runs/*/events.jsonl")]
    finished = [folder for folder in folders if weights(folder)]
    assert weights(finished[0]) == weights(sane)
    assert losses(finished[0]) == losses(sane)
    assert len(folders) == len(finished)


@pytest.mark.slow
@pytest.mark.parametrize("place", range(CELLS))
def test_whoever_is_harmed_at_whatever_moment_the_run_ends_with_the_same_weights(place, harmless, tmp_path):
    cell = chosen(SEED, CELLS)[place]
    print(f"TEST_SEED={SEED}: {cell}", file=sys.stderr)
    outcome = run(cell, harmless, tmp_path)
    assert "ok: " in outcome, f"TEST_SEED={SEED} {cell}: {outcome}"


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Unharmed:
    return Unharmed(tmp_path_factory.mktemp("unharmed"))

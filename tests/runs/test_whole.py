"""Whole runs as a person types them, to result.json and MLflow; and those whose processes die, stop or hang."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import (
    CONF,
    LONG,
    QUICK,
    Ran,
    UnderWay,
    efficiency_of,
    left_behind,
    logged,
    losses,
    one_of,
    sampled,
    start,
    weights,
)
from mlflow import MlflowClient
from mlflow.entities import Run

from pipeline.analyze.measure import INPUT_BOUND


def tracked(folder: Path) -> tuple[MlflowClient, list[Run]]:
    client = MlflowClient(f"sqlite:///{folder / 'outputs/mlflow.db'}")
    experiment = client.get_experiment_by_name("pipeline")
    runs = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    # A sweep's report is a run as well.
    return client, [run for run in runs if run.data.tags.get("kind") != "report"]


def test_a_run_leaves_a_result_a_model_and_an_mlflow_run(pipeline):
    # On a busy machine MLflow makes its store for longer than the default waits.
    patient = "tracking.drain_timeout=60"
    ran: Ran = pipeline("data=digits", "model=mlp", "measure.steps=40", "train.epochs=4", patient).ok()
    result = ran.result
    assert (result["status"], result["error"], result["strategy"]) == ("FINISHED", None, "mirrored")
    assert result["workers"] == result["replicas"] == len(os.sched_getaffinity(0))
    for low, middle, high in (
        ("examples_per_second_low", "examples_per_second", "examples_per_second_high"),
        ("speedup_low", "speedup", "speedup_high"),
        ("step_ms_p50", "step_ms_p95", "step_ms_p99"),
    ):
        assert result[low] <= result[middle] <= result[high]
    assert result["efficiency"] == efficiency_of(result)
    assert result["val_metrics"]["accuracy"] > 0.8
    (folder,) = ran.run_folders
    names = {path.name for path in folder.iterdir()}
    assert names >= {"plan.json", "events.jsonl", "result.json", "model.keras", "point-0.log", "hydra"}
    assert f"{result['speedup']:.2f}x" in ran.out
    # How long steps wait for their input on a busy machine is the machine's affair.
    assert 0 <= result["input_wait"] < 1
    assert result["input_bound"] is (result["input_wait"] >= INPUT_BOUND) is ("input-bound" in ran.out)
    assert "input wait" in ran.out

    client, (run,) = tracked(ran.folder)
    assert (run.info.run_id, run.info.status) == (result["mlflow_run_id"], "FINISHED")
    assert (run.data.params["strategy"], run.data.params["workers"]) == ("mirrored", str(result["workers"]))
    for name in ("examples_per_second", "speedup", "efficiency", "step/ms_p50"):
        value = result[name.replace("/", "_")]
        assert run.data.metrics.get(name) == (None if value is None else pytest.approx(value, rel=1e-3))
    # The first repeats of all, then their median; each loss once.
    artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert artifacts >= {"plan.json", "result.json", "model.keras", "hydra"}
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert len(losses) == sum(len(event["losses"]) for event in ran.events("steps"))
    assert run.inputs.dataset_inputs[0].dataset.name == "digits"
    assert any(name.startswith("system/host0/") for name in run.data.metrics) or result["seconds_training"] < 5


@pytest.mark.slow
def test_a_sweep_runs_every_point_that_makes_sense_and_compares_them_and_one_mlflow_run_stands_for_it(pipeline, asked):
    shared = "data=digits model=mlp measure.repeats=2 train.epochs=1"
    typed = f"strategy=one_device,multi_worker,parameter_server workers=1,2 {shared}"
    ran: Ran = pipeline("-m", *typed.split()).ok()
    assert sorted(result["status"] for result in ran.results) == ["FINISHED"] * 5 + ["REFUSED"]
    assert "Point 1 refused: Expected one point of one_device, which trains on one device" in ran.err
    # One number a point, a line for each as it ends; of the plans, what they share once; one device, measured once.
    begun = r"^\d\d:\d\d:\d\d -- point (\d): strategy=\w+ workers=\d \(\d of 6 done"
    ended = r"^\d\d:\d\d:\d\d point (\d): FINISHED, .* examples/s .*, \d\.\d\dx"
    assert re.findall(begun, ran.out, re.M) == re.findall(ended, ran.out, re.M) == [*"02345"]
    assert (ran.out.count("\nlength "), ran.out.count("measured in turn, 2 repeats")) == (1, 1)
    assert ran.out.count("reused from outputs/sweeps/") >= 1
    client, runs = tracked(ran.folder)
    assert [run.info.status for run in runs] == ["FINISHED"] * 5
    assert len({run.data.tags["sweep"] for run in runs}) == 1
    assert not any("mlflow.parentRunId" in run.data.tags for run in runs)
    for run in runs:
        assert {"examples_per_second", "speedup"} <= set(run.data.metrics)
        assert {"strategy", "workers"} <= set(run.data.params)
    for racing in (run for run in runs if run.data.params["strategy"] == "parameter_server"):
        assert {"staleness/mean", "staleness/max", "staleness/updates", "survival/restarts"} <= set(racing.data.metrics)
        assert racing.data.tags["asynchronous"] == "true"
    # One device was measured once, and its folder is named by those that share it.
    assert len({result["baseline_source"] for result in ran.results if result["status"] == "FINISHED"}) == 2
    assert all(strategy in ran.out.rsplit("-- ", 1)[1] for strategy in ("one_device", "multi_worker", "asynchronous"))
    # However often its report is written.
    (sweep,) = ran.folder.glob("outputs/sweeps/*")
    for _ in range(2):
        told = asked("report", f"sweep={sweep.name}", timeout=200).ok()
        assert told.err == ""
        assert f"report: {(sweep / 'report.html').relative_to(ran.folder)}" in told.out
    (report,) = client.search_runs(
        [runs[0].info.experiment_id], f"tags.sweep = '{sweep.name}' and tags.kind = 'report'"
    )
    assert report.info.status == "FINISHED"
    assert report.data.tags["verdict"] in " ".join(told.out.split())
    # Its points have the numbers, which it would double; its page says how to run them again.
    assert report.data.metrics == {}
    assert f"`python -m pipeline -m {typed}`" in report.data.tags["mlflow.note.content"]
    assert re.match(rf"python -m pipeline strategy=\w+ workers=\d {shared}", runs[0].data.tags["command"])
    there = {each.path for folder in ("", "figures") for each in client.list_artifacts(report.info.run_id, folder)}
    assert {"report.html", "points.csv", "figures/throughput.svg", "figures/learning.png"} <= there


@pytest.mark.slow
def test_a_baseline_is_reused_by_another_command_only_where_that_is_asked_for(pipeline):
    common = ("workers=1", "data=digits", "model=mlp", "measure.repeats=2", "train.steps=2", "tracking=none")
    for asked in ((), ("measure.baseline=auto",), ("measure.baseline=auto", "train.replica_batch=16"), ()):
        ran = pipeline(*common, *asked).ok()
    first, auto, other, again = ran.results
    assert auto["baseline_source"].startswith("reused from")
    assert auto["baseline_examples_per_second"] == first["baseline_examples_per_second"]
    assert other["baseline_source"] == again["baseline_source"] == "measured in this run"


ENDS = (
    (1, signal.SIGKILL, "FAILED", 1), (None, signal.SIGINT, "KILLED", 130), (None, signal.SIGKILL, "KILLED", -9),
)  # fmt: skip


@pytest.mark.slow
def test_however_a_run_ends_mlflow_knows(tmp_path):
    harms = sampled(ENDS, 2)
    with UnderWay(tmp_path) as run:
        for count, (rank, number, _, code) in enumerate(harms, 1):
            run.type(
                "strategy=multi_worker", "workers=2", "measure.steps=0", "train.epochs=500", "data=digits",
                f"--config-dir={CONF}", "model=tiny", "launch.max_restarts=0", "train.check=off", "resume=never",
            )  # fmt: skip
            run.until(lambda count=count: len(run.runs) == count and logged(run.runs[-1], "epoch"), 120)
            run.until((run.runs[-1] / "tracking.json").exists, 60)
            run.harm(number, rank)
            assert run.ended(90).code == code
            assert not left_behind(tmp_path, patience=60)
    # On a machine that is busy with other things, the tracker may have run out of time; the rest is sent later.
    subprocess.run([sys.executable, "-m", "pipeline", "sync"], cwd=tmp_path, check=True, capture_output=True)
    _, runs = tracked(tmp_path)
    assert [each.info.status for each in runs] == [status for _, _, status, _ in harms]
    assert all(each.data.metrics["train/loss"] >= 0 for each in runs)


@pytest.mark.slow
def test_a_language_model_learns_on_two_devices_what_it_learns_on_one(pipeline):
    small = ("model.build.blocks=1", "model.build.width=16", "model.build.heads=2", "data.build.length=32")
    batch = ("train.global_batch=6", "train.steps=3", "train.deterministic=true", "measure.scaling=strong")
    both = ("model=transformer", "data=text", "strategy=one_device,mirrored", "hardware=2cpu")
    ran: Ran = pipeline("-m", *both, *small, *batch, *QUICK).ok()
    one, two = sorted(ran.results, key=lambda result: result["replicas"])
    assert (one["replicas"], two["replicas"]) == (1, 2)
    for kind in ("metrics", "val_metrics"):
        assert set(one[kind]) >= {"accuracy", "perplexity"}
        assert one[kind] == pytest.approx(two[kind], rel=1e-5)
    assert 1 < two["val_metrics"]["perplexity"] < 300


SMALL = (*QUICK, "data.build._target_=steps.points", "train.epochs=3", "train.global_batch=8")
UNLABELLED = "+data.build.labelled=false"


@pytest.mark.slow
def test_a_model_with_a_test_step_comes_to_the_same_under_every_strategy(pipeline):
    model = ("model.build._target_=steps.classifier", "train.steps_per_call=1", "train.deterministic=true")
    every = ("strategy=one_device,mirrored,central_storage,multi_worker", "workers=null", "hardware=2cpu")
    ran: Ran = pipeline("-m", *SMALL, *model, *every).ok()
    ended = {folder.name.split("_", 1)[1]: logged(folder, "epoch")[-1] for folder in ran.run_folders}
    assert sorted(ended) == ["central_storage", "mirrored", "multi_worker", "one_device"]
    one = ended["one_device"]
    assert list(one["metrics"]) == list(one["val_metrics"]) == ["tracked", "count", "accuracy"]
    for epoch in ended.values():
        assert [epoch["loss"], epoch["val_loss"]] == pytest.approx([one["loss"], one["val_loss"]], rel=1e-5)
        for name in ("metrics", "val_metrics"):
            assert epoch[name] == pytest.approx(one[name], rel=1e-5)


GAN = ("steps.gan", UNLABELLED, "strategy=mirrored")
WAYS = ("steps.classifier", "strategy=mirrored")
REFUSED = {
    ("steps.gan", UNLABELLED, "strategy=parameter_server"): "since asynchronous workers make Keras's step between the "
    "updates of others, received GAN, which has one. Try strategy=mirrored or strategy=multi_worker.",
    (*GAN, "train.learning_rate=0.1"): "Expected GAN, whose compile is its own, to be compiled in model.build, "
    "received train.learning_rate. Try arguments of model.build",
    (*GAN, "checkpoint.keep_best=val_loss"): "received one that cannot: GAN has no test_step of its own, and Keras's "
    "cannot evaluate it. Try a test_step, or checkpoint.keep_best=d_loss.",
    (*WAYS, "+model.build.way=under_a_condition"): "applies gradients, and uses results of metrics, "
    "outside of tf.cond and tf.while_loop, inside of which replicas cannot add them up",
    (*WAYS, "+model.build.way=without_optimizer"): "Expected a train_step that applies gradients by a Keras optimizer, "
    "received Classifier's, which applies none.",
    (*WAYS, "+model.build.way=raising"): ". Expected a train_step that takes a batch of the data, received this from "
    "that of Classifier. Try it on one batch with Keras alone.",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("arguments", sampled(tuple(REFUSED), 2), ids=lambda arguments: arguments[-1])
def test_a_step_that_cannot_be_made_is_refused_in_one_sentence(pipeline, arguments):
    model, *others = arguments
    ran: Ran = pipeline(*SMALL, f"model.build._target_={model}", *others, "workers=2").failed()
    assert REFUSED[arguments] in ran.result["error"]
    assert ran.result["error"].startswith("KeyError: 'nowhere' (" if "raising" in arguments[-1] else "Expected ")


LOOKING = ("model.build._target_=looking.model", "data.build._target_=looking.numbers")
CHECKED = (*LOOKING, "measure.steps=0", "measure.baseline=none", "workers=2", "train.replica_batch=8", "train.epochs=2")


def trained_by(run):
    return losses(run), weights(run)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker"])
def test_training_is_the_same_to_the_last_bit_with_the_check_and_without(pipeline, strategy):
    layer = "+model.build.layer=running mean"
    ran = pipeline("-m", "tracking=none", *CHECKED, f"strategy={strategy}", "train.deterministic=true", layer,
                   "model.build.dropout=0.5", "train.check=true,off", timeout=400).ok()  # fmt: skip
    compared, plain = sorted(ran.run_folders, key=lambda folder: int(folder.name.split("_")[0]))
    assert trained_by(compared) == trained_by(plain)
    with_check, without = (json.loads((folder / "result.json").read_text()) for folder in (compared, plain))
    assert "check" not in without
    assert without["notes"] == [note for note in with_check["notes"] if "one device" not in note]
    assert with_check["check"]["outcome"] == "different"
    assert [difference["what"] for difference in with_check["check"]["differences"]] == ["state"]
    assert "warning: on a small batch 2 replicas differ from one device in state of looking/mean by" in ran.out


@pytest.mark.slow
def test_a_repeat_is_compared_by_what_the_first_run_found_if_that_was_equal_and_another_run_by_itself(pipeline):
    keys = ("strategy=mirrored", "train.deterministic=true", "sweep.repeats=2", "train.seed=0,1", "tracking=none")
    ran = pipeline("-m", *CHECKED, *keys, timeout=400).ok()
    checks = {folder.name: json.loads((folder / "result.json").read_text())["check"] for folder in ran.run_folders}
    assert {check["outcome"] for check in checks.values()} == {"equal"}
    assert not [note for result in ran.results for note in result["notes"] if "one device" in note]
    assert {name: check["seconds"] > 0.0 for name, check in checks.items()} == {
        "0_mirrored": True, "1_mirrored": True, "0_mirrored_2": False, "1_mirrored_2": False,
    }  # fmt: skip
    first, again = (trained_by(folder) for folder in sorted(ran.run_folders) if folder.name.startswith("0_"))
    assert first == again


@pytest.mark.slow
def test_a_loss_over_pairs_is_told_once_and_in_the_result_and_mlflow_and_strict_refuses_it(pipeline):
    pairs = (*CHECKED, "strategy=mirrored", "+model.build.loss=pairs")
    ran = pipeline(*pairs).ok()
    (note,) = [note for note in ran.result["notes"] if "train.gather=true" in note]
    assert "received the loss pairs, which depends on the batch as a whole" in note
    assert ran.out.count("warning: Expected losses that are means") == 1
    assert "on a small batch" not in (ran.out + str(ran.result["notes"])).lower()
    assert "the loss is no mean over examples, such as one over pairs of them" in ran.result["check"]["cause"]
    with sqlite3.connect(ran.folder / "outputs" / "mlflow.db") as store:
        tags = dict(store.execute("select key, value from tags"))
        metrics = dict(store.execute("select key, value from latest_metrics"))
    assert tags["check"] == "different"
    assert note in tags["mlflow.note.content"]
    assert metrics["one_device/largest_difference"] == pytest.approx(
        max(difference["relative"] for difference in ran.result["check"]["differences"]), rel=1e-3
    )
    strict = pipeline(*pairs, "tracking=none", "train.check=strict").failed()
    assert "for train.check=strict, received others: " in strict.err
    (refused,) = [result for result in strict.results if result["status"] == "FAILED"]
    assert refused["error"].endswith("what it is meant to see.")
    assert refused["epochs"] is None


TWO = ("strategy=multi_worker", "workers=2")
OWN = (*QUICK, f"--config-dir={CONF}", "model=tiny", "data=numbered")
KILLED, SILENT, MEMORY = "was killed by SIGKILL", "gave no sign of life", "strategy.collective=shared_memory"
SOON = "launch.heartbeat_timeout=10"
TWO_HOSTS = ("workers=4", "hardware=2x2cpu", "strategy.devices_per_process=1", MEMORY)
HARMS = {
    "killed chief": (0, signal.SIGKILL, f"chief 0 {KILLED}", MEMORY),
    "killed worker": (1, signal.SIGKILL, f"worker 1 {KILLED}", MEMORY),
    "killed, TensorFlow's collective": (1, signal.SIGKILL, f"worker 1 {KILLED}", "strategy.collective=tensorflow"),
    "killed, JAX": (1, signal.SIGKILL, f"worker 1 {KILLED}", "backend=jax"),
    # Of two hosts, the process that adds to the other host's sums, and the one that is handed its host's.
    "killed, adds to other hosts'": (2, signal.SIGKILL, f"worker 2 {KILLED}", *TWO_HOSTS),
    "killed, handed sums": (3, signal.SIGKILL, f"worker 3 {KILLED}", *TWO_HOSTS),
    "stopped, adds to other hosts'": (2, signal.SIGSTOP, f"worker 2 {SILENT}", *TWO_HOSTS, SOON),
    "stopped, handed sums": (3, signal.SIGSTOP, f"worker 3 {SILENT}", *TWO_HOSTS, SOON),
    "stopped": (1, signal.SIGSTOP, f"worker 1 {SILENT}", SOON),
    "stopped before it joins": (1, signal.SIGSTOP, "worker 1", "launch.startup_timeout=12"),
    # JAX aborts the process that waits for the stopped one.
    "stopped chief, JAX": (0, signal.SIGSTOP, f"chief 0 {SILENT}", "backend=jax"),
    "stopped worker, JAX": (1, signal.SIGSTOP, f"worker 1 {SILENT}", "backend=jax"),
}
QUICK_HARMS = ("killed worker", "stopped")
SLOW_HARMS = sampled([harm for harm in HARMS if harm not in QUICK_HARMS], 3)


@pytest.mark.parametrize("harm", [*QUICK_HARMS, *(pytest.param(harm, marks=pytest.mark.slow) for harm in SLOW_HARMS)])
def test_a_process_that_is_killed_or_stopped_is_named_and_the_run_fails(tmp_path, harm):
    rank, number, words, *arguments = HARMS[harm]
    with UnderWay(tmp_path, *QUICK, *TWO, *LONG, "launch.max_restarts=0", *arguments) as run:
        run.until_told("started" if "joins" in harm else "steps")
        run.until_told("started", 2)
        run.harm(number, rank)
        ran = run.ended(90).failed()
    assert words in ran.err
    assert ran.result["status"] == "FAILED"
    assert words in ran.result["error"]
    assert "The last lines of" in ran.out or number == signal.SIGSTOP
    assert ran.seconds < 60
    assert not left_behind(tmp_path)


def test_a_process_that_hangs_without_a_word_is_named_and_its_stack_kept(pipeline):
    stuck = ("data.build._target_=own.stuck_data", "launch.progress_timeout=6", "launch.max_restarts=0")
    ran = pipeline(*OWN, *TWO, *stuck).failed()
    assert "worker 1 made no progress for 6 s" in ran.err
    (log,) = ran.folder.glob("outputs/[rs]*/**/point-1.log")
    assert "stuck_data" in log.read_text()


@pytest.mark.parametrize(("moment", "number", "code"), [
    ("steps", signal.SIGINT, 130),
    pytest.param("steps", signal.SIGHUP, 129, marks=pytest.mark.slow),
    # While processes start; again while they are ended.
    ("run", signal.SIGINT, 130),
])  # fmt: skip
def test_ctrl_c_and_a_lost_terminal_end_everything_within_ten_seconds(tmp_path, moment, number, code):
    trains = moment == "steps"
    with UnderWay(tmp_path, *QUICK, *TWO, *LONG, cold=not trains) as run:
        run.until_told(moment)
        run.harm(number)
        if not trains:
            run.harm(number)
        ran = run.ended(30).failed(code)
        (last,) = run.told()[-1:]
    # Ten are meant; on a machine that is busy with other things it may be as many more.
    assert ran.seconds < 20
    assert (ran.result["status"], last["event"]) == ("KILLED", "ended")
    assert not left_behind(tmp_path)
    if number == signal.SIGINT:
        # It says where it is, what is there of it, and what goes on with it.
        (folder,) = ran.run_folders
        has = "no checkpoint yet: the same command goes on from its beginning"
        if trains:
            assert "Ctrl-C: leaving with a checkpoint, if that takes seconds. Ctrl-C again ends it at once." in ran.out
            has = f"a checkpoint of step {ran.result['checkpoint_step']:,}: the same command goes on from there"
        assert f"pipeline: Ended by SIGINT. {folder.relative_to(tmp_path)} has {has}.\n" in ran.err


def test_ctrl_c_before_there_is_anything_to_end_ends_it_without_a_word(tmp_path):
    # It says what it has imported.
    process = start(tmp_path, *QUICK, cold=True, PYTHONPROFILEIMPORTTIME="1")
    assert process.stderr
    while "hydra" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (-signal.SIGINT, "")
    assert not [line for line in err.splitlines() if not line.startswith("import time:")]


@pytest.mark.parametrize(
    "moment", [*(pytest.param(one, marks=pytest.mark.slow) for one in sampled(("run", "started"), 1)), "steps"]
)
def test_a_conductor_killed_outright_leaves_no_process_not_even_a_stopped_one(tmp_path, moment):
    with UnderWay(tmp_path, *QUICK, *TWO, *LONG, cold=True) as run:
        run.until_told(moment)
        if moment == "steps":
            run.harm(signal.SIGSTOP, 1)
            time.sleep(4)
        run.process.kill()
        run.process.wait()
        assert not left_behind(tmp_path, patience=10)
        run.process.communicate()


def test_a_loss_that_is_not_a_number_stops_the_run_with_the_step_and_arrays_with_such_are_not_trained_on(pipeline):
    data = ("data.build._target_=own.nan_data", "+data.build.value=3e38,nan", "data.shuffle=false")
    ran = pipeline("-m", *OWN, *data, "strategy=mirrored", "workers=2", "train.replica_batch=8").failed()
    assert "Expected a finite loss, received nan at step 3" in ran.results[0]["error"]
    why = "Expected examples that can be trained on, received 1 that cannot: example 40 has NaN or infinity in x."
    assert why in ran.results[1]["error"]
    assert not logged(ran.run_folders[1], "steps")


@pytest.mark.slow
def test_what_an_operation_fails_with_is_said_in_its_own_words(pipeline):
    strategy = one_of(("mirrored", "parameter_server"))
    odd = ("model.build._target_=own.odd", "+model.build.kind=infinite")
    ran = pipeline(*OWN, f"strategy={strategy}", "workers=2", *odd).failed()
    assert "InvalidArgumentError: bad numbers : Tensor had Inf" in ran.err


def test_an_error_of_ones_own_function_is_said_with_ones_own_frames_and_a_sweep_goes_on(pipeline):
    two = ("model.build._target_=own.raises,own.tiny", "train.steps=2", "workers=1")
    ran = pipeline("-m", *OWN, *two).failed()
    assert [result["status"] for result in ran.results] == ["FAILED", "FINISHED"]
    assert "the moon is not full" in ran.results[0]["error"]
    frames = r'RuntimeError: the moon is not full.*\n *File ".*in raises\n *raise RuntimeError\(".*"\)\n.*point-0\.log'
    assert re.search(frames, ran.out), ran.out
    assert "Traceback" not in ran.out
    assert ran.err.splitlines()[-1].startswith("pipeline: RuntimeError: the moon is not full (")
    assert "pipeline/worker/process.py" in (ran.run_folders[0] / "point-0.log").read_text()


@pytest.mark.slow
def test_a_busy_loop_once_training_steps_is_ended_after_twice_the_progress_timeout(pipeline):
    spins = ("workers=1", "train.epochs=9", "train.callbacks=[{_target_: own.Spinning}]", "launch.progress_timeout=3")
    ran = pipeline(*OWN, *spins, "launch.max_restarts=0", timeout=25).failed()
    assert "chief 0 computed for 6 s without a step; where it stands is in its log." in ran.err


@pytest.mark.slow
@pytest.mark.parametrize(("restarts", "code"), [(1, 0), (0, 1)])
def test_a_fork_server_killed_while_it_starts_processes_is_started_again_so_often(tmp_path, restarts, code):
    few = ("model=mlp", "data=digits", "train.steps=2", f"launch.max_restarts={restarts}")
    with UnderWay(tmp_path, *QUICK, *TWO, *few, cold=True) as run:
        run.until_told("run")
        # By now the conductor waits for the first process, while the server still imports.
        time.sleep(0.5)
        for each in psutil.Process(run.process.pid).children():
            if "multiprocessing.forkserver" in " ".join(each.cmdline()):
                each.kill()
        ran = run.ended(60).failed(code)
        warned = any("fork server" in event["text"] for event in run.told("warning"))
    assert (ran.result["status"], warned) == (("FAILED", False) if code else ("FINISHED", True))
    assert ("Expected a fork server that starts processes, received one that was killed" in ran.err) == bool(code)
    assert not left_behind(tmp_path)

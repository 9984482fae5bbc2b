"""A process that dies, stops, hangs or never joins ends the run soon, by name, with nothing left behind."""

import re
import signal
import time

import psutil
import pytest
from conftest import CONF, LONG, QUICK, UnderWay, left_behind, logged, sampled, start

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
# Others in each run of CI, besides.
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
    (strategy,) = sampled(("mirrored", "parameter_server"), 1)
    ran = pipeline(*OWN, f"strategy={strategy}", "workers=2", "model.build._target_=own.infinite").failed()
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

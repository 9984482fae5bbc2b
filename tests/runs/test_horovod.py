"""`strategy.collective=horovod`: what is refused, and whole runs where `make horovod` has built it."""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CONF, LONG, ROOT, Ran, UnderWay, launched, left_behind, losses, weights

PYTHON = ROOT / ".venv-horovod" / "bin" / "python"
TWO = ("strategy=multi_worker", "strategy.collective=horovod", "workers=2", "hardware=2cpu")
SMALL = ("model=mlp", "data=digits", "train.steps=20", "measure.steps=0", "tracking=none")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
WRAPPED = ("model.build._target_=mistaken.wrapped", "data=digits", "train.steps=4", "measure.steps=0", "tracking=none")
REFUSED = (
    "Expected an optimizer without Horovod's DistributedOptimizer, which averages nothing under Keras 3, received Adam "
    "in it. Try the optimizer that it wraps, with strategy=multi_worker strategy.collective=horovod."
)


def of_horovod(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test as one of Horovod itself, which is skipped where that is not built."""
    ready = (PYTHON.parents[1] / ".ready").exists()
    built = pytest.mark.skipif(not ready, reason="Horovod is not built: make horovod")
    return built(pytest.mark.horovod(pytest.mark.slow(test)))


def typed(folder: Path, *arguments: str, launcher: tuple[str, ...] = (), timeout: float = 300.0) -> Ran:
    """A command of the Python that has Horovod."""
    ran = launched(folder, *launcher, str(PYTHON), "-m", "pipeline", *arguments, timeout=timeout)
    assert not left_behind(folder)
    return ran


def test_where_it_is_not_built_choosing_it_says_what_to_type(asked):
    ran = asked(*TWO, *SMALL).failed(2)
    assert "Expected Horovod, built for this TensorFlow, for strategy.collective=horovod, received a Python" in ran.err
    assert "`.venv-horovod/bin/python -m pipeline`" in ran.err
    assert ("make horovod" in ran.err) == (not PYTHON.exists())
    assert not ran.run_folders


def test_make_says_what_it_lacks_to_build_it(tmp_path):
    for program in ("make", "bash", "sh", "c++", "python3"):
        (tmp_path / program).symlink_to(shutil.which(program) or sys.executable)
    # What is set up is taken as it is.
    command = ["make", "-o", ".venv/.ready", f"HOROVOD={tmp_path / 'built'}", "horovod"]
    ran = subprocess.run(command, cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2
    assert "Expected cmake, which compiles Horovod, received none. On Debian: apt-get install cmake" in ran.stdout
    assert not (tmp_path / "built").exists()


@pytest.mark.slow
def test_its_wrapper_of_an_optimizer_and_its_callbacks_are_refused(pipeline):
    ran = pipeline("strategy=multi_worker", "workers=2", "hardware=2cpu", *WRAPPED).failed()
    assert REFUSED in ran.err
    ran = pipeline("strategy=one_device", *SMALL, "train.callbacks=[{_target_: mistaken.broadcasts}]").failed()
    assert "Expected no callback of Horovod's among train.callbacks" in ran.err
    assert "received BroadcastGlobalVariablesCallback. Try leaving it out." in ran.err


@of_horovod
def test_its_real_wrapper_is_refused_too(tmp_path):
    assert REFUSED in typed(tmp_path, *TWO, *WRAPPED, "+model.build.standing_in=false").failed().err


@of_horovod
@pytest.mark.parametrize(
    ("workers", "model"), [(2, ("model=cnn", "model.build.dropout=0", "train.optimizer=sgd")), (4, ("model=mlp",))]
)
def test_two_and_four_workers_train_to_the_losses_of_one_device_with_equal_weights(tmp_path, workers, model):
    batch = ("train.global_batch=64", "train.deterministic=true", "hardware=4cpu", "train.compare_weights_every=5")
    one = typed(tmp_path / "one", *SMALL, *model, *batch, "strategy=one_device", "workers=1")
    ran = typed(tmp_path / "all", *TWO, *SMALL, *model, *batch, f"workers={workers}").ok()
    assert losses(*ran.run_folders) == pytest.approx(losses(*one.run_folders), rel=0, abs=1e-5)
    assert ran.result["val_loss"] == pytest.approx(one.result["val_loss"], abs=1e-5)
    assert len(weights(*ran.run_folders)) == 1
    assert (ran.result["collective"], ran.result["check"]["outcome"]) == ("horovod", "equal")
    assert "multi_worker/horovod on 4cpu" in ran.out


@of_horovod
def test_rows_of_embeddings_and_statistics_of_batches_are_added_as_tensorflow_adds_them(tmp_path):
    for name, arguments in {
        "rows": ("model=recommender", "data=clicks", "data.build.train_examples=2000"),
        "statistics": ("--config-dir={CONF}", "model=normalised", "data=digits"),
    }.items():
        told = []
        for collective in ("tensorflow", "horovod"):
            ran = typed(
                tmp_path / f"{name}-{collective}", *TWO, *SMALL, *(one.format(CONF=CONF) for one in arguments),
                f"strategy.collective={collective}", "train.compare_weights_every=5",
            ).ok()  # fmt: skip
            told.append((*losses(*ran.run_folders).values(), *ran.result["val_metrics"].values()))
            assert len(weights(*ran.run_folders)) == 1
        assert told[0] == pytest.approx(told[1], rel=0, abs=1e-5)


@of_horovod
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named_and_ends_the_run_within_a_minute(tmp_path, rank):
    long = (*TWO, *LONG, "measure.steps=0", "tracking=none", "launch.max_restarts=0")
    with UnderWay(tmp_path, *long, python=PYTHON) as run:
        run.until_told("steps")
        run.harm(signal.SIGKILL, rank)
        ran = run.ended(60).failed()
    assert f"{['chief 0', 'worker 1'][rank]} was killed by SIGKILL" in ran.err
    assert not left_behind(tmp_path)


@of_horovod
def test_a_run_that_is_killed_goes_on_from_its_checkpoint_to_the_weights_of_one_that_was_not(tmp_path):
    often = ("checkpoint.every_steps=5", "train.steps_per_call=5", "train.deterministic=true")
    dies = f"train.callbacks=[{{_target_: dying.Dies, at: 3, marker: {tmp_path / 'died'}}}]"
    killed = typed(tmp_path / "killed", *TWO, *SMALL, *often, dies).ok()
    assert killed.result["restarts"] == 1
    whole = typed(tmp_path / "whole", *TWO, *SMALL, *often, dies)
    assert whole.result["restarts"] == 0
    assert weights(*killed.run_folders) == weights(*whole.run_folders)
    assert killed.result["val_loss"] == whole.result["val_loss"]


@of_horovod
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed: apt-get install openmpi-bin")
def test_places_of_an_mpi_job_are_joined_in_the_same_way(tmp_path):
    same = ("train.deterministic=true", "train.global_batch=64")
    here = typed(tmp_path / "here", *TWO, *SMALL, *same)
    placed = ("cluster=mpi", *(word for word in TWO if "hardware" not in word))
    there = typed(tmp_path / "there", *placed, *SMALL, *same, launcher=(*MPIRUN, "-n", "2")).ok()
    assert there.result["hosts"] == 2
    assert weights(*there.run_folders) == weights(*here.run_folders)

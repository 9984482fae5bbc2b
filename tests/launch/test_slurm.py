"""`cluster=slurm`, on a real Slurm of four pretend nodes, and `cluster=mpi`."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pretend_slurm
import pytest
from conftest import QUICK, Ran, UnderWay, environment, final_losses, launched, left_behind, once_in_mlflow, until
from pretend_slurm import Slurm

from pipeline.config.schema import ClusterConfig
from pipeline.launch import LaunchError, options_of
from pipeline.launch.mpi import OPEN_MPI, SLURM, Meeting, MpiCluster, Place, place_of
from pipeline.launch.slurm import SlurmCluster, queue, within
from pipeline.launch.slurm.queue import Allocation, allocation_of, counts_of, hosts_of
from pipeline.launch.slurm.script import SlurmOptions, batch_script, check, clean
from pipeline.record.log import read_json

SMALL = (*QUICK, "model=mlp", "data=digits", "train.learning_rate=0.01")
TWO = ("strategy=multi_worker", "workers=2", "train.deterministic=true", *SMALL)
# Slow enough to be harmed on the way: each step waits a while.
SLOW = "train.callbacks=[{_target_: own.pausing, seconds: 0.2}]"
LONG = (*TWO, "train.steps=400", "train.steps_per_call=1", "checkpoint.every_steps=10", "train.save=false")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    if why := pretend_slurm.missing():
        pytest.skip(f"no Slurm can be started here: {why}")
    with pretend_slurm.pretend_slurm() as made:
        yield made


class Typed(UnderWay):
    """A command from outside of any job or from inside of one."""

    def __init__(self, slurm: Slurm, folder: Path) -> None:
        super().__init__(folder, **slurm.environ)
        self.slurm = slurm

    def submit(self, *arguments: str) -> None:
        """Has Slurm run the command on the first of two nodes."""
        python = shlex.join([sys.executable, "-m", "pipeline", "cluster=slurm", *arguments])
        options = ["--nodes=2", "--ntasks-per-node=1", "--requeue", "--open-mode=append", f"--wrap={python}"]
        options += [f"--chdir={self.folder}", f"--output={self.folder}/said"]
        self.slurm.ask("sbatch", *options, PYTHONPATH=environment()["PYTHONPATH"])

    def saved(self, checkpoints: int = 2) -> None:
        """Waits until it has trained on."""
        before = len(self.told("checkpoint"))
        self.until(lambda: len(self.told("checkpoint")) >= before + checkpoints)

    def job(self) -> str:
        (job,) = self.slurm.jobs("%i")
        return job


@pytest.fixture
def typed(slurm: Slurm, tmp_path: Path) -> Iterator[Typed]:
    made = Typed(slurm, tmp_path / "there")
    yield made
    if made.process is not None and made.process.poll() is None:
        made.kill()
        # What a command that is killed leaves trains on for a while.
        slurm.ask("scancel", "--user=root")
        until(lambda: not slurm.jobs(), 60.0)
    assert not left_behind(made.folder, 30)
    assert not slurm.jobs()


@pytest.mark.waits
def test_points_are_jobs_side_by_side_and_after_a_kill_none_of_them_is_run_twice(typed, tmp_path):
    sweep = ("-m", "workers=2", "sweep.name=three", "train.steps=30", "checkpoint.every_steps=10", *SMALL)
    every = (*sweep, "strategy=mirrored,multi_worker,parameter_server", "sweep.parallel=2")
    typed.type("cluster=slurm", *every)
    # The jobs of two points fit on one node: their ports are not the same.
    typed.until(lambda: len(typed.told("started")) > 1)
    jobs = set(typed.slurm.jobs("%i"))
    # The third is run in the job of the first that has finished.
    typed.until(lambda: len(typed.told("run")) == 3)
    assert (len(jobs), set(typed.slurm.jobs("%i")) <= jobs) == (2, True)
    typed.kill()
    left = [json.loads(path.read_text()) for path in typed.folder.glob("outputs/sweeps/three/*/result.json")]
    kept = {result["strategy"] + str(result["workers"]) for result in left if result["status"] == "FINISHED"}
    typed.type("cluster=slurm", *every)
    ran = typed.ended()
    assert (ran.code, ran.err) == (0, ""), ran.out + ran.err
    assert f"{len(kept)} of 3 points have finished and are kept." in ran.out or not kept
    points = json.loads((typed.folder / "outputs/sweeps/three/sweep.json").read_text())["points"]
    assert [point["status"] for point in points] == ["FINISHED"] * 3
    # One that ended as the command was killed has no time.
    assert sum(point["seconds"] or 0 for point in points) > ran.seconds
    assert len(typed.told("run")) == 3
    # A point that was under way when the command was killed had its job ended, and none is left now.
    assert not typed.slurm.jobs()
    alone = UnderWay(tmp_path / "here", *sweep, "strategy=mirrored,multi_worker").ended(240).ok()
    # Workers that race come to other losses each time.
    in_step = [result for result in ran.results if result["strategy"] != "parameter_server"]
    for one, other in zip(in_step, alone.results, strict=True):
        assert (one["strategy"], one["workers"]) == (other["strategy"], other["workers"])
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
        assert one["val_loss"] == pytest.approx(other["val_loss"], rel=1e-4)
    told = [line for line in ran.out.splitlines() if re.match(r"[\d:]{8} point \d: FINISHED", line)]
    assert len(told) == 3 - len(kept)


@pytest.mark.waits
def test_a_time_limit_a_kill_and_a_node_that_goes_down_leave_the_weights_of_an_unharmed_run(typed, tmp_path):
    # Meanwhile, since the other mostly waits.
    alone = UnderWay(tmp_path / "here", *LONG)
    limits = ("cluster.options.time=5", "cluster.options.signal_seconds=30", "launch.preempt_timeout=8")
    logged = [argument for argument in LONG if argument != "tracking=none"]
    typed.type("cluster=slurm", *logged, SLOW, "hardware.hosts=2", *limits)
    typed.saved()
    # Its driver killed outright, and another in its place.
    typed.kill()
    (run,) = typed.folder.glob("outputs/runs/*")
    typed.type("attach", run.name)
    typed.saved()
    assert not typed.told("restarted")
    # Slurm looks at limits twice a minute, and sends USR2 half a minute before this one.
    ends = datetime.now() + timedelta(seconds=32)
    typed.slurm.ask("scontrol", "update", f"JobId={typed.job()}", f"EndTime={ends:%Y-%m-%dT%H:%M:%S}")
    typed.until(lambda: typed.told("restarted"))
    # What is left of its time is now its limit.
    typed.slurm.ask("scontrol", "update", f"JobId={typed.job()}", "TimeLimit=30")
    typed.saved()
    typed.harm(signal.SIGKILL, 1)
    typed.until(lambda: len(typed.told("restarted")) == 2)
    typed.saved()
    typed.slurm.node_down("n2")
    try:
        typed.until(lambda: len(typed.told("restarted")) == 3)
        ran = typed.ended().ok()
    finally:
        typed.slurm.node_up("n2")
    unharmed = alone.ended(240).ok()
    ours, theirs = (told[-1]["weights"][0] for told in (typed.told("finished"), unharmed.events("finished")))
    assert ours == theirs
    texts = typed.restarted()
    assert "The run was asked to leave by SIGUSR2" in texts[0]
    assert "is in the queue again" in texts[0]
    assert "was killed by SIGKILL" in texts[1]
    nodes = [hosts_of(found) for found in re.findall(r"is running on (n\S+)\.\s", ran.out)]
    assert len(nodes) > 1, ran.out
    assert "n2" not in nodes[-1]
    assert ran.result["steps_repeated"] <= 100
    once_in_mlflow(typed.folder, ran.result, 400, len({event["epoch"] for event in typed.told("epoch")}))


@pytest.mark.waits
def test_a_batch_script_of_ones_own_is_requeued_and_scancel_ends_a_run_as_killed(typed, slurm, tmp_path):
    short = (*TWO, "train.steps=60", "train.steps_per_call=1", "checkpoint.every_steps=10")
    alone = UnderWay(tmp_path / "here", *short)
    inside = Typed(slurm, tmp_path / "inside")
    inside.submit(*short, SLOW)
    job = inside.job()
    until(lambda: len(inside.told("checkpoint")) >= 2)
    # To its steps, as before the time is up.
    slurm.ask("scancel", "--signal=USR2", job)
    until(lambda: not slurm.jobs())
    said = (inside.folder / "said").read_text()
    (result,) = [json.loads(path.read_text()) for path in inside.folder.glob("outputs/runs/*/result.json")]
    assert result["status"] == "FINISHED", said
    assert f"Slurm's job {job} is in the queue again" in said
    assert "(n1, n2)" in said
    assert result["resumed"] == 1
    assert result["steps_repeated"] == 0
    assert final_losses(result) == final_losses(alone.ended(240).ok().result)
    # A sweep in turn, all of whose points have that job.
    typed.type("cluster=slurm", "-m", "train.seed=0,1", *LONG, SLOW)
    typed.saved()
    slurm.ask("scancel", typed.job())
    ended = typed.ended()
    assert ended.result["status"] == "KILLED"
    assert "was cancelled (scancel)" in ended.err
    assert ended.code == 143
    assert ended.result["checkpoint_step"]


def test_the_script_is_printed_in_full_where_there_is_no_slurm(asked, tmp_path):
    ran: Ran = asked(
        "mode=plan", "cluster=slurm", "strategy=multi_worker", "workers=4", "hardware.hosts=2", "data=digits",
        "cluster.options.partition=gpu", "cluster.options.account=me", "cluster.options.time=1:00:00",
        "cluster.options.cpus_per_task=8", "cluster.options.constraint=a100", "cluster.options.modules=[cuda/12]",
        "cluster.options.setup=[source env/bin/activate]", "cluster.options.extra=['--qos=high']", "tracking=none",
        PATH="/nowhere",
    ).ok()  # fmt: skip
    options = {line.removeprefix("#SBATCH ") for line in ran.out.splitlines()}
    assert options >= {
        "--partition=gpu", "--account=me", "--time=1:00:00", "--nodes=2", "--cpus-per-task=16", "--constraint=a100",
        "--qos=high", "--requeue", "--open-mode=append", "--signal=USR2@60", "module load cuda/12",
        "source env/bin/activate",
    }  # fmt: skip
    assert "2 hosts" in ran.out
    assert not list(tmp_path.iterdir())


def test_the_script_is_one_that_bash_reads_and_repeats_what_srun_does_not_inherit(tmp_path):
    options = slurm_options(nodes=2, tasks=4, cpus_per_task=3, gpus_per_task=1, setup=["echo 'a b'"])
    text = batch_script(options, ["python", "-m", "x", "a b"], tmp_path / "it's here", "name")
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False).returncode == 0
    (srun,) = [line for line in text.splitlines() if line.strip().startswith("srun")]
    for part in ("--nodes=2", "--ntasks=2", "--cpus-per-task=6", "--gres=gpu:2", "--kill-on-bad-exit=1", "'a b'"):
        assert part in srun
    assert "--signal=B:" not in text
    assert "unset SLURM_CPU_BIND " in text
    assert "no_proxy=" in text
    assert clean({"SLURM_CPU_BIND": "x", "A": "b"}) == {"A": "b"}


@pytest.mark.parametrize(("away", "given_up"), [(0.5, False), (700.0, True)])
def test_agents_that_a_job_has_lost_are_waited_for_however_long_it_has_run(away, given_up):
    cluster = SlurmCluster(ClusterConfig("slurm", options={"timeout": 600}), {})
    state, since = queue.JobState("RUNNING"), time.monotonic() - 3600.0
    cluster._job = SimpleNamespace(job="7", since=since, look=lambda: state)
    cluster.agents.known["n1"] = SimpleNamespace(channel=SimpleNamespace(away=away))
    with pytest.raises(LaunchError, match="received nothing from 1 of them") if given_up else nullcontext():
        cluster.check(1)
    cluster.agents.known.clear()
    cluster.close(0)


def slurm_options(**options: object) -> SlurmOptions:
    return options_of(ClusterConfig("slurm", options=options), SlurmOptions)


@pytest.mark.parametrize(("options", "words"), [
    ({"nodes": 2, "tasks": 3}, "Expected tasks that divide evenly over 2 nodes, received 3."),
    ({"extra": ["--nodes=3"]}, "received --nodes=3. Try cluster.options.nodes"),
])  # fmt: skip
def test_options_that_no_job_can_have_are_refused_in_words(options, words):
    with pytest.raises(LaunchError, match=words):
        check(slurm_options(**options))


@pytest.mark.parametrize("said", ["42", "42;first", "wait ...\\nSubmitted batch job 42 on cluster first", "", "thanks"])
def test_a_submitted_jobs_number_is_read_or_what_was_said_is_told(tmp_path, said):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\nprintf '{said}'\n")
    sbatch.chmod(0o755)
    commands = queue.Slurm({"PATH": f"{tmp_path}:/usr/bin:/bin"})
    if "42" in said:
        assert commands.submit(tmp_path) == "42"
    else:
        with pytest.raises(LaunchError, match=rf"Expected .* a job's number, received {said or 'nothing'}\."):
            commands.submit(tmp_path)


@pytest.mark.parametrize("text", ["n[1-3", "n]", "n[1-a]", "n[3-1]", "n[]", "n[0-99999999999]", "[[1]]", "4(y2)"])
def test_what_is_no_host_list_or_count_is_refused_in_words(text):
    with pytest.raises(LaunchError, match=r"Expected (a host list|counts) of Slurm's as"):
        counts_of(text) if "(" in text else hosts_of(text)


def test_an_environment_says_what_an_allocation_has_and_where_a_process_is():
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_CPUS_PER_NODE": "4,2"}
    batch = allocation_of(job | {"SLURMD_NODENAME": "n1", "SLURM_RESTART_COUNT": "2", "SLURM_GPUS_ON_NODE": "3"})
    assert batch == Allocation("7", ("n1", "n2"), 2, 3, batch=True, restarts=2)
    assert allocation_of({"SLURM_JOB_ID": "7"}) is None
    options = within(SlurmOptions(nodes=1, tasks=8), batch)
    assert (options.nodes, options.tasks_per_node, options.cpus_per_task) == (2, 1, 2)
    step = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "0"}
    assert place_of(SLURM, job | step) == Place("7", 1, 4, 0)
    assert place_of(OPEN_MPI, job | step) is None
    with pytest.raises(LaunchError, match="Expected SLURM_PROCID below SLURM_STEP_NUM_TASKS, received 4 and 4"):
        place_of(SLURM, job | step | {"SLURM_PROCID": "4"})
    place = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "7"}
    place |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert place_of(OPEN_MPI, place) == Place("7", 1, 4, 1, 2)
    with pytest.raises(LaunchError, match="Expected OMPI_COMM_WORLD_LOCAL_RANK below OMPI_COMM_WORLD_LOCAL_SIZE, rec"):
        place_of(OPEN_MPI, place | {"OMPI_COMM_WORLD_LOCAL_RANK": "7"})


FEW = ("model=mlp", "data=digits", "measure.steps=0", "tracking=none", "train.deterministic=true", "train.steps=30")
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None, reason="mpirun is not installed: apt-get install openmpi-bin"
)


def by_mpirun(folder: Path, processes: int, *arguments: str) -> Ran:
    return launched(folder, *MPIRUN, "-n", f"{processes}", sys.executable, "-m", "pipeline", "cluster=mpi", *arguments)


@needs_mpirun
@pytest.mark.waits
def test_two_and_four_processes_train_to_the_losses_of_one_host(tmp_path):
    both = ("-m", "strategy=multi_worker", "workers=2,4", "sweep.name=both", *FEW)
    alone = UnderWay(tmp_path / "here", *both).ended(240).ok()
    # In the first point two of the places have nothing to do.
    ran = by_mpirun(tmp_path / "there", 4, *both).ok()
    assert [final_losses(result) for result in ran.results] == [final_losses(result) for result in alone.results]
    assert [result["hosts"] for result in ran.results] == [2, 4]
    assert (ran.run_folders[1] / "point-3.log").exists()
    assert not list((tmp_path / "there/outputs/mpi").iterdir())
    assert not left_behind(tmp_path / "there")


@needs_mpirun
def test_what_is_refused_ends_all_of_them_in_words(tmp_path):
    ran = by_mpirun(tmp_path, 2, "strategy=mirrored", "workers=9999", *FEW)
    assert ran.code != 0
    assert "Traceback" not in ran.err
    assert "Expected" in ran.err
    assert not left_behind(tmp_path)


def test_without_a_launcher_it_is_refused_in_words_and_planned_all_the_same(asked):
    refused = asked("cluster=mpi", "strategy=multi_worker", "workers=2", *FEW).failed(2)
    assert "Expected a process that an MPI launcher has started" in refused.err
    assert "Try `mpirun --bind-to none -n 2 python -m pipeline cluster=mpi ...`, or cluster=local." in refused.err
    planned = asked("mode=plan", "cluster=mpi", "strategy=multi_worker", "workers=2", *FEW).ok()
    assert "mpirun --bind-to none -n " in planned.out


def test_where_they_meet_is_for_nobody_else(tmp_path):
    options = {"folder": f"{tmp_path}/mpi"}
    place = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "7"}
    made = MpiCluster(ClusterConfig("mpi", options=options), place)
    made.begin("127.0.0.1:80")
    (path,) = (tmp_path / "mpi").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_json(Meeting, path) == Meeting("127.0.0.1:80", made.token.decode())
    made.end()
    assert not os.listdir(path.parent)
    made.close(0)

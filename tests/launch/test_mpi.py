"""`cluster=mpi`: the same command in each place of an MPI job."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from conftest import Ran, launched, left_behind
from under_way import UnderWay, losses

from pipeline.config.schema import ClusterConfig
from pipeline.launch.mpi import Meeting, MpiCluster
from pipeline.record.log import read_json

SMALL = ("model=mlp", "data=digits", "measure.steps=0", "tracking=none", "train.deterministic=true", "train.steps=30")
TWO = ("strategy=multi_worker", "workers=2", *SMALL)
MPIRUN = ("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")


def typed(folder: Path, processes: int, *arguments: str) -> Ran:
    return launched(folder, *MPIRUN, "-n", f"{processes}", sys.executable, "-m", "pipeline", "cluster=mpi", *arguments)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed: apt-get install openmpi-bin")
def test_two_and_four_processes_train_to_the_losses_of_one_host(tmp_path):
    both = ("-m", "strategy=multi_worker", "workers=2,4", "sweep.name=both", *SMALL)
    alone = UnderWay(tmp_path / "here", *both).ended(240).ok()
    # In the first point two of the places have nothing to do.
    ran = typed(tmp_path / "there", 4, *both).ok()
    assert [losses(result) for result in ran.results] == [losses(result) for result in alone.results]
    assert [result["hosts"] for result in ran.results] == [2, 4]
    assert (ran.run_folders[1] / "point-3.log").exists()
    assert not list((tmp_path / "there/outputs/mpi").iterdir())
    assert not left_behind(tmp_path / "there")


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed: apt-get install openmpi-bin")
def test_what_is_refused_ends_all_of_them_in_words(tmp_path):
    ran = typed(tmp_path, 2, "strategy=mirrored", "workers=9999", *SMALL)
    assert ran.code != 0
    assert "Traceback" not in ran.err
    assert "Expected" in ran.err
    assert not left_behind(tmp_path)


def test_without_a_launcher_it_is_refused_in_words_and_planned_all_the_same(asked):
    refused: Ran = asked("cluster=mpi", *TWO).failed(2)
    assert "Expected a process that an MPI launcher has started" in refused.err
    assert "Try `mpirun --bind-to none -n 2 python -m pipeline cluster=mpi ...`, or cluster=local." in refused.err
    planned: Ran = asked("mode=plan", "cluster=mpi", *TWO).ok()
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

"""A throughput that was measured while other programs used the cores says so."""

import os
import subprocess
import sys

import pytest
from conftest import Ran

from pipeline.analyze import measure
from pipeline.analyze.measure import BUSY
from pipeline.record.events import CoreTime, Measured

TIMED = ("tracking=none", "measure.baseline=none", "measure.repeats=2", "measure.steps=400", "train.steps=900",
         "model=mlp", "train.check=off")  # fmt: skip
BUSY_MACHINE = "the throughput is that of a busy machine"


def told(machine: str, cores: list[int], busy: float, own: float, seconds: float = 2.0) -> Measured:
    return Measured(0, 64.0, seconds, core_time=CoreTime(machine, cores, busy, own))


@pytest.mark.parametrize(
    ("processes", "share"),
    [
        ([told("a", [0, 1], 3.0, 3.0)], 0.0),
        ([told("a", [0, 1], 4.0, 2.0)], 0.5),
        # Cores of their own.
        ([told("a", [0], 2.0, 1.0), told("a", [1], 1.0, 1.0)], 0.25),
        # The same numbers on another machine.
        ([told("a", [0, 1], 4.0, 2.0), told("b", [0, 1], 2.0, 2.0)], 0.25),
        # Clocks of ten milliseconds.
        ([told("a", [0], 1.99, 2.0)], 0.0),
        ([told("a", [0], 2.0, 1.0), Measured(0, 64.0, 2.0)], None),
    ],
)
def test_the_share_is_of_the_cores_that_these_processes_have(processes, share):
    assert measure.other_work(dict(enumerate(processes))) == share


@pytest.fixture
def busy_cores():
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    yield
    for process in spinning:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["mirrored", "multi_worker"])
def test_other_programs_that_compute_meanwhile_are_told(pipeline, busy_cores, strategy):
    ran: Ran = pipeline(*TIMED, f"strategy={strategy}", "workers=2")
    assert ran.code == 0, ran.err
    assert ran.result["other_work"] >= BUSY
    assert any(BUSY_MACHINE in note for note in ran.result["notes"])
    assert BUSY_MACHINE in " ".join(ran.out.split())


@pytest.mark.slow
def test_where_processes_are_not_timed_that_work_nothing_is_told(pipeline):
    ran: Ran = pipeline(*TIMED, "strategy=parameter_server", "workers=2", "measure.steps=20", "train.steps=60")
    assert ran.code == 0, ran.err
    assert "other_work" not in ran.result

"""How long steps wait for their input, what input and model could do alone, and what other programs did meanwhile."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf
from conftest import Ran, sampled

from pipeline.analyze import measure
from pipeline.analyze.measure import BUSY
from pipeline.record.events import CoreTime, Measured, TimedCall

TIMED = ("tracking=none", "measure.baseline=none", "measure.repeats=2", "measure.steps=8", "train.steps_per_call=4",
         "train.check=off")  # fmt: skip
# Others in each run of CI.
STRATEGIES = sampled(("one_device", "mirrored", "multi_worker", "parameter_server"), 2)
SLEEPY = ("data.build._target_=own.sleepy", "data.num_classes=4", "data.shuffle=false", "model.build._target_=own.tiny")


def test_a_process_is_not_said_to_wait_for_longer_than_it_was_timed():
    told = Measured(0, examples=8, seconds=0.5, calls=[TimedCall(1, 0.5)], input_seconds=[0.5001])
    assert measure.slowest({0: told}).input_shares == (1.0,)


@pytest.mark.slow
@pytest.mark.timed
def test_a_slow_input_is_found_under_every_kind_of_strategy(pipeline):
    ran: Ran = pipeline("-m", f"strategy={','.join(STRATEGIES)}", "workers=2", *TIMED, *SLEEPY, "train.steps=20").ok()
    who = {
        "one_device": {"chief 0"}, "mirrored": {"chief 0"}, "multi_worker": {"chief 0", "worker 1"},
        "parameter_server": {"worker 1", "worker 2"},
    }  # fmt: skip
    assert [result["strategy"] for result in ran.results] == STRATEGIES
    for result in ran.results:
        assert result["input_wait"] > 0.5, result["strategy"]
        assert result["input_bound"] is True
        assert set(result["input_wait_by_worker"]) == who[result["strategy"]]
        assert any("Input-bound: " in note and "data.profile=true" in note for note in result["notes"])
    assert ran.out.rsplit("-- ", 1)[1].count("input-bound") >= len(STRATEGIES)


# Its speed is not that of a machine that others may be at.
UNHURRIED = ("data.build._target_=own.through", "data.num_classes=4", "model.build._target_=own.unhurried",
             "train.replica_batch=32", "train.steps=24", "resume=never")  # fmt: skip


@pytest.mark.slow
@pytest.mark.timed
def test_a_slow_map_that_sleeps_or_computes_is_found_and_what_there_is_to_gain_is_nearly_gained(pipeline):
    fast = (*TIMED, *UNHURRIED, "strategy=one_device")
    assert pipeline(*fast).code == 0
    (function,) = sampled(("asleep", "busy"), 1)
    slow: Ran = pipeline(*fast, f"+data.build.function={function}", "data.profile=true").ok()
    result = slow.results[-1]
    found = result["profile"]
    assert found["bound"] == "input"
    assert found["input_examples_per_second"] < found["model_examples_per_second"]
    assert result["examples_per_second"] < found["ceiling_examples_per_second"]
    assert slow.out.count("input-bound: ") == 2
    # Before and after, since other work on the machine may halve its speed.
    made = [each for each in pipeline(*fast).results if each["profile"] is None]
    low = min(each["examples_per_second_low"] for each in made)
    high = max(each["examples_per_second_high"] for each in made)
    assert 0.6 * low < found["ceiling_examples_per_second"] < 1.4 * high


@pytest.mark.slow
def test_workers_that_race_are_profiled_too_and_nothing_is_told_of_other_work_where_none_of_theirs_is_timed(pipeline):
    racing = ("strategy=parameter_server", "workers=2", "train.steps=20", "data.profile=true")
    result = pipeline(*TIMED, *SLEEPY, *racing).ok().result
    assert (result["profile"]["bound"], "other_work" in result) == ("input", False)


def test_shuffles_and_files_of_a_data_set_are_left_out_of_what_is_timed_where_that_is_possible(tmp_path):
    from pipeline.worker.tensorflow import profile

    def double(x):
        return x * 2

    made = tf.data.Dataset.range(6).shuffle(6).cache(str(tmp_path / "kept")).map(double).prefetch(1)
    plain = profile.plain(made)
    assert [int(each) for each in plain] == [0, 2, 4, 6, 8, 10]
    assert list(tmp_path.iterdir()) == []
    filtered = tf.data.Dataset.range(6).shuffle(6).filter(lambda x: x > 2)
    assert profile.plain(filtered) is filtered


BESIDE_OTHERS = ("tracking=none", "measure.baseline=none", "measure.repeats=2", "measure.steps=400", "train.steps=900",
         "model=mlp", "train.check=off")  # fmt: skip
BUSY_MACHINE = "the throughput is that of a busy machine"


def told(machine: str, cores: list[int], busy: float, own: float, seconds: float = 2.0) -> Measured:
    return Measured(0, 64.0, seconds, core_time=CoreTime(machine, cores, busy, own))


@pytest.mark.parametrize(("processes", "share"), [
    ([told("a", [0, 1], 3.0, 3.0)], 0.0),
    ([told("a", [0, 1], 4.0, 2.0)], 0.5),
    # Cores of their own.
    ([told("a", [0], 2.0, 1.0), told("a", [1], 1.0, 1.0)], 0.25),
    # The same numbers on another machine.
    ([told("a", [0, 1], 4.0, 2.0), told("b", [0, 1], 2.0, 2.0)], 0.25),
    # Clocks of ten milliseconds.
    ([told("a", [0], 1.99, 2.0)], 0.0),
    ([told("a", [0], 2.0, 1.0), Measured(0, 64.0, 2.0)], None),
])  # fmt: skip
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
    ran: Ran = pipeline(*BESIDE_OTHERS, f"strategy={strategy}", "workers=2").ok()
    assert ran.result["other_work"] >= BUSY
    assert any(BUSY_MACHINE in note for note in ran.result["notes"])
    assert BUSY_MACHINE in " ".join(ran.out.split())

"""How long steps wait for their input, and what the input and the model could do alone."""

import pytest
from conftest import Ran

from pipeline import measure
from pipeline.measure import Repeat

TIMED = ("tracking=none", "measure.baseline=none", "measure.repeats=2", "measure.steps=8", "train.steps_per_call=4")
STRATEGIES = ("one_device", "mirrored", "multi_worker", "parameter_server")
SLEEPY = ("data.build._target_=own.sleepy", "data.num_classes=4", "data.shuffle=false", "model.build._target_=own.tiny")


def test_the_longest_wait_of_each_repeat_counts_and_their_median_is_told():
    repeats = [Repeat(1.0, 1.0, (1.0,), shares) for shares in ((0.1, 0.3), (0.2, 0.1), (0.6, 0.4))]
    assert measure.input_wait(repeats) == (0.3, [0.2, 0.3])
    assert measure.input_wait([]) == measure.input_wait([Repeat(1.0, 1.0, (1.0,))]) == (None, [])


def test_a_process_is_not_said_to_wait_for_longer_than_it_was_timed():
    told = {"examples": 8, "seconds": 0.5, "calls": [[1, 0.5]], "input_seconds": [0.5001]}
    assert measure.slowest({0: told}).input_shares == (1.0,)


@pytest.mark.slow
def test_a_slow_input_is_found_under_every_kind_of_strategy(pipeline):
    ran: Ran = pipeline("-m", f"strategy={','.join(STRATEGIES)}", "workers=2", *TIMED, *SLEEPY, "train.steps=40")
    assert ran.code == 0, ran.err
    who = {
        "one_device": {"chief 0"}, "mirrored": {"chief 0"}, "multi_worker": {"chief 0", "worker 1"},
        "parameter_server": {"worker 1", "worker 2"},
    }  # fmt: skip
    assert [result["strategy"] for result in ran.results] == list(STRATEGIES)
    for result in ran.results:
        assert result["input_wait"] > 0.5, result["strategy"]
        assert result["input_bound"] is True
        assert set(result["input_wait_by_worker"]) == who[result["strategy"]]
        assert any("Input-bound: " in note and "data.profile=true" in note for note in result["notes"])
    assert ran.out.rsplit("-- ", 1)[1].count("input-bound") >= len(STRATEGIES)


def test_an_input_in_memory_is_not_waited_for(pipeline):
    ran: Ran = pipeline(*TIMED, "strategy=one_device", "train.steps=16")
    assert ran.code == 0, ran.err
    assert ran.result["input_wait"] < measure.INPUT_BOUND
    assert ran.result["input_bound"] is False
    assert "input wait" in ran.out
    assert "input-bound" not in ran.out

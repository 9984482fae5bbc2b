"""Throughput, quantiles, intervals and speedups from timings that are given."""

import itertools
import random

import pytest

from pipeline.analyze import measure
from pipeline.analyze.measure import Repeat
from pipeline.plan.plan import REPEAT_SECONDS
from pipeline.record.events import Measured, Profiling, TimedCall


def timed(seconds: float, *calls: tuple[int, float], examples: float = 640) -> Measured:
    return Measured(0, examples, seconds, calls=[TimedCall(*call) for call in calls])


def test_the_slowest_process_decides_as_a_whole_and_in_each_call_and_examples_are_not_multiplied():
    repeat = measure.slowest({0: timed(3.0, (10, 2.0), (5, 1.0)), 1: timed(3.5, (10, 1.0), (5, 2.5))})
    assert repeat == Repeat(640.0, 3.5, (0.2, 0.5))
    waited = {rank: Measured(0, 64.0, 1.0 + rank, calls=[], input_seconds=[0.5]) for rank in range(2)}
    assert measure.slowest(waited).input_shares == (0.5, 0.25)
    pieces = [Profiling("input", None, [64, 64], seconds) for seconds in ([1.0, 2.0], [2.0, 1.0])]
    assert measure.slowest_rates(pieces) == [32.0, 32.0]
    assert repeat.examples_per_second == 640 / 3.5
    assert measure.slowest(dict.fromkeys(range(8), timed(2.0, (10, 2.0)))) == measure.slowest(
        {0: timed(2.0, (10, 2.0))}
    )
    with pytest.raises(ValueError, match="longer"):
        measure.slowest({0: timed(2.0, (10, 2.0)), 1: timed(2.0, (5, 1.0), (5, 1.0))})


def test_step_times_are_in_milliseconds_over_all_repeats_and_in_order():
    repeats = [Repeat(1.0, 1.0, tuple(i / 1_000 for i in range(first, first + 50))) for first in (1, 51)]
    quantiles = measure.step_ms(repeats)
    assert quantiles == pytest.approx({"step_ms_p50": 50.5, "step_ms_p95": 95.05, "step_ms_p99": 99.01})
    assert set(measure.step_ms([Repeat(1.0, 1.0, (0.25,))]).values()) == {250.0}


def test_confidence_is_how_often_the_range_holds_the_median():
    for repeats in (1, 2, 3, 5, 8):
        # Each repeat falls on either side of the median with the same probability: count the outcomes.
        sides = list(itertools.product((0, 1), repeat=repeats))
        assert measure.confidence(repeats) == sum(0 < sum(each) < repeats for each in sides) / len(sides)


def test_a_speedup_pairs_repeats_that_were_taken_in_turn_and_is_always_inside_its_range():
    # The machine slows down by half, and the ratio stays.
    assert measure.speedup([200.0, 100.0, 100.0], [100.0, 50.0, 50.0]) == (2.0, 2.0, 2.0)
    assert measure.speedup([150.0], [100.0]) == (1.5, 1.5, 1.5)
    # Over another run, it has the widest range.
    assert measure.speedup([190.0, 200.0, 210.0], [100.0, 80.0]) == (200 / 90, 1.9, 210 / 80)
    rng = random.Random(1)
    for counts in itertools.product(range(1, 7), repeat=2):
        point, baseline = ([rng.uniform(1, 100) for _ in range(count)] for count in counts)
        ratio, low, high = measure.speedup(point, baseline)
        assert low <= ratio <= high
        middle, low, high = measure.interval(point)
        assert min(point) == low <= middle <= high == max(point)


def test_a_call_is_filled_but_has_one_step_at_least_and_not_too_many():
    assert [measure.steps_per_call(seconds) for seconds in (10.0, 0.25, 0.1, 0.001, 0.0)] == [1, 1, 2, 200, 200]
    assert measure.steps_per_call(0.05, concurrent_steps=2) == 2


def test_a_repeat_has_three_whole_calls_at_least_and_an_end():
    for step_seconds, per_call in itertools.product([0.0, 1e-6, 1e-3, 0.02, 0.3, 5.0], [1, 7, 200]):
        steps = measure.steps_per_repeat(step_seconds, per_call)
        calls = steps / per_call
        assert calls in range(3, 1_001)
        assert calls in (3, 1_000) or steps * step_seconds == pytest.approx(REPEAT_SECONDS, rel=0.15)

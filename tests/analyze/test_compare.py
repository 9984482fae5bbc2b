"""Throughput and speedups from timings; verdicts on sweeps whose truth is known; what cannot be compared is marked."""

import contextlib
import csv
import io
import itertools
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shown_runs import a_plan, wrote

from pipeline.analyze import comparable, compare, measure
from pipeline.analyze.compare import Answer, Contestant, Judge, Use
from pipeline.analyze.history import LoggedRun, load
from pipeline.analyze.measure import Repeat
from pipeline.commands import results
from pipeline.driver.results import speed_of
from pipeline.driver.timing import Measurements, to_time
from pipeline.plan.plan import REPEAT_SECONDS
from pipeline.record.events import Measured, Profiling, TimedCall
from pipeline.record.results import IN_THIS_RUN, Choices, Ending, Layout, Result, from_values
from pipeline.views import report
from pipeline.views.terminal.verdict_text import single_line, verdict_lines

ONE = 1_000.0
KINDS = ("quiet", "noisy runs", "noisy baselines", "drift", "outliers", "a part slower", "busy", "few repeats", "again")


def a_run(workers: int, point: list[Repeat], baseline: list[Repeat], in_turn: bool = True) -> LoggedRun:
    """A run of these repeats, as it is written down; without `in_turn` its baseline is of another run."""
    plan = a_plan(devices=workers, workers=workers, devices_per_replica=1, repeats=len(point))
    one = [each.examples_per_second for each in baseline]
    measured, source = (Measurements(point, baseline), IN_THIS_RUN) if in_turn else (Measurements(point), "reused")
    speed = speed_of(plan, measured, one, source)
    layout = Layout(workers=workers, replicas=workers, scaling="weak", replica_batch=64)
    return LoggedRun(Result(Ending("FINISHED"), Choices("mirrored", model="mlp", data="digits"), layout, speed))


def repeats(rates: np.ndarray, others: np.ndarray | None = None) -> list[Repeat]:
    shares = [None] * len(rates) if others is None else list(others)
    return [Repeat(float(rate), 1.0, (0.01,), other_work=share) for rate, share in zip(rates, shares, strict=True)]


def made_up(rng: np.random.Generator, kind: str) -> tuple[np.ndarray, list[LoggedRun], list[int]]:
    """(true speedups, runs, which run repeats which), of a sweep of one run on one device and some on two."""
    count, timed = int(rng.integers(3, 7)), int(rng.integers(1, 4)) if kind == "few repeats" else 5
    true = np.exp(rng.uniform(np.log(0.5), np.log(1.95), count))
    true[0] = 1.0
    if rng.random() < 0.5:
        # Two that are near each other.
        true[2] = true[1] * np.exp(-rng.uniform(0.0, 0.15))
    machine, runs, same = ONE, list[LoggedRun](), list[int]()
    for _ in range(3 if kind == "again" else 1):
        for place, speedup in enumerate(true):
            steady = rng.uniform(0.005, 0.03)
            luck = rng.normal(0.0, rng.uniform(0.01, 0.03))
            point, one = np.log(speedup) + luck + rng.normal(0.0, steady, timed), rng.normal(0.0, steady, timed)
            others = None
            if kind == "noisy runs":
                point += rng.normal(0.0, rng.uniform(0.05, 0.3), timed)
            elif kind == "noisy baselines":
                one += rng.normal(0.0, rng.uniform(0.05, 0.3), timed)
            elif kind == "outliers":
                point -= np.log(rng.uniform(1.2, 3.0, timed)) * (rng.random(timed) < 0.2)
                one -= np.log(rng.uniform(1.2, 3.0, timed)) * (rng.random(timed) < 0.1)
            elif kind == "a part slower" and rng.random() < 0.4:
                first = int(rng.integers(0, timed))
                last = int(rng.integers(first, timed)) + (first > 0)
                point[first:last] -= np.log(rng.uniform(1.2, 3.0))
            elif kind == "busy" and rng.random() < 0.5:
                # Another program has one of the two cores, for all of the run: one device goes on alone on the other.
                others = np.full(timed, rng.uniform(0.15, 0.45))
                point += 0.0 if place == 0 else np.log(1 - others)
            slower = machine if kind == "drift" else ONE
            drift = slower * np.exp(np.linspace(0.0, -0.1 * (kind == "drift"), timed))
            machine *= rng.uniform(0.75, 1.05)
            workers = 1 if place == 0 else 2
            runs.append(a_run(workers, repeats(drift * np.exp(point), others), repeats(drift * np.exp(one))))
            same.append(place)
    return true, runs, same


@pytest.mark.parametrize("kind", KINDS)
def test_verdicts_of_made_up_sweeps_keep_the_best_in_the_best_group_and_contradict_no_table(kind):
    rng, sweeps = np.random.default_rng(KINDS.index(kind)), 60
    missed = one_device = 0
    for _ in range(sweeps):
        true, runs, same = made_up(rng, kind)
        decided = compare.decide(runs, same, 0.5)
        best, ours = true[same[decided.best.places[0]]], decided.best.speedup
        not_slower = [decided.best.places[0]]
        for each in decided.against:
            theirs, other = each.other.speedup, true[same[each.other.places[0]]]
            if each.answer is not Answer.FASTER:
                not_slower.append(each.other.places[0])
            elif ours and theirs:
                # What it says is faster has the higher speedup in the table.
                assert (ours[0] > theirs[0]) is (each.ratio > 1)
            assert each.answer is not Answer.AS_FAST or 1 / 1.1 < other / best < 1.1
        missed += int(true.argmax()) not in not_slower
        one_device += decided.use is Use.ONE_DEVICE and true[1:].max() >= 1.4
        assert verdict_lines(decided)
    assert missed <= 0.05 * sweeps
    assert one_device == 0


def pairs(apart: float, within: float, faster: float, in_turn: bool = True, runs: int = 1) -> dict[str, float]:
    """Of 100 simulated pairs the share with each answer: runs lie `apart`, and the repeats of each lie `within`."""
    rng, answers = np.random.default_rng(0), list[str]()
    for _ in range(100):
        made = list[LoggedRun]()
        for speedup in [1.5] * runs + [1.5 * faster] * runs:
            point = ONE * speedup * np.exp(apart * rng.normal() + within * rng.normal(size=5))
            one = ONE * np.exp(0.5 * within * rng.normal(size=5))
            made.append(a_run(2, repeats(point), repeats(one), in_turn))
        answers.append(answer_of(made))
    return {answer: answers.count(answer) / 100 for answer in Answer}


def answer_of(runs: list[LoggedRun]) -> Answer:
    """The answer where the first half of the runs repeats one configuration, and the second half another."""
    half = len(runs) // 2
    one, two = (Contestant(tuple(range(half)), tuple(each)) for each in (runs[:half], runs[half:]))
    return Judge(runs, [place // half for place in range(2 * half)]).compare(one, two).answer


@pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "by throughput"])
@pytest.mark.parametrize(("apart", "within"), [(0.01, 0.01), (0.03, 0.01), (0.02, 0.1)], ids=["quiet", "usual", "busy"])
def test_equal_runs_are_seldom_told_apart_and_a_third_is_told_on_a_usual_machine(apart, within, in_turn):
    assert pairs(apart, within, 1.0, in_turn)["faster"] <= 0.15
    if within < 0.1:
        assert pairs(apart, within, 1.33, in_turn)["faster"] > 0.9


def test_runs_that_are_repeated_tell_more_and_show_what_is_as_fast():
    assert pairs(0.02, 0.01, 1.08, runs=5)["faster"] > 0.9 > 0.75 > pairs(0.02, 0.01, 1.08)["faster"]
    assert pairs(0.01, 0.005, 1.0, runs=3)["as fast"] > 0.8
    assert pairs(0.01, 0.005, 1.0)["as fast"] == pairs(0.01, 0.005, 1.15, runs=3)["as fast"] == 0.0


def steady(workers: int, speedup: float, others: float = 0.0, one: float = 1.0) -> LoggedRun:
    """A run whose repeats are all as fast, as are its baseline's."""
    return a_run(workers, repeats(np.full(5, speedup * ONE), np.full(5, others)), repeats(np.full(5, one * ONE)))


@pytest.mark.parametrize(("runs", "answer"), [
    # Those that are repeated and disagree tell less, and one that other programs disturbed may be faster than it was.
    ([(2, 1.5), (2, 1.5), (2, 1.25), (2, 1.25)], "faster"), ([(2, 2.0), (2, 1.1), (2, 1.0), (2, 1.5)], "not known"),
    ([(1, 1.0), (2, 0.7, 0.0)], "faster"), ([(1, 1.0), (2, 0.7, 0.4)], "not known"),
])  # fmt: skip
def test_runs_that_disagree_or_were_disturbed_tell_less(runs, answer):
    assert answer_of([steady(*run) for run in runs]) == answer


def test_a_speedup_that_cannot_be_is_no_efficiency_and_is_judged_by_throughput():
    slow = steady(1, 1.0, one=0.6)
    assert (slow.result.speed.efficiency, comparable.disturbed(slow.result)) == (None, ["disturbed baseline"])
    decided = compare.decide([slow, steady(2, 1.5)], [0, 1], 0.5)
    assert (decided.use, decided.best.places) == ("best", (1,))
    assert [each.answer for each in decided.against] == ["faster"]


def test_an_older_result_without_repeats_in_its_log_is_judged_by_its_intervals():
    older = [{
        "workers": workers, "strategy": "mirrored", "examples_per_second": 100 * speedup, "speedup": speedup,
        "speedup_low": 0.98 * speedup, "speedup_high": 1.02 * speedup, "interval_confidence": 0.9375,
        "baseline_examples_per_second": 100.0, "baseline_source": IN_THIS_RUN,
    } for workers, speedup in ((1, 1.0), (2, 1.6))]  # fmt: skip
    decided = compare.decide([LoggedRun(from_values(values)) for values in older], [0, 1], 0.5)
    assert (decided.use, [each.answer for each in decided.against]) == ("best", ["faster"])


@pytest.mark.parametrize(("speedup", "line"), [
    (0.7, "it did not pay: almost certainly slower.* Try strategy=one_device workers=1.*"), (1.5, ""),
    (1.0, "not known.*"),
])  # fmt: skip
def test_a_single_run_says_that_it_did_not_pay_and_what_to_try(speedup, line):
    rates = ONE * speedup * np.array([0.94, 0.97, 1.0, 1.03, 1.06])
    assert re.fullmatch(line, single_line(a_run(2, repeats(rates), repeats(np.full(5, ONE))).result))


def test_what_other_work_disturbs_is_timed_again_until_it_is_quiet_or_patience_is_over():
    def timed(patience: float, shares: list[float]) -> tuple[int, list[float]]:
        plan = a_plan(workers=2, devices_per_replica=1, repeats=5, patience=patience)
        measured = Measurements()
        for repeat in to_time(plan, 5, measured):
            share = shares[min(repeat, len(shares) - 1)]
            measured.point += [Repeat(1_500.0 * (1 - share), 1.0, (0.01,), other_work=share)]
            measured.baseline += [Repeat(1_000.0, 1.0, (0.01,), other_work=0.0)]
        return len(measured.point), [repeat.examples_per_second for repeat in measured.counted(plan)[0]]

    assert timed(30.0, [0.0]) == (5, [1_500.0] * 5)
    assert timed(30.0, [0.5, 0.5, 0.0, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0]) == (8, [1_500.0] * 5)
    assert timed(0.0, [0.5])[0] == 5
    assert timed(30.0, [0.5])[0] == 20


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
    assert measure.step_ms(repeats) == pytest.approx({"step_ms_p50": 50.5, "step_ms_p95": 95.05, "step_ms_p99": 99.01})
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


def test_a_call_is_filled_but_has_few_steps_at_least_and_an_end_and_a_repeat_has_three_whole_calls():
    assert [measure.steps_per_call(seconds) for seconds in (10.0, 0.25, 0.1, 0.001, 0.0)] == [1, 1, 2, 200, 200]
    assert measure.steps_per_call(0.05, concurrent_steps=2) == 2
    for step_seconds, per_call in itertools.product([0.0, 1e-6, 1e-3, 0.02, 0.3, 5.0], [1, 7, 200]):
        steps = measure.steps_per_repeat(step_seconds, per_call)
        calls = steps / per_call
        assert calls in range(3, 1_001)
        assert calls in (3, 1_000) or steps * step_seconds == pytest.approx(REPEAT_SECONDS, rel=0.15)


MLP = {"_target_": "pipeline.models.mlp"}
# (what the plan says otherwise, what the result says otherwise, what is written beside the speed)
UNLIKE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "model": ({}, {"model": "cnn"}, "differs in model"),
    "model of another width": ({"model_build": MLP | {"hidden": [16]}}, {}, "differs in model"),
    "data": ({}, {"data": "mnist5k"}, "differs in data"),
    "data made otherwise": ({"data_build": {"split_seed": 1}}, {}, "differs in data"),
    "batch rule": ({}, {"replica_batch": 32}, "differs in batch rule"),
    "scaling": ({}, {"scaling": "strong"}, "differs in scaling and batch rule"),
    "precision": ({}, {"precision": "mixed_bfloat16"}, "differs in precision"),
    "machine": ({}, {"machine": "there"}, "differs in machine"),
    "versions": ({}, {"versions": {"keras": "4"}}, "differs in versions"),
    "rehearsal": ({}, {"rehearsal": True}, "rehearsal"),
    "oversubscribed": ({}, {"oversubscribed": True}, "oversubscribed"),
    "fewer workers": ({}, {"timed_workers": 1}, "fewer workers"),
    "optimizer": ({"optimizer": "sgd"}, {}, "differs in optimizer"),
    "gradient bits": ({"gradient_bits": 16}, {}, "differs in gradient bits"),
    "determinism": ({"deterministic": True}, {}, "differs in deterministic"),
    "threads": ({"threads_per_device": 2}, {}, "differs in threads per device"),
    "cache": ({"cache": "memory"}, {}, "differs in cache"),
    "skipped data": ({}, {"train_examples_skipped": 7}, "differs in examples left out"),
}
ASKED = {
    "data_build": {"split_seed": 0}, "optimizer": None, "gradient_bits": 32, "deterministic": False,
    "threads_per_device": 1, "cache": "none",
}  # fmt: skip


def a_sweep(folder: Path, *points: tuple[dict[str, Any], dict[str, Any]]) -> Path:
    """A sweep of two equal points, and of others that are twice as fast."""
    measured = {"speedup": 1.5, "efficiency": 0.75, "baseline_examples_per_second": 100.0, "train_examples_skipped": 0}
    for place, (asked, result) in enumerate([({}, {}), ({}, {}), *points]):
        speed = 150.0 if place < 2 else 300.0
        told = measured | {"examples_per_second": speed, "mlflow_run_id": f"{place}" * 8} | result
        wrote(folder / f"{place}_mirrored", [speed - 1, speed, speed + 1, speed, speed], ASKED | asked, **told)
    return folder


@pytest.fixture(scope="module")
def all_kinds(tmp_path_factory) -> tuple[Path, str]:
    """A sweep with a point of each kind, all faster than the two that compare, and what its report prints."""
    output = tmp_path_factory.mktemp("outputs")
    folder = a_sweep(output / "sweeps" / "kinds", *((asked, result) for asked, result, _ in UNLIKE.values()))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert results.report(["sweep=kinds", f"output_dir={output}"]) == 0
    return folder, printed.getvalue()


@pytest.mark.parametrize("kind", UNLIKE)
def test_what_cannot_be_compared_is_refused_or_marked_wherever_it_shows(all_kinds, capsys, kind):
    (folder, out), mark, place = all_kinds, UNLIKE[kind][2], list(UNLIKE).index(kind) + 2
    # The terminal: beside the speed, and in the verdict, which another point wins.
    assert re.search(rf"^{place:>2}  .*\n.*{mark}$", out, re.MULTILINE)
    for name in re.findall(r"differs in (.*)", mark):
        assert f"Not comparable, since {name.split(' and ')[0]} differs (" in out
    (left_out,) = (line for line in out.splitlines() if line.startswith("Left out of the verdict"))
    assert re.search(rf"points? (\d+ and )?{place}( and \d+)? \({mark}\)[;.]", left_out)
    # The table of all numbers.
    row = list(csv.DictReader((folder / "points.csv").read_text().splitlines()))[place]
    assert (row["point"], row["marks"]) == (str(place), mark)
    # The page: throughput, speedup and efficiency in its table, and its figures.
    page = (folder / "report.html").read_text()
    row = re.search(rf"<tr[^>]*><td class=\"number\">{place}</td>.*", page)
    assert row is not None
    assert row[0].count(f'<small class="mark">{mark}</small>') == 3
    assert re.search(rf"{place}  mirrored, 2 workers \([^()]*{mark}\): 300", page)
    # The comparison of two runs.
    (other,) = folder.glob(f"{place}_*")
    assert results.compare([str(folder / "0_mirrored"), str(other)]) == 0
    out = capsys.readouterr().out
    why = re.search("0 and 1: not compared, since (.*)", out)
    assert why is not None
    assert why[1].startswith((mark.removeprefix("differs in ").split(" and ")[0], "one of them"))
    assert f"Speeds are not comparable: {why[1]}." in out
    assert "times as fast" not in out
    assert mark in out


def test_the_points_that_compare_win_a_sweep_of_all_kinds(all_kinds):
    words = r"Use mirrored on 2 workers \(point [01]\): .*\n.*cannot be told from .*\(point [01],"
    assert re.search(words, all_kinds[1])


@pytest.mark.usefixtures("without_figures")
def test_asynchronous_steps_are_marked_and_still_compared(tmp_path, capsys):
    folder = a_sweep(tmp_path / "sweeps" / "kinds", ({}, {"strategy": "parameter_server", "asynchronous": True}))
    assert results.report(["sweep=kinds", f"output_dir={tmp_path}"]) == 0
    out = capsys.readouterr().out
    assert "Use parameter_server on 2 workers (point 2)" in out
    assert "(asynchronous)" in out
    assert 'class="mark">asynchronous<' in (folder / "report.html").read_text()


def test_what_follows_from_the_strategy_or_an_earlier_version_lacks_keeps_nothing_from_being_compared(tmp_path):
    one, two, older, newer = (tmp_path / name for name in ("one", "two", "older", "newer"))
    wrote(one, [1.0], ASKED | {"shard": "auto", "static_batches": False, "seed": 0})
    wrote(two, [1.0], ASKED | {"shard": "file", "static_batches": True, "seed": 1}, strategy="tpu", workers=8)
    wrote(older, [1.0])
    wrote(newer, [1.0], {"optimizer": "sgd", "gradient_bits": 32})
    assert comparable.unlike(load(one), load(two)) == comparable.unlike(load(older), load(newer)) == []


@pytest.mark.usefixtures("without_figures")
def test_the_largest_group_of_sound_points_decides(tmp_path):
    other = {"precision": "mixed_bfloat16"}
    written = report.write(a_sweep(tmp_path, ({}, other), ({}, other), ({}, other | {"rehearsal": True}), ({}, {})))
    assert [point.group for point in written.sweep.points] == ["A", "A", "B", "B", "B", "A"]
    assert written.verdict.best.places == (5,)

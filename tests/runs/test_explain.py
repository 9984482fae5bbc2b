"""What a step's time goes to: the lost efficiency, waiting for the input, and what other programs did meanwhile."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import Ran, UnderWay, logged, losses, one_of, sampled, weights
from plans import cluster, config, machine

from pipeline import record
from pipeline.analyze import explain, measure
from pipeline.analyze.explain import PARTS, Round, shares
from pipeline.analyze.measure import BUSY
from pipeline.driver.timing import _one_of_each_host
from pipeline.plan.planning import make
from pipeline.record import to_plain
from pipeline.record.events import CoreTime, Measured, TimedCall
from pipeline.record.findings import Explanation
from pipeline.record.log import from_plain
from pipeline.views.mlflow.changes import LogState
from pipeline.views.terminal.result import explained_line, explained_lines

PLAN = make(config("multi_worker", workers=2, hardware="2cpu"), machine())
NAMES = ("chief 0", "worker 1")
EXPLAINED = ("tracking=none", "workers=2", "measure.explain=true", "measure.repeats=3", "train.steps=6",
             "train.save=false", "train.check=off")  # fmt: skip

# Its steps mostly wait, and so take as long on a machine that others may be at.
UNHURRIED = ("data.build._target_=own.through", "data.num_classes=4", "model.build._target_=own.unhurried",
             "train.replica_batch=32")  # fmt: skip
SLEEPY = ("data.build._target_=own.sleepy", "data.num_classes=4", "data.shuffle=false", "model.build._target_=own.tiny")


def a_round(**changed: Any) -> Round:
    """One in which a step takes 1 s, and half of it is lost to nothing in particular."""
    each = {0: 0.5, 1: 0.5}
    return dataclasses.replace(Round(0.5, 0.5, 0.0, 0.5, 0.5, 0.0, each, each), **changed)


def explained(*rounds: Round) -> dict[str, Any]:
    return to_plain(explain.explain(rounds, NAMES, PLAN))


def share(found: dict[str, Any], name: str) -> float:
    return next(part["share"] for part in found["parts"] if part["name"] == name)


@pytest.mark.parametrize("seed", range(20))
def test_parts_add_up_to_what_is_lost_whatever_was_measured(seed):
    rng = np.random.default_rng(seed)
    rounds = []
    for _ in range(5):
        taken = rng.uniform(0.1, 1.0, 6)
        together, alone = (dict(enumerate(rng.uniform(0.1, 1.0, 2))) for _ in range(2))
        # Every other model has layers that normalize by what replicas exchange.
        statistics = {"no_statistics": rng.uniform(0.1, 1.0)} if seed % 2 else {}
        rounds.append(Round(*taken, together=together, alone=alone, **statistics))
    found = explained(*rounds)
    assert [part["name"] for part in found["parts"]] == [
        each for each in PARTS if each != "batch statistics" or seed % 2
    ]
    assert sum(part["share"] for part in found["parts"]) == pytest.approx(found["lost"])
    everything, one = (np.median([getattr(each, f"{name}everything") for each in rounds]) for name in ("", "one_"))
    assert found["lost"] == pytest.approx(1 - one / everything)
    for part in found["parts"]:
        assert part["low"] <= part["share"] <= part["high"]
    assert found["lost_low"] <= found["lost"] <= found["lost_high"]


def test_each_part_is_what_its_switch_saves():
    halved, slow = {"everything": 1.0, "no_input": 1.0}, {0: 1.0, 1: 1.0}
    for part, one in {
        "input wait": a_round(everything=1.0),
        "communication": a_round(**halved),
        "batch statistics": a_round(**halved, no_statistics=0.5),
        "contention": a_round(**halved, together=slow),
        "host overhead": a_round(**halved, calling=0.5),
        "other": a_round(**halved, together=slow, alone=slow),
    }.items():
        found = explained(one)
        assert share(found, part) == found["lost"] == 0.5, part
        assert found["bound"] == part
        assert "takes 50% of a step's time: without it at most 2 times as fast" in found["advice"], part
    found = explained(a_round(**halved, together={0: 0.5, 1: 1.0}, alone={0: 0.5, 1: 1.0}))
    assert (share(found, "stragglers"), found["straggler"], found["bound"]) == (0.5, "worker 1", "stragglers")
    assert found["advice"].startswith("Waiting for worker 1 takes 50%")
    # Who is slower in some rounds alone is no straggler.
    found = explained(*(a_round(together={0: 0.5, 1: taken}) for taken in (0.9, 0.4, 0.8)))
    assert (found["straggler"], share(found, "stragglers")) == (None, 0)


TORN = a_round(everything=0.52, no_input=0.52, together={0: 1.2, 1: 1.2}, alone={0: 0.5, 1: 0.5})
HALF_TORN = dataclasses.replace(TORN, everything=1.0, no_input=1.0)


@pytest.mark.parametrize(("rounds", "bound", "part", "least", "advice"), [
    ([a_round(everything=0.51)], None, "input wait", 0.0, "No part of the 2% that is lost stands out"),
    (
        [a_round(everything=each, no_input=each) for each in (0.8, 0.5, 0.9)], None, "communication", 0.1,
        "no part of it is sure to be the largest; try again while the machine is idle",
    ),
    # No part is said to bring more than is lost.
    ([TORN], None, "contention", 1.0, ""),
    (
        [HALF_TORN], "contention", "contention", 0.5,
        "takes 70% of a step's time, some of which other parts make up for: without it at most 2 times as fast",
    ),
    # An input that one device waits for as well is no loss, but worth telling.
    (
        [a_round(everything=2.0, one_everything=2.0)], "input wait", "input wait", None,
        "at most 4 times as fast; try data.cache=memory",
    ),
], ids=["little", "unsure", "torn", "more than is lost", "both wait"])  # fmt: skip
def test_what_is_called_the_bound_and_what_a_change_of_it_brings(rounds, bound, part, least, advice):
    found = explained(*rounds)
    assert found["bound"] == bound
    assert advice in found["advice"]
    assert share(found, part) == found["lost"] == 0 if least is None else share(found, part) > least


def test_a_single_replica_has_nothing_to_communicate_and_those_timed_alone_at_once_are_on_different_hosts():
    found = shares(Round(1.0, 0.9, 0.1, 0.8, 0.8, 0.0, {}, {}))
    assert {name for name, each in found.items() if each} == {"input wait", "host overhead"}
    assert _one_of_each_host(PLAN) == [[0], [1]]
    assert _one_of_each_host(cluster(hardware="2x4gpu", gpus=4)) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_what_was_lost_is_shown_with_its_ends_and_sent_to_mlflow():
    found = explained(a_round(everything=1.0, no_input=1.0), a_round(everything=1.25, no_input=1.25))
    made = record.from_plain(Explanation, found)
    said = "Lost to scaling, as shares of a step's time: 56% (50% to 60%) = communication 56% (50% to 60%), "
    first, second = explained_lines(made)
    assert (first, second[: len(said)]) == (found["advice"], said)
    assert explained_lines(dataclasses.replace(made, straggler="worker 1"))[-1] == "worker 1 is behind the others."
    assert explained_line(made) == "lost 56% = communication 56%"
    state = LogState()
    state.take(from_plain({"event": "explained", "time": 1.0, "values": found | {"straggler": "worker 1"}}))
    assert state.changes.tags == {"explain.bound": "communication", "explain.straggler": "worker 1"}
    points = {each.name: each.value for each in state.changes.metrics}
    assert points["explain/lost"] == pytest.approx(found["lost"], rel=1e-3)
    assert points["explain/input_wait"] == 0
    assert len(points) == 1 + len(found["parts"])


def test_each_share_is_said_once_with_what_it_is_of_and_a_negative_part_with_what_it_means():
    made = record.from_plain(Explanation, explained(HALF_TORN, dataclasses.replace(HALF_TORN, everything=1.01)))
    lines = explained_lines(made, efficiency=0.77)
    assert re.findall(r"(\d+)%", lines[0]) == [f"{100 * share(to_plain(made), 'contention'):.0f}"]
    of_contention = [line for line in lines if "contention" in line.lower()]
    assert "Contention between workers of one machine takes 70% of a step's time" in of_contention[0]
    assert "contention 70% (69% to 70%)" in of_contention[1]
    assert "communication -20%" in next(line for line in lines if "communication" in line.lower())
    assert "A negative part takes less of a step here than on one device, and so makes up for others." in lines
    assert re.findall(r"\d+%", lines[-1]) == ["50%", "77%"]


def assert_whole(ran: Ran) -> dict[str, Any]:
    """What holds for every explanation; returns that of the last run."""
    assert ran.code == 0, ran.err
    result = ran.results[-1]
    found: dict[str, Any] = result["explained"]
    assert sum(part["share"] for part in found["parts"]) == pytest.approx(found["lost"])
    # Timed at another moment, and in other rounds: that they differ by more is said.
    ends = [result[f"speedup_{end}"] / 2 for end in ("low", "high")]
    apart = ends[0] > 1 - found["lost_low"] or ends[1] < 1 - found["lost_high"]
    assert any("load changed" in note for note in result["notes"]) is apart
    assert found["advice"] in ran.out
    return found


# What costs most in a run, by what is typed.
COSTLY = {
    "communication": "strategy=multi_worker model=mlp model.build.hidden=[4096,4096] train.optimizer=sgd "
    "train.replica_batch=4",
    "batch statistics": "strategy=multi_worker model=resnet20 data=digits train.replica_batch=16",
    "input wait": f"strategy=mirrored train.replica_batch=8 {' '.join(SLEEPY)}",
}


@pytest.mark.timed
@pytest.mark.parametrize("part", sampled(list(COSTLY), 1))
def test_what_costs_most_is_called_the_bound_or_costs_more_than_what_it_is_part_of(pipeline, part):
    for _ in range(2):
        found = assert_whole(pipeline(*COSTLY[part].split(), *EXPLAINED, "resume=never"))
        # Others on the machine may have made rounds differ too much for any to be named.
        if found["bound"] or part == "batch statistics":
            break
    if part == "batch statistics":
        assert found["bound"] != "communication", found
        assert share(found, part) > share(found, "communication"), found
        return
    assert found["bound"] == max(found["parts"], key=lambda each: each["share"])["name"] == part, found
    assert part == "communication" or (share(found, part) > 0.25 and "try data.cache=memory" in found["advice"]), found


@pytest.mark.timed
def test_a_worker_that_is_held_back_is_named(tmp_path):
    run = UnderWay(tmp_path, "strategy=multi_worker", *UNHURRIED, *EXPLAINED)

    def hold_back() -> None:
        """Stops worker 1 for most of the time, from when training is over until the command ends."""
        until_worker_1(run, "finished")
        with contextlib.suppress(ProcessLookupError):
            while run.process.poll() is None:
                for number, seconds in ((signal.SIGSTOP, 0.1), (signal.SIGCONT, 0.02)):
                    run.harm(number, 1)
                    time.sleep(seconds)

    holding = threading.Thread(target=hold_back)
    holding.start()
    found = assert_whole(run.ended(240))
    holding.join()
    assert (found["straggler"], found["bound"]) == ("worker 1", "stragglers"), found
    assert found["advice"].startswith("Waiting for worker 1")


def until_worker_1(run: UnderWay, told: str) -> None:
    run.until(lambda: 1 in [event["rank"] for event in run.told(told)])


@pytest.mark.slow
def test_a_worker_that_dies_while_loss_is_explained_fails_no_run(tmp_path):
    run = UnderWay(tmp_path, "strategy=multi_worker", "model=mlp", *EXPLAINED)
    until_worker_1(run, "explaining")
    run.harm(signal.SIGKILL, 1)
    ran = run.ended(240).ok()
    assert (ran.result["status"], ran.result["explained"]) == ("FINISHED", None)
    assert any("could not be explained: worker 1 was killed" in note for note in ran.result["notes"])


@pytest.mark.slow
def test_nothing_that_is_trained_changes_where_loss_is_explained_and_the_input_is_profiled(pipeline):
    strategy = one_of(("mirrored", "multi_worker"))
    length = ("train.deterministic=true", "train.steps=20", "resume=never")
    common = (f"strategy={strategy}", "model=mlp", *EXPLAINED, *length)
    pipeline(*common, "measure.explain=false").ok()
    ran = pipeline(*common, "data.profile=true").ok()
    without, with_both = (
        [losses(run), weights(run), [each["val_loss"] for each in logged(run, "epoch")]] for run in ran.run_folders
    )
    # How many steps one line tells of is a matter of time.
    assert without == with_both
    assert all(without)
    said = [(bool(result["explained"]), bool(result["profile"])) for result in ran.results]
    assert said == [(False, False), (True, True)]


ALONE = ("tracking=none", "measure.baseline=none", "measure.repeats=2", "train.check=off")
TIMED = (*ALONE, "measure.steps=8", "train.steps_per_call=4")
STRATEGIES = sampled(("one_device", "mirrored", "multi_worker", "parameter_server"), 2)


@pytest.mark.timed
def test_a_slow_input_is_found_under_every_kind_of_strategy(pipeline):
    ran: Ran = pipeline("-m", f"strategy={','.join(STRATEGIES)}", "workers=2", *TIMED, *SLEEPY, "train.steps=20").ok()
    who = {"multi_worker": {"chief 0", "worker 1"}, "parameter_server": {"worker 1", "worker 2"}}
    for strategy, result in zip(STRATEGIES, ran.results, strict=True):
        assert (result["strategy"], result["input_bound"]) == (strategy, True)
        assert result["input_wait"] > 0.5, strategy
        assert set(result["input_wait_by_worker"]) == who.get(strategy, {"chief 0"})
        assert any("Input-bound: " in note and "data.profile=true" in note for note in result["notes"])
    assert ran.out.rsplit("-- ", 1)[1].count("input-bound") >= len(STRATEGIES)


@pytest.mark.timed
def test_a_slow_map_that_sleeps_or_computes_is_found_and_what_there_is_to_gain_is_nearly_gained(pipeline):
    fast = (*TIMED, *UNHURRIED, "strategy=one_device", "train.steps=24", "resume=never")
    assert pipeline(*fast).code == 0
    function = one_of(("asleep", "busy"))
    slow: Ran = pipeline(*fast, f"+data.build.function={function}", "data.profile=true").ok()
    result = slow.results[-1]
    found = result["profile"]
    assert found["bound"] == "input"
    assert found["input_examples_per_second"] < found["model_examples_per_second"]
    assert result["examples_per_second"] < found["ceiling_examples_per_second"]
    assert slow.out.count("input-bound: ") == 2
    # Before and after, since other work on the machine may halve its speed.
    made = [each for each in pipeline(*fast).results if each["profile"] is None]
    low, high = ([each[f"examples_per_second_{end}"] for each in made] for end in ("low", "high"))
    assert 0.6 * min(low) < found["ceiling_examples_per_second"] < 1.4 * max(high)


@pytest.mark.timed
def test_workers_that_race_are_profiled_too_and_nothing_is_told_of_other_work_where_none_of_theirs_is_timed(pipeline):
    racing = ("strategy=parameter_server", "workers=2", "train.steps=20", "data.profile=true")
    result = pipeline(*TIMED, *SLEEPY, *racing).ok().result
    assert (result["profile"]["bound"], "other_work" in result) == ("input", False)


def test_shuffles_and_files_of_a_data_set_are_left_out_of_what_is_timed_where_that_is_possible(tmp_path):
    from pipeline.worker.tensorflow import profile

    made = tf.data.Dataset.range(6).shuffle(6).cache(str(tmp_path / "kept")).map(lambda x: x * 2).prefetch(1)
    assert [int(each) for each in profile.plain(made)] == [0, 2, 4, 6, 8, 10]
    assert list(tmp_path.iterdir()) == []
    filtered = tf.data.Dataset.range(6).shuffle(6).filter(lambda x: x > 2)
    assert profile.plain(filtered) is filtered


def timed(machine: str, cores: list[int], busy: float, own: float, seconds: float = 2.0) -> Measured:
    return Measured(0, 64.0, seconds, core_time=CoreTime(machine, cores, busy, own))


@pytest.mark.parametrize(("processes", "share"), [
    ([timed("a", [0, 1], 3.0, 3.0)], 0.0),
    ([timed("a", [0, 1], 4.0, 2.0)], 0.5),
    # Cores of their own.
    ([timed("a", [0], 2.0, 1.0), timed("a", [1], 1.0, 1.0)], 0.25),
    # The same numbers on another machine.
    ([timed("a", [0, 1], 4.0, 2.0), timed("b", [0, 1], 2.0, 2.0)], 0.25),
    # Clocks of ten milliseconds.
    ([timed("a", [0], 1.99, 2.0)], 0.0),
    ([timed("a", [0], 2.0, 1.0), Measured(0, 64.0, 2.0)], None),
])  # fmt: skip
def test_the_share_is_of_the_cores_that_these_processes_have_and_none_waits_for_longer_than_it_was_timed(
    processes, share
):
    assert measure.other_work(dict(enumerate(processes))) == share
    waited = Measured(0, examples=8, seconds=0.5, calls=[TimedCall(1, 0.5)], input_seconds=[0.5001])
    assert measure.slowest({0: waited}).input_shares == (1.0,)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", sampled(("mirrored", "multi_worker"), 1))
def test_other_programs_that_compute_meanwhile_are_told(pipeline, strategy):
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    try:
        ran: Ran = pipeline(
            *ALONE, "measure.steps=400", "train.steps=900", "model=mlp", f"strategy={strategy}", "workers=2"
        ).ok()
    finally:
        for process in spinning:
            process.kill()
            process.wait()
    assert ran.result["other_work"] >= BUSY
    note = "the throughput is that of a busy machine"
    assert any(note in each for each in ran.result["notes"])
    assert note in " ".join(ran.out.split())

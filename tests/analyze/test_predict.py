"""Predictions from runs as runs write them: what is recovered, how sure that is, what it is said to stand on.

The errors of earlier ones are held against made-up hours of a machine, and read from a log.
"""

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any, NamedTuple

import hours
import numpy as np
import pytest
from conftest import with_
from shipped_sizes import configured, planned
from shown_runs import ASKED, PARAMETERS, ran

from pipeline.analyze import calibration, comparable, history, measure, predict, step_model
from pipeline.analyze.step_model import Observed
from pipeline.driver import Foreseen
from pipeline.errors import UserError
from pipeline.launch import this_machine
from pipeline.launch.this_machine import energy_counters, joules
from pipeline.plan import planning
from pipeline.plan.machine import Machine
from pipeline.record import results
from pipeline.record.files import PREDICTIONS, FittedOn, PredictionLine, read_predictions
from pipeline.record.results import Choices, Cost, Layout, Result, Speed
from pipeline.views.terminal.result import predicted_lines


class Ring(NamedTuple):
    """A cluster whose steps take as long as the ring's formula says."""

    step: float
    example: float
    latency: float
    gigabytes_per_second: float

    def seconds(self, workers: int, batch: int, parameters: int = PARAMETERS) -> float:
        sent = 2 * (workers - 1) / workers * 4 * parameters / (1e9 * self.gigabytes_per_second)
        return self.step + batch * self.example + 2 * (workers - 1) * self.latency + sent


RING = Ring(2e-3, 1e-4, 5e-6, 1.25)


def test_any_ring_is_recovered_within_a_twentieth_and_its_interval_holds():
    rng = random.Random(0)
    for _ in range(40):
        ring = Ring(*(10 ** rng.uniform(*ends) for ends in ((-4, -2), (-6, -3), (-7, -4.3), (-1, 2))))
        size = 2 ** rng.randint(3, 11), int(10 ** rng.uniform(4, 8))
        for workers in (64, 256, 1024):
            told(seen(ring, workers, *size), [seen(ring, few, *size) for few in (8, 16, 32)], rel=0.05)


@pytest.mark.parametrize("spread", [0.03, 0.4])
def test_the_interval_holds_the_truth_behind_noisy_runs_in_at_least_8_of_10_cases(spread):
    rng, held = random.Random(1), []
    for _ in range(50):
        ring = Ring(2e-3, 10 ** rng.uniform(-5, -3), 10 ** rng.uniform(-6, -5), 10 ** rng.uniform(0, 1))
        points = [(workers, 64, size) for workers in (2, 4) for size in (200_000, 2_000_000)]
        runs = [seen(ring, *point, noise=rng.gauss(0, spread)) for point in points]
        _, low, high, *_ = predict.predict(on_ring(8, 64, 600_000), runs)
        held.append(low <= ring.seconds(8, 64, 600_000) <= high)
    assert sum(held) >= 0.8 * len(held)


def on_ring(workers: int, batch: int, parameters: int, **other: Any) -> step_model.Case:
    case = step_model.Case(workers, batch, parameters, 4 * parameters, workers, 1, 1, 1, "all_reduce", "gpu", None)
    return dataclasses.replace(case, **other)


def seen(ring: Ring, workers: int, batch: int, parameters: int, noise: float = 0.0, **other: Any) -> Observed:
    seconds = ring.seconds(workers, batch, parameters) * math.exp(noise)
    return Observed(on_ring(workers, batch, parameters, **other), seconds, abs(noise))


def told(truth: Observed, *given: Any, rel: float = 0.02) -> tuple[float, float, float, dict[str, float], list[str]]:
    """What is predicted of a case: it is near the truth, its interval holds that, and its parts are all of it."""
    seconds, low, high, parts, notes = predict.predict(truth.case, *given)
    assert seconds == pytest.approx(truth.seconds, rel=rel)
    assert low <= truth.seconds <= high
    assert sum(parts.values()) == pytest.approx(1)
    return seconds, low, high, parts, notes


def test_one_batch_leaves_open_what_is_fixed_and_what_grows_and_two_tell():
    ring = Ring(1e-3, 1e-5, 0.0, 10.0)
    measured = ring.seconds(1, 64, 1000)
    seconds, low, high, *_ = predict.predict(on_ring(1, 256, 1000), [seen(ring, 1, 64, 1000)])
    # From all of it fixed to all of it proportional.
    assert low <= measured < seconds < 4 * measured <= high
    told(seen(ring, 1, 256, 1000), [seen(ring, 1, batch, 1000) for batch in (32, 64)], rel=1e-3)


def test_links_between_hosts_that_were_not_measured_are_refused_unless_the_config_says_how_fast_they_are():
    ring = Ring(1e-3, 1e-5, 1e-6, 100.0)
    within = [seen(ring, workers, 64, PARAMETERS, hosts=1) for workers in (1, 2, 4)]
    with pytest.raises(UserError, match=r"exchange between hosts.*within one host alone.*hardware.link_gbps"):
        predict.predict(on_ring(8, 64, PARAMETERS), within)
    seconds, _, _, parts, notes = predict.predict(on_ring(8, 64, PARAMETERS, link_gbps=10.0), within)
    # What the bits take on the wire, and what an exchange costs besides, which runs within a host tell.
    sent = 2 * 7 / 8 * 4 * PARAMETERS * 8 / 10e9 + ring.seconds(8, 64) - 1e-3 - 64 * 1e-5
    assert seconds == pytest.approx(1e-3 + 64 * 1e-5 + sent, rel=0.01)
    assert parts["communication"] == pytest.approx(sent / seconds, rel=0.01)
    assert "at 10 Gbit/s is added to what an exchange costs within a host" in notes[0]


# At both ends a byte costs 2.4 ns, as gRPC's copies do.
COPIED = Ring(1e-3, 1e-5, 1e-4, 1 / 2.4)


def linked(gbps: float, workers: int, batch: int = 64, buckets: int = 1) -> Observed:
    """A step whose bytes also take the time of their bits, on the wire between two hosts."""
    case = on_ring(workers, batch, PARAMETERS, link_gbps=gbps, buckets=buckets if workers > 1 else 1)
    wire = (workers > 1) * 4 * PARAMETERS * 8e-9 / gbps
    return Observed(case, step_model.with_wire(COPIED.seconds(workers, batch), wire, case.buckets), 0.02)


def test_a_slower_link_adds_the_time_of_its_bits_to_what_an_exchange_costs_at_both_ends():
    for slower in (1.0, 0.1):
        assert told(linked(slower, 2), [linked(20.0, 1), linked(20.0, 2)])[3]["communication"] > 0.9
    # A link of which something else was told than it does is held to what runs say of it.
    ring = Ring(1e-3, 1e-5, 0.0, 1.25)
    runs = [seen(ring, workers, 64, PARAMETERS, link_gbps=10.0) for workers in (1, 2, 4)]
    faster = ring._replace(gigabytes_per_second=12.5).seconds(8, 64)
    assert predict.predict(on_ring(8, 64, PARAMETERS, link_gbps=100.0), runs)[0] == pytest.approx(faster, rel=0.01)


@pytest.mark.parametrize(("batch", "buckets", "hidden"), [
    (4096, 1, (0.0, 0.0)), (4096, 4, (0.75, 0.41)), (64, 4, (0.18, 0.09))
])  # fmt: skip
def test_what_leaves_while_others_are_computed_is_hidden_behind_them(batch, buckets, hidden):
    for fitted, gbps, share in ((20.0, 1.0, hidden[0]), (1.0, 0.5, hidden[1])):
        runs = [linked(fitted, workers, batch, buckets) for workers in (1, 2)]
        seconds, *_ = told(linked(gbps, 2, batch, buckets), runs)
        waited = (seconds - COPIED.seconds(2, batch)) / (4 * PARAMETERS * 8e-9 / gbps)
        assert waited == pytest.approx(1 - share, abs=0.02)


def test_workers_that_race_are_predicted_by_what_their_servers_send(tmp_path):
    asked = ("strategy=parameter_server", "model=mlp", "data=digits", "hardware=1gpu", "strategy.parameter_servers=1")
    for workers in (1, 2, 4):
        plan = planned(*asked, f"hardware.hosts={workers}", f"workers={workers}")
        ran(tmp_path, plan, [1e-3 + workers * 8 * PARAMETERS / 1e10] * 3)
    plan = planned(*asked, "hardware.hosts=8", "workers=8")
    made = predict.of_plan(plan, PARAMETERS, predict.basis(plan, history.finished(tmp_path), "outputs"))
    assert made.examples_per_second == pytest.approx(8 * 64 / (1e-3 + 8 * 8 * PARAMETERS / 1e10), rel=0.01)


def on_cpu(workers: int, parameters: int, seconds: float = 0.0) -> Observed:
    case = on_ring(workers, 64, parameters, hosts=1, fullest=workers, together=workers, kind="cpu")
    return Observed(case, seconds, 0.01)


POINTS = [(workers, size) for workers in (1, 2) for size in (200_000, 1_600_000)]


def own_kind(workers: int, parameters: int, factor: float, noise: float = 0.0) -> Observed:
    """A step on a CPU that computes on models of this size so many times as long as on others."""
    computed = factor * (1e-3 + 2e-8 * parameters) * (1 + 0.2 * (workers - 1))
    sent = 2 * (workers - 1) * (1e-4 + 4 * parameters * 2e-10)
    return on_cpu(workers, parameters, (computed + sent) * math.exp(noise))


def test_a_step_that_was_timed_tells_what_the_number_of_parameters_does_not():
    rng, held, narrower = random.Random(2), [], []
    for _ in range(60):
        factor, parameters = rng.uniform(0.5, 1.5), rng.randint(300_000, 1_500_000)
        runs = [own_kind(*point, 1.0, rng.gauss(0, 0.01)) for point in POINTS]
        timed = own_kind(1, parameters, factor, rng.gauss(0, 0.01))
        truth = own_kind(2, parameters, factor)
        seconds, low, high, parts, _ = predict.predict(truth.case, runs, timed)
        assert seconds == pytest.approx(truth.seconds, rel=0.1)
        assert sum(parts.values()) == pytest.approx(1)
        held.append(low <= truth.seconds * math.exp(rng.gauss(0, 0.01)) <= high)
        one, low, high, *_ = predict.predict(timed.case, runs, timed)
        _, least, most, *_ = predict.predict(timed.case, runs)
        narrower.append(high / low < most / least)
        # But for the luck of a run, of which a part is taken from what runs of other sizes let expect.
        assert one == pytest.approx(timed.seconds, rel=0.02)
    assert sum(held) >= 0.8 * len(held)
    assert all(narrower)


def crowded(workers: int, parameters: int, room: int = 2_000_000) -> Observed:
    """A step on a CPU whose devices take nothing from each other while what they go through fits into its caches."""
    alone = 1e-3 + 1e-8 * parameters
    beyond = max(0.0, parameters - room / workers) - max(0.0, parameters - room)
    return on_cpu(workers, parameters, alone + (workers > 1) * (4e-4 + 1e-9 * parameters) + 6e-9 * beyond)


def test_what_devices_take_from_each_other_begins_where_their_caches_are_full():
    runs = [crowded(*point) for point in POINTS]
    more = [*runs, *(crowded(workers, 900_000) for workers in (1, 2))]
    for parameters in (400_000, 800_000, 1_000_000, 1_200_000):
        truth = crowded(2, parameters)
        sure, *_ = predict.predict(truth.case, more, crowded(1, parameters), 2e6)
        assert sure == pytest.approx(truth.seconds, rel=0.01)
        # Two sizes leave open whether that is why: half of it is a line.
        seconds, *_ = told(truth, runs, crowded(1, parameters), 2e6, rel=0.11)
        a_line = predict.predict(truth.case, runs, crowded(1, parameters))[0]
        assert abs(seconds - truth.seconds) < abs(a_line - truth.seconds)
    within = [crowded(workers, size) for workers in (1, 2) for size in (200_000, 800_000)]
    told(crowded(2, 600_000), within, None, 2e6, rel=0.01)
    # Where they contend whatever fits, runs of several sizes show it.
    whatever = [own_kind(workers, size, 1.0) for workers in (1, 2) for size in (200_000, 400_000, 800_000, 1_600_000)]
    told(own_kind(2, 1_100_000, 1.0), whatever, None, 2e6)


def test_what_all_runs_of_a_round_share_is_the_machine_s_drift():
    rng = random.Random(3)
    for rounds in (2, 3, 5):
        truth = {name: math.exp(rng.gauss(0, 1)) for name in "abcd"}
        order, slower = [], []
        for _ in range(rounds):
            slower += [math.exp(rng.gauss(0, 0.1))] * 4
            # In another order each time.
            order += rng.sample("abcd", 4)
        seconds = [truth[name] * factor for name, factor in zip(order, slower, strict=True)]
        found = predict.drift(order, seconds)
        usual = [each / there for each, there in zip(slower, found, strict=True)]
        assert usual == pytest.approx([usual[0]] * len(usual))
        assert np.median(found) == pytest.approx(1)
    # One round, or one case, tells nothing of drift from what else differs.
    assert predict.drift("abc", [1.0, 5.0, 2.0]) == [1.0, 1.0, 1.0]
    # One run that was held up for itself moves no others.
    assert predict.drift("abcabcabc", [1.0, 2.0, 3.0, 1.0, 2.6, 3.0, 1.0, 2.0, 3.0]) == pytest.approx([1.0] * 9)


def test_runs_in_turn_tell_what_workers_add_however_the_machine_drifts(tmp_path):
    # One worker ran twice more, when the machine was slower.
    in_order = [*((*point, 1.0) for point in POINTS), *[(*point, 1.3) for point in POINTS[:2]] * 2]
    for place, (workers, size, slower) in enumerate(in_order):
        hidden = f"model.build.hidden=[{size // 75}]"
        plan = planned("strategy=mirrored", "model=mlp", "data=digits", f"workers={workers}", hidden)
        ran(tmp_path, plan, [own_kind(workers, size, 1.0).seconds * slower] * 3, size, place)
    runs = predict.observed(history.finished(tmp_path))
    found = {(each.case.workers, each.case.parameters): each.seconds for each in runs}
    for _, size in POINTS:
        truth = own_kind(2, size, 1.0).seconds / own_kind(1, size, 1.0).seconds
        assert found[2, size] / found[1, size] == pytest.approx(truth, rel=1e-3)


def test_runs_tell_how_many_parameters_have_room_in_their_host_s_caches(tmp_path):
    point = ("strategy=mirrored", "model=mlp", "data=digits")
    for workers, size in POINTS:
        plan = planned(*point, f"workers={workers}", f"model.build.hidden=[{size // 75}]")
        plan = with_(plan, "hardware", cache_bytes=32_000_000)
        ran(tmp_path, plan, [crowded(workers, size).seconds] * 3, size, state_bytes=16 * size)
    found = predict.basis(plan, history.finished(tmp_path), "outputs")
    one, asked = (planned(*point, f"workers={workers}", "model.build.hidden=[10666]") for workers in (1, 2))
    timed = predict.one_run(step_model.case_of(one, 800_000), [[crowded(1, 800_000).seconds] * 3])
    of_line = predict.predict(crowded(2, 800_000).case, predict.observed(found.runs), timed)[0]
    made = predict.of_plan(asked, 800_000, found, timed)
    assert crowded(2, 800_000).seconds < made.step_seconds < 0.97 * of_line


def test_a_step_far_from_what_other_sizes_let_expect_is_a_note_and_one_of_a_busy_machine_has_as_wide_an_interval():
    runs = [own_kind(*point, 1.0) for point in POINTS]
    (note,) = predict.predict(on_cpu(2, 800_000).case, runs, own_kind(1, 800_000, 0.5))[4]
    assert note.startswith("What one worker computes in a step takes 0.49 times what runs of other sizes let expect")
    assert not predict.predict(on_cpu(2, 800_000).case, runs, own_kind(1, 800_000, 1.05))[4]
    timed = own_kind(1, 800_000, 1.0)
    seconds, low, high, *_ = predict.predict(timed.case, runs, dataclasses.replace(timed, spread=0.2, runs=3))
    assert min(high / seconds, seconds / low) > 1.1


def racing(workers: int, parameters: int, factor: float) -> Observed:
    """A step of asynchronous workers, who send what they compute."""
    case = on_ring(workers, 64, parameters, hosts=1, exchange="parameter_server")
    return Observed(case, factor * 2e-8 * parameters + workers * 8 * parameters * 1e-9, 0.01)


def test_what_is_sent_is_not_scaled_by_a_step_that_was_timed_and_a_shorter_one_is_left_out_in_words():
    runs = [racing(workers, parameters, 1.0) for workers in (1, 2, 4) for parameters in (200_000, 1_600_000)]
    wanted = racing(4, 600_000, 3.0)
    assert predict.predict(wanted.case, runs, racing(1, 600_000, 3.0))[0] == pytest.approx(wanted.seconds, rel=0.05)
    short = dataclasses.replace(racing(1, 600_000, 1.0), seconds=1e-4)
    seconds, *_, notes = predict.predict(wanted.case, runs, short)
    assert (seconds, "What was timed is shorter" in " ".join(notes)) == (predict.predict(wanted.case, runs)[0], True)


@pytest.mark.parametrize("exchange", ["all_reduce", "parameter_server"])
def test_runs_of_several_workers_alone_take_a_step_that_was_timed_as_one_more_run(exchange):
    def step(workers: int, parameters: int) -> Observed:
        each = own_kind(workers, parameters, 1.0)
        return dataclasses.replace(each, case=dataclasses.replace(each.case, exchange=exchange))

    told(step(2, 600_000), [step(2, size) for size in (200_000, 1_600_000)], step(1, 600_000), rel=0.1)


def test_the_parameters_are_extrapolated_where_workers_exchange_more_of_them_than_any_did(tmp_path):
    point = (*ASKED, "hardware=8gpu")
    plans = [planned(*point, f"workers={workers}") for workers in (1, 2, 8)]
    for plan in plans[:2]:
        ran(tmp_path, plan, [1e-3] * 3)
    found = predict.basis(plans[1], history.finished(tmp_path), "outputs")
    timed = predict.one_run(step_model.case_of(plans[0], 10 * PARAMETERS), [[1e-2] * 3] * 3)
    notes = [" ".join(predict.of_plan(plan, 10 * PARAMETERS, found, timed).notes) for plan in plans]
    assert ["the parameters are 10 times the most" in note for note in notes] == [False, True, True]
    assert ["workers are 4 times the most" in note for note in notes] == [False, False, True]


def test_one_worker_of_a_plan_is_comparable_with_it_and_what_a_run_of_one_worker_would_be():
    machine = Machine("host", tuple(range(4)), 16.0, "A processor")
    spans, several = ("multi_worker", "parameter_server"), ("hardware.hosts=2", "workers=4")
    strong = ("train.global_batch=96", "workers=3")
    points = [
        *((name, several) for name in spans),
        *((name, strong) for name in (*spans, "mirrored", "central_storage")),
    ]
    for strategy, point in points:
        named = (f"strategy={strategy}", "model=mlp", "hardware=4cpu")
        config = configured(*named, *point)
        many = planning.make(config, machine, present=False)
        one = planning.make(planning.on_one_worker(config, many), machine)
        batch, threads = many.training.replica_batch, many.hardware.threads_per_device
        assert comparable.apart(one, many) == []
        assert (one.workers, one.hardware.hosts, one.training.replica_batch) == (1, 1, batch)
        assert (one.hardware.threads_per_device, one.hardware.oversubscribed) == (threads, False)
        keys = ("workers=1", f"train.replica_batch={batch}", f"hardware.threads_per_device={threads}")
        run = planning.make(configured(*named, *keys), machine, present=False)
        assert step_model.identity(one) == step_model.identity(run)
        assert (one.measurement.baseline, one.measurement.explain, one.training.save) == ("none", False, False)


def test_runs_that_leave_a_step_open_are_refused_and_a_large_model_of_one_worker_alone_is_no_reason():
    runs = [on_cpu(1, 10_000, 1e-3), on_cpu(2, 10_000, 1.5e-3), on_cpu(1, 1_000_000, 1e-2)]
    seconds, low, high, *_ = predict.predict(on_cpu(2, 1_000_000).case, runs)
    assert 0 < low <= seconds <= high
    with pytest.raises(UserError, match="ones that leave it open"):
        predict.predict(on_cpu(1, 10_000).case, [on_cpu(2, 10_000, 1e-3), on_cpu(4, 10_000, 9e-3)])
    with pytest.raises(UserError, match=r"two workers or more .* workers=1 alone.* Try workers=2"):
        predict.predict(on_ring(4, 64, 1000), [seen(RING, 1, 64, 1000)])


@pytest.mark.parametrize(("logged", "why"), [
    (("strategy=mirrored",), r"that differ: the nearest in strategy \(.*mirrored; here .*multi_worker"),
    (("hardware=8cpu",), r"kind of device \(cpu; here gpu\)"),
    (("train.precision=mixed_bfloat16",), r"precision \(mixed_bfloat16; here float32\)"),
    (("model=cnn",), r"model \(pipeline.models.cnn; here pipeline.models.mlp\)"),
    (("train.optimizer=sgd",), "optimizer"),
    (("hardware.rehearse=true",), "rehearsals or oversubscribed"),
], ids=str)  # fmt: skip
def test_runs_that_say_nothing_of_a_plan_are_refused_with_the_reason(tmp_path, logged, why):
    ran(tmp_path, planned(*ASKED, "hardware=8gpu", "workers=2", *logged), [1e-3] * 3)
    with pytest.raises(UserError, match=f"^Expected .*{why}.* Try "):
        predict.basis(planned(*ASKED, "hardware=8gpu", "workers=4"), history.finished(tmp_path), "outputs")


def test_runs_of_another_machine_or_of_other_versions_are_left_out_and_counted(tmp_path):
    plan = planned(*ASKED, "hardware=8gpu", "workers=2")
    for each in (plan, plan, with_(plan, "hardware", machine="elsewhere")):
        ran(tmp_path, each, [1e-3])
    ran(tmp_path, plan, [1e-3], versions={"keras": "2"})
    ran(tmp_path, plan, [1e-3], status="FAILED")
    found = predict.basis(plan, history.finished(tmp_path), "outputs")
    assert (len(found.runs), found.fitted_on.left_out) == (2, 2)


def test_a_sweep_that_does_not_exist_is_refused_and_one_that_does_is_offered(tmp_path):
    (tmp_path / "sweeps" / "mine").mkdir(parents=True)
    (tmp_path / "sweeps" / "mine" / "sweep.json").touch()
    with pytest.raises(UserError, match=r"received other. Try predict.sweep=mine, or predict.sweep=null"):
        history.finished(tmp_path, "other")


def test_time_cost_and_energy_choose_their_best_and_the_knee_is_found():
    points = [
        Result(choices=Choices("mirrored"), layout=Layout(workers=workers, hosts=workers, scaling="weak"),
               speed=Speed(speed), cost=Cost(3600.0, 2.0, energy_joules=3600.0 * workers * watts))
        for workers, speed, watts in ((1, 100.0, 50), (2, 190.0, 40), (4, 330.0, 60), (8, 400.0, 60))
    ]  # fmt: skip
    assert measure.best(points) == {"time": 3, "cost": 0, "energy": 1}
    knees = [measure.knee_of(points, share) for share in (0.5, 0.1)]
    assert [knee.found for knee in knees] == [(4, 8, pytest.approx(0.175)), None]
    other = dataclasses.replace(points[0], choices=Choices("multi_worker"))
    assert measure.knee_of([*points, other], share=0.5) is None


def test_counters_of_processors_and_gpus_are_added_up_also_where_they_begin_anew_or_do_not_count(tmp_path, monkeypatch):
    import pynvml

    millijoules = {"volta": 5_000, "pascal": None}

    def read(device):
        if millijoules[device] is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return millijoules[device]

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 2)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", ["pascal", "volta"].__getitem__)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", read)
    monkeypatch.setattr(this_machine, "_gpu_counters", this_machine._gpu_counters.__wrapped__)
    for zone, name in (("intel-rapl:0", "package-0"), ("intel-rapl:0:0", "core"), ("intel-rapl:0:1", "dram")):
        (tmp_path / zone).mkdir()
        for file, text in (("name", name), ("energy_uj", "900000"), ("max_energy_range_uj", "1000000")):
            (tmp_path / zone / file).write_text(f"{text}\n")
    assert list(energy_counters(tmp_path / "none")) == ["gpu:1"]
    counted = joules(energy_counters(tmp_path))
    next(counted)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("400000\n")
    (tmp_path / "intel-rapl:0:1" / "energy_uj").write_text("1000000\n")
    millijoules["volta"] = 7_500
    assert next(counted) == pytest.approx(0.5 + 0.1 + 2.5)
    # A counter that cannot be read any more, or never could, ends nothing.
    gpus = joules(energy_counters(tmp_path / "none"))
    next(gpus)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert next(counted) is None
    millijoules["volta"] = None
    assert next(gpus) is None
    for counters in ({"gpu:0": lambda: (int(Path("/nowhere").read_text()), 0)}, {}):
        assert next(joules(counters)) is None


@pytest.mark.slow
def test_a_size_that_no_run_had_is_timed_on_one_device_unless_that_is_unwanted_or_known_and_scored(pipeline, tmp_path):
    point = ("strategy=parameter_server", "model=mlp", "data=digits", "tracking=none", "measure.baseline=none",
             "measure.repeats=3", "train.steps=6")  # fmt: skip
    pipeline("-m", *point, "workers=1,2", "model.build.hidden=[16],[256]").ok()
    other = ("mode=predict", *point, "model.build.hidden=[64]")
    shown = pipeline("-m", *other, "workers=1,2").ok()
    told = [json.loads(path.read_text()) for path in (tmp_path / "outputs").glob("sweeps/*/*/result.json")]
    # Adam keeps two numbers for each weight, beside its gradient, and a few for all.
    assert [each["state_bytes"] / each["parameters"] for each in told] == [pytest.approx(16, rel=0.01)] * 4
    assert len(list(tmp_path.glob("outputs/sweeps/*"))) == 1
    # Once for both.
    assert shown.out.count("Timing steps of one worker") == 1
    assert shown.out.count("; and steps of one worker, timed now: ") == 2
    lines = [json.loads(line) for line in (tmp_path / "outputs/predictions.jsonl").read_text().splitlines()]
    assert [line["parameters"] for line in lines] == [64 * 64 + 64 + 64 * 10 + 10] * 2
    fastest = max(lines, key=lambda line: line["examples_per_second"])["workers"]
    assert f"Fastest: point {fastest - 1}, parameter_server, {fastest} worker" in shown.out
    timed = lines[0]["fitted_on"]["timed_step_seconds"]
    # How far it goes towards what was timed depends on how far lives of its processes lay apart.
    assert lines[0]["low"] <= 64 / timed <= lines[0]["high"]
    priced = (*point, "model.build.hidden=[16]", "hardware.price_per_hour=2")
    for known in (("predict.time_one=false", *other), ("mode=predict", *priced, "train.epochs=3", "train.steps=null")):
        shown = pipeline(*known, "workers=2").ok()
        assert "timed" not in shown.out.partition("predicted  ")[2]
    assert not list((tmp_path / "outputs").glob("runs/*"))
    assert "fitted on  4 runs: parameter_server, mlp of 1,210 and 19,210 parameters, workers 1-2" in shown.out
    assert "at hardware.price_per_hour=2 on 1 host" in shown.out
    # It is scored by the run that comes after it.
    pipeline(*priced, "workers=2", "resume=never").ok()
    (path,) = tmp_path.glob("outputs/runs/*/result.json")
    result = json.loads(path.read_text())
    (scored,) = result["predictions"]
    assert (scored["measured"], scored["fitted_on"]["workers"]) == (result["examples_per_second"], [1, 2])
    assert scored["held"] == (scored["low"] <= scored["measured"] <= scored["high"])
    assert calibration.score([results.from_values(result)]).count == 1
    assert result["cost_to_finish"] == pytest.approx(2.0 * result["seconds_to_finish"] / 3600)
    assert "1 prediction scored: off by" in pipeline("mode=predict", *priced, "workers=2").out


def test_devices_that_are_elsewhere_are_not_timed(pipeline, tmp_path):
    there = ("strategy=mirrored", "model=mlp", "data=digits", "hardware=2gpu")
    ran(tmp_path / "outputs", planned(*there), [1e-3] * 3)
    shown = pipeline("mode=predict", *there, "model.build.hidden=[64]").ok()
    assert ("Timing" in shown.out, "timed" in shown.out) == (False, False)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "widest"), [("usual", 4.5), ("loud", 3.0), ("minutes", 2.5)])
def test_intervals_hold_17_of_20_and_are_few_times_as_wide_as_the_spread_of_equal_runs(kind, widest):
    rng = np.random.default_rng(24)
    made = [hours.hour(rng, hours.KINDS[kind]) for _ in range(12)]
    shares = [share for found, _ in made for share in hours.together(found)]
    assert np.mean(shares) >= 0.9, shares
    assert np.mean([share >= 0.85 for share in shares]) >= 0.8, shares
    half_width = np.median([one.half_width for found, _ in made for one in found])
    assert half_width < widest * math.sqrt(np.mean([apart**2 for _, apart in made if apart]))


def test_what_earlier_predictions_were_off_is_taken_off_and_the_interval_has_luck_and_doubt_once():
    few, some, many = (calibration.calibration([], [(-0.15, 0.02)] * count).shift for count in (1, 4, 16))
    assert 0 > few > some > many > -0.15
    assert many < -0.1
    # A run's luck is in the interval once, and what the fit is unsure of beside it.
    sure = calibration.calibration([(f"{place // 2}", 0.1 * (-1) ** place) for place in range(200)], [])
    assert sure.spread == pytest.approx(0.1 * math.sqrt(2), rel=0.02)
    # Until predictions have told what the model is off, that is half as much (in variances) as runs lie apart.
    assert sure.deviation == pytest.approx(sure.spread * math.sqrt(1.5))
    told = calibration.calibration([], [(0.1 * (-1) ** place, 0.0) for place in range(200)])
    assert told.half_width() == pytest.approx(1.98 * 0.1, rel=0.02)
    assert told.half_width(0.1) == pytest.approx(math.sqrt(2) * told.half_width(), rel=0.02)


def test_runs_of_one_point_that_lie_apart_widen_the_interval_and_say_so():
    def of_pairs(apart: float) -> calibration.Calibration:
        runs = [(f"{place // 2}", apart * (place % 2)) for place in range(24)]
        return calibration.calibration([*runs, ("ran once", 5.0)], [])

    quiet, busy = of_pairs(0.01), of_pairs(0.2)
    assert quiet.half_width() < 0.08 < 0.2 < busy.half_width()
    assert (quiet.equal, busy.equal, quiet.freedom) == (24, 24, calibration.PRIOR_FREEDOM + 12)
    assert busy.spread == pytest.approx(0.2 / math.sqrt(2), rel=0.15)


def line(plan, speed: float, **other: object) -> PredictionLine:
    made = predict.Prediction(
        examples_per_second=speed, low=speed * 0.9, high=speed * 1.1, confidence=0.9, step_seconds=1.0, parts={},
        fitted_on=FittedOn(runs=4, machine="host"), strategy=plan.strategy.name,
    )  # fmt: skip
    return dataclasses.replace(calibration.line_of(plan, made, 1.0), **other)


# Of an earlier version there is none, and the interval says it.
@pytest.mark.parametrize("unsure", [None, math.log(1.1 / 0.9) / 2 / calibration.normal(0.9)])
def test_the_log_tells_of_runs_that_are_alike_and_of_predictions_once_for_each_run(tmp_path, unsure):
    plans = [planned(*ASKED, "hardware=8gpu", f"workers={workers}") for workers in (1, 2)]
    machine = plans[0].hardware.machine
    for began in range(3):
        for plan in plans:
            ran(tmp_path, plan, [1e-3 * (1 + 0.05 * began)] * 3, began=100.0 * began)
    # 20% too fast, before half of that was taken off; and two that say nothing of this strategy and machine.
    fitted, speed = FittedOn(runs=4, machine=machine), 2 * 64 / 1e-3
    lines = [
        line(plans[1], speed * 9, fitted_on=fitted, strategy="mirrored"),
        line(plans[1], speed * 9, fitted_on=FittedOn(runs=4, machine="elsewhere")),
        line(plans[1], speed * 3, fitted_on=fitted),
        line(plans[1], speed * 1.1, fitted_on=fitted, correction=1.1 / 1.2, unsure=unsure),
    ]
    scored = [calibration.scored([made], made.identity, speed)[0] for made in lines]
    ran(tmp_path, plans[1], [1e-3] * 3, began=400.0, predictions=[dataclasses.asdict(made) for made in scored])
    logged = history.finished(tmp_path)
    found = calibration.of_log(plans[0], predict.basis(plans[0], logged, "outputs"), logged)
    assert (found.equal, found.freedom) == (6, calibration.PRIOR_FREEDOM + 6 - 2 + 1)
    assert found.shift == pytest.approx(-0.0305, abs=1e-4)


def test_a_line_of_an_earlier_version_is_read_and_had_nothing_taken_off(tmp_path):
    values = dataclasses.asdict(line(planned(*ASKED, "hardware=8gpu", "workers=2"), 100.0))
    older = {name: value for name, value in values.items() if name not in ("correction", "unsure")}
    (tmp_path / PREDICTIONS).write_text(json.dumps(older) + "\n")
    (read,) = read_predictions(tmp_path)
    assert (read.correction, read.unsure) == (1.0, None)


def test_beside_a_prediction_stands_how_wide_it_is_how_far_runs_lie_apart_and_how_many_earlier_ones_held():
    speed = Speed(100.0, 85.0, 115.0, interval_confidence=0.9)
    result = Result(speed=speed, layout=Layout(workers=2, scaling="weak"))
    score = calibration.Score(count=20, median_error=0.06, held=0.85)
    prediction = predict.Prediction(
        examples_per_second=100.0, low=85.0, high=115.0, confidence=0.9, step_seconds=1.0, parts={"compute": 1.0},
        fitted_on=FittedOn(runs=4), spread=0.071, equal=12,
    )  # fmt: skip
    foreseen = Foreseen(prediction, score, 0.5)
    lines = predicted_lines(result, foreseen)
    wide = "15% to either side; equal runs lie 7.1% apart (a standard deviation, as 12 of them tell)"
    assert f"interval   {wide}" in lines
    assert "earlier    20 predictions scored: off by 6.0% (median), 17 of 20 intervals held." in lines
    unknown = dataclasses.replace(foreseen, prediction=dataclasses.replace(prediction, equal=0))
    told = predicted_lines(result, unknown)[1]
    assert told.endswith("7.1% apart (a standard deviation, as on other machines, since none was run again here)")

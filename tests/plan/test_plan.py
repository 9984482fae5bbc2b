"""The plan: who computes what, on which cores, at which address, on which batch, and what is refused."""

import contextlib
import dataclasses
import itertools
import json
import math
import re
from typing import Any

import pytest
from bad_input import ZERO_IS_FINE
from plans import HARDWARE, PORTS, STRATEGIES, cluster, config, machine, with_ports
from shipped_sizes import planned

from pipeline.config.parts import ABOVE_ZERO, LEAST, places
from pipeline.config.schema import Baseline, Config, Kind, Precision, Scaling, Store, TrackingConfig
from pipeline.errors import UserError
from pipeline.plan.checks import check_ranges
from pipeline.plan.division import split_batch
from pipeline.plan.machine import Host, Machine, inventory
from pipeline.plan.plan import Plan, fingerprint, from_json
from pipeline.plan.planning import DEFAULT_EPOCHS, baseline_of, make
from pipeline.views.terminal.plan_text import plan_lines


@pytest.mark.parametrize(("cores", "gpus"), [(1, 0), (2, 0), (3, 0), (8, 8), (16, 8), (64, 0)])
def test_whatever_the_layout_a_plan_is_whole_or_refused_in_words(cores, gpus):
    planned = 0
    for strategy, hardware, workers in itertools.product(STRATEGIES, HARDWARE, (None, 1, 2, 3, 4, 6, 8)):
        try:
            plan = with_ports(make(config(strategy, hardware, workers), machine(cores, gpus)))
        except UserError as refused:
            message = str(refused)
            assert re.fullmatch(r"Expected .*, received .* Try .*", message), message
            continue
        planned += 1
        assert_whole(plan, cores)
        assert from_json(plan.to_json()) == plan
    assert planned >= 40


def assert_whole(plan: Plan, cores: int) -> None:
    """What holds for every plan."""
    processes = plan.processes
    assert [each.rank for each in processes] == list(range(len(processes)))
    training = [each for each in processes if each.replicas]
    if plan.strategy.asynchronous:
        assert [each.role for each in training] == ["worker"] * plan.workers
        assert {each.role for each in processes if not each.devices} == {"coordinator", "parameter server"}
    else:
        assert [each.role for each in processes] == ["chief", *["worker"] * (len(processes) - 1)]
    assert [replica for each in processes for replica in each.replicas] == list(range(plan.workers))
    assert plan.hardware.hosts == max(each.host for each in processes) + 1
    assert [each.host for each in training] == sorted(each.host for each in training)
    alike = 1 if plan.strategy.asynchronous else plan.workers
    assert plan.training.global_batch == plan.training.replica_batch * alike
    for each in training:
        assert len(each.devices) == len(each.replicas) > 0
        assert {name.split(":")[0] for name in each.devices} == {plan.hardware.kind.upper()}
    addresses = [f"127.0.0.1:{port}" for port in PORTS[: len(processes)]]
    assert [each.address for each in processes] == (addresses if len(processes) > 1 else [None])
    taken = [core for each in processes for core in each.cores]
    assert len(taken) == len(set(taken)) <= cores
    if plan.hardware.kind == "cpu" and not plan.hardware.oversubscribed:
        assert all(len(each.cores) == (plan.hardware.threads_per_device or 0) * len(each.devices) for each in training)
        assert all(each.inter_op_threads >= 2 for each in training)
    else:
        assert taken == []
    names = [name for each in processes for name in each.devices]
    assert plan.hardware.kind == "cpu" or len(set(names)) == len(names)


@pytest.mark.parametrize(("strategy", "hardware", "workers", "processes", "devices"), [
    ("one_device", "8cpu", None, 1, 1),
    ("one_device", "8gpu", 1, 1, 1),
    ("mirrored", "8cpu", None, 1, 8),
    ("mirrored", "8gpu", 4, 1, 4),
    ("mirrored", "auto", 3, 1, 3),
    # One host's share of two.
    ("mirrored", "2x4gpu", 4, 1, 4),
    ("multi_worker", "8cpu", None, 8, 1),
    ("multi_worker", "4gpu", 2, 2, 1),
    ("multi_worker", "2x1cpu", None, 2, 1),
    ("multi_worker", "2x4gpu", None, 2, 4),
    ("multi_worker", "2x4gpu", 4, 2, 2),
    ("multi_worker", "2x4gpu", 1, 1, 1),
    *(("multi_worker", "2x4gpu", {"strategy__devices_per_process": each}, 8 // each, each) for each in (1, 2, 4)),
])  # fmt: skip
def test_a_strategy_lays_its_workers_out_and_devices_per_process_overrides_that(
    strategy, hardware, workers, processes, devices
):
    keys = workers if isinstance(workers, dict) else {"workers": workers}
    plan = with_ports(make(config(strategy, hardware, **keys), machine(8, 8)))
    assert [len(each.devices) for each in plan.processes] == [devices] * processes
    assert_whole(plan, 8)


@pytest.mark.parametrize(("strategy", "hardware", "workers", "cores", "threads"), [
    ("multi_worker", "8cpu", 2, [(3,), (4,)], 1),
    ("multi_worker", "2cpu", None, [(3, 4, 5, 6), (7, 8, 9, 10)], 4),
    ("mirrored", "4cpu", None, [tuple(range(3, 11))], 2),
])  # fmt: skip
def test_cores_are_shared_out_over_the_workers_that_take_part_by_the_machines_numbers(
    strategy, hardware, workers, cores, threads
):
    there = dataclasses.replace(machine(), cores=tuple(range(3, 11)))
    plan = make(config(strategy, hardware, workers), there)
    assert ([each.cores for each in plan.processes], plan.hardware.threads_per_device) == (cores, threads)
    assert {each.intra_op_threads for each in plan.processes} == {threads * len(plan.processes[0].devices)}


SHARED = "4 CPU devices of 1 thread share 2 cores: the speedup says nothing about 4 separate devices."
TWO_HOSTS = "This machine stands for 2 hosts: a rehearsal."


@pytest.mark.parametrize(("made", "cores", "shares", "rehearses", "places", "notes"), [
    (config("multi_worker", "2cpu", hardware__threads_per_device=4), 4, True, False, [(), ()],
     ["2 CPU devices of 4 threads share 4 cores: the speedup says nothing about 2 separate devices."]),
    (config("mirrored", "auto", 4), 2, True, False, [()], [SHARED]),
    (config("mirrored", "1cpu"), 1, False, False, [(0,)], []),
    (config("multi_worker", "2x1cpu"), 8, False, True, [(0, 1, 2, 3), (4, 5, 6, 7)], [TWO_HOSTS]),
    (config("multi_worker", "2x1cpu", hardware__threads_per_device=2), 2, True, True, [(), ()],
     [TWO_HOSTS, "2 CPU devices of 2 threads share 2 cores: the speedup says nothing about 2 separate devices."]),
])  # fmt: skip
def test_devices_that_share_cores_and_hosts_that_stand_for_others_are_said(
    made, cores, shares, rehearses, places, notes
):
    plan = with_ports(make(made, machine(cores)))
    assert (plan.hardware.oversubscribed, plan.hardware.rehearsal) == (shares, rehearses)
    assert [each.cores for each in plan.processes] == places
    assert sorted(plan.notes) == sorted(notes)


def test_auto_takes_the_gpus_a_tpu_under_its_strategy_or_the_cores_and_gpus_that_are_not_there_are_refused():
    assert make(config(), machine(4, 2)).processes[0].devices == ("GPU:0", "GPU:1")
    assert make(config(), machine(4)).processes[0].devices == ("CPU:0", "CPU:1", "CPU:2", "CPU:3")
    assert make(config(hardware__rehearse=True), machine(4, 2)).hardware.kind == "cpu"
    there = dataclasses.replace(machine(), tpus=("/dev/vfio/0", "/dev/vfio/1"))
    assert make(config("tpu", "auto"), there).processes[0].devices == ("TPU:0", "TPU:1")
    assert make(config("mirrored", "auto"), there).hardware.kind == "cpu"
    with pytest.raises(UserError, match="Try hardware=tpu_v5e_8"):
        make(config("tpu", "auto", hardware__rehearse=True), there)
    lacks = r"hardware=8gpu has 8 GPUs, this machine has 2 and 4 CPU cores"
    with pytest.raises(UserError, match=rf"{lacks}. Try hardware=2gpu,"):
        make(config("mirrored", "8gpu"), machine(4, 2))
    with pytest.raises(UserError, match=r"Try hardware=auto, or hardware.rehearse=true"):
        make(config("mirrored", "1gpu"), machine(4))
    with pytest.raises(UserError, match="has 8 GPUs"):
        make(config("multi_worker", "2x4gpu"), machine(4, 4))
    plan = make(config("mirrored", "8gpu"), machine(4, 2), present=False)
    assert plan.notes == (f"{lacks}: a run here is refused without hardware.rehearse=true.",)


def test_a_rehearsal_has_the_same_layout_on_cpu_devices_and_says_so():
    real = cluster(8, 4, hardware="2x4gpu")
    rehearsed = with_ports(make(config("multi_worker", "2x4gpu", hardware__rehearse=True), machine(8)))
    assert (real.hardware.rehearsal, rehearsed.hardware.rehearsal) == (False, True)
    assert rehearsed.notes == ("Logical CPU devices stand for the devices of 2x4gpu: a rehearsal.",)
    real_ones, others = (
        [(each.rank, each.host, each.replicas, each.address, len(each.devices)) for each in plan.processes]
        for plan in (real, rehearsed)
    )
    assert real_ones == others


def test_hosts_of_their_own_number_their_cores_and_devices_from_zero():
    plan = cluster(8, 4, hardware="2x4gpu", strategy__devices_per_process=2)
    assert [each.devices for each in plan.processes] == [("GPU:0", "GPU:1"), ("GPU:2", "GPU:3")] * 2
    assert not plan.hardware.rehearsal
    plan = cluster(8, hardware="2x1cpu", hardware__devices_per_host=2)
    on_hosts = [(each.cores, each.replicas) for each in plan.processes]
    assert (on_hosts, plan.notes) == ([(tuple(range(8)), (0, 1)), (tuple(range(8)), (2, 3))], ())


@pytest.mark.parametrize(("made", "words"), [
    (("one_device", "2cpu", 2), "Expected workers=1, since one_device trains on one device, received workers=2."),
    (("mirrored", "2x4gpu"), "Try strategy=multi_worker, or workers=4 for one host."),
    (("mirrored", "4gpu", 5), "Expected no more workers than devices, received workers=5"),
    (("multi_worker", "2x4gpu", 9), "received workers=9 on hardware=2x4gpu with 8. Try workers=8."),
    (("multi_worker", "2x4gpu", 7), "Expected workers that divide evenly over 2 hosts, received workers=7."),
    (("multi_worker", "2x4gpu", 3), "divide evenly over 2 hosts, received workers=3. Try workers=2."),
    (("multi_worker", "2x4gpu", {"strategy__devices_per_process": 3}),
     "to divide the 4 workers of a host, received 3. Try strategy.devices_per_process=2."),
    (("parameter_server", {"measure__explain": True}), "measure.explain=false under strategy=parameter_server"),
    (("mirrored", {"measure__explain": True, "measure__steps": 0}), "measure.steps=0. Try measure.steps=null"),
    (("mirrored", {"measure__explain": True, "measure__baseline": Baseline.none}), "none. Try measure.baseline=null"),
    (("mirrored", {"strategy__parameter_servers": 2}), "Try strategy.parameter_servers=null"),
    (("mirrored", {"strategy__asynchronous": True}), "received true. Try strategy.asynchronous=false."),
    (("mirrored", {"strategy__min_shard_bytes": 2}), "Try strategy.min_shard_bytes=null"),
    (("mirrored", {"strategy__devices_per_process": 4}), "Expected strategy.devices_per_process=2, since mirrored"),
    (("parameter_server", {"strategy__parameter_servers": 0}), "strategy.parameter_servers to be 1 or more"),
    (("parameter_server", {"strategy__parameter_servers": 10**9}), "Try strategy.parameter_servers=null."),
    (("parameter_server", {"strategy__min_shard_bytes": 0}), "Expected strategy.min_shard_bytes to be 1 or more"),
    (("parameter_server", {"strategy__devices_per_process": 2}), "Try strategy.devices_per_process=1."),
    (("parameter_server", {"train__deterministic": True}), "workers train asynchronously, received true. Try work"),
    (("parameter_server", {"launch__max_restarts": -1}), "Expected launch.max_restarts to be 0 or more"),
    (("multi_worker", {"cluster__base_port": 65_535}), "65535, received 65535. Try cluster.base_port=null"),
    (("mirrored", "auto", 500_000), "Expected no more than 65536 workers"),
    (("multi_worker", {"hardware__hosts": 500, "hardware__devices_per_host": 1_000, "hardware__rehearse": True}),
     "Expected no more than 65536 workers"),
    (("mirrored", {"data__validation_examples": -1}), "Expected data.validation_examples to be 0 or more"),
    (("mirrored", {"data__train_examples": -1}), "Expected data.train_examples to be 1 or more"),
    (("mirrored", {"train__epochs": 3, "train__steps": 7}), "both (3 and 7). Try train.epochs=null or train.steps=nul"),
    *((("mirrored", {"tracking": TrackingConfig("server", Store.server, uri)}),
       "Expected tracking.uri to be an MLflow server's address") for uri in (None, "", "localhost:5000", "file:///tmp")),
    *((("mirrored", {"cluster__host": host}), "Try cluster.host=127.0.0.1.") for host in (
        "", " ", "0.0.0.0", "127.0.0.2", "127.evil.example", "::1", "a b", "a:1", "-a", "a/b")),
    *((("tpu", "tpu_v5e_8", keys), words) for keys, words in (
        ({"train__check": "strict"}, "received strict. Try train.check=true, or strategy=mirrored."),
        ({"measure__baseline": Baseline.fresh}, "received fresh. Try measure.baseline=none, and -m workers=1,8"),
        ({"measure__explain": True},
         "received none on a TPU, which leaves no device for one. Try measure.explain=false"),
        ({"data__train_examples": 100, "train__replica_batch": 64},
         "one whole batch of 512, since a TPU takes no other, received 100 examples. Try train.replica_batch=12"))),
])  # fmt: skip
def test_what_a_strategy_a_layout_or_any_plan_cannot_have_is_refused(made, words):
    strategy, *layout = made
    keys = layout.pop() if isinstance(layout[-1], dict) else {}
    with pytest.raises(UserError, match=re.escape(words)):
        make(config(strategy, *(layout or ["2cpu"]), **keys), dataclasses.replace(machine(8, 8), tpus=("/dev/vfio/0",)))


def test_what_is_at_the_edge_of_what_is_refused_is_taken():
    make(config("multi_worker", "2cpu", cluster__base_port=65_534), machine(8))
    make(config("mirrored", "2cpu", cluster__base_port=65_535), machine(8))
    make(config(tracking=TrackingConfig("server", Store.server, "https://mlflow.example")), machine(8))


@pytest.mark.parametrize(("replica", "total", "declared", "expected"), [
    (None, None, None, ("weak", 64, 256)),
    (None, None, Scaling.strong, ("strong", 16, 64)),
    (None, None, Scaling.weak, ("weak", 64, 256)),
    (32, None, None, ("weak", 32, 128)),
    (None, 96, None, ("strong", 24, 96)),
    (7, None, Scaling.weak, ("weak", 7, 28)),
    (None, 4, Scaling.strong, ("strong", 1, 4)),
    # What contradicts itself is refused, and a near one offered.
    (8, 8, None, "received both (8 and 8). Try train.replica_batch=null or train.global_batch=null."),
    (None, 100, Scaling.weak, "Try train.replica_batch=25 train.global_batch=null, or measure.scaling=strong."),
    (25, None, Scaling.strong, "Try train.global_batch=100 train.replica_batch=null, or measure.scaling=weak."),
    (None, 3, None, "evenly over 4 replicas, received 3. Try train.global_batch=4."),
    (None, 1, None, "Try train.global_batch=4."),
    (None, 1001, None, "Try train.global_batch=1000."),
])  # fmt: skip
def test_one_batch_is_held_fixed_and_decides_the_other(replica, total, declared, expected):
    asked = config(train__replica_batch=replica, train__global_batch=total, measure__scaling=declared)
    if isinstance(expected, tuple):
        assert split_batch(asked, 4) == expected
    else:
        with pytest.raises(UserError, match=re.escape(expected)):
            split_batch(asked, 4)


@pytest.mark.parametrize(("replicas", "total"), [*itertools.product([1, 2, 3, 7, 8, 100], [1, 5, 64, 99, 1000])])
def test_the_batch_that_is_offered_is_taken(replicas, total):
    try:
        assert split_batch(config(train__global_batch=total), replicas)[2] == total
    except UserError as refused:
        offered = int(refused.try_this.partition("=")[2])
        assert split_batch(config(train__global_batch=offered), replicas)[2] == offered


@pytest.mark.parametrize(("strategy", "keys", "length"), [
    ("mirrored", {}, (DEFAULT_EPOCHS, None)),
    ("parameter_server", {}, (DEFAULT_EPOCHS, None)),
    ("mirrored", {"train__steps": 7}, (None, 7)),
    ("mirrored", {"train__epochs": 3}, (3, None)),
])  # fmt: skip
def test_it_trains_whole_epochs_where_no_length_is_given_and_an_uneven_last_step_counts(strategy, keys, length):
    plan = make(config(strategy, "4cpu", 3, train__replica_batch=8, **keys), machine(8))
    assert (plan.training.epochs, plan.training.steps) == length
    batch = plan.training.global_batch
    assert [plan.steps_per_epoch(examples) for examples in (1, batch, batch + 1, 7 * batch + 5)] == [1, 1, 2, 8]


# Of each number of the schema what is too little or no number; what is offered for a count is the least of it.
OUT_OF_RANGE = [
    *[(key, value, None if field.metadata[LEAST] == ABOVE_ZERO else field.metadata[LEAST])
      for key, field in places(Config).items() if LEAST in field.metadata and key != "strategy.bucket_bytes"
      for value in (-1, math.nan, math.inf, *[0] * (key not in ZERO_IS_FINE))],
    ("train.seed", 2**31, 0),
    ("train.gradient_bits", 8, 32),
    ("train.batch_statistics", "worker", "global"),
    ("train.xla", "maybe", "auto"),
    ("data.input_shape", [8, 0], None),
    ("train.optimizer", "adamm", None),
    ("train.optimizer", {"momentum": 0.9}, None),
    ("train.optimizer", 3, None),
    ("cluster.base_port", 65_536, None),
    ("output_dir", "", None),
    ("tracking.experiment", "", None),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "usual"), OUT_OF_RANGE, ids=lambda each: str(each))
def test_a_value_out_of_range_is_refused_and_what_is_offered_is_not(key, value, usual):
    name = key.replace(".", "__")
    with pytest.raises(UserError, match=f"^Expected {key} ") as refused:
        check_ranges(config(**{name: value}))
    message = str(refused.value)
    offered = message.partition(f"Try {key}=")[2].rstrip(".")
    assert offered == str(usual) if usual is not None else offered
    with contextlib.suppress(ValueError):
        offered = json.loads(offered)
    check_ranges(config(**{name: offered}))


@pytest.mark.parametrize(("strategy", "whose", "instead"), [
    ("parameter_server", "host", "multi_worker"), ("central_storage", "replica", "mirrored")
])  # fmt: skip
def test_batch_statistics_that_a_strategy_cannot_have_are_refused(strategy, whose, instead):
    words = rf"train.batch_statistics=global.* received {whose}\. Try .*strategy={instead}\."
    with pytest.raises(UserError, match=words):
        planned(f"strategy={strategy}", "workers=2", f"train.batch_statistics={whose}")
    planned(f"strategy={instead}", "workers=2", f"train.batch_statistics={whose}")


@pytest.mark.parametrize(("strategy", "keys", "instead"), [
    ("parameter_server", {}, "strategy=mirrored"),
    ("mirrored", {"train__deterministic": True}, "train.deterministic=false"),
])  # fmt: skip
def test_xla_where_it_compiles_no_step_is_refused(strategy, keys, instead):
    with pytest.raises(UserError, match=rf"train.xla=false under .* received true\. Try train.xla=false, or {instead}"):
        make(config(strategy, "4cpu", 2, train__xla="true", **keys), machine(8))
    for xla, noted in (("auto", True), ("false", False)):
        plan = make(config(strategy, "4cpu", 2, train__xla=xla, **keys), machine(8))
        assert (plan.training.xla, "XLA compiles no step under " in " ".join(plan.notes)) == (None, noted)
    assert make(config(train__xla="True"), machine(8)).training.xla == "true"


@pytest.mark.parametrize(("made", "there", "batches", "devices", "cores"), [
    (config("multi_worker", "4cpu", train__precision=Precision.mixed_bfloat16, train__callbacks=[{"_target_": "a.b"}]),
     machine(8), (64, 64, "weak"), ("CPU:0",), (0, 1)),
    (config("mirrored", "4cpu", train__global_batch=64), machine(8), (64, 64, "strong"), ("CPU:0",), (0, 1)),
    (config("mirrored", "auto", 4), machine(2), (64, 64, "weak"), ("CPU:0",), (0,)),
    (config("mirrored", "4gpu", 4), machine(8, 4), (64, 64, "weak"), ("GPU:0",), ()),
])  # fmt: skip
def test_the_baseline_is_one_device_with_the_same_threads_precision_and_batch_rule(
    made, there, batches, devices, cores
):
    plan = with_ports(make(made, there))
    one = baseline_of(plan, there)
    assert_whole(one, 8)
    (process,) = one.processes
    assert (one.workers, one.hardware.hosts, process.address, process.devices, process.cores) == (
        1, 1, None, devices, cores
    )  # fmt: skip
    threads = plan.hardware.threads_per_device
    assert (one.hardware.threads_per_device, process.intra_op_threads) == (threads, threads or 0)
    assert (one.training.replica_batch, one.training.global_batch, one.training.scaling) == batches
    assert (one.training.precision, one.training.callbacks, one.training.save) == (plan.training.precision, (), False)
    assert one.strategy.build["_target_"] == "pipeline.strategies.default"
    assert (one.hardware.oversubscribed, one.notes) == (False, ())


def name_of(made: Config, cores: int = 8, gpus: int = 0, keras: str = "3.15.0") -> str:
    there = machine(cores, gpus)
    return fingerprint(baseline_of(make(made, there), there), {"tensorflow": "2.21.0", "keras": keras})


@pytest.mark.parametrize(("keys", "there", "shared"), [
    *(({key: value}, {}, True) for key, value in {
        "strategy": "multi_worker", "train__epochs": 9, "train__callbacks": [{"_target_": "a.b"}],
        "measure__repeats": 3, "launch__stop_timeout": 9.0, "train__replica_batch": 64,
    }.items()),
    ({"hardware": "8cpu", "workers": 4, "hardware__threads_per_device": 2}, {}, True),
    *(({key: value}, {}, False) for key, value in {
        "train__replica_batch": 32, "train__global_batch": 256, "train__precision": Precision.mixed_bfloat16,
        "train__optimizer": "sgd", "train__learning_rate": 0.1, "train__deterministic": True, "train__loss": "mse",
        "train__steps_per_call": 3, "model__build": {"_target_": "pipeline.models.mlp", "hidden": [9]},
        "data__build": {"_target_": "pipeline.data.digits", "split_seed": 1}, "data__shuffle": False,
        "hardware__threads_per_device": 1, "measure__warmup_steps": 9,
    }.items()),
    # Nor between machines or versions.
    ({"hardware__threads_per_device": 2}, {"cores": 16}, False),
    ({"hardware__threads_per_device": 2}, {"gpus": 1}, False),
    ({}, {"keras": "3.16.0"}, False),
], ids=str)  # fmt: skip
def test_a_baseline_is_shared_where_nothing_differs_that_decides_its_speed(keys, there, shared):
    made = config(**{"strategy": "mirrored", "hardware": "4cpu"} | keys)
    assert (name_of(made, **there) == name_of(config("mirrored", "4cpu"))) is shared


def on_tpu(there: Machine | None = None, present: bool = True, **keys: Any) -> Plan:
    """The plan of eight TPU devices on a machine that has them."""
    there = there or dataclasses.replace(machine(), tpus=("/dev/vfio/0",))
    return make(config("tpu", "tpu_v5e_8", **keys), there, present=present)


def test_a_tpu_s_devices_belong_to_one_process_in_bfloat16_and_static_batches():
    plan = on_tpu(data__train_examples=1_000)
    (process,) = plan.processes
    assert process.devices == tuple(f"TPU:{index}" for index in range(8))
    facts = plan.hardware.kind, plan.workers, plan.training.precision, plan.strategy.build["address"]
    assert facts == ("tpu", 8, "mixed_bfloat16", "local")
    assert (plan.strategy.static_batches, plan.steps_per_epoch(1_000)) == (True, 1)
    for other in (on_tpu(train__precision=Precision.float32), make(config("mirrored", "2cpu"), machine())):
        assert other.training.precision == "float32"


def test_a_tpu_has_no_baseline_beside_it_and_says_so_and_a_batch_that_nobody_named_fits_little_data():
    plan = on_tpu()
    assert (plan.measurement.baseline, "compare with a run of workers=1" in plan.notes[-1]) == ("none", True)
    assert "baseline" not in " ".join(on_tpu(measure__baseline=Baseline.none).notes)
    assert on_tpu(data__train_examples=100).training.replica_batch == 12
    assert on_tpu(data__train_examples=100, train__replica_batch=12).training.global_batch == 96
    # A rehearsal has its batches and precision, and a baseline.
    plan = on_tpu(machine(2), hardware__rehearse=True)
    assert (plan.hardware.kind, plan.hardware.rehearsal, plan.measurement.baseline) == ("cpu", True, "once")
    for each, batch in ((plan, 512), (baseline_of(plan, machine(2)), 64)):
        facts = each.training.precision, each.strategy.static_batches, each.training.global_batch
        assert facts == ("mixed_bfloat16", True, batch)


@pytest.mark.parametrize(("examples", "shuffle", "words"), [
    (1_000, True, "each epoch leaves out 488 of 1000 training examples, others each time."),
    (1_000, False, "each epoch leaves out 488 of 1000 training examples."),
    (None, False, "each epoch leaves out up to 511 training examples."),
    (1_024, True, ""),
])  # fmt: skip
def test_what_static_batches_leave_out_is_said(examples, shuffle, words):
    said = " ".join(on_tpu(data__train_examples=examples, data__shuffle=shuffle).notes)
    assert ("each epoch" in said, words in said) == (bool(words), True)


@pytest.mark.parametrize(("given", "named", "chips", "found"), [
    (None, None, ("/dev/accel0",), "local"),
    ("local", "grpc://10.0.0.3:8470", ("/dev/accel0",), "local"),
    (None, "local", ("/dev/accel0",), "local"),
    (None, "my-tpu", ("/dev/accel0",), "local"),
    (None, "grpc://10.0.0.3:8470", (), "grpc://10.0.0.3:8470"),
    ("grpc://tpu.example:8470", "grpc://10.0.0.3:8470", (), "grpc://tpu.example:8470"),
    ("grpc://[::1]:8470", None, (), "grpc://[::1]:8470"),
])  # fmt: skip
def test_a_tpu_is_where_it_is_said_to_be_or_attached(given, named, chips, found):
    there = dataclasses.replace(machine(), tpus=chips, tpu_name=named)
    build = STRATEGIES["tpu"].build | {"address": given}
    assert on_tpu(there, strategy__build=build).strategy.build["address"] == found


@pytest.mark.parametrize(
    "address", ["my-tpu", "http://10.0.0.2:8470", "grpc://:8470", "grpc://a:0", "grpc://a:b", 8470]
)
def test_an_address_that_is_none_is_refused_and_the_one_offered_is_taken(address):
    build = STRATEGIES["tpu"].build
    with pytest.raises(UserError, match=r"Expected strategy\.build\.address to be local or ") as refused:
        on_tpu(machine(), strategy__build=build | {"address": address})
    offered = str(refused.value).rpartition("Try strategy.build.address=")[2].rstrip(".")
    assert on_tpu(machine(), strategy__build=build | {"address": offered}).strategy.build["address"] == offered


def test_a_plan_survives_json_with_whatever_a_person_gave_and_takes_ports():
    build = {"_target_": "own.model", "widths": [1, 2, [3]], "inner": {"_target_": "own.layer", "names": ["a"]}}
    made = config(
        "multi_worker", "2x4gpu", model__build=build, data__build={"_target_": "own.data", "parts": []},
        train__optimizer={"_target_": "keras.optimizers.SGD", "betas": [0.9]}, train__loss=["mse", {"a": ["mae"]}],
        train__metrics=["accuracy", {"_target_": "keras.metrics.TopK", "k": 3}],
        train__callbacks=[{"_target_": "own.callback", "steps": [1, 2]}], data__input_shape=None, train__seed=3,
    )  # fmt: skip
    drafted = make(made, machine(8, 8))
    plan = with_ports(drafted)
    assert from_json(plan.to_json()) == plan
    # One without ports yet is the same but for them.
    assert [each.address for each in drafted.processes] == ["127.0.0.1:0"] * 2
    assert drafted.processes == tuple(dataclasses.replace(each, address="127.0.0.1:0") for each in plan.processes)


@pytest.mark.parametrize(("workers", "named", "servers"), [(1, None, 1), (4, None, 1), (5, None, 2), (2, 3, 3)])
def test_racing_workers_have_a_coordinator_and_a_server_for_every_four(workers, named, servers):
    plan = with_ports(make(config("parameter_server", "8cpu", workers, strategy__parameter_servers=named), machine(8)))
    assert_whole(plan, 8)
    roles = [process.role for process in plan.processes]
    assert roles == ["coordinator", *["worker"] * workers, *["parameter server"] * servers]
    assert [process.replicas for process in plan.processes if process.devices] == [(rank,) for rank in range(workers)]
    assert (plan.leaders, plan.concurrent_steps, plan.ranks("worker")) == ((0,), workers, tuple(range(1, workers + 1)))
    assert any(note.startswith("Asynchronous") for note in plan.notes) == (workers > 1)


@pytest.mark.parametrize("batch", ["replica_batch", "global_batch"])
def test_a_racing_worker_makes_each_step_alone_and_hosts_share_the_servers_out(batch):
    keys = {f"train__{batch}": 48, "strategy__parameter_servers": 2}
    plan = make(config("parameter_server", "2x4gpu", **keys), machine(8, 8))
    assert (plan.training.replica_batch, plan.training.global_batch, plan.hardware.hosts) == (48, 48, 2)
    assert [process.host for process in plan.processes] == [0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 1]
    one = baseline_of(plan, machine(8, 8))
    assert (one.training.global_batch, one.strategy.asynchronous, one.concurrent_steps) == (48, False, 1)
    assert [process.devices for process in one.processes] == [("GPU:0",)]


@pytest.mark.parametrize("strategy", ["multi_worker", "parameter_server"])
def test_a_plan_that_others_can_reach_says_that_its_transport_is_open(strategy):
    def notes(host: str = "127.0.0.1", **keys: Any) -> str:
        planned = with_ports(make(config(strategy, "2cpu", 2, cluster__host=host, **keys), machine()))
        return " ".join(" ".join(plan_lines(planned, full)) for full in (False, True))

    assert "transport" not in notes() + notes("localhost")
    shown = notes("192.0.2.7")
    assert shown.count("TensorFlow's own transport is open, unauthenticated and unencrypted: whoever reaches") == 2
    assert "It binds every network interface of each host, not 192.0.2.7 alone (ports 20000 to 2000" in shown
    assert "Keep others out of this network, or try cluster.host=127.0.0.1." in shown
    # Another collective opens one of its own.
    if strategy == "multi_worker":
        shown = notes("10.0.0.5", strategy__collective="horovod")
        assert "TensorFlow's and Horovod's own transport is open, unauthenticated and unencrypted" in shown
    # A run of one process opens nothing, whatever its host.
    assert not with_ports(make(config("mirrored", "2cpu", workers=2, cluster__host="192.0.2.7"), machine())).notes


def host(name: str, *cores: int, gpus: int = 0, cpu: str = "A processor") -> Host:
    return Host(name, cores, 16.0, cpu, ("H100",) * gpus)


def over(machine: Machine, strategy: str = "multi_worker", workers: int | None = None, **hardware):
    asked = config(strategy, "4cpu", workers)
    auto = {"name": "auto", "hosts": None, "devices_per_host": None, "kind": asked.hardware.kind} | hardware
    return make(dataclasses.replace(asked, hardware=dataclasses.replace(asked.hardware, **auto)), machine)


def test_processes_are_on_the_cores_that_their_own_host_has_and_hosts_are_named():
    machine = inventory([host("a", 0, 1), host("b", 8, 9)])
    plan = over(machine)
    assert [(plan.host_of(process), process.cores) for process in plan.processes] == [("a", (0, 1)), ("b", (8, 9))]
    assert "on 2 hosts (a, b)" in "\n".join(plan_lines(plan, full=True))
    assert baseline_of(plan, machine).processes[0].cores == (0,)
    # One process takes the first host.
    plan = over(machine, "mirrored")
    assert (plan.workers, plan.hardware.hosts, plan.host_of(plan.processes[0])) == (2, 1, "a")
    # Where they are different that is said, and the least decides.
    plan = over(inventory([host("a", *range(16)), host("b", *range(8)), host("c", *range(16))]))
    assert (plan.workers, plan.notes[0]) == (24, "b has 8 cores, the others 16: the slowest decides.")
    plan = over(inventory([host("a", 0), host("b", 0, cpu="Another")]))
    assert plan.notes[0] == "b has Another, the others A processor: the slowest decides."


@pytest.mark.parametrize(("hosts", "asked", "words"), [
    ([host("a", *range(8)), host("b", 0, 1)], {"workers": 16},
     r"Expected hosts with 8 cores for 8 workers each, received b with 2. Try workers=4, or the cluster without"),
    ([host("a", 0, gpus=4), host("b", 0, gpus=2)],
     {"name": "2x4gpu", "kind": Kind.gpu, "hosts": 2, "devices_per_host": 4}, "hardware=2x4gpu has 4 GPUs, b has 2"),
    ([host("a", 0), host("b", 0)], {"hosts": 3, "devices_per_host": 1},
     r"no more hosts than the 2 of the cluster \(a and b\), received hardware.hosts=3. Try hardware.hosts=2."),
    ([host("a", 0), host("b", 0)], {"workers": 3}, "divide evenly over 2 hosts, received workers=3"),
])  # fmt: skip
def test_what_the_hosts_have_not_is_refused_by_name(hosts, asked, words):
    with pytest.raises(UserError, match=words):
        over(inventory(hosts), **asked)


def test_sixty_five_thousand_workers_on_their_own_hosts_are_planned():
    machine = inventory([host(f"node{number}", *range(128)) for number in range(512)])
    plan = over(machine)
    assert (plan.workers, len(plan.processes), plan.hardware.hosts) == (65_536, 512, 512)
    assert over(machine, "parameter_server", workers=65_536 - 512).workers > 65_000

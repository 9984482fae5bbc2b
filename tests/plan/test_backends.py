"""What a backend cannot do and a collective cannot add is refused in words before anything is started."""

import json
from dataclasses import replace

import pytest
from plans import STRATEGIES, config, machine

from pipeline.config.schema import Cache, DataConfig, Kind, MeasureConfig, StrategyConfig, TrainConfig
from pipeline.errors import UserError
from pipeline.plan.plan import from_json, identity
from pipeline.plan.planning import baseline_of, make

MACHINE = machine(4)
PARALLEL = StrategyConfig(
    "model_parallel", True, devices_per_replica=2, build={"_target_": "pipeline.strategies.model_parallel"}
)
MIRRORED = STRATEGIES["mirrored"]


def parallel(**build):
    return replace(PARALLEL, build=PARALLEL.build | build)


def on_jax(**values):
    return make(replace(config("mirrored", "4cpu", 2, backend="jax"), **values), MACHINE)


@pytest.mark.parametrize(("values", "words"), [
    ({"strategy": StrategyConfig("parameter_server", False, True, True, build={"_target_": "a.b"})},
     "Expected a strategy whose replicas make each step together under backend=jax"),
    ({"strategy": StrategyConfig("mine", True, build={"_target_": "a.b"})}, "received strategy=mine. Try"),
    ({"strategy": parallel(layout={"dense": [None, "model"]}), "backend": "tensorflow"},
     'received [null, "model"] for dense. Try strategy.build.layout=null, or backend=jax to cut the axes'),
    ({"strategy": parallel(layout={"dense": 2}), "backend": "tensorflow"}, "the number of a device from 0 to 1"),
    ({"strategy": parallel(layout={"dense(": 1}), "backend": "tensorflow"}, "Expected a regular expression"),
    ({"strategy": parallel(layout={"dense": 1})}, "received 1 for dense. Try strategy.build.layout=null, or backend="),
    ({"strategy": PARALLEL, "backend": "tensorflow", "measure": MeasureConfig(explain=True)},
     "Expected measure.explain=false under strategy=model_parallel"),
    ({"strategy": PARALLEL, "backend": "tensorflow", "train": TrainConfig(xla="true")},
     "Expected train.xla=false under strategy=model_parallel, whose replicas are laid over several devices"),
    ({"strategy": replace(MIRRORED, devices_per_replica=2)}, "with strategy=model_parallel only"),
    ({"strategy": parallel(micro_batches=4)}, "micro_batches=1 under backend=jax"),
    ({"strategy": parallel(micro_batches=0)}, "micro_batches to be 1 or more, received 0. Try"),
    ({"strategy": parallel(micro_batches="many")}, 'micro_batches to be 1 or more, received "many". Try'),
    ({"backend": "tensorflow", "strategy": replace(parallel(micro_batches=2), devices_per_replica=1)},
     "where no device waits for another, received 2. Try"),
    ({"backend": "tensorflow", "strategy": parallel(micro_batches=65), "train": TrainConfig(replica_batch=64)},
     "batch (64), received 65. Try strategy.build.micro_batches=64."),
    ({"data": DataConfig("images", build={"_target_": "pipeline.data.images"})}, "makes. Try backend=tensorflow."),
    ({"data": DataConfig("digits", cache=Cache.file, build={"_target_": "pipeline.data.digits"})},
     "Expected data.cache=auto under backend=jax"),
    ({"train": TrainConfig(gradient_bits=16)}, "Expected train.gradient_bits=32 under backend=jax"),
    ({"train": TrainConfig(batch_statistics="replica")}, "Expected train.batch_statistics=global under"),
    ({"train": TrainConfig(xla="false")}, "Expected train.xla=null under backend=jax, where XLA compiles every"),
    ({"train": TrainConfig(check="strict")}, "Expected train.check=true under backend=jax"),
    ({"measure": MeasureConfig(explain=True)}, "Expected measure.explain=false under backend=jax"),
    ({"train": TrainConfig(compare_weights_every=5)}, "Expected train.compare_weights_every=null under backend=jax"),
    ({"strategy": replace(MIRRORED, spans_processes=True, collective="horovod")},
     "Expected strategy.collective=auto under backend=jax"),
])  # fmt: skip
def test_what_a_backend_cannot_do_is_refused(values, words):
    with pytest.raises(UserError) as refused:
        on_jax(**values)
    assert words in str(refused.value)
    assert "Try " in str(refused.value)


def test_what_a_strategy_of_ones_own_calls_micro_batches_is_its_own():
    own = replace(MIRRORED, build={"_target_": "own.strategies.piped", "micro_batches": "many"})
    assert on_jax(backend="tensorflow", strategy=own).workers == 2


def test_replicas_of_two_devices_take_four_of_them_in_one_process():
    plan = on_jax(strategy=PARALLEL)
    (process,) = plan.processes
    assert (plan.workers, process.replicas, plan.strategy.devices_per_replica) == (2, (0, 1), 2)
    assert (process.devices, process.cores) == (("CPU:0", "CPU:1", "CPU:2", "CPU:3"), (0, 1, 2, 3))
    one = baseline_of(plan, MACHINE)
    assert (one.processes[0].devices, one.strategy.devices_per_replica) == (("CPU:0",), 1)


@pytest.mark.parametrize(("collective", "given", "words"), [
    ("horovod", {"strategy": "mirrored"}, "processes with a device each, received strategy=mirrored. Try strategy"),
    ("horovod", {"strategy": "one_device", "workers": 1}, "received strategy=one_device. Try strategy=multi_w"),
    ("horovod", {"train__gradient_bits": 16}, "Expected train.gradient_bits=32 under strategy.collective=horovod"),
    ("horovod", {"strategy__devices_per_process": 2, "workers": 4}, "Try strategy.devices_per_process=1"),
    ("horovod", {"hardware": "4gpu"}, "received GPUs. Try hardware.kind=cpu, or strategy.collective=auto"),
    *((adds, {"strategy": "parameter_server"}, f"step by themselves and add nothing up, received {adds}")
      for adds in ("horovod", "shared_memory", "a_package_s")),
    ("shared_memory", {"strategy": "mirrored"}, "the processes of a host, received strategy=mirrored. Try strat"),
    ("shared_memory", {"hardware": "4gpu"}, "received GPUs. Try hardware.kind=cpu, or strategy.collective=auto"),
    ("shared_memory", {"hardware": "2x1cpu"}, "several processes on each host under strategy.collective=shared_"),
    ("shared_memory", {"strategy__devices_per_process": 2}, "Try strategy.devices_per_process=1"),
    ("horovod", {"strategy__bucket_bytes": 9}, "received it with strategy=multi_worker and strategy.collective=horo"),
    ("auto", {"strategy": "mirrored", "strategy__bucket_bytes": 0}, "Try strategy.bucket_bytes=null"),
    ("auto", {"strategy": "parameter_server", "strategy__bucket_bytes": 9}, "step by themselves and add nothing"),
    ("auto", {"hardware": "4gpu", "strategy__bucket_bytes": 9}, "strategy.bucket_bytes on CPUs, received GPUs"),
    ("auto", {"backend": "jax", "strategy__bucket_bytes": 9}, "strategy.bucket_bytes=null under backend=jax"),
    ("auto", {"strategy__bucket_bytes": -1}, "Expected strategy.bucket_bytes to be 0 or more"),
    ("auto", {"strategy": "parameter_server", "train__compare_weights_every": 5},
     "no weights of their own, received 5. Try train.compare_weights_every=n"),
])  # fmt: skip
def test_what_a_collective_cannot_add_is_refused(collective, given, words):
    keys = {"strategy": "multi_worker", "hardware": "4cpu", "workers": 2, "strategy__collective": collective}
    with pytest.raises(UserError) as refused:
        make(config(**keys | given), machine(8, 8))
    assert words in str(refused.value)


TWO_HOSTS = {"hardware": "2x1cpu", "hardware__devices_per_host": 2}


@pytest.mark.parametrize(("given", "adds", "notes", "bucket_bytes"), [
    ({}, "shared_memory", 0, 0),
    ({"strategy__bucket_bytes": 9}, "shared_memory", 0, 0),
    ({"strategy__devices_per_process": 2}, "shared_memory", 0, 0),
    ({"strategy__collective": "tensorflow"}, "tensorflow", 0, 0),
    ({"strategy__collective": "shared_memory"}, "shared_memory", 0, 0),
    ({"strategy__build": STRATEGIES["multi_worker"].build | {"communication": "ring"}}, "tensorflow", 1, 0),
    (TWO_HOSTS | {"strategy__devices_per_process": 1}, "shared_memory", 1, None),
    (TWO_HOSTS, "tensorflow", 1, None),
    (TWO_HOSTS | {"strategy__bucket_bytes": 9}, "tensorflow", 1, 9),
    (TWO_HOSTS | {"strategy__bucket_bytes": 0}, "tensorflow", 1, 0),
    (TWO_HOSTS | {"strategy__collective": "a_package_s"}, "a_package_s", 1, 0),
    ({"hardware": "2x4gpu", "workers": 8}, "tensorflow", 1, 0),
    ({"hardware": "4gpu"}, "tensorflow", 0, 0),
    ({"workers": 1}, "tensorflow", 0, 0),
    ({"strategy": "mirrored"}, "tensorflow", 0, 0),
    ({"strategy": "parameter_server"}, "tensorflow", 1, 0),
    ({"backend": "jax"}, "tensorflow", 1, 0),
    ({"backend": "jax", "strategy__devices_per_process": 2}, "tensorflow", 0, 0),
    (TWO_HOSTS | {"backend": "jax"}, "tensorflow", 1, 0),
    (TWO_HOSTS | {"backend": "jax", "strategy__devices_per_process": 1}, "tensorflow", 1, 0),
    ({"backend": "jax", "strategy": "mirrored"}, "tensorflow", 0, 0),
])  # fmt: skip
def test_by_itself_a_plan_has_processes_of_a_host_share_memory_on_cpus_and_those_of_several_send_buckets(
    given, adds, notes, bucket_bytes
):
    plan = make(config(**{"strategy": "multi_worker", "hardware": "4cpu", "workers": 4} | given), machine(8, 8))
    assert (plan.collective, len(plan.notes), plan.bucket_bytes) == (adds, notes, bucket_bytes)
    # One of before there were any sends all at the end.
    older = {key: value for key, value in json.loads(plan.to_json()).items() if key != "bucket_bytes"}
    assert from_json(json.dumps(older)).bucket_bytes == 0
    assert identity(older) == identity(json.loads(plan.to_json()))


def test_a_run_of_before_there_was_a_choice_is_gone_on_with_and_one_of_another_collective_is_not():
    about = json.loads(make(config("multi_worker", "4cpu", 2), machine()).to_json())
    assert (
        identity(about) == identity(about | {"collective": "tensorflow"}) != identity(about | {"collective": "horovod"})
    )


def test_on_several_hosts_each_process_has_one_device_under_horovod():
    plan = make(config("multi_worker", "2x4gpu", 8, hardware__kind=Kind.cpu, strategy__collective="horovod"), machine())
    assert [(process.host, len(process.devices)) for process in plan.processes] == [(rank // 4, 1) for rank in range(8)]


@pytest.mark.parametrize(("collective", "asked", "every"), [
    *((ours, None, None) for ours in ("auto", "shared_memory", "tensorflow")),
    ("auto", 7, 7), ("horovod", None, 100), ("horovod", 7, 7),
])  # fmt: skip
def test_weights_are_compared_where_another_collective_adds_up_or_that_is_asked_for(collective, asked, every):
    keys = {"strategy__collective": collective, "train__compare_weights_every": asked}
    plan = make(config("multi_worker", "4cpu", 2, **keys), machine())
    assert plan.training.compare_weights_every == every
    assert make(config("multi_worker", "4cpu", 1, **keys), machine()).training.compare_weights_every is None
    one = baseline_of(plan, machine())
    assert (one.strategy.collective, one.collective, one.training.compare_weights_every) == ("auto", "tensorflow", None)

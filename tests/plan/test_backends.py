"""What a backend cannot do is refused in words before anything is started."""

from dataclasses import replace

import pytest
from plans import STRATEGIES, machine
from plans import config as config_of

from pipeline.config.schema import Cache, DataConfig, MeasureConfig, StrategyConfig, TrainConfig
from pipeline.errors import UserError
from pipeline.plan.planning import baseline_of, make

MACHINE = machine(4)
PARALLEL = StrategyConfig(
    "model_parallel", True, devices_per_replica=2, build={"_target_": "pipeline.strategies.model_parallel"}
)
MIRRORED = STRATEGIES["mirrored"]


def laid_out(layout):
    return replace(PARALLEL, build=PARALLEL.build | {"layout": layout})


def in_micro_batches(count):
    return replace(PARALLEL, build=PARALLEL.build | {"micro_batches": count})


def config(**values):
    return replace(config_of("mirrored", "4cpu", 2, backend="jax"), **values)


@pytest.mark.parametrize(("values", "words"), [
    ({"strategy": StrategyConfig("parameter_server", False, True, True, build={"_target_": "a.b"})},
     "Expected a strategy whose replicas make each step together under backend=jax"),
    ({"strategy": StrategyConfig("mine", True, build={"_target_": "a.b"})}, "received strategy=mine. Try"),
    ({"strategy": laid_out({"dense": [None, "model"]}), "backend": "tensorflow"},
     'received [null, "model"] for dense. Try strategy.build.layout=null, or backend=jax to cut the axes'),
    ({"strategy": laid_out({"dense": 2}), "backend": "tensorflow"}, "the number of a device from 0 to 1"),
    ({"strategy": laid_out({"dense(": 1}), "backend": "tensorflow"}, "Expected a regular expression"),
    ({"strategy": laid_out({"dense": 1})}, "received 1 for dense. Try strategy.build.layout=null, or backend=tens"),
    ({"strategy": PARALLEL, "backend": "tensorflow", "measure": MeasureConfig(explain=True)},
     "Expected measure.explain=false under strategy=model_parallel"),
    ({"strategy": PARALLEL, "backend": "tensorflow", "train": TrainConfig(xla="true")},
     "Expected train.xla=false under strategy=model_parallel, whose replicas are laid over several devices"),
    ({"strategy": replace(MIRRORED, devices_per_replica=2)}, "with strategy=model_parallel only"),
    ({"strategy": in_micro_batches(4)}, "micro_batches=1 under backend=jax"),
    ({"strategy": in_micro_batches(0)}, "micro_batches to be 1 or more, received 0. Try"),
    ({"strategy": in_micro_batches("many")}, 'micro_batches to be 1 or more, received "many". Try'),
    ({"backend": "tensorflow", "strategy": replace(in_micro_batches(2), devices_per_replica=1)},
     "where no device waits for another, received 2. Try"),
    ({"backend": "tensorflow", "strategy": in_micro_batches(65), "train": TrainConfig(replica_batch=64)},
     "batch (64), received 65. Try strategy.build.micro_batches=64."),
    ({"data": DataConfig("images", build={"_target_": "pipeline.data.images"})}, "whose examples TensorFlow makes"),
    ({"data": DataConfig("digits", cache=Cache.file, build={"_target_": "pipeline.data.digits"})},
     "Expected data.cache=none under backend=jax"),
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
        make(config(**values), MACHINE)
    assert words in str(refused.value)
    assert "Try " in str(refused.value)


def test_what_a_strategy_of_ones_own_calls_micro_batches_is_its_own():
    own = replace(MIRRORED, build={"_target_": "own.strategies.piped", "micro_batches": "many"})
    assert make(config(backend="tensorflow", strategy=own), MACHINE).workers == 2


def test_replicas_of_two_devices_take_four_of_them_in_one_process():
    plan = make(config(strategy=PARALLEL), MACHINE)
    (process,) = plan.processes
    assert (plan.workers, process.replicas, plan.strategy.devices_per_replica) == (2, (0, 1), 2)
    assert process.devices == ("CPU:0", "CPU:1", "CPU:2", "CPU:3")
    assert process.cores == (0, 1, 2, 3)
    one = baseline_of(plan, MACHINE)
    assert (one.processes[0].devices, one.strategy.devices_per_replica) == (("CPU:0",), 1)

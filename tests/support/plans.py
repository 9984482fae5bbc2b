"""Configurations and plans of machines that are not there."""

import dataclasses
import functools
from typing import Any

from pipeline.config import schema
from pipeline.config.schema import Config, Kind
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan
from pipeline.plan.planning import listening, make


def _strategy(name: str, *spans: bool, on_tpu: bool = False, **build: Any) -> schema.StrategyConfig:
    build["_target_"] = f"pipeline.strategies.{name}"
    return schema.StrategyConfig(name, *spans, on_tpu=on_tpu, build=build)


STRATEGIES = {each.name: each for each in (
    _strategy("one_device"), _strategy("mirrored", True), _strategy("multi_worker", True, True),
    _strategy("parameter_server", False, True, True), _strategy("tpu", True, on_tpu=True, address=None),
)}  # fmt: skip
# By name: hosts, devices of each, their kind.
HARDWARE = {"auto": (1, None, Kind.auto), "tpu_v5e_8": (1, 8, Kind.tpu)} | {
    name: (hosts, int(name[-4]), Kind(name[-3:]))
    for hosts, names in ((1, "1cpu 2cpu 4cpu 8cpu 1gpu 4gpu 8gpu"), (2, "2x1cpu 2x4gpu")) for name in names.split()
}  # fmt: skip
PORTS = tuple(range(20_000, 21_000))


def with_ports(planned: Plan) -> Plan:
    addresses = [
        f"{(process.address or '').rpartition(':')[0]}:{port}"
        for process, port in zip(planned.processes, PORTS, strict=False)
    ]
    return listening(planned, addresses)


def machine(cores: int = 8, gpus: int = 0) -> Machine:
    return Machine("host", tuple(range(cores)), 16.0, "A processor", ("H100",) * gpus)


def config(strategy: str = "mirrored", hardware: str = "auto", workers: int | None = None, **keys: Any) -> Config:
    """A config as the YAML makes it; `keys` are dotted, with `__` for the dot."""
    hosts, per_host, kind = HARDWARE[hardware]
    made = Config(
        workers=workers,
        strategy=dataclasses.replace(STRATEGIES[strategy]),
        hardware=schema.HardwareConfig(hardware, hosts, per_host, kind),
        model=schema.ModelConfig("mlp", {"_target_": "pipeline.models.mlp", "hidden": [8]}),
        data=schema.DataConfig("digits", 10, [8, 8, 1], build={"_target_": "pipeline.data.digits"}),
        tracking=schema.TrackingConfig("none", schema.Store.none),
        cluster=schema.ClusterConfig("local"),
    )
    for key, value in keys.items():
        *parents, last = key.split("__")
        setattr(functools.reduce(getattr, parents, made), last, value)
    return made


def cluster(cores: int = 8, gpus: int = 0, **keys: Any) -> Plan:
    """A plan whose hosts are machines of their own, each with so many cores and GPUs."""
    hosts = dataclasses.replace(machine(cores, gpus), hosts=8)
    return with_ports(make(config("multi_worker", cluster__name="others", **keys), hosts))


def pods(strategy: str = "multi_worker", workers: int = 2, cores: int = 1, gpus: int = 0) -> Plan:
    hosts = 1 if strategy == "mirrored" else workers // (gpus or cores)
    each = tuple(range(workers if strategy == "mirrored" else cores))
    pod = Machine("pod", each, 4.0, "", ("GPU",) * gpus, hosts=hosts)
    return make(config(strategy, "auto", workers, hardware__hosts=hosts), pod)

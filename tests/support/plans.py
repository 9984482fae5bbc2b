"""Configurations and plans of machines that are not there."""

import dataclasses
from typing import Any

from pipeline.config.schema import (
    ClusterConfig,
    Config,
    DataConfig,
    HardwareConfig,
    Kind,
    ModelConfig,
    Store,
    StrategyConfig,
    TrackingConfig,
)
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan
from pipeline.plan.planning import listening, make

STRATEGIES = {
    "one_device": StrategyConfig("one_device", build={"_target_": "pipeline.strategies.one_device"}),
    "mirrored": StrategyConfig("mirrored", True, build={"_target_": "pipeline.strategies.mirrored"}),
    "multi_worker": StrategyConfig("multi_worker", True, True, build={"_target_": "pipeline.strategies.multi_worker"}),
    "parameter_server": StrategyConfig(
        "parameter_server", False, True, True, build={"_target_": "pipeline.strategies.parameter_server"}
    ),
    "tpu": StrategyConfig("tpu", True, on_tpu=True, build={"_target_": "pipeline.strategies.tpu", "address": None}),
}


HARDWARE = {
    "auto": (1, None, Kind.auto),
    "1cpu": (1, 1, Kind.cpu),
    "2cpu": (1, 2, Kind.cpu),
    "4cpu": (1, 4, Kind.cpu),
    "8cpu": (1, 8, Kind.cpu),
    "1gpu": (1, 1, Kind.gpu),
    "4gpu": (1, 4, Kind.gpu),
    "8gpu": (1, 8, Kind.gpu),
    "2x1cpu": (2, 1, Kind.cpu),
    "2x4gpu": (2, 4, Kind.gpu),
    "tpu_v5e_8": (1, 8, Kind.tpu),
}


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
        hardware=HardwareConfig(hardware, hosts, per_host, kind),
        model=ModelConfig("mlp", {"_target_": "pipeline.models.mlp", "hidden": [8]}),
        data=DataConfig("digits", 10, [8, 8, 1], build={"_target_": "pipeline.data.digits"}),
        tracking=TrackingConfig("none", Store.none),
        cluster=ClusterConfig("local"),
    )
    for key, value in keys.items():
        *parents, last = key.split("__")
        node: Any = made
        for parent in parents:
            node = getattr(node, parent)
        setattr(node, last, value)
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

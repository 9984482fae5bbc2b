"""Plans over pods of Kubernetes."""

from plans import config

from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan
from pipeline.plan.planning import make


def planned(strategy: str = "multi_worker", workers: int = 2, cores: int = 1, gpus: int = 0) -> Plan:
    hosts = 1 if strategy == "mirrored" else workers // (gpus or cores)
    pod = Machine(
        "pod", tuple(range(workers if strategy == "mirrored" else cores)), 4.0, "", ("GPU",) * gpus, hosts=hosts
    )
    return make(config(strategy, "auto", workers, hardware__hosts=hosts), pod)

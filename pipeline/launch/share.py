"""A part of this machine for one of several plans that run on it at once: cores and GPUs that the others leave free."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.launch import Cluster, Helpers, Job
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan, Process


@dataclass(frozen=True)
class CoreShare:
    """Numbers of cores, and of GPUs as the machine's devices are numbered."""

    cores: tuple[int, ...] = ()
    gpus: tuple[int, ...] = ()

    def without(self, other: "CoreShare") -> "CoreShare":
        """Returns what is left of it."""
        cores = tuple(core for core in self.cores if core not in other.cores)
        return CoreShare(cores, tuple(gpu for gpu in self.gpus if gpu not in other.gpus))

    def joined(self, other: "CoreShare") -> "CoreShare":
        """Both of them."""
        return CoreShare(tuple(sorted((*self.cores, *other.cores))), tuple(sorted((*self.gpus, *other.gpus))))


def whole(machine: Machine) -> CoreShare:
    """All of a machine."""
    return CoreShare(machine.cores, tuple(range(len(machine.gpus))))


def part_for(plan: Plan, free: CoreShare, everything: CoreShare) -> CoreShare | None:
    """A part of what is free that a plan can have for itself; None where it needs more.

    A plan whose processes take any core leaves nothing beside it, unless it computes on GPUs.
    """
    gpus = [device for process in plan.processes for device in process.devices if device.startswith("GPU:")]
    if gpus:
        return CoreShare((), free.gpus[: len(gpus)]) if len(gpus) <= len(free.gpus) else None
    cores = sum(len(process.cores) for process in plan.processes)
    if plan.hardware.kind != "cpu" or not all(process.cores for process in plan.processes):
        return everything if free == everything else None
    return CoreShare(free.cores[:cores]) if cores <= len(free.cores) else None


class Share(Cluster):
    """This machine as a cluster, of which a plan gets `part`, whichever cores and GPUs it names."""

    def __init__(self, cluster: Cluster, part: CoreShare) -> None:
        self._cluster, self._part = cluster, part

    def inventory(self) -> Machine:
        """All of this machine: a plan does not change with what others leave free."""
        return self._cluster.inventory()

    def helpers(self) -> Helpers:
        """This machine's."""
        return self._cluster.helpers()

    def warm_up(self) -> None:
        """Begins the imports of its processes."""
        self._cluster.warm_up()

    def addresses(self, plan: Plan) -> Sequence[str]:
        """Free ports."""
        return self._cluster.addresses(plan)

    def start(self, plan: Plan, group: str, folder: Path) -> Job:
        """Forks the plan's processes, on cores and GPUs of this part."""
        return self._cluster.start(moved(plan, whole(self.inventory()), self._part), group, folder)

    def close(self, code: int) -> None:
        """Nothing: the others go on with the machine."""


def moved(plan: Plan, everything: CoreShare, part: CoreShare) -> Plan:
    """The plan on the first, second and so on of a part's cores and GPUs in place of those of the whole machine.

    >>> CoreShare((4, 5, 6)).without(CoreShare((5,)))
    CoreShare(cores=(4, 6), gpus=())
    """
    cores = dict(zip(everything.cores, part.cores, strict=False)) or {core: core for core in everything.cores}
    gpus = {f"GPU:{at}": f"GPU:{gpu}" for at, gpu in zip(everything.gpus, part.gpus, strict=False)}

    def there(process: Process) -> Process:
        on = tuple(cores[core] for core in process.cores)
        return replace(process, cores=on, devices=tuple(gpus.get(device, device) for device in process.devices))

    return replace(plan, processes=tuple(map(there, plan.processes)))

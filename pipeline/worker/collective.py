"""Collectives, which add up what the replicas of all processes computed, by name: ours, or what packages offer."""

import sys
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from pipeline.config.offered import check_offer, load_offer
from pipeline.errors import UserError, refuse
from pipeline.plan.backends import HOROVOD
from pipeline.plan.plan import AUTO, SHARED_MEMORY, TENSORFLOW, Plan, Process
from pipeline.worker.patched import patched

# What an engine computes with, such as a tf.Tensor, and what it has its steps run by, such as a tf.distribute.Strategy.
Array = TypeVar("Array")
Strategy = TypeVar("Strategy")


class Collective(Hashable, Protocol[Array]):
    """Adds arrays over the replicas of all processes."""

    @property
    def replicas(self) -> int:
        """The number of replicas that add up."""

    def sum(self, arrays: Sequence[Array]) -> list[Array]:
        """The sums over all replicas, of the same types, shapes and bits on all; all call it in the same order."""

    def sent_bytes(self, size: int) -> int:
        """Bytes that a replica sends, on average, for arrays of so many bytes together."""


class Pausable(Generic[Array]):
    """A collective that can be left out for a while, or none: each replica then computes as one device does."""

    def __init__(self, collective: Collective[Array] | None = None) -> None:
        self._collective, self._is_paused = collective, collective is None

    @property
    def replicas(self) -> int:
        """The number of replicas that add up."""
        return 1 if self._collective is None or self._is_paused else self._collective.replicas

    def sum(self, arrays: Sequence[Array]) -> list[Array]:
        """The sums over all replicas; the arrays as they are while it is left out."""
        return list(arrays) if self._collective is None or self._is_paused else self._collective.sum(arrays)

    def sent_bytes(self, size: int) -> int:
        """Bytes that a replica sends, on average, for arrays of so many bytes together."""
        return 0 if self._collective is None else self._collective.sent_bytes(size)

    def paused(self) -> AbstractContextManager[None]:
        """Inside, nothing is exchanged."""
        return patched(self, {"_is_paused": True})


# Ours; a package offers others as entry points of the group `pipeline.collectives`.
COLLECTIVES = {
    TENSORFLOW: "pipeline.worker.tensorflow.collective:of_plan",
    SHARED_MEMORY: "pipeline.worker.tensorflow.hierarchical:of_plan",
    HOROVOD: "pipeline.worker.tensorflow.horovod:of_plan",
}
INSTEAD = "strategy.collective=auto"
# Where `make horovod` builds it.
BUILT = ".venv-horovod"


def check_collective(name: str) -> None:
    """Refuses a name that no collective has, and one that is not built, without importing any. Raises `UserError`."""
    check_offer("collectives", name, "strategy.collective", {AUTO: "", **COLLECTIVES}, INSTEAD)
    module = find_spec(HOROVOD) if name == HOROVOD else None
    folders = () if module is None else module.submodule_search_locations or ()
    # With what it compiles for TensorFlow.
    if name == HOROVOD and not any(any(Path(folder, "tensorflow").glob("mpi_lib*.so")) for folder in folders):
        interpreter = Path(sys.prefix).parent / BUILT / "bin" / "python"
        typed = f"`{BUILT}/bin/python -m pipeline`"
        then = typed if interpreter.exists() else f"`make horovod`, which takes ten minutes, and then {typed}"
        expected = "Horovod, built for this TensorFlow, for strategy.collective=horovod"
        raise UserError(expected, "a Python without it", f"{then}, or {INSTEAD}")


def collective_of(plan: Plan, process: Process, strategy: Strategy) -> Collective[Array]:
    """The plan's collective in a process, once all have joined; none where a replica steps by itself."""
    if plan.workers == 1 or plan.strategy.asynchronous:
        return Pausable()
    name = plan.collective
    make = load_offer("collectives", name, "strategy.collective", COLLECTIVES, INSTEAD)
    try:
        collective: Collective[Array] = make(plan, process, strategy)
    except Exception as error:
        if name in COLLECTIVES:
            raise
        raise UserError(f"strategy.collective={name} to work", f"{type(error).__name__}: {error}", INSTEAD) from error
    for part in ("replicas", "sum", "sent_bytes"):
        refuse((not hasattr(collective, part), f"strategy.collective={name} to have {part}", "one without", INSTEAD))
    expected = f"strategy.collective={name} to add over all {plan.workers} replicas"
    received = f"one that adds over {collective.replicas}"
    refuse((collective.replicas != plan.workers, expected, received, INSTEAD))
    return collective

"""Adds up what a host holds whose memory is that of its devices: what they hold, the data, and what computes.

Arithmetic, and a few constants that were measured; `benchmarks/memory.py` holds all of it against what processes take.
"""

from dataclasses import dataclass

from pipeline.plan.backends import JAX
from pipeline.plan.plan import DATA_SERVER, TENSORFLOW, Plan, Process
from pipeline.plan.size import Size

MIB = 2**20
# What kernels and the allocator take beside the tensors of a step under TensorFlow: times this.
ON_THE_WAY = 1.06
# Bytes of a process that has imported its backend, and trains nothing.
IMPORTED = {TENSORFLOW: 350 * MIB, JAX: 360 * MIB}
# Bytes that it takes to compute at all, and for each operation that it traces and compiles.
COMPUTING = {TENSORFLOW: (76 * MIB, 17_000), JAX: (190 * MIB, 40_000)}
# Batches that lie ready on a GPU under TensorFlow: the next one, and one that is copied while that is trained.
AHEAD = 2
# Under JAX they lie in blocks: two that are ready, one that waits for room, and the one that is trained on. A block has
# as many as one of these loops makes steps, the first whose batches take no more bytes than that.
READY_BLOCKS, LOOPS, BLOCK_BYTES = 2, (32, 4, 1), 64 * MIB
# Batches resident at once, not counting prefetched ones.
BATCHES = 2


@dataclass(frozen=True)
class HostMemory:
    """Bytes kept at a place while it trains: each device, the host, or one server; None where that is not known.

    Activations are what a step holds at its fullest moment beside all gradients; batches lie ready for the steps after.
    """

    place: str
    parameters: int
    gradients: int
    slots: int
    activations: int | None
    batches: int = 0

    @property
    def total(self) -> int:
        """All that is known of."""
        return self.parameters + self.gradients + self.slots + (self.activations or 0) + self.batches


@dataclass(frozen=True)
class FullestHost:
    """Bytes of the fullest host: what its devices hold, its processes alone, data and batches, and what is copied to be
    written as a checkpoint; and the GiB that it has, where that is known.
    """

    devices: int
    imported: int
    computing: int
    data: int
    copied: int
    gib: float | None

    @property
    def beside_import(self) -> int:
        """All but what processes take that have only imported their backend."""
        return self.devices + self.computing + self.data + self.copied

    @property
    def total(self) -> int:
        """All of it."""
        return self.beside_import + self.imported

    @property
    def fits(self) -> bool:
        """True if there is memory for it."""
        return self.gib is None or self.total <= self.gib * 2**30


def ahead(plan: Plan, batch_bytes: int) -> int:
    """Returns how many batches lie on the devices of a plan, where these have memory of their own."""
    if plan.hardware.kind != "gpu":
        return 0
    if plan.backend != JAX:
        return AHEAD
    return (READY_BLOCKS + 2) * next((loop for loop in LOOPS if loop * batch_bytes <= BLOCK_BYTES), 1)


def beside_gradients(backend: str, fullest: int, gradients: int) -> int:
    """Bytes that a step takes beside all gradients, of those that it holds at its fullest moment.

    XLA has one plan for all buffers of a step. TensorFlow's executor asks the system's allocator for each tensor, which
    has no room for the large ones that come later, gradients, where it had the small ones of the forward pass.
    """
    return max(0, fullest - gradients) if backend == JAX else int(ON_THE_WAY * fullest)


def of_host(plan: Plan, size: Size, memory: tuple[HostMemory, ...]) -> FullestHost | None:
    """Returns what the first host holds, which has the most processes; None where devices have memory of their own.

    `memory` is that of each place as `estimate` has it: of a device, or of the parts of a replica, first.
    """
    if plan.hardware.kind != "cpu":
        return None
    backend = JAX if plan.backend == JAX else TENSORFLOW
    processes = [process for process in plan.processes if process.host == 0 and process.role != DATA_SERVER]
    training = [process for process in processes if process.devices]
    places = {place.place: place for place in memory}
    held = sum(_held(plan, process, memory, places) for process in processes)
    fixed, each = COMPUTING[backend]
    replicas = sum(len(process.replicas) for process in training)
    graphs = len(training) if backend == JAX else replicas
    batch = plan.training.replica_batch * replicas * (size.example_bytes or 0)
    examples = (plan.data.train_examples or 0) * (size.example_bytes or 0)
    every = (plan.checkpoint.every_steps, plan.checkpoint.every_minutes, plan.checkpoint.every_epochs)
    whole = sum(variable.bytes + variable.slot_bytes for variable in size.variables)
    return FullestHost(
        devices=held,
        imported=len(processes) * IMPORTED[backend],
        computing=len(processes) * fixed + graphs * each * size.operations,
        data=len(training) * examples + batch * (plan.data.prefetch + BATCHES),
        copied=0 if every == (None, None, None) else whole,
        gib=plan.hardware.host_memory_gib,
    )


def _held(plan: Plan, process: Process, memory: tuple[HostMemory, ...], places: dict[str, HostMemory]) -> int:
    """Bytes of a process's devices, or of the server that it is."""
    if not process.devices:
        server = places.get(f"server {process.rank}")
        return 0 if server is None else server.total
    if len(memory) > 1 and plan.strategy.devices_per_replica > 1:
        return len(process.replicas) * sum(part.total for part in memory)
    central = places.get("the host")
    return len(process.devices) * memory[0].total + (0 if central is None else central.total)

"""Turns a plan and the size of its model into bytes: what is kept where while it trains, and what a step exchanges.

Metrics, validation, ids and headers are not counted. `benchmarks/memory.py` holds its constants against processes.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from pipeline.config.schema import Exchange
from pipeline.plan.backends import JAX
from pipeline.plan.division import balanced, bucket_of, written
from pipeline.plan.plan import DATA_SERVER, SHARED_MEMORY, TENSORFLOW, Plan
from pipeline.plan.size import Size, Variable, places_layers

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
    """Bytes kept at a place while it trains: each device, which may have whole `layers`, the host, or one server.

    `activations` are what a step holds at its fullest moment beside all gradients, None where that is not known.
    """

    place: str
    parameters: int
    gradients: int
    slots: int
    activations: int | None
    batches: int = 0
    layers: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """All that is known of."""
        return self.parameters + self.gradients + self.slots + (self.activations or 0) + self.batches


@dataclass(frozen=True)
class FullestHost:
    """Bytes that the fullest host holds; `copied` are to be written as a checkpoint; it has `gib`, where known."""

    devices: int
    imported: int
    computing: int
    data: int
    copied: int
    gib: float | None

    @property
    def total(self) -> int:
        """All of it."""
        return self.devices + self.imported + self.computing + self.data + self.copied


@dataclass(frozen=True)
class Traffic:
    """Bytes that each of `count` participants sends and receives."""

    who: str
    sends: int
    receives: int
    count: int = 1


@dataclass(frozen=True)
class Exchanged:
    """Bytes that travel for one optimizer step of the plan.

    `between` of the `total` are from one host to another, of which the busiest host sends or receives `busiest`. Of
    asynchronous workers `busiest` and `traffic` are for a step of all, so many `steps`. Batch normalization waits for
    `small` exchanges. Gradients leave for other hosts in buckets of `bucket` bytes; 0: all at the end.
    """

    how: str
    traffic: tuple[Traffic, ...] = ()
    between: int = 0
    busiest: int = 0
    small: int = 0
    bucket: int = 0
    steps: int = 1

    @property
    def total(self) -> int:
        """All that is sent for a step."""
        return sum(one.count * one.sends for one in self.traffic) // self.steps


@dataclass(frozen=True)
class Estimate:
    """The needs of a plan: `exchanged` is None where the strategy does not say, activations `unknown` for a reason.

    `shards` are tables with the rows of each part, `whole` large variables that stay on one server, with why.
    """

    memory: tuple[HostMemory, ...]
    exchanged: Exchanged | None
    shards: tuple[tuple[str, tuple[int, ...]], ...]
    whole: tuple[tuple[str, str], ...]
    too_small: tuple[str, ...]
    unknown: str | None
    example_bytes: int | None
    host: FullestHost | None = None

    @property
    def fits(self) -> bool:
        """True if there is memory for all that is known of."""
        host = self.host
        return not self.too_small and (host is None or host.gib is None or host.total <= host.gib * 2**30)

    @property
    def device(self) -> HostMemory:
        """The memory of a device that trains a replica."""
        return self.memory[0]


def estimate(plan: Plan, size: Size) -> Estimate:
    """Returns what `plan` needs for a model of `size`."""
    shards, whole = _sharded(plan, size)
    kind, device = plan.strategy.exchange, f"each {plan.hardware.kind.upper()}"
    # With one worker on one device there is nothing to exchange, and nowhere else to keep variables.
    if plan.workers == 1 and kind in (Exchange.all_reduce, Exchange.central):
        kind = Exchange.none
    if kind == Exchange.parameter_server and not plan.ranks("parameter server"):
        # A strategy's own file may say anything: no process is planned that could hold the variables.
        kind = None
    sums = _Sums(plan, size)
    place = device if kind else "one copy"
    alone = HostMemory(place, sums.variables, sums.trained, sums.slots, sums.activations, sums.batches)
    memory: tuple[HostMemory, ...] = (alone,)
    exchanged = None if kind is None else Exchanged("nothing")
    if kind == Exchange.all_reduce:
        bucket = bucket_of(sums.dense, plan.bucket_bytes)
        exchanged = replace(_added_up(plan, sums), bucket=bucket if bucket < sums.dense else 0, small=sums.small)
    elif kind == Exchange.central:
        memory = (replace(alone, slots=0), replace(alone, place="the host", activations=0, batches=0))
        exchanged = replace(_added_up(plan, sums, centrally=True), small=sums.small)
    elif kind == Exchange.parameter_server:
        servers = _servers(plan, size, dict(shards))
        memory = (
            HostMemory("each worker", sums.read, sums.dense + sums.rows, 0, sums.activations),
            *(HostMemory(f"server {rank}", held["parameters"], held["gradients"], held["slots"], 0)
              for rank, held in servers.items()),
        )  # fmt: skip
        exchanged = _served(plan, servers)
    parts = _placed(plan, size, sums)
    if parts:
        memory = parts
    elif plan.backend == JAX and plan.strategy.devices_per_replica > 1:
        memory = (replace(alone, place=device),)
    gib = plan.hardware.memory_gib if kind is not None or plan.strategy.devices_per_replica > 1 else None
    of_devices = memory if parts else memory[:1]
    small = () if gib is None else tuple(part.place for part in of_devices if part.total > gib * 2**30)
    host = _fullest_host(plan, size, memory)
    return Estimate(memory, exchanged, shards, whole, small, size.unknown, size.example_bytes, host)


def _placed(plan: Plan, size: Size, sums: "_Sums") -> tuple[HostMemory, ...]:
    """The parts of a replica whose layers are placed whole: one device of each replica."""
    if not (places_layers(plan) and size.layers):
        return ()
    each, layout, places = plan.strategy.devices_per_replica, plan.strategy.build.get("layout"), []
    # A layout's numbers were checked when the plan was made.
    parts = written(size.layers, layout, each) if isinstance(layout, dict) else balanced(size.layers, each)  # type: ignore[arg-type]
    for number in range(each):
        layers = [layer for layer, part in zip(size.layers, parts, strict=True) if layer.bytes and part == number]
        paths = {path for layer in layers for path in layer.variables}
        own = [variable for variable in size.variables if variable.path in paths]
        parameters, trained = (sum(one.bytes for one in own if one.trainable or every) for every in (True, False))
        slots, batches = sum(one.slot_bytes for one in own), 0 if number else sums.batches
        # Layers are laid out by balance, which shares out what a step holds as well.
        activations = None if sums.activations is None else sums.activations // each
        names, devices = tuple(layer.name for layer in layers), " ".join(plan.processes[0].devices[number::each])
        places.append(HostMemory(devices, parameters, trained, slots, activations, batches, names))
    return tuple(places)


def _fullest_host(plan: Plan, size: Size, memory: tuple[HostMemory, ...]) -> FullestHost | None:
    """Returns what the first host holds, which has the most processes; None where devices have memory of their own."""
    if plan.hardware.kind != "cpu":
        return None
    backend = JAX if plan.backend == JAX else TENSORFLOW
    processes = [process for process in plan.processes if process.host == 0 and process.role != DATA_SERVER]
    training = [process for process in processes if process.devices]
    replicas = sum(len(process.replicas) for process in training)
    places = {place.place: place.total for place in memory}
    held = sum(places.get(f"server {process.rank}", 0) for process in processes if not process.devices)
    if len(memory) > 1 and plan.strategy.devices_per_replica > 1:
        held += replicas * sum(place.total for place in memory)
    else:
        held += sum(len(process.devices) * memory[0].total + places.get("the host", 0) for process in training)
    fixed, each = COMPUTING[backend]
    graphs = len(training) if backend == JAX else replicas
    batch = plan.training.replica_batch * replicas * (size.example_bytes or 0)
    examples = (plan.data.train_examples or 0) * (size.example_bytes or 0)
    saves = (plan.checkpoint.every_steps, plan.checkpoint.every_minutes, plan.checkpoint.every_epochs) != (None,) * 3
    return FullestHost(
        devices=held,
        imported=len(processes) * IMPORTED[backend],
        computing=len(processes) * fixed + graphs * each * size.operations,
        data=len(training) * examples + batch * (plan.data.prefetch + BATCHES),
        copied=sum(variable.bytes + variable.slot_bytes for variable in size.variables) if saves else 0,
        gib=plan.hardware.host_memory_gib,
    )


def _sharded(plan: Plan, size: Size) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], tuple[tuple[str, str], ...]]:
    """(tables cut, with the rows of each shard; variables that would make two, and are not cut, and why)."""
    least, servers = plan.strategy.min_shard_bytes, len(plan.ranks("parameter server"))
    large = [] if least is None else [variable for variable in size.variables if variable.bytes >= 2 * least]
    why = {variable.path: "there is one server" if servers < 2 else variable.whole for variable in large}
    cut = [
        (variable.path, rows_of_shards(variable.shape[0], variable.bytes, servers, least or 1))
        for variable in large if why[variable.path] is None
    ]  # fmt: skip
    return tuple(cut), tuple((path, reason) for path, reason in why.items() if reason is not None)


def rows_of_shards(rows: int, size_bytes: int, servers: int, least_bytes: int) -> tuple[int, ...]:
    """Rows of each shard: as many shards of at least `least_bytes` as there are servers for, the first ones longer."""
    shards = max(1, min(servers, size_bytes // least_bytes, rows))
    return tuple(rows // shards + (place < rows % shards) for place in range(shards))


class _Sums:
    """Bytes of a model, added up once: of all its variables, and of what a replica's step makes and sends."""

    def __init__(self, plan: Plan, size: Size) -> None:
        training, parts = plan.training, plan.strategy.devices_per_replica if plan.backend == JAX else 1
        # Each variable with the number of devices that it is cut over.
        cut = [(variable, parts if parts in variable.cut else 1) for variable in size.variables]
        self.variables = sum(variable.bytes // count for variable, count in cut)
        self.trained = sum(variable.bytes // count for variable, count in cut if variable.trainable)
        self.slots = sum(variable.slot_bytes // count for variable, count in cut) + size.optimizer_bytes
        moments = size.forgetful_step if training.remat and size.forgetful_step else size.step
        self.activations: int | None = None
        if moments is not None:
            fullest = max(fixed + training.replica_batch * growing for fixed, growing in moments)
            # XLA has one plan for all buffers of a step. TensorFlow's executor asks the system's allocator for each
            # tensor, which has no room for the large ones that come later, gradients, where it had the small ones of
            # the forward pass.
            self.activations = max(0, fullest - self.trained) if plan.backend == JAX else int(ON_THE_WAY * fullest)
        of_replica = training.replica_batch * (size.batch_bytes or size.example_bytes or 0)
        self.batches = of_replica * AHEAD if plan.hardware.kind == "gpu" else 0
        if self.batches and plan.backend == JAX:
            block = next((loop for loop in LOOPS if loop * plan.workers * of_replica <= BLOCK_BYTES), 1)
            self.batches = of_replica * (READY_BLOCKS + 2) * block
        # Only gradients of 32 bits are narrowed.
        self.dense = sum(
            variable.bytes // (2 if training.gradient_bits == 16 and variable.dtype == "float32" else 1)
            for variable in size.variables if variable.trainable and not variable.is_table
        )  # fmt: skip
        travels = [(variable, *_travels(plan, variable)) for variable in size.variables]
        self.read = sum(read for _, read, _ in travels)
        self.rows = sum(sent for variable, _, sent in travels if variable.trainable and variable.is_table)
        # One in the forward pass, one in the backward pass.
        self.small = 2 * size.normalizations if training.batch_statistics == "global" else 0


def _travels(plan: Plan, variable: Variable) -> tuple[int, int]:
    """(bytes of a variable that a replica's step reads, bytes of its gradient); of a table those of its rows alone."""
    if variable.rows_per_example is None:
        return variable.bytes, variable.bytes
    # Counted as often as the step looks them up; in a gradient with their numbers, int32.
    rows = plan.training.replica_batch * variable.rows_per_example
    return rows * variable.row_bytes, rows * (variable.row_bytes + 4)


def _added_up(plan: Plan, sums: _Sums, centrally: bool = False) -> Exchanged:
    """The exchange of replicas that add up gradients; `centrally`, the host has their variables and applies the sum."""
    count, hosts = plan.workers, plan.hardware.hosts
    # TensorFlow's ReductionToOneDevice: all send to one, which sends the sum to all others; rows are not added but put
    # together, so that the others receive those of all.
    to_first, back = sums.dense + sums.rows, sums.dense + count * sums.rows
    if centrally:
        traffic = (
            Traffic("the host", count * sums.variables, back),
            Traffic("the first device", count * back, sums.variables + (count - 1) * to_first),
            Traffic("each other device", to_first, sums.variables + back, count - 1),
        )
        return Exchanged("variables read from the host, gradients added and given back", traffic)
    if len(plan.processes) == 1 and plan.hardware.kind == "cpu":
        first = Traffic("the first device", (count - 1) * back, (count - 1) * to_first)
        others = Traffic("each other device", to_first, back, count - 1)
        return Exchanged("gradients added on one device, sums copied back", (first, others))
    if plan.collective == SHARED_MEMORY:
        return _shared(plan, sums)
    # Ring all-reduce moves 2 (n - 1) / n of the bytes over each link (Patarasuk & Yuan, 2009); rows are gathered.
    sent = 2 * (count - 1) * sums.dense // count + (count - 1) * sums.rows
    between, each = hosts * sent if hosts > 1 else 0, Traffic("each device", sent, sent, count)
    return Exchanged(f"gradients all-reduced in a ring of {count}", (each,), between, sent * bool(between))


def _shared(plan: Plan, sums: _Sums) -> Exchanged:
    hosts, processes = plan.hosts_that_train, len(plan.leaders) // plan.hosts_that_train
    on_host, per_process = plan.workers // hosts, plan.workers // hosts // processes
    # Each process adds its devices, then reads as much of the others' as it would receive in a ring of them.
    each = 2 * (per_process - 1) * sums.dense + 2 * (processes - 1) * sums.dense // processes
    each += (on_host - per_process) * sums.rows
    how = f"gradients added through memory that {processes} processes share"
    if hosts == 1:
        return Exchanged(how, (Traffic("each process", each, each, processes),))
    # The first of each host adds in a ring, and the others read what that comes to.
    ring = 2 * (hosts - 1) * sums.dense // hosts + (hosts - 1) * on_host * sums.rows
    whole = sums.dense + plan.workers * sums.rows
    traffic = (
        Traffic("the first process of each host", each + ring + (processes - 1) * whole, each + ring, hosts),
        Traffic("each other process", each, each + whole, hosts * (processes - 1)),
    )
    return Exchanged(f"{how} on each of {hosts} hosts, and between these in a ring", traffic, hosts * ring, ring)


def _servers(plan: Plan, size: Size, shards: dict[str, tuple[int, ...]]) -> dict[int, Counter[str]]:
    """Bytes that each parameter server, by rank, keeps, and has read of it and sent to it for a step of one worker."""
    servers = {rank: Counter[str]() for rank in plan.ranks("parameter server")}
    for variable in size.variables:
        total = variable.shape[0] if variable.path in shards else 1
        read, sent = _travels(plan, variable)
        amounts = {"parameters": variable.bytes, "slots": variable.slot_bytes, "read": read}
        amounts |= {"gradients": variable.bytes, "sent": sent} if variable.trainable else {}
        for rows in shards.get(variable.path, (1,)):
            emptiest = min(servers.values(), key=lambda held: held["parameters"])
            emptiest.update({name: amount * rows // total for name, amount in amounts.items()})
    next(iter(servers.values()))["slots"] += size.optimizer_bytes
    return servers


def _served(plan: Plan, servers: dict[int, Counter[str]]) -> Exchanged:
    of_host = defaultdict[int, Counter[str]](Counter)
    for process in plan.processes:
        of_host[process.host].update(servers.get(process.rank, {"workers": bool(process.replicas)}))
    count, total = plan.workers, sum(of_host.values(), Counter[str]())
    # For a step of every worker: what a host's servers send to workers elsewhere, and its workers to servers elsewhere.
    hosts = [(held["read"], held["sent"], held["workers"]) for held in of_host.values()]
    all_read, all_sent = total["read"], total["sent"]
    leaves = [reads * (count - own) + own * (all_sent - sends) for reads, sends, own in hosts]
    comes = [sends * (count - own) + own * (all_read - reads) for reads, sends, own in hosts]
    of_servers = [Traffic(f"server {rank}", count * one["read"], count * one["sent"]) for rank, one in servers.items()]
    traffic = Traffic("each worker", all_sent, all_read, count), *of_servers
    how = "variables read from the servers, gradients sent to them"
    return Exchanged(how, traffic, sum(leaves) // count, max(*leaves, *comes), steps=count)

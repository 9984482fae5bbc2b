"""Turns a plan and the size of its model into bytes: what is kept where while it trains, and what a step exchanges.

Arithmetic only. Metrics, validation, ids and headers are not counted.
"""

from collections import Counter
from dataclasses import dataclass, replace

from pipeline.config.schema import Exchange
from pipeline.plan.backends import JAX
from pipeline.plan.division import bucket_of, laid_out
from pipeline.plan.host import FullestHost, HostMemory, ahead, beside_gradients, of_host
from pipeline.plan.plan import SHARED_MEMORY, Plan
from pipeline.plan.size import Layer, Size, Variable, places_layers


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

    `between` of the `total` are from one host to another, of which the busiest host sends or receives `busiest`.
    In an asynchronous training a step is that of one worker; `busiest` and `traffic` are for a step of all, so many
    `steps`.
    Beside them `small` exchanges of a few numbers are waited for one after the other, for batch normalization.
    Gradients leave for other hosts in buckets of about `bucket` bytes; 0: all at the end.
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
class MemoryPart:
    """Layers that share a device: one of each replica."""

    devices: tuple[str, ...]
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Estimate:
    """The needs of a plan: `memory` by place; `exchanged`, or None where the strategy does not say; tables cut into
    shards of so many rows; large variables that stay on one server, and why; places that have too little memory; why
    activations are unknown, where they are; bytes of an example, where every process holds all of them; which layers
    are on which devices, where whole ones are placed; what hosts hold whose memory is that of their devices.
    """

    memory: tuple[HostMemory, ...]
    exchanged: Exchanged | None
    shards: tuple[tuple[str, tuple[int, ...]], ...]
    whole: tuple[tuple[str, str], ...]
    too_small: tuple[str, ...]
    unknown: str | None
    example_bytes: int | None
    placed: "tuple[MemoryPart, ...]" = ()
    host: FullestHost | None = None

    @property
    def fits(self) -> bool:
        """True if there is memory for all that is known of."""
        return not self.too_small and (self.host is None or self.host.fits)

    @property
    def device(self) -> HostMemory:
        """The memory of a device that trains a replica."""
        return self.memory[0]


def estimate(plan: Plan, size: Size) -> Estimate:
    """Returns what `plan` needs for a model of `size`."""
    shards, whole = sharded(plan, size)
    kind = plan.strategy.exchange
    # With one worker on one device there is nothing to exchange, and nowhere else to keep variables.
    if plan.workers == 1 and kind in (Exchange.all_reduce, Exchange.central):
        kind = Exchange.none
    if kind == Exchange.parameter_server and not plan.ranks("parameter server"):
        # A strategy's own file may say anything: no process is planned that could hold the variables.
        kind = None
    sums = _Sums(plan, size)
    place = f"each {plan.hardware.kind.upper()}" if kind else "one copy"
    alone = HostMemory(place, sums.variables, sums.trained, sums.slots, sums.activations, sums.batches)
    memory: tuple[HostMemory, ...] = (alone,)
    exchanged: Exchanged | None = Exchanged("nothing")
    if kind is None:
        exchanged = None
    elif kind == Exchange.all_reduce:
        bucket = bucket_of(sums.dense, plan.bucket_bytes)
        exchanged = replace(_all_reduced(plan, sums), bucket=bucket if bucket < sums.dense else 0)
    elif kind == Exchange.central:
        memory = (replace(alone, slots=0), replace(alone, place="the host", activations=0, batches=0))
        exchanged = _central(plan, sums)
    elif kind == Exchange.parameter_server:
        servers = _servers(plan, size, dict(shards))
        memory = (
            HostMemory("each worker", sums.read, sums.sent, 0, sums.activations),
            *(HostMemory(f"server {rank}", held["parameters"], held["gradients"], held["slots"], 0)
              for rank, held in servers.items()),
        )  # fmt: skip
        exchanged = _served(plan, sums, servers)
    placed = _placed(plan, size)
    if placed:
        first, *others = (_of_part(part, size, len(placed), sums.activations) for part in placed)
        memory = (replace(first, batches=sums.batches), *others)
    elif plan.backend == JAX and plan.strategy.devices_per_replica > 1:
        memory = (replace(alone, place=f"each {plan.hardware.kind.upper()}"),)
    is_known = kind is not None or plan.strategy.devices_per_replica > 1
    gib = plan.hardware.memory_gib if is_known else None
    of_devices = memory if placed else memory[:1]
    small = () if gib is None else tuple(device.place for device in of_devices if device.total > gib * 2**30)
    host = of_host(plan, size, memory)
    return Estimate(memory, exchanged, shards, whole, small, size.unknown, size.example_bytes, placed, host)


def _placed(plan: Plan, size: Size) -> tuple[MemoryPart, ...]:
    if not (places_layers(plan) and size.layers):
        return ()
    parts, each = laid_out(plan, size.layers), plan.strategy.devices_per_replica
    devices = plan.processes[0].devices
    layers = [(layer, part) for layer, part in zip(size.layers, parts, strict=True) if layer.bytes]
    own = [tuple(layer for layer, part in layers if part == number) for number in range(each)]
    return tuple(MemoryPart(devices[number::each], own[number]) for number in range(each))


def _of_part(part: MemoryPart, size: Size, parts: int, activations: int | None) -> HostMemory:
    paths = {path for layer in part.layers for path in layer.variables}
    own = [variable for variable in size.variables if variable.path in paths]
    return HostMemory(
        " ".join(part.devices),
        parameters=sum(variable.bytes for variable in own),
        gradients=sum(variable.bytes for variable in own if variable.trainable),
        slots=sum(variable.slot_bytes for variable in own),
        # Layers are laid out by balance, which shares out what a step holds as well.
        activations=None if activations is None else activations // parts,
    )


def sharded(plan: Plan, size: Size) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], tuple[tuple[str, str], ...]]:
    """(tables cut, with the rows of each shard; variables that would make two, and are not cut, and why)."""
    least, servers = plan.strategy.min_shard_bytes, len(plan.ranks("parameter server"))
    if least is None:
        return (), ()
    cut, whole = [], []
    for variable in size.variables:
        if variable.bytes < 2 * least:
            continue
        if servers < 2:
            whole.append((variable.path, "there is one server"))
        elif variable.whole is not None:
            whole.append((variable.path, variable.whole))
        else:
            cut.append((variable.path, rows_of_shards(variable.shape[0], variable.bytes, servers, least)))
    return tuple(cut), tuple(whole)


def rows_of_shards(rows: int, size_bytes: int, servers: int, least_bytes: int) -> tuple[int, ...]:
    """Rows of each shard: as many shards of at least `least_bytes` as there are servers for, the first ones longer.

    >>> rows_of_shards(rows=10, size_bytes=640, servers=4, least_bytes=64)
    (3, 3, 2, 2)
    """
    shards = max(1, min(servers, size_bytes // least_bytes, rows))
    return tuple(rows // shards + (place < rows % shards) for place in range(shards))


class _Sums:
    """Bytes of a model, added up once: of all its variables, and of what a replica's step makes and sends."""

    def __init__(self, plan: Plan, size: Size) -> None:
        trained = [variable for variable in size.variables if variable.trainable]
        parts = plan.strategy.devices_per_replica if plan.backend == JAX else 1

        def here(amount: int, variable: Variable) -> int:
            """Returns the bytes of a variable on one of the devices over which it may be cut."""
            return amount // parts if parts in variable.cut else amount

        self.variables = sum(here(variable.bytes, variable) for variable in size.variables)
        self.trained = sum(here(variable.bytes, variable) for variable in trained)
        self.slots = sum(here(variable.slot_bytes, variable) for variable in size.variables) + size.optimizer_bytes
        self.activations: int | None = None
        moments = size.forgetful_step if plan.training.remat and size.forgetful_step else size.step
        if moments is not None:
            fullest = max(fixed + plan.training.replica_batch * growing for fixed, growing in moments)
            self.activations = beside_gradients(plan.backend, fullest, self.trained)
        of_replica = plan.training.replica_batch * (size.batch_bytes or size.example_bytes or 0)
        self.batches = of_replica * ahead(plan, plan.workers * of_replica)
        # Only gradients of 32 bits are narrowed.
        narrow = plan.training.gradient_bits == 16
        self.dense = sum(
            variable.bytes // 2 if narrow and variable.dtype == "float32" else variable.bytes
            for variable in trained
            if not variable.is_table
        )
        self.rows = sum(_row_gradient(plan, variable) for variable in trained if variable.is_table)
        # One in the forward pass, one in the backward pass.
        self.small = 2 * size.normalizations if plan.training.batch_statistics == "global" else 0
        self.read = sum(_read(plan, variable) for variable in size.variables)
        self.sent = self.dense + self.rows


def _rows(plan: Plan, table: Variable) -> int:
    """Rows of a table that a replica's step looks up; one that is looked up twice counts twice."""
    return plan.training.replica_batch * (table.rows_per_example or 0)


def _read(plan: Plan, variable: Variable) -> int:
    """Bytes of a variable that a worker reads from the servers for a step."""
    return _rows(plan, variable) * variable.row_bytes if variable.is_table else variable.bytes


def _row_gradient(plan: Plan, table: Variable) -> int:
    """Bytes of a table's gradient for a replica's step: the rows that it looked up, and their numbers, int32."""
    return _rows(plan, table) * (table.row_bytes + 4)


def _all_reduced(plan: Plan, sums: _Sums) -> Exchanged:
    count, hosts = plan.workers, plan.hardware.hosts
    if len(plan.processes) == 1 and plan.hardware.kind == "cpu":
        # TensorFlow's ReductionToOneDevice: all send to one, which sends the sum to all others; rows are not added
        # but put together, so that the others receive those of all.
        to_first, back = sums.dense + sums.rows, sums.dense + count * sums.rows
        traffic = (
            Traffic("the first device", (count - 1) * back, (count - 1) * to_first),
            Traffic("each other device", to_first, back, count - 1),
        )
        return Exchanged("gradients added on one device, sums copied back", traffic, small=sums.small)
    if plan.collective == SHARED_MEMORY:
        return _shared(plan, sums)
    # Ring all-reduce moves 2 (n - 1) / n of the bytes over each link (Patarasuk & Yuan, 2009); rows are gathered.
    sent = 2 * (count - 1) * sums.dense // count + (count - 1) * sums.rows
    between = hosts * sent if hosts > 1 else 0
    each = Traffic("each device", sent, sent, count)
    return Exchanged(f"gradients all-reduced in a ring of {count}", (each,), between, sent * bool(between), sums.small)


def _shared(plan: Plan, sums: _Sums) -> Exchanged:
    hosts, processes = plan.hosts_that_train, len(plan.leaders) // plan.hosts_that_train
    on_host = plan.workers // hosts
    per_process = on_host // processes
    # Each process adds its devices, then reads as much of the others' as it would receive in a ring of them.
    each = 2 * (per_process - 1) * sums.dense + 2 * (processes - 1) * sums.dense // processes
    each += (on_host - per_process) * sums.rows
    how = f"gradients added through memory that {processes} processes share"
    if hosts == 1:
        return Exchanged(how, (Traffic("each process", each, each, processes),), small=sums.small)
    # The first of each host adds in a ring, and the others read what that comes to.
    ring = 2 * (hosts - 1) * sums.dense // hosts + (hosts - 1) * on_host * sums.rows
    whole = sums.dense + plan.workers * sums.rows
    traffic = (
        Traffic("the first process of each host", each + ring + (processes - 1) * whole, each + ring, hosts),
        Traffic("each other process", each, each + whole, hosts * (processes - 1)),
    )
    how = f"{how} on each of {hosts} hosts, and between these in a ring"
    return Exchanged(how, traffic, hosts * ring, ring, sums.small)


def _central(plan: Plan, sums: _Sums) -> Exchanged:
    count = plan.workers
    to_first, back = sums.dense + sums.rows, sums.dense + count * sums.rows
    # Every device reads all variables. Gradients are added on one device; the sum goes back to the others and to the
    # host, which applies it.
    traffic = (
        Traffic("the host", count * sums.variables, back),
        Traffic("the first device", count * back, sums.variables + (count - 1) * to_first),
        Traffic("each other device", to_first, sums.variables + back, count - 1),
    )
    return Exchanged("variables read from the host, gradients added and given back", traffic, small=sums.small)


def _servers(plan: Plan, size: Size, shards: dict[str, tuple[int, ...]]) -> dict[int, Counter[str]]:
    """Bytes of each parameter server by its rank, each variable or shard on that which held the fewest until then.

    They are those that it keeps, and those that are read of it and sent to it for a step of one worker.
    """
    servers = {rank: Counter[str]() for rank in plan.ranks("parameter server")}
    for variable in size.variables:
        total = variable.shape[0] if variable.path in shards else 1
        amounts = {"parameters": variable.bytes, "slots": variable.slot_bytes, "read": _read(plan, variable)}
        if variable.trainable:
            sent = _row_gradient(plan, variable) if variable.is_table else variable.bytes
            amounts |= {"gradients": variable.bytes, "sent": sent}
        for rows in shards.get(variable.path, (1,)):
            emptiest = min(servers.values(), key=lambda held: held["parameters"])
            emptiest.update({name: amount * rows // total for name, amount in amounts.items()})
    next(iter(servers.values()))["slots"] += size.optimizer_bytes
    return servers


def _served(plan: Plan, sums: _Sums, servers: dict[int, Counter[str]]) -> Exchanged:
    workers = Counter(process.host for process in plan.processes if process.replicas)
    read, sent = Counter[int](), Counter[int]()
    for rank, held in servers.items():
        read[plan.processes[rank].host] += held["read"]
        sent[plan.processes[rank].host] += held["sent"]
    all_workers, all_read, all_sent = plan.workers, sum(read.values()), sum(sent.values())
    # For a step of every worker: what a host's servers send to workers elsewhere, and its workers to servers elsewhere.
    hosts = [(read[host], sent[host], workers[host]) for host in range(plan.hardware.hosts)]
    leaves = [reads * (all_workers - count) + count * (all_sent - sends) for reads, sends, count in hosts]
    comes = [sends * (all_workers - count) + count * (all_read - reads) for reads, sends, count in hosts]
    traffic = (
        Traffic("each worker", all_sent, all_read, all_workers),
        *(
            Traffic(f"server {rank}", all_workers * held["read"], all_workers * held["sent"])
            for rank, held in servers.items()
        ),
    )
    how = "variables read from the servers, gradients sent to them"
    return Exchanged(how, traffic, sum(leaves) // all_workers, max(*leaves, *comes), steps=all_workers)

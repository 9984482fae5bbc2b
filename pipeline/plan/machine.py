"""The hosts of a plan, which of their devices a config computes on, and how workers are laid over hosts."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.schema import Baseline, Config, Kind, Precision
from pipeline.errors import UserError, refuse
from pipeline.plan.backends import HOROVOD, check_laid_out
from pipeline.plan.checks import HOST, MOST_WORKERS
from pipeline.plan.division import left_out
from pipeline.plan.plan import DATA_SERVER, Process

# Where a TPU's worker listens; the port that Google's TPUs have is 8470.
TPU_ADDRESS = re.compile(r"grpc://([^\s:/,@]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")
MOST_SERVERS = 1_024


@dataclass(frozen=True)
class Host:
    """One host: its name, the cores this process may use, memory in GiB, and a name for each GPU and TPU chip.

    `tpu_name` is what the environment calls its TPU; `cache_bytes` what the last caches before memory hold.
    """

    hostname: str
    cores: tuple[int, ...]
    memory_gib: float
    cpu: str
    gpus: tuple[str, ...] = ()
    tpus: tuple[str, ...] = ()
    tpu_name: str | None = None
    cache_bytes: int | None = None


@dataclass(frozen=True)
class Machine(Host):
    """The hosts of a cluster, by what the least of them has.

    Where there is one of the `hosts`, it stands for all. `members` are all in order; empty where they are like this
    one. `tasks` are the kinds of processes that something else has started ("chief", "worker", "ps"), in order; empty
    where as many start as a plan has. `grows`: so do hosts. `link_gbps` is the speed of the slowest link, as measured.
    """

    hosts: int = 1
    tasks: tuple[str, ...] = ()
    members: tuple[Host, ...] = ()
    grows: bool = False
    link_gbps: float | None = None

    def member(self, host: int) -> Host:
        """The host of that number."""
        return self.members[host] if host < len(self.members) else self


def inventory(members: Sequence[Host]) -> Machine:
    """The hosts of a cluster. What is laid over all of them alike fits the least of them."""
    fewest, first = min(members, key=lambda host: len(host.cores)), members[0]
    caches = [host.cache_bytes for host in members if host.cache_bytes is not None]
    memory, cache = min(host.memory_gib for host in members), min(caches) if len(caches) == len(members) else None
    gpus, tpus = (min((getattr(host, kind) for host in members), key=len) for kind in ("gpus", "tpus"))
    least = Host(first.hostname, fewest.cores, memory, fewest.cpu, gpus, tpus, first.tpu_name, cache)
    return Machine(**vars(least), hosts=len(members), members=tuple(members))


def differences(members: Sequence[Host]) -> list[str]:
    """In words, what some hosts have and others have not."""
    sentences: list[str] = []
    for what, values in (
        ("core", [str(len(host.cores)) for host in members]),
        ("GPU", [str(len(host.gpus)) for host in members]),
        ("", [host.cpu for host in members]),
        ("", [", ".join(sorted(set(host.gpus))) for host in members]),
    ):
        # What most have comes last, of as many what the first host has.
        kinds = Counter(values).most_common()[::-1]
        for value, count in kinds[:-1] if what or "" not in values else ():
            hosts = some([host for host, has in zip(members, values, strict=True) if has == value])
            plural = f" {what}{'s' * (value != '1')}" if what else ""
            sentences.append(f"{hosts} {'has' if count == 1 else 'have'} {value}{plural}, the others {kinds[-1][0]}")
    return sentences


def some(hosts: Sequence[Host]) -> str:
    """Hosts by their names, or the first of many: "a, b and c", "a, b, c and 3 more"."""
    names = [host.hostname for host in hosts]
    if len(names) > 4:
        names = [*names[:3], f"{len(names) - 3} more"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def devices_of(config: Config, machine: Machine, present: bool) -> tuple[str, int, list[str]]:
    """(kind that computes, devices per host, notes)."""
    hardware, kind, on_tpu = config.hardware, config.hardware.kind, config.strategy.on_tpu
    by_itself = kind is Kind.auto and bool(machine.tpus) and not hardware.rehearse
    refuse(
        (on_tpu and kind is not Kind.tpu and not by_itself,
         f"the hardware of a TPU, since {config.strategy.name} trains on nothing else", f"hardware={hardware.name}",
         "hardware=tpu_v5e_8, or hardware=tpu_v5e_8 hardware.rehearse=true where there is none"),
        (kind is Kind.tpu and not on_tpu,
         f"a strategy for TPUs, since hardware={hardware.name} is one", f"strategy={config.strategy.name}",
         "strategy=tpu"),
    )  # fmt: skip
    if kind is Kind.auto:
        kind = Kind.tpu if on_tpu else Kind.gpu if machine.gpus and not hardware.rehearse else Kind.cpu
    count = len({Kind.gpu: machine.gpus, Kind.tpu: machine.tpus}.get(kind, machine.cores))
    per_host = hardware.devices_per_host or max(1, count)
    if hardware.rehearse:
        return "cpu", per_host, []
    needed = per_host * (hardware.hosts or 1) if machine.hosts == 1 else per_host
    if kind is Kind.tpu and not tpu_address(config, machine):
        called = f" (TPU_NAME={machine.tpu_name} is no address)" if machine.tpu_name else ""
        lacks = f"hardware={hardware.name} is a TPU, this machine has none{called}"
        expected = f"a TPU for hardware={hardware.name}"
        received = f"a machine without one and no address of one{called}"
        instead = "it on a TPU VM, strategy.build.address=grpc://HOST:8470, or hardware.rehearse=true to run the same "
        instead += "plan on logical CPU devices"
    elif kind is Kind.gpu and needed > len(machine.gpus):
        gpus, fewest = len(machine.gpus), min(machine.members, key=lambda host: len(host.gpus), default=None)
        whose = "this machine" if fewest is None else fewest.hostname
        lacks = f"hardware={hardware.name} has {needed} GPUs, {whose} has {gpus} and {len(machine.cores)} CPU cores"
        expected, received = "the devices that the hardware names", f"a machine without them: {lacks}"
        instead = f"hardware={gpus}gpu" if gpus in (1, 2, 4, 8) else "hardware=auto"
        instead += ", or hardware.rehearse=true to run the same layout on logical CPU devices"
    else:
        return kind.value, per_host, []
    if present:
        raise UserError(expected, received, instead)
    return kind.value, per_host, [f"{lacks}: a run here is refused without hardware.rehearse=true."]


def tpu_address(config: Config, machine: Machine) -> str | None:
    """Returns the TPU's address, "local" for one that is attached, None where there is none. Refuses others."""
    typed = config.strategy.build.get("address")
    key, address = ("strategy.build.address", str(typed)) if typed else ("TPU_NAME", machine.tpu_name or "")
    if typed == "local" or (not typed and not address.startswith("grpc:")):
        return "local" if machine.tpus else None
    match = TPU_ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match.group(2)) <= 65535:
        bare = re.sub(r"^[a-z]*:/*", "", address)
        near = [place for place in (f"grpc://{bare}", f"grpc://{bare}:8470") if TPU_ADDRESS.fullmatch(place)]
        offered = near[0] if near and match is None else "grpc://10.0.0.2:8470"
        raise UserError(f"{key} to be local or grpc://HOST:PORT, with a port up to 65535", address, f"{key}={offered}")
    return address


def precision_of(config: Config) -> str:
    """Keras's dtype policy. Raises `UserError`."""
    named, on_tpu = config.train.precision, config.strategy.on_tpu
    if on_tpu and named is Precision.mixed_float16:
        expected = "train.precision to be mixed_bfloat16 or float32 under strategy=tpu, since TPUs compute in bfloat16"
        raise UserError(expected, "mixed_float16", "train.precision=mixed_bfloat16")
    return (named or (Precision.mixed_bfloat16 if on_tpu else Precision.float32)).value


def baseline_source(config: Config, kind: str) -> str:
    """Returns where the baseline comes from. Raises `UserError`."""
    named, on_tpu = config.measure.baseline, kind == "tpu"
    expected = "measure.baseline=none on a TPU, which belongs to one process and leaves none for a baseline"
    instead = f"measure.baseline=none, and -m workers=1,{config.workers or 8} to compare"
    refuse((on_tpu and named not in (None, Baseline.none), expected, named and named.value, instead))
    return "none" if on_tpu else named.value if named else "once"


def is_explained(config: Config, kind: str) -> bool:
    """True if the lost efficiency is explained. Refused where none is known."""
    if not config.measure.explain:
        return False
    refuse(
        (config.measure.steps == 0, "a run that is measured with measure.explain=true", "measure.steps=0",
         "measure.steps=null, or measure.explain=false"),
        (baseline_source(config, kind) == "none",
         "a baseline with measure.explain=true, since efficiency is lost against it",
         f"none{' on a TPU, which leaves no device for one' if kind == 'tpu' else ''}",
         f"{'' if kind == 'tpu' else 'measure.baseline=null, or '}measure.explain=false"),
    )  # fmt: skip
    return True


def notes_on_tpu(config: Config, kind: str, workers: int, global_batch: int) -> list[str]:
    """Returns what batches of one size leave out, and why there is no baseline."""
    if not config.strategy.on_tpu:
        return []
    notes, examples = [], config.data.train_examples
    out = None if examples is None else left_out(examples, workers, global_batch)
    if out != 0:
        count = f"up to {global_batch - 1}" if out is None else f"{out} of {examples}"
        left = f"{count} training examples{', others each time' * config.data.shuffle}"
        notes.append(f"Batches are all of {global_batch}, as a TPU needs: each epoch leaves out {left}.")
    if kind == "tpu" and config.measure.baseline is None and config.measure.steps != 0:
        notes.append("A TPU belongs to one process, which leaves none for a baseline: compare with a run of workers=1.")
    return notes


def _tasks_that_train(config: Config, machine: Machine) -> int | None:
    """Returns how many processes that train something else has started; None where as many start as are needed."""
    strategy, kinds = config.strategy, machine.tasks
    if not kinds or not strategy.spans_processes:
        return None
    if strategy.asynchronous and "chief" not in kinds:
        expected = f"a chief among the tasks, since it coordinates the others under strategy={strategy.name}"
        raise UserError(expected, ", ".join(kinds), "it with a chief, or strategy=multi_worker")
    return kinds.count("worker") + kinds.count("chief") * (not strategy.asynchronous)


def hosts_of(config: Config, machine: Machine) -> int:
    """Returns how many hosts a config is laid over: all, but no more than it has workers, unless it says so.

    Of hosts that are started for it these are the fewest that the workers divide evenly over. Raises `UserError`.
    """
    hosts, members, workers = config.hardware.hosts, machine.members, config.workers or 1
    if members and hosts is not None and hosts > len(members):
        expected = f"no more hosts than the {len(members)} of the cluster ({some(members)})"
        raise UserError(expected, f"hardware.hosts={hosts}", f"hardware.hosts={len(members)}")
    # `lay_out` refuses too many workers.
    if hosts is not None or not config.strategy.spans_processes or (machine.grows and workers > MOST_WORKERS):
        return hosts or 1
    if not machine.grows:
        return max(1, min(machine.hosts, config.workers or machine.hosts))
    per_host = config.hardware.devices_per_host or max(1, len(machine.gpus) or len(machine.cores))
    return next(count for count in range(math.ceil(workers / per_host), workers + 1) if workers % count == 0)


def _workers(config: Config, kind: str, per_host: int, tasks: int | None) -> int:
    strategy, hardware, hosts = config.strategy, config.hardware, config.hardware.hosts or 1
    if not (strategy.spans_devices or strategy.spans_processes):
        expected, received = f"workers=1, since {strategy.name} trains on one device", f"workers={config.workers}"
        refuse((config.workers not in (None, 1), expected, received, f"workers=1, or strategy=mirrored {received}"))
        return 1
    devices = per_host * hosts
    each = strategy.devices_per_process or (max(1, devices // (tasks or 1)) if strategy.spans_devices else 1)
    workers = config.workers or (tasks * each if tasks else devices)
    refuse(
        (workers > MOST_WORKERS, f"no more than {MOST_WORKERS} workers", workers, f"workers={per_host}"),
        (hosts > 1 and not strategy.spans_processes and workers > per_host,
         f"one host, since {strategy.name} holds all its devices in one process",
         f"hardware={hardware.name} with {hosts} hosts",
         f"{'' if strategy.on_tpu else 'strategy=multi_worker, or '}workers={per_host} for one host"),
        (workers > devices and (kind != "cpu" or hardware.rehearse), "no more workers than devices",
         f"workers={workers} on hardware={hardware.name} with {devices}", f"workers={devices}"),
        (strategy.spans_processes and workers > 1 and workers % hosts,
         f"workers that divide evenly over {hosts} hosts", f"workers={workers}",
         f"workers={max(hosts, workers // hosts * hosts)}"),
    )  # fmt: skip
    return workers


def _processes_and_hosts(config: Config, workers: int, tasks: int | None) -> tuple[int, int]:
    """(workers in a process, workers on a host)."""
    strategy, hosts, key = config.strategy, config.hardware.hosts or 1, "strategy.devices_per_process"
    per_host, used = math.ceil(workers / hosts) if workers > 1 else 1, strategy.devices_per_process
    if not strategy.spans_processes:
        expected = f"{key}={workers}, since {strategy.name} is one process with every worker"
        refuse((used not in (None, workers), expected, used, f"{key}=null, or strategy=multi_worker"))
        return workers, workers
    usual = per_host if hosts > 1 and strategy.collective != HOROVOD else 1
    usual = max(1, workers // tasks) if tasks else usual
    per_process = used or (usual if strategy.spans_devices else 1)
    fitting = max(count for count in range(1, min(per_process, per_host) + 1) if per_host % count == 0)
    refuse(
        (per_process > 1 and not strategy.spans_devices, f"{key}=1 under {strategy.name}", per_process, f"{key}=1"),
        (per_host % per_process, f"{key} to divide the {per_host} workers of a host", per_process, f"{key}={fitting}"),
    )
    return per_process, per_host


def _servers(config: Config, workers: int, started: int) -> int:
    """Returns the number of parameter servers; something else has `started` some already."""
    strategy = config.strategy
    if not strategy.asynchronous:
        only = "strategy=parameter_server"
        for key in ("parameter_servers", "min_shard_bytes"):
            if getattr(strategy, key) is not None:
                expected, received = f"strategy.{key} with {only} only", f"it with {strategy.name}"
                raise UserError(expected, received, f"strategy.{key}=null, or {only}")
        return 0
    if config.train.deterministic and workers > 1:
        expected = f"train.deterministic=false under {strategy.name}, whose {workers} workers train asynchronously"
        raise UserError(expected, "true", "workers=1, or strategy=mirrored")
    # What a server passes on grows with the workers, and one keeps up with about four.
    servers = strategy.parameter_servers or started or math.ceil(workers / 4)
    if servers > MOST_WORKERS:
        raise UserError(f"no more than {MOST_WORKERS} parameter servers", servers, "strategy.parameter_servers=null")
    return servers


def service_of(config: Config) -> tuple[int, tuple[str, ...]]:
    """(processes of this plan that make batches, over all hosts; addresses of services that are there already)."""
    service = config.data.service
    if service is None:
        return 0, ()
    if re.fullmatch(r"\d+", service):
        if not 1 <= int(service) <= MOST_SERVERS:
            expected = f"data.service to be from 1 to {MOST_SERVERS} processes on each host"
            raise UserError(expected, service, "data.service=2")
        return int(service) * (config.hardware.hosts or 1), ()
    addresses = tuple(part.strip().removeprefix("grpc://") for part in service.split(","))
    hosts_ports = [address.rpartition(":")[::2] for address in addresses]
    refuse(
        (not all(HOST.fullmatch(host) and port.isdecimal() and 1 <= int(port) <= 65535 for host, port in hosts_ports),
         "data.service to be how many processes on each host, or addresses HOST:PORT", service or "nothing",
         "data.service=2, or 'data.service=\"10.0.0.5:5050,10.0.0.6:5050\"'"),
        (len(set(addresses)) < len(addresses), "each address of data.service once", service, "each of them once"),
    )  # fmt: skip
    return 0, addresses


@dataclass(frozen=True)
class Layout:
    """The workers in each process and on each host, each on `per_replica` devices, and parameter `servers`.

    `devices_here` share a machine, which stands for all hosts where `local`.
    """

    kind: str
    hosts: int
    local: bool
    workers: int
    per_process: int
    per_host: int
    per_replica: int
    devices_here: int
    threads: int
    servers: int
    data_servers: int
    oversubscribed: bool


def lay_out(config: Config, machine: Machine, kind: str, devices_per_host: int) -> Layout:
    """Lays the config's workers over processes and hosts. Raises `UserError`."""
    strategy, hardware, hosts = config.strategy, config.hardware, config.hardware.hosts or machine.hosts
    tasks, per_replica = _tasks_that_train(config, machine), strategy.devices_per_replica or 1
    expected = f"no more than the {devices_per_host} devices of hardware={hardware.name} for a copy of the model"
    key, lacks = "strategy.devices_per_replica", per_replica > devices_per_host and (kind != "cpu" or hardware.rehearse)
    refuse((lacks, expected, f"{key}={per_replica}", f"{key}={devices_per_host}"))
    workers = _workers(config, kind, max(1, devices_per_host // per_replica), tasks)
    per_process, per_host = _processes_and_hosts(config, workers, tasks)
    check_laid_out(config, kind, per_process, per_host, hosts)
    started = machine.tasks.count("ps")
    servers = _servers(config, workers, started)
    refuse(
        (tasks is not None and workers // per_process > tasks,
         f"no more processes that train than the {tasks} that were started",
         f"{workers // per_process} for workers={workers // per_process * per_process}",
         f"workers={(tasks or 0) * per_process}"),
        (tasks is not None and servers > started,
         f"no more parameter servers than the {started} that were started", servers,
         f"strategy.parameter_servers={started}" if started else "strategy=multi_worker"),
    )  # fmt: skip
    local = machine.hosts == 1 or hosts == 1
    devices_here = (workers if local else per_host) * per_replica
    threads = hardware.threads_per_device or max(1, len(machine.cores) // max(devices_per_host, devices_here))
    # A host that has too few cores for its workers would have all others wait for it, where these have enough.
    needed, members = per_host * threads, machine.members
    short = [host for host in members[:hosts] if len(host.cores) < needed]
    if kind == "cpu" and not hardware.rehearse and 0 < len(short) < len(members):
        fewest = min(len(host.cores) for host in short)
        fitting = f"workers={max(1, fewest // threads) * hosts}, or the cluster without {some(short)}"
        expected = f"hosts with {needed} cores for {per_host} workers each"
        raise UserError(expected, f"{some(short)} with {fewest}", fitting)
    of_host = (per_process, per_host, per_replica, devices_here, threads)
    oversubscribed = kind == "cpu" and devices_here * threads > len(machine.cores)
    return Layout(kind, hosts, local, workers, *of_host, servers, service_of(config)[0], oversubscribed)


def processes_of(layout: Layout, config: Config, machine: Machine) -> tuple[Process, ...]:
    """All processes by rank; each that others reach is to listen at a port of its host that is not known yet."""
    reached, training = f"{config.cluster.host}:0", layout.workers // layout.per_process
    first = int(config.strategy.asynchronous)
    address = None if first + training == 1 else reached
    processes = [Process(rank, "coordinator", 0, address) for rank in range(first)]
    processes += [_training(first + number, number, layout, address, machine) for number in range(training)]
    servers = (("parameter server", layout.servers, address), (DATA_SERVER, layout.data_servers, reached))
    for role, count, at in servers:
        processes += [Process(len(processes) + number, role, number % layout.hosts, at) for number in range(count)]
    return tuple(processes)


def _training(rank: int, number: int, layout: Layout, address: str | None, machine: Machine) -> Process:
    threads, replicas = layout.threads, tuple(range(number * layout.per_process, (number + 1) * layout.per_process))
    host, each = replicas[0] // layout.per_host, layout.per_process * layout.per_replica
    first = (replicas[0] if layout.local else replicas[0] % layout.per_host) * layout.per_replica
    # Each host numbers its GPUs from 0; several processes of one host take consecutive ones.
    numbers = range(first, first + each) if layout.kind == "gpu" else range(each)
    intra, inter, cores = 0, 0, tuple[int, ...]()
    if layout.kind == "cpu":
        if layout.devices_here * threads <= len(machine.member(host).cores):
            cores = machine.member(host).cores[first * threads : (first + each) * threads]
        # The devices of a process share one Eigen pool. With one thread a device its work runs on the inter-op
        # threads, and a larger pool only adds hand-overs; two inter-op threads keep communication beside compute.
        intra, inter = threads if threads == 1 else threads * each, max(2, each)
    devices = tuple(f"{layout.kind.upper()}:{index}" for index in numbers)
    return Process(rank, "worker" if rank else "chief", host, address, devices, replicas, cores, intra, inter)

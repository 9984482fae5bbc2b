"""The hosts that a plan is laid over, which of their devices a config computes on, and what follows from their kind.

Devices that are not there are refused.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.schema import Baseline, Config, Kind, Object, Precision
from pipeline.errors import UserError, refuse
from pipeline.plan.division import left_out

# Where a TPU's worker listens; the port that Google's TPUs have is 8470.
TPU_ADDRESS = re.compile(r"grpc://([^\s:/,@]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")


@dataclass(frozen=True)
class Host:
    """One host: its name, the cores this process may use, memory in GiB, and a name for each GPU and TPU chip.

    `tpu_name` is what the environment calls its TPU, a name or an address; `cache_bytes` what the last caches before
    memory hold, None where that is not known to decide what cores take from each other.
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

    `hosts` is how many the cluster reaches; where it is 1, this one stands for all. `members` are the hosts as they
    are, in order, where that is known; empty where all are like this one. `tasks` are the kinds of the processes that
    something else has started for the run ("chief", "worker", "ps"), in order; empty where as many are started as a
    plan has. `grows`: as many hosts like this one are started as a plan needs. `link_gbps` is what the slowest link
    between them was measured to do, None where none was.
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
    """The hosts of a cluster as they are. What is laid over all of them alike fits the least of them.

    >>> found = inventory([Host("a", (0, 1), 8.0, "A processor"), Host("b", (0,), 16.0, "A processor")])
    >>> found.hosts, found.cores, found.memory_gib
    (2, (0,), 8.0)
    """
    fewest = min(members, key=lambda host: len(host.cores))
    caches = [host.cache_bytes for host in members if host.cache_bytes is not None]
    return Machine(
        hostname=members[0].hostname,
        cores=fewest.cores,
        memory_gib=min(host.memory_gib for host in members),
        cpu=fewest.cpu,
        gpus=min((host.gpus for host in members), key=len),
        tpus=min((host.tpus for host in members), key=len),
        tpu_name=members[0].tpu_name,
        cache_bytes=min(caches) if len(caches) == len(members) else None,
        hosts=len(members),
        members=tuple(members),
    )


def differences(members: Sequence[Host]) -> list[str]:
    """In words, what some hosts have and others have not.

    >>> differences([Host("a", (0, 1), 8.0, "X"), Host("b", (0,), 8.0, "X"), Host("c", (0, 1), 8.0, "X")])
    ['b has 1 core, the others 2']
    """
    sentences: list[str] = []
    for what, values in (
        ("core", [str(len(host.cores)) for host in members]),
        ("GPU", [str(len(host.gpus)) for host in members]),
        ("", [host.cpu for host in members]),
        ("", [", ".join(sorted(set(host.gpus))) for host in members]),
    ):
        # What most have comes last, of as many what the first host has.
        kinds = sorted(dict.fromkeys(values), key=lambda value: (values.count(value), -values.index(value)))
        if len(kinds) < 2 or (not what and "" in kinds):
            continue
        usual = kinds[-1]
        for value in kinds[:-1]:
            names = [host.hostname for host, has in zip(members, values, strict=True) if has == value]
            who = f"{_listed(names)} {'has' if len(names) == 1 else 'have'}"
            plural = f" {what}{'s' * (value != '1')}" if what else ""
            sentences.append(f"{who} {value}{plural}, the others {usual}")
    return sentences


def some(hosts: Sequence[Host]) -> str:
    """Hosts by their names."""
    return _listed([host.hostname for host in hosts])


def _listed(names: Sequence[str]) -> str:
    """The names, or the first of many.

    >>> _listed(["a"]), _listed(["a", "b", "c"]), _listed(["a", "b", "c", "d", "e", "f"])
    ('a', 'a, b and c', 'a, b, c and 3 more')
    """
    if len(names) == 1:
        return names[0]
    *shown, last = [*names[:3], f"{len(names) - 3} more"] if len(names) > 4 else names
    return f"{', '.join(shown)} and {last}"


def devices_of(config: Config, machine: Machine, present: bool) -> tuple[str, int, list[str]]:
    """(kind that computes, devices per host, notes)."""
    hardware, notes = config.hardware, list[str]()
    _check_on_tpu(config, machine)
    kind = hardware.kind
    if kind is Kind.auto:
        by_itself = Kind.gpu if machine.gpus and not hardware.rehearse else Kind.cpu
        kind = Kind.tpu if config.strategy.on_tpu else by_itself
    count = len({Kind.gpu: machine.gpus, Kind.tpu: machine.tpus}.get(kind, machine.cores))
    per_host = hardware.devices_per_host or max(1, count)
    if hardware.rehearse:
        return "cpu", per_host, notes
    if kind is Kind.tpu:
        return kind.value, per_host, _absent_tpu(config, machine, present)
    needed = per_host * (hardware.hosts or 1) if machine.hosts == 1 else per_host
    if kind is Kind.gpu and needed > len(machine.gpus):
        gpus, cores = len(machine.gpus), len(machine.cores)
        fewest = min(machine.members, key=lambda host: len(host.gpus), default=None)
        whose = "this machine" if fewest is None else fewest.hostname
        lacks = f"hardware={hardware.name} has {needed} GPUs, {whose} has {gpus} and {cores} CPU cores"
        if present:
            instead = f"hardware={gpus}gpu" if gpus in (1, 2, 4, 8) else "hardware=auto"
            instead += ", or hardware.rehearse=true to run the same layout on logical CPU devices"
            raise UserError("the devices that the hardware names", f"a machine without them: {lacks}", instead)
        notes.append(f"{lacks}: a run here is refused without hardware.rehearse=true.")
    return kind.value, per_host, notes


def _check_on_tpu(config: Config, machine: Machine) -> None:
    strategy, hardware = config.strategy, config.hardware
    by_itself = hardware.kind is Kind.auto and bool(machine.tpus) and not hardware.rehearse
    refuse(
        (strategy.on_tpu and hardware.kind is not Kind.tpu and not by_itself,
         f"the hardware of a TPU, since {strategy.name} trains on nothing else", f"hardware={hardware.name}",
         "hardware=tpu_v5e_8, or hardware=tpu_v5e_8 hardware.rehearse=true where there is none"),
        (hardware.kind is Kind.tpu and not strategy.on_tpu,
         f"a strategy for TPUs, since hardware={hardware.name} is one", f"strategy={strategy.name}", "strategy=tpu"),
    )  # fmt: skip


def _absent_tpu(config: Config, machine: Machine, present: bool) -> list[str]:
    if _tpu_address(config, machine):
        return []
    name = config.hardware.name
    called = f" (TPU_NAME={machine.tpu_name} is no address)" if machine.tpu_name else ""
    if present:
        raise UserError(
            f"a TPU for hardware={name}",
            f"a machine without one and no address of one{called}",
            "it on a TPU VM, strategy.build.address=grpc://HOST:8470, or hardware.rehearse=true to run the "
            "same plan on logical CPU devices",
        )
    return [f"hardware={name} is a TPU, this machine has none{called}: a run here is refused without "
            f"hardware.rehearse=true."]  # fmt: skip


def _tpu_address(config: Config, machine: Machine) -> str | None:
    """Returns the TPU's address, "local" for one that is attached, None where there is none. Refuses others."""
    typed = config.strategy.build.get("address")
    key, address = ("strategy.build.address", str(typed)) if typed else ("TPU_NAME", machine.tpu_name or "")
    if typed == "local":
        return "local" if machine.tpus else None
    if not typed and not address.startswith("grpc:"):
        return "local" if machine.tpus else None
    match = TPU_ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match.group(2)) <= 65535:
        bare = re.sub(r"^[a-z]*:/*", "", address)
        near = [place for place in (f"grpc://{bare}", f"grpc://{bare}:8470") if TPU_ADDRESS.fullmatch(place)]
        offered = near[0] if near and match is None else "grpc://10.0.0.2:8470"
        raise UserError(f"{key} to be local or grpc://HOST:PORT, with a port up to 65535", address, f"{key}={offered}")
    return address


def with_address(config: Config, machine: Machine) -> Object:
    """Returns what makes the strategy, with the TPU's address where its function takes one."""
    build = config.strategy.build
    return build | {"address": _tpu_address(config, machine)} if "address" in build else build


def precision_of(config: Config) -> str:
    """Keras's dtype policy. Raises `UserError`."""
    named, on_tpu = config.train.precision, config.strategy.on_tpu
    if on_tpu and named is Precision.mixed_float16:
        expected = "train.precision to be mixed_bfloat16 or float32 under strategy=tpu, since TPUs compute in bfloat16"
        raise UserError(expected, "mixed_float16", "train.precision=mixed_bfloat16")
    return (named or (Precision.mixed_bfloat16 if on_tpu else Precision.float32)).value


def baseline_source(config: Config, kind: str) -> str:
    """Returns where the baseline comes from; a TPU belongs to one process, which leaves none for a baseline."""
    named = config.measure.baseline
    if kind != "tpu":
        return named.value if named else "once"
    if named not in (None, Baseline.none):
        expected = "measure.baseline=none on a TPU, which belongs to one process and leaves none for a baseline"
        instead = f"measure.baseline=none, and -m workers=1,{config.workers or 8} to compare"
        raise UserError(expected, named.value, instead)
    return "none"


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
        others = ", others each time" if config.data.shuffle else ""
        notes.append(
            f"Batches are all of {global_batch}, as a TPU needs: each epoch leaves out {count} training "
            f"examples{others}."
        )
    if kind == "tpu" and config.measure.baseline is None and config.measure.steps != 0:
        notes.append("A TPU belongs to one process, which leaves none for a baseline: compare with a run of workers=1.")
    return notes

"""The hosts that a plan is laid over, which of their devices a config computes on, and what follows from their kind."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.schema import Baseline, Config, Kind, Precision
from pipeline.errors import UserError, refuse
from pipeline.plan.division import left_out

# Where a TPU's worker listens; the port that Google's TPUs have is 8470.
TPU_ADDRESS = re.compile(r"grpc://([^\s:/,@]+|\[[0-9a-fA-F:.]+\]):(\d{1,5})")


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

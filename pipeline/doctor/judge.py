"""Turns what is found on a host, and between hosts, into findings, by arithmetic alone: a function a check."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from pipeline.errors import amount

# In the order in which they are shown. Those of HOST are looked at on each host by itself.
HOST = (
    "python", "packages", "backend", "gpus", "cores", "memory", "shm", "files", "threads", "disk", "ports", "names",
    "proxy",
)  # fmt: skip
CHECKS = (*HOST, "clocks", "link", "store", "plan")
INSTALL = "python -m pip install 'distributed-keras-pipeline{}'"
GIB, MIB = 1 << 30, 1 << 20
# Its import takes a few seconds from a disk of the host's own.
SLOW_IMPORT_SECONDS = 60.0
# A process that has its backend imported has up to half a GiB, and one that trains more.
MEMORY, LEAST_MEMORY = 2 * GIB, GIB // 2
# NCCL shares memory between the GPUs of a host there (its documentation, "Sharing Data"); Docker gives 64 MiB.
SHM_OF_GPUS, SHM = GIB, 32 * MIB
# A driver has some descriptors for each process, and TensorFlow one for each pair of processes.
OPEN_FILES, FEWEST_OPEN_FILES, ENOUGH_OPEN_FILES = 1024, 256, 4096
# TensorFlow has a few threads for each core, and gRPC for each connection.
THREADS = 1024
SLOW_NAME_SECONDS = 1.0
# Events of processes and lines of logs are put in order by their times; certificates hold from a time on.
CLOCKS_SECONDS, CLOCKS_FAULT_SECONDS = 1.0, 60.0
# Gigabit Ethernet, which a link is held to if the config says nothing.
GIGABIT = 1.0
# TCP over Ethernet carries 0.94 of a link's bits; what else is on it takes some more.
SHARE, SHARE_FAULT = 0.8, 0.5
# A round trip within a building takes no longer.
ROUND_TRIP_SECONDS = 0.005
# NVIDIA's oldest driver for each CUDA (CUDA's release notes, "CUDA Toolkit and Corresponding Driver Versions").
DRIVERS = {"11": "450.80.02", "12": "525.60.13", "13": "580.65.06"}


@dataclass(frozen=True)
class Backend:
    """`alike` are the packages that all hosts have in the same version, `spared` the requirements it does without."""

    name: str
    alike: tuple[str, ...]
    install: str
    install_gpu: str
    extra: str = ""
    spared: tuple[str, ...] = ()


BACKENDS: Mapping[str, Backend] = {
    "tensorflow": Backend(
        "TensorFlow", ("tensorflow", "keras", "numpy"), INSTALL.format(""), INSTALL.format("[gpu]"),
    ),
    "jax": Backend(
        "JAX", ("jax", "jaxlib", "keras", "numpy"), INSTALL.format("[jax]"),
        "python -m pip install 'jax[cuda12]'", "jax", ("tensorflow",),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """The demands on a host: `checks` to look at, version specifiers of `python` and `packages`, GPUs and cores.

    `driver` is the host that drives, with these `versions` of packages. `on_cpu`: GPUs are not to be used. `others` are
    the names of the cluster's hosts, `names` those to find addresses of. `addresses`, HOST:PORT, must be free.
    """

    checks: tuple[str, ...] = HOST
    python: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str | None] = field(default_factory=dict)
    python_version: str | None = None
    driver: str = ""
    backend: str = "tensorflow"
    gpus: int = 0
    cores: int = 1
    on_cpu: bool = False
    others: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Accelerator:
    """The devices that the backend sees on this host, and the versions of CUDA that it was built for, if for any."""

    seconds: float = 0.0
    version: str | None = None
    gpus: tuple[str, ...] = ()
    cuda: str | None = None
    cudnn: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Gpus:
    """NVIDIA's GPUs: on the bus, by the driver's own tool, and those that CUDA_VISIBLE_DEVICES leaves.

    Only if the backend sees too few are there the `driver`, its version of CUDA as 12.4, or else `driver_error`, and
    libraries that are `missing`, each with why.
    """

    on_bus: int = 0
    installed: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()
    setting: str | None = None
    driver: str | None = None
    driver_error: str | None = None
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LinkFacts:
    """The link between two hosts: seconds there and back, and (bytes each way, seconds of the fastest exchange)."""

    round_trip: float = 0.0
    exchanges: tuple[tuple[int, float], ...] = ()
    error: str | None = None

    @property
    def gbps(self) -> float:
        """Gbit/s in each direction at once, of the largest size; 0 if nothing was measured."""
        size, seconds = max(self.exchanges, default=(0, 1.0))
        return size * 8e-9 / seconds


class Severity(IntEnum):
    """The severity of a finding; the worst one is the exit code of the command. 2 is a refused command."""

    FINE = 0
    # A training works, and is slower than it need be, or close to a limit.
    WARNING = 1
    # A training fails, or something of it that was asked for does.
    FAULT = 3


@dataclass(frozen=True)
class Finding:
    """One thing on a host, or between two of them: what was found, what was expected, and what to type, if anything."""

    check: str
    host: str
    severity: Severity
    found: str
    expected: str
    remedy: str = ""
    figures: Mapping[str, int | float] = field(default_factory=dict)


FINE, WARNING, FAULT = Severity


def python(host: str, version: str, expected: Expected) -> Finding:
    """The version of Python."""
    minor, same = (number.rpartition(".")[0] for number in (version, expected.python_version or version))
    required, remedy = expected.python or same, ""
    if not _fits(version, expected.python):
        remedy = "python3.11 -m venv .venv, and installing into that"
    elif minor != same:
        required, remedy = f"{same}, as {expected.driver} has", f"an environment of Python {same} on {host}"
    return Finding("python", host, FAULT if remedy else FINE, version, required, remedy)


def packages(host: str, versions: Mapping[str, str | None], expected: Expected) -> Finding:
    """The versions of packages, by name; None for one that is missing."""
    alike, on_driver = BACKENDS[expected.backend].alike, expected.versions
    wrong = [name for name, required in expected.packages.items() if not _fits(versions.get(name), required)]
    right = [name for name in expected.packages if name not in wrong]
    unlike = [name for name in right if on_driver.get(name) not in (None, versions[name])]
    # Those that are missing come first.
    faulty = [*sorted(wrong, key=lambda name: versions.get(name) is not None), *unlike]
    if not faulty:
        named = ", ".join(f"{name} {versions[name]}" for name in alike if versions.get(name))
        others = len(expected.packages) - len([name for name in alike if name in expected.packages])
        return Finding("packages", host, FINE, f"{named}{f' and {others} others' * bool(others)}", "what is required")
    problems = ", ".join(f"{name} {versions.get(name) or 'missing'}" for name in faulty)
    needed = {name: f"=={on_driver[name]}" if name in unlike else expected.packages[name] for name in faulty}
    whose = f", as {expected.driver} has" if unlike else ""
    text = ", ".join(f"{name} {version or 'any'}" for name, version in needed.items()) + whose
    remedy = "python -m pip install " + " ".join(f"'{name}{version}'" for name, version in needed.items())
    severity = FAULT if wrong or {*unlike} & {*alike} else WARNING
    return Finding("packages", host, severity, problems, text, remedy)


def backend(host: str, accelerator: Accelerator, expected: Expected) -> Finding:
    """The backend, which is to compute."""
    chosen, error = BACKENDS[expected.backend], accelerator.error
    required = f"{chosen.name} computes"
    if error:
        remedy = f"python -c 'import {expected.backend}' there, which says more"
        if "SIGILL" in error:
            remedy = f"another processor: {chosen.name}'s packages need AVX (grep avx /proc/cpuinfo)"
        elif "No module named" in error:
            remedy = chosen.install
        return Finding("backend", host, FAULT, error, required, remedy)
    slow = accelerator.seconds > SLOW_IMPORT_SECONDS
    return Finding(
        "backend", host, WARNING if slow else FINE,
        f"{chosen.name} {accelerator.version}, computes {accelerator.seconds:.1f} s after its start",
        f"{required} within {SLOW_IMPORT_SECONDS:g} s" if slow else required,
        "the environment on a disk of the host's own" if slow else "", {"import_seconds": accelerator.seconds},
    )  # fmt: skip


def gpus(host: str, devices: Gpus, accelerator: Accelerator | None, expected: Expected) -> Finding:
    """The GPUs that the backend sees, or why it sees too few."""
    name = BACKENDS[expected.backend].name
    visible, used = len(devices.visible), () if accelerator is None else accelerator.gpus
    required = max(expected.gpus, visible, 0 if devices.installed else devices.on_bus)
    text = f"{required} in {name}" if required else "none"
    if accelerator is None or accelerator.error:
        return Finding("gpus", host, FINE, f"{', '.join(devices.visible) or 'none'}; {name} was not asked", text)
    if len(used) >= required:
        hidden = len(devices.installed) - visible
        note = f"; CUDA_VISIBLE_DEVICES hides {hidden}" if hidden > 0 else ""
        return Finding("gpus", host, FINE, (", ".join(used) or "none") + note, text)
    severity = FINE if expected.on_cpu else FAULT
    why, remedy = _why_no_gpu(devices, accelerator, required, expected.backend)
    return Finding("gpus", host, severity, f"{len(used)} in {name}: {why}", text, remedy)


def _why_no_gpu(gpus: Gpus, accelerator: Accelerator, required: int, backend: str) -> tuple[str, str]:
    install, have, installed = BACKENDS[backend].install_gpu, len(gpus.visible), len(gpus.installed)
    cuda = (accelerator.cuda or "").partition(".")[0]
    driver = f"NVIDIA's driver {DRIVERS.get(cuda, 'of its CUDA')} or later"
    if accelerator.cuda is None and (installed or gpus.on_bus):
        return "it was built without CUDA", install
    if not installed and gpus.on_bus:
        why = f"{gpus.on_bus} on the PCI bus, and no driver (nvidia-smi)"
        return why, f"{driver}; in a container, docker run --gpus all"
    if not installed:
        return "the host has none", "hardware=auto, or another host"
    if have < required and gpus.setting is not None and installed >= required:
        return f"CUDA_VISIBLE_DEVICES={gpus.setting!r} hides {installed - have}", "unset CUDA_VISIBLE_DEVICES"
    if gpus.driver_error:
        return f"the driver: {gpus.driver_error}", f"{driver}, whole (nvidia-smi tells it)"
    if cuda and gpus.driver and int(gpus.driver.partition(".")[0]) < int(cuda):
        return f"the driver does CUDA {gpus.driver}", f"{driver}, for CUDA {accelerator.cuda}"
    if gpus.missing:
        (first, error), *more = gpus.missing.items()
        others = f", and {', '.join(library for library, _ in more)}" if more else ""
        return f"{first} cannot be loaded ({error}){others}", install
    if have < required:
        return f"the host has {have}", f"hardware.devices_per_host={have}"
    return "neither driver nor libraries say why", f"python -m pipeline.worker.seen {backend}, and what it says"


def cores(host: str, usable: int, installed: int, expected: Expected) -> Finding:
    """The cores that this process may use, of all."""
    required, remedy = f"{expected.cores} or more", ""
    if usable < expected.cores:
        remedy = f"hardware.devices_per_host={usable} hardware.threads_per_device=1, or more cores for this process"
    elif usable == 1 < installed:
        required = "more than one"
        remedy = "a scheduler that binds to more (--cpus-per-task, --bind-to none), or docker run without --cpus=1"
    text, figures = f"{usable} of {installed} may be used", {"usable": usable, "installed": installed}
    return Finding("cores", host, WARNING if remedy else FINE, text, required, remedy, figures)


def memory(host: str, total: int, free: int) -> Finding:
    """Bytes of memory, and those of it that are free."""
    return Finding(
        "memory", host, FAULT if free < LEAST_MEMORY else WARNING if free < MEMORY else FINE,
        f"{amount(free)} of {amount(total)} free", f"{amount(MEMORY)}",
        "" if free >= MEMORY else "ending what else runs (ps aux --sort=-rss | head), or workers=1",
        {"free_bytes": free, "total_bytes": total},
    )  # fmt: skip


def shm(host: str, free: int, gpus: int) -> Finding:
    """Free bytes of shared memory, which so many GPUs take part of."""
    required = SHM_OF_GPUS if gpus > 1 else SHM
    few = free < required
    remedy = f"docker run --shm-size={required // MIB}m, or mount -o remount,size={2 * required // MIB}m /dev/shm"
    return Finding(
        "shm", host, WARNING if few else FINE, f"{amount(free)} free in /dev/shm", amount(required),
        remedy.replace(" G", "g").replace(" M", "m") if few else "", {"free_bytes": free},
    )  # fmt: skip


def threads(host: str, limit: int) -> Finding:
    """The limit of processes and threads."""
    remedy = "ulimit -u unlimited, or docker run --pids-limit=-1" if limit < THREADS else ""
    return Finding("threads", host, WARNING if remedy else FINE, f"{limit:,} at most", f"{THREADS:,}", remedy)


def open_files(host: str, soft: int, hard: int) -> Finding:
    """The limits of open files."""
    text = f"{soft:,} at once, {hard:,} after ulimit" if soft != hard else f"{soft:,} at once"
    severity = FAULT if soft < FEWEST_OPEN_FILES else WARNING
    remedy = (
        "a line `* hard nofile 65536` in /etc/security/limits.conf, LimitNOFILE=65536 in the service, or docker run "
        "--ulimit nofile=65536"
    )
    if soft < 0 or soft >= OPEN_FILES:
        severity, remedy = FINE, ""
    elif hard < 0 or hard >= OPEN_FILES:
        remedy = f"ulimit -n {ENOUGH_OPEN_FILES if hard < 0 else min(hard, ENOUGH_OPEN_FILES)}"
    return Finding("files", host, severity, text, f"{OPEN_FILES:,}", remedy, {"soft": soft, "hard": hard})


def name(
    host: str, named: str, addresses: Sequence[str], expected: Expected, seconds: float = 0.0, error: str | None = None
) -> Finding:
    """The name of a host, with its addresses as this host finds them, or why it finds none."""
    severity, text, required = FINE, f"{named} is {', '.join(addresses)}", f"an address of {named}"
    remedy = f"a line for {named} in /etc/hosts of {host}, or its address in place of the name"
    others = named in expected.others and named != host
    if error:
        severity, text, remedy = FAULT, f"{named}: {error}", f"{remedy} (getent hosts tells)"
    elif others and all(at.startswith("127.") or at == "::1" for at in addresses):
        severity, text = FAULT, f"{text}, which is {host} itself"
    elif seconds > SLOW_NAME_SECONDS:
        severity, text, required = WARNING, f"{text}, after {seconds:.1f} s", f"within {SLOW_NAME_SECONDS:g} s"
    return Finding("names", host, severity, text, required, remedy if severity else "")


def proxy(host: str, proxies: Sequence[str], no_proxy: str, expected: Expected) -> Finding:
    """The variables that name a proxy: gRPC goes through a proxy for all hosts but those of no_proxy."""
    spared = [entry.strip() for entry in no_proxy.split(",") if entry.strip()]
    hosts = tuple(dict.fromkeys(("localhost", "127.0.0.1", *expected.others)))
    domains = tuple("." + entry.lstrip(".") for entry in spared)
    through = [name for name in hosts if name not in spared and "*" not in spared and not name.endswith(domains)]
    if not proxies or not through:
        text = f"{', '.join(proxies)} spared" if proxies else "none"
        return Finding("proxy", host, FINE, text, "none between hosts")
    remedy = f"export no_proxy={','.join(dict.fromkeys([*spared, *hosts]))}"
    text = f"{', '.join(proxies)} for {', '.join(through)}"
    return Finding("proxy", host, WARNING, text, "none between hosts", remedy)


def judge_clock(host: str, driver: str, ahead: float, within: float) -> Finding:
    """The finding on a host's clock, which is so many seconds ahead of the driver's, give or take `within`."""
    # What the way took is not held against it.
    off = max(0.0, abs(ahead) - within)
    severity = FAULT if off > CLOCKS_FAULT_SECONDS else WARNING if off > CLOCKS_SECONDS else FINE
    remedy = "chronyc makestep, or timedatectl set-ntp true, on both" if severity else ""
    text = f"{abs(ahead):,.3f} s {'ahead of' if ahead > 0 else 'behind'} {driver}"
    return Finding("clocks", host, severity, text, f"within {CLOCKS_SECONDS:g} s", remedy, {"ahead_seconds": ahead})


def judge_link(one: str, other: str, link: LinkFacts, link_gbps: float | None) -> Finding:
    """The finding on a link that the config expects `link_gbps` of, or nothing."""
    pair = f"{one} - {other}"
    required = f"{link_gbps:g} Gbit/s, as hardware.link_gbps says" if link_gbps else f"{GIGABIT:g} Gbit/s or more"
    if link.error or not link.exchanges:
        remedy = f"a firewall that lets the hosts reach all ports of each other; on {one}: ping {other}"
        return Finding("link", pair, FAULT, link.error or "nothing was measured", required, remedy)
    gbps, round_trip_ms, severity, remedy = link.gbps, 1e3 * link.round_trip, FINE, ""
    speeds = ", ".join(f"{size / seconds / 1e9:.3g}" for size, seconds in link.exchanges)
    sizes = ", ".join(f"{size >> 10:,}" for size, _ in link.exchanges)
    text = f"{gbps:.3g} Gbit/s each way ({speeds} GB/s of {sizes} KiB), {round_trip_ms:.3g} ms there and back"
    if (share := gbps / (link_gbps or GIGABIT)) < SHARE and link_gbps:
        severity = FAULT if share < SHARE_FAULT else WARNING
        remedy = f"hardware.link_gbps={gbps:.2g} if that is all it can do; else ethtool, and who else uses it"
    elif share < SHARE:
        severity = WARNING
        remedy = "a faster network, or less on it: train.gradient_bits=16, a larger train.replica_batch"
    elif link.round_trip > ROUND_TRIP_SECONDS:
        severity, remedy = WARNING, "hosts that are nearer to each other"
        required = f"{required}, {1e3 * ROUND_TRIP_SECONDS:g} ms"
    return Finding("link", pair, severity, text, required, remedy, {"gbps": gbps, "round_trip_ms": round_trip_ms})


def _fits(version: str | None, required: str) -> bool:
    # Not above: every plan imports what findings are made of.
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        return version is not None and (
            not required or SpecifierSet(required).contains(Version(version), prereleases=True)
        )
    except InvalidVersion:
        return False

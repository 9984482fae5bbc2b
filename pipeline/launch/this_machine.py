"""Finds out what this machine has and uses, without importing TensorFlow, and keeps its ports from others.

Cores are those this process may run on, so a container's or a scheduler's limit counts. GPUs are asked of
`nvidia-smi`, and of `CUDA_VISIBLE_DEVICES` when a scheduler has set it. TPU chips are files under /dev.

Energy is of the whole machine, whoever computes on it, and of this host alone. Processors count it under
/sys/class/powercap (RAPL; since Linux 5.10 only root may read it), GPUs in NVIDIA's management library.
"""

import errno
import functools
import os
import platform
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.launch import LaunchError
from pipeline.plan.machine import Machine

# PCI identities of TPU chips, from `hardware_utils.py` of JAX: v2 and v3, one without a public name, v4, v5p, v5e, v6e.
GOOGLE, PCI = "0x1ae0", Path("/sys/bus/pci/devices")
TPU_CHIPS = ("0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f")
# For which a port is waited for whose process, as that of a command that was just killed, is about to end.
FREE_SECONDS, LOOK_SECONDS = 3.0, 0.1


def detect(environ: Mapping[str, str]) -> Machine:
    """This machine, as far as a process with the environment `environ` may use it."""
    return Machine(
        hostname=platform.node(),
        cores=usable_cores(),
        memory_gib=usable_memory_gib(),
        cpu=cpu_name(Path("/proc/cpuinfo")),
        gpus=visible(installed_gpus(), environ.get("CUDA_VISIBLE_DEVICES")),
        tpus=installed_tpus(environ),
        tpu_name=environ.get("TPU_NAME") or None,
        cache_bytes=last_level_cache(usable_cores()),
    )


def network() -> str:
    """An id of this machine and its network (random(4) and namespaces(7) of Linux); empty if there is none."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"
    return ""


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> tuple[int, ...]:
    """Numbers of the cores this process may run on, no more of them than the control group's quota pays for."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    # There may be no control group, or one without a quota, which says "max".
    with suppress(OSError, ValueError):
        quota, period = map(int, quota_file.read_text().split())
        return cores[: max(1, quota // period)]
    return cores


def usable_memory_gib(limit_file: Path = Path("/sys/fs/cgroup/memory.max")) -> float:
    """GiB of memory, no more than the control group may have."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        size = min(size, int(limit_file.read_text()))
    return round(size / 2**30, 1)


def last_level_cache(cores: Sequence[int], cpus: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Bytes of the caches of the highest level that these cores have, each counted once.

    None where Linux tells of none, and where several of them are threads of one core, by its cache of level 1: they
    take more from each other than room. Source: Documentation/ABI/stable/sysfs-devices-system-cpu of Linux.
    """
    sizes: dict[tuple[int, str], int] = {}
    for cache in (path for core in cores for path in cpus.glob(f"cpu{core}/cache/index[0-9]*")):
        with suppress(OSError, ValueError):
            level, shared, size = ((cache / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
            sizes[int(level), shared] = int(size.removesuffix("K")) * 1024
    highest = max((level for level, _ in sizes), default=1)
    if sum(level == 1 for level, _ in sizes) < len(cores) or highest == 1:
        return None
    return sum(size for (level, _), size in sizes.items() if level == highest)


def cpu_name(cpuinfo: Path) -> str:
    """The processor's name as Linux gives it, or the architecture's where it gives none."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def installed_gpus() -> tuple[str, ...]:
    """A name for each NVIDIA GPU in the machine; empty where there is no driver."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
        return tuple(line.strip() for line in listed.splitlines() if line.strip())
    return ()


def visible(gpus: tuple[str, ...], setting: str | None) -> tuple[str, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order. As CUDA does, it stops at an entry that names none."""
    if setting is None:
        return gpus
    left: tuple[str, ...] = ()
    for entry in map(str.strip, setting.split(",")):
        if entry.isdecimal() and int(entry) < len(gpus):
            left += (gpus[int(entry)],)
        elif entry.startswith(("GPU-", "MIG-")) and gpus:
            left += (gpus[len(left) % len(gpus)],)
        else:
            break
    return left


def installed_tpus(environ: Mapping[str, str], dev: Path = Path("/dev"), pci: Path = PCI) -> tuple[str, ...]:
    """The file of each TPU chip that is attached: /dev/accel0 and so on up to v4, /dev/vfio/0 and so on since v5e."""
    chips = sorted(dev.glob("accel[0-9]*"))
    on_bus = any(vendor == GOOGLE and chip in TPU_CHIPS for vendor, chip in pci_devices("device", pci))
    # Other devices are passed on through /dev/vfio too. The variables are set on TPU VMs and in pods that have a TPU.
    if not chips and (on_bus or not {"TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE"}.isdisjoint(environ)):
        chips = sorted(dev.glob("vfio/[0-9]*"))
    return tuple(map(str, chips))


def pci_devices(identity: str, pci: Path = PCI) -> Iterator[tuple[str, str]]:
    """Yields (vendor, `identity`) of each PCI device, as "device" or "class"."""
    for device in pci.glob("*"):
        with suppress(OSError):
            yield (device / "vendor").read_text().strip(), (device / identity).read_text().strip()


def reserve(host: str, port: int, until: float) -> socket.socket:
    """A socket bound to a free port, or to `port`, that does not listen, by a time on the monotonic clock."""
    while True:
        reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # TensorFlow's server may bind it too, while nobody is given it by chance meanwhile.
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind((host, port))
            return reserved
        except OSError as error:
            reserved.close()
            if error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(LOOK_SECONDS)
                continue
            by = holder(port) if error.errno == errno.EADDRINUSE else None
            instead = "cluster.base_port=null for free ports" if port else "cluster.host=127.0.0.1"
            raise LaunchError(
                f"Expected to be able to listen on {host}:{port}, received: {error.strerror or error}"
                f"{f', by {by}' if by else ''}. Try {instead}."
            ) from error


def holder(port: int) -> str | None:
    """Names the process that listens at a port, as far as this one may know."""
    import psutil

    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} ({connection.pid})"
    return None


def energy_counters(powercap: Path = Path("/sys/class/powercap")) -> dict[str, Callable[[], tuple[int, int]]]:
    """By name, what reads (count, count at which it begins anew), in millionths of a joule."""
    readers: dict[str, Callable[[], tuple[int, int]]] = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):

        def read(zone: Path = zone) -> tuple[int, int]:
            return int((zone / "energy_uj").read_text()), int((zone / "max_energy_range_uj").read_text())

        with suppress(OSError, ValueError):
            named = (zone / "name").read_text().strip()
            read()
            # Memory is beside a package; other parts are in its own count.
            if named.startswith("package") or named == "dram":
                readers[zone.name] = read
    return readers | _gpu_counters()


def joules(readers: Mapping[str, Callable[[], tuple[int, int]]] | None = None) -> Iterator[float | None]:
    """Yields what all counters have counted since the first of these; None from when one of them cannot be read."""
    readers = energy_counters() if readers is None else readers
    counts: dict[str, int] = {}
    total = 0
    with suppress(OSError):
        while readers:
            for name, read in readers.items():
                count, limit = read()
                gained = count - counts.get(name, count)
                total += gained if gained >= 0 else gained + limit
                counts[name] = count
            yield total / 1e6
    while True:
        yield None


@functools.cache
def _gpu_counters() -> dict[str, Callable[[], tuple[int, int]]]:
    """Counters of GPUs; none where there is no driver, or where GPUs are older than Volta, which do not count."""
    import pynvml

    readers: dict[str, Callable[[], tuple[int, int]]] = {}
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)

            def read(device: object = device) -> tuple[int, int]:
                try:
                    return 1_000 * pynvml.nvmlDeviceGetTotalEnergyConsumption(device), 2**64
                except pynvml.NVMLError as error:
                    raise OSError("The GPU's energy counter cannot be read.") from error

            with suppress(OSError):
                read()
                readers[f"gpu:{index}"] = read
    return readers

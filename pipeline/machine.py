"""Finds out what this machine has, without importing TensorFlow.

Cores are those this process may run on, so a container's or a scheduler's limit counts. GPUs are asked of
`nvidia-smi`, and of `CUDA_VISIBLE_DEVICES` when a scheduler has set it.
"""

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """One host: its name, the cores this process may use, memory in GiB, and a name for each GPU."""

    hostname: str
    cores: tuple[int, ...]
    memory_gib: float
    cpu: str
    gpus: tuple[str, ...] = ()


def detect(environ: Mapping[str, str]) -> Machine:
    """This machine, as far as a process with the environment `environ` may use it."""
    return Machine(
        hostname=platform.node(),
        cores=usable_cores(),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        cpu=cpu_name(Path("/proc/cpuinfo")),
        gpus=visible(installed_gpus(), environ.get("CUDA_VISIBLE_DEVICES")),
    )


def usable_cores(quota_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> tuple[int, ...]:
    """Numbers of the cores this process may run on, no more of them than the control group's quota pays for."""
    cores = tuple(sorted(os.sched_getaffinity(0)))
    try:
        quota, period = quota_file.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else cores[: max(1, int(quota) // int(period))]


def cpu_name(cpuinfo: Path) -> str:
    """The processor's name as Linux gives it, or the architecture's where it gives none."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def installed_gpus() -> tuple[str, ...]:
    """A name for each NVIDIA GPU in the machine; empty where there is no driver."""
    if shutil.which("nvidia-smi") is None:
        return ()
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in listed.splitlines() if line.strip())


def visible(gpus: tuple[str, ...], setting: str | None) -> tuple[str, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, in its order. As CUDA does, it stops at an entry that names none.

    >>> visible(("A100", "A100"), "1")
    ('A100',)
    >>> visible(("A100", "A100"), "")
    ()
    """
    if setting is None:
        return gpus
    left: list[str] = []
    for entry in setting.split(","):
        if entry.strip().isdecimal() and int(entry) < len(gpus):
            left.append(gpus[int(entry)])
        elif entry.strip().startswith(("GPU-", "MIG-")) and gpus:
            left.append(gpus[len(left) % len(gpus)])
        else:
            break
    return tuple(left)

"""Looks at the host that it runs on, and tells what there is. It changes nothing, and judges nothing."""

import json
import os
import platform
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.doctor import disk, network
from pipeline.doctor.backends import BACKENDS
from pipeline.doctor.facts import Accelerator, Facts, Gpus, Look, Space
from pipeline.launch import machine
from pipeline.record import plain
from pipeline.record.plain import MismatchError

# Importing a backend takes seconds, and many of them on a network's file system that has not been read yet.
BACKEND_SECONDS = 180.0
LIBRARIES_SECONDS = 60.0
LIBRARIES = "pipeline.doctor.libraries"
NVIDIA, DISPLAY = "0x10de", "0x03"
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")


def look(asked: Look, environ: Mapping[str, str]) -> Facts:
    """What there is on this host, as far as `asked` wants to know, to a process with this environment."""
    wanted = set(asked.checks)

    def when(check: str, see: Callable[[], Any]) -> Any:
        return see() if check in wanted else None

    backend = when("backend", lambda: accelerator(asked.backend, environ))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Facts(
        hostname=platform.node(),
        python=platform.python_version(),
        packages={name: installed(name) for name in asked.packages},
        backend=backend,
        gpus=when("gpus", lambda: gpus(environ, backend)),
        cores_usable=when("cores", lambda: len(machine.usable_cores())),
        cores_installed=when("cores", os.cpu_count),
        memory=when("memory", memory),
        shm=when("shm", lambda: _space(Path("/dev/shm"))),
        open_files=when("files", lambda: (soft, hard)),
        threads=when("threads", threads),
        disks=tuple(disk.look(folder) for folder in asked.folders),
        ports=tuple(network.port(address) for address in asked.addresses),
        names=tuple(network.name(name) for name in asked.names),
        proxies=when("proxy", lambda: tuple(name for name in PROXIES if _either(environ, name))),
        no_proxy=_either(environ, "no_proxy"),
    )


def accelerator(backend: str, environ: Mapping[str, str]) -> Accelerator:
    """What a backend makes of this host."""
    told, error = _in_a_process([BACKENDS[backend].seen], environ, BACKEND_SECONDS)
    if told is None:
        return Accelerator(error=error)
    try:
        return plain.made_of(Accelerator, told)
    except MismatchError as wrong:
        return Accelerator(error=str(wrong))


def gpus(environ: Mapping[str, str], seen: Accelerator | None, pci: Path = Path("/sys/bus/pci/devices")) -> Gpus:
    """NVIDIA's GPUs, and why the backend sees fewer where it does."""
    installed, setting = machine.installed_gpus(), environ.get("CUDA_VISIBLE_DEVICES")
    visible, on_bus = machine.visible(installed, setting), _on_bus(pci)
    found = {"on_bus": on_bus, "installed": installed, "visible": visible, "setting": setting}
    if seen is None or len(seen.gpus) >= max(len(visible), 0 if installed else on_bus):
        return Gpus(**found)  # type: ignore[arg-type]
    told, error = _in_a_process([LIBRARIES, seen.cuda or "", seen.cudnn or ""], environ, LIBRARIES_SECONDS)
    return plain.made_of(Gpus, {**found, **(told or {"driver_error": error})} | {
        "installed": list(installed), "visible": list(visible),
    })  # fmt: skip


def memory(meminfo: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> Space | None:
    """Bytes of memory, those of the control group where it has fewer."""
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        total, left = (int(lines[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, ValueError, KeyError):
        return None
    limit, used = (_number(group / name) for name in ("memory.max", "memory.current"))
    if limit is None or limit >= total:
        return Space(total, left)
    return Space(limit, min(left, limit - (used or 0)))


def threads(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """How many processes and threads this user, or the control group, may have; None: no limit."""
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    own = None if most == resource.RLIM_INFINITY or os.geteuid() == 0 else most
    return min((limit for limit in (own, _number(group / "pids.max")) if limit is not None), default=None)


def installed(package: str) -> str | None:
    """The version of a package that this Python has, None where it has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _in_a_process(
    arguments: list[str], environ: Mapping[str, str], timeout: float
) -> tuple[dict[str, Any] | None, str | None]:
    """(What a module of ours prints as JSON in its last line, why it did not); one of them is None."""
    given = {**environ, "TF_CPP_MIN_LOG_LEVEL": "1"}
    command = [sys.executable, "-m", *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=given, errors="replace")
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout:g} s"
    except OSError as error:
        return None, f"{error.strerror or error}"
    if ended.returncode < 0:
        return None, f"the process was ended by {signal.Signals(-ended.returncode).name}"
    said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    try:
        told = json.loads(ended.stdout.splitlines()[-1])
        return (told, None) if ended.returncode == 0 else (None, said[-1])
    except (ValueError, IndexError):
        return None, said[-1] if said else f"it ended with {ended.returncode} and told nothing"


def _on_bus(pci: Path) -> int:
    """NVIDIA's GPUs among the PCI devices."""
    count = 0
    for device in pci.glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        count += vendor == NVIDIA and kind.startswith(DISPLAY)
    return count


def _space(folder: Path) -> Space | None:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    return Space(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no such file, or another word in it."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _either(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(name.upper()) or ""

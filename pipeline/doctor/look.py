"""Looks at the host that it runs on, and has `judge.py` make findings of what there is. It changes nothing.

`python -m pipeline.doctor.look 12.5.1 9` finds out why a backend sees no GPU: it loads NVIDIA's driver and each library
of CUDA and cuDNN of these versions, in a process of its own, as what is loaded stays loaded.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec

from pipeline.doctor import judge
from pipeline.doctor.facts import Accelerator, Expected, Finding, Gpus
from pipeline.launch import this_machine
from pipeline.launch.this_machine import PCI, holder, pci_devices

# Importing a backend takes seconds, and many of them on a network's file system that has not been read yet.
BACKEND_SECONDS = 180.0
LIBRARIES_SECONDS = 60.0
DRIVER = "libcuda.so.1"
# Numbers of shared libraries by CUDA's, beside which they count on (its release notes, "CUDA component versions").
OF_CUDA = {
    "12": {"cudart": 12, "cublasLt": 12, "cublas": 12, "cufft": 11, "nvJitLink": 12, "cusparse": 12, "cusolver": 11},
    "13": {"cudart": 13, "cublasLt": 13, "cublas": 13, "cufft": 12, "nvJitLink": 13, "cusparse": 12, "cusolver": 12},
}
NCCL = "libnccl.so.2"
NVIDIA, DISPLAY = "0x10de", "0x03"
PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
# Bytes that are made safe at a time, as a checkpoint is, and how often, unless that takes too long.
PIECE_BYTES, PIECES = 8 << 20, 8
WRITE_SECONDS = 2.0
# A resolver that nobody answers takes its own time, which nothing limits.
NAME_SECONDS = 5.0


def look(host: str, expected: Expected, environ: Mapping[str, str]) -> list[Finding]:
    """The findings on this host, which goes by the name `host`, as a process with this environment sees it."""
    return [finding for finding in _all(host, expected, environ) if finding.check in expected.checks]


def _all(host: str, expected: Expected, environ: Mapping[str, str]) -> Iterator[Finding]:
    backend: Accelerator | None = None
    checks, visible = expected.checks, 0
    yield judge.python(host, platform.python_version(), expected)
    if expected.packages:
        yield judge.packages(host, {name: installed(name) for name in expected.packages}, expected)
    if "backend" in checks:
        backend = accelerator(expected.backend, environ)
        yield judge.backend(host, backend, expected)
    if "gpus" in checks:
        seen = gpus(environ, backend)
        visible = len(seen.visible)
        yield judge.gpus(host, seen, backend, expected)
    usable = len(this_machine.usable_cores())
    yield judge.cores(host, usable, os.cpu_count() or usable, expected)
    # Without psutil a host lacks a package, which is a finding of its own.
    with suppress(ImportError, OSError):
        yield judge.memory(host, *memory())
    with suppress(OSError):
        room = os.statvfs("/dev/shm")
        yield judge.shm(host, room.f_bavail * room.f_frsize, visible)
    yield judge.open_files(host, *resource.getrlimit(resource.RLIMIT_NOFILE))
    if (limit := threads()) is not None:
        yield judge.threads(host, limit)
    yield from (disk(host, folder) for folder in expected.folders)
    yield from (port(host, address) for address in expected.addresses)
    yield from (name(host, named, expected) for named in expected.names)
    proxies = tuple(name for name in PROXIES if _either(environ, name))
    yield judge.proxy(host, proxies, _either(environ, "no_proxy"), expected)


def accelerator(backend: str, environ: Mapping[str, str]) -> Accelerator:
    """The devices that a backend sees on this host."""
    report, error = _in_a_process(["pipeline.worker.seen", backend], environ, BACKEND_SECONDS)
    try:
        return msgspec.convert(report or {"error": error}, Accelerator)
    except msgspec.ValidationError as wrong:
        return Accelerator(error=str(wrong))


def gpus(environ: Mapping[str, str], accelerator: Accelerator | None, pci: Path = PCI) -> Gpus:
    """NVIDIA's GPUs, and why the backend sees fewer if it does."""
    installed, setting = this_machine.installed_gpus(), environ.get("CUDA_VISIBLE_DEVICES")
    visible = this_machine.visible(installed, setting)
    on_bus = sum(vendor == NVIDIA and kind.startswith(DISPLAY) for vendor, kind in pci_devices("class", pci))
    report: dict[str, Any] = {}
    if accelerator is not None and len(accelerator.gpus) < max(len(visible), 0 if installed else on_bus):
        command = ["pipeline.doctor.look", accelerator.cuda or "", accelerator.cudnn or ""]
        libraries, error = _in_a_process(command, environ, LIBRARIES_SECONDS)
        report = libraries or {"driver_error": error}
    return Gpus(on_bus, tuple(installed), tuple(visible), setting, **report)


def memory(group: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """(Bytes of memory, those that are left), those of the control group if it has fewer."""
    import psutil

    machine, limit = psutil.virtual_memory(), _number(group / "memory.max")
    if limit is None or limit >= machine.total:
        return machine.total, machine.available
    return limit, min(machine.available, limit - (_number(group / "memory.current") or 0))


def threads(group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The limit of processes and threads of this user, or of the control group; None if there is none."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    own = None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft
    return min((limit for limit in (own, _number(group / "pids.max")) if limit is not None), default=None)


def installed(package: str) -> str | None:
    """The version of a package that this Python has, None if it has none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def disk(host: str, folder: str) -> Finding:
    """The room in a folder, or in the one that it would be made in, and how fast it is written."""
    path, left = Path(folder).absolute(), 0
    files = speed = error = None
    place = next(one for one in (path, *path.parents) if one.exists())
    try:
        room = os.statvfs(place)
        left, files = room.f_bavail * room.f_frsize, room.f_favail if room.f_files else None
        error = None if place.is_dir() else f"{place} is no folder"
        speed = None if error else write_mbps(place)
    except OSError as failure:
        error = failure.strerror or str(failure)
    return judge.disk(host, folder, left, files, speed, error)


def write_mbps(folder: Path) -> float:
    """MB/s that are written into a folder and safe on its disk, in a file without a name. Raises `OSError`."""
    # Zeros might be stored as a hole.
    piece = os.urandom(PIECE_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.monotonic()
        for _ in range(PIECES):
            file.write(piece)
            file.flush()
            os.fdatasync(file.fileno())
            if time.monotonic() - began > WRITE_SECONDS:
                break
        return file.tell() / 1e6 / (time.monotonic() - began)


def port(host: str, address: str) -> Finding:
    """Tries to listen at HOST:PORT, as TensorFlow would. PORT 0 is any."""
    at, _, number = address.rpartition(":")
    try:
        with socket.socket(socket.AF_INET6 if ":" in at else socket.AF_INET) as listening:
            # Of a process that has just ended, connections that linger are in nobody's way.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((at.strip("[]"), int(number)))
            listening.listen()
    except OSError as error:
        return judge.port(host, address, error.strerror or str(error), holder(int(number)))
    return judge.port(host, address)


def name(host: str, named: str, expected: Expected) -> Finding:
    """The addresses of a host by its name."""
    answer, began, addresses, error = Future[list[Any]](), time.monotonic(), list[str](), None

    def ask() -> None:
        try:
            answer.set_result(socket.getaddrinfo(named, None, type=socket.SOCK_STREAM))
        except OSError as failure:
            answer.set_exception(failure)

    Thread(target=ask, daemon=True).start()
    try:
        addresses = list(dict.fromkeys(str(address[0]) for *_, address in answer.result(NAME_SECONDS)))
    except TimeoutError:
        error = f"no answer within {NAME_SECONDS:g} s"
    except OSError as failure:
        error = failure.strerror or str(failure)
    return judge.name(host, named, addresses, expected, time.monotonic() - began, error)


def _in_a_process(
    arguments: list[str], environ: Mapping[str, str], timeout: float
) -> tuple[dict[str, Any] | None, str | None]:
    """(The JSON that a module of ours prints in its last line, why it did not); one of them is None."""
    command, quiet = [sys.executable, "-m", *arguments], {**environ, "TF_CPP_MIN_LOG_LEVEL": "1"}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=quiet, errors="replace")
    except subprocess.TimeoutExpired:
        return None, f"no answer within {timeout:g} s"
    except OSError as error:
        return None, f"{error.strerror or error}"
    if ended.returncode < 0:
        return None, f"the process was ended by {signal.Signals(-ended.returncode).name}"
    errors = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    with suppress(ValueError, IndexError):
        report = json.loads(ended.stdout.splitlines()[-1])
        return (report, None) if ended.returncode == 0 else (None, errors[-1])
    return None, errors[-1] if errors else f"it ended with {ended.returncode} and printed nothing"


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _either(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(name.upper()) or ""


def needed(cuda: str, cudnn: str) -> list[str]:
    """The libraries of a build for CUDA and cuDNN of these versions, those that others need first."""
    numbers = OF_CUDA.get(cuda.partition(".")[0], {})
    libraries = [f"lib{name}.so.{number}" for name, number in numbers.items()]
    return [*libraries, f"libcudnn.so.{cudnn.partition('.')[0]}", NCCL]


def missing(libraries: Sequence[str], search: Sequence[str]) -> dict[str, str]:
    """Those that cannot be loaded, each with why. Python's packages of NVIDIA's come before the system's folders."""
    errors: dict[str, str] = {}
    for library in libraries:
        installed = [path for folder in search for path in sorted(Path(folder).glob(f"nvidia/*/lib/{library}"))]
        try:
            # Others look for their functions among those that were loaded before.
            ctypes.CDLL(str(installed[0] if installed else library), mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            errors[library] = str(error)
    return errors


def main(cuda: str, cudnn: str) -> None:
    """Prints, as JSON, what is wrong with NVIDIA's driver and libraries; with CUDA's version empty, with the former."""
    version, error, number = None, None, ctypes.c_int()
    try:
        driver = ctypes.CDLL(DRIVER)
        if code := driver.cuInit(0):
            error = f"cuInit of {DRIVER} fails with CUDA's error {code}"
        else:
            driver.cuDriverGetVersion(ctypes.byref(number))
            version = f"{number.value // 1000}.{number.value % 1000 // 10}"
    except (OSError, AttributeError) as failure:
        error = str(failure)
    absent = missing(needed(cuda, cudnn), sys.path) if cuda else {}
    print(json.dumps({"driver": version, "driver_error": error, "missing": absent}))


if __name__ == "__main__":
    main(*sys.argv[1:3])

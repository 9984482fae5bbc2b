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
from pipeline.doctor.judge import FAULT, FINE, WARNING, Accelerator, Expected, Finding, Gpus
from pipeline.errors import amount
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
GROUP = Path("/sys/fs/cgroup")
ROOM, LEAST_ROOM, LEAST_FILES = 1 << 30, 64 << 20, 1000
# A checkpoint of a model of ten million parameters, with its optimizer's state, is 120 MB.
WRITE_MBPS = 50.0
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
    if "packages" in checks:
        yield judge.packages(host, {name: installed(name) for name in expected.packages}, expected)
    if "backend" in checks:
        report = _in_a_process(["pipeline.worker.seen", expected.backend], environ, BACKEND_SECONDS, "error")
        try:
            backend = msgspec.convert(report, Accelerator)
        except msgspec.ValidationError as wrong:
            backend = Accelerator(error=str(wrong))
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
    # The limit of this user, which root has none of, and that of the control group.
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    own = None if soft == resource.RLIM_INFINITY or os.geteuid() == 0 else soft
    if limits := [limit for limit in (own, _number(GROUP / "pids.max")) if limit is not None]:
        yield judge.threads(host, min(limits))
    yield from (disk(host, folder) for folder in expected.folders if "disk" in checks)
    yield from (port(host, address) for address in expected.addresses if "ports" in checks)
    yield from (name(host, named, expected) for named in expected.names if "names" in checks)
    proxies = tuple(name for name in PROXIES if _either(environ, name))
    yield judge.proxy(host, proxies, _either(environ, "no_proxy"), expected)


def gpus(environ: Mapping[str, str], accelerator: Accelerator | None, pci: Path = PCI) -> Gpus:
    """NVIDIA's GPUs, and why the backend sees fewer if it does."""
    installed, setting = this_machine.installed_gpus(), environ.get("CUDA_VISIBLE_DEVICES")
    visible = this_machine.visible(installed, setting)
    on_bus = sum(vendor == NVIDIA and kind.startswith(DISPLAY) for vendor, kind in pci_devices("class", pci))
    report: dict[str, Any] = {}
    if accelerator is not None and len(accelerator.gpus) < max(len(visible), 0 if installed else on_bus):
        command = ["pipeline.doctor.look", accelerator.cuda or "", accelerator.cudnn or ""]
        report = _in_a_process(command, environ, LIBRARIES_SECONDS, "driver_error")
    return Gpus(on_bus, tuple(installed), tuple(visible), setting, **report)


def memory() -> tuple[int, int]:
    """(Bytes of memory, those that are left), those of the control group if it has fewer."""
    import psutil

    machine, limit = psutil.virtual_memory(), _number(GROUP / "memory.max")
    if limit is None or limit >= machine.total:
        return machine.total, machine.available
    return limit, min(machine.available, limit - (_number(GROUP / "memory.current") or 0))


def installed(package: str) -> str | None:
    """The version of a package that this Python has, None if it has none."""
    return next((each.version for each in metadata.distributions(name=package)), None)


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
    text = f"{folder}: {amount(left)} free{f', {speed:,.0f} MB/s written' if speed else ''}"
    required, severity = f"{amount(ROOM)} free, {WRITE_MBPS:g} MB/s", WARNING
    remedy = f"making space (du -xh {folder} | sort -h | tail), or output_dir=ANOTHER"
    if error:
        severity, text = FAULT, f"{text}, {error}"
    elif left < ROOM:
        severity = FAULT if left < LEAST_ROOM else WARNING
    elif files is not None and files < LEAST_FILES:
        text, required = f"{text}, {files} more files", f"{LEAST_FILES:,} more files"
    elif speed is not None and speed < WRITE_MBPS:
        remedy = "a local disk: output_dir=ANOTHER, or fewer checkpoints: checkpoint.every_minutes=60"
    else:
        severity, remedy = FINE, ""
    figures = {"free_bytes": float(left)} | ({"write_mbps": speed} if speed else {})
    return Finding("disk", host, severity, text, required, remedy, figures)


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
    expected, remedy = f"{address} free", "cluster.base_port=null for free ports, or ending what listens there"
    if number == "0":
        expected = f"a free port at {at}"
        remedy = "cluster.host=127.0.0.1, or an address of this host (ip -brief address)"
    try:
        with socket.socket(socket.AF_INET6 if ":" in at else socket.AF_INET) as listening:
            # Of a process that has just ended, connections that linger are in nobody's way.
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind((at.strip("[]"), int(number)))
            listening.listen()
    except OSError as error:
        by = holder(int(number))
        text = f"{address}: {error.strerror or error}{f', {by} listens there' if by else ''}"
        return Finding("ports", host, FAULT, text, expected, remedy)
    return Finding("ports", host, FINE, expected, expected)


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


def _in_a_process(arguments: list[str], environ: Mapping[str, str], timeout: float, failed: str) -> dict[str, Any]:
    """The JSON that a module of ours prints in its last line, or {failed: why it did not}."""
    command, quiet = [sys.executable, "-m", *arguments], {**environ, "TF_CPP_MIN_LOG_LEVEL": "1"}
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=quiet, errors="replace")
    except subprocess.TimeoutExpired:
        return {failed: f"no answer within {timeout:g} s"}
    except OSError as error:
        return {failed: f"{error.strerror or error}"}
    if ended.returncode < 0:
        return {failed: f"the process was ended by {signal.Signals(-ended.returncode).name}"}
    with suppress(ValueError, IndexError):
        report: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
        if ended.returncode == 0:
            return report
    errors = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
    return {failed: errors[-1] if errors else f"it ended with {ended.returncode} and printed nothing"}


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _either(environ: Mapping[str, str], name: str) -> str:
    return environ.get(name) or environ.get(name.upper()) or ""


def missing(cuda: str, cudnn: str, search: Sequence[str]) -> dict[str, str]:
    """The libraries of a build for CUDA and cuDNN of these versions that cannot be loaded, each with why."""
    numbers, errors = OF_CUDA.get(cuda.partition(".")[0], {}), dict[str, str]()
    libraries = [f"lib{name}.so.{number}" for name, number in numbers.items()]
    for library in (*libraries, f"libcudnn.so.{cudnn.partition('.')[0]}", NCCL):
        # Python's packages of NVIDIA's come before the system's folders.
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
    absent = missing(cuda, cudnn, sys.path) if cuda else {}
    print(json.dumps({"driver": version, "driver_error": error, "missing": absent}))


if __name__ == "__main__":
    main(*sys.argv[1:3])

"""Reads what this machine has used: energy counters of processors and NVIDIA GPUs, where they may be read.

Processors count under /sys/class/powercap (RAPL; since Linux 5.10 only root may read it), GPUs in NVIDIA's management
library. Both are of the whole machine, whoever computes on it, and of this host alone.
"""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
# Parts of a package that are beside its cores; other parts are in its own count.
BESIDE = ("dram",)
NVML = "libnvidia-ml.so.1"


def counters(powercap: Path = POWERCAP, library: str = NVML) -> dict[str, Callable[[], tuple[int, int]]]:
    """By name, what reads (count, count at which it begins anew), in millionths of a joule."""
    found: dict[str, Callable[[], tuple[int, int]]] = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        with suppress(OSError, ValueError):
            named = (zone / "name").read_text().strip()
            _zone(zone)
            if named.startswith("package") or named in BESIDE:
                found[zone.name] = lambda zone=zone: _zone(zone)  # type: ignore[misc]
    return found | _gpus(library)


class Meter:
    """Adds up what all counters have counted since it was made. Read it more often than a counter begins anew."""

    def __init__(self, read: dict[str, Callable[[], tuple[int, int]]] | None = None) -> None:
        self._read = counters() if read is None else read
        self._last: dict[str, int] = {}
        self._sum = 0
        try:
            self._last = {name: each()[0] for name, each in self._read.items()}
        except OSError:
            self._read = {}

    def joules(self) -> float | None:
        """Since it was made; None where nothing can be read."""
        for name, each in list(self._read.items()):
            try:
                count, most = each()
            except OSError:
                # What cannot be read any more makes all of it unknown.
                self._read = {}
                break
            gained = count - self._last[name]
            self._sum += gained if gained >= 0 else gained + most
            self._last[name] = count
        return self._sum / 1e6 if self._read else None


def _zone(zone: Path) -> tuple[int, int]:
    return int((zone / "energy_uj").read_text()), int((zone / "max_energy_range_uj").read_text())


@cache
def _gpus(library: str) -> dict[str, Callable[[], tuple[int, int]]]:
    """Counters of GPUs; none where there is no driver, or where GPUs are older than Volta, which do not count."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return {}
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return {}
    found: dict[str, Callable[[], tuple[int, int]]] = {}
    for index in range(count.value):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)):
            continue

        def read(device: ctypes.c_void_p = device) -> tuple[int, int]:
            millijoules = ctypes.c_ulonglong()
            if nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)):
                raise OSError("The GPU's energy counter cannot be read.")
            return millijoules.value * 1_000, 2**64

        with suppress(OSError):
            read()
            found[f"gpu:{index}"] = read
    return found

"""Reads what this machine has used: energy counters of processors and NVIDIA GPUs, where they may be read.

Processors count under /sys/class/powercap (RAPL; since Linux 5.10 only root may read it), GPUs in NVIDIA's management
library. Both are of the whole machine, whoever computes on it, and of this host alone.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
# Parts of a package that are beside its cores; other parts are in its own count.
BESIDE = ("dram",)


def counters(powercap: Path = POWERCAP) -> dict[str, Callable[[], tuple[int, int]]]:
    """By name, what reads (count, count at which it begins anew), in millionths of a joule."""
    readers: dict[str, Callable[[], tuple[int, int]]] = {}
    for zone in sorted(powercap.glob("intel-rapl:*")):
        with suppress(OSError, ValueError):
            named = (zone / "name").read_text().strip()
            _zone(zone)
            if named.startswith("package") or named in BESIDE:
                readers[zone.name] = lambda zone=zone: _zone(zone)  # type: ignore[misc]
    return readers | _gpus()


class Meter:
    """Adds up what all counters have counted since it was made. Read it more often than a counter begins anew."""

    def __init__(self, read: dict[str, Callable[[], tuple[int, int]]] | None = None) -> None:
        self._read = counters() if read is None else read
        self._last: dict[str, int] = {}
        self._sum = 0
        try:
            self._last = {name: read()[0] for name, read in self._read.items()}
        except OSError:
            self._read = {}

    def joules(self) -> float | None:
        """Since it was made; None where nothing can be read."""
        for name, read in list(self._read.items()):
            try:
                count, limit = read()
            except OSError:
                # What cannot be read any more makes all of it unknown.
                self._read = {}
                break
            gained = count - self._last[name]
            self._sum += gained if gained >= 0 else gained + limit
            self._last[name] = count
        return self._sum / 1e6 if self._read else None


def _zone(zone: Path) -> tuple[int, int]:
    return int((zone / "energy_uj").read_text()), int((zone / "max_energy_range_uj").read_text())


@cache
def _gpus() -> dict[str, Callable[[], tuple[int, int]]]:
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

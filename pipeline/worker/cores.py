"""How busy the cores of this process are, and how much of that is its own work."""

import os
import time
from pathlib import Path

from pipeline.record.events import CoreTime

BOOT = Path("/proc/sys/kernel/random/boot_id")
# What a core did nothing in, and what Linux counts twice: guests are in `user` and `nice` already.
IDLE = ("idle", "iowait", "guest", "guest_nice")


class CoreClock:
    """Counts from when it is made. Source: proc(5), /proc/stat; time that a hypervisor took away counts as busy.

    >>> since = CoreClock().read()
    >>> since is None or since.own_seconds >= 0
    True
    """

    def __init__(self) -> None:
        self._machine, self._cores = _machine(), sorted(os.sched_getaffinity(0))
        self._busy, self._own = self._read_busy(), time.process_time()

    def read(self) -> CoreTime | None:
        """Seconds since then, over all cores that this process may use; None where Linux tells not."""
        now = self._read_busy()
        if self._busy is None or now is None:
            return None
        return CoreTime(self._machine, self._cores, now - self._busy, time.process_time() - self._own)

    def _read_busy(self) -> float | None:
        import psutil

        each = psutil.cpu_times(percpu=True)
        if max(self._cores) >= len(each) or not self._machine:
            return None
        return float(
            sum(sum(each[core]) - sum(getattr(each[core], name, 0.0) for name in IDLE) for core in self._cores)
        )


def _machine() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""

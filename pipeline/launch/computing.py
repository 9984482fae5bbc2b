"""Tells how much a process computes, also where others have the cores: what is held up is no process that hangs."""

import time
from pathlib import Path

# A process that waits for cores counts as computing for so many times what it has used: of two cores that twenty
# others want as well, a thread gets a tenth. Threads that only wake now and then use too little to count.
MOST_WAITED = 10
# The shares of a core from which on there is nothing to ask about.
ENOUGH_SHARE = 0.5


class Computing:
    """Counts seconds of cores that this process has used, or waited for while others had them."""

    def __init__(self) -> None:
        self._seconds = self._used = time.process_time()
        self._waited, self._asked = _waited(), time.monotonic()

    def seconds(self) -> float:
        """So many until now."""
        used, now = time.process_time(), time.monotonic()
        more, passed = used - self._used, now - self._asked
        self._seconds, self._used, self._asked = self._seconds + more, used, now
        if more < ENOUGH_SHARE * passed:
            before, self._waited = self._waited, _waited()
            # Threads that have ended take their waits along.
            self._seconds += min(max(self._waited - before, 0.0), MOST_WAITED * more)
        return self._seconds


def _waited() -> float:
    """Seconds that the threads of this process have been ready to run without a core; 0 where the system tells none.

    The second number of a task's `schedstat`, in nanoseconds (Linux, Documentation/scheduler/sched-stats.rst).
    """
    total = 0
    try:
        for told in Path("/proc/self/task").glob("*/schedstat"):
            total += int(told.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        pass
    return total / 1e9

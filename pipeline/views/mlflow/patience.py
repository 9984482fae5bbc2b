"""Turns how much a process has computed into whether it is to be waited for any longer."""

import time
from collections.abc import Callable

# Whoever imports, sends or writes computes for longer before long, also beside many others; whoever waits for a server
# that does not answer does not.
LEAST_SECONDS = 0.02


class Patience:
    """Lasts as long as a process gets on: until it has not for so many seconds.

    `computed` tells its processor time, in seconds.
    """

    def __init__(self, seconds: float, computed: Callable[[], float]) -> None:
        self._seconds, self._computed = seconds, computed
        self._known, self._until = computed(), time.monotonic() + seconds

    def is_over(self, fails: bool = False) -> bool:
        """Has it ended? Who only tries again what `fails` does not get on."""
        computed, now = self._computed(), time.monotonic()
        if not fails and computed - self._known >= LEAST_SECONDS:
            self._known, self._until = computed, now + self._seconds
        return now >= self._until

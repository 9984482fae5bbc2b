"""Holds back what a training tells while its steps are timed: the conductor runs on the same cores."""

import contextlib
import time
from collections.abc import Iterator

from pipeline.record.events import Beat, Event
from pipeline.record.log import stamped
from pipeline.worker.engine import Tell


class Telling:
    """Tells events at once, or afterwards as of the time when they came."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._held: list[Event] | None = None

    def tell(self, event: Event) -> None:
        """Tells an event, or keeps it; a beat says that the process lives, and is never late."""
        if self._held is None or isinstance(event, Beat):
            self._tell(event)
        else:
            self._held.append(stamped(event, time.time()))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, events are kept; afterwards they are told, also where training failed."""
        held = self._held = []
        try:
            yield
        finally:
            self._held = None
            for event in held:
                self._tell(event)

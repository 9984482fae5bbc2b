"""A cluster that tells an attempt from its beginning: first what its event log has, then what its processes tell.

A conductor that takes the place of another does what that one did: asks for the same, in the same order, and gets the
answers that are known. What was asked for already is not asked again (`pipeline.launch.agents.remote`), and what was
written down already is not written down again.
"""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeline.launch import Cluster, Job
from pipeline.plan.plan import Plan
from pipeline.record.commands import Command
from pipeline.record.events import PASSING, Event, Restored, Told, to_line

POINT = "point"


class Replay:
    """What an attempt has `told` since it `began`. `live` is called once all that is known has been told again."""

    def __init__(self, told: Sequence[Event], began: float, live: Callable[[], None] = lambda: None) -> None:
        self._waiting: dict[str, deque[Event]] = defaultdict(deque)
        for event in told:
            if event.group is not None:
                self._waiting[event.group].append(event)
        self._known = {_line(event) for event in told if event.group is not None}
        # The conductor tells the same at another time.
        self._own = Counter(_line(replace(event, time=0.0)) for event in told if event.group is None)
        self._time, self._live, self._is_live = began, live, False

    def clock(self) -> float:
        """Seconds since 1970: of what is told again, when it was told first."""
        return time.time() if self._is_live else self._time

    def is_known(self, event: Event) -> bool:
        """Is an event written down already?"""
        if isinstance(event, PASSING):
            return False
        if event.group is not None:
            return _line(event) in self._known
        line = _line(replace(event, time=0.0))
        self._own[line] -= 1
        return self._own[line] >= 0

    def on(self, cluster: Cluster) -> Cluster:
        """The cluster, whose jobs tell what is known first."""
        made: Any = _Replayed(cluster, self)
        return made  # type: ignore[no-any-return]

    def next_of(self, group: str) -> Event | None:
        """What a group has told next, one at a time; None where it has told no more."""
        if self._waiting[group]:
            event = self._waiting[group].popleft()
            self._time = max(self._time, event.time)
            return event
        if not self._is_live:
            self._is_live = True
            self._live()
        return None

    def begins_anew(self) -> None:
        """Lets go of what was told: another attempt begins."""
        self._waiting.clear()
        self._own.clear()


class _Replayed:
    """A cluster as it is, but for what its jobs tell."""

    def __init__(self, cluster: Cluster, replay: Replay) -> None:
        self._cluster, self._replay, self._begun = cluster, replay, False

    def __getattr__(self, part: str) -> Any:
        return getattr(self._cluster, part)

    def start(self, plan: Plan, group: str, folder: Path) -> Job:
        """Goes on with the group's processes, or starts them where they were not."""
        if group == POINT:
            if self._begun:
                self._replay.begins_anew()
            self._begun = True
        return _Job(self._cluster.start(plan, group, folder), group, self._replay)


class _Job:
    """A job of which a part is known."""

    def __init__(self, job: Job, group: str, replay: Replay) -> None:
        self._job, self._group, self._replay = job, group, replay

    def events(self, timeout: float) -> list[Event]:
        """The next that is known, or what comes in and is not."""
        if (event := self._replay.next_of(self._group)) is not None:
            return [event]
        return [event for event in self._job.events(timeout) if not self._replay.is_known(event)]

    def send(self, command: Command[Told]) -> None:
        """Gives every process a command that it was not given."""
        self._job.send(command)

    def restart(self, rank: int) -> None:
        """Starts a process anew."""
        self._job.restart(rank)

    def dump_stacks(self) -> None:
        """Has every process write its stack to its log."""
        self._job.dump_stacks()

    def stop(self, grace: float) -> None:
        """Ends every process."""
        self._job.stop(grace)


def _line(event: Event) -> int:
    """By what an event is known again: a line of the log that is equal, as a number."""
    return hash(to_line(replace(event, told=()) if isinstance(event, Restored) else event))

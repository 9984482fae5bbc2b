"""What every event has, and how one is written; `pipeline.record.events` has the kinds, and reads them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self, TypeVar

from pipeline.record import plain

# Who tells it, and when.
STAMP = frozenset(("time", "group", "rank"))


@dataclass(frozen=True, kw_only=True)
class Told:
    """One of the kinds of `pipeline.record.events`.

    `time` is in seconds since 1970, and 0 until whoever passes an event on has set it. `group` is "point" for the run's
    own processes and "baseline" for the one-device comparison, with the `rank` of the process; None where the conductor
    tells.
    """

    kind: ClassVar[str] = ""
    time: float = 0.0
    group: str | None = None
    rank: int = 0

    def __init_subclass__(cls) -> None:
        cls.kind = cls.__dict__.get("kind", cls.__name__.lower())

    @property
    def of_point(self) -> bool:
        """Is it of the run itself, and not of its baseline?"""
        return self.group in (None, "point")

    def own(self) -> dict[str, object]:
        """What it tells, as plain values."""
        return plain.fields_of(self, without=STAMP)

    @classmethod
    def made_of(cls, values: Mapping[str, object]) -> Self:
        """The event that a line has these values of. Raises `MismatchError`."""
        return plain.made_of(cls, values)


Kind = TypeVar("Kind", bound=Told)


def stamped(event: Kind, time: float, group: str | None = None, rank: int | None = None) -> Kind:
    """The event as told at a time, unless it says when, by a process of a group, unless it says by which."""
    return replace(
        event, time=event.time or time, group=event.group or group, rank=event.rank if rank is None else rank
    )


def to_plain(event: Told) -> dict[str, object]:
    """The values of its line."""
    by = {} if event.group is None else {"group": event.group, "rank": event.rank}
    return {"time": plain.to_plain(event.time), "event": event.kind} | by | event.own()


def to_line(event: Told) -> bytes:
    """The event as a line of JSON; numbers that JSON lacks (NaN, infinity) become null."""
    return json.dumps(to_plain(event)).encode() + b"\n"

"""The agents of a run whose processes outlive their driver, kept in its folder for the command that takes over."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pipeline.record.log import SECRET, read_json, read_whole, write_json, written
from pipeline.record.tracking import LOG

FILE = "agents.json"


@dataclass(frozen=True)
class Kept:
    """HOST:PORT at which agents dial, the token, and by group the numbers of their jobs, in the order they began.

    `agents` are the names of those that have a part of any.
    """

    address: str
    token: str
    jobs: dict[str, list[int]] = field(default_factory=dict)
    agents: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> "Kept | None":
        """Reads that of the run in a folder; None if nothing outlives its driver."""
        return read_json(cls, folder / FILE)

    def with_job(self, group: str, number: int, agents: Iterable[str] = ()) -> "Kept":
        """The same, once another job of a group has begun."""
        jobs = self.jobs | {group: [*self.jobs.get(group, ()), number]}
        return replace(self, jobs=jobs, agents=sorted({*self.agents, *agents}))

    def write(self, folder: Path) -> None:
        """Writes it so that nobody else can read it. Raises `OSError`."""
        write_json(folder / FILE, self, SECRET)


def forget(folder: Path) -> None:
    """Notes that nothing outlives the driver of the run in a folder."""
    (folder / FILE).unlink(missing_ok=True)


def trains_on(folder: Path, now: float) -> bool:
    """True if a run may be training without its driver: its processes wait for one as long as the plan says."""
    if not (folder / FILE).exists():
        return False
    planned = read_whole(folder / "plan.json")
    waits = planned.get("orphan_timeout")
    meant = planned.get("detach") is True and isinstance(waits, int | float)
    return meant and now < written(folder / LOG) + float(waits or 0)

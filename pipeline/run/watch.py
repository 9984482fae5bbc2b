"""Decides from what processes tell, and from the time, whether one is dead, stopped or stuck, and which.

Pure: the time is an argument. A process that only lost its peers is not to blame; who is shows within moments. A worker
of an asynchronous training, once that has begun, is no loss but one that can be replaced.
"""

import signal
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.plan.plan import DATA_SERVER, Plan
from pipeline.record.events import (
    Beat,
    Epoch,
    Event,
    Exited,
    Failed,
    Joined,
    Signalled,
    Started,
    Steps,
    Stopped,
    System,
    Unreachable,
)

# A process that uses this share of a core between beats, or waits for it, is computing, though it reports no step.
BUSY_SHARE = 0.1
# Computing without a step counts as progress for this many times the limit: while what is asked for is traced and
# compiled, until its first steps are told, and from then on.
TRACING_PATIENCE, BUSY_PATIENCE = 10, 2
# How long to look for who is to blame once a process has lost its peers.
BLAME_SECONDS = 12.0
SILENT_SECONDS = 3.0


@dataclass(frozen=True)
class Failure:
    """Which process failed and why; `rank` is None where it is the whole run. `stuck`: it may still tell where.

    `lost`: the process is gone or does nothing, for no reason of its own; started again it may do better. `diverged`:
    training has, and a smaller learning rate may help.
    """

    error: str
    rank: int | None
    stuck: bool = False
    lost: bool = True
    diverged: bool = False


class RunFailed(RuntimeError):
    """A run that cannot go on; the message names the process, and `log` is its log."""

    def __init__(self, failure: Failure, log: Path | None) -> None:
        super().__init__(failure.error)
        self.failure, self.log = failure, log

    @property
    def rank(self) -> int | None:
        """The process that is to blame."""
        return self.failure.rank


@dataclass
class _Seen:
    """What is known of one process."""

    started: float
    joined: bool = False
    beat: float | None = None
    counter: int = -1
    cpu_seconds: float = 0.0
    moved: float = 0.0
    worked: float = 0.0
    answered: bool = False
    exited: int | None = None
    error: str | None = None
    diverged: bool = False
    lost_peer: float | None = None
    stopped: bool = False
    unreachable: str | None = None


@dataclass
class Watch:
    """Watches the processes of one job."""

    plan: Plan
    seen: dict[int, _Seen] = field(default_factory=dict)
    leaving: bool = False
    # Have steps, or the end of an epoch, been told since the last command?
    stepping: bool = False
    # May workers be replaced? And how often each was.
    replacing: bool = False
    replaced: dict[int, int] = field(default_factory=dict)

    def asked(self, now: float) -> None:
        """The processes were given a command: from here on they owe progress."""
        self.stepping = False
        servers = (*self.plan.ranks("parameter server"), *self.plan.ranks(DATA_SERVER))
        for rank, seen in self.seen.items():
            # They do nothing of their own.
            seen.answered = rank in servers
            seen.moved = seen.worked = now

    def answer(self, rank: int) -> None:
        """The process has done what it was asked, and owes nothing."""
        self.seen[rank].answered = True

    def note(self, event: Event, now: float) -> None:
        """Takes in an event."""
        seen = self.seen.setdefault(event.rank, _Seen(started=now, moved=now, worked=now))
        match event:
            case Exited(code=code):
                seen.exited = code
            case Started() | Signalled():
                pass
            case Stopped():
                seen.stopped = True
            case Unreachable(name=name, seconds=seconds):
                seen.unreachable = _away(name, seconds)
            case _:
                seen.stopped, seen.beat = False, now
                self._sign_of_life(seen, event, now)

    def to_replace(self, now: float) -> dict[int, str]:
        """Why, in words, for each worker that is gone and can be replaced; it then counts as just started."""
        gone: dict[int, str] = {}
        for rank in self.plan.ranks("worker"):
            seen = self.seen.get(rank)
            if seen is None or not self._replaceable(rank):
                continue
            if seen.unreachable is not None:
                gone[rank] = f"{self._name(rank)} is lost: {seen.unreachable}"
            elif seen.exited is not None:
                gone[rank] = f"{self._name(rank)} {_ending(seen.exited)}"
            elif seen.joined and self._quiet(rank, now) > self.plan.launch.heartbeat_timeout:
                gone[rank] = self._silent(rank, now).error.rstrip(".")
        for rank in gone:
            self.replaced[rank] = self.replaced.get(rank, 0) + 1
            self.seen[rank] = _Seen(started=now, moved=now, worked=now)
        if gone:
            # One that was started again traces again.
            self.stepping = False
            # Others may have waited for who is gone, in TensorFlow's hands and unable to give a sign.
            for seen in self.seen.values():
                if seen.beat is not None:
                    seen.beat = now
        return gone

    def failure(self, now: float) -> Failure | None:
        """The failure that has become certain by `now`, if any."""
        return (
            self._unreachable()
            or self._own_error(now)
            or self._death()
            or self._silence(now)
            or self._peers(now)
            or self._stuck(now)
        )

    def _sign_of_life(self, seen: _Seen, event: Event, now: float) -> None:
        match event:
            case System():
                return
            case Beat(progress=int(progress), cpu_seconds=float(cpu_seconds)):
                self._beat(seen, progress, cpu_seconds, now)
                return
            case Steps() | Epoch():
                self.stepping = True
            case Joined():
                seen.joined = True
            case Failed(peer=True):
                seen.lost_peer = now
            case Failed():
                seen.error, seen.diverged = event.error, event.diverged
        seen.moved = seen.worked = now

    def _beat(self, seen: _Seen, progress: int, cpu_seconds: float, now: float) -> None:
        if progress != seen.counter:
            seen.counter = progress
            seen.moved = seen.worked = now
            seen.cpu_seconds = cpu_seconds
        elif cpu_seconds - seen.cpu_seconds > BUSY_SHARE * (now - seen.worked):
            seen.cpu_seconds = cpu_seconds
            seen.worked = now

    def _unreachable(self) -> Failure | None:
        for rank, seen in self.seen.items():
            if seen.unreachable is not None and not self._replaceable(rank):
                return Failure(f"{self._name(rank)} is lost: {seen.unreachable}.", rank)
        return None

    def _own_error(self, now: float) -> Failure | None:
        for rank, seen in self.seen.items():
            if seen.error is not None:
                # TensorFlow has many words for a peer that is gone; one that is gone is the better explanation.
                return (
                    self._death()
                    or self._gone_quiet(now)
                    or Failure(seen.error, rank, lost=False, diverged=seen.diverged)
                )
        return None

    def _gone_quiet(self, now: float) -> Failure | None:
        for rank, seen in self.seen.items():
            alive = seen.exited is None and seen.joined and seen.lost_peer is None and seen.error is None
            alive = alive and not self._replaceable(rank)
            if alive and self._quiet(rank, now) > SILENT_SECONDS:
                return self._silent(rank, now)
        return None

    def _death(self) -> Failure | None:
        died = {
            rank: seen.exited
            for rank, seen in self.seen.items()
            if seen.exited is not None
            and seen.lost_peer is None
            and seen.error is None
            and not (self.leaving and seen.exited == 0)
            and not self._replaceable(rank)
        }
        if not died:
            return None
        # A process that aborts has often only lost another.
        rank = next((rank for rank, code in died.items() if code == -signal.SIGKILL), min(died))
        again = self.replaced.get(rank, 0)
        often = f", after it was started again {again} time{'s' * (again > 1)} (launch.max_restarts)" if again else ""
        return Failure(f"{self._name(rank)} {_ending(died[rank])}{often}.", rank)

    def _silence(self, now: float) -> Failure | None:
        late = {
            rank: seen
            for rank, seen in self.seen.items()
            if not seen.joined and seen.exited is None and now - seen.started > self.plan.launch.startup_timeout
        }
        if late:
            # Those that wait for the others are silent too, once TensorFlow has them; blame one that never spoke.
            rank = min(late, key=lambda rank: (not late[rank].stopped, late[rank].beat or 0.0))
            return Failure(
                f"{self._name(rank)} did not join within {self.plan.launch.startup_timeout:g} s"
                f"{': it is stopped' if late[rank].stopped else ''}. "
                f"If it needs longer, try launch.startup_timeout={2 * self.plan.launch.startup_timeout:g}.",
                rank,
                stuck=True,
            )
        limit = self.plan.launch.heartbeat_timeout
        quiet = {
            rank: self._quiet(rank, now) for rank, seen in self.seen.items() if seen.exited is None and seen.joined
        }
        if max(quiet.values(), default=0.0) <= limit:
            return None
        # TensorFlow registers a function with every worker and server, and holds Python's lock until all have answered:
        # a coordinator that is silent too is the last to blame.
        silent = [rank for rank, seconds in quiet.items() if seconds > limit / 2]
        rank = min(silent, key=lambda rank: (self._leads(rank), not self.seen[rank].stopped, -quiet[rank]))
        return None if self._replaceable(rank) else self._silent(rank, now)

    def _peers(self, now: float) -> Failure | None:
        lost = [seen.lost_peer for seen in self.seen.values() if seen.lost_peer is not None]
        if not lost:
            return None
        quiet = self._gone_quiet(now)
        if quiet:
            return quiet
        if now - min(lost) > BLAME_SECONDS or all(seen.lost_peer is not None for seen in self.seen.values()):
            rank = next(rank for rank, seen in self.seen.items() if seen.lost_peer is not None)
            return Failure(f"{self._name(rank)} lost the connection to the other processes.", rank)
        return None

    def _stuck(self, now: float) -> Failure | None:
        limit = self.plan.launch.progress_timeout
        patience = BUSY_PATIENCE if self.stepping else TRACING_PATIENCE
        waiting = {
            rank: seen for rank, seen in self.seen.items() if seen.joined and not seen.answered and seen.exited is None
        }
        stuck = [
            rank for rank, seen in waiting.items() if now - seen.worked > limit or now - seen.moved > patience * limit
        ]
        if not stuck or len(stuck) < len(waiting) or not any(map(self._leads, stuck)):
            # Those that serve owe nothing once those that lead have answered.
            return None
        # Those that wait for it moved last when it did; who moved first stands still for its own reasons.
        rank = min(stuck, key=lambda rank: waiting[rank].moved)
        busy = [rank for rank in stuck if now - waiting[rank].worked <= limit]
        if busy:
            seconds = min(now - waiting[rank].moved for rank in busy)
            what = f"computed for {seconds:.0f} s without a step"
        else:
            what = f"made no progress for {limit:g} s"
        named = busy or stuck
        names = " and ".join(self._name(rank) for rank in named[:4])
        where = "where each stands is in its log" if len(named) > 1 else "where it stands is in its log"
        return Failure(
            f"{names} {what}; {where}. If a step takes that long, try launch.progress_timeout={4 * limit:g}.",
            rank if rank in named else named[0],
            stuck=True,
        )

    def _replaceable(self, rank: int) -> bool:
        process = self.plan.processes[rank]
        worker = self.plan.strategy.asynchronous and process.role == "worker"
        return self.replacing and worker and self.replaced.get(rank, 0) < self.plan.launch.max_restarts

    def _leads(self, rank: int) -> bool:
        return rank in self.plan.leaders

    def _silent(self, rank: int, now: float) -> Failure:
        return Failure(
            f"{self._name(rank)} gave no sign of life for {self._quiet(rank, now):.0f} s: "
            f"{'it is stopped' if self.seen[rank].stopped else 'it is stopped, or its host is gone'}.",
            rank,
        )

    def _quiet(self, rank: int, now: float) -> float:
        """Seconds since it last gave a sign of life, or was started."""
        seen = self.seen[rank]
        return now - (seen.beat or seen.started)

    def _name(self, rank: int) -> str:
        process = self.plan.processes[rank]
        host = f" on {self.plan.host_of(process)}" if self.plan.hardware.host_names else ""
        return f"{process.role} {rank}{host}"


def _away(name: str, seconds: float | None) -> str:
    """What is known of a host that has a process no more.

    >>> _away("b", 30.2)
    'nothing was heard of b for 30 s, which is down, or cut off'
    """
    if seconds is None:
        return f"{name} has forgotten it, since its agent or all of it was started again"
    return f"nothing was heard of {name} for {seconds:.0f} s, which is down, or cut off"


def _ending(code: int | None) -> str:
    """How a process ended.

    >>> _ending(-9)
    'was killed by SIGKILL'
    """
    if code is not None and code < 0:
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"
    return f"ended with exit code {code}"

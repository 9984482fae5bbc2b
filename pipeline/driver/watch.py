"""Decides from processes' events, and from the time, whether one is dead, stopped or stuck, and which.

A process that only lost its peers is not to blame; who is shows within moments. The loss of a worker of an asynchronous
training that has begun ends no run: it can be replaced.
"""

import signal
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.plan.plan import DATA_SERVER, Plan
from pipeline.record import events

# A process that uses this share of a core between beats, or waits for it, is computing, though it reports no step.
BUSY_SHARE = 0.1
# Computing without a step counts as progress for this many times the limit: until the first steps after a command,
# which are traced and compiled, and from then on.
TRACING_PATIENCE, BUSY_PATIENCE = 10, 2
# How long to look for who is to blame once a process has lost its peers.
BLAME_SECONDS = 12.0
SILENT_SECONDS = 3.0
# Events of a process that are no signs of its life.
NO_SIGNS = (events.Exited, events.Started, events.Signalled, events.Unheard, events.Stopped, events.Unreachable)


@dataclass(eq=False)
class RunFailed(RuntimeError):
    """A run that cannot go on: why, and the process of that `rank` which is to blame, None if it is the whole run.

    `stuck`: the process may still write where it stands to its `log`. `lost`: it is gone or does nothing, for no reason
    of its own, and may do better if started again. `diverged`: training has, and a smaller learning rate may help.
    """

    error: str
    rank: int | None
    stuck: bool = False
    lost: bool = True
    diverged: bool = False
    log: Path | None = None

    def __str__(self) -> str:
        return self.error


@dataclass
class _Process:
    started: float
    joined: bool = False
    # It has carried out its command, and owes nothing.
    responded: bool = False
    beat: float | None = None
    counter: int = -1
    cpu_seconds: float = 0.0
    moved: float = 0.0
    worked: float = 0.0
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
    processes: dict[int, _Process] = field(default_factory=dict)
    leaving: bool = False
    # Steps, or the end of an epoch, have come since the last command.
    stepping: bool = False
    # Workers may be replaced, and how often each was.
    replacing: bool = False
    replaced: dict[int, int] = field(default_factory=dict)

    def commanded(self, now: float) -> None:
        """The processes got a command: from here on they owe progress."""
        self.stepping = False
        servers = (*self.plan.ranks("parameter server"), *self.plan.ranks(DATA_SERVER))
        for rank, process in self.processes.items():
            # Servers do nothing of their own.
            process.responded = rank in servers
            process.moved = process.worked = now

    def note(self, event: events.Event, now: float) -> None:
        """Takes in an event."""
        process = self.processes.setdefault(event.rank, _Process(started=now, moved=now, worked=now))
        match event:
            case events.Exited(code=code):
                process.exited = code
            case events.Stopped():
                process.stopped = True
            case events.Unreachable(name=name, seconds=None):
                process.unreachable = f"{name} has forgotten it, since its agent or all of it was started again"
            case events.Unreachable(name=name, seconds=seconds):
                process.unreachable = f"nothing was heard of {name} for {seconds:.0f} s, which is down, or cut off"
        if isinstance(event, NO_SIGNS):
            return
        process.stopped, process.beat = False, now
        match event:
            case events.System():
                return
            case events.Beat(progress=int(progress), cpu_seconds=float(cpu_seconds)):
                if progress == process.counter:
                    if cpu_seconds - process.cpu_seconds > BUSY_SHARE * (now - process.worked):
                        process.cpu_seconds, process.worked = cpu_seconds, now
                    return
                process.counter, process.cpu_seconds = progress, cpu_seconds
            case events.Steps() | events.Epoch():
                self.stepping = True
            case events.Joined():
                process.joined = True
            case events.Failed(peer=True):
                process.lost_peer = now
            case events.Failed():
                process.error, process.diverged = event.error, event.diverged
        process.moved = process.worked = now

    def to_replace(self, now: float) -> dict[int, str]:
        """The reason, in words, for each worker that is gone and can be replaced; it then counts as just started."""
        gone: dict[int, str] = {}
        for rank in filter(self._replaceable, self.processes):
            process = self.processes[rank]
            if process.unreachable is not None:
                gone[rank] = f"{self._name(rank)} is lost: {process.unreachable}"
            elif process.exited is not None:
                gone[rank] = f"{self._name(rank)} {_ending(process.exited)}"
            elif process.joined and self._quiet(rank, now) > self.plan.launch.heartbeat_timeout:
                gone[rank] = self._silent(rank, now).error.rstrip(".")
        for rank in gone:
            self.replaced[rank] = self.replaced.get(rank, 0) + 1
            self.processes[rank] = _Process(started=now, moved=now, worked=now)
        # A worker that is started again traces again.
        self.stepping = self.stepping and not gone
        # Others may have waited for it inside TensorFlow, unable to give a sign.
        for process in self.processes.values() if gone else ():
            process.beat = None if process.beat is None else now
        return gone

    def failure(self, now: float) -> RunFailed | None:
        """The failure that has become certain by `now`, if any."""
        for rank, process in self.processes.items():
            if process.unreachable is not None and not self._replaceable(rank):
                return RunFailed(f"{self._name(rank)} is lost: {process.unreachable}.", rank)
        for rank, process in self.processes.items():
            if process.error is not None:
                # TensorFlow has many errors for a peer that is gone; a process that is gone explains them better.
                own = RunFailed(process.error, rank, lost=False, diverged=process.diverged)
                return self._death(now) or self._gone_quiet(now) or own
        return self._death(now) or self._silence(now) or self._peers(now) or self._stuck(now)

    def _gone_quiet(self, now: float) -> RunFailed | None:
        for rank, process in self._alive().items():
            explained = process.lost_peer is not None or process.error is not None or self._replaceable(rank)
            if process.joined and not explained and self._quiet(rank, now) > SILENT_SECONDS:
                return self._silent(rank, now)
        return None

    def _death(self, now: float) -> RunFailed | None:
        died = {
            rank: process.exited
            for rank, process in self.processes.items()
            if process.exited is not None
            and process.lost_peer is None
            and process.error is None
            and not (self.leaving and process.exited == 0)
            and not self._replaceable(rank)
        }
        if not died:
            return None
        # A process that aborts has often only lost another.
        rank = next((rank for rank, code in died.items() if code == -signal.SIGKILL), min(died))
        if died[rank] == -signal.SIGABRT and (quiet := self._gone_quiet(now)):
            return quiet
        again = self.replaced.get(rank, 0)
        often = f", after it was started again {again} time{'s' * (again > 1)} (launch.max_restarts)" if again else ""
        return RunFailed(f"{self._name(rank)} {_ending(died[rank])}{often}.", rank)

    def _silence(self, now: float) -> RunFailed | None:
        alive, limit = self._alive(), self.plan.launch.startup_timeout
        late = {rank: each for rank, each in alive.items() if not each.joined and now - each.started > limit / 2}
        if any(now - each.started > limit for each in late.values()):
            # Those that wait for others inside TensorFlow are silent too; blame one that never gave a sign.
            rank = min(late, key=lambda rank: (not late[rank].stopped, late[rank].beat or 0.0))
            return RunFailed(
                f"{self._name(rank)} did not join within {limit:g} s{': it is stopped' if late[rank].stopped else ''}. "
                f"If it needs longer, try launch.startup_timeout={2 * limit:g}.",
                rank,
                stuck=True,
            )
        limit = self.plan.launch.heartbeat_timeout
        silent = {rank: quiet for rank in alive if alive[rank].joined and (quiet := self._quiet(rank, now)) > limit / 2}
        if max(silent.values(), default=0.0) <= limit:
            return None
        # TensorFlow registers a function with every worker and server, and holds Python's lock until all have answered:
        # a coordinator that is silent too is the last to blame.
        rank = min(silent, key=lambda rank: (rank in self.plan.leaders, not alive[rank].stopped, -silent[rank]))
        return None if self._replaceable(rank) else self._silent(rank, now)

    def _peers(self, now: float) -> RunFailed | None:
        lost = {rank: each.lost_peer for rank, each in self.processes.items() if each.lost_peer is not None}
        quiet, rank = self._gone_quiet(now), next(iter(lost), 0)
        if lost and quiet is None and (now - min(lost.values()) > BLAME_SECONDS or len(lost) == len(self.processes)):
            return RunFailed(f"{self._name(rank)} lost the connection to the other processes.", rank)
        return quiet if lost else None

    def _stuck(self, now: float) -> RunFailed | None:
        limit = self.plan.launch.progress_timeout
        patience = limit * (BUSY_PATIENCE if self.stepping else TRACING_PATIENCE)
        waiting = {rank: each for rank, each in self._alive().items() if each.joined and not each.responded}
        stuck = [rank for rank, each in waiting.items() if now - each.worked > limit or now - each.moved > patience]
        if not stuck or len(stuck) < len(waiting) or {*stuck}.isdisjoint(self.plan.leaders):
            # Those that serve owe nothing once those that lead have responded.
            return None
        # Those that wait for it moved last when it did; who moved first stands still for its own reasons.
        rank = min(stuck, key=lambda rank: waiting[rank].moved)
        busy = [rank for rank in stuck if now - waiting[rank].worked <= limit]
        named, what = busy or stuck, f"made no progress for {limit:g} s"
        if busy:
            what = f"computed for {min(now - waiting[rank].moved for rank in busy):.0f} s without a step"
        where = f"where {'each' if len(named) > 1 else 'it'} stands is in its log"
        return RunFailed(
            f"{' and '.join(map(self._name, named[:4]))} {what}; {where}. If a step takes that long, try "
            f"launch.progress_timeout={4 * limit:g}.",
            rank if rank in named else named[0],
            stuck=True,
        )

    def _alive(self) -> dict[int, _Process]:
        return {rank: process for rank, process in self.processes.items() if process.exited is None}

    def _replaceable(self, rank: int) -> bool:
        process = self.plan.processes[rank]
        worker = self.plan.strategy.asynchronous and process.role == "worker"
        return self.replacing and worker and self.replaced.get(rank, 0) < self.plan.launch.max_restarts

    def _silent(self, rank: int, now: float) -> RunFailed:
        return RunFailed(
            f"{self._name(rank)} gave no sign of life for {self._quiet(rank, now):.0f} s: "
            f"{'it is stopped' if self.processes[rank].stopped else 'it is stopped, or its host is gone'}.",
            rank,
        )

    def _quiet(self, rank: int, now: float) -> float:
        """Seconds since it last gave a sign of life, or was started."""
        return now - (self.processes[rank].beat or self.processes[rank].started)

    def _name(self, rank: int) -> str:
        process = self.plan.processes[rank]
        host = f" on {self.plan.host_of(process)}" if self.plan.hardware.host_names else ""
        return f"{process.role} {rank}{host}"


def _ending(code: int | None) -> str:
    """Says how a process ended, after its name."""
    if code is None or code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"

"""A job whose processes are on several hosts, started and watched there by agents."""

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.launch import LaunchError
from pipeline.launch.agents import messages
from pipeline.launch.agents.driver import OVER, POLL_SECONDS, Agents
from pipeline.launch.local import LocalCluster, LocalJob
from pipeline.plan.plan import Plan
from pipeline.record.commands import Command
from pipeline.record.events import Event, EventBase, Exited, Started, Unreachable, Warned
from pipeline.record.log import from_line, stamped

# Before a warning says which agents do not answer; for an agent to stop, and for one without a connection to come back.
SAY_SECONDS, STOP_SECONDS, AWAY_SECONDS = 3.0, 10.0, 3.0


@dataclass(frozen=True)
class Taken:
    """A job that an earlier driver has started: its number, and what each agent that has it says of it."""

    number: int
    held: Mapping[str, messages.Held]


class RemoteJob:
    """Processes of one plan, on the hosts of agents. They are started once every agent is connected.

    `where` names the agent of each rank; `local` starts those ranks that it does not name. An agent that has never been
    there is waited for up to `timeout` seconds, one whose host counts as gone for `returns` seconds more; meanwhile
    `missing` is asked again and again, and says what is to be done about them. A `job_before` was started
    by an earlier driver: commands that its agents were given are not sent again.
    """

    def __init__(
        self,
        agents: Agents,
        plan: Plan,
        group: str,
        folder: Path,
        where: Mapping[int, str],
        *,
        missing: Callable[[Sequence[str]], str],
        timeout: float,
        returns: float,
        local: LocalCluster | None = None,
        job_before: Taken | None = None,
    ) -> None:
        self._agents, self._plan, self._group, self._folder = agents, plan, group, folder
        self._where, self._missing, self._timeout, self._local = where, missing, timeout, local
        self._returns = returns
        # By which its agents know it.
        self.number = agents.number() if job_before is None else job_before.number
        self._here: LocalJob | None = None
        # Ranks that wait for their agent's connection, since when, and whether a warning said so.
        self._pending = set(where)
        self._since, self._warned = time.monotonic(), False
        self._running = set[int]()
        self._waiting: list[Event] = []
        # Agents that have a part of the job, and those whose part has ended.
        self._begun, self._stopped = set[str](), set[str]()
        self._gone = set[str]()
        # Commands that were sent, and of those how many an agent was given by an earlier driver.
        self._sent, self._given_before = 0, dict[str, int]()
        if job_before is not None:
            self._pending.clear()
            self._begun = set(job_before.held)
            self._given_before = {name: held.commands for name, held in job_before.held.items()}
            exited = {rank: code for held in job_before.held.values() for rank, code in held.exited.items()}
            self._running = set(where) - exited.keys()
            for rank, code in exited.items():
                self._add(rank, Exited(code))

    def events(self, timeout: float) -> list[Event]:
        """Returns the events that have come in; waits up to `timeout` seconds for one. Raises `LaunchError`."""
        self._start_pending()
        sources = [] if self._here is None else self._here.sources()
        self._agents.listen_to(sources, 0.0 if self._waiting else min(timeout, POLL_SECONDS))
        while self._agents.warnings:
            self._add(0, Warned(self._agents.warnings.pop(0)))
        for name, message in [*self._agents.about(OVER), *self._agents.about(self.number)]:
            self._take(name, message)
        self._find_unreachable()
        waiting, self._waiting = self._waiting, []
        return waiting + (self._here.events(0.0) if self._here is not None else [])

    def send(self, command: Command[EventBase]) -> None:
        """Gives every process a command; one that is gone is left to its `exited` event."""
        if self._here is not None:
            self._here.send(command)
        self._sent += 1
        for name in self._begun:
            if self._sent > self._given_before.get(name, 0):
                self._agents.send(name, messages.Give(self.number, command.to_json()))

    def restart(self, rank: int) -> None:
        """Ends a process, if it still is one, and starts it anew, at the same address, once its host answers."""
        if (name := self._where.get(rank)) is None:
            assert self._here is not None, "it was started"
            self._here.restart(rank)
        elif name in self._begun and self._agents.takes(name):
            self._agents.send(name, messages.Restart(self.number, rank))
        else:
            self._pending.add(rank)
            self._since, self._warned = time.monotonic(), False

    def dump_stacks(self) -> None:
        """Makes every process write its stack to its log."""
        if self._here is not None:
            self._here.dump_stacks()
        self._send(messages.DumpStacks(self.number))

    def stop(self, grace: float) -> None:
        """Ends every process, killing those that have not ended after `grace` seconds. Returns when none is left.

        But those of a host that cannot be reached: they end once it can be, or else by themselves.
        """
        if self._agents.left:
            return
        self._pending.clear()
        self._agents.ending.add(self.number)
        self._send(messages.Stop(self.number, grace))
        if self._here is not None:
            self._here.stop(grace)
        until = time.monotonic() + grace + STOP_SECONDS
        while True:
            for name, message in self._agents.about(self.number):
                self._write(name, message)
                # As long as a trained model comes, it is waited for.
                until = max(until, time.monotonic() + STOP_SECONDS)
            there = any(self._agents.is_there(name, AWAY_SECONDS) for name in self._begun - self._stopped)
            if not there or time.monotonic() > until:
                break
            self._agents.listen_to((), POLL_SECONDS)
        self._agents.over(self.number)

    def _send(self, message: messages.Message) -> None:
        for name in self._begun:
            self._agents.send(name, message)

    def _start_pending(self) -> None:
        """Starts what waits for its agent, all at once, as they wait for each other anyway."""
        if not self._pending and (self._here is not None or self._local is None):
            return
        names = sorted({self._where[rank] for rank in self._pending})
        absent = [name for name in names if not self._agents.takes(name)]
        waited = time.monotonic() - self._since
        if absent:
            text = self._missing(absent)
            if any(name not in self._agents.known for name in absent) and waited > self._timeout:
                raise LaunchError(text)
            if waited > SAY_SECONDS and not self._warned:
                self._warned = True
                self._add(0, Warned(f"{' and '.join(absent)} do{'es' * (len(absent) == 1)} not answer yet."))
            return
        if self._here is None and self._local is not None:
            ranks_here = [process.rank for process in self._plan.processes if process.rank not in self._where]
            self._here = self._local.start(self._plan, self._group, self._folder, ranks_here)
        plan = zlib.compress(self._plan.to_json().encode(), 1)
        for name in names:
            ranks = sorted(rank for rank in self._pending if self._where[rank] == name)
            self._begun.add(name)
            # Of an earlier attempt.
            logs = [self._folder / f"{self._group}-{rank}.log" for rank in ranks]
            logged = {log.name: log.stat().st_size for log in logs if log.exists()}
            self._agents.send(name, messages.Start(self.number, self._group, plan, ranks, logged))
            self._running |= set(ranks)
        self._pending.clear()

    def _take(self, name: str, message: messages.Message) -> None:
        self._write(name, message)
        match message:
            case messages.Emitted(lines=lines):
                for event in [event for line in lines.splitlines() if (event := from_line(line)) is not None]:
                    self._waiting.append(stamped(event, time.time(), self._group))
                    if isinstance(event, Exited):
                        self._running.discard(event.rank)
                    elif isinstance(event, Started):
                        self._running.add(event.rank)
            case messages.Beats(beats=beats):
                self._waiting += beats
            case messages.Lost(error=error):
                raise LaunchError(f"{name}: {error}")

    def _write(self, name: str, message: messages.Message) -> None:
        """Writes what was written elsewhere where it belongs, a second time without effect, and notes who is done."""
        match message:
            case messages.Piece():
                self._put(message)
            case messages.Stopped():
                self._stopped.add(name)

    def _put(self, piece: messages.Piece) -> None:
        """Writes a piece of a file. One that comes again changes nothing."""
        name = Path(piece.name).name
        path = self._folder / (name if piece.last is None else f".partial.{name}")
        if not path.exists():
            if piece.at and piece.last is not None:
                return
            path.touch()
        anew = piece.last is not None and not piece.at
        with path.open("wb" if anew else "r+b") as file:
            file.seek(piece.at)
            file.write(piece.data)
        if piece.last:
            path.rename(self._folder / name)

    def _find_unreachable(self) -> None:
        limit, awaited = self._plan.launch.heartbeat_timeout, {self._where[rank] for rank in self._pending}
        for name in {self._where[rank] for rank in self._pending | self._running} - self._gone:
            agent, begun = self._agents.known.get(name), name in self._begun
            # It should have a part of a job that was taken over, and has not.
            absent = not begun and name not in awaited
            if agent is None and not absent:
                # It was never there: as long as it may come, see `_start_pending`.
                continue
            another = agent is not None and (absent or (begun and not agent.is_there))
            away = limit if agent is None else agent.channel.away
            if agent is None or another or away > limit + (0.0 if begun else self._returns):
                self._gone.add(name)
                for rank in sorted(rank for rank in self._pending | self._running if self._where[rank] == name):
                    self._add(rank, Unreachable(name, None if another else away))

    def _add(self, rank: int, event: Event) -> None:
        self._waiting.append(stamped(event, time.time(), self._group, rank))

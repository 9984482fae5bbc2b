"""The driver's end of the channels to its agents, and jobs whose processes they start and watch on several hosts."""

import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from pipeline.launch import LaunchError
from pipeline.launch.agents import messages
from pipeline.launch.agents.channel import Channel, Received
from pipeline.launch.agents.endpoint import DRIVER, Endpoint
from pipeline.launch.local import LocalJob
from pipeline.plan.machine import Host
from pipeline.plan.plan import Plan
from pipeline.record.commands import Command
from pipeline.record.events import Event, EventBase, Exited, Started, Unreachable, Warned
from pipeline.record.log import from_line, stamped

if TYPE_CHECKING:
    from pipeline.launch.agents.dialling import DiallingCluster

# For agents to say which ports they hold, and what is late on the way.
POLL_SECONDS, CLOSE_SECONDS, LATE_SECONDS = 0.2, 3.0, 10.0
# Before a warning says which agents do not answer; for an agent to stop, and for one without a connection to come back.
SAY_SECONDS, STOP_SECONDS, AWAY_SECONDS = 3.0, 10.0, 3.0
# For agents to dial.
DIAL_SECONDS = 60.0
# Stands for the jobs that are over: their last lines are the next job's to hear.
OVER = 0
MOST_REFUSED = 20
# A job that an earlier driver has started: its number, and what each agent that has it says of it.
Taken = tuple[int, Mapping[str, messages.Held]] | None
SAME = "the same environment and code on all hosts"


@dataclass(frozen=True)
class Known:
    """An agent that has said hello: its channel, its life, its place among all, and the jobs that it had then."""

    channel: Channel
    life: str
    hello: messages.Hello

    @property
    def host(self) -> Host:
        """Its host, under the name that it has here."""
        return replace(self.hello.machine, hostname=self.channel.name)

    @property
    def is_there(self) -> bool:
        """False once another agent is in its place."""
        return self.channel.life == self.life


class Agents:
    """All agents of a command, by name. What they send about jobs waits until the job asks for it."""

    def __init__(self, token: bytes) -> None:
        # For the user, each to be shown once.
        self.warnings, self._refused = list[str](), 0
        self.endpoint = Endpoint(DRIVER, token, self._refuse)
        # By name, and the lives of those whose hosts are taken away.
        self.known, self._leaving = dict[str, Known](), set[str]()
        # By job, what has come, and what the job has taken, with which it is done once it asks again.
        self._inbox = defaultdict[int, list[tuple[str, messages.Message, Received]]](list)
        self._taken = dict[int, list[tuple[str, Received]]]()
        self._responses, self._listening = dict[tuple[str, int], messages.Response](), threading.Lock()
        # Hosts that have not what this one has are refused, unless they get nothing but requests.
        self.tolerates = False
        # Does this driver go, and leaves the agents and their processes to the next?
        self.left = False
        self._jobs, self._requests = 0, count(1)
        # Jobs that are not over, whose messages wait for them; those that end or are over, whose processes' last lines
        # are the next job's to hear.
        self._open, self.ending = set[int](), set[int]()

    def number(self, earlier: int | None = None) -> int:
        """Returns a number for a job that no other has, or goes on with one that an `earlier` driver has numbered."""
        self.endpoint.adopts = self.endpoint.adopts or earlier is not None
        number = self._jobs + 1 if earlier is None else earlier
        self._jobs = max(self._jobs, number)
        self._open.add(number)
        return number

    def over(self, number: int) -> None:
        """Passes over what else comes about a job from now on."""
        self._open.discard(number)
        self.about(number)
        self.about(number)

    def ordered(self) -> list[Known]:
        """Those that have said hello, and whose hosts are not gone, in their order."""
        return sorted((agent for agent in self.known.values() if agent.is_there), key=lambda agent: agent.hello.order)

    def is_there(self, name: str, away: float = 0.0) -> bool:
        """True if an agent has said hello, and has been without a connection for no longer than so many seconds."""
        agent = self.known.get(name)
        return agent is not None and agent.is_there and agent.channel.away <= away

    def takes(self, name: str) -> bool:
        """True if an agent may be given processes: it is there, and its host stays."""
        return self.is_there(name) and self.known[name].life not in self._leaving

    def send(self, name: str, message: messages.Message) -> None:
        """Sends a message to an agent, now or once there is a connection again."""
        if not self.left:
            self.endpoint.channel(name).send(messages.to_bytes(message))

    def listen_to(self, sources: Sequence[Connection | int], timeout: float) -> None:
        """Waits up to `timeout` seconds until something comes, or a source is ready, and sorts what has come."""
        wait([self.endpoint.news, *sources], timeout)
        self.endpoint.hear()
        for channel in list(self.endpoint.channels.values()):
            for received in channel.take():
                self._sort(channel, received)

    def about(self, number: int) -> list[tuple[str, messages.Message]]:
        """Returns what agents have sent about a job since its last call, whose messages count as recorded now."""
        for name, received in self._taken.pop(number, ()):
            self.endpoint.channel(name).done(received)
        come = self._inbox.pop(number, [])
        self._taken[number] = [(name, received) for name, _, received in come]
        return [(name, message) for name, message, _ in come]

    def ports(self, requests: dict[str, list[int]]) -> dict[str, list[int]]:
        """Ports that each of some agents holds, of which 0 is any that is free there. Raises `LaunchError`."""
        numbers = {name: self._request(name, ports) for name, ports in requests.items()}
        received, instead = f"nothing for {LATE_SECONDS:g} s", "again once it can be reached"
        held: dict[str, list[int]] = {}
        for name, number in numbers.items():
            late = LaunchError(f"{name} to say which of its ports are free", received, instead)
            held[name] = [int(port) for port in self._response(name, number, LATE_SECONDS, late, f"{name}: ")]
        return held

    def ask(self, name: str, request: str, timeout: float) -> str:
        """Returns the answer of an agent's host to a line, see `pipeline.launch.Line`. Any thread may ask."""
        number, late = self._request(name, request, timeout), LaunchError(f"no answer within {timeout:g} s")
        # What is late there is reported by the agent before.
        return str(self._response(name, number, timeout + LATE_SECONDS, late))

    def close(self, code: int) -> None:
        """Tells all agents what the command ends with."""
        if not self.left:
            self.over(OVER)
        for name in self.known:
            self.send(name, messages.Close(code))
        self.endpoint.close(0.0 if self.left else CLOSE_SECONDS)

    def _request(self, name: str, request: list[int] | str, timeout: float = LATE_SECONDS) -> int:
        number = next(self._requests)
        self.send(name, messages.Ask(number, request, timeout))
        return number

    def _response(self, name: str, number: int, seconds: float, late: LaunchError, whose: str = "") -> list[int] | str:
        until = time.monotonic() + seconds
        while (name, number) not in self._responses and time.monotonic() < until:
            with self._listening:
                if (name, number) not in self._responses:
                    self.listen_to((), POLL_SECONDS)
        if (response := self._responses.pop((name, number), None)) is None:
            raise late
        if response.error is not None:
            raise LaunchError(f"{whose}{response.error}")
        return response.answer

    def _sort(self, channel: Channel, received: Received) -> None:
        try:
            message = messages.from_bytes(received.data)
        except msgspec.MsgspecError as error:
            expected = f"{channel.name} to have the same version of the pipeline"
            raise LaunchError(expected, f"a message of another one ({error})", SAME) from error
        match message:
            # One meant for an earlier driver, which was not done with it, is passed over.
            case messages.Hello(driver=driver) if driver in ("", self.endpoint.life):
                self.known[channel.name] = Known(channel, received.life, message)
                if (unlike := messages.unlike(messages.alike(), message.alike)) and not self.tolerates:
                    raise LaunchError(f"Expected {channel.name} to have what this machine has: {unlike}. Try {SAME}.")
            case messages.Leaving():
                self._leaving.add(received.life)
            case messages.Response(number=number):
                self._responses[channel.name, number] = message
            case messages.Emitted(job=number, lines=lines) if number in self.ending or number not in self._open:
                if lines := messages.unheard(lines.splitlines()):
                    self._inbox[OVER].append((channel.name, messages.Emitted(OVER, lines), received))
                    return
            case messages.OfJob(job=number) if number in self._open:
                self._inbox[number].append((channel.name, message, received))
                return
        channel.done(received)

    def _refuse(self, text: str) -> None:
        """Called by the thread of the endpoint."""
        self._refused += 1
        if self._refused <= MOST_REFUSED and text not in self.warnings:
            more = " More of them are not reported." if self._refused == MOST_REFUSED else ""
            self.warnings.append(f"{text}{more}")


class RemoteJob:
    """Processes of one plan, on the hosts of a cluster's agents. They are started once every agent is connected.

    `where` names the agent of each rank; the cluster's `local` starts those ranks that it does not name. An agent that
    has never been there is waited for up to `dial_seconds`, one whose host counts as gone for `return_seconds` more;
    meanwhile `missing` is asked again and again. Commands that agents of a job that was `taken` over were given are not
    sent again.
    """

    def __init__(
        self, cluster: "DiallingCluster", plan: Plan, group: str, folder: Path, where: Mapping[int, str], taken: Taken
    ) -> None:
        self._cluster, self._agents, self._returns = cluster, cluster.agents, cluster.return_seconds
        self._plan, self._group, self._folder, self._where = plan, group, folder, where
        self.number, held = taken or (self._agents.number(), {})
        self._here: LocalJob | None = None
        # Ranks that wait for their agent's connection, since when, and whether a warning said so.
        self._pending = set[int]() if taken else set(where)
        self._since, self._warned = time.monotonic(), False
        # Agents that have a part of the job, those whose part has ended, and those that count as gone.
        self._begun, self._stopped, self._gone = set(held), set[str](), set[str]()
        # Commands that were sent, and of those how many an agent was given by an earlier driver.
        self._sent, self._given_before = 0, {name: part.commands for name, part in held.items()}
        exited = {rank: code for part in held.values() for rank, code in part.exited.items()}
        self._running = set(where) - exited.keys() - self._pending
        self._waiting: list[Event] = []
        for rank, code in exited.items():
            self._add(rank, Exited(code))

    def events(self, timeout: float) -> list[Event]:
        """Returns the events that have come in; waits up to `timeout` seconds for one. Raises `LaunchError`."""
        if self._pending:
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
        for name in self._begun:
            self._agents.send(name, messages.DumpStacks(self.number))

    def stop(self, grace: float) -> None:
        """Ends every process, killing it after `grace` seconds; where a host is not reached, they end by themselves."""
        if self._agents.left:
            return
        self._pending.clear()
        self._agents.ending.add(self.number)
        for name in self._begun:
            self._agents.send(name, messages.Stop(self.number, grace))
        if self._here is not None:
            self._here.stop(grace)
        until = time.monotonic() + grace + STOP_SECONDS
        while True:
            for name, message in self._agents.about(self.number):
                with suppress(LaunchError):
                    self._take(name, message)
                # As long as a trained model comes, it is waited for.
                until = max(until, time.monotonic() + STOP_SECONDS)
            there = any(self._agents.is_there(name, AWAY_SECONDS) for name in self._begun - self._stopped)
            if not there or time.monotonic() > until:
                break
            self._agents.listen_to((), POLL_SECONDS)
        self._agents.over(self.number)

    def _start_pending(self) -> None:
        """Starts what waits for its agent, all at once, as they wait for each other anyway."""
        names = sorted({self._where[rank] for rank in self._pending})
        if absent := [name for name in names if not self._agents.takes(name)]:
            waited, text = time.monotonic() - self._since, self._cluster.missing(absent)
            if not self._agents.known.keys() >= {*absent} and waited > (self._cluster.dial_seconds or DIAL_SECONDS):
                raise LaunchError(text)
            if waited > SAY_SECONDS and not self._warned:
                self._warned = True
                self._add(0, Warned(f"{' and '.join(absent)} do{'es' * (len(absent) == 1)} not answer yet."))
            return
        if self._here is None and (local := self._cluster.local) is not None:
            ranks_here = [process.rank for process in self._plan.processes if process.rank not in self._where]
            self._here = local.start(self._plan, self._group, self._folder, ranks_here)
        plan = zlib.compress(self._plan.to_json().encode(), 1)
        for name in names:
            ranks = sorted(rank for rank in self._pending if self._where[rank] == name)
            self._begun.add(name)
            # Of an earlier attempt.
            logs = [self._folder / f"{self._group}-{rank}.log" for rank in ranks]
            logged = {log.name: log.stat().st_size for log in logs if log.exists()}
            self._agents.send(name, messages.Start(self.number, self._group, plan, ranks, logged))
        self._running |= self._pending
        self._pending.clear()

    def _take(self, name: str, message: messages.Message) -> None:
        match message:
            case messages.Piece():
                self._put(message)
            case messages.Stopped():
                self._stopped.add(name)
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

    def _put(self, piece: messages.Piece) -> None:
        """Writes a piece of a file where it belongs. One that comes again changes nothing."""
        name = Path(piece.name).name
        path = self._folder / (name if piece.last is None else f".partial.{name}")
        if not path.exists():
            if piece.at and piece.last is not None:
                return
            path.touch()
        with path.open("r+b" if piece.last is None or piece.at else "wb") as file:
            file.seek(piece.at)
            file.write(piece.data)
        if piece.last:
            path.rename(self._folder / name)

    def _find_unreachable(self) -> None:
        limit, ranks = self._plan.launch.heartbeat_timeout, sorted(self._pending | self._running)
        awaited = {self._where[rank] for rank in self._pending}
        for name in {self._where[rank] for rank in ranks} - self._gone:
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
                for rank in [rank for rank in ranks if self._where[rank] == name]:
                    self._add(rank, Unreachable(name, None if another else away))

    def _add(self, rank: int, event: Event) -> None:
        self._waiting.append(stamped(event, time.time(), self._group, rank))

"""A job whose processes are on several hosts: those of this host beside those that agents start elsewhere."""

import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path

from pipeline.launch.agent import same, versions
from pipeline.launch.errors import LaunchError
from pipeline.launch.link import Link, LinkError, Message
from pipeline.launch.local import LocalCluster, LocalJob
from pipeline.plan.plan import Plan
from pipeline.record.commands import Command
from pipeline.record.events import Event, Exited, Started, Told, Warned, from_plain, stamped

# Before it is said that others are waited for, and for how long an agent that was told to stop is waited for.
SAY_SECONDS, STOP_SECONDS = 3.0, 10.0
RETRY_SECONDS, POLL_SECONDS = 0.3, 0.2
KILLED = -9


class Agents:
    """Lines to agents by name, kept for all jobs of a command. `connect` opens one, or raises `LinkError`."""

    def __init__(self, connect: Callable[[str], Link]) -> None:
        self._connect = connect
        self.links: dict[str, Link] = {}
        self._next_try = 0.0
        self._jobs = 0

    def number(self) -> int:
        """A number for a job that no other has."""
        self._jobs += 1
        return self._jobs

    def missing(self, names: list[str]) -> list[str]:
        """Those of the agents to whom there is no line, once it was tried again, now and then."""
        absent = [name for name in names if name not in self.links or not self.links[name].open]
        if not absent or time.monotonic() < self._next_try:
            return absent
        self._next_try = time.monotonic() + RETRY_SECONDS
        for name in absent:
            try:
                link = self._connect(name)
                there = link.take()["hello"]
            except LinkError:
                continue
            self.links[name] = link
            if unlike := same(versions(), there):
                raise LaunchError(
                    f"Expected {name} to have what this machine has: {unlike}. Try the same environment on all of them."
                )
        return [name for name in absent if name not in self.links or not self.links[name].open]

    def close(self, code: int, names: list[str], timeout: float) -> None:
        """Tells agents what the command ends with, also those whom there was no line to, if they answer soon."""
        until = time.monotonic() + timeout
        absent = list(names)
        while absent and time.monotonic() < until:
            try:
                absent = self.missing(names)
            except LaunchError:
                continue
            time.sleep(RETRY_SECONDS / 2)
        for link in self.links.values():
            link.send({"do": "close", "code": code})
            link.close()


class RemoteJob:
    """Processes of one plan on several hosts. They are started once there is a line to every agent that is needed.

    `where` names the agent of each rank that is not of this host. Waits up to `timeout` seconds for them.
    """

    def __init__(
        self,
        agents: Agents,
        local: LocalCluster,
        plan: Plan,
        group: str,
        folder: Path,
        where: Mapping[int, str],
        timeout: float,
    ) -> None:
        self._agents, self._local, self._plan, self._group, self._folder = agents, local, plan, group, folder
        self._where, self._number, self._timeout = where, agents.number(), timeout
        self._here: LocalJob | None = None
        # Ranks that wait for a line to their agent, since when, and whether that was said.
        self._pending = set(where)
        self._since, self._said = time.monotonic(), False
        self._begun = set[str]()
        self._running = set[int]()
        self._waiting: list[Event] = []
        self._stopped = set[str]()

    def events(self, timeout: float) -> list[Event]:
        """What has come in; waits up to `timeout` seconds for something. Raises `LaunchError`."""
        self._start_pending()
        links = {self._agents.links[name].connection: name for name in self._open()}
        if not self._waiting:
            sources = [] if self._here is None else self._here.sources()
            wait([*links, *sources], RETRY_SECONDS if self._pending else timeout)
        for connection, name in links.items():
            while self._agents.links[name].open and connection.poll(0):
                self._take(name)
        for name in [name for name in self._begun if not self._agents.links[name].open]:
            self._lose(name)
        waiting, self._waiting = self._waiting, []
        return waiting + (self._here.events(0.0) if self._here is not None else [])

    def send(self, command: Command[Told]) -> None:
        """Gives every process a command; one that is gone is left to its `exited` event."""
        if self._here is not None:
            self._here.send(command)
        self._say({"do": "send", "command": command.to_json()})

    def restart(self, rank: int) -> None:
        """Ends a process, if it still is one, and starts it anew, at the same address, once its host answers."""
        name = self._where.get(rank)
        if name is None:
            assert self._here is not None, "it was started"
            self._here.restart(rank)
        elif name in self._begun:
            self._agents.links[name].send({"job": self._number, "do": "restart", "rank": rank})
        else:
            self._pending.add(rank)
            self._since, self._said = time.monotonic(), False

    def dump_stacks(self) -> None:
        """Has every process write its stack to its log."""
        if self._here is not None:
            self._here.dump_stacks()
        self._say({"do": "dump_stacks"})

    def stop(self, grace: float) -> None:
        """Ends every process, killing those that have not ended after `grace` seconds. Returns when none is left."""
        self._pending.clear()
        self._say({"do": "stop", "grace": grace})
        if self._here is not None:
            self._here.stop(grace)
        until = time.monotonic() + grace + STOP_SECONDS
        while (names := self._open() - self._stopped) and time.monotonic() < until:
            links = {self._agents.links[name].connection: name for name in names}
            for connection in wait(list(links), POLL_SECONDS):
                self._take(links[connection])  # type: ignore[index]
        for name in self._open() - self._stopped:
            # Its processes end with the line.
            self._agents.links[name].close()

    def _open(self) -> set[str]:
        return {name for name in self._begun if self._agents.links[name].open}

    def _say(self, message: Message) -> None:
        for name in self._open():
            self._agents.links[name].send({"job": self._number, **message})

    def _start_pending(self) -> None:
        """Starts what waits for its agent, all at once, as they wait for each other anyway."""
        if not self._pending and self._here is not None:
            return
        names = sorted({self._where[rank] for rank in self._pending})
        absent = self._agents.missing(names)
        waited = time.monotonic() - self._since
        if absent and waited > self._timeout:
            raise LaunchError(
                f"Expected {' and '.join(absent)} to be there, received no answer for {self._timeout:g} s. "
                f"Try the same command there, or cluster.options.timeout={2 * self._timeout:g}."
            )
        if absent and waited > SAY_SECONDS and not self._said:
            self._said = True
            text = (
                f"{' and '.join(absent)} do{'es' * (len(absent) == 1)} not answer yet: the same command starts there."
            )
            self._add(0, Warned(text))
        if absent:
            return
        if self._here is None:
            mine = [process.rank for process in self._plan.processes if process.rank not in self._where]
            self._here = self._local.start(self._plan, self._group, self._folder, mine)
        for name in names:
            ranks = sorted(rank for rank in self._pending if self._where[rank] == name)
            self._begun.add(name)
            message = {"do": "start", "job": self._number, "plan": self._plan.to_json(), "group": self._group}
            self._agents.links[name].send(message | {"ranks": ranks})
            self._running |= set(ranks)
        self._pending.clear()

    def _take(self, name: str) -> None:
        """Takes in what an agent tells."""
        try:
            message = self._agents.links[name].take()
        except LinkError:
            return
        if message.get("job") != self._number:
            return
        for event in map(from_plain, message.get("events", ())):
            self._waiting.append(stamped(event, time.time(), self._group))
            match event:
                case Exited(rank=rank):
                    self._running.discard(rank)
                case Started(rank=rank):
                    self._running.add(rank)
        if "log" in message:
            with (self._folder / Path(message["log"]).name).open("a") as log:
                log.write(message["text"])
        if "stopped" in message:
            self._stopped.add(name)
        if "lost" in message:
            raise LaunchError(message["lost"])

    def _lose(self, name: str) -> None:
        """The line to an agent has ended, and with it its processes."""
        self._begun.discard(name)
        lost = sorted(rank for rank in self._running if self._where[rank] == name)
        self._running -= set(lost)
        if lost:
            self._add(lost[0], Warned(f"The connection to {name} was lost, and with it its processes."))
        for rank in lost:
            self._add(rank, Exited(KILLED))

    def _add(self, rank: int, event: Event) -> None:
        self._waiting.append(stamped(event, time.time(), self._group, rank))

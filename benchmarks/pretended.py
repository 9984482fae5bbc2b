"""Agents of hosts whose processes are pretended: they tell what processes that train tell, as often, and do nothing.

Lines, messages, and how an agent folds what its processes tell, are the program's own.
"""

import multiprocessing as mp
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from pipeline.analyze.measure import CALL_SECONDS
from pipeline.config.schema import ClusterConfig
from pipeline.launch.agents.agent import Agent
from pipeline.launch.agents.channel import Channel
from pipeline.launch.agents.dialling import DiallingCluster
from pipeline.launch.agents.endpoint import DRIVER, Endpoint
from pipeline.launch.child import BEAT_SECONDS
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan
from pipeline.record.commands import Command, Train
from pipeline.record.events import Beat, Event, EventBase, Exited, Joined, Started, Steps, System

# How often the first process of a host tells the host's load; what a call of the training loop trains.
SYSTEM_SECONDS, STEPS_PER_CALL = 5.0, 10
# For how long an agent waits for a driver that is gone.
AWAY_SECONDS = 30.0
NOBODY = -1


@dataclass(frozen=True)
class Doom:
    """Which process dies as by SIGKILL, and which says no more, by rank; other processes read it too."""

    killed: "Synchronized[int]" = field(default_factory=partial(mp.Value, "i", NOBODY))
    silent: "Synchronized[int]" = field(default_factory=partial(mp.Value, "i", NOBODY))


class Pretended(DiallingCluster):
    """Hosts whose agents are told through `contacts` where to dial."""

    def __init__(self, hosts: int, contacts: Connection) -> None:
        super().__init__(ClusterConfig(name="pretended"), os.environ)
        self.count, self._contacts = hosts, contacts

    def listens_at(self) -> str:
        """At any port of loopback."""
        return "127.0.0.1:0"

    def begin(self, address: str) -> None:
        """Tells the agents where to dial."""
        self._contacts.send((address, self.token))


def serve(hosts: int, per_host: int, contacts: Connection, doom: Doom) -> None:
    """Is the agents of so many hosts, each of so many processes, until the driver ends them."""
    address, token = contacts.recv()
    agents = [threading.Thread(target=_agent, args=(order, per_host, address, token, doom)) for order in range(hosts)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()


def _agent(order: int, per_host: int, address: str, token: bytes, doom: Doom) -> None:
    endpoint = Endpoint(f"host{order}", token)

    def gone(channel: Channel, orphan_timeout: float) -> bool:
        return channel.away > AWAY_SECONDS

    host = _Host(Machine(endpoint.name, tuple(range(per_host)), 1.0, "pretended"), doom)
    Agent(endpoint.dial(DRIVER, address), host, order, "127.0.0.1", gone).serve(lambda: None)
    endpoint.close(1.0)


class _Host:
    """Stands for the `LocalCluster` of an agent."""

    def __init__(self, machine: Machine, doom: Doom) -> None:
        self._machine, self._doom = machine, doom

    def inventory(self) -> Machine:
        return self._machine

    def hold(self, address: str, ports: Sequence[int]) -> Sequence[int]:
        """Nothing listens."""
        return [20_000 + number for number in range(len(ports))]

    def start(self, plan: Plan, group: str, folder: Path, ranks: Sequence[int]) -> "_Job":
        return _Job(plan, group, ranks, self._doom)


class _Job:
    """Stands for a `LocalJob`."""

    def __init__(self, plan: Plan, group: str, ranks: Sequence[int], doom: Doom) -> None:
        self._group, self._ranks, self._doom = group, list(ranks), doom
        self._training, self._done = False, 0
        self._next_beat = self._next_call = self._next_system = time.monotonic()
        processes = [plan.processes[rank] for rank in ranks]
        self._waiting: list[Event] = [
            Started(os.getpid(), process.role, process.host, **self._by(process.rank)) for process in processes
        ]
        self._waiting += [Joined(list(process.devices), {}, **self._by(process.rank)) for process in processes]

    def sources(self) -> list[int]:
        """None: an agent looks now and then by itself."""
        return []

    def send(self, command: Command[EventBase]) -> None:
        self._training = isinstance(command, Train)

    def events(self, timeout: float) -> list[Event]:
        """What is due."""
        found, self._waiting = self._waiting, []
        now = time.monotonic()
        if self._doom.killed.value in self._ranks:
            self._ranks.remove(self._doom.killed.value)
            found.append(Exited(-9, **self._by(self._doom.killed.value)))
        speaking = [rank for rank in self._ranks if rank != self._doom.silent.value]
        if now >= self._next_beat:
            self._next_beat += BEAT_SECONDS
            found += [Beat(self._done, time.process_time(), **self._by(rank)) for rank in speaking]
        if self._training and now >= self._next_call:
            self._next_call = max(now, self._next_call + CALL_SECONDS)
            self._done += STEPS_PER_CALL
            found += [self._called(rank) for rank in speaking]
        if self._ranks and now >= self._next_system:
            self._next_system += SYSTEM_SECONDS
            load = {"cpu_utilization_percentage": 50.0, "system_memory_usage_gib": 8.0}
            found.append(System("host", load, **self._by(self._ranks[0])))
        return found

    def dump_stacks(self) -> None:
        """Nothing has a stack."""

    def stop(self, grace: float) -> None:
        self._ranks = []

    def _called(self, rank: int) -> Event:
        """What a process tells at the end of a call: the chief its losses, the others how far they are."""
        if rank:
            return Beat(step=self._done, **self._by(rank))
        losses = [0.5] * STEPS_PER_CALL
        return Steps(self._done, losses, 1, {"accuracy": 0.5}, 1e4, CALL_SECONDS, 1e-3, **self._by(rank))

    def _by(self, rank: int) -> dict[str, object]:
        return {"time": time.time(), "group": self._group, "rank": rank}

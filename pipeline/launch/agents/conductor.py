"""The conductor's end of the lines to its agents: who is there, what they say, sorted by the jobs that it is about."""

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from multiprocessing.connection import Connection, wait
from typing import Any

from pipeline.launch.agents.alike import alike, unlike
from pipeline.launch.agents.messages import (
    CONDUCTOR,
    Answered,
    Ask,
    Close,
    Find,
    Found,
    Hello,
    Leaving,
    Message,
    Pulse,
    Pulses,
    from_bytes,
)
from pipeline.launch.asking import ANSWER_SECONDS as ASKED_SECONDS
from pipeline.launch.asking import LineError, answer_of
from pipeline.launch.errors import LaunchError
from pipeline.launch.line.hub import Hub
from pipeline.launch.line.link import Link, Received
from pipeline.plan.machine import Host, Machine

POLL_SECONDS, CLOSE_SECONDS, ANSWER_SECONDS = 0.2, 3.0, 10.0
# Connections that were refused and are told of.
MOST_REFUSED = 20


@dataclass(frozen=True)
class Known:
    """An agent that has said hello: its line, its life, its place among all, and the jobs that it had then."""

    link: Link
    life: str
    hello: Hello

    @property
    def host(self) -> Host:
        """What its host has, under the name by which it is called here."""
        machine: Machine = self.hello.machine
        facts = {field.name: getattr(machine, field.name) for field in fields(Host)}
        return Host(**facts | {"hostname": self.link.name})

    @property
    def is_there(self) -> bool:
        """Is there a line to it, or will there be one again?"""
        return not self.link.closed and self.link.life == self.life


@dataclass(frozen=True)
class Said:
    """A message about a job, from which agent; `received` is done with once what it brings has been recorded."""

    name: str
    message: Message
    received: Received


class Agents:
    """All agents of a command, by name. What they say of jobs waits until the job asks for it."""

    def __init__(self, token: bytes) -> None:
        self._warnings: list[str] = []
        self._count = 0
        self.hub = Hub(CONDUCTOR, token, self._refuse)
        self.known: dict[str, Known] = {}
        # Lives of those whose hosts are taken away.
        self._leaving = set[str]()
        self._said: dict[int, list[Said]] = defaultdict(list)
        self._pulses: dict[int, dict[int, Pulse]] = defaultdict(dict)
        self._found: dict[tuple[str, int], Found] = {}
        self._answers: dict[tuple[str, int], str] = {}
        self._listening = threading.Lock()
        # Are hosts spoken to that have not what this one has, which are asked nothing but questions then?
        self.tolerates = False
        # Does this conductor go, and leaves the agents and their processes to the next?
        self.left = False
        self._jobs = self._asked = 0
        # Messages of jobs that are over are done with as they come.
        self._open = set[int]()

    def number(self) -> int:
        """A number for a job that no other has."""
        self._jobs += 1
        self._open.add(self._jobs)
        return self._jobs

    def take_over(self, number: int) -> None:
        """Goes on with a job that an earlier conductor has numbered, in whose place this one is."""
        self.hub.adopts = True
        self._jobs = max(self._jobs, number)
        self._open.add(number)

    def over(self, number: int) -> None:
        """Passes over what is said of a job from now on."""
        self._open.discard(number)
        self._pulses.pop(number, None)
        for said in self.about(number):
            self.done(said)

    def ordered(self) -> list[Known]:
        """Those that have said hello, and whose hosts are not gone, in their order."""
        return sorted((known for known in self.known.values() if known.is_there), key=lambda known: known.hello.order)

    def is_there(self, name: str, away: float = 0.0) -> bool:
        """Has an agent said hello, and is there a line to it, or none for no longer than so many seconds?"""
        known = self.known.get(name)
        return known is not None and known.is_there and known.link.away <= away

    def takes(self, name: str) -> bool:
        """Is there a line to an agent, and does its host stay, so that it may be given processes?"""
        return self.is_there(name) and self.known[name].life not in self._leaving

    def say(self, name: str, message: Message) -> None:
        """Has an agent hear something, now or once there is a line to it again."""
        if self.left:
            return
        self.hub.link(name).send(message.to_bytes())

    def listen_to(self, sources: Sequence[Connection | int], timeout: float) -> None:
        """Waits up to `timeout` seconds until agents say something, or a source is ready, and sorts what has come."""
        wait([self.hub.news, *sources], timeout)
        self.hub.hear()
        for link in list(self.hub.links.values()):
            for received in link.take():
                self._sort(link, received)

    def about(self, number: int) -> list[Said]:
        """What was said of a job since it was asked last. To be `done` with once it is recorded."""
        return self._said.pop(number, [])

    def pulses(self, number: int) -> list[Pulse]:
        """The last sign of life of each process of a job that has given one since they were asked for last."""
        return list(self._pulses.pop(number, {}).values())

    def done(self, said: Said) -> None:
        """Lets an agent forget what it has said."""
        self.hub.link(said.name).done(said.received)

    def ports(self, wanted: dict[str, list[int]]) -> dict[str, list[int]]:
        """Ports that each of some agents holds, of which 0 is any that is free there. Raises `LaunchError`."""
        self._asked += 1
        for name, ports in wanted.items():
            self.say(name, Find(self._asked, ports))
        until = time.monotonic() + ANSWER_SECONDS
        while absent := [name for name in wanted if (name, self._asked) not in self._found]:
            if time.monotonic() > until:
                raise LaunchError(
                    f"{absent[0]} to say which of its ports are free",
                    f"nothing for {ANSWER_SECONDS:g} s",
                    "again once it can be reached",
                )
            self.listen_to((), POLL_SECONDS)
        found = {name: self._found.pop((name, self._asked)) for name in wanted}
        for name, answer in found.items():
            if answer.error is not None:
                raise LaunchError(f"{name}: {answer.error}")
        return {name: answer.ports for name, answer in found.items()}

    def ask(self, name: str, question: str, timeout: float) -> str:
        """What an agent's host answers to a question, of any thread. Raises `LineError`."""
        with self._listening:
            self._asked += 1
            asked = self._asked
        self.say(name, Ask(asked, question, timeout))
        # What is late on the way is told by the agent before.
        until = time.monotonic() + timeout + ANSWER_SECONDS
        while (name, asked) not in self._answers:
            if time.monotonic() > until:
                raise LineError(f"no answer within {timeout:g} s")
            with self._listening:
                if (name, asked) not in self._answers:
                    self.listen_to((), POLL_SECONDS)
        return self._answers.pop((name, asked))

    def close(self, code: int, seconds: float = CLOSE_SECONDS) -> None:
        """Tells all agents what the command ends with."""
        for known in self.known.values():
            self.say(known.link.name, Close(code))
        for link in self.hub.links.values():
            # Who is not there is not waited for.
            link.closed = link.connection is None
        self.hub.close(0.0 if self.left else seconds)

    def warn(self, text: str) -> None:
        """Has a person know something of agents, or of where they are."""
        self._warnings.append(text)

    def warnings(self) -> Iterator[str]:
        """What a person should know, such as connections that were refused, each once."""
        while self._warnings:
            yield self._warnings.pop(0)

    def _sort(self, link: Link, received: Received) -> None:
        try:
            message = from_bytes(received.data)
        except ValueError as error:
            raise LaunchError(f"Expected {link.name} to have the same version of the pipeline. {error}") from error
        number = getattr(message, "job", None)
        if isinstance(message, Hello) and message.conductor not in ("", self.hub.life):
            # What an earlier conductor was told, and was not done with.
            pass
        elif isinstance(message, Hello):
            self.known[link.name] = Known(link, received.life, message)
            if (different := unlike(alike(), message.alike)) and not self.tolerates:
                raise LaunchError(
                    f"Expected {link.name} to have what this machine has: {different}. "
                    f"Try the same environment and code on all hosts."
                )
        elif isinstance(message, Leaving):
            self._leaving.add(received.life)
        elif isinstance(message, Found):
            self._found[link.name, message.asked] = message
        elif isinstance(message, Answered):
            self._answers[link.name, message.asked] = message.answer
        elif isinstance(message, Pulses):
            for pulse in message.pulses:
                if pulse.job in self._open:
                    self._pulses[pulse.job][pulse.rank] = pulse
        elif number in self._open:
            self._said[number].append(Said(link.name, message, received))
            return
        link.done(received)

    def _refuse(self, text: str) -> None:
        """Called by threads of the hub."""
        self._count += 1
        if self._count <= MOST_REFUSED and text not in self._warnings:
            more = " More of them are not told of." if self._count == MOST_REFUSED else ""
            self._warnings.append(f"{text}{more}")


class AgentLine:
    """Where a host is asked by its agent, see `pipeline.launch.asking.Line`."""

    def __init__(self, agents: Agents, name: str) -> None:
        self._agents, self._name = agents, name

    def ask(self, question: Mapping[str, Any], timeout: float = ASKED_SECONDS) -> Any:
        """The answer to a question. Raises `LineError`."""
        return answer_of(self._agents.ask(self._name, json.dumps(question), timeout))

    def close(self) -> None:
        """Nothing: what answers ends with the agent."""

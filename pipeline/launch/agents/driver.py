"""The driver's end of the channels to its agents: who is there, and what they send, sorted by jobs."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing.connection import Connection, wait

import msgspec

from pipeline.launch import LaunchError
from pipeline.launch.agents import messages
from pipeline.launch.agents.channel import Channel, Received
from pipeline.launch.agents.endpoint import Endpoint
from pipeline.launch.agents.unheard import unheard
from pipeline.plan.machine import Host, Machine

# For agents to say which ports they hold, and what is late on the way.
POLL_SECONDS, CLOSE_SECONDS, LATE_SECONDS = 0.2, 3.0, 10.0
# Stands for the jobs that are over: their last lines are the next job's to hear.
OVER = 0
MOST_REFUSED = 20
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
        machine: Machine = self.hello.machine
        facts = {field.name: getattr(machine, field.name) for field in fields(Host)}
        return Host(**facts | {"hostname": self.channel.name})

    @property
    def is_there(self) -> bool:
        """False once another agent is in its place."""
        return self.channel.life == self.life


class Agents:
    """All agents of a command, by name. What they send about jobs waits until the job asks for it."""

    def __init__(self, token: bytes) -> None:
        # For the user, each to be shown once.
        self.warnings: list[str] = []
        self._refused = 0
        self.endpoint = Endpoint(messages.DRIVER, token, self._refuse)
        self.known: dict[str, Known] = {}
        self._leaving = set[str]()
        # By job, what has come, and what the job has taken, with which it is done once it asks again.
        self._inbox: dict[int, list[tuple[str, messages.Message, Received]]] = defaultdict(list)
        self._taken: dict[int, list[tuple[str, Received]]] = defaultdict(list)
        self._responses: dict[tuple[str, int], messages.Response] = {}
        self._listening = threading.Lock()
        # Hosts that have not what this one has are refused, unless they get nothing but requests.
        self.tolerates = False
        # Does this driver go, and leaves the agents and their processes to the next?
        self.left = False
        self._jobs = self._requests = 0
        # Jobs that are not over, whose messages wait for them; those that end or are over, whose processes' last lines
        # are the next job's to hear.
        self._open, self.ending = set[int](), set[int]()

    def number(self) -> int:
        """Returns a number for a job that no other has."""
        self._jobs += 1
        self._open.add(self._jobs)
        return self._jobs

    def take_over(self, number: int) -> None:
        """Goes on with a job that an earlier driver has numbered."""
        self.endpoint.adopts = True
        self._jobs = max(self._jobs, number)
        self._open.add(number)

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
            self.endpoint.channel(name).send(message.to_bytes())

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
        numbers = {name: self._request(name, partial(messages.Find, ports=ports)) for name, ports in requests.items()}
        held: dict[str, list[int]] = {}
        for name, number in numbers.items():
            if (response := self._response(name, number, LATE_SECONDS)) is None:
                expected = f"{name} to say which of its ports are free"
                raise LaunchError(expected, f"nothing for {LATE_SECONDS:g} s", "again once it can be reached")
            if response.error is not None:
                raise LaunchError(f"{name}: {response.error}")
            held[name] = response.ports
        return held

    def ask(self, name: str, request: str, timeout: float) -> str:
        """Returns the answer of an agent's host to a line, see `pipeline.launch.asking`. Any thread may ask."""
        number = self._request(name, partial(messages.Ask, request=request, timeout=timeout))
        # What is late there is reported by the agent before.
        if (response := self._response(name, number, timeout + LATE_SECONDS)) is None:
            raise LaunchError(f"no answer within {timeout:g} s")
        return response.line

    def close(self, code: int) -> None:
        """Tells all agents what the command ends with."""
        if not self.left:
            self.over(OVER)
        for agent in self.known.values():
            self.send(agent.channel.name, messages.Close(code))
        self.endpoint.close(0.0 if self.left else CLOSE_SECONDS)

    def _request(self, name: str, message: Callable[[int], messages.Message]) -> int:
        with self._listening:
            self._requests += 1
            number = self._requests
        self.send(name, message(number))
        return number

    def _response(self, name: str, number: int, seconds: float) -> messages.Response | None:
        until = time.monotonic() + seconds
        while (name, number) not in self._responses:
            if time.monotonic() > until:
                return None
            with self._listening:
                if (name, number) not in self._responses:
                    self.listen_to((), POLL_SECONDS)
        return self._responses.pop((name, number))

    def _sort(self, channel: Channel, received: Received) -> None:
        try:
            message = messages.from_bytes(received.data)
        except msgspec.MsgspecError as error:
            expected, instead = f"{channel.name} to have the same version of the pipeline", SAME
            raise LaunchError(expected, f"a message of another one ({error})", instead) from error
        match message:
            case messages.Hello(driver=driver) if driver not in ("", self.endpoint.life):
                # Meant for an earlier driver, which was not done with it.
                pass
            case messages.Hello():
                self.known[channel.name] = Known(channel, received.life, message)
                if (different := messages.unlike(messages.alike(), message.alike)) and not self.tolerates:
                    raise LaunchError(
                        f"Expected {channel.name} to have what this machine has: {different}. Try {SAME}."
                    )
            case messages.Leaving():
                self._leaving.add(received.life)
            case messages.Response(number=number):
                self._responses[channel.name, number] = message
            case messages.Emitted(job=number, lines=lines) if number in self.ending or number not in self._open:
                if lines := unheard(lines.splitlines()):
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

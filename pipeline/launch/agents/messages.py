"""What a conductor and its agents say to each other: a class a message, written and read here alone."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipeline.plan.machine import Machine
from pipeline.record import codec

# What agents call the other end of their line.
CONDUCTOR = "conductor"


@dataclass(frozen=True)
class Message:
    """One of those below."""

    def to_bytes(self) -> bytes:
        """The message as JSON, its name under `say`."""
        return json.dumps({"say": type(self).__name__.lower()} | codec.to_plain(self)).encode()


@dataclass(frozen=True)
class Start(Message):
    """Start some ranks of a plan, as job `job`. `logged`: bytes that the conductor's log of a name has already."""

    job: int
    group: str
    plan: str
    ranks: list[int]
    logged: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Give(Message):
    """Give all processes of a job a command, as `Command.to_json` wrote it."""

    job: int
    command: str


@dataclass(frozen=True)
class Restart(Message):
    """End a process, and start it anew."""

    job: int
    rank: int


@dataclass(frozen=True)
class DumpStacks(Message):
    """Have all processes of a job write their stacks."""

    job: int


@dataclass(frozen=True)
class Stop(Message):
    """End all processes of a job, killing those that have not ended after `grace` seconds."""

    job: int
    grace: float


@dataclass(frozen=True)
class Find(Message):
    """Keep these ports for the processes of the next job; 0 is any that is free."""

    asked: int
    ports: list[int]


@dataclass(frozen=True)
class Ask(Message):
    """Have a question answered on the agent's host, see `pipeline.launch.asking`, within so many seconds."""

    asked: int
    question: str
    timeout: float


@dataclass(frozen=True)
class Answered(Message):
    """The answer to a question of that number."""

    asked: int
    answer: str


@dataclass(frozen=True)
class Redial(Message):
    """The conductor, which has dialled first, is to be dialled at HOST:PORT once this connection is lost."""

    address: str


@dataclass(frozen=True)
class Close(Message):
    """There is nothing more to do: the conductor's command ends with `code`."""

    code: int


@dataclass(frozen=True)
class Held(Message):
    """A job that an agent has: how many commands it was given, and which of its ranks have ended, with which code."""

    job: int
    group: str
    ranks: list[int]
    commands: int
    exited: dict[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Hello(Message):
    """An agent's place among all, where its processes are reached, what its host has, what must be alike, its jobs.

    `conductor` is the life of the conductor that it is for: one that comes later is told anew. `network` is what no
    other machine has, and no other network of the same one.
    """

    order: int
    address: str
    machine: Machine
    alike: dict[str, str]
    jobs: list[Held] = field(default_factory=list)
    conductor: str = ""
    network: str = ""


@dataclass(frozen=True)
class Leaving(Message):
    """The agent's host is taken away: it takes no more processes, and ends once those that it has are told to."""


@dataclass(frozen=True)
class Told(Message):
    """What processes of a job have told, as `pipeline.record.events.to_plain` has it."""

    job: int
    events: list[dict[str, Any]]


@dataclass(frozen=True)
class Logged(Message):
    """What processes have written into a log, to be put at byte `at` of the conductor's."""

    job: int
    name: str
    at: int
    text: str


@dataclass(frozen=True)
class Piece(Message):
    """Bytes of a file that belongs into the run's folder, as base64, from byte `at` on; are they the last?"""

    job: int
    name: str
    at: int
    data: str
    last: bool


@dataclass(frozen=True)
class Stopped(Message):
    """All processes of a job have ended."""

    job: int


@dataclass(frozen=True)
class Lost(Message):
    """Processes of a job could not be started, or restarted."""

    job: int
    error: str


@dataclass(frozen=True)
class Found(Message):
    """The ports that are kept; or in words why they cannot be."""

    asked: int
    ports: list[int]
    error: str | None = None


class Pulse(NamedTuple):
    """The last sign of life of a process: when, how often it got on, seconds of its cores, and in training how far."""

    job: int
    rank: int
    time: float
    progress: int | None = None
    cpu_seconds: float | None = None
    step: int | None = None
    validated: int | None = None


@dataclass(frozen=True)
class Pulses(Message):
    """The status of an agent: the last sign of life of each of its processes."""

    pulses: list[Pulse]


MESSAGES: dict[str, type[Message]] = {made.__name__.lower(): made for made in Message.__subclasses__()}


def from_bytes(data: bytes) -> Message:
    """The message that `Message.to_bytes` wrote. Raises `ValueError`."""
    values: Mapping[str, Any] = json.loads(data)
    kind = MESSAGES.get(str(values.get("say")))
    if kind is None:
        raise ValueError(f"Expected a message of this version, received {values.get('say')}.")
    return codec.from_plain(kind, {name: value for name, value in values.items() if name != "say"})

"""Messages between a driver and its agents, a class each, and the versions that both must have alike."""

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any, Union

import msgspec

from pipeline.plan.machine import Machine
from pipeline.record.events import Beat, Epoch, Steps, Unheard
from pipeline.record.log import from_line, stamped, to_line, to_plain

PACKAGES = ("tensorflow", "keras", "numpy")
# Which not every host has, and one backend alone needs.
OTHERS = ("jax", "jaxlib")
PACKAGE = Path(__file__).resolve().parents[2]
LOCK = PACKAGE.parent / "requirements.lock"
FILES = "the pipeline's files"


class Message(msgspec.Struct, frozen=True, tag=True):
    """One of those below, which travels as MessagePack with the name of its class."""


class OfJob(Message, frozen=True):
    """One about a job: processes that were started together."""

    job: int


class Start(OfJob, frozen=True):
    """Start some ranks of a plan, as job `job`. `logged`: bytes that the driver's log of a name has already."""

    group: str
    # Its JSON, compressed: a driver keeps one of all processes for each host until the host has it.
    plan: bytes
    ranks: list[int]
    logged: dict[str, int] = {}


class Give(OfJob, frozen=True):
    """Give all processes of a job a command, as `Command.to_json` wrote it."""

    command: str


class Restart(OfJob, frozen=True):
    """End a process, and start it anew."""

    rank: int


class DumpStacks(OfJob, frozen=True):
    """Make all processes of a job write their stacks."""


class Stop(OfJob, frozen=True):
    """End all processes of a job, killing those that have not ended after `grace` seconds."""

    grace: float


class Ask(Message, frozen=True):
    """Keep ports for the processes of the next job, 0 for any that is free, or answer a line within so many seconds."""

    number: int
    request: list[int] | str
    timeout: float


class Close(Message, frozen=True):
    """There is nothing more to do: the driver's command ends with `code`."""

    code: int


class Held(msgspec.Struct, frozen=True):
    """A job that an agent has: how many commands it was given, and which of its ranks have ended, with which code."""

    commands: int
    exited: dict[int, int | None] = {}


class Hello(Message, frozen=True):
    """An agent's place among all, where its processes are reached, what its host has, what must be alike, its jobs.

    `driver` is the life of the driver that it is for: one that comes later gets another. `network`: see `this_machine`.
    """

    order: int
    address: str
    machine: Machine
    alike: Mapping[str, str]
    jobs: dict[int, Held] = {}
    driver: str = ""
    network: str = ""


class Leaving(Message, frozen=True):
    """The agent's host is taken away: it takes no more processes, and ends once those that it has are told to."""


class Emitted(OfJob, frozen=True):
    """Events of a job's processes, a line each."""

    lines: bytes


class Piece(OfJob, frozen=True):
    """Bytes of a file of the run's folder from byte `at` on; `last` is None for a log, which grows by them."""

    name: str
    at: int
    data: bytes
    last: bool | None = None


class Stopped(OfJob, frozen=True):
    """All processes of a job have ended."""


class Lost(OfJob, frozen=True):
    """Processes of a job could not be started, or restarted."""

    error: str


class Response(Message, frozen=True):
    """The answer to the `Ask` of that number, or an error in words."""

    number: int
    answer: list[int] | str = ""
    error: str | None = None


class Beats(OfJob, frozen=True):
    """The last heartbeats of a job's processes."""

    beats: list[Beat]


ANY: Any = Union[(*Message.__subclasses__(), *OfJob.__subclasses__())]
to_bytes = msgspec.msgpack.encode
# The message that `to_bytes` wrote. Raises `msgspec.MsgspecError`.
from_bytes: Callable[[bytes], Message] = msgspec.msgpack.Decoder(ANY).decode


def unheard(lines: Iterable[bytes]) -> bytes:
    """Returns the line of one event with the steps and epochs among lines of processes that are over; empty if none."""
    events = [event for line in lines if isinstance(event := from_line(line), Steps | Epoch) and event.of_point]
    return to_line(stamped(Unheard(tuple(map(to_plain, events))), time.time(), "point")) if events else b""


@cache
def alike() -> Mapping[str, str]:
    """Returns the versions of what computes, by name, and hashes of this package's files and of its lock file."""
    versions = {"python": ".".join(python_version().split(".")[:2]), **dict.fromkeys(PACKAGES, "none")}
    for name in (*PACKAGES, *OTHERS):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    versions[FILES] = _digest(modules())
    if LOCK.is_file():
        versions["requirements.lock"] = _digest([LOCK])
    return versions


def unlike(own: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """Says in which versions another host differs from this one; None if in none.

    >>> unlike({"keras": "3.1", "numpy": "2"}, {"keras": "3.2"})
    'keras 3.1 and numpy 2, received keras 3.2 and numpy none'
    >>> unlike({"keras": "3.1", "jax": "0.10.2"}, {"keras": "3.1"})
    """
    # What is compared only where both have it: a wheel has no lock file beside it.
    lacking = {*OTHERS, "requirements.lock"} - other.keys()
    names = [name for name in own if other.get(name) != own[name] and name not in lacking]
    if not names:
        return None
    expected, received = (" and ".join(f"{name} {has.get(name, 'none')}" for name in names) for has in (own, other))
    return f"{expected}, received {received}"


def modules() -> list[Path]:
    """Returns this package's files, without links to nowhere, which editors use as locks."""
    return sorted(path for path in PACKAGE.rglob("*.py") if path.is_file())


def _digest(paths: list[Path]) -> str:
    names = [path.relative_to(PACKAGE.parent).as_posix().encode() for path in paths]
    parts = [part for name, path in zip(names, paths, strict=True) for part in (name, path.read_bytes())]
    return hashlib.sha256(b"".join(part + b"\0" for part in parts)).hexdigest()[:12]

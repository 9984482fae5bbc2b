"""Starts, watches and stops processes on its host for a conductor elsewhere, whose words come over a `Link`.

The conductor says `start` (of some ranks of a plan), and of a job that it numbered `send`, `restart`, `dump_stacks` and
`stop`; with `close` it says what its command ends with. The agent tells `events` of its jobs as they come, what
processes write into their logs, that a job has `stopped`, and that one could not be started, which is `lost`. Where the
line ends, so do all processes.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from multiprocessing.connection import wait
from pathlib import Path
from platform import python_version

from pipeline.launch import machine
from pipeline.launch.errors import LaunchError
from pipeline.launch.link import Link, LinkError, Message
from pipeline.launch.local import LocalCluster, LocalJob
from pipeline.plan.plan import Plan, from_json
from pipeline.record import commands
from pipeline.record.events import Signalled, to_plain

POLL_SECONDS = 0.2
# What a conductor and its agents must have alike.
PACKAGES = ("tensorflow", "keras", "numpy")
LOG_BYTES = 1 << 20


def versions() -> dict[str, str]:
    """What must be the same wherever processes of one run are."""
    return {"python": ".".join(python_version().split(".")[:2])} | {name: metadata.version(name) for name in PACKAGES}


def serve(link: Link, cluster: LocalCluster, signalled: Callable[[], int | None]) -> int | None:
    """Does what the conductor at the other end says, to the end; returns what its command ended with.

    None where the line ended before. `signalled` tells of a scheduler's signal, which is passed on.
    """
    with tempfile.TemporaryDirectory(prefix="pipeline-agent-") as folder:
        return _Agent(link, cluster, Path(folder)).serve(signalled)


class _Agent:
    def __init__(self, link: Link, cluster: LocalCluster, folder: Path) -> None:
        self._link, self._cluster, self._folder = link, cluster, folder
        self._jobs: dict[int, LocalJob] = {}
        # Of each job, the group, and the ranks that are here.
        self._groups: dict[int, str] = {}
        self._ranks: dict[int, list[int]] = {}
        # How far each log was sent.
        self._sent: dict[Path, int] = {}

    def serve(self, signalled: Callable[[], int | None]) -> int | None:
        self._link.send({"hello": versions()})
        told = False
        try:
            while True:
                sources = [source for job in self._jobs.values() for source in job.sources()]
                if self._link.connection in wait([self._link.connection, *sources], POLL_SECONDS):
                    message = self._link.take()
                    if message["do"] == "close":
                        return int(message["code"])
                    self._do(message)
                for number in self._jobs:
                    self._tell(number)
                if not told and (signal := signalled()) is not None:
                    told = True
                    self._pass_on(signal)
        except LinkError:
            return None
        finally:
            for job in self._jobs.values():
                job.stop(0.0)

    def _do(self, message: Message) -> None:
        number = message["job"]
        if message["do"] == "start":
            plan = on_cores(from_json(message["plan"]), message["ranks"], machine.usable_cores())
            folder = self._folder / str(number)
            folder.mkdir()
            self._groups[number], self._ranks[number] = message["group"], message["ranks"]
            try:
                self._jobs[number] = self._cluster.start(plan, message["group"], folder, message["ranks"])
            except LaunchError as error:
                self._link.send({"job": number, "lost": str(error)})
            return
        job = self._jobs.get(number)
        if job is None:
            return
        if message["do"] == "send":
            job.send(commands.from_json(message["command"]))
        elif message["do"] == "restart":
            try:
                job.restart(message["rank"])
            except LaunchError as error:
                self._link.send({"job": number, "lost": str(error)})
        elif message["do"] == "dump_stacks":
            job.dump_stacks()
        elif message["do"] == "stop":
            job.stop(message["grace"])
            self._tell(number)
            del self._jobs[number]
            self._link.send({"job": number, "stopped": True})

    def _tell(self, number: int) -> None:
        if events := self._jobs[number].events(0.0):
            self._link.send({"job": number, "events": [to_plain(event) for event in events]})
        for log in sorted((self._folder / str(number)).glob("*.log")):
            with log.open("rb") as lines:
                lines.seek(self._sent.get(log, 0))
                text = lines.read(LOG_BYTES)
            if text:
                self._sent[log] = self._sent.get(log, 0) + len(text)
                self._link.send({"job": number, "log": log.name, "text": text.decode(errors="replace")})

    def _pass_on(self, signal: int) -> None:
        for number in self._jobs:
            event = Signalled(signal, group=self._groups[number], rank=self._ranks[number][0])
            self._link.send({"job": number, "events": [to_plain(event)]})


def on_cores(plan: Plan, ranks: list[int], usable: tuple[int, ...]) -> Plan:
    """The plan with cores of this host for the processes of `ranks`, where those that it names are not there.

    As many as it names, in order; any where there are too few.
    """
    wanted = [core for rank in ranks for core in plan.processes[rank].cores]
    if set(wanted) <= set(usable):
        return plan
    left, processes = list(usable), list(plan.processes)
    for rank in ranks:
        count = len(processes[rank].cores)
        mine = tuple(left[:count]) if len(wanted) <= len(usable) else ()
        processes[rank] = replace(processes[rank], cores=mine)
        left = left[count:]
    return replace(plan, processes=tuple(processes))


def same(here: Mapping[str, str], there: Mapping[str, str]) -> str | None:
    """What an agent's host has that this one has not, in words; None where nothing is different.

    >>> same({"keras": "3.1"}, {"keras": "3.2"})
    'keras 3.1, received 3.2'
    """
    unlike = [f"{name} {here[name]}, received {there.get(name)}" for name in here if there.get(name) != here[name]]
    return " and ".join(unlike) or None

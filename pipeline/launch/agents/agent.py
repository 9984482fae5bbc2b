"""Starts, watches and stops the processes of its host for a conductor elsewhere, over a line (`pipeline.launch.line`).

What processes tell, and write into their logs, is sent on as it comes, and kept until the conductor is done with it.
Their signs of life are folded: of each process the last one counts, and those of all go in one status a second.
"""

import base64
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path

import msgspec

from pipeline.launch import machine
from pipeline.launch.agents.alike import alike
from pipeline.launch.agents.messages import (
    Answered,
    Ask,
    Close,
    DumpStacks,
    Find,
    Found,
    Give,
    Held,
    Hello,
    Leaving,
    Logged,
    Lost,
    Message,
    Piece,
    Pulse,
    Pulses,
    Redial,
    Restart,
    Start,
    Stop,
    Stopped,
    Told,
    from_bytes,
)
from pipeline.launch.asking import Answers
from pipeline.launch.errors import LaunchError
from pipeline.launch.line.hub import Hub
from pipeline.launch.line.link import Link
from pipeline.launch.local import LocalCluster, LocalJob
from pipeline.plan.plan import Plan, from_json
from pipeline.record import commands
from pipeline.record.commands import Command, Leave
from pipeline.record.events import MODEL, SAMPLE, WEIGHTS, Beat, Event, Exited, Left, Signalled, Started
from pipeline.record.events import EventBase as Record
from pipeline.record.log import to_plain

POLL_SECONDS, PULSE_SECONDS = 0.2, 1.0
LOG_BYTES = 1 << 20
# Of a run that is to train on without a conductor, what is kept for the next one: some days of it.
DETACHED_BYTES = 1 << 30
# For how long an agent without a process goes on without a conductor that is cut off, and one that has ended.
IDLE_SECONDS, NOBODY_SECONDS = 60.0, 5.0
# For which a conductor that is away is waited for with what it is to have before a job ends.
AWAY_SECONDS = 10.0


@dataclass(frozen=True)
class Place:
    """Where an agent is among the others, and the address at which others reach its processes."""

    order: int
    address: str


@dataclass
class _Job:
    """Processes that were started together, and what the conductor is to know of them."""

    start: Start
    plan: Plan
    running: LocalJob
    folder: Path
    commands: int = 0
    exited: dict[int, int | None] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    pulses: dict[int, Pulse] = field(default_factory=dict)
    # How far each log was sent.
    sent: dict[str, int] = field(default_factory=dict)


class Agent:
    """One host's, for the conductor at the other end of a line.

    `gone` says of the line, and of how long processes may be without a conductor, whether that is to be given up; they
    save a checkpoint then, and end. `leaves`: a scheduler's signal takes this host away, while the others stay.
    """

    def __init__(
        self,
        hub: Hub,
        link: Link,
        cluster: LocalCluster,
        place: Place,
        gone: Callable[[Link, float], bool],
        leaves: bool = False,
    ) -> None:
        self._hub, self._link, self._cluster, self._place, self._gone = hub, link, cluster, place, gone
        self._leaves = leaves
        self._jobs: dict[int, _Job] = {}
        # The conductor's life, which another conductor has not.
        self._life = ""
        self._next_pulse = 0.0
        self._answers = Answers(os.environ, lambda asked, answer: self._say(Answered(asked, answer)))

    def serve(self, signalled: Callable[[], int | None]) -> int | None:
        """Does what the conductor says, to the end; returns what its command ended with.

        None where the conductor was given up, and 128 + the signal where this host `leaves`. `signalled` tells of a
        scheduler's signal, which is passed on.
        """
        told: int | None = None
        with tempfile.TemporaryDirectory(prefix="pipeline-agent-") as folder:
            try:
                while True:
                    self._wait()
                    self._meet()
                    for received in self._link.take():
                        # Before it is done: what this process does not live to do, nobody does.
                        self._link.done(received)
                        message = from_bytes(received.data)
                        if isinstance(message, Close):
                            return message.code
                        self._do(message, Path(folder))
                    self._pass_all_on()
                    if told is None and (told := signalled()) is not None:
                        self._tell_of(told)
                    if told is not None and self._leaves and self._is_done():
                        return 128 + told
                    if self._gone(self._link, self._orphan_timeout()):
                        if not self._link.refused:
                            self._save()
                        return None
            finally:
                self._answers.close()
                for job in self._jobs.values():
                    job.running.stop(0.0)

    def _orphan_timeout(self) -> float:
        """For how long it goes on without a conductor."""
        running = [job for job in self._jobs.values() if set(job.start.ranks) - job.exited.keys()]
        idle = NOBODY_SECONDS if self._link.nobody else IDLE_SECONDS
        return max((job.plan.launch.orphan_timeout for job in running), default=idle)

    def _wait(self) -> None:
        sources = [source for job in self._jobs.values() for source in job.running.sources()]
        # Where the conductor has not taken what was told, processes wait until it has.
        wait([self._hub.news, *(sources if self._link.has_room else ())], POLL_SECONDS)
        self._hub.hear()

    def _meet(self) -> None:
        """Says hello to a conductor that is another one, for which nothing runs unless it takes the other's place."""
        if self._link.life == self._life:
            return
        if self._life and not self._link.adopts:
            for job in self._jobs.values():
                job.running.stop(0.0)
            self._jobs.clear()
        self._life = self._link.life
        held = [
            Held(number, job.start.group, job.start.ranks, job.commands, {str(k): v for k, v in job.exited.items()})
            for number, job in self._jobs.items()
        ]
        here = self._cluster.inventory()
        network = machine.network()
        self._say(Hello(self._place.order, self._place.address, here, dict(alike()), held, self._life, network))

    def _do(self, message: Message, folder: Path) -> None:
        match message:
            case Start(job=number):
                self._start(message, folder / str(number))
            case Redial(address=address):
                self._hub.dial(self._link.name, address)
            case Ask():
                self._answers.ask(message.asked, message.question, message.timeout)
            case Find(asked=asked, ports=ports):
                try:
                    self._say(Found(asked, list(self._cluster.hold(self._place.address, ports))))
                except LaunchError as error:
                    self._say(Found(asked, [], str(error)))
            case Give() | Restart() | DumpStacks() | Stop() if message.job in self._jobs:
                self._do_with(self._jobs[message.job], message)

    def _start(self, message: Start, folder: Path) -> None:
        plan = on_cores(from_json(message.plan), message.ranks, machine.usable_cores())
        if plan.launch.detach:
            self._link.window = DETACHED_BYTES
        folder.mkdir()
        try:
            running = self._cluster.start(plan, message.group, folder, message.ranks)
        except LaunchError as error:
            self._say(Lost(message.job, str(error)))
            return
        self._jobs[message.job] = _Job(message, plan, running, folder)

    def _do_with(self, job: _Job, message: Give | Restart | DumpStacks | Stop) -> None:
        match message:
            case Give(command=command):
                job.commands += 1
                job.running.send(in_folder(commands.from_json(command), job.folder))
            case Restart(rank=rank):
                try:
                    job.running.restart(rank)
                    job.exited.pop(rank, None)
                except LaunchError as error:
                    self._say(Lost(message.job, str(error)))
            case DumpStacks():
                job.running.dump_stacks()
            case Stop(grace=grace):
                job.running.stop(grace)
                self._pass_on(job)
                while self._bring(job):
                    time.sleep(0.0 if self._link.has_room else POLL_SECONDS)
                del self._jobs[message.job]
                self._say(Stopped(message.job))

    def _pass_all_on(self) -> None:
        """Sends on what all processes have told and written, and now and then their signs of life."""
        if self._link.has_room:
            for job in self._jobs.values():
                self._pass_on(job)
        if time.monotonic() >= self._next_pulse:
            self._next_pulse = time.monotonic() + PULSE_SECONDS
            if pulses := [pulse for job in self._jobs.values() for pulse in job.pulses.values()]:
                self._link.report(Pulses(pulses).to_bytes())

    def _pass_on(self, job: _Job) -> None:
        number, events = job.start.job, list[Event]()
        for event in job.running.events(0.0):
            match event:
                case Beat():
                    job.pulses[event.rank] = folded(job.pulses.get(event.rank), number, event)
                    continue
                case Started(rank=rank):
                    job.exited.pop(rank, None)
                case Exited(rank=rank, code=code):
                    job.exited[rank] = code
                case Left(rank=rank):
                    job.left.add(rank)
            events.append(event)
        if events:
            self._say(Told(number, [to_plain(event) for event in events]))
        for log in sorted(job.folder.glob("*.log")):
            at = job.sent.get(log.name, 0)
            with log.open("rb") as lines:
                lines.seek(at)
                text = lines.read(LOG_BYTES)
            if text:
                job.sent[log.name] = at + len(text)
                # A byte that is none of a text's stays one byte, so that places stay what they are.
                there = job.start.logged.get(log.name, 0) + at
                self._say(Logged(number, log.name, there, text.decode("latin-1")))
        self._bring(job)

    def _bring(self, job: _Job) -> bool:
        """Sends on a piece of a trained model, or of what it wrote here, where the run's folder is not; is more left?

        Whoever is away for too long gets none of it.
        """
        for path in (job.folder / name for name in (MODEL, WEIGHTS, SAMPLE)):
            at, size = job.sent.get(path.name, 0), path.stat().st_size if path.exists() else 0
            if at >= size or self._link.away > AWAY_SECONDS:
                continue
            if self._link.has_room:
                with path.open("rb") as file:
                    file.seek(at)
                    data = file.read(LOG_BYTES)
                job.sent[path.name] = at + len(data)
                last = at + len(data) >= size
                self._say(Piece(job.start.job, path.name, at, base64.b64encode(data).decode(), last))
            return True
        return False

    def _is_done(self) -> bool:
        """Has a host that is taken away no process any more that is to save a checkpoint?

        Where one is, the conductor has those of all hosts leave, and this one is told to stop. Where there is none,
        its own do.
        """
        if any(map(_is_kept, self._jobs.values())):
            if self._link.connection is not None:
                return False
            self._save()
        for job in self._jobs.values():
            job.running.stop(0.0)
            self._pass_on(job)
        return True

    def _tell_of(self, signal: int) -> None:
        if self._leaves:
            self._say(Leaving())
        for number, job in self._jobs.items():
            if self._leaves and not _is_kept(job):
                continue
            event = Signalled(signal, time=time.time(), group=job.start.group, rank=job.start.ranks[0])
            self._say(Told(number, [to_plain(event)]))

    def _save(self) -> None:
        """Has all processes write a checkpoint and leave, since nobody is there any more to tell them what to do."""
        for job in self._jobs.values():
            job.running.send(Leave())
        until = time.monotonic() + max((job.plan.launch.preempt_timeout for job in self._jobs.values()), default=0.0)
        while time.monotonic() < until and not all(map(_has_left, self._jobs.values())):
            wait([source for job in self._jobs.values() for source in job.running.sources()], POLL_SECONDS)
            for job in self._jobs.values():
                self._pass_on(job)

    def _say(self, message: Message) -> None:
        self._link.send(message.to_bytes())


def folded(before: Pulse | None, job: int, beat: Beat) -> Pulse:
    """The last that is known of a process, after another sign of life.

    >>> folded(Pulse(1, 0, 5.0, progress=3, cpu_seconds=1.5), 1, Beat(step=40, time=6.0))
    Pulse(job=1, rank=0, time=6.0, progress=3, cpu_seconds=1.5, step=40, validated=None)
    """
    told = {name: getattr(beat, name) for name in ("progress", "cpu_seconds", "step", "validated")}
    known = {name: value for name, value in told.items() if value is not None}
    return (before or Pulse(job, beat.rank, beat.time))._replace(time=beat.time, **known)


def _is_kept(job: _Job) -> bool:
    """Does what a job computes depend on each of its processes here? One worker of many that take turns is replaced."""
    roles = {job.plan.processes[rank].role for rank in job.start.ranks}
    return not job.plan.strategy.asynchronous or roles != {"worker"}


def _has_left(job: _Job) -> bool:
    return set(job.start.ranks) & set(job.plan.leaders) <= job.left | job.exited.keys()


def in_folder(command: Command[Record], folder: Path) -> Command[Record]:
    """The command with a folder of this host's where the run's, which it names, is not here.

    >>> in_folder(commands.Load("/nowhere"), Path("/tmp/here"))
    Load(folder='/tmp/here')
    >>> in_folder(commands.Load("/tmp"), Path("/tmp/here"))
    Load(folder='/tmp')
    """
    match command:
        case commands.Load(folder=named) | commands.Train(folder=named) if not Path(named).is_dir():
            return msgspec.structs.replace(command, folder=str(folder))
    return command


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

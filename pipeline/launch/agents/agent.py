"""Starts, watches and stops the processes of its host for a driver elsewhere.

Events of processes, and what they write into their logs, go to files, which are sent on from where the driver has them:
no process waits for a driver. Of heartbeats, the last of each kind is sent once a second, while there is a connection.
"""

import errno
import hashlib
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from multiprocessing.connection import wait
from pathlib import Path

import msgspec

from pipeline.launch import LaunchError, Line, line_to, this_machine
from pipeline.launch.agents import messages
from pipeline.launch.agents.channel import Channel
from pipeline.launch.local import LocalCluster, LocalJob
from pipeline.plan.plan import Plan, from_json
from pipeline.record import commands
from pipeline.record.events import MODEL, SAMPLE, WEIGHTS, Beat, Event, EventBase, Exited, Left, Signalled, Started
from pipeline.record.log import to_line

POLL_SECONDS, BEATS_SECONDS = 0.2, 1.0
# For how long an agent without a process waits for a driver that is cut off, and for one that has ended.
IDLE_SECONDS, NOBODY_SECONDS = 60.0, 5.0
# Stands in for folders of checkpoints that are no folders here, in the home of the agent's user.
UNHEARD = ".cache/pipeline/unheard"
# Sent at once, but for the last line.
PIECE_BYTES = 1 << 20
# For how long a driver may be away that is still sent files.
AWAY_SECONDS = 10.0
# What an agent ends with whose driver was given up, or has never come: EX_TEMPFAIL, EX_UNAVAILABLE of sysexits.h.
ABANDONED, UNREACHED = 75, 69
Gone = Callable[[Channel, float], bool]


@dataclass
class _Job:
    """Processes that were started together, and what the driver should know of them."""

    start: messages.Start
    plan: Plan
    running: LocalJob
    folder: Path
    lines: "Lines"
    commands: int = 0
    exited: dict[int, int | None] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    # By rank, and whether training or validation tells how far it is.
    beats: dict[tuple[int, bool, bool], Beat] = field(default_factory=dict)
    next_beats: float = 0.0
    sent: dict[str, int] = field(default_factory=dict)

    @property
    def is_needed(self) -> bool:
        """True if what it computes depends on each process here; one worker of many that take turns is replaced."""
        roles = {self.plan.processes[rank].role for rank in self.start.ranks}
        return not self.plan.strategy.asynchronous or roles != {"worker"}


class Agent:
    """One host's, for the driver at the other end of a channel: its number among all, and where others reach it.

    `gone(channel, seconds)` is true once a driver is given up for which processes wait so many seconds; they save a
    checkpoint then, and end. `leaves`: a scheduler's signal takes this host away, while the others stay.
    """

    def __init__(
        self, channel: Channel, cluster: LocalCluster, order: int, address: str, gone: Gone, leaves: bool = False
    ) -> None:
        self._channel, self._cluster = channel, cluster
        self._order, self._address, self._gone, self._leaves = order, address, gone, leaves
        # The jobs, and the lines of these and of those before that the driver was not done with.
        self._jobs, self._lines = dict[int, _Job](), list[Lines]()
        # The driver's life, which another driver has not.
        self._life = ""
        # Answers a doctor, from the first request on.
        self._helper: Line | None = None
        self._asking = threading.Lock()

    def serve(self, signalled: Callable[[], int | None]) -> int | None:
        """Serves the driver to its end; returns what its command ended with, or None where the driver was given up.

        `signalled` returns a scheduler's signal, which is passed on; where this host `leaves`, 128 + it is returned.
        """
        signal = None
        with tempfile.TemporaryDirectory(prefix="pipeline-agent-") as folder:
            try:
                while True:
                    sources = [source for job in self._jobs.values() for source in job.running.sources()]
                    wait([self._channel.endpoint.news, *sources], POLL_SECONDS)
                    self._channel.endpoint.hear()
                    self._meet()
                    for received in self._channel.take():
                        # Before it is done: what this process does not live to do, nobody does.
                        self._channel.done(received)
                        message = messages.from_bytes(received.data)
                        if isinstance(message, messages.Close):
                            return message.code
                        self._do(message, Path(folder))
                    for job in self._jobs.values():
                        self._pass_on(job)
                    self._forget_heard()
                    if signal is None and (signal := signalled()) is not None:
                        self._report(signal)
                    if signal is not None and self._leaves and self._is_done():
                        return 128 + signal
                    running = [job for job in self._jobs.values() if {*job.start.ranks} - job.exited.keys()]
                    timeouts = [job.plan.launch.orphan_timeout for job in running]
                    idle = NOBODY_SECONDS if self._channel.nobody else IDLE_SECONDS
                    if self._gone(self._channel, max(timeouts, default=idle)):
                        if not self._channel.refused:
                            self._save()
                        return None
            finally:
                if self._helper is not None:
                    self._helper.close()
                self._forget_heard()
                self._drop_all()

    def _meet(self) -> None:
        """Says hello to another driver, for which nothing runs unless it takes the place of the one before."""
        if self._channel.life == self._life:
            return
        if self._life and not self._channel.adopts:
            self._drop_all()
        self._life = self._channel.life
        held = {number: messages.Held(job.commands, job.exited) for number, job in self._jobs.items()}
        host, network = self._cluster.inventory(), this_machine.network()
        self._send(messages.Hello(self._order, self._address, host, messages.alike(), held, self._life, network))

    def _do(self, message: messages.Message, folder: Path) -> None:
        try:
            match message:
                case messages.Start(job=number, group=group, ranks=ranks):
                    plan = from_json(zlib.decompress(message.plan).decode())
                    plan = on_cores(plan, ranks, this_machine.usable_cores())
                    (own := folder / str(number)).mkdir()
                    self._lines.append(lines := Lines(plan, group, ranks, own))
                    self._jobs[number] = _Job(message, plan, self._cluster.start(plan, group, own, ranks), own, lines)
                case messages.Ask(number=number, request=list() as ports):
                    self._send(messages.Response(number, list(self._cluster.hold(self._address, ports))))
                case messages.Ask(number=number, request=str() as request, timeout=timeout):
                    threading.Thread(target=self._answer, args=(number, request, timeout), daemon=True).start()
                case messages.OfJob(job=number) if number in self._jobs:
                    self._do_with(self._jobs[number], message)
        except LaunchError as error:
            if isinstance(message, messages.Ask):
                self._send(messages.Response(message.number, error=str(error)))
            elif isinstance(message, messages.OfJob):
                self._send(messages.Lost(message.job, str(error)))

    def _answer(self, number: int, request: str, timeout: float) -> None:
        with self._asking:
            try:
                self._helper = self._helper or line_to(os.environ)
                response = messages.Response(number, self._helper.answer(request, timeout))
            except LaunchError as error:
                response = messages.Response(number, error=str(error))
        self._send(response)

    def _do_with(self, job: _Job, message: messages.OfJob) -> None:
        match message:
            case messages.Give(command=command):
                job.commands += 1
                job.running.send(in_folder(commands.from_json(command), job.folder))
            case messages.Restart(rank=rank):
                job.running.restart(rank)
                job.exited.pop(rank, None)
            case messages.DumpStacks():
                job.running.dump_stacks()
            case messages.Stop(grace=grace):
                job.running.stop(grace)
                while self._pass_on(job):
                    time.sleep(0.0 if self._channel.has_room else POLL_SECONDS)
                del self._jobs[message.job]
                self._send(messages.Stopped(message.job))

    def _pass_on(self, job: _Job) -> bool:
        """Sends on a piece of a job's new events and files; true if more is left for a driver that is there."""
        self._take_in(job)
        reached = self._channel.away <= AWAY_SECONDS
        more = reached and job.lines.more
        if more and self._channel.has_room and (lines := job.lines.next()):
            self._send(messages.Emitted(job.start.job, lines))
        for log in sorted(job.folder.glob("*.log")):
            self._send_piece(job, log, before=job.start.logged.get(log.name, 0))
        # What training saves where the run's folder is not.
        for path in (job.folder / name for name in (MODEL, WEIGHTS, SAMPLE)):
            size = path.stat().st_size if path.exists() else 0
            if reached and job.sent.get(path.name, 0) < size:
                self._send_piece(job, path, size)
                return True
        return more

    def _take_in(self, job: _Job) -> None:
        events = list[Event]()
        for event in job.running.events(0.0):
            match event:
                case Beat():
                    job.beats[event.rank, event.step is None, event.validated is None] = event
                    continue
                case Started(rank=rank):
                    job.exited.pop(rank, None)
                case Exited(rank=rank, code=code):
                    job.exited[rank] = code
                case Left(rank=rank):
                    job.left.add(rank)
            events.append(event)
        if lines := b"".join(map(to_line, events)):
            try:
                job.lines.append(lines)
            except OSError:
                # The disk is full, say.
                self._send(messages.Emitted(job.start.job, lines))
        if job.beats and time.monotonic() >= job.next_beats and self._channel.connection is not None:
            job.next_beats = time.monotonic() + BEATS_SECONDS
            self._send(messages.Beats(job.start.job, list(job.beats.values())))
            job.beats.clear()

    def _forget_heard(self) -> None:
        """Forgets what processes have emitted and the driver has, once it is done with all messages."""
        with self._channel.endpoint.lock:
            done = not self._channel.kept and self._channel.life == self._life
        for lines in self._lines if done else ():
            lines.heard()

    def _drop_all(self) -> None:
        """Ends all processes; what they have emitted and no driver has heard stays in files."""
        for job in self._jobs.values():
            job.running.stop(0.0)
        for lines in self._lines:
            lines.close()
        self._jobs.clear()
        self._lines.clear()

    def _send_piece(self, job: _Job, path: Path, size: int | None = None, before: int = 0) -> None:
        """Sends what is new of a file, which is whole at a size, or a log with so much `before` it at the driver."""
        at = job.sent.get(path.name, 0)
        with path.open("rb") as file:
            file.seek(at)
            data = file.read(PIECE_BYTES) if self._channel.has_room else b""
        if data:
            end = job.sent[path.name] = at + len(data)
            last = None if size is None else end >= size
            self._send(messages.Piece(job.start.job, path.name, before + at, data, last))

    def _is_done(self) -> bool:
        """True once no process of a host that is taken away has a checkpoint to save any more."""
        if any(job.is_needed for job in self._jobs.values()):
            # The driver, where there is one, has those of all hosts leave, and this one stop.
            if self._channel.connection is not None:
                return False
            self._save()
        for job in self._jobs.values():
            job.running.stop(0.0)
            self._pass_on(job)
        return True

    def _report(self, signal: int) -> None:
        if self._leaves:
            self._send(messages.Leaving())
        for number, job in self._jobs.items():
            if job.is_needed or not self._leaves:
                event = Signalled(signal, time=time.time(), group=job.start.group, rank=job.start.ranks[0])
                self._send(messages.Emitted(number, to_line(event)))

    def _save(self) -> None:
        jobs = list(self._jobs.values())
        for job in jobs:
            job.running.send(commands.Leave())
        until = time.monotonic() + max((job.plan.launch.preempt_timeout for job in jobs), default=0.0)
        while time.monotonic() < until and not all(
            {*job.start.ranks} & {*job.plan.leaders} <= job.left | job.exited.keys() for job in jobs
        ):
            wait([source for job in jobs for source in job.running.sources()], POLL_SECONDS)
            for job in jobs:
                self._pass_on(job)

    def _send(self, message: messages.Message) -> None:
        self._channel.send(messages.to_bytes(message))


def in_folder(command: commands.Command[EventBase], folder: Path) -> commands.Command[EventBase]:
    """The command with a folder of this host where the run's folder, which it names, is not here.

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
    """The plan with as many cores of this host for some ranks, if it names others; with none, if there are too few."""
    named = [core for rank in ranks for core in plan.processes[rank].cores]
    if set(named) <= set(usable):
        return plan
    left, processes = iter(usable if len(named) <= len(usable) else ()), list(plan.processes)
    for rank in ranks:
        processes[rank] = replace(processes[rank], cores=tuple(islice(left, len(processes[rank].cores))))
    return replace(plan, processes=tuple(processes))


class Lines:
    """Lines of a job's processes that the driver lacks: a file that is sent on from an offset until it has all of it.

    It is in `folder`; the chief's lies beside the run's checkpoints and outlives the agent, and the next chief's agent
    sends what is left there.
    """

    def __init__(self, plan: Plan, group: str, ranks: Iterable[int], folder: Path) -> None:
        # Those that others have left are sent first, see `messages.unheard`. Names are in the order of time.
        self._left, name = list[Path](), f"unheard-{time.time_ns()}.jsonl"
        self._own = folder / name
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        if plan.checkpoint.folder is not None and group == "point" and 0 in ranks:
            places = list[Path]()
            for each in filter(None, [plan.checkpoint.before, plan.checkpoint.folder]):
                digest = hashlib.sha256(each.encode()).hexdigest()
                places.append(Path.home() / UNHEARD / digest[:16] if "://" in each else Path(each))
            with suppress(OSError):
                places[-1].mkdir(parents=True, exist_ok=True)
                left = [path for place in places for path in place.glob("unheard-*.jsonl")]
                self._left = sorted(left, key=lambda path: path.name)
                self._file, self._own = os.open(places[-1] / name, flags, 0o644), places[-1] / name
        if self._own == folder / name:
            self._file = os.open(self._own, flags, 0o644)
        # Files that are yet to be sent, and how much of the first of them was.
        self._files: list[Path | int] = [*self._left, self._file]
        self._sent = 0

    @property
    def more(self) -> bool:
        """True if there are lines that were not sent."""
        return len(self._files) > 1 or self._sent < os.fstat(self._file).st_size

    def append(self, lines: bytes) -> None:
        """Writes lines, all or none. Raises `OSError`."""
        size = os.fstat(self._file).st_size
        try:
            if os.write(self._file, lines) < len(lines):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            os.ftruncate(self._file, size)
            raise

    def next(self) -> bytes:
        """Returns the next lines to be sent; empty if none of these are for the driver."""
        lines, first = list[bytes](), self._files[0]
        with suppress(FileNotFoundError), open(first, "rb", closefd=first != self._file) as file:
            file.seek(self._sent)
            lines = file.readlines(PIECE_BYTES)
        self._sent += sum(map(len, lines))
        if first == self._file:
            return b"".join(lines)
        if not lines:
            self._files.pop(0)
            self._sent = 0
        return messages.unheard(lines)

    def heard(self) -> None:
        """Removes what was sent, which the driver has, unless there is more."""
        if self.more:
            return
        while self._left:
            self._left.pop().unlink(missing_ok=True)
        if self._sent:
            os.ftruncate(self._file, 0)
            self._sent = 0

    def close(self) -> None:
        """Closes the file, and removes it if it is empty, with a folder that has nothing else."""
        is_empty = not os.fstat(self._file).st_size
        os.close(self._file)
        if is_empty:
            with suppress(OSError):
                self._own.unlink()
                self._own.parent.rmdir()

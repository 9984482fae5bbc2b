"""A job whose processes are on several hosts, started and watched there by agents."""

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.launch.agents.conductor import POLL_SECONDS, Agents, Said
from pipeline.launch.agents.messages import (
    DumpStacks,
    Give,
    Held,
    Logged,
    Lost,
    Message,
    Piece,
    Pulse,
    Restart,
    Start,
    Stop,
    Stopped,
    Told,
)
from pipeline.launch.errors import LaunchError
from pipeline.launch.local import LocalCluster, LocalJob
from pipeline.plan.plan import Plan
from pipeline.record.commands import Command
from pipeline.record.events import Beat, Event, Exited, Started, Unreachable, Warned
from pipeline.record.events import EventBase as Record
from pipeline.record.log import from_plain, stamped

# Before it is said that others are waited for; for how long an agent that was told to stop is waited for, and one to
# whom there is no line.
SAY_SECONDS, STOP_SECONDS, AWAY_SECONDS = 3.0, 10.0, 3.0


@dataclass(frozen=True)
class Taken:
    """A job that an earlier conductor has started: its number, and what each agent that has it says of it."""

    number: int
    held: Mapping[str, Held]


class RemoteJob:
    """Processes of one plan, on the hosts of agents. They are started once there is a line to every agent.

    `where` names the agent of each rank; `here` starts those ranks that it does not name. An agent that has never been
    there is waited for up to `timeout` seconds, one whose host counts as gone for `returns` seconds more; meanwhile
    `missing` is asked again and again, and says what is to be done about them. A job that is `taken` over was started
    by an earlier conductor: commands that its agents were given are not sent again.
    """

    def __init__(
        self,
        agents: Agents,
        plan: Plan,
        group: str,
        folder: Path,
        where: Mapping[int, str],
        *,
        missing: Callable[[Sequence[str]], str],
        timeout: float,
        returns: float,
        here: LocalCluster | None = None,
        taken: Taken | None = None,
    ) -> None:
        self._agents, self._plan, self._group, self._folder = agents, plan, group, folder
        self._where, self._missing, self._timeout, self._local = where, missing, timeout, here
        self._returns = returns
        self._number = agents.number() if taken is None else taken.number
        self._here: LocalJob | None = None
        # Ranks that wait for a line to their agent, since when, and whether that was said.
        self._pending = set(where)
        self._since, self._said = time.monotonic(), False
        self._running = set[int]()
        self._waiting: list[Event] = []
        # What was said, whose events have been given away: they are recorded once there are asked others.
        self._given: list[Said] = []
        self._pulses: dict[int, Pulse] = {}
        # Agents that have a part of the job, and those whose part has ended.
        self._begun, self._stopped = set[str](), set[str]()
        self._gone = set[str]()
        # Commands that were sent, and of those how many an agent was given by an earlier conductor.
        self._sent, self._given_before = 0, dict[str, int]()
        # Agents that should have a part of the job, and have not.
        self._absent = set[str]()
        if taken is not None:
            self._take_over(taken)

    @property
    def number(self) -> int:
        """By which its agents know it."""
        return self._number

    @property
    def hosts(self) -> set[str]:
        """The names of its agents."""
        return set(self._where.values())

    def events(self, timeout: float) -> list[Event]:
        """What has come in; waits up to `timeout` seconds for something. Raises `LaunchError`."""
        for said in self._given:
            self._agents.done(said)
        self._given = []
        self._start_pending()
        sources = [] if self._here is None else self._here.sources()
        self._agents.listen_to(sources, 0.0 if self._waiting else min(timeout, POLL_SECONDS))
        for text in self._agents.warnings():
            self._add(0, Warned(text))
        for said in self._agents.about(self._number):
            self._given.append(said)
            self._take(said)
        for pulse in self._agents.pulses(self._number):
            self._waiting += self._beats(pulse)
        self._look_at_lines()
        waiting, self._waiting = self._waiting, []
        return waiting + (self._here.events(0.0) if self._here is not None else [])

    def send(self, command: Command[Record]) -> None:
        """Gives every process a command; one that is gone is left to its `exited` event."""
        if self._here is not None:
            self._here.send(command)
        self._sent += 1
        for name in self._begun:
            if self._sent > self._given_before.get(name, 0):
                self._agents.say(name, Give(self._number, command.to_json()))

    def restart(self, rank: int) -> None:
        """Ends a process, if it still is one, and starts it anew, at the same address, once its host answers."""
        name = self._where.get(rank)
        if name is None:
            assert self._here is not None, "it was started"
            self._here.restart(rank)
        elif name in self._begun and self._agents.takes(name):
            self._agents.say(name, Restart(self._number, rank))
        else:
            self._pending.add(rank)
            self._since, self._said = time.monotonic(), False

    def dump_stacks(self) -> None:
        """Has every process write its stack to its log."""
        if self._here is not None:
            self._here.dump_stacks()
        self._say(DumpStacks(self._number))

    def stop(self, grace: float) -> None:
        """Ends every process, killing those that have not ended after `grace` seconds. Returns when none is left.

        But those of a host that cannot be reached: they end once it can be, or else by themselves.
        """
        if self._agents.left:
            return
        self._pending.clear()
        self._say(Stop(self._number, grace))
        if self._here is not None:
            self._here.stop(grace)
        until = time.monotonic() + grace + STOP_SECONDS
        while True:
            for said in self._agents.about(self._number):
                self._given.append(said)
                self._write(said)
                # As long as a trained model comes, it is waited for.
                until = max(until, time.monotonic() + STOP_SECONDS)
            if not any(map(self._is_there, self._begun - self._stopped)) or time.monotonic() > until:
                break
            self._agents.listen_to((), POLL_SECONDS)
        for said in self._given:
            self._agents.done(said)
        self._agents.over(self._number)

    def _take_over(self, taken: Taken) -> None:
        """Goes on with what its agents have."""
        self._pending.clear()
        self._begun, self._absent = set(taken.held), set(self._where.values()) - set(taken.held)
        self._given_before = {name: held.commands for name, held in taken.held.items()}
        exited = {int(rank): code for held in taken.held.values() for rank, code in held.exited.items()}
        self._running = set(self._where) - exited.keys()
        for rank, code in exited.items():
            self._add(rank, Exited(code))

    def _say(self, message: Message) -> None:
        for name in self._begun:
            self._agents.say(name, message)

    def _is_there(self, name: str) -> bool:
        """Is there a line to an agent, or none for so short that it may come back?"""
        return self._agents.is_there(name, AWAY_SECONDS)

    def _start_pending(self) -> None:
        """Starts what waits for its agent, all at once, as they wait for each other anyway."""
        if not self._pending and (self._here is not None or self._local is None):
            return
        names = sorted({self._where[rank] for rank in self._pending})
        absent = [name for name in names if not self._agents.takes(name)]
        waited = time.monotonic() - self._since
        if absent:
            text = self._missing(absent)
            if any(name not in self._agents.known for name in absent) and waited > self._timeout:
                raise LaunchError(text)
            if waited > SAY_SECONDS and not self._said:
                self._said = True
                self._add(0, Warned(f"{' and '.join(absent)} do{'es' * (len(absent) == 1)} not answer yet."))
            return
        if self._here is None and self._local is not None:
            mine = [process.rank for process in self._plan.processes if process.rank not in self._where]
            self._here = self._local.start(self._plan, self._group, self._folder, mine)
        plan = self._plan.to_json()
        for name in names:
            ranks = sorted(rank for rank in self._pending if self._where[rank] == name)
            self._begun.add(name)
            self._agents.say(name, Start(self._number, self._group, plan, ranks, self._logged(ranks)))
            self._running |= set(ranks)
        self._pending.clear()

    def _logged(self, ranks: Sequence[int]) -> dict[str, int]:
        """Bytes that the logs of some ranks have already, of an earlier attempt."""
        logs = [self._folder / f"{self._group}-{rank}.log" for rank in ranks]
        return {log.name: log.stat().st_size for log in logs if log.exists()}

    def _take(self, said: Said) -> None:
        """Takes in what an agent has said."""
        self._write(said)
        match said.message:
            case Told(events=events):
                for event in map(from_plain, events):
                    self._waiting.append(stamped(event, time.time(), self._group))
                    if isinstance(event, Exited):
                        self._running.discard(event.rank)
                    elif isinstance(event, Started):
                        self._running.add(event.rank)
            case Lost(error=error):
                raise LaunchError(f"{said.name}: {error}")

    def _write(self, said: Said) -> None:
        """Writes what was written elsewhere where it belongs, a second time without effect, and notes who is done."""
        match said.message:
            case Logged(name=name, at=at, text=text):
                with (self._folder / Path(name).name).open("ab"):
                    pass
                with (self._folder / Path(name).name).open("r+b") as log:
                    log.seek(at)
                    log.write(text.encode("latin-1"))
            case Piece(name=name, at=at, data=data, last=last):
                self._put(Path(name).name, at, base64.b64decode(data), last)
            case Stopped():
                self._stopped.add(said.name)

    def _put(self, name: str, at: int, data: bytes, last: bool) -> None:
        """Writes a piece of a file, which has its name once it is whole. A piece that comes again changes nothing."""
        partial, whole = self._folder / f".partial.{name}", self._folder / name
        if at and not partial.exists():
            return
        with partial.open("r+b" if at else "wb") as file:
            file.seek(at)
            file.write(data)
        if last:
            partial.rename(whole)

    def _beats(self, pulse: Pulse) -> list[Event]:
        """The signs of life that a process has given since the last."""
        before = self._pulses.get(pulse.rank)
        self._pulses[pulse.rank] = pulse
        if before is not None and pulse.time == before.time:
            return []
        by = {"time": pulse.time, "group": self._group, "rank": pulse.rank}
        beats: list[Event] = [Beat(pulse.progress, pulse.cpu_seconds, **by)]  # type: ignore[arg-type]
        for name in ("step", "validated"):
            value = getattr(pulse, name)
            if value is not None and (before is None or getattr(before, name) != value):
                beats.append(Beat(**by, **{name: value}))  # type: ignore[arg-type]
        return beats

    def _look_at_lines(self) -> None:
        """Tells of processes on hosts that were not heard of for so long that they count as gone."""
        limit = self._plan.launch.heartbeat_timeout
        for name in {self._where[rank] for rank in self._pending | self._running} - self._gone:
            known = self._agents.known.get(name)
            ranks = sorted(rank for rank in self._pending | self._running if self._where[rank] == name)
            if known is None:
                # It was never there: as long as it may come, see `_start_pending`.
                if name in self._absent:
                    self._gone.add(name)
                    for rank in ranks:
                        self._add(rank, Unreachable(name, limit))
                continue
            another = name in self._absent or (name in self._begun and not known.is_there)
            away = known.link.away
            if another or away > limit + (self._returns if name not in self._begun else 0.0):
                self._gone.add(name)
                for rank in ranks:
                    self._add(rank, Unreachable(name, None if another else away))

    def _add(self, rank: int, event: Event) -> None:
        self._waiting.append(stamped(event, time.time(), self._group, rank))

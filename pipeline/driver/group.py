"""The processes of one plan: commanded, watched while they respond, and ended when one of them cannot go on."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path

from msgspec.structs import replace

from pipeline.driver.session import Preemption
from pipeline.driver.watch import RunFailed, Watch
from pipeline.errors import UserError
from pipeline.launch import Cluster, Job
from pipeline.launch.signals import PREEMPTING
from pipeline.launch.this_machine import joules
from pipeline.plan.plan import Plan
from pipeline.record import commands, events
from pipeline.record.log import to_line

POLL_SECONDS, STACK_SECONDS = 0.2, 0.5
# What ends the warning that a worker was started again.
REPLACED = "the steps that it was making are made again, by any worker."


class Replay:
    """The events of an attempt that were logged since it `began`, for a new driver to hear before its processes' own.

    That driver sends the same commands in the same order, and gets the logged events as responses. Commands that
    processes have are not sent again (`pipeline.launch.agents.remote`), nor are logged events written again.
    """

    def __init__(self, logged: Sequence[events.Event], began: float, live: Callable[[], None] = lambda: None) -> None:
        self.logged = list(logged)
        self._waiting: dict[str | None, deque[events.Event]] = defaultdict(deque)
        for event in logged:
            self._waiting[event.group].append(event)
        # The driver emits its own again, at another time.
        self._own = Counter(hash(to_line(replace(event, time=0.0))) for event in self._waiting.pop(None, ()))
        self._logged = {hash(to_line(event)) for event in logged if event.group is not None}
        self._time, self._live, self._is_live = began, live, False

    def clock(self) -> float:
        """Seconds since 1970; while events are replayed, when they were logged."""
        return time.time() if self._is_live else self._time

    def is_logged(self, event: events.Event) -> bool:
        """True for an event that the log has already."""
        if isinstance(event, events.PASSING):
            return False
        if event.group is not None:
            return hash(to_line(event)) in self._logged
        line = hash(to_line(replace(event, time=0.0)))
        self._own[line] -= 1
        return self._own[line] >= 0

    def next_of(self, group: str) -> events.Event | None:
        """The next logged event of a group; None after its last, when `live` is called once."""
        if self._waiting[group]:
            event = self._waiting[group].popleft()
            self._time = max(self._time, event.time)
            return event
        if not self._is_live:
            self._is_live = True
            self._live()
        return None

    def drop(self) -> None:
        """Drops what is left: another attempt begins."""
        self._waiting.clear()
        self._own.clear()


@dataclass(eq=False)
class Group:
    """The processes of one plan: a job, the watch over it, and the plan. Their events go to `_emit`."""

    cluster: InitVar[Cluster]
    plan: Plan
    name: str
    folder: Path
    _emit: Callable[[events.Event], None]
    _preemption: Preemption
    _replay: Replay | None = None
    # How lost workers were replaced, in words.
    replaced: list[str] = field(default_factory=list)
    # How long this group worked on commands, and the others waited.
    seconds: float = 0.0
    # What this host used meanwhile; None if no counter can be read, or the use before a takeover is not known.
    joules: float | None = field(init=False)
    _stopped: bool = False

    def __post_init__(self, cluster: Cluster) -> None:
        self._watch, self.joules = Watch(self.plan), 0.0 if self._replay is None else None
        # Seconds; of events that are replayed, those when they were logged.
        self.clock = time.monotonic if self._replay is None else self._replay.clock
        # The last events of processes whose training was over.
        self._finished: dict[int, events.Finished] = {}
        if not self.folder.is_dir():
            expected, instead = "the run's folder to stay while it trains", "the same command again, for another run"
            raise RunFailed(str(UserError(expected, f"no {self.folder} any more", instead)), None, lost=False)
        self.job: Job = cluster.start(self.plan, self.name, self.folder)

    def joined(self) -> dict[int, events.Joined]:
        """The event of each process once all have joined. Raises `RunFailed`."""
        return self._await(events.Joined, range(len(self.plan.processes)))

    def request(self, command: commands.Command[commands.Response]) -> dict[int, commands.Response]:
        """Sends a command, and returns the responses once all have responded. Raises `RunFailed`."""
        self.send(command)
        return self.responses(command)

    def send(self, command: commands.Command[events.EventBase]) -> None:
        """Sends a command whose responses are waited for later."""
        self._watch.commanded(time.monotonic())
        self.job.send(command)

    def responses(self, command: commands.Command[commands.Response]) -> dict[int, commands.Response]:
        """Each process's response to a command that was sent. Raises `RunFailed`."""
        return self._await(command.response_type(), self.plan.leaders)

    def _await(self, response: type[commands.Response], ranks: Sequence[int]) -> dict[int, commands.Response]:
        began, counted = self.clock(), joules()
        responses: dict[int, commands.Response] = {}
        while not responses.keys() >= set(ranks):
            # Often enough for a counter that begins anew.
            next(counted)
            for event in self._events():
                if isinstance(event, response):
                    responses[event.rank] = event
                    self._watch.processes[event.rank].responded = True
            self._preemption.heed()
            for rank, why in self._watch.to_replace(time.monotonic()).items():
                self.job.restart(rank)
                text = f"{why}. It was started again; {REPLACED}"
                self.replaced.append(text)
                self._emit(events.Warned(text, time=time.time(), group=self.name, rank=rank))
            if failure := self._watch.failure(time.monotonic()):
                if failure.stuck:
                    self.job.dump_stacks()
                    time.sleep(STACK_SECONDS)
                self.stop()
                failure.log = None if failure.rank is None else self.folder / f"{self.name}-{failure.rank}.log"
                raise failure
        used = next(counted)
        self.joules = None if self.joules is None or used is None else self.joules + used
        self.seconds += self.clock() - began
        return responses

    def begin(self) -> None:
        """Starts training; from now on, asynchronous workers can be replaced."""
        self._watch.replacing = True
        self.job.send(commands.Begin())

    def save_and_leave(self) -> dict[int, events.Finished] | None:
        """Makes processes save and leave, in time for a scheduler or person; their last events if training was over."""
        self.job.send(commands.Leave())
        until = time.monotonic() + self._preemption.patience(self.plan.launch.preempt_timeout)
        left, leaders = set[int](), set(self.plan.leaders)
        while time.monotonic() < until and not left | self._finished.keys() >= leaders:
            left |= {event.rank for event in self._events() if isinstance(event, events.Left | events.Exited)}
        return self._finished if self._finished.keys() >= leaders else None

    def leave(self) -> None:
        """Ends the processes in order."""
        if not self._stopped:
            self._watch.leaving, self._watch.replacing = True, False
            self.job.send(commands.Exit())
            self.stop(self.plan.launch.stop_timeout)

    def stop(self, grace: float = 0.0) -> None:
        """Ends the processes however they are, once they have had some seconds to end by themselves."""
        if not self._stopped:
            self._stopped = True
            self.job.stop(grace)

    def _events(self) -> list[events.Event]:
        """Takes in and emits the next event to be replayed; after the last, those that come in and are not logged."""
        replay = self._replay
        if replay and (event := replay.next_of(self.name)):
            following = [event]
        else:
            following = [one for one in self.job.events(POLL_SECONDS) if not (replay and replay.is_logged(one))]
        for event in following:
            self._watch.note(event, time.monotonic())
            match event:
                case events.Signalled(signal=number):
                    self._preemption.ask(number, f"{self.plan.processes[event.rank].role} {event.rank}")
                case events.Exited(code=int(code)) if -code in PREEMPTING:
                    # It ended the process before that could take it.
                    self._preemption.ask(-code, f"{self.plan.processes[event.rank].role} {event.rank}")
                case events.Finished():
                    self._finished[event.rank] = event
                case events.Warned(text=text) if text.endswith(REPLACED):
                    # By the driver before this one.
                    self.replaced.append(text)
            self._emit(event)
        return following

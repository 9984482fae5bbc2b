"""The processes of one plan, asked and answering, watched meanwhile, and ended when one of them cannot go on."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pipeline.analyze import energy
from pipeline.launch import Cluster, Job
from pipeline.launch.signals import PREEMPTING
from pipeline.plan.plan import Plan
from pipeline.record import commands
from pipeline.record.commands import Answer, Command
from pipeline.record.events import Event, Exited, Finished, Joined, Left, Signalled, Told, Warned
from pipeline.run.errors import RunFailed
from pipeline.run.preemption import Preemption
from pipeline.run.watch import Failure, Watch

POLL_SECONDS = 0.2


# How it is told of a worker that was started again.
REPLACED = "the steps that it was making are made again, by any worker."
# Time for processes to write their stacks before they are killed.
STACK_SECONDS = 0.5


class Group:
    """The processes of one plan: a job, the watch over it, and the plan."""

    def __init__(
        self,
        cluster: Cluster,
        plan: Plan,
        name: str,
        folder: Path,
        tell: Callable[[Event], None],
        preemption: Preemption,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.plan, self.name, self.folder, self._tell = plan, name, folder, tell
        self._preemption, self.clock = preemption, clock
        self._watch = Watch(plan)
        self._stopped = False
        # What processes told when training was over for them.
        self._finished: dict[int, Finished] = {}
        # What was done about workers that were lost, in words.
        self.replaced: list[str] = []
        # How long this group was asked for something, and the others waited.
        self.seconds = 0.0
        # What this host used meanwhile; None where no counter can be read.
        self.joules: float | None = 0.0
        self.job: Job = cluster.start(plan, name, folder)

    def joined(self) -> dict[int, Joined]:
        """What each process tells once all have joined. Raises `RunFailed`."""
        return self._answers(Joined, range(len(self.plan.processes)))

    def ask(self, command: Command[Answer]) -> dict[int, Answer]:
        """Gives a command, and returns the answers once all have given theirs. Raises `RunFailed`."""
        self.tell(command)
        return self.answers(command)

    def tell(self, command: Command[Told]) -> None:
        """Gives a command whose answers are to be waited for later."""
        self._watch.asked(time.monotonic())
        self.job.send(command)

    def answers(self, command: Command[Answer]) -> dict[int, Answer]:
        """Each process's answer to a command that was told. Raises `RunFailed`."""
        return self._answers(command.answered_by(), self.plan.leaders)

    def _answers(self, answer: type[Answer], ranks: Sequence[int]) -> dict[int, Answer]:
        began, meter = self.clock(), energy.Meter()
        answers: dict[int, Answer] = {}
        while not answers.keys() >= set(ranks):
            # Often enough for a counter that begins anew.
            meter.joules()
            for event in self._events():
                if isinstance(event, answer):
                    answers[event.rank] = event
                    self._watch.answer(event.rank)
            self._preemption.heed()
            self._replace(self._watch.to_replace(time.monotonic()))
            failure = self._watch.failure(time.monotonic())
            if failure:
                self._fail(failure)
        used = meter.joules()
        self.joules = None if self.joules is None or used is None else self.joules + used
        self.seconds += self.clock() - began
        return answers

    def begin(self) -> None:
        """Has the processes begin training; from now on, asynchronous workers can be replaced."""
        self._watch.replacing = True
        self.job.send(commands.Begin())

    def save_and_leave(self) -> dict[int, Finished] | None:
        """Has the processes write a checkpoint and leave, within `preempt_timeout`, or seconds where a person waits.

        Returns what they told where training turned out to be over.
        """
        self.job.send(commands.Leave())
        until = time.monotonic() + self._preemption.patience(self.plan.launch.preempt_timeout)
        left, leaders = set[int](), set(self.plan.leaders)
        while time.monotonic() < until and not left | self._finished.keys() >= leaders:
            left |= {event.rank for event in self._events() if isinstance(event, Left | Exited)}
        return self._finished if self._finished.keys() >= leaders else None

    def leave(self) -> None:
        """Ends the processes in order."""
        if self._stopped:
            return
        self._watch.leaving, self._watch.replacing = True, False
        self.job.send(commands.Exit())
        self.stop(self.plan.launch.stop_timeout)

    def stop(self, grace: float = 0.0) -> None:
        """Ends the processes however they are, once they have had some seconds to end by themselves."""
        if not self._stopped:
            self._stopped = True
            self.job.stop(grace)

    def _events(self) -> list[Event]:
        """What has come in, told on."""
        found = self.job.events(POLL_SECONDS)
        for event in found:
            self._watch.note(event, time.monotonic())
            number = _scheduled(event)
            if number is not None:
                self._preemption.ask(number, f"{self.plan.processes[event.rank].role} {event.rank}")
            if isinstance(event, Finished):
                self._finished[event.rank] = event
            elif isinstance(event, Warned) and event.text.endswith(REPLACED):
                # By the conductor before this one.
                self.replaced.append(event.text)
            self._tell(event)
        return found

    def _replace(self, gone: Mapping[int, str]) -> None:
        for rank, why in gone.items():
            self.job.restart(rank)
            text = f"{why}. It was started again; {REPLACED}"
            self.replaced.append(text)
            self._tell(Warned(text, time=time.time(), group=self.name, rank=rank))

    def _fail(self, failure: Failure) -> None:
        if failure.stuck:
            self.job.dump_stacks()
            time.sleep(STACK_SECONDS)
        self.stop()
        log = None if failure.rank is None else self.folder / f"{self.name}-{failure.rank}.log"
        raise RunFailed(failure, log)


def _scheduled(event: Event) -> int | None:
    """The scheduler's signal that a process got, or, before it could take one, ended by; None for all else."""
    match event:
        case Signalled(signal=number):
            return number
        case Exited(code=int(code)) if -code in PREEMPTING:
            return -code
    return None

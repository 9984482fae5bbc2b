"""Turns a name into processes that train when they are told to, and wait without computing when they are not.

Ours are what a person gets: a config, its plan, and the worker's own commands. A rival's life is in `rivals`.
"""

import contextlib
import dataclasses
import multiprocessing as mp
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any

import psutil
import rivals

from pipeline.analyze import measure
from pipeline.config import config as configs
from pipeline.config.composing import Composer
from pipeline.config.schema import Config
from pipeline.driver import timing
from pipeline.driver.group import Group, Preemption, RunFailed
from pipeline.launch import this_machine as machines
from pipeline.launch.local import LocalCluster
from pipeline.plan import planning
from pipeline.plan.plan import Plan
from pipeline.record import commands
from pipeline.record.events import Event, Started

ANSWER_SECONDS = 300.0
# Steps of about this long run before each timed stretch and are left out.
WARMUP_SECONDS = 0.25
TRAIN_EXAMPLES = 16_384
# Steps after the first one from which a process of ours says its pace.
CALIBRATION_STEPS = 3


Context = ForkServerContext | SpawnContext


class ContestantFailed(RuntimeError):
    """A contestant that cannot go on: the message says why."""


@dataclass(frozen=True)
class Timed:
    """One timed stretch: training examples per second, and milliseconds a step."""

    examples_per_second: float
    step_ms: float


class Ours:
    """Processes of our own, one group for each plan; several groups train beside each other and never talk."""

    def __init__(self, cluster: LocalCluster, plans: Sequence[Plan], name: str, folder: Path) -> None:
        began = time.monotonic()
        self.pids: list[int] = []
        self._groups: list[Group] = []
        try:
            for index, plan in enumerate(plans):
                self._groups.append(Group(cluster, plan, f"{name}-{index}", folder, self._note, Preemption()))
            for group in self._groups:
                group.joined()
                timing.build(group)
                if group.plan.is_checked:
                    group.request(commands.Check())
            self._pace = max(
                answer.step_seconds
                for group in self._groups
                for answer in group.request(commands.Calibrate(None)).values()
            )
        except BaseException as failure:
            self.stop()
            if isinstance(failure, RunFailed):
                raise ContestantFailed(f"{failure} ({failure.log})") from failure
            raise
        # The first step's call is followed by those that say the pace.
        self.first_seconds = time.monotonic() - began - CALIBRATION_STEPS * self._pace
        self.steps_per_call = measure.steps_per_call(self._pace)

    def time(self, seconds: float) -> Timed:
        """Trains for about so many seconds. Groups start at the same moment, and their throughputs are added."""
        warmup = _whole(WARMUP_SECONDS, self._pace, self.steps_per_call, least=1)
        steps = _whole(seconds, self._pace, self.steps_per_call, least=2)
        command = commands.Measure(0, warmup, steps, self.steps_per_call)
        try:
            first, *rest = self._groups
            for group in rest:
                group.send(command)
            repeats = [measure.slowest(first.request(command))]
            repeats += [measure.slowest(group.responses(command)) for group in rest]
        except RunFailed as failure:
            raise ContestantFailed(f"{failure} ({failure.log})") from failure
        self._pace = max(repeat.seconds for repeat in repeats) / steps
        return Timed(sum(repeat.examples_per_second for repeat in repeats), 1_000 * self._pace)

    def stop(self) -> None:
        """Ends the processes."""
        for group in self._groups:
            group.stop()

    def _note(self, event: Event) -> None:
        if isinstance(event, Started) and event.pid is not None:
            self.pids.append(event.pid)


class Rival:
    """The processes of one rival."""

    def __init__(self, spec: rivals.Spec, name: str, folder: Path) -> None:
        began = time.monotonic()
        # The same fork server as ours, so that a rival starts with TensorFlow imported; on JAX, a process of its own.
        context: Context = mp.get_context("spawn" if spec.backend == "jax" else "forkserver")
        self.steps_per_call = spec.steps_per_call
        self._processes, self._pipes = [], []
        for rank in range(max(1, len(spec.addresses))):
            pipe, theirs = context.Pipe()
            log = str(folder / f"{name}-{rank}.log")
            process = context.Process(target=rivals.main, args=(spec, rank, theirs, log), name=name, daemon=True)
            with _backend(spec.backend):
                process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(pipe)
        self.pids = [process.pid for process in self._processes if process.pid]
        try:
            self._pace = max(answer["step_seconds"] for answer in self._answers())
            after = (1 + rivals.PACE_STEPS) * spec.steps_per_call
            self.first_seconds = time.monotonic() - began - after * self._pace
        except BaseException:
            self.stop()
            raise

    def time(self, seconds: float) -> Timed:
        """Trains for about so many seconds; the slowest process decides."""
        warmup = _whole(WARMUP_SECONDS, self._pace, self.steps_per_call, least=1)
        steps = _whole(seconds, self._pace, self.steps_per_call, least=2)
        for pipe in self._pipes:
            pipe.send((warmup, steps))
        answers = self._answers()
        taken = max(answer["seconds"] for answer in answers)
        self._pace = taken / steps
        return Timed(answers[0]["examples"] / taken, 1_000 * self._pace)

    def stop(self) -> None:
        """Ends the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.close()
            process.kill()
            process.join()

    def _answers(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + ANSWER_SECONDS
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                raise ContestantFailed(f"no answer within {ANSWER_SECONDS:g} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                raise ContestantFailed("its process died") from None
            if "error" in answers[-1]:
                raise ContestantFailed(answers[-1]["error"])
        return answers


class Load:
    """What share of this machine others compute on, beside the processes that are ours to count."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._mine = [psutil.Process(pid) for pid in pids] + [psutil.Process()]
        self._began, self._busy, self._own = time.monotonic(), _busy(), self._used()

    def others(self) -> float:
        """Their share of all cores since this object was made, 0 to 1."""
        elapsed = (time.monotonic() - self._began) * (psutil.cpu_count() or 1)
        others = _busy() - self._busy - (self._used() - self._own)
        return max(0.0, others / elapsed)

    def _used(self) -> float:
        return float(sum(sum(process.cpu_times()[:2]) for process in self._mine))


def make_plan(
    strategy: str, model: str, workers: int, replica_batch: int, ports: tuple[int, ...], *others: str
) -> Plan:
    """The plan that a person gets who types these choices; a strategy of one process needs no `ports`."""
    made = planning.make(make_config(strategy, model, workers, replica_batch, *others), machines.detect(os.environ))
    return planning.listening(made, [f"127.0.0.1:{port}" for port in ports])


def make_config(strategy: str, model: str, workers: int, replica_batch: int, *others: str) -> Config:
    """The config of these choices and `others`, on CPU devices and, where these name no data, synthetic ones."""
    configs.register()
    spans = [f"workers={workers}"] if strategy in ("mirrored", "multi_worker") else []
    data = ("data=synthetic", f"data.build.train_examples={TRAIN_EXAMPLES}")
    if any(other.startswith("data=") for other in others):
        data = ()
    overrides = [
        *(f"strategy={strategy}", f"model={model}", *spans, "hardware=2cpu", "tracking=none", *data, *others),
        f"hardware.devices_per_host={workers}",
        f"train.replica_batch={replica_batch}",
        "tracking.system_metrics_seconds=0",
    ]
    return configs.typed_as(Config, Composer("config", Config, None).composed(overrides)[0])


def alone(planned: Plan) -> list[Plan]:
    """For each process of a plan, one that trains by itself on the same cores, with no strategy."""
    one = planning.baseline_of(planned, machines.detect(os.environ))
    return [
        dataclasses.replace(one, processes=(dataclasses.replace(one.processes[0], cores=process.cores),))
        for process in planned.processes
    ]


@contextlib.contextmanager
def _backend(name: str) -> Iterator[None]:
    """The environment that a process is started with, whose Keras is to compute by a backend; put back afterwards."""
    kept = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = name
    try:
        yield
    finally:
        os.environ.pop("KERAS_BACKEND")
        if kept is not None:
            os.environ["KERAS_BACKEND"] = kept


def _whole(seconds: float, pace: float, per_call: int, least: int) -> int:
    """Steps of about so many seconds, in whole calls.

    >>> _whole(1.0, pace=0.06, per_call=4, least=2)
    16
    """
    return per_call * max(least, round(seconds / (pace * per_call)))


def _busy() -> float:
    """Seconds that all cores together have computed for processes of usual priority since the machine started.

    Processes that are nice leave a core to whoever wants it; interrupts, many under multi_worker, are nobody's.
    """
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "steal", 0.0))

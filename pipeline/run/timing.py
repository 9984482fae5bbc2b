"""Has processes build what they train and time their steps, in turn with a baseline, and keeps what they measured."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pipeline.analyze import measure
from pipeline.data.manifest import SPLITS
from pipeline.launch import Cluster
from pipeline.plan.plan import Plan
from pipeline.plan.size import Size
from pipeline.record import commands
from pipeline.record.check import Check
from pipeline.record.commands import Resume
from pipeline.record.events import Built, Checked, Checkpoint, Event, Finished, Lost, Steps
from pipeline.record.profile import Explanation, Profile
from pipeline.run.errors import RunFailed
from pipeline.run.group import Group
from pipeline.run.preemption import Preempted, Preemption
from pipeline.run.watch import Failure

# A step that is timed for itself is timed in so many lives of its processes, or as many as begin in so long.
LIVES, LIVES_SECONDS = 3, 20.0
# Repeats that are disturbed are timed again so many times at most.
MOST_AGAIN = 3


@dataclass
class Measured:
    """What a run has measured so far: repeats of the point and of its baseline, and the chief's last words."""

    point: list[measure.Repeat] = field(default_factory=list)
    baseline: list[measure.Repeat] = field(default_factory=list)
    built: Built = field(default_factory=Built)
    # Examples that were broken and left out, by part.
    lost: dict[str, list[Lost]] = field(default_factory=dict)
    finished: Finished = field(default_factory=Finished)
    versions: dict[str, str] = field(default_factory=dict)
    seconds_startup: float | None = None
    seconds_training: float | None = None
    # What this host used in that time, where its counters can be read.
    energy_joules: float | None = None
    steps_per_call: int | None = None
    notes: list[str] = field(default_factory=list)
    # How often lost processes were started again, and training went back since it had diverged.
    restarts: int = 0
    rollbacks: int = 0
    # The last step that was told, and of the last checkpoint.
    step: int = 0
    saved_step: int | None = None
    # Workers that train, and that were timed.
    workers: int | None = None
    timed_workers: int | None = None
    size: Size | None = None
    # What the input and the model can do alone, where that was timed.
    profile: Profile | None = None
    # What came of comparing all replicas with one device, where that was asked for.
    check: Check | None = None
    # What the lost efficiency is made of, where that was asked for.
    explained: Explanation | None = None

    def counted(self, plan: Plan) -> tuple[list[measure.Repeat], list[measure.Repeat]]:
        """The repeats that the run's figures are of, and those of the baseline that were taken in turn with them."""
        devices = (self.timed_workers or plan.workers) * plan.strategy.devices_per_replica
        places = measure.counted(self.point, self.baseline, plan.measurement.repeats, devices)
        return [self.point[place] for place in places], [self.baseline[place] for place in places if self.baseline]

    def is_disturbed(self, plan: Plan) -> bool:
        """True if other work has disturbed these."""
        return measure.is_disturbed(*self.counted(plan), plan.workers * plan.strategy.devices_per_replica)

    def note(self, event: Event) -> None:
        """Takes in what the processes of the point tell."""
        match event:
            case Steps(step=step):
                self.step = max(self.step, step)
            case Checkpoint(step=step):
                self.saved_step = step
            case Checked(values=check) if event.rank == 0:
                self.check = check


@dataclass(frozen=True)
class Ready:
    """What the first of a plan's processes has built, and what was left out of the data, by part."""

    event: Built
    lost: dict[str, list[Lost]]


def all_measured(plan: Plan, measured: Measured, baseline: Plan | None) -> bool:
    """Has an earlier attempt timed all that is to be timed?"""
    timed = [measured.point] if baseline is None else [measured.point, measured.baseline]
    return plan.measurement.steps == 0 or min(map(len, timed)) >= plan.measurement.repeats


def learn_size(cluster: Cluster, plan: Plan, folder: Path) -> Size:
    """What the one process of `plan` says, which builds the model and ends. Raises `RunFailed`."""
    with _built(cluster, plan, "size", folder) as (group, _):
        sized = group.ask(commands.Size())[0]
        if sized.size is None:
            raise RunFailed(Failure(str(sized.error), 0, lost=False), None)
        return sized.size


def time_steps(cluster: Cluster, plan: Plan, folder: Path) -> list[Measured]:
    """Times a plan's steps as runs of it would, in several lives of its processes, and ends.

    How fast a process computes differs from one to the next, which repeats in one of them do not show; there are as
    many of these as in a run, since they become faster until all is warm. Raises `RunFailed` where the first one fails.
    """
    began, lives = time.monotonic(), list[Measured]()
    while len(lives) < LIVES and (not lives or time.monotonic() - began < LIVES_SECONDS):
        measured = Measured()
        try:
            with _built(cluster, plan, "point", folder) as (group, built):
                measured.built = built.event
                take_measurements(plan, group, None, measured)
        except RunFailed:
            if lives:
                break
            raise
        lives.append(measured)
    return lives


@contextmanager
def _built(cluster: Cluster, plan: Plan, name: str, folder: Path) -> Iterator[tuple[Group, Ready]]:
    """The processes of a plan that is no run, and what they have built; they end with it. Raises `RunFailed`."""
    preemption = Preemption()
    group = Group(cluster, plan, name, folder, lambda event: None, preemption)
    try:
        group.joined()
        yield group, build(group)
        group.leave()
    except Preempted:
        raise RunFailed(Failure(f"It was ended by {preemption.asked}.", None, lost=True), None) from None
    finally:
        group.stop()


def build(group: Group, resume: Resume | None = None) -> Ready:
    """Has processes load their data, leave out what any found broken, and build; returns what the first one built."""
    loaded = group.ask(commands.Load(str(group.folder)))
    broken = {str(rank): told.broken for rank, told in loaded.items() if any(told.broken.values())}
    if broken:
        # Each has looked through a share of the data, and trains on what others have found whole.
        loaded = group.ask(commands.Drop(broken))
    counts = {}
    for part in SPLITS:
        own = sorted(loaded) if loaded[group.plan.leaders[0]].sharded[part] else group.plan.leaders[:1]
        counts[part] = [loaded[rank].examples[part] for rank in own]
    built = group.ask(commands.Build(counts["train"], counts["validation"], resume))[0]
    lost = {
        part: sorted((lost for found in broken.values() for lost in found[part]), key=lambda lost: lost.first)
        for part in SPLITS
    }
    return Ready(built, lost)


def profile(point: Group) -> Profile:
    """Has the processes time the input and the model alone, each as many steps as the slowest makes in two seconds."""

    rates = {}
    timed: tuple[Literal["model", "input"], ...] = ("model", "input")
    # In this order: what is read ahead at the end of the input would be made beside the model.
    for what in timed:
        pace = max(told.step_seconds or 0.0 for told in point.ask(commands.Profile(what)).values())
        steps = measure.steps_of_piece(pace)
        rates[what] = measure.slowest_rates(list(point.ask(commands.Profile(what, steps)).values()))
    return measure.verdict(rates["input"], rates["model"])


def take_measurements(plan: Plan, point: Group, one: Group | None, measured: Measured) -> int:
    """Measures in the first steps of training, in turn with the baseline; returns the steps that a call takes.

    What an earlier attempt has timed is not timed again.
    """
    measured.steps_per_call = plan.training.steps_per_call or measured.steps_per_call
    missing = max(0, plan.measurement.repeats - len(measured.point)) if plan.measurement.steps != 0 else 0
    if one is not None:
        missing = max(missing, plan.measurement.repeats - len(measured.baseline))
    if not missing and measured.steps_per_call:
        return measured.steps_per_call
    groups = [point] if one is None else [point, one]
    calibrate = commands.Calibrate(plan.training.steps_per_call)
    pace = {group.name: max(answer.step_seconds for answer in group.ask(calibrate).values()) for group in groups}
    per_call = measured.steps_per_call = plan.training.steps_per_call or measure.steps_per_call(
        pace["point"], plan.concurrent_steps
    )
    for repeat in to_time(plan, missing, measured):
        # Who goes first changes with each repeat, so that a machine that slows down or speeds up favours neither.
        for group in groups if repeat % 2 == 0 else groups[::-1]:
            timed_before = measured.point if group is point else measured.baseline
            if len(timed_before) > repeat:
                continue
            command = commands.Measure(
                repeat=repeat,
                # Without turns, one repeat warms up the next.
                warmup_steps=plan.measurement.warmup_steps
                if repeat == plan.measurement.repeats - missing or len(groups) > 1
                else 0,
                steps=plan.measurement.steps
                or measure.steps_per_repeat(pace[group.name], per_call, group.plan.concurrent_steps),
                steps_per_call=per_call,
            )
            answers = group.ask(command)
            timed = measure.slowest(answers, others=len(answers) == len(group.plan.processes))
            timed_before.append(timed)
            measured.timed_workers = plan.workers
    return per_call


def to_time(plan: Plan, missing: int, measured: Measured) -> Iterator[int]:
    """The numbers of the repeats to be timed: those that are missing, and more while other work disturbs them.

    Now the processes are there, and the next run's would have to be started.
    """
    repeats = plan.measurement.repeats
    yield from range(repeats - missing, repeats)
    until = time.monotonic() + plan.measurement.patience
    for repeat in range(repeats, repeats * (1 + MOST_AGAIN)):
        if not measured.is_disturbed(plan) or time.monotonic() >= until:
            return
        yield repeat

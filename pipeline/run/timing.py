"""Makes processes build what they train and time their steps, in turn with a baseline, and keeps the measurements."""

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
from pipeline.record.commands import Resume
from pipeline.record.events import Built, Finished, Lost
from pipeline.record.findings import Check, Explanation, Pace
from pipeline.run.group import Group
from pipeline.run.session import Preemption, RunPreempted
from pipeline.run.watch import RunFailed

# A step that is timed for itself is timed in so many starts of its processes, or as many as begin in so long.
LIVES, LIVES_SECONDS = 3, 20.0
# Repeats that are disturbed are timed again so many times at most.
MOST_AGAIN = 3


# Examples that were broken and left out, by part of the data.
Losses = dict[str, list[Lost]]


@dataclass
class Measurements:
    """A run's measurements so far: repeats of the run and of its baseline, and the chief's last events.

    `point` has the run's repeats, and `step` and `check` are those of when its attempt began.
    """

    point: list[measure.Repeat] = field(default_factory=list)
    baseline: list[measure.Repeat] = field(default_factory=list)
    built: Built = field(default_factory=Built)
    lost: Losses = field(default_factory=dict)
    finished: Finished = field(default_factory=Finished)
    versions: dict[str, str] = field(default_factory=dict)
    seconds_startup: float | None = None
    seconds_training: float | None = None
    # Of this host while training, if its counters can be read.
    energy_joules: float | None = None
    steps_per_call: int | None = None
    notes: list[str] = field(default_factory=list)
    # How often lost processes were started again, and training went back since it had diverged.
    restarts: int = 0
    rollbacks: int = 0
    step: int = 0
    # Workers that train, and that were timed.
    workers: int | None = None
    timed_workers: int | None = None
    size: Size | None = None
    profile: Pace | None = None
    check: Check | None = None
    explained: Explanation | None = None

    def counted(self, plan: Plan) -> tuple[list[measure.Repeat], list[measure.Repeat]]:
        """The repeats that the run's figures come from, and those of the baseline that were taken in turn with them."""
        devices = (self.timed_workers or plan.workers) * plan.strategy.devices_per_replica
        places = measure.counted(self.point, self.baseline, plan.measurement.repeats, devices)
        return [self.point[place] for place in places], [self.baseline[place] for place in places if self.baseline]

    def is_disturbed(self, plan: Plan) -> bool:
        """True if other work has disturbed these."""
        return measure.is_disturbed(*self.counted(plan), plan.workers * plan.strategy.devices_per_replica)

    def is_whole(self, plan: Plan, baseline: Plan | None) -> bool:
        """True if all that the plan and its baseline have to time is timed."""
        timed = [self.point] if baseline is None else [self.point, self.baseline]
        return plan.measurement.steps == 0 or min(map(len, timed)) >= plan.measurement.repeats


def learn_size(cluster: Cluster, plan: Plan, folder: Path) -> Size:
    """The size from the one process of `plan`, which builds the model and ends. Raises `RunFailed`."""
    with _built(cluster, plan, "size", folder) as (group, _):
        sized = group.request(commands.MeasureSize())[0]
        if sized.size is None:
            raise RunFailed(str(sized.error), 0, lost=False)
        return sized.size


def time_steps(cluster: Cluster, plan: Plan, folder: Path) -> list[Measurements]:
    """Times a plan's steps as runs of it would, in several starts of its processes.

    Processes differ in how fast they compute, which repeats in one of them do not show; there are as many repeats as in
    a run, since they become faster until all is warm. Raises `RunFailed` if the first one fails.
    """
    began, starts = time.monotonic(), list[Measurements]()
    while len(starts) < LIVES and (not starts or time.monotonic() - began < LIVES_SECONDS):
        measured = Measurements()
        try:
            with _built(cluster, plan, "point", folder) as (group, measured.built):
                take_measurements(plan, group, None, measured)
        except RunFailed:
            if starts:
                break
            raise
        starts.append(measured)
    return starts


@contextmanager
def _built(cluster: Cluster, plan: Plan, name: str, folder: Path) -> Iterator[tuple[Group, Built]]:
    """The processes of a plan that is no run, and what the first one built; they end with it. Raises `RunFailed`."""
    preemption = Preemption()
    group = Group(cluster, plan, name, folder, lambda event: None, preemption)
    try:
        group.joined()
        yield group, build(group)[0]
        group.leave()
    except RunPreempted:
        raise RunFailed(f"It was ended by {preemption.asked}.", None) from None
    finally:
        group.stop()


def build(group: Group, resume: Resume | None = None) -> tuple[Built, Losses]:
    """Makes processes load their data and build; returns what the first one built, and what all left out as broken."""
    loaded = group.request(commands.Load(str(group.folder)))
    broken = {str(rank): event.broken for rank, event in loaded.items() if any(event.broken.values())}
    if broken:
        # Each has looked through a share of the data, and trains on shares of others.
        loaded = group.request(commands.Drop(broken))
    counts = {}
    for part in SPLITS:
        ranks = sorted(loaded) if loaded[group.plan.leaders[0]].sharded[part] else group.plan.leaders[:1]
        counts[part] = [loaded[rank].examples[part] for rank in ranks]
    built = group.request(commands.Build(counts["train"], counts["validation"], resume))[0]
    by_part = {part: [lost for by_rank in broken.values() for lost in by_rank[part]] for part in SPLITS}
    return built, {part: sorted(losses, key=lambda lost: lost.first) for part, losses in by_part.items()}


def profile(point: Group) -> Pace:
    """Makes processes time the input and the model alone, each as many steps as the slowest makes in two seconds."""
    rates = {}
    parts: tuple[Literal["model", "input"], ...] = ("model", "input")
    # In this order: batches read ahead at the end of the input would be made beside the model.
    for what in parts:
        pace = max(event.step_seconds or 0.0 for event in point.request(commands.Profile(what)).values())
        steps = measure.steps_of_piece(pace)
        rates[what] = measure.slowest_rates(list(point.request(commands.Profile(what, steps)).values()))
    return measure.verdict(rates["input"], rates["model"])


def measure_size(point: Group, one: Group | None) -> Size | None:
    """The size of the model; None if no process has a compiled step whose graph it can read.

    A coordinator has no such graph, and that of batches of one size does not say what grows with them.
    """
    plan = point.plan
    compiled = plan.measurement.steps != 0 or plan.training.steps_per_call is None
    if not compiled or plan.strategy.static_batches or (plan.strategy.asynchronous and one is None):
        return None
    return (one or point).request(commands.MeasureSize())[0].size


def take_measurements(plan: Plan, point: Group, one: Group | None, measured: Measurements) -> int:
    """Times the first steps of training, in turn with the baseline; returns the steps that a call takes.

    Repeats of an earlier attempt are not timed again.
    """
    measured.steps_per_call = plan.training.steps_per_call or measured.steps_per_call
    missing = max(0, plan.measurement.repeats - len(measured.point)) if plan.measurement.steps != 0 else 0
    if one is not None:
        missing = max(missing, plan.measurement.repeats - len(measured.baseline))
    if not missing and measured.steps_per_call:
        return measured.steps_per_call
    groups = [point] if one is None else [point, one]
    calibrate = commands.Calibrate(plan.training.steps_per_call)
    pace = {group.name: max(event.step_seconds for event in group.request(calibrate).values()) for group in groups}
    per_call = measured.steps_per_call = plan.training.steps_per_call or measure.steps_per_call(
        pace["point"], plan.concurrent_steps
    )
    for repeat in to_time(plan, missing, measured):
        # Who goes first changes with each repeat, so that a machine that slows down or speeds up favours neither.
        for group in groups if repeat % 2 == 0 else groups[::-1]:
            repeats = measured.point if group is point else measured.baseline
            if len(repeats) > repeat:
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
            responses = group.request(command)
            repeats.append(measure.slowest(responses, others=len(responses) == len(group.plan.processes)))
            measured.timed_workers = plan.workers
    return per_call


def to_time(plan: Plan, missing: int, measured: Measurements) -> Iterator[int]:
    """Yields the numbers of the repeats to time: those that are missing, and more while other work disturbs them."""
    repeats = plan.measurement.repeats
    yield from range(repeats - missing, repeats)
    until = time.monotonic() + plan.measurement.patience
    for repeat in range(repeats, repeats * (1 + MOST_AGAIN)):
        if not measured.is_disturbed(plan) or time.monotonic() >= until:
            return
        yield repeat

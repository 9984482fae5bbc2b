"""Makes processes build, and time steps: in turn with a baseline, and with parts switched off to explain a loss."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median_low
from tempfile import TemporaryDirectory
from typing import Any, Literal

from pipeline.analyze import comparable, explain, measure
from pipeline.data.records import SPLITS
from pipeline.driver.group import Group
from pipeline.driver.session import Preemption, RunPreempted
from pipeline.driver.watch import RunFailed
from pipeline.launch import Cluster
from pipeline.plan import planning
from pipeline.plan.plan import Plan
from pipeline.plan.size import Size
from pipeline.record import commands
from pipeline.record.events import Built, Finished, Lost, SwitchedOff
from pipeline.record.findings import Check, Explanation, Pace

# A step that is timed for itself is timed in so many starts of its processes, or as many as begin in so long.
LIVES, LIVES_SECONDS = 3, 20.0
# Repeats that are disturbed are timed again so many times at most.
MOST_AGAIN = 3
# Rounds of an explanation go on until there are so many and so long; after so much longer there need be fewer.
EXPLAIN_SECONDS, ENOUGH_ROUNDS = 10.0, 5
PATIENCE_SECONDS, LEAST_ROUNDS = 60.0, 3
# Short ones, since a machine that others use changes within seconds.
EXPLAIN_PIECE_SECONDS = 0.25
MOST_ALONE, ALONE = 4, "alone"
# Examples that were broken and left out, by part of the data.
Losses = dict[str, list[Lost]]


@dataclass
class Measurements:
    """A run's measurements so far, and the chief's last events; `step` and `check` are those before its attempt."""

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


def learn_size(plan: Plan, cluster: Cluster) -> Size:
    """The size from a process that builds the model and ends. Raises `RunFailed`, in words for a person."""
    builder = planning.builder_of(plan, cluster.inventory())
    with TemporaryDirectory(prefix="pipeline-size-") as folder, _built(cluster, builder, "size", Path(folder)) as built:
        group, _ = built
        sized = group.request(commands.MeasureSize())[0]
        if sized.size is None:
            raise RunFailed(str(sized.error), 0, lost=False)
        return sized.size


def time_steps(cluster: Cluster, plan: Plan, folder: Path) -> list[Measurements]:
    """Times a plan's steps as runs of it would, in several starts of its processes, which differ in speed.

    As many repeats as in a run, since they become faster until all is warm. Raises `RunFailed` if the first one fails.
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


def build(group: Group, resume: commands.Resume | None = None) -> tuple[Built, Losses]:
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


def take_measurements(plan: Plan, point: Group, one: Group | None, measured: Measurements) -> int:
    """Times the first steps of training, in turn with the baseline, unless done; returns the steps of a call."""
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
            # Without turns, one repeat warms up the next.
            warms_up = repeat == plan.measurement.repeats - missing or len(groups) > 1
            warmup_steps = plan.measurement.warmup_steps if warms_up else 0
            beside = group.plan.concurrent_steps
            steps = plan.measurement.steps or measure.steps_per_repeat(pace[group.name], per_call, beside)
            responses = group.request(commands.Measure(repeat, warmup_steps, steps, per_call))
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


def explain_loss(point: Group, one: Group, per_call: int, measured: Measurements) -> Explanation | None:
    """Explains the lost efficiency; notes why if that failed, which fails no run since training is over."""
    plan = point.plan
    try:
        one.joined()
        build(one)
        rounds = _rounds(point, _turns(point, one, per_call, measured.built.normalizations))
    except RunFailed as failed:
        measured.notes.append(f"What was lost could not be explained: {failed.error}")
        return None
    except RunPreempted:
        measured.notes.append("What was lost is not explained, since the machine was asked for.")
        return None
    # Devices of a process that share a pool of threads are not told apart.
    apart = plan.hardware.kind != "cpu"
    names = {
        number: f"{process.role} {process.rank}{f' on {device}' * (apart and len(process.devices) > 1)}"
        for process in plan.processes
        for number, device in zip(process.replicas, process.devices, strict=True)
    }
    measured.explained = explain.explain(rounds, [names[number] for number in sorted(names)], plan)
    return measured.explained


def _rounds(point: Group, turns: Mapping[str, Callable[[], Any]]) -> list[explain.Round]:
    """Rounds of all turns, each in the opposite order of the one before, so that a machine's drift favours none."""
    rounds, began, names = list[explain.Round](), point.clock(), list(turns)
    while True:
        passed = point.clock() - began
        least = LEAST_ROUNDS if passed > PATIENCE_SECONDS else ENOUGH_ROUNDS
        if len(rounds) >= least and passed > EXPLAIN_SECONDS:
            return rounds
        timed: dict[str, Any] = {name: turns[name]() for name in (names if len(rounds) % 2 == 0 else names[::-1])}
        stretches = [timed.pop(name) for name in names if name.startswith(ALONE)]
        alone = {number: seconds for stretch in stretches for number, seconds in stretch.items()}
        rounds.append(explain.Round(**{"together": {}} | timed, alone=alone))


def _turns(point: Group, one: Group, per_call: int, normalizations: int) -> dict[str, Callable[[], Any]]:
    """The turns of a round, by its fields; each of `ALONE`, some replicas whose hosts do nothing else meanwhile."""
    plan, turns = point.plan, dict[str, Callable[[], Any]]()
    examples = plan.training.global_batch

    def seconds(group: Group, what: SwitchedOff, warmup_steps: int, steps: int) -> float:
        """Seconds of the slowest process for the examples of a step; the baseline's as if each worker had a device."""
        timed = [*group.request(commands.Explain(what, per_call, warmup_steps, steps)).values()]
        rate = measure.throughput(timed[0].examples or 0.0, max(event.seconds or 0.0 for event in timed))
        return examples / rate / (plan.workers if group is one else 1)

    def prepare(group: Group, what: SwitchedOff) -> Callable[[], float]:
        """Compiles the step, and finds out how many fill a piece."""
        if group is one and what == "everything":
            seconds(group, what, 0, 1)
        share = plan.workers if group is one else 1
        pace = seconds(group, what, 0, per_call) * share * group.plan.training.global_batch / examples
        steps = per_call * max(1, measure.steps_of_piece(pace, EXPLAIN_PIECE_SECONDS) // per_call)
        # Batches that were made ahead are taken first, and would come at once.
        warmup = max(plan.measurement.warmup_steps, steps) if what == "everything" else 1
        return lambda: seconds(group, what, warmup, steps)

    def calling(group: Group) -> float:
        """Seconds of the call of a step that does nothing."""
        # Of two the lower: one process that is slow does not decide.
        timed = group.request(commands.Explain("no step", per_call)).values()
        median = median_low([(event.seconds or 0.0) / per_call for event in timed])
        return median * (examples / (plan.workers * group.plan.training.global_batch) if group is one else 1)

    def apart(replicas: list[int], least: float = EXPLAIN_PIECE_SECONDS) -> dict[int, float]:
        command = commands.Explain("no communication", per_call, replicas=replicas, seconds=least)
        stretches = [dict(event.replicas or ()) for event in point.request(command).values()]
        if plan.hardware.kind == "cpu":
            # Those of one process share a pool of threads: which of them it serves first says nothing of any.
            stretches = [dict.fromkeys(each, sum(each.values()) / len(each)) for each in stretches if each]
        return {number: seconds for stretch in stretches for number, seconds in stretch.items()}

    for group, prefix in ((one, "one_"), (point, "")):
        switched: list[SwitchedOff] = ["everything", "no input"]
        # Those of one replica are not exchanged.
        if normalizations and plan.workers > 1 and group is point:
            switched.append("no statistics")
        for what in switched:
            turns[prefix + what.replace(" ", "_")] = prepare(group, what)
        turns[f"{prefix}calling"] = partial(calling, group)
    if plan.workers > 1:
        everyone = list(range(plan.workers))
        apart(everyone, least=0.0)
        turns["together"] = partial(apart, everyone)
        for place, replicas in enumerate(_one_of_each_host(plan)[:MOST_ALONE]):
            turns[f"{ALONE} {place}"] = partial(apart, replicas)
    return turns


def _one_of_each_host(plan: Plan) -> list[list[int]]:
    """The first replicas of all hosts, the second ones, and so on: in each list, each is alone on its host."""
    hosts = comparable.grouped((process.host, one) for process in plan.processes for one in process.replicas)
    longest = max(map(len, hosts.values()))
    return [[host[place] for host in hosts.values() if place < len(host)] for place in range(longest)]

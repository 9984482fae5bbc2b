"""Takes a plan's processes through their life: join, load, build, measure in turn with the baseline, train, exit.

Knows jobs and events. What is told goes on to `tell`; a failure becomes `RunFailed`, with no process left.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline import measure
from pipeline.events import Event
from pipeline.launch import Cluster, Job
from pipeline.plan import Plan
from pipeline.watch import Failure, Watch

POLL_SECONDS = 0.2
# Time for processes to write their stacks before they are killed.
STACK_SECONDS = 0.5


class RunFailed(RuntimeError):
    """A run that cannot go on; the message names the process, and `log` is its log."""

    def __init__(self, failure: Failure, log: Path | None) -> None:
        super().__init__(failure.error)
        self.rank, self.log = failure.rank, log


@dataclass
class Measured:
    """What a run has measured so far: repeats of the point and of its baseline, and the chief's last words."""

    point: list[measure.Repeat] = field(default_factory=list)
    baseline: list[measure.Repeat] = field(default_factory=list)
    built: dict[str, Any] = field(default_factory=dict)
    finished: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    seconds_startup: float | None = None
    seconds_training: float | None = None
    steps_per_call: int | None = None
    notes: list[str] = field(default_factory=list)
    restarts: int = 0
    size: Event | None = None


class Group:
    """The processes of one plan: a job, the watch over it, and the plan."""

    def __init__(self, cluster: Cluster, plan: Plan, name: str, folder: Path, tell: Callable[[Event], None]) -> None:
        self.plan, self.name, self._folder, self._tell = plan, name, folder, tell
        self._watch = Watch(plan)
        self._stopped = False
        # What was done about workers that were lost, in words.
        self.replaced: list[str] = []
        # How long this group was asked for something, and the others waited.
        self.seconds = 0.0
        self.job: Job = cluster.start(plan, name, folder)

    def ask(self, answer: str, command: Mapping[str, Any] | None = None) -> dict[int, Event]:
        """Gives a command, and returns each process's `answer` once all have given theirs. Raises `RunFailed`."""
        began = time.monotonic()
        if command is not None:
            self._watch.asked(began)
            self.job.send(dict(command))
        answers: dict[int, Event] = {}
        # All join; from then on those answer who are told what to do.
        ranks = range(len(self.plan.processes)) if command is None else self.plan.leaders
        while not answers.keys() >= set(ranks):
            for event in self.job.events(POLL_SECONDS):
                self._watch.note(event, time.monotonic())
                self._tell(event)
                if event["event"] == answer:
                    answers[event["rank"]] = event
                    self._watch.answer(event["rank"])
            self._replace(self._watch.to_replace(time.monotonic()))
            failure = self._watch.failure(time.monotonic())
            if failure:
                self._fail(failure)
        self.seconds += time.monotonic() - began
        return answers

    def begin(self) -> None:
        """Has the processes begin training; from now on, workers that race can be replaced."""
        self._watch.replacing = True
        self.job.send({"do": "begin"})

    def leave(self) -> None:
        """Ends the processes in order."""
        self._watch.leaving, self._watch.replacing = True, False
        self.job.send({"do": "exit"})
        self.stop()

    def stop(self) -> None:
        """Ends the processes however they are."""
        if not self._stopped:
            self._stopped = True
            self.job.stop(self.plan.stop_timeout)

    def _replace(self, gone: Mapping[int, str]) -> None:
        for rank, why in gone.items():
            self.job.restart(rank)
            text = f"{why}. It was started again; the steps that it was making are made again, by any worker."
            self.replaced.append(text)
            self._tell({"time": time.time(), "event": "warning", "group": self.name, "rank": rank, "text": text})

    def _fail(self, failure: Failure) -> None:
        if failure.stuck:
            self.job.dump_stacks()
            time.sleep(STACK_SECONDS)
        self.stop()
        log = None if failure.rank is None else self._folder / f"{self.name}-{failure.rank}.log"
        raise RunFailed(failure, log)


def conduct(
    cluster: Cluster,
    plan: Plan,
    baseline: Plan | None,
    folder: Path,
    tell: Callable[[Event], None],
    measured: Measured,
    ask_size: bool = False,
) -> None:
    """Runs `plan`, measured in turn with `baseline` where there is one, filling `measured` as it goes.

    With `ask_size`, also with the size of the model, where a process has it at hand. Raises `RunFailed`. No process is
    left, however it ends.
    """
    began = time.monotonic()
    groups: list[Group] = []
    try:
        point = Group(cluster, plan, "point", folder, tell)
        groups.append(point)
        one = None
        if baseline is not None:
            one = Group(cluster, baseline, "baseline", folder, tell)
            groups.append(one)
        for group in groups:
            joined = group.ask("joined")
            measured.versions = joined[0]["versions"]
        for group in groups:
            built = _build(group)
            measured.built = built if group is point else measured.built
        measured.seconds_startup = time.monotonic() - began
        started = point.seconds
        point.begin()
        per_call = _measure(plan, point, one, measured)
        # The step is compiled by now, and its graph there to be read; a coordinator has no such graph.
        # That of batches of one size does not say what grows with them.
        compiled = plan.measure_steps != 0 or plan.steps_per_call is None
        if ask_size and compiled and not plan.static_batches and not (plan.asynchronous and one is None):
            sized = (one or point).ask("sized", {"do": "size"})[0]
            measured.size = None if "error" in sized else sized
        if one is not None:
            one.leave()
        finished = point.ask("finished", {"do": "train", "steps_per_call": per_call, "folder": str(folder)})
        measured.seconds_training = point.seconds - started
        measured.finished = finished[0]
        digests = {digest for each in finished.values() for digest in each["weights"]}
        if len(digests) > 1:
            measured.notes.append(
                "The replicas ended with different weights: something in the model is not synchronised."
            )
        point.leave()
    finally:
        measured.notes += groups[0].replaced if groups else []
        measured.restarts = len(groups[0].replaced) if groups else 0
        for group in groups:
            group.stop()


def learn_size(cluster: Cluster, plan: Plan, folder: Path) -> Event:
    """The `sized` event of the one process of `plan`, which builds the model and ends. Raises `RunFailed`."""
    group = Group(cluster, plan, "size", folder, lambda event: None)
    try:
        group.ask("joined")
        _build(group)
        sized = group.ask("sized", {"do": "size"})[0]
        if "error" in sized:
            raise RunFailed(Failure(sized["error"], 0), None)
        group.leave()
        return sized
    finally:
        group.stop()


def _build(group: Group) -> dict[str, Any]:
    loaded = group.ask("loaded", {"do": "load"})
    ranks = sorted(loaded)
    own = ranks if loaded[0]["sharded"] else ranks[:1]
    counts = {f"{part}_counts": [loaded[rank][f"{part}_examples"] for rank in own] for part in ("train", "validation")}
    return group.ask("built", {"do": "build", **counts})[0]


def _measure(plan: Plan, point: Group, one: Group | None, measured: Measured) -> int:
    """Measures in the first steps of training, in turn with the baseline; returns the steps that a call takes."""
    if plan.measure_steps == 0 and plan.steps_per_call:
        measured.steps_per_call = plan.steps_per_call
        return plan.steps_per_call
    groups = [point] if one is None else [point, one]
    calibrate = {"do": "calibrate", "steps_per_call": plan.steps_per_call}
    pace = {
        group.name: max(answer["step_seconds"] for answer in group.ask("calibrated", calibrate).values())
        for group in groups
    }
    per_call = measured.steps_per_call = plan.steps_per_call or measure.steps_per_call(pace["point"], plan.lanes)
    for repeat in range(plan.repeats if plan.measure_steps != 0 else 0):
        # Who goes first changes with each repeat, so that a machine that slows down or speeds up favours neither.
        for group in groups if repeat % 2 == 0 else groups[::-1]:
            command = {
                "do": "measure",
                "repeat": repeat,
                # Without turns, one repeat warms up the next.
                "warmup_steps": plan.warmup_steps if repeat == 0 or len(groups) > 1 else 0,
                "steps": plan.measure_steps or measure.steps_per_repeat(pace[group.name], per_call, group.plan.lanes),
                "steps_per_call": per_call,
            }
            timed = measure.slowest(group.ask("measured", command))
            (measured.point if group is point else measured.baseline).append(timed)
    return per_call

"""Takes a plan's processes through their life: join, load, build, measure in turn with the baseline, train, exit.

Knows jobs and events. What is told goes on to `tell`. Processes that are lost are started again, all of them from the
last checkpoint; what cannot be helped so becomes `RunFailed`, with no process left.
"""

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.analyze import energy, explain, measure
from pipeline.data.manifest import SPLITS
from pipeline.launch import Cluster, Job
from pipeline.plan.plan import Plan
from pipeline.record.events import PREEMPTING, Event
from pipeline.run.watch import Failure, Watch

POLL_SECONDS = 0.2
# Time for processes to write their stacks before they are killed.
STACK_SECONDS = 0.5
# What the learning rate is multiplied by when training goes back to a checkpoint because it diverged.
ROLLBACK_SCALE = 0.5
# Rounds of an explanation go on until there are so many and so long; after so much longer there need be fewer.
EXPLAIN_SECONDS, ENOUGH_ROUNDS = 10.0, 5
PATIENCE_SECONDS, LEAST_ROUNDS = 60.0, 3
# Short ones, since a machine that others use changes within seconds.
EXPLAIN_PIECE_SECONDS = 0.25
# A step that is timed for itself is timed in so many lives of its processes, or as many as begin in so long.
LIVES, LIVES_SECONDS = 3, 20.0
# So many replicas of a host are timed alone, at most.
MOST_ALONE = 4


class RunFailed(RuntimeError):
    """A run that cannot go on; the message names the process, and `log` is its log."""

    def __init__(self, failure: Failure, log: Path | None) -> None:
        super().__init__(failure.error)
        self.failure, self.log = failure, log

    @property
    def rank(self) -> int | None:
        """The process that is to blame."""
        return self.failure.rank


class Preempted(Exception):
    """A scheduler asked for the machine: all processes have left, with a checkpoint where there was time for one."""


@dataclass
class Preemption:
    """Whether a scheduler has asked for the machine, and how that was said."""

    asked: str | None = None

    def ask(self, number: int, whom: str) -> None:
        """Notes the first signal that asked."""
        self.asked = self.asked or f"{signal.Signals(number).name} to {whom}"


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
    size: Event | None = None
    # What the input and the model can do alone, where that was timed.
    profile: dict[str, Any] | None = None
    # What the lost efficiency is made of, where that was asked for.
    explained: dict[str, Any] | None = None

    def note(self, event: Event) -> None:
        """Takes in what the processes of the point tell."""
        if event["event"] == "steps":
            self.step = max(self.step, event["step"])
        elif event["event"] == "checkpoint":
            self.saved_step = event["step"]


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
    ) -> None:
        self.plan, self.name, self.folder, self._tell = plan, name, folder, tell
        self._preemption = preemption
        self._watch = Watch(plan)
        self._stopped = False
        # What processes told when training was over for them.
        self._finished: dict[int, Event] = {}
        # What was done about workers that were lost, in words.
        self.replaced: list[str] = []
        # How long this group was asked for something, and the others waited.
        self.seconds = 0.0
        # What this host used meanwhile; None where no counter can be read.
        self.joules: float | None = 0.0
        self.job: Job = cluster.start(plan, name, folder)

    def ask(self, answer: str, command: Mapping[str, Any] | None = None) -> dict[int, Event]:
        """Gives a command, and returns each process's `answer` once all have given theirs. Raises `RunFailed`."""
        began, meter = time.monotonic(), energy.Meter()
        if command is not None:
            self._watch.asked(began)
            self.job.send(dict(command))
        answers: dict[int, Event] = {}
        # All join; from then on those answer who are told what to do.
        ranks = range(len(self.plan.processes)) if command is None else self.plan.leaders
        while not answers.keys() >= set(ranks):
            # Often enough for a counter that begins anew.
            meter.joules()
            for event in self._events():
                if event["event"] == answer:
                    answers[event["rank"]] = event
                    self._watch.answer(event["rank"])
            if self._preemption.asked:
                raise Preempted
            self._replace(self._watch.to_replace(time.monotonic()))
            failure = self._watch.failure(time.monotonic())
            if failure:
                self._fail(failure)
        used = meter.joules()
        self.joules = None if self.joules is None or used is None else self.joules + used
        self.seconds += time.monotonic() - began
        return answers

    def begin(self) -> None:
        """Has the processes begin training; from now on, workers that race can be replaced."""
        self._watch.replacing = True
        self.job.send({"do": "begin"})

    def save_and_leave(self) -> dict[int, Event] | None:
        """Has the processes write a checkpoint and leave, within `preempt_timeout`.

        Returns what they told where training turned out to be over.
        """
        self.job.send({"do": "leave"})
        until = time.monotonic() + self.plan.preempt_timeout
        left, leaders = set[int](), set(self.plan.leaders)
        while time.monotonic() < until and not left | self._finished.keys() >= leaders:
            left |= {event["rank"] for event in self._events() if event["event"] in ("left", "exited")}
        return self._finished if self._finished.keys() >= leaders else None

    def leave(self) -> None:
        """Ends the processes in order."""
        if self._stopped:
            return
        self._watch.leaving, self._watch.replacing = True, False
        self.job.send({"do": "exit"})
        self.stop(self.plan.stop_timeout)

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
                self._preemption.ask(number, f"{self.plan.processes[event['rank']].role} {event['rank']}")
            if event["event"] == "finished":
                self._finished[event["rank"]] = event
            self._tell(event)
        return found

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
        log = None if failure.rank is None else self.folder / f"{self.name}-{failure.rank}.log"
        raise RunFailed(failure, log)


def conduct(
    cluster: Cluster,
    plan: Plan,
    baseline: Plan | None,
    folder: Path,
    tell: Callable[[Event], None],
    measured: Measured,
    ask_size: bool = False,
    resume: bool = False,
    preemption: Preemption | None = None,
    fewer: Callable[[Plan], Plan | None] = lambda plan: None,
    one_device: Plan | None = None,
) -> None:
    """Runs `plan`, measured in turn with `baseline` where there is one, filling `measured` as it goes.

    Where the plan is to be explained, that is done against `one_device`, the baseline even if it was measured before.

    With `ask_size`, also with the size of the model, where a process has it at hand. With `resume`, training goes on
    from its last checkpoint. `fewer` lays the plan over fewer workers, where a lost one does not come back; None: it
    cannot. Raises `RunFailed`, and `Preempted` once there is a checkpoint. No process is left, however it ends.
    """
    preemption = preemption or Preemption()
    measured.workers = plan.workers
    recovery = _Recovery(plan, baseline, measured, fewer, "last" if resume else None)
    while True:
        step = measured.step
        try:
            now, resumed = recovery.plan, recovery.resume
            _attempt(cluster, now, baseline, folder, tell, measured, ask_size, resumed, preemption, one_device)
            return
        except RunFailed as failed:
            what = recovery.after(failed, measured.step > step)
            if what is None:
                raise
            text = f"{failed.failure.error.rstrip('.')}. {what}"
            measured.notes.append(text)
            now = recovery.plan
            count = {"workers": now.workers, "processes": len(now.processes), "leaders": len(now.leaders)}
            tell({"time": time.time(), "event": "restarted", "text": text, **count})


@dataclass
class _Recovery:
    """What is tried next after a failure: which plan, and from which checkpoint."""

    plan: Plan
    baseline: Plan | None
    measured: Measured
    fewer: Callable[[Plan], Plan | None]
    resume: str | None
    restarts: int = 0
    # The log of the process that failed last.
    failed: Path | None = None

    def after(self, failed: RunFailed, progressed: bool) -> str | None:
        """What is done about a failure, in words; None where nothing is left to try."""
        failure, again = failed.failure, failed.log is not None and failed.log == self.failed and not progressed
        self.failed = failed.log
        most, measured = self.plan.max_restarts, self.measured
        if failure.diverged and self.plan.on_divergence == "rollback" and measured.rollbacks < most:
            measured.rollbacks += 1
            self.resume = "back"
            self.plan = dataclasses.replace(self.plan, rate_scale=self.plan.rate_scale * ROLLBACK_SCALE)
            return f"Training goes back to the last good checkpoint, with {ROLLBACK_SCALE:g} of the learning rate."
        if not failure.lost:
            return None
        smaller = self.fewer(self.plan) if again and self.plan.elastic else None
        if smaller is None and self.restarts >= most:
            return None
        self.resume = "last"
        measured.restarts += 1
        if smaller is None:
            self.restarts += 1
            often = f"{self.restarts} of {most} times (launch.max_restarts)"
            return f"All processes are started again, {often}, and go on from the last checkpoint."
        if self.plan.explain:
            measured.notes.append("What was lost is not explained, since fewer workers train than were planned.")
        self.plan, self.failed = dataclasses.replace(smaller, explain=False), None
        measured.workers = smaller.workers
        if not _all_measured(smaller, measured, self.baseline):
            # What was timed with more workers says nothing of fewer.
            measured.point.clear()
        return f"It did not come back: training goes on with {smaller.workers} workers, {_batch_rule(smaller)}."


def _batch_rule(plan: Plan) -> str:
    if plan.scaling == "strong":
        return f"on the same global batches of {plan.global_batch}"
    return f"on global batches of {plan.global_batch} and {plan.rate_scale:.3g} of the learning rate"


def _attempt(
    cluster: Cluster,
    plan: Plan,
    baseline: Plan | None,
    folder: Path,
    tell: Callable[[Event], None],
    measured: Measured,
    ask_size: bool,
    resume: str | None,
    preemption: Preemption,
    one_device: Plan | None,
) -> None:
    began = time.monotonic()
    groups: list[Group] = []
    # Seconds and joules of the point's group when training began, and when it was over.
    started: tuple[float, float | None] | None = None
    over_with: tuple[float, float | None] | None = None

    def note(event: Event) -> None:
        if event.get("group") == "point":
            measured.note(event)
        tell(event)

    try:
        point = Group(cluster, plan, "point", folder, note, preemption)
        groups.append(point)
        one = None
        if baseline is not None and not _all_measured(plan, measured, baseline):
            one = Group(cluster, baseline, "baseline", folder, note, preemption)
            groups.append(one)
        for group in groups:
            joined = group.ask("joined")
            measured.versions = joined[0]["versions"]
        for group in groups:
            built = _build(group, resume if group is point else None)
            measured.built = built if group is point else measured.built
        measured.seconds_startup = measured.seconds_startup or time.monotonic() - began
        if plan.profile and resume is None and measured.profile is None:
            measured.profile = _profile(point)
            tell({"time": time.time(), "event": "profiled", "values": measured.profile})
        started = point.seconds, point.joules
        point.begin()
        try:
            per_call = _measure(plan, point, one, measured)
            # The step is compiled by now, and its graph there to be read; a coordinator has no such graph.
            # That of batches of one size does not say what grows with them.
            compiled = plan.measure_steps != 0 or plan.steps_per_call is None
            wanted = ask_size and measured.size is None and resume is None
            if wanted and compiled and not plan.static_batches and not (plan.asynchronous and one is None):
                sized = (one or point).ask("sized", {"do": "size"})[0]
                measured.size = None if "error" in sized else sized
            if one is not None:
                one.leave()
            finished = point.ask("finished", {"do": "train", "steps_per_call": per_call, "folder": str(folder)})
        except Preempted:
            over = point.save_and_leave()
            if over is None:
                raise
            finished = over
        over_with = point.seconds, point.joules
        measured.finished = finished[0]
        digests = {digest for each in finished.values() for digest in each["weights"]}
        if len(digests) > 1:
            measured.notes.append(
                "The replicas ended with different weights: something in the model is not synchronised."
            )
        if plan.explain and one_device is not None:
            one = Group(cluster, one_device, "baseline", folder, note, preemption)
            groups.append(one)
            _explain(point, one, per_call, measured, tell)
        point.leave()
    finally:
        if groups:
            measured.notes += groups[0].replaced
            measured.restarts += len(groups[0].replaced)
            if started is not None:
                seconds, joules = over_with or (groups[0].seconds, groups[0].joules)
                measured.seconds_training = (measured.seconds_training or 0.0) + seconds - started[0]
                if joules is not None and started[1] is not None:
                    measured.energy_joules = (measured.energy_joules or 0.0) + joules - started[1]
        for group in groups:
            group.stop()


def _all_measured(plan: Plan, measured: Measured, baseline: Plan | None) -> bool:
    """Has an earlier attempt timed all that is to be timed?"""
    timed = [measured.point] if baseline is None else [measured.point, measured.baseline]
    return plan.measure_steps == 0 or min(map(len, timed)) >= plan.repeats


def learn_size(cluster: Cluster, plan: Plan, folder: Path) -> Event:
    """The `sized` event of the one process of `plan`, which builds the model and ends. Raises `RunFailed`."""
    with _built(cluster, plan, "size", folder) as (group, _):
        sized = group.ask("sized", {"do": "size"})[0]
        if "error" in sized:
            raise RunFailed(Failure(sized["error"], 0, lost=False), None)
        return sized


def time_steps(cluster: Cluster, plan: Plan, folder: Path) -> list[Measured]:
    """Times a plan's steps as runs of it would, in several lives of its processes, and ends.

    How fast a process computes differs from one to the next, which repeats in one of them do not show; there are as
    many of these as in a run, since they become faster until all is warm. Raises `RunFailed` where the first one fails.
    """
    began, lives = time.monotonic(), list[Measured]()
    while len(lives) < LIVES and (not lives or time.monotonic() - began < LIVES_SECONDS):
        measured = Measured()
        try:
            with _built(cluster, plan, "point", folder) as (group, measured.built):
                _measure(plan, group, None, measured)
        except RunFailed:
            if lives:
                break
            raise
        lives.append(measured)
    return lives


@contextmanager
def _built(cluster: Cluster, plan: Plan, name: str, folder: Path) -> Iterator[tuple[Group, dict[str, Any]]]:
    """The processes of a plan that is no run, and what they have built; they end with it. Raises `RunFailed`."""
    preemption = Preemption()
    group = Group(cluster, plan, name, folder, lambda event: None, preemption)
    try:
        group.ask("joined")
        yield group, _build(group)
        group.leave()
    except Preempted:
        raise RunFailed(Failure(f"It was ended by {preemption.asked}.", None, lost=True), None) from None
    finally:
        group.stop()


def _scheduled(event: Event) -> int | None:
    """The scheduler's signal that a process got, or, before it could take one, ended by; None for all else."""
    if event["event"] == "signalled":
        return int(event["signal"])
    code = event["code"] if event["event"] == "exited" else 0
    return -code if -code in PREEMPTING else None


def _build(group: Group, resume: str | None = None) -> dict[str, Any]:
    loaded = group.ask("loaded", {"do": "load", "folder": str(group.folder)})
    broken = {str(rank): each["broken"] for rank, each in loaded.items() if any(each["broken"].values())}
    if broken:
        # Each has looked through a share of the data, and trains on what others have found whole.
        loaded = group.ask("loaded", {"do": "drop", "broken": broken})
    counts = {}
    for part in SPLITS:
        own = sorted(loaded) if loaded[group.plan.leaders[0]]["sharded"][part] else group.plan.leaders[:1]
        counts[f"{part}_counts"] = [loaded[rank]["examples"][part] for rank in own]
    built = group.ask("built", {"do": "build", "resume": resume, **counts})[0]
    lost = {
        part: sorted((each for found in broken.values() for each in found[part]), key=lambda each: each["first"])
        for part in SPLITS
    }
    return built | {"lost": lost}


def _profile(point: Group) -> dict[str, Any]:
    """Has the processes time the input and the model alone, each as many steps as the slowest makes in two seconds."""

    def ask(what: str, steps: int | None = None) -> dict[int, Event]:
        return point.ask("profiling", {"do": "profile", "what": what, "steps": steps})

    rates = {}
    # In this order: what is read ahead at the end of the input would be made beside the model.
    for what in ("model", "input"):
        steps = measure.steps_of_piece(max(each["step_seconds"] for each in ask(what).values()))
        rates[what] = measure.slowest_rates(list(ask(what, steps).values()))
    return measure.verdict(rates["input"], rates["model"], ask("stages")[0]["stages"])


def _explain(point: Group, one: Group, per_call: int, measured: Measured, tell: Callable[[Event], None]) -> None:
    """Has the processes time their steps with parts switched off, in turn with one device.

    Training is over: what fails here fails no run.
    """
    plan = point.plan
    try:
        one.ask("joined")
        _build(one)
        rounds = _rounds(point, one, per_call, measured.built.get("normalizations", 0))
    except RunFailed as failed:
        measured.notes.append(f"What was lost could not be explained: {failed.failure.error}")
        return
    except Preempted:
        measured.notes.append("What was lost is not explained, since the machine was asked for.")
        return
    # Devices of a process that share a pool of threads are not told apart.
    apart = plan.kind != "cpu"
    names = {
        number: f"{process.role} {process.rank}{f' on {device}' * (apart and len(process.devices) > 1)}"
        for process in plan.processes
        for number, device in zip(process.replicas, process.devices, strict=True)
    }
    measured.explained = explain.explain(rounds, [names[number] for number in sorted(names)], plan)
    tell({"time": time.time(), "event": "explained", "values": measured.explained})


def _rounds(point: Group, one: Group, per_call: int, normalizations: int) -> list[explain.Round]:
    """Rounds of all turns, each in the opposite order of the one before, so that a machine's drift favours none."""
    turns = _turns(point, one, per_call, normalizations)
    rounds: list[explain.Round] = []
    began, names = time.monotonic(), list(turns)
    while not _enough(len(rounds), time.monotonic() - began):
        found = {name: turns[name]() for name in (names if len(rounds) % 2 == 0 else names[::-1])}
        rounds.append(_round(found, point.plan, one.plan))
    return rounds


def _turns(point: Group, one: Group, per_call: int, normalizations: int) -> dict[str, Callable[[], Any]]:
    """What is timed in a round, by name, compiled by now: seconds of a step, or those of each replica by its number."""
    plan = point.plan

    def ask(group: Group, what: str, **how: Any) -> list[Event]:
        return list(group.ask("explaining", {"do": "explain", "what": what} | how).values())

    def seconds(group: Group, what: str, warmup_steps: int, steps: int) -> float:
        """Of a step, by the slowest process, and of so many examples as a step of all workers trains."""
        told = ask(group, what, warmup_steps=warmup_steps, steps=steps, steps_per_call=per_call)
        rate = measure.throughput(told[0]["examples"], max(float(each["seconds"]) for each in told))
        return plan.global_batch / rate

    turns: dict[str, Callable[[], Any]] = {}

    def prepare(group: Group, name: str, what: str) -> None:
        """Compiles what is timed, and finds out how many steps fill a piece."""
        if group is one and what == "everything":
            seconds(group, what, 0, 1)
        pace = seconds(group, what, 0, per_call) * group.plan.global_batch / plan.global_batch
        steps = per_call * max(1, measure.steps_of_piece(pace, EXPLAIN_PIECE_SECONDS) // per_call)
        # What was made ahead meanwhile is taken first, and would come at once.
        warmup = max(plan.warmup_steps, steps) if what == "everything" else 1
        turns[name] = lambda: seconds(group, what, warmup, steps)

    for group, prefix in ((one, "one_"), (point, "")):
        # Those of one replica are not exchanged.
        exchanged = ("no statistics",) if normalizations and plan.workers > 1 and group is point else ()
        for what in ("everything", "no input", *exchanged):
            prepare(group, prefix + what.replace(" ", "_"), what)
        turns[f"{prefix}calling"] = lambda group=group: _middle(  # type: ignore[misc]
            [each["seconds"] / per_call for each in ask(group, "no step")]
        )
    if plan.workers > 1:

        def apart(replicas: list[int], least: float = EXPLAIN_PIECE_SECONDS) -> dict[int, float]:
            how = {"replicas": replicas, "seconds": least, "steps_per_call": per_call}
            told = ask(point, "no communication", **how)
            taken = [dict(each["replicas"]) for each in told]
            if plan.kind == "cpu":
                # Those of one process share a pool of threads: which of them it serves first says nothing of any.
                taken = [dict.fromkeys(each, sum(each.values()) / len(each)) for each in taken if each]
            return {number: each_takes for each in taken for number, each_takes in each.items()}

        everyone = list(range(plan.workers))
        apart(everyone, least=0.0)
        turns["together"] = lambda: apart(everyone)
        for place, replicas in enumerate(_one_of_each_host(plan)[:MOST_ALONE]):
            turns[f"alone {place}"] = lambda replicas=replicas: apart(replicas)  # type: ignore[misc]
    return turns


def _round(found: Mapping[str, Any], plan: Plan, one: Plan) -> explain.Round:
    """What the turns have found, the baseline's as if there were an ideal device for each worker."""
    alone = [each for name, each in found.items() if name.startswith("alone")]
    return explain.Round(
        everything=found["everything"],
        no_input=found["no_input"],
        calling=found["calling"],
        one_everything=found["one_everything"] / plan.workers,
        one_no_input=found["one_no_input"] / plan.workers,
        one_calling=found["one_calling"] * plan.global_batch / (plan.workers * one.global_batch),
        no_statistics=found.get("no_statistics"),
        together=found.get("together", {}),
        alone={number: taken for each in alone for number, taken in each.items()},
    )


def _enough(rounds: int, seconds: float) -> bool:
    enough = rounds >= ENOUGH_ROUNDS and seconds > EXPLAIN_SECONDS
    return enough or (rounds >= LEAST_ROUNDS and seconds > PATIENCE_SECONDS)


def _one_of_each_host(plan: Plan) -> list[list[int]]:
    """The first replicas of all hosts, the second ones, and so on: each is alone on its host."""
    hosts: dict[int, list[int]] = {}
    for process in plan.processes:
        hosts.setdefault(process.host, []).extend(process.replicas)
    most = max(map(len, hosts.values()))
    return [[each[place] for each in hosts.values() if place < len(each)] for place in range(most)]


def _middle(values: list[float]) -> float:
    """The median, or the lower of two: one process that is slow does not decide."""
    return sorted(values)[(len(values) - 1) // 2]


def _measure(plan: Plan, point: Group, one: Group | None, measured: Measured) -> int:
    """Measures in the first steps of training, in turn with the baseline; returns the steps that a call takes.

    What an earlier attempt has timed is not timed again.
    """
    measured.steps_per_call = plan.steps_per_call or measured.steps_per_call
    missing = max(0, plan.repeats - len(measured.point)) if plan.measure_steps != 0 else 0
    if one is not None:
        missing = max(missing, plan.repeats - len(measured.baseline))
    if not missing and measured.steps_per_call:
        return measured.steps_per_call
    groups = [point] if one is None else [point, one]
    calibrate = {"do": "calibrate", "steps_per_call": plan.steps_per_call}
    pace = {
        group.name: max(answer["step_seconds"] for answer in group.ask("calibrated", calibrate).values())
        for group in groups
    }
    per_call = measured.steps_per_call = plan.steps_per_call or measure.steps_per_call(
        pace["point"], plan.concurrent_steps
    )
    for repeat in range(plan.repeats - missing, plan.repeats):
        # Who goes first changes with each repeat, so that a machine that slows down or speeds up favours neither.
        for group in groups if repeat % 2 == 0 else groups[::-1]:
            timed_before = measured.point if group is point else measured.baseline
            if len(timed_before) > repeat:
                continue
            command = {
                "do": "measure",
                "repeat": repeat,
                # Without turns, one repeat warms up the next.
                "warmup_steps": plan.warmup_steps if repeat == plan.repeats - missing or len(groups) > 1 else 0,
                "steps": plan.measure_steps
                or measure.steps_per_repeat(pace[group.name], per_call, group.plan.concurrent_steps),
                "steps_per_call": per_call,
            }
            timed = measure.slowest(group.ask("measured", command))
            timed_before.append(timed)
            measured.timed_workers = plan.workers
    return per_call

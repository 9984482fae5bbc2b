"""Takes a plan's processes through their life: join, load, build, measure in turn with the baseline, train, exit.

Knows jobs and events. What is told goes on to `tell`. Processes that are lost are started again, all of them from the
last checkpoint; what cannot be helped so becomes `RunFailed`, with no process left.
"""

import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.launch import Cluster
from pipeline.plan.plan import Plan, with_rate_scale
from pipeline.record import commands
from pipeline.record.commands import Resume
from pipeline.record.events import Event, Finished, Profiled, Restarted, Signalled
from pipeline.run.attempts import Attempt
from pipeline.run.errors import RunFailed
from pipeline.run.explaining import explain_loss
from pipeline.run.group import Group
from pipeline.run.holding import without_room
from pipeline.run.preemption import Preempted, Preemption
from pipeline.run.results import refused_of
from pipeline.run.timing import Measured, all_measured, build, profile, take_measurements
from pipeline.run.watch import Failure

# What the learning rate is multiplied by when training goes back to a checkpoint because it diverged.
ROLLBACK_SCALE = 0.5
UNLIKE = "The replicas ended with different weights: something that steps go by is not the same on all of them."


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
    laid_again: Callable[[Plan], Plan] = lambda plan: plan,
    one_device: Plan | None = None,
    keep: Callable[[Attempt], None] = lambda attempt: None,
    clock: Callable[[], float] | None = None,
    under_way: Attempt | None = None,
) -> None:
    """Runs `plan`, measured in turn with `baseline` where there is one, filling `measured` as it goes.

    Where the plan is to be explained, that is done against `one_device`, the baseline even if it was measured before.

    With `ask_size`, also with the size of the model, where a process has it at hand. With `resume`, training goes on
    from its last checkpoint. `fewer` lays the plan over fewer workers, where a lost one does not come back; None: it
    cannot. `laid_again` lays it over hosts that are others than before. Raises `RunFailed`, and `Preempted` once there
    is a checkpoint. No process is left, however it ends.

    `keep` notes each attempt before it begins. One that is `under_way` is gone on with, told anew, by its `clock`.
    """
    preemption = preemption or Preemption()
    measured.workers = plan.workers
    recovery = _Recovery(plan, baseline, measured, fewer, "last" if resume else None)
    if under_way is not None:
        recovery.take_over(under_way)
    while True:
        step = measured.step
        if under_way is None:
            keep(recovery.attempt(time.time()))
        try:
            now, resumed = recovery.plan, recovery.resume
            _attempt(cluster, now, baseline, folder, tell, measured, ask_size, resumed, preemption, one_device, clock)
            return
        except Preempted:
            what = cluster.returns(preemption.of_command)
            if what is None:
                raise
            text = f"The run was asked to leave by {preemption.asked}. {what}, and on from the last checkpoint."
            preemption.forget()
            recovery.resume = "last"
            measured.restarts += 1
        except RunFailed as failed:
            what = recovery.after(failed, measured.step > step)
            if what is None:
                raise
            text = f"{failed.failure.error.rstrip('.')}. {what}"
        measured.notes.append(text)
        under_way = None
        if cluster.moved():
            recovery.plan = laid_again(recovery.plan)
        now = recovery.plan
        tell(Restarted(text, now.workers, len(now.processes), len(now.leaders), time=time.time()))


@dataclass
class _Recovery:
    """What is tried next after a failure: which plan, and from which checkpoint."""

    plan: Plan
    baseline: Plan | None
    measured: Measured
    fewer: Callable[[Plan], Plan | None]
    resume: Resume | None
    restarts: int = 0
    # The log of the process that failed last.
    failed: Path | None = None

    def attempt(self, began: float) -> Attempt:
        """What is tried next, which begins now."""
        failed = None if self.failed is None else str(self.failed)
        return Attempt(self.plan.to_json(), began, self.measured, self.resume, self.restarts, failed)

    def take_over(self, attempt: Attempt) -> None:
        """Goes on with what another conductor has tried."""
        self.plan, self.resume, self.restarts = attempt.planned(), attempt.resume, attempt.restarts
        self.failed = None if attempt.failed is None else Path(attempt.failed)
        self.measured.workers = self.plan.workers

    def after(self, failed: RunFailed, progressed: bool) -> str | None:
        """What is done about a failure, in words; None where nothing is left to try."""
        failure, again = failed.failure, failed.log is not None and failed.log == self.failed and not progressed
        self.failed = failed.log
        most, measured = self.plan.launch.max_restarts, self.measured
        if failure.diverged and self.plan.training.on_divergence == "rollback" and measured.rollbacks < most:
            measured.rollbacks += 1
            self.resume = "back"
            self.plan = with_rate_scale(self.plan, self.plan.training.rate_scale * ROLLBACK_SCALE)
            return f"Training goes back to the last good checkpoint, with {ROLLBACK_SCALE:g} of the learning rate."
        if not failure.lost:
            return None
        smaller = self.fewer(self.plan) if again and self.plan.launch.elastic else None
        if smaller is None and self.restarts >= most:
            return None
        self.resume = "last"
        measured.restarts += 1
        if smaller is None:
            self.restarts += 1
            often = f"{self.restarts} of {most} times (launch.max_restarts)"
            return f"All processes are started again, {often}, and go on from the last checkpoint."
        if self.plan.measurement.explain:
            measured.notes.append("What was lost is not explained, since fewer workers train than were planned.")
        self.plan, self.failed = _unexplained(smaller), None
        measured.workers = smaller.workers
        if not all_measured(smaller, measured, self.baseline):
            # What was timed with more workers says nothing of fewer.
            measured.point.clear()
        return f"It did not come back: training goes on with {smaller.workers} workers, {_batch_rule(smaller)}."


def _unexplained(plan: Plan) -> Plan:
    return dataclasses.replace(plan, measurement=dataclasses.replace(plan.measurement, explain=False))


def _batch_rule(plan: Plan) -> str:
    if plan.training.scaling == "strong":
        return f"on the same global batches of {plan.training.global_batch}"
    return f"on global batches of {plan.training.global_batch} and {plan.training.rate_scale:.3g} of the learning rate"


def _attempt(
    cluster: Cluster,
    plan: Plan,
    baseline: Plan | None,
    folder: Path,
    tell: Callable[[Event], None],
    measured: Measured,
    ask_size: bool,
    resume: Resume | None,
    preemption: Preemption,
    one_device: Plan | None,
    time_of: Callable[[], float] | None,
) -> None:
    now = time_of or time.monotonic
    began, groups, clock = now(), list[Group](), _Clock(measured)

    def note(event: Event) -> None:
        if event.group == "point":
            measured.note(event)
        tell(event)

    def begin(planned: Plan, name: str) -> Group:
        groups.append(Group(cluster, planned, name, folder, note, preemption, now))
        if time_of is not None:
            # What was used while there was no conductor is not known.
            groups[-1].joules = None
        return groups[-1]

    try:
        point, one = begin(plan, "point"), None
        if baseline is not None and not all_measured(plan, measured, baseline):
            one = begin(baseline, "baseline")
        _come_up(groups, resume, measured)
        _check_once(plan, point, measured)
        measured.seconds_startup = measured.seconds_startup or now() - began
        if plan.measurement.profile and resume is None:
            _profile_once(point, measured, tell)
        clock.start(point)
        point.begin()
        try:
            per_call = take_measurements(plan, point, one, measured)
            if ask_size and resume is None:
                _ask_size(plan, point, one, measured)
            if one is not None:
                one.leave()
            finished = point.ask(commands.Train(per_call, str(folder)))
        except Preempted:
            finished = _saved(point, preemption, tell)
        clock.stop()
        _note_finished(finished, measured)
        if plan.measurement.explain and one_device is not None:
            explain_loss(point, begin(one_device, "baseline"), per_call, measured, tell)
        point.leave()
    finally:
        if groups:
            measured.notes += groups[0].replaced
            measured.restarts += len(groups[0].replaced)
        clock.stop()
        for group in groups:
            group.stop()


def _saved(point: Group, preemption: Preemption, tell: Callable[[Event], None]) -> dict[int, Finished]:
    """What processes told that were to save a checkpoint and leave, where training was over. Raises `Preempted`."""
    if preemption.by_person:
        tell(Signalled(signal.SIGINT, time=time.time()))
    if (over := point.save_and_leave()) is None:
        raise Preempted
    return over


def _note_finished(finished: dict[int, Finished], measured: Measured) -> None:
    measured.finished = finished[0]
    if len({digest for told in finished.values() for digest in told.weights}) > 1:
        measured.notes.append(UNLIKE)


def _come_up(groups: Sequence[Group], resume: Resume | None, measured: Measured) -> None:
    """Waits until the processes of all groups have joined, and built what they train; the first group is the point."""
    for group in groups:
        measured.versions = group.joined()[0].versions
    for group in groups:
        built = build(group, resume if group is groups[0] else None)
        if group is groups[0]:
            measured.built, measured.lost = built.event, built.lost
            if said := without_room(group.plan, built.event.state_bytes or 0):
                raise RunFailed(Failure(said, None, lost=False), None)


@dataclass
class _Clock:
    """Adds the seconds and joules of training to what was measured, however training ends."""

    measured: Measured
    point: Group | None = None
    began: tuple[float, float | None] = (0.0, None)

    def start(self, point: Group) -> None:
        """Training begins."""
        self.point, self.began = point, (point.seconds, point.joules)

    def stop(self) -> None:
        """Training is over; a second time nothing happens."""
        if self.point is None:
            return
        point, measured, (seconds, joules) = self.point, self.measured, self.began
        self.point = None
        measured.seconds_training = (measured.seconds_training or 0.0) + point.seconds - seconds
        if point.joules is not None and joules is not None:
            measured.energy_joules = (measured.energy_joules or 0.0) + point.joules - joules


def _check_once(plan: Plan, point: Group, measured: Measured) -> None:
    """Has all replicas be compared with one device, unless an earlier attempt has. Raises `RunFailed`."""
    if not plan.is_checked:
        return
    if measured.check is None:
        point.ask(commands.Check())
    if plan.training.check == "strict" and (said := refused_of(measured.check, plan.workers)):
        raise RunFailed(Failure(said, None, lost=False), None)


def _profile_once(point: Group, measured: Measured, tell: Callable[[Event], None]) -> None:
    """Times the input and the model alone, unless an earlier attempt has."""
    if measured.profile is None:
        measured.profile = profile(point)
        tell(Profiled(measured.profile, time=time.time()))


def _ask_size(plan: Plan, point: Group, one: Group | None, measured: Measured) -> None:
    """Has a process tell how large its model is, where its step is compiled, and its graph there to be read.

    A coordinator has no such graph, and that of batches of one size does not say what grows with them.
    """
    compiled = plan.measurement.steps != 0 or plan.training.steps_per_call is None
    if (
        measured.size is None
        and compiled
        and not plan.strategy.static_batches
        and not (plan.strategy.asynchronous and one is None)
    ):
        measured.size = (one or point).ask(commands.Size())[0].size

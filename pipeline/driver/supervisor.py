"""Takes a run through its life: start, join, build, measure, train, end; and through losses, restarts and preemption.

Processes that are lost are started again, all of them from the last checkpoint; a failure with no remedy left becomes
`RunFailed`, with no process left.
"""

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import replace

from omegaconf import OmegaConf

from pipeline.driver import Offered, RunResult, Tracking, offered, resume
from pipeline.driver.group import Group, Replay
from pipeline.driver.memory_check import keep_size, known_size, size_file, without_room
from pipeline.driver.planner import batch_rule, fewer, relaid
from pipeline.driver.results import preempted, refused_of, result_of
from pipeline.driver.run import Run, unwritten
from pipeline.driver.run_folders import EVENTS
from pipeline.driver.session import RunPreempted, RunRequest, Session
from pipeline.driver.tags import name_of, parameters, store_of, tags_of
from pipeline.driver.timing import Measurements, build, explain_loss, measure_size, profile, take_measurements
from pipeline.driver.watch import RunFailed
from pipeline.errors import UserError
from pipeline.launch import Cancelled, LaunchError, outlives
from pipeline.launch.signals import Interrupted
from pipeline.plan import planning
from pipeline.plan.backends import JAX, with_xla
from pipeline.plan.plan import Plan, from_json, identity, with_rate_scale
from pipeline.record import commands, events, results
from pipeline.record.events import PASSING, Ended, Event, Explained, Finished, Profiled, Restarted, Signalled, Unheard
from pipeline.record.files import run_id_of
from pipeline.record.log import write_json
from pipeline.record.results import Baseline, Ending, Result, Tracked

# The factor of the learning rate when training goes back to a checkpoint because it diverged.
ROLLBACK_SCALE = 0.5
UNLIKE = "The replicas ended with different weights: a step depends on something that differs between them."


class Supervisor:
    """Takes a run that was planned from its first process to its result.

    `reused` is its baseline, if that was measured before. A driver that takes over goes on with what `left` it, and
    hears `replay` first. `began` is when the command turned to the run.
    """

    def __init__(
        self,
        request: RunRequest,
        run: Run,
        session: Session,
        reused: Baseline | None = None,
        left: resume.Handover | None = None,
        replay: Replay | None = None,
        began: float | None = None,
    ) -> None:
        assert request.planned is not None, "it was planned"
        self.request, self.run, self.plan = request, run, request.planned.plan
        self._config, self._session, self._cluster = request.config, session, request.planned.cluster
        self._one_device, self._reused, self._left, self._replay = request.planned.baseline, reused, left, replay
        # The baseline, unless it was measured before.
        self._baseline = None if reused is not None else self._one_device
        self._measured, self._groups = Measurements(), list[Group]()
        # When the command turned to it, and the seconds since in which it had processes.
        self._began, self._seconds_processes = began, 0.0
        # The plan of the present attempt, the checkpoint that it resumes from, and the log of who failed last.
        self._now, self._failed = self.plan, None if left is None else left.failed
        self._resume: commands.Resume | None = None if run.is_new else "last"
        self._restarts = 0
        # The group that trains, with its seconds and joules when it began.
        self._training: tuple[Group, float, float | None] | None = None
        self._size_file = size_file(self.plan, request.output, session.search)
        self._ask_size = known_size(self.plan, self._size_file) is None
        if left is not None:
            self._measured, self._ask_size = left.measured, left.ask_size
            self._now, self._resume, self._restarts = from_json(left.plan), left.resume, left.restarts
            run.open()
        else:
            if not run.is_new:
                self._measured = run.measured(self.plan, self._one_worker())
            run.begin(self.plan, request.output)
        self._progress = session.screen.live(self.plan, time.monotonic(), session.ahead, self._earlier_events())
        self._offered = Offered(offered(self._config.views), self.plan, run.folder, session.screen.say)

    def train(self) -> Result:
        """Trains and measures; writes result.json, and ends the event log, which MLflow may still lack."""
        with self._offered:
            if self._left is not None:
                self.emit(events.Attached(os.getpid(), os.uname().nodename, time=time.time()))
            else:
                params = parameters(self.plan, self._config)
                tags = dict[str, object](tags_of(self.plan, self.request, self._session.options))
                self.emit(self.run.first_event(name_of(self.plan), self._config.tracking.experiment, params, tags))
            if self.plan.backend != JAX:
                self._cluster.warm_up()
            return self._train()

    def emit(self, event: Event) -> None:
        """Shows an event, and writes it to the log unless that has it."""
        if self._replay is not None and self._replay.is_logged(event):
            return
        if isinstance(event, Unheard):
            # A new run has none, whatever another of its name has left.
            for missed in self.run.missed(event) if self._resume else ():
                self.emit(missed)
            return
        now = time.monotonic()
        self._progress.update(event, now)
        if not isinstance(event, PASSING):
            self.run.append(event)
            self._offered.update(event, now)

    def _earlier_events(self) -> list[Event]:
        if self._replay is not None:
            return self._replay.logged
        if not self._measured.point:
            return []
        # Once the run itself is timed, no baseline joins any more.
        whole = len(self._measured.point) >= self.plan.measurement.repeats
        return self.run.timed("point", *([] if whole else ["baseline"]))

    def _train(self) -> Result:
        session, store, tracker = self._session, store_of(self._config), None
        if store:
            tracker = session.tracker(self.request.output)
            tracker.follow(self.run.folder, store)
        status, error, interrupted, blamed = "FAILED", None, None, None
        session.busy = session.saves = True
        if self._config.launch.detach:
            session.leaves, how = self.run.folder, resume.how(self.run.folder)
            session.screen.say(f"Ctrl-C, or a terminal that is closed, leaves it training: {how}")
        try:
            with self._progress:
                self._supervise()
            status = "FINISHED"
        except RunPreempted:
            status, error = "PREEMPTED", preempted(session.preemption, self.run.saved_step)
            if session.preemption.by_person:
                status, interrupted = "KILLED", Interrupted(signal.SIGINT)
        except RunFailed as failure:
            error, blamed = str(failure), failure.log
        except Interrupted as signalled:
            if session.left is not None:
                # To its processes, and to the next driver.
                with suppress(OSError):
                    self.run.close()
                session.busy = False
                self.run.release()
                raise
            status, error, interrupted = "KILLED", f"The run was ended by {signalled}.", signalled
            session.at_once = session.preemption.by_person
        except Cancelled as cancelled:
            status, error = "KILLED", str(cancelled)
        except (LaunchError, UserError) as lost:
            error = str(lost)
        except OSError as problem:
            error = f"{type(problem).__name__}: {problem}"
        session.saves, session.leaves = False, None
        ending = Ending(status, error, log=None if blamed is None else str(blamed))
        try:
            return self._end(ending, tracker, interrupted)
        finally:
            session.busy = False
            self.run.release()

    def _supervise(self) -> None:
        preemption, measured, taken_over = self._session.preemption, self._measured, self._left is not None
        measured.workers = self._now.workers
        while True:
            if not taken_over:
                measured.step, measured.check = self.run.step, self.run.check
                self._now = with_xla(self._now, self.run.xla)
                self._hand_over()
            taken_over = False
            try:
                return self._attempt()
            except RunPreempted:
                if (returns := self._cluster.returns(preemption.of_command)) is None:
                    raise
                text = f"The run was asked to leave by {preemption.asked}. {returns}, and on from the last checkpoint."
                preemption.forget()
                self._resume = "last"
                measured.restarts += 1
            except RunFailed as failed:
                if (remedy := self._remedy(failed)) is None:
                    raise
                text = f"{failed.error.rstrip('.')}. {remedy}"
            measured.notes.append(text)
            if self._cluster.moved():
                self._now = relaid(self._now, self._config, self._cluster)
            now = self._now
            self.emit(Restarted(text, now.workers, len(now.processes), len(now.leaders), time=time.time()))

    def _hand_over(self) -> None:
        if not outlives(self._config.cluster.name, self._config.launch.detach):
            return
        folder = self.run.folder
        resume.forget(folder)
        config, one = OmegaConf.to_yaml(OmegaConf.structured(self._config)), self._one_device
        baseline, began = None if one is None else one.to_json(), time.time()
        # Training goes on even if it cannot be written: then no driver can take over.
        with suppress(OSError):
            left = resume.Handover(
                config, os.getcwd(), self._now.to_json(), began, (folder / EVENTS).stat().st_size, self._measured,
                self._resume, self._restarts, self._failed, self.request.overrides, baseline, self._reused,
                self._ask_size,
            )  # fmt: skip
            write_json(folder / resume.FILE, left)

    def _remedy(self, failed: RunFailed) -> str | None:
        """Prepares the next attempt after a failure, and says how in words; None if nothing is left to try."""
        plan, measured, log = self._now, self._measured, failed.log
        again = log is not None and str(log) == self._failed and self.run.step == measured.step
        self._failed = None if log is None else str(log)
        limit = plan.launch.max_restarts
        if failed.diverged and plan.training.on_divergence == "rollback" and measured.rollbacks < limit:
            measured.rollbacks += 1
            self._resume = "back"
            self._now = with_rate_scale(plan, plan.training.rate_scale * ROLLBACK_SCALE)
            return f"Training goes back to the last good checkpoint, with {ROLLBACK_SCALE:g} of the learning rate."
        if not failed.lost:
            return None
        smaller = fewer(plan, self._config, self._cluster) if again and plan.launch.elastic else None
        if smaller is None and self._restarts >= limit:
            return None
        self._resume = "last"
        measured.restarts += 1
        if smaller is None:
            self._restarts += 1
            often = f"{self._restarts} of {limit} times (launch.max_restarts)"
            return f"All processes are started again, {often}, and go on from the last checkpoint."
        if plan.measurement.explain:
            measured.notes.append("What was lost is not explained, since fewer workers train than were planned.")
        self._now, self._failed = replace(smaller, measurement=replace(smaller.measurement, explain=False)), None
        measured.workers = smaller.workers
        if not measured.is_whole(smaller, self._baseline):
            # Timings of more workers do not hold for fewer.
            measured.point.clear()
        return f"It did not come back: training goes on with {smaller.workers} workers, {batch_rule(smaller)}."

    def _attempt(self) -> None:
        """Starts all processes and takes them to the end of training. None is left, however it ends."""
        plan, measured = self._now, self._measured
        if self._groups and self._replay is not None:
            self._replay.drop()
        self._groups, entered = [], time.monotonic()
        clock = time.monotonic if self._replay is None else self._replay.clock
        try:
            began = clock()
            point, one = self._start(plan, "point"), None
            if self._baseline is not None and not measured.is_whole(plan, self._baseline):
                one = self._start(self._baseline, "baseline")
            self._come_up()
            self._check(point)
            measured.seconds_startup = measured.seconds_startup or clock() - began
            if plan.measurement.profile and self._resume is None and measured.profile is None:
                measured.profile = profile(point)
                self.emit(Profiled(measured.profile, time=time.time()))
            self._training = (point, point.seconds, point.joules)
            point.begin()
            try:
                per_call = take_measurements(plan, point, one, measured)
                if self._ask_size and self._resume is None and measured.size is None:
                    measured.size = measure_size(point, one)
                if one is not None:
                    one.leave()
                finished = point.request(commands.Train(per_call, str(self.run.folder)))
            except RunPreempted:
                finished = self._save(point)
            self._count_training()
            measured.finished = finished[0]
            if len({digest for event in finished.values() for digest in event.weights}) > 1:
                measured.notes.append(UNLIKE)
            if plan.measurement.explain and self._one_device is not None:
                one = self._start(self._one_device, "baseline")
                if explained := explain_loss(point, one, per_call, measured):
                    self.emit(Explained(explained, time=time.time()))
            point.leave()
        finally:
            if self._groups:
                measured.notes += self._groups[0].replaced
                measured.restarts += len(self._groups[0].replaced)
            self._count_training()
            for group in self._groups:
                group.stop()
            self._seconds_processes += time.monotonic() - entered

    def _start(self, plan: Plan, name: str) -> Group:
        session, run = self._session, self.run
        group = Group(self._cluster, plan, name, run.folder, self.emit, session.preemption, self._replay)
        self._groups.append(group)
        return group

    def _come_up(self) -> None:
        measured, (point, *others) = self._measured, self._groups
        for group in self._groups:
            measured.versions = group.joined()[0].versions
        measured.built, measured.lost = build(point, self._resume)
        if refusal := without_room(point.plan, measured.built.state_bytes or 0):
            raise RunFailed(refusal, None, lost=False)
        for group in others:
            build(group)

    def _check(self, point: Group) -> None:
        if not point.plan.is_checked:
            return
        if self._measured.check is None:
            key, checks = (self._size_file, str(identity(json.loads(point.plan.to_json())))), self._session.checks
            if (check := checks.get(key)) and check.outcome == "equal":
                self.emit(events.Checked(replace(check, seconds=0.0), group=point.name, rank=0, time=time.time()))
            else:
                point.request(commands.Check())
            self._measured.check = checks[key] = self.run.check
        refusal = refused_of(self._measured.check, point.plan.workers)
        if point.plan.training.check == "strict" and refusal:
            raise RunFailed(refusal, None, lost=False)

    def _save(self, point: Group) -> dict[int, Finished]:
        if self._session.preemption.by_person:
            self.emit(Signalled(signal.SIGINT, time=time.time()))
        if (finished := point.save_and_leave()) is None:
            raise RunPreempted
        return finished

    def _count_training(self) -> None:
        if self._training is None:
            return
        measured, (point, seconds, joules), self._training = self._measured, self._training, None
        measured.seconds_training = (measured.seconds_training or 0.0) + point.seconds - seconds
        if point.joules is not None and joules is not None:
            measured.energy_joules = (measured.energy_joules or 0.0) + point.joules - joules

    def _end(self, ending: Ending, tracker: Tracking | None, interrupted: Interrupted | None) -> Result:
        self._keep_for_others()
        folder, session, reused = self.run.folder, self._session, self._reused
        result = result_of(self.run, self.plan, self._config, self._measured, ending, self._one_device, reused)
        if self._began is not None:
            own = time.monotonic() - self._began - self._seconds_processes
            result = replace(result, training=replace(result.training, seconds_driver=own))
        if tracker:
            result = replace(result, tracked=Tracked(run_id_of(folder)))
        try:
            results.write(folder, result)
        except OSError as problem:
            result = unwritten(result, problem)
        self.emit(events.Result(results.to_values(result), time=time.time()))
        self.emit(Ended(str(ending.status), ending.error, time=time.time()))
        resume.forget(folder)
        if ending.status == "FINISHED":
            # A run that did not finish reads it again when it is resumed.
            shutil.rmtree(folder / "cache", ignore_errors=True)
        try:
            self.run.close()
        except OSError as problem:
            result = unwritten(result, problem)
        if tracker:
            session.upload_later(folder, self._config.tracking.drain_timeout)
        if interrupted:
            session.ended_early.append(RunResult(result, folder))
            raise interrupted
        return result

    def _keep_for_others(self) -> None:
        measured = self._measured
        with suppress(OSError):
            if measured.size:
                keep_size(measured.size, self._size_file)
            if measured.baseline and not measured.is_disturbed(self.plan):
                repeats = [repeat.examples_per_second for repeat in measured.counted(self.plan)[1]]
                self._session.keep_baseline(self._one_worker(), self.request.output, repeats, self.run.folder)

    def _one_worker(self) -> Plan:
        return planning.baseline_of(self.plan, self._session.cluster(self._config).inventory())

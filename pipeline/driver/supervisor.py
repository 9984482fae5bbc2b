"""Takes a run through its life: start, join, build, measure, train, end; through losses, restarts and preemption."""

import json
import os
import shutil
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from msgspec import structs
from omegaconf import OmegaConf

from pipeline.driver import RunResult, Tracking, offered, resume, updated
from pipeline.driver.forecast import keep_size, known_size, size_file, without_room
from pipeline.driver.group import Group, Replay
from pipeline.driver.results import preempted, result_of
from pipeline.driver.run import Run, name_of, parameters, store_of, tags_of
from pipeline.driver.run_folders import EVENTS
from pipeline.driver.session import RunPreempted, RunRequest, Session
from pipeline.driver.start import fewer, relaid
from pipeline.driver.timing import Measurements, build, explain_loss, profile, take_measurements
from pipeline.driver.watch import RunFailed
from pipeline.errors import UserError
from pipeline.launch import Cancelled, outlives
from pipeline.launch.signals import Interrupted
from pipeline.plan import planning
from pipeline.plan.backends import JAX, with_xla
from pipeline.plan.plan import Plan, from_json, identity, with_rate_scale
from pipeline.record import commands, events, log, results
from pipeline.record.files import run_id_of

# The factor of the learning rate when training goes back to a checkpoint because it diverged.
ROLLBACK_SCALE = 0.5
UNLIKE = "The replicas ended with different weights: a step depends on something that differs between them."


@dataclass(eq=False)
class Supervisor:
    """Takes a run from its first process to its result; goes on with what another driver `left`, after its `replay`."""

    request: RunRequest
    run: Run
    _session: Session
    _reused: results.Baseline | None = None
    _left: resume.Handover | None = None
    _replay: Replay | None = None
    # When the command turned to it.
    began: float | None = None

    def __post_init__(self) -> None:
        run, session, plan, left = self.run, self._session, self.request.plan, self._left
        assert plan is not None, "it was planned"
        self.plan, self._one_device, self._cluster = plan, self.request.baseline, session.cluster(self.request.config)
        self._config, self._groups, self._seconds_processes = self.request.config, list[Group](), 0.0
        # The baseline, unless it was measured before.
        self._baseline = None if self._reused is not None else self._one_device
        # The group that trains, with its seconds and joules when it began.
        self._training: tuple[Group, float, float | None] | None = None
        self._size_file = size_file(self.plan, self.request.output, session.search)
        # The present attempt, and its plan.
        self._at, self._now = left or self._first_attempt(), self.plan if left is None else from_json(left.plan)
        if left is None:
            run.begin(self.plan, self.request.output)
        run.open()
        earlier, repeats = self._replay.logged if self._replay is not None else [], len(self._at.measured.point)
        if self._replay is None and repeats:
            # Once the run itself is timed, no baseline joins any more.
            earlier = run.timed("point", *["baseline"] * (repeats < self.plan.measurement.repeats))
        self._progress = session.screen.live(self.plan, time.monotonic(), session.ahead, earlier)
        self._makes = offered(self._config.views)

    def _first_attempt(self) -> resume.Handover:
        run, one = self.run, self._one_device
        return resume.Handover(
            "", "", "", 0.0, 0, Measurements() if run.is_new else run.measured(self.plan, self._one_worker()),
            None if run.is_new else "last", overrides=self.request.overrides,
            baseline=None if one is None else one.to_json(), known=self._reused,
            ask_size=known_size(self.plan, self._size_file) is None,
        )  # fmt: skip

    def train(self) -> results.Result:
        """Trains and measures; writes result.json, and ends the event log, which MLflow may still lack."""
        plan, config = self.plan, self._config
        with updated(self._makes, plan, self.run.folder, self._session.screen.say) as self._update_others:
            if self._left is not None:
                self.emit(events.Attached(os.getpid(), os.uname().nodename, time=time.time()))
            else:
                tags = dict[str, object](tags_of(plan, self.request, self._session.options))
                params = parameters(plan, config)
                self.emit(self.run.first_event(name_of(plan), config.tracking.experiment, params, tags))
            if plan.backend != JAX:
                self._cluster.warm_up()
            return self._train()

    def emit(self, event: events.Event) -> None:
        """Shows an event, and writes it to the log unless that has it."""
        if self._replay is not None and self._replay.is_logged(event):
            return
        if isinstance(event, events.Unheard):
            # Those that the log lacks; a new run has none, whatever another of its name has left.
            step, epoch, earlier = self.run.step, self.run.epoch, event.events if self._at.resume else ()
            for one in map(log.from_plain, earlier):
                steps = isinstance(one, events.Steps) and one.step > step
                if steps or (isinstance(one, events.Epoch) and one.epoch > epoch):
                    self.emit(structs.replace(one, group="point", rank=0))
            return
        self._progress.update(event, now := time.monotonic())
        if not isinstance(event, events.PASSING):
            self.run.append(event)
            self._update_others(event, now)

    def _train(self) -> results.Result:
        session, tracker = self._session, None
        if store := store_of(self._config):
            tracker = session.tracker(self.request.output)
            tracker.follow(self.run.folder, store)
        ending, interrupted = results.Ending("FINISHED"), None
        session.busy = session.saves = True
        if self._config.launch.detach:
            session.leaves, how = self.run.folder, resume.how(self.run.folder)
            session.screen.say(f"Ctrl-C, or a terminal that is closed, leaves it training: {how}")
        try:
            with self._progress:
                self._supervise()
        except RunPreempted:
            interrupted = Interrupted(signal.SIGINT) if session.preemption.by_person else None
            status = "KILLED" if interrupted else "PREEMPTED"
            ending = results.Ending(status, preempted(session.preemption, self.run.saved_step))
        except RunFailed as failure:
            ending = results.Ending("FAILED", str(failure), None if failure.log is None else str(failure.log))
        except Interrupted as signalled:
            if session.left is not None:
                # To its processes, and to the next driver.
                with suppress(OSError):
                    self.run.close()
                session.busy = False
                self.run.release()
                raise
            ending, interrupted = results.Ending("KILLED", f"The run was ended by {signalled}."), signalled
            session.at_once = session.preemption.by_person
        except UserError as lost:
            ending = results.Ending("KILLED" if isinstance(lost, Cancelled) else "FAILED", str(lost))
        except OSError as problem:
            ending = results.Ending("FAILED", f"{type(problem).__name__}: {problem}")
        session.saves, session.leaves = False, None
        try:
            return self._end(ending, tracker, interrupted)
        finally:
            session.busy = False
            self.run.release()

    def _supervise(self) -> None:
        preemption, measured, taken_over = self._session.preemption, self._at.measured, self._left is not None
        measured.workers = self._now.workers
        while True:
            if not taken_over:
                measured.step, measured.check = self.run.step, self.run.check
                self._now = with_xla(self._now, self.run.xla)
                if outlives(self._config.cluster.name, self._config.launch.detach):
                    at, folder = self._at, self.run.folder
                    resume.forget(folder)
                    at.config, at.plan = OmegaConf.to_yaml(OmegaConf.structured(self._config)), self._now.to_json()
                    # Training goes on even if it cannot be written: then no driver can take over.
                    with suppress(OSError):
                        at.directory, at.began, at.offset = os.getcwd(), time.time(), (folder / EVENTS).stat().st_size
                        log.write_json(folder / resume.FILE, at)
            taken_over = False
            try:
                return self._attempt()
            except RunPreempted:
                if (returns := self._cluster.returns(preemption.of_command)) is None:
                    raise
                text = f"The run was asked to leave by {preemption.asked}. {returns}, and on from the last checkpoint."
                preemption.signal = None
                self._at.resume = "last"
                measured.restarts += 1
            except RunFailed as failed:
                if (remedy := self._remedy(failed)) is None:
                    raise
                text = f"{failed.error.rstrip('.')}. {remedy}"
            measured.notes.append(text)
            if self._cluster.moved():
                self._now = relaid(self._now, self._config, self._cluster)
            now = self._now
            self.emit(events.Restarted(text, now.workers, len(now.processes), len(now.leaders), time=time.time()))

    def _remedy(self, failed: RunFailed) -> str | None:
        """Prepares the next attempt after a failure, and says how in words; None if nothing is left to try."""
        plan, at, measured, file = self._now, self._at, self._at.measured, failed.log
        again = file is not None and str(file) == at.failed and self.run.step == measured.step
        at.failed = None if file is None else str(file)
        limit = plan.launch.max_restarts
        if failed.diverged and plan.training.on_divergence == "rollback" and measured.rollbacks < limit:
            measured.rollbacks += 1
            at.resume = "back"
            self._now = with_rate_scale(plan, plan.training.rate_scale * ROLLBACK_SCALE)
            return f"Training goes back to the last good checkpoint, with {ROLLBACK_SCALE:g} of the learning rate."
        if not failed.lost:
            return None
        smaller = fewer(plan, self._config, self._cluster) if again and plan.launch.elastic else None
        if smaller is None and at.restarts >= limit:
            return None
        at.resume = "last"
        measured.restarts += 1
        if smaller is None:
            at.restarts += 1
            often = f"{at.restarts} of {limit} times (launch.max_restarts)"
            return f"All processes are started again, {often}, and go on from the last checkpoint."
        if plan.measurement.explain:
            measured.notes.append("What was lost is not explained, since fewer workers train than were planned.")
        self._now, at.failed = replace(smaller, measurement=replace(smaller.measurement, explain=False)), None
        measured.workers = smaller.workers
        if not measured.is_whole(smaller, self._baseline):
            # Timings of more workers do not hold for fewer.
            measured.point.clear()
        training, batches = smaller.training, f"global batches of {smaller.training.global_batch}"
        rule = (
            f"the same {batches}"
            if training.scaling == "strong"
            else f"{batches} and {training.rate_scale:.3g} of the learning rate"
        )
        return f"It did not come back: training goes on with {smaller.workers} workers, on {rule}."

    def _attempt(self) -> None:
        """Starts all processes and takes them to the end of training. None is left, however it ends."""
        plan, at, measured, entered = self._now, self._at, self._at.measured, time.monotonic()
        if self._groups and self._replay is not None:
            self._replay.drop()
        self._groups = []
        try:
            began = time.monotonic() if self._replay is None else self._replay.clock()
            point, one = self._start(plan, "point"), None
            if self._baseline is not None and not measured.is_whole(plan, self._baseline):
                one = self._start(self._baseline, "baseline")
            for group in self._groups:
                measured.versions = group.joined()[0].versions
            measured.built, measured.lost = build(point, at.resume)
            if refusal := without_room(plan, measured.built.state_bytes or 0):
                raise RunFailed(refusal, None, lost=False)
            if one is not None:
                build(one)
            self._check(point)
            measured.seconds_startup = measured.seconds_startup or point.clock() - began
            if plan.measurement.profile and at.resume is None and measured.profile is None:
                measured.profile = profile(point)
                self.emit(events.Profiled(measured.profile, time=time.time()))
            self._training = (point, point.seconds, point.joules)
            point.begin()
            try:
                per_call = take_measurements(plan, point, one, measured)
                # Only a compiled step has a graph that says what grows with the batch.
                compiled = plan.measurement.steps != 0 or plan.training.steps_per_call is None
                varies = not plan.strategy.static_batches and not (plan.strategy.asynchronous and one is None)
                if compiled and varies and at.ask_size and at.resume is None and measured.size is None:
                    measured.size = (one or point).request(commands.MeasureSize())[0].size
                if one is not None:
                    one.leave()
                finished = point.request(commands.Train(per_call, str(self.run.folder)))
            except RunPreempted:
                if self._session.preemption.by_person:
                    self.emit(events.Signalled(signal.SIGINT, time=time.time()))
                if (last := point.save_and_leave()) is None:
                    raise
                finished = last
            self._count_training()
            measured.finished = finished[0]
            if len({digest for event in finished.values() for digest in event.weights}) > 1:
                measured.notes.append(UNLIKE)
            if plan.measurement.explain and self._one_device is not None:
                one = self._start(self._one_device, "baseline")
                if explained := explain_loss(point, one, per_call, measured):
                    self.emit(events.Explained(explained, time=time.time()))
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

    def _check(self, point: Group) -> None:
        if not point.plan.is_checked:
            return
        measured, checks = self._at.measured, self._session.checks
        if measured.check is None:
            key = (self._size_file, str(identity(json.loads(point.plan.to_json()))))
            if (check := checks.get(key)) and check.outcome == "equal":
                self.emit(events.Checked(replace(check, seconds=0.0), group=point.name, rank=0, time=time.time()))
            else:
                point.request(commands.Check())
            measured.check = checks[key] = self.run.check
        check, workers = measured.check, point.plan.workers
        if point.plan.training.check == "strict" and check is not None and check.outcome != "equal":
            text = f"others: {check.said(workers)} {check.advice}"
            if check.outcome == "not made":
                text = f"some that cannot be compared: {check.unsaid}. Try train.check=true."
            expected = f"Expected {workers} replicas that train what one device trains, for train.check=strict"
            raise RunFailed(f"{expected}, received {text}", None, lost=False)

    def _count_training(self) -> None:
        if self._training is not None:
            measured, (point, seconds, joules), self._training = self._at.measured, self._training, None
            measured.seconds_training = (measured.seconds_training or 0.0) + point.seconds - seconds
            if point.joules is not None and joules is not None:
                measured.energy_joules = (measured.energy_joules or 0.0) + point.joules - joules

    def _end(self, ending: results.Ending, tracker: Tracking | None, interrupted: Interrupted | None) -> results.Result:
        folder, session, measured = self.run.folder, self._session, self._at.measured
        with suppress(OSError):
            if measured.size:
                keep_size(measured.size, self._size_file)
            if measured.baseline and not measured.is_disturbed(self.plan):
                repeats = [repeat.examples_per_second for repeat in measured.counted(self.plan)[1]]
                session.keep_baseline(self._one_worker(), self.request.output, repeats, folder)
        result = result_of(self.run, self.plan, self._config, self._at, ending)
        if self.began is not None:
            own = time.monotonic() - self.began - self._seconds_processes
            result = replace(result, training=replace(result.training, seconds_driver=own))
        if tracker:
            result = replace(result, mlflow_run_id=run_id_of(folder))
        try:
            results.write(folder, result)
        except OSError as problem:
            result = _unwritten(result, problem)
        self.emit(events.Result(results.to_values(result), time=time.time()))
        self.emit(events.Ended(str(ending.status), ending.error, time=time.time()))
        resume.forget(folder)
        if ending.status == "FINISHED":
            # A run that did not finish reads it again when it is resumed.
            shutil.rmtree(folder / "cache", ignore_errors=True)
        try:
            self.run.close()
        except OSError as problem:
            result = _unwritten(result, problem)
        if tracker:
            session.pending[folder] = self._config.tracking.drain_timeout
        if interrupted:
            session.ended_early.append(RunResult(result, folder))
            raise interrupted
        return result

    def _one_worker(self) -> Plan:
        return planning.baseline_of(self.plan, self._session.cluster(self._config).inventory())


def _unwritten(result: results.Result, problem: OSError) -> results.Result:
    """The result of a run whose folder cannot be written to any more."""
    error = result.ending.error or f"The run's folder cannot be written to: {problem.strerror}."
    return replace(result, ending=replace(result.ending, status="FAILED", error=error))

"""One run under way: its folder, its event log, what is shown of it and where it is tracked."""

import dataclasses
import os
import shutil
import signal
import time
import uuid
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path

from pipeline.analyze import outlook, scoring, step_model
from pipeline.analyze.measure import Goodput
from pipeline.config.parts import flat
from pipeline.errors import UserError
from pipeline.launch import Cancelled, Cluster, LaunchError, outlives
from pipeline.launch.signals import Interrupted
from pipeline.plan import plan, planning
from pipeline.plan.backends import COMPUTING, JAX
from pipeline.plan.plan import Plan, as_long_as, with_rate_scale
from pipeline.record import baselines, events, predictions, results
from pipeline.record.baselines import Baseline
from pipeline.record.events import PASSING, Ended, Event, Restored, Resumed, Run
from pipeline.record.log import EventLog, write_whole
from pipeline.record.predictions import Scored
from pipeline.record.results import Cost, Ending, Environment, Result, Survival
from pipeline.run import attach, attempts, model_size, resume, views
from pipeline.run.attempts import Attempt, UnderWay
from pipeline.run.beforehand import choices_of, layout_of
from pipeline.run.conduct import conduct
from pipeline.run.errors import RunFailed
from pipeline.run.heard import Heard
from pipeline.run.laying_out import planned_on, with_addresses
from pipeline.run.lock import Lock
from pipeline.run.preemption import Preempted
from pipeline.run.results import (
    bound_by_input,
    check_notes,
    ended_early,
    explained_otherwise,
    input_of,
    preempted,
    skipped_notes,
    speed_of,
    staleness_of,
    timed_with,
    training_of,
    unwritten,
)
from pipeline.run.resume import Earlier
from pipeline.run.session import PointRequest, Session
from pipeline.run.tags import name_of, parameters, store_of, tags_of
from pipeline.run.timing import Measured
from pipeline.run.tracked import Tracked
from pipeline.run.views import PointResult, Tracking


class Point:
    """One run under way: its folder, its event log, what is shown of it and where it is tracked."""

    def __init__(
        self,
        request: PointRequest,
        planned: Plan,
        session: Session,
        earlier: Earlier | None = None,
        known: Baseline | None = None,
        attached: attach.Attached | None = None,
    ) -> None:
        config, folder = request.config, request.folder
        self._request, self._attached = request, attached
        self._config, self._plan, self._session, self._folder = config, planned, session, folder
        self._earlier, self._measured, self._known = earlier, Measured(), known
        self._lock = earlier.lock if earlier else Lock(folder)
        self._store = store_of(config)
        self._baseline_source: str | None = None
        self._blamed: Path | None = None
        self._baseline_repeats: list[float] = []
        self._size_file = model_size.file(planned, Path(config.output_dir), session.search)
        self._ask_size = model_size.known(planned, self._size_file) is None
        if attached is not None:
            self._measured, self._ask_size = attached.under_way.attempt.measured, attached.under_way.ask_size
        elif earlier is not None:
            one = planning.baseline_of(planned, session.cluster(config).inventory())
            self._measured = earlier.measured(planned, one)
            with suppress(OSError):
                (folder / results.FILE).unlink()
        if attached is None:
            write_whole(folder / "plan.json", planned.to_json())
            resume.note(folder, planned, Path(config.output_dir))
        # The last step and epoch that are in the log, and what its steps came to.
        self._heard, self._goodput = Heard(), Goodput()
        for event in earlier.events if earlier else ():
            self._heard.note(event)
            self._goodput.note(event)
        self._log = EventLog(folder / "events.jsonl")
        self._progress = session.screen.live(planned, time.monotonic(), session.ahead)
        self._offered = views.Offered(views.offered(config.views), planned, folder, session.screen.say)
        if attached is not None:
            self._progress.recall(attached.told, time.monotonic())
        elif earlier is not None and self._measured.point:
            timed: list[Event] = [event for event in earlier.events if isinstance(event, events.Measured)]
            if len(self._measured.point) >= planned.measurement.repeats:
                # No baseline will join any more.
                timed = [event for event in timed if event.group == "point"]
            self._progress.recall(timed, time.monotonic())
        self._first = self._begins()

    def _begins(self) -> Event:
        """What is told first: that the run begins, or that this command goes on with it."""
        pid, host, now = os.getpid(), os.uname().nodename, time.time()
        if self._attached is not None:
            return events.Attached(pid, host, time=now)
        params = parameters(self._plan, self._config)
        tags = dict[str, object](tags_of(self._plan, self._request, self._session.options))
        if self._earlier is not None and self._earlier.events:
            return Resumed(params, tags, pid, host, time=now)
        return Run(
            key=uuid.uuid4().hex,
            name=name_of(self._plan),
            folder=str(self._folder),
            experiment=self._config.tracking.experiment,
            params=params,
            tags=tags,
            pid=pid,
            host=host,
            version=events.VERSION,
            time=now,
        )

    def run(self, cluster: Cluster, baseline: Plan | None) -> Result:
        """Trains and measures; writes result.json, ends the event log, and waits a little for the tracker."""
        with self._offered:
            self._tell(self._first)
            return self._run(cluster, baseline)

    def _run(self, cluster: Cluster, baseline: Plan | None) -> Result:
        if self._plan.backend != JAX:
            cluster.warm_up()
        tracker = self._session.tracker(Path(self._config.output_dir) / "tracker.log") if self._store else None
        if tracker and self._store:
            tracker.follow(self._folder, self._store)
        status, error, interrupted = "FAILED", None, None
        session = self._session
        session.busy = session.saves = True
        if self._config.launch.detach:
            session.leaves = self._folder
            session.screen.say(f"Ctrl-C, or a terminal that is closed, leaves it training: {attach.how(self._folder)}")
        try:
            with self._progress:
                self._conduct(cluster, baseline)
            status = "FINISHED"
        except Preempted:
            status, error = "PREEMPTED", preempted(session.preemption, self._measured)
            if session.preemption.by_person:
                status, interrupted = "KILLED", Interrupted(signal.SIGINT)
        except RunFailed as failure:
            error = str(failure)
            self._blamed = failure.log
        except Interrupted as signalled:
            if session.left is not None:
                self._leave()
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
        try:
            return self._end(status, error, tracker, interrupted)
        finally:
            session.busy = False
            self._lock.release()

    def _conduct(self, cluster: Cluster, baseline: Plan | None) -> None:
        """Conducts it from its beginning, or from where the conductor before this one has left it."""
        attached, kept = self._attached, outlives(self._config.cluster.name, self._config.launch.detach)
        conduct(
            cluster if attached is None else attached.replay.on(cluster),
            self._plan,
            self._reuse(baseline),
            self._folder,
            self._tell,
            self._measured,
            ask_size=self._ask_size,
            resume=self._earlier is not None,
            preemption=self._session.preemption,
            fewer=partial(self._fewer, cluster),
            laid_again=partial(self._laid_out, cluster),
            one_device=baseline,
            keep=partial(self._keep, baseline) if kept else lambda attempt: None,
            clock=None if attached is None else attached.replay.clock,
            under_way=None if attached is None else attached.under_way.attempt,
        )

    def _keep(self, baseline: Plan | None, attempt: Attempt) -> None:
        """Notes an attempt, for another conductor to go on with it."""
        attempts.forget(self._folder)
        under_way = UnderWay(
            attach.kept(self._config),
            attempt,
            (self._folder / "events.jsonl").stat().st_size,
            os.getcwd(),
            self._request.overrides,
            None if baseline is None else baseline.to_json(),
            self._known,
            self._ask_size,
        )
        # What cannot be written cannot be taken over: the training goes on all the same.
        with suppress(OSError):
            under_way.write(self._folder)

    def _leave(self) -> None:
        """Leaves it to its processes, and to the next conductor."""
        with suppress(OSError):
            self._log.close()
        self._session.busy = False
        self._lock.release()

    def _fewer(self, cluster: Cluster, planned: Plan) -> Plan | None:
        """The plan over the most workers below its own that it can be laid over; None where there are too few."""
        for workers in range(planned.workers - 1, planned.launch.min_workers - 1, -1):
            with suppress(UserError):
                return self._laid_out(cluster, planned, workers)
        return None

    def _laid_out(self, cluster: Cluster, planned: Plan, workers: int | None = None) -> Plan:
        """The plan over the hosts that are there now, with as many workers or others. Raises `UserError`."""
        config = dataclasses.replace(self._config, workers=workers or planned.workers)
        made = with_addresses(planned_on(config, cluster), cluster)
        made = as_long_as(made, flat(planned))
        # Held fixed, the global batch keeps its rate; smaller, it has one that is smaller in proportion.
        scale = planned.training.rate_scale * made.training.global_batch / planned.training.global_batch
        return dataclasses.replace(with_rate_scale(made, scale), checkpoint=planned.checkpoint)

    def _end(self, status: str, error: str | None, tracker: Tracking | None, interrupted: Interrupted | None) -> Result:
        result = self._result(status, error)
        tracked = tracker and self._tracked(tracker, interrupted is not None or status == "PREEMPTED")
        result = self._write(tracked.named(result) if tracked else result)
        self._tell(events.Result(results.to_values(result), time=time.time()))
        self._tell(Ended(status, error, time=time.time()))
        attempts.forget(self._folder)
        if status == "FINISHED":
            # What goes on with a run that did not finish reads it again.
            shutil.rmtree(self._folder / "cache", ignore_errors=True)
        if tracked:
            result = self._write(tracked.sent(result))
            interrupted = interrupted or tracked.interrupted
        try:
            self._log.close()
        except OSError as problem:
            result = unwritten(result, problem)
        if interrupted:
            self._session.ended_early.append(PointResult(result, str(self._folder)))
            raise interrupted
        return result

    def _tracked(self, tracker: Tracking, hurried: bool) -> Tracked:
        """Who waits for what MLflow has of it, but no longer than whoever ends the command waits for that."""
        session = self._session
        return Tracked(
            tracker,
            self._folder,
            self._config.tracking.drain_timeout,
            session.screen.say,
            lambda: hurried or session.preemption.asked is not None,
            session.at_once,
        )

    def _tell(self, event: Event) -> None:
        if self._attached is not None and self._attached.replay.is_known(event):
            return
        if isinstance(event, Restored):
            for missed in self._heard.unheard(event.told):
                self._tell(missed)
            event = dataclasses.replace(event, told=())
        if event.group == "point":
            self._heard.note(event)
        now = time.monotonic()
        self._progress.update(event, now)
        if not isinstance(event, PASSING):
            self._log.append(event)
            self._goodput.note(event)
            self._offered.update(event, now)

    def _reuse(self, baseline: Plan | None) -> Plan | None:
        """The baseline that must be measured: none where an equal one was, and may be used."""
        if baseline is None:
            return None
        self._baseline_source = results.IN_THIS_RUN
        if self._known is None:
            return baseline
        self._baseline_repeats = list(self._known.examples_per_second)
        self._baseline_source = f"reused from {self._known.folder}"
        return None

    def _result(self, status: str, error: str | None) -> Result:
        planned, measured = self._plan, self._measured
        if measured.baseline:
            self._baseline_repeats = [repeat.examples_per_second for repeat in measured.counted(planned)[1]]
        # What other commands can do without.
        with suppress(OSError):
            if measured.size:
                model_size.keep(measured.size, self._size_file)
            if measured.baseline and not measured.is_disturbed(planned):
                self._keep_baseline()
        speed = speed_of(planned, measured, self._baseline_repeats, self._baseline_source)
        middle, finished, waited = speed.examples_per_second, measured.finished, input_of(planned, measured)
        timed_workers = measured.timed_workers or planned.workers
        price = self._config.hardware.price_per_hour
        seconds = outlook.seconds_to_finish(planned, middle, measured.built.train_examples) if middle else None
        training = training_of(measured, self._folder)
        return Result(
            Ending(status, error, log=None if self._blamed is None else str(self._blamed)),
            choices_of(planned),
            layout_of(planned, timed_workers),
            speed,
            waited,
            training,
            staleness_of(planned, finished),
            self._survived(),
            Cost(seconds, price, outlook.cost(price, planned.hardware.hosts, seconds), measured.energy_joules),
            environment=Environment(planned.hardware.machine, measured.versions),
            check=measured.check,
            profile=measured.profile,
            explained=measured.explained,
            predictions=self._scored(middle) if status == "FINISHED" and middle else (),
            notes=(
                *planned.notes,
                *measured.notes,
                *(measured.built.notes or ()),
                *ended_early(training),
                *check_notes(measured.check, planned.workers),
                *timed_with(planned, measured, speed),
                *bound_by_input(waited),
                *explained_otherwise(measured.explained, speed, timed_workers),
                *skipped_notes(measured),
            ),
        )

    def _scored(self, measured: float) -> tuple[Scored, ...]:
        """The predictions that were made for this run, and how far off they were."""
        if self._plan.hardware.oversubscribed:
            # What was predicted is what devices with cores of their own do.
            return ()
        lines = predictions.read(Path(self._config.output_dir))
        return tuple(scoring.scored(lines, step_model.identity(self._plan), measured))

    def _survived(self) -> Survival:
        """How it went on whatever happened: what was started again, what was done twice, and what that cost."""
        measured, goodput = self._measured, self._goodput
        return Survival(
            workers_at_end=measured.workers or self._plan.workers,
            resumed=goodput.resumed,
            restarts=measured.restarts,
            rollbacks=measured.rollbacks,
            steps_repeated=goodput.repeated,
            goodput=goodput.share,
            checkpoint_step=measured.saved_step,
        )

    def _keep_baseline(self) -> None:
        baseline = planning.baseline_of(self._plan, self._session.cluster(self._config).inventory())
        path = _baseline_file(baseline, Path(self._config.output_dir))
        kept = Baseline(tuple(self._baseline_repeats), str(self._folder), time.time())
        self._session.baselines[path] = kept
        baselines.write(path, kept)

    def _write(self, result: Result) -> Result:
        """Writes it, and gives back what is to be said of the run where that cannot be done."""
        try:
            results.write(self._folder, result)
        except OSError as problem:
            return unwritten(result, problem)
        return result


def known_baseline(baseline: Plan | None, output: Path, session: Session) -> Baseline | None:
    """What was measured before and may stand for this baseline: in this command, or with `auto` in another one."""
    if baseline is None:
        return None
    path, how, known = _baseline_file(baseline, output), baseline.measurement.baseline, None
    if how in ("once", "auto"):
        known = session.baselines.get(path)
    return baselines.read(path) if known is None and how == "auto" else known


def _baseline_file(baseline: Plan, output: Path) -> Path:
    versions = {name: metadata.version(name) for name in (*COMPUTING.get(baseline.backend, ()), "keras", "numpy")}
    return output / "baselines" / f"{plan.fingerprint(baseline, versions)}.json"

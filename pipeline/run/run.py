"""Runs one point from its config to its result: plan, launch, record. A session holds what points share."""

import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.analyze import comparable, explain, history, measure, outlook, predict
from pipeline.analyze.history import HistoryError
from pipeline.analyze.predict import PredictError
from pipeline.config import targets
from pipeline.config.offers import OfferError
from pipeline.config.parts import Part, fields_of
from pipeline.config.schema import Config, Mode, Store
from pipeline.data import manifest
from pipeline.data.errors import DataError, first_of
from pipeline.launch import Cluster, LaunchError, cluster_of, reach
from pipeline.launch.signals import Interrupted
from pipeline.plan import plan
from pipeline.plan.estimate import estimate
from pipeline.plan.plan import Plan, PlanError
from pipeline.plan.size import Size
from pipeline.record import events
from pipeline.record.events import PASSING, PREEMPTING, Event, EventLog, write_whole
from pipeline.run import model_size, resume, sweep, views
from pipeline.run.conduct import Measured, Preempted, Preemption, RunFailed, conduct, time_steps
from pipeline.run.resume import Earlier, ResumeError
from pipeline.run.views import Ahead, Screen, Tracking

Result = dict[str, Any]
# How many of the examples that were left out are named.
SKIPPED_NAMED = 3
# The function that reads what `python -m pipeline prepare` wrote.
PREPARED = "pipeline.data.tfrecord"
# Where Hydra writes what was composed, in the folder of a point.
HYDRA_S = "hydra"
# A line for each prediction that was made, in the output folder.
PREDICTIONS = "predictions.jsonl"
# What a point that cannot be laid out, or predicted, raises.
REFUSALS = (
    PlanError, targets.TargetError, LaunchError, reach.NoAnswerError, ResumeError, DataError, HistoryError,
    PredictError, OfferError,
)  # fmt: skip


@dataclass
class Session:
    """What all points of a command share: the machine, the cluster with its fork server, and the tracker."""

    search: tuple[str, ...]
    environ: Mapping[str, str]
    screen: Screen
    # Starts who tracks runs, whose own words go to the log that it is given.
    track: Callable[[Mapping[str, str], Path], Tracking]
    # By the point's place in the command, and which repeat of it this is.
    results: dict[tuple[int, int], Result] = field(default_factory=dict)
    baselines: dict[Path, dict[str, Any]] = field(default_factory=dict)
    # Addresses where a TPU has answered.
    tpus: set[str] = field(default_factory=set)
    # Why a model could not be built, by the file that its size would be in.
    unbuilt: dict[Path, str] = field(default_factory=dict)
    # A step of one worker that was timed to predict from, by what decides it; None where that failed.
    timed: dict[str, predict.Observed | None] = field(default_factory=dict)
    # What was logged before, by the sweep that is asked for.
    histories: dict[str | None, list[history.Run]] = field(default_factory=dict)
    preemption: Preemption = field(default_factory=Preemption)
    # Is a point under way, which a scheduler's signal lets end by itself?
    busy: bool = False
    # How far the sweep is that the point under way belongs to.
    ahead: Ahead | None = None
    _clusters: dict[str, Cluster] = field(default_factory=dict)
    _tracker: Tracking | None = None

    def cluster(self, config: Config) -> Cluster:
        """The cluster that `config` names, the same one each time."""
        name = f"{config.cluster}"
        if name not in self._clusters:
            self._clusters[name] = cluster_of(config.cluster, self.environ)
        return self._clusters[name]

    def tracker(self, log: Path) -> Tracking:
        """The process that writes to MLflow; `log` takes what it says."""
        if self._tracker is None:
            self._tracker = self.track(self.environ, log)
        return self._tracker

    def serve(self, config: Config) -> int | None:
        """The exit code once this process has done what a conductor elsewhere said; None where it conducts itself."""
        self.busy = True
        try:
            return self.cluster(config).serve(self.screen.say, lambda: self.preemption.asked)
        finally:
            self.busy = False

    def close(self, code: int) -> None:
        """Ends the tracker and the clusters; `code` is what the command ends with."""
        if self._tracker is not None:
            self._tracker.close()
        for cluster in self._clusters.values():
            cluster.close(code)


@dataclass(frozen=True)
class LaidOut:
    """A point's plan and that of its baseline, if it has one, made once, and the cluster that they are made for."""

    plan: Plan
    baseline: Plan | None
    cluster: Cluster


@dataclass(frozen=True)
class PointRequest:
    """One point as it was asked for: its config, its folder, what was typed, and the sweep it belongs to.

    The folder may have an earlier attempt at it where it is the point's `own`: it goes on with that and no other.
    `laid_out` once it was looked over.
    """

    config: Config
    folder: Path
    overrides: list[str]
    sweep: str | None
    own: bool = False
    laid_out: LaidOut | None = None

    def about(self) -> Result:
        """What a result says of it."""
        return {"folder": str(self.folder), "overrides": self.overrides, "sweep": self.sweep}


def look_over(request: PointRequest, session: Session) -> PointRequest | Result:
    """The point laid out, whose imports begin; the result of one that cannot be, before any is run."""
    config = request.config
    try:
        made = lay_out(config, session)
        reachable(made.plan, made.cluster, config, session)
    except REFUSALS as error:
        return refused(str(error), request)
    if config.mode is Mode.run:
        made.cluster.warm_up()
        if config.tracking.store is not Store.none:
            session.tracker(Path(config.output_dir) / "tracker.log").begin()
    return dataclasses.replace(request, laid_out=made)


def run(request: PointRequest, session: Session) -> Result:
    """One point that was looked over. Returns what result.json holds, except when a signal ends the command.

    Its `status` is FINISHED, FAILED, KILLED, PREEMPTED, PLANNED, PREDICTED, or REFUSED where it cannot be laid out.
    """
    config, full = request.config, request.config.mode is Mode.plan
    starts = config.mode is Mode.run
    earlier = None
    try:
        made = request.laid_out or lay_out(config, session)
        cluster, baseline = made.cluster, made.baseline
        planned = reachable(made.plan, cluster, config, session)
        if starts:
            attempts = list(sweep.attempts(request.folder))
            only = request.folder if request.own else None
            earlier = resume.find(config, planned, Path(config.output_dir), only, attempts)
    except REFUSALS as error:
        return refused(str(error), request)
    if earlier is not None:
        request = _instead(request, earlier)
        session.screen.resumed(str(earlier.folder), earlier.status, earlier.step, earlier.saved_step)
    elif (request.folder / "events.jsonl").exists():
        request = dataclasses.replace(request, folder=sweep.make_another(request.folder))
    folder, about = request.folder, request.about()
    session.screen.planned(planned, full)
    if not starts:
        remove(folder, Path(config.output_dir))
    if config.mode is Mode.predict:
        try:
            return _predicted(planned, request, cluster, session) | about
        except REFUSALS as error:
            return refused(str(error), request)
    if full:
        return (
            {"status": "PLANNED", "error": None}
            | _chosen(config)
            | _estimated(planned, request, cluster, session)
            | about
        )
    _tell_shards(planned, request, session)
    return Point(request, _with_folder(planned, request, earlier), session, earlier).run(cluster, baseline) | about


def _instead(request: PointRequest, earlier: Earlier) -> PointRequest:
    """The point in the folder of the run that it goes on with; its own, where it is new and empty, is removed."""
    if request.folder.resolve() != earlier.folder.resolve():
        _empty(request.folder)
    return dataclasses.replace(request, folder=earlier.folder.resolve())


def _with_folder(planned: Plan, request: PointRequest, earlier: Earlier | None) -> Plan:
    """The plan with the folder of this run's checkpoints, and that of an earlier command where it was another."""
    named, folder = planned.checkpoint.folder, request.folder.resolve()
    if named is None:
        where = str(folder / "checkpoints")
    else:
        output = Path(request.config.output_dir).resolve()
        own = folder.relative_to(output) if folder.is_relative_to(output) else Path(folder.name)
        where = f"{named if '://' in named else Path(named).resolve()}/{'_'.join(own.parts)}"
    then = None if earlier is None else (earlier.plan.get("checkpoint") or {}).get("folder")
    kept = dataclasses.replace(planned.checkpoint, folder=where, before=None if then == where else then)
    return dataclasses.replace(planned, checkpoint=kept)


def remove(folder: Path, output: Path) -> None:
    """Removes the folder of a point that starts nothing, of which nothing stays, and with the last one its sweep's."""
    _empty(folder)
    with suppress(OSError):
        if [path.name for path in folder.parent.iterdir()] == ["multirun.yaml"]:
            shutil.rmtree(folder.parent)
    # What Hydra has made on the way there.
    with suppress(OSError):
        for parent in folder.resolve().parents:
            if not parent.is_relative_to(output.resolve()) or parent == Path.cwd():
                break
            if parent.exists():
                parent.rmdir()


def _empty(folder: Path) -> None:
    """Removes what Hydra has put into a folder, and the folder if that was all: one that was named may hold a run."""
    if (folder / "events.jsonl").exists():
        return
    shutil.rmtree(folder / HYDRA_S, ignore_errors=True)
    with suppress(OSError):
        (folder / "result.json").unlink(missing_ok=True)
        folder.rmdir()


def _predicted(planned: Plan, request: PointRequest, cluster: Cluster, session: Session) -> Result:
    """Shows how fast a plan would be, from what was logged, and notes it to be scored. Raises what is in `REFUSALS`."""
    config, output = request.config, Path(request.config.output_dir)
    sweep = config.predict.sweep
    if sweep not in session.histories:
        session.histories[sweep] = history.finished(output, sweep)
    basis = predict.basis(planned, session.histories[sweep], sweep or str(output))
    same = [run for run in basis.runs if run.plan["model_build"] == planned.model_build]
    timed = None if predict.sized(planned, basis) else _timed_alone(planned, basis, request, cluster, session)
    if same:
        parameters = int(same[-1].result["parameters"])
    elif timed:
        parameters = timed.case.parameters
    elif size := _size(planned, request, cluster, session):
        parameters = size.parameters
    else:
        why = session.unbuilt[model_size.file(planned, output, session.search)]
        raise PredictError(f"Expected a model that can be built, to know its size, received: {why} Try another model.")
    made = predict.of_plan(planned, parameters, basis, timed)
    examples = planned.train_examples or next((run.train_examples for run in reversed(basis.runs)), None)
    seconds = outlook.seconds_to_finish(planned, made.examples_per_second, examples)
    watts = outlook.watts_of_worker([run.result for run in basis.runs])
    result = {
        "status": "PREDICTED",
        "error": None,
        **_chosen(config),
        "workers": planned.workers,
        "hosts": planned.hosts,
        "oversubscribed": planned.oversubscribed,
        "replica_batch": planned.replica_batch,
        "global_batch": planned.global_batch,
        "scaling": planned.scaling,
        "precision": planned.precision,
        "examples_per_second": made.examples_per_second,
        "examples_per_second_low": made.low,
        "examples_per_second_high": made.high,
        "interval_confidence": made.confidence,
        "step_seconds": made.step_seconds,
        "parts": dict(made.parts),
        "fitted_on": dict(made.fitted_on),
        "notes": [*planned.notes, *made.notes],
        "seconds_to_finish": seconds,
        "price_per_hour": config.hardware.price_per_hour,
        "cost_to_finish": outlook.cost(config.hardware.price_per_hour, planned.hosts, seconds),
        "energy_joules": None if watts is None or seconds is None else watts * planned.workers * seconds,
        "knee_share": config.predict.knee_share,
        "score": predict.score([run.result for run in session.histories[sweep]]),
    }
    line = predict.record(planned, parameters, made, time.time())
    output.mkdir(parents=True, exist_ok=True)
    with (output / PREDICTIONS).open("a") as lines:
        lines.write(json.dumps(line) + "\n")
    session.screen.predicted(result | {"notes": made.notes})
    return result


def _timed_alone(
    planned: Plan, basis: predict.Basis, request: PointRequest, cluster: Cluster, session: Session
) -> predict.Observed | None:
    """A step of one worker of a plan, timed here and now; None where that is not asked for, or cannot be done."""
    same = {name: metadata.version(name) for name in ("tensorflow", "keras")}.items() <= basis.versions.items()
    there = basis.machine == planned.machine and same and planned.kind in ("cpu", "gpu")
    if not request.config.predict.time_one or not there:
        return None
    try:
        one = _listening(_planned(plan.on_one_worker(request.config, planned), cluster), cluster)
        for address in one.service:
            reach.expect_data_service(address)
    except (PlanError, reach.NoAnswerError):
        # Such devices, or the servers of the data, are elsewhere.
        return None
    if one.oversubscribed:
        return None
    key = predict.identity(json.loads(one.to_json()))
    if key not in session.timed:
        session.screen.say(
            "\nTiming steps of one worker, for some seconds, since no run had this model and replica batch. "
            "predict.time_one=false predicts from the runs alone."
        )
        try:
            with tempfile.TemporaryDirectory(prefix="pipeline-timed-") as folder:
                lives = time_steps(cluster, one, Path(folder))
        except RunFailed as failure:
            session.screen.say(f"It could not be timed: {failure}")
            session.timed[key] = None
        else:
            speeds = [[repeat.examples_per_second for repeat in life.point] for life in lives]
            session.timed[key] = predict.alone(one, int(lives[0].built["parameters"]), speeds)
    return session.timed[key]


def _size(planned: Plan, request: PointRequest, cluster: Cluster, session: Session) -> Size | None:
    """The size of a plan's model, which is built once where it is not known; None where it cannot be built."""
    kept = model_size.file(planned, Path(request.config.output_dir), session.search)
    size = model_size.known(planned, kept)
    if size is None and kept not in session.unbuilt:
        session.screen.say(
            f"\nBuilding the model once to know its size, which takes some seconds. {kept} will keep it."
        )
        try:
            size = model_size.keep(model_size.learn(planned, cluster), kept)
        except RunFailed as failure:
            session.unbuilt[kept] = str(failure)
    return size


def _estimated(planned: Plan, request: PointRequest, cluster: Cluster, session: Session) -> Result:
    """Shows what a plan needs, having its model built once where its size is not known; returns the sums of it."""
    size = _size(planned, request, cluster, session)
    if size is None:
        why = session.unbuilt[model_size.file(planned, Path(request.config.output_dir), session.search)]
        session.screen.say(f"\nestimate   none, since the model could not be built: {why}")
        return {"workers": planned.workers, "estimate": None}
    made = estimate(planned, size)
    session.screen.estimated(planned, made)
    return {
        "workers": planned.workers,
        "estimate": {
            "device_bytes": made.device.total,
            "activations_known": made.device.activations is not None,
            "step_bytes": None if made.exchanged is None else made.exchanged.total,
            "step_examples": planned.global_batch,
        },
    }


def _tell_shards(planned: Plan, request: PointRequest, session: Session) -> None:
    """Shows which tables are cut and what stays whole, as far as that is known before the model is built."""
    if planned.min_shard_bytes is None:
        return
    size = model_size.known(planned, model_size.file(planned, Path(request.config.output_dir), session.search))
    if size:
        session.screen.shared(estimate(planned, size))


def lay_out(config: Config, session: Session) -> LaidOut:
    """The plans of a point, without ports. Raises where the config is refused; nothing is started."""
    check_targets(config, session.search)
    views.offered(config.views)
    cluster = session.cluster(config)
    planned = _planned(config, cluster, present=config.mode is Mode.run)
    wanted = planned.baseline != "none" and planned.measure_steps != 0
    return LaidOut(planned, plan.baseline_of(planned, cluster.inventory()) if wanted else None, cluster)


def _planned(config: Config, cluster: Cluster, present: bool = True) -> Plan:
    """The plan, with what a manifest says of the data."""
    described, files = _described(config)
    return plan.make(described, cluster.inventory(), present, files)


def reachable(planned: Plan, cluster: Cluster, config: Config, session: Session) -> Plan:
    """The plan with an address for each process, where all that it needs beside its processes answers. Raises else."""
    if config.mode is Mode.run:
        _expect_tpu(planned, session)
        for address in planned.service:
            reach.expect_data_service(address)
    return _listening(planned, cluster)


def _listening(planned: Plan, cluster: Cluster) -> Plan:
    return plan.listening(planned, cluster.addresses(planned) if len(planned.processes) > 1 else ())


def _described(config: Config) -> tuple[Config, list[int]]:
    """The config with the facts of its data that are null and stand in a manifest, and the examples of each file.

    A manifest on another file system is left to the processes, which can read it there.
    """
    data = config.data
    if data.build.get(targets.KEY) != PREPARED or not data.path or "://" in data.path:
        return config, []
    made = manifest.load(data.path, lambda path: Path(path).read_text())
    shapes = {feature.name: feature.shape for feature in made.features}
    shape = None if None in shapes.get("x", (None,)) else [size or 0 for size in shapes["x"]]
    facts: dict[str, Any] = {
        "num_classes": made.num_classes,
        "input_shape": shape,
        "train_examples": made.examples(manifest.TRAIN),
        "validation_examples": made.examples(manifest.VALIDATION),
    }
    wanted = {name: value for name, value in facts.items() if getattr(data, name) is None}
    files = [shard.examples for shard in made.splits.get(manifest.TRAIN, ()) if shard.examples]
    return dataclasses.replace(config, data=dataclasses.replace(data, **wanted)), files


def _expect_tpu(planned: Plan, session: Session) -> None:
    """Refuses the address of a TPU at which none answers, before TensorFlow waits there for minutes."""
    address = str(planned.strategy_build["address"]) if "address" in planned.strategy_build else ""
    if planned.kind == "tpu" and address.startswith("grpc://") and address not in session.tpus:
        reach.expect_tpu(address)
        session.tpus.add(address)


def check_targets(config: Config, search: tuple[str, ...]) -> None:
    """Refuses functions that no config may call, that do not exist or that do not take their arguments.

    Before anything is imported: to import a module runs its code.
    """
    allowed = config.allowed_targets
    targets.check_allowed(allowed)
    for key, build, given in (
        (
            "strategy.build",
            config.strategy.build,
            ("devices", "addresses", "rank", "coordinator", "workers", "parameter_servers"),
        ),
        ("model.build", config.model.build, ("input_shape", "num_classes")),
        ("data.build", config.data.build, ("shard", "shards")),
    ):
        if targets.KEY not in build:
            raise PlanError(
                f"Expected {key}._target_ to name a function, received none. Try {key}._target_=package.function."
            )
        targets.check(build, key, given, search, allowed)
    for index, each in enumerate(config.train.callbacks):
        if not isinstance(each, dict) or targets.KEY not in each:
            raise PlanError(
                f"Expected train.callbacks to be functions with their arguments, received {each} at {index}. "
                f"Try train.callbacks=[{{_target_: keras.callbacks.EarlyStopping, patience: 2}}]."
            )
    for key in ("optimizer", "loss", "metrics", "callbacks"):
        targets.check(getattr(config.train, key), f"train.{key}", (), search, allowed)


class Point:
    """One run under way: its folder, its event log, what is shown of it and where it is tracked."""

    def __init__(self, request: PointRequest, planned: Plan, session: Session, earlier: Earlier | None = None) -> None:
        config, folder = request.config, request.folder
        self._config, self._plan, self._session, self._folder = config, planned, session, folder
        self._earlier, self._measured = earlier, Measured()
        self._lock = earlier.lock if earlier else resume.Lock(folder)
        self._store = _store(config)
        self._baseline_source: str | None = None
        self._blamed: Path | None = None
        self._baseline_repeats: list[float] = []
        self._size_file = model_size.file(planned, Path(config.output_dir), session.search)
        if earlier is not None:
            one = plan.baseline_of(planned, session.cluster(config).inventory())
            self._measured = earlier.measured(planned, one)
            with suppress(OSError):
                (folder / "result.json").unlink()
        write_whole(folder / "plan.json", planned.to_json())
        self._log = EventLog(folder / "events.jsonl")
        self._progress = session.screen.live(planned, time.monotonic(), session.ahead)
        self._offered = views.Offered(views.offered(config.views), planned, folder, session.screen.say)
        if earlier is not None and self._measured.point:
            timed = [event for event in earlier.events if event["event"] == "measured"]
            if len(self._measured.point) >= planned.repeats:
                # No baseline will join any more.
                timed = [event for event in timed if event["group"] == "point"]
            self._progress.recall(timed, time.monotonic())
        here = {"time": time.time(), "pid": os.getpid(), "host": os.uname().nodename}
        params, tags = parameters(planned, config), _tags(planned, request)
        if earlier is not None and earlier.events:
            self._first = here | {"event": "resumed", "params": params, "tags": tags}
        else:
            self._first = here | {
                "event": "run",
                "key": uuid.uuid4().hex,
                "name": _name(planned),
                "folder": str(folder),
                "experiment": config.tracking.experiment,
                "params": params,
                "tags": tags,
            }

    def run(self, cluster: Cluster, baseline: Plan | None) -> Result:
        """Trains and measures; writes result.json, ends the event log, and waits a little for the tracker."""
        with self._offered:
            self._tell(self._first)
            return self._run(cluster, baseline)

    def _run(self, cluster: Cluster, baseline: Plan | None) -> Result:
        cluster.warm_up()
        tracker = self._session.tracker(Path(self._config.output_dir) / "tracker.log") if self._store else None
        if tracker and self._store:
            tracker.follow(self._folder, self._store)
        status, error, interrupted = "FAILED", None, None
        session = self._session
        session.busy = True
        try:
            with self._progress:
                conduct(
                    cluster,
                    self._plan,
                    self._reuse(baseline),
                    self._folder,
                    self._tell,
                    self._measured,
                    ask_size=model_size.known(self._plan, self._size_file) is None,
                    resume=self._earlier is not None,
                    preemption=session.preemption,
                    fewer=partial(self._fewer, cluster),
                    one_device=baseline,
                )
            status = "FINISHED"
        except Preempted:
            status, error = "PREEMPTED", _preempted(session.preemption, self._measured)
        except RunFailed as failure:
            error = str(failure)
            self._blamed = failure.log
        except Interrupted as signalled:
            status, error, interrupted = "KILLED", f"The run was ended by {signalled}.", signalled
        except LaunchError as lost:
            error = str(lost)
        except OSError as problem:
            error = f"{type(problem).__name__}: {problem}"
        try:
            return self._end(status, error, tracker, interrupted)
        finally:
            session.busy = False
            self._lock.release()

    def _fewer(self, cluster: Cluster, planned: Plan) -> Plan | None:
        """The plan over the most workers below its own that it can be laid over; None where there are too few."""
        for workers in range(planned.workers - 1, planned.min_workers - 1, -1):
            config = dataclasses.replace(self._config, workers=workers)
            with suppress(PlanError):
                made = _listening(_planned(config, cluster), cluster)
                # Held fixed, the global batch keeps its rate; smaller, it has one that is smaller in proportion.
                scale = planned.rate_scale * made.global_batch / planned.global_batch
                return dataclasses.replace(made, checkpoint=planned.checkpoint, rate_scale=scale)
        return None

    def _end(self, status: str, error: str | None, tracker: Tracking | None, interrupted: Interrupted | None) -> Result:
        values = self._result(status, error)
        hurried = interrupted is not None or status == "PREEMPTED"
        if tracker:
            values["mlflow_run_id"] = tracker.run_id(
                self._folder, 0.0 if hurried else self._config.tracking.drain_timeout
            )
        self._write(values)
        self._tell({"time": time.time(), "event": "result", "values": values})
        self._tell({"time": time.time(), "event": "ended", "status": status, "error": error})
        if status == "FINISHED":
            # What goes on with a run that did not finish reads it again.
            shutil.rmtree(self._folder / "cache", ignore_errors=True)
        if tracker:
            drained, problem = tracker.drain(3.0 if hurried else self._config.tracking.drain_timeout)
            if not drained:
                values["tracking_note"] = (
                    f"MLflow does not hold all of it yet{f' ({problem})' if problem else ''}. "
                    f"`python -m pipeline sync {self._folder}` sends the rest."
                )
            values["mlflow_run_id"] = values["mlflow_run_id"] or tracker.run_id(self._folder, 0.0)
            self._write(values)
        try:
            self._log.close()
        except OSError as problem:
            values = _unwritten(values, problem)
        if interrupted:
            raise interrupted
        return values

    def _tell(self, event: Event) -> None:
        now = time.monotonic()
        self._progress.update(event, now)
        if event["event"] not in PASSING:
            self._log.append(event)
            self._offered.update(event, now)

    def _reuse(self, baseline: Plan | None) -> Plan | None:
        """The baseline that must be measured: none where an equal one was, and may be used."""
        if baseline is None:
            return None
        self._baseline_source = "measured in this run"
        known = None
        if baseline.baseline in ("once", "auto"):
            known = self._session.baselines.get(self._baseline_file(baseline))
        if known is None and baseline.baseline == "auto":
            with suppress(OSError, ValueError):
                known = json.loads(self._baseline_file(baseline).read_text())
        if known is None:
            return baseline
        self._baseline_repeats = [float(each) for each in known["examples_per_second"]]
        self._baseline_source = f"reused from {known['folder']}"
        return None

    def _baseline_file(self, baseline: Plan) -> Path:
        versions = {name: metadata.version(name) for name in ("tensorflow", "keras", "numpy")}
        return Path(self._config.output_dir) / "baselines" / f"{plan.fingerprint(baseline, versions)}.json"

    def _result(self, status: str, error: str | None) -> Result:
        planned, measured = self._plan, self._measured
        if measured.baseline:
            self._baseline_repeats = [each.examples_per_second for each in measured.baseline]
        # What other commands can do without.
        with suppress(OSError):
            if measured.size:
                model_size.keep(measured.size, self._size_file)
            if measured.baseline:
                self._keep_baseline()
        points = [each.examples_per_second for each in measured.point]
        middle, low, high = measure.interval(points) if points else (None, None, None)
        faster: tuple[float | None, ...] = (None, None, None)
        if points and self._baseline_repeats:
            faster = measure.speedup(points, self._baseline_repeats)
        one = measure.interval(self._baseline_repeats)[0] if self._baseline_repeats else None
        finished = measured.finished
        waits = _input_waits(planned, measured)
        price = self._config.hardware.price_per_hour
        seconds = outlook.seconds_to_finish(planned, middle, measured.built.get("train_examples")) if middle else None
        quantiles: Mapping[str, float | None] = {f"step_ms_p{percent}": None for percent in (50, 95, 99)}
        return {
            "status": status,
            "strategy": planned.strategy,
            "hardware": planned.hardware,
            "model": planned.model,
            "data": planned.data,
            "workers": planned.workers,
            "timed_workers": measured.timed_workers or planned.workers,
            "hosts": planned.hosts,
            "processes": len(planned.processes),
            "replicas": planned.workers,
            "replica_batch": planned.replica_batch,
            "global_batch": planned.global_batch,
            "scaling": planned.scaling,
            "precision": planned.precision,
            "examples_per_second": middle,
            "examples_per_second_low": low,
            "examples_per_second_high": high,
            **(measure.step_ms(measured.point) if measured.point else quantiles),
            "baseline_examples_per_second": one,
            "baseline_source": self._baseline_source if one is not None else None,
            "speedup": faster[0],
            "speedup_low": faster[1],
            "speedup_high": faster[2],
            "efficiency": None if faster[0] is None else faster[0] / (measured.timed_workers or planned.workers),
            **waits,
            "profile": measured.profile,
            "explained": measured.explained,
            "interval_confidence": measure.confidence(len(points)) if points else None,
            "repeats": len(points),
            "steps_per_call": measured.steps_per_call,
            "rehearsal": planned.rehearsal,
            "oversubscribed": planned.oversubscribed,
            "notes": [
                *planned.notes,
                *measured.notes,
                *_timed_with(planned, measured),
                *_bound_by_input(waits),
                *_explained_otherwise(measured.explained, faster, measured.timed_workers or planned.workers),
                *_skipped(measured),
            ],
            **{f"{part}_examples_skipped": _lost(measured, part) for part in manifest.SPLITS},
            "asynchronous": planned.asynchronous,
            **self._survived(),
            **(_of_race(planned, measured) if planned.asynchronous else {}),
            "epochs": finished.get("epochs"),
            "loss": finished.get("loss"),
            "metrics": finished.get("metrics", {}),
            "val_loss": finished.get("val_loss"),
            "val_metrics": finished.get("val_metrics", {}),
            "parameters": measured.built.get("parameters"),
            "state_bytes": measured.built.get("state_bytes"),
            "seconds_startup": measured.seconds_startup,
            "seconds_training": measured.seconds_training,
            "energy_joules": measured.energy_joules,
            "price_per_hour": price,
            "seconds_to_finish": seconds,
            "cost_to_finish": outlook.cost(price, planned.hosts, seconds),
            "predictions": self._scored(middle) if status == "FINISHED" and middle else [],
            "mlflow_run_id": None,
            "tracking_note": None,
            "machine": planned.machine,
            "versions": measured.versions,
            "saved": "model.keras" if (self._folder / "model.keras").exists() else None,
            "log": None if self._blamed is None else str(self._blamed),
            "error": error,
        }

    def _scored(self, measured: float) -> list[Result]:
        """The predictions that were made for this run, and how far off they were."""
        if self._plan.oversubscribed:
            # What was predicted is what devices with cores of their own do.
            return []
        made = [line for line, _ in events.read(Path(self._config.output_dir) / PREDICTIONS)]
        return predict.scored(made, json.loads(self._plan.to_json()), measured)

    def _survived(self) -> Result:
        """How it went on whatever happened: what was started again, what was done twice, and what that cost."""
        told = [event for event, _ in events.read(self._folder / "events.jsonl")]
        measured, (repeated, goodput) = self._measured, measure.goodput(told)
        return {
            "workers_at_end": measured.workers or self._plan.workers,
            "resumed": sum(event.get("event") == "resumed" for event in told),
            "restarts": measured.restarts,
            "rollbacks": measured.rollbacks,
            "steps_repeated": repeated,
            "goodput": goodput,
            "checkpoint_step": measured.saved_step,
        }

    def _keep_baseline(self) -> None:
        baseline = plan.baseline_of(self._plan, self._session.cluster(self._config).inventory())
        kept = {"examples_per_second": self._baseline_repeats, "folder": str(self._folder), "time": time.time()}
        path = self._baseline_file(baseline)
        self._session.baselines[path] = kept
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(kept, indent=2))

    def _write(self, values: Result) -> None:
        try:
            write_whole(self._folder / "result.json", json.dumps(values, indent=2, default=str))
        except OSError as problem:
            values |= _unwritten(values, problem)


def _timed_with(planned: Plan, measured: Measured) -> list[str]:
    """What is to be said of a throughput that is not that of all workers."""
    timed = measured.timed_workers
    return [] if timed in (None, planned.workers) else [f"The throughput is that of {timed} workers."]


def _lost(measured: Measured, part: str) -> int:
    """Examples of a part of the data that were broken and left out."""
    return sum(each["examples"] for each in measured.built.get("lost", {}).get(part, ()))


def _skipped(measured: Measured) -> list[str]:
    """What is to be said of examples that were left out."""
    notes = []
    for part, what in (("train", "training"), ("validation", "validation")):
        lost, count = measured.built.get("lost", {}).get(part, ()), _lost(measured, part)
        if count:
            named = first_of([f"{each['name']} {each['why']}" for each in lost], SKIPPED_NAMED)
            more = ", all in events.jsonl" if len(lost) > SKIPPED_NAMED else ""
            notes.append(f"{count} {what} example{'s were' if count > 1 else ' was'} left out: {named}{more}.")
    return notes


def _input_waits(planned: Plan, measured: Measured) -> Result:
    """The share of the step time that was spent waiting for input: of the worker that waited longest, and of each."""
    most, each = measure.input_wait(measured.point)
    waiting = planned.ranks("worker") if planned.asynchronous else planned.leaders
    names = [f"{planned.processes[rank].role} {rank}" for rank in waiting]
    return {
        "input_wait": most,
        "input_wait_by_worker": dict(zip(names, each, strict=False)),
        "input_bound": None if most is None else most >= measure.INPUT_BOUND,
    }


def _bound_by_input(waits: Result) -> list[str]:
    """What is to be said of a training that waits for its input."""
    if not waits["input_bound"]:
        return []
    slowest = max(waits["input_wait_by_worker"], key=waits["input_wait_by_worker"].get)
    return [
        f"{comparable.WAITED} {slowest} waited for its batches for {waits['input_wait_by_worker'][slowest]:.0%} of the "
        f"step time. data.profile=true says which stage of the input costs most. Try data.cache=memory, "
        f"data.service=2, or to prepare the data once with python -m pipeline prepare."
    ]


def _explained_otherwise(
    explained: Mapping[str, Any] | None, speedup: tuple[float | None, ...], workers: int
) -> list[str]:
    """What is to be said where what was explained is not what training was timed with."""
    value, low, high = speedup
    if explained is None or value is None or low is None or high is None:
        return []
    return explain.disagreement(explained, (value / workers, low / workers, high / workers))


def _unwritten(values: Result, problem: OSError) -> Result:
    """The result of a run whose folder cannot be written to any more."""
    error = values["error"] or f"The run's folder cannot be written to: {problem.strerror}."
    return values | {"status": "FAILED", "error": error}


def _of_race(planned: Plan, measured: Measured) -> Result:
    """What only an asynchronous training has: staleness in updates, and who made its steps."""
    names = ("staleness_mean", "staleness_max", "steps", "examples", "updates")
    counts = measured.finished.get("worker_steps") or []
    ranks = planned.ranks("worker")
    return {name: measured.finished.get(name) for name in names} | {
        "worker_steps": {f"worker {rank}": count for rank, count in zip(ranks, counts, strict=False)},
    }


def _preempted(preemption: Preemption, measured: Measured) -> str:
    """What happened, and how to go on."""
    said = measured.saved_step
    where = "No checkpoint was written yet" if said is None else f"The last checkpoint is of step {said}"
    return f"The run was preempted by {preemption.asked}. {where}; the same command goes on from there."


def refused(error: str, request: PointRequest) -> Result:
    """The result of a point that cannot be laid out."""
    return unread(error, request.folder, _chosen(request.config)) | request.about()


def _chosen(config: Config) -> Result:
    return {
        "strategy": config.strategy.name,
        "hardware": config.hardware.name,
        "model": config.model.name,
        "data": config.data.name,
        "workers": config.workers,
    }


def unread(error: str, folder: Path, chosen: Result) -> Result:
    """The result of a config that was refused, written into its folder where there is one."""
    values = {"status": "REFUSED", "error": error} | chosen
    with suppress(OSError):
        # A folder that was named may hold a run, whose result stays.
        if not (folder / "events.jsonl").exists():
            write_whole(folder / "result.json", json.dumps(values, indent=2))
    return values


def parameters(planned: Plan, config: Config) -> dict[str, Any]:
    """The choices and the resolved numbers, flat and short, as MLflow's parameters."""
    flat = {name: getattr(planned, name) for name in fields_of(Plan, Part.PARAMETER)} | {
        "processes": len(planned.processes)
    }
    optimizer = config.train.optimizer
    flat["optimizer"] = optimizer.get(targets.KEY, "") if isinstance(optimizer, dict) else optimizer
    for group, build in (("model", planned.model_build), ("data", planned.data_build)):
        flat |= {f"{group}.{name}": value for name, value in build.items() if name != targets.KEY}
    return {name: value for name, value in flat.items() if value is not None}


def leaves_running(session: Session) -> Callable[[int], bool]:
    """Tells whether a signal is a scheduler's that comes while a point is under way, which then ends by itself."""

    def spared(number: int) -> bool:
        if number not in PREEMPTING:
            return False
        session.preemption.ask(number, "the conductor")
        return session.busy

    return spared


def _name(planned: Plan) -> str:
    """What the run is called in MLflow, where charts show nothing else of it."""
    doubts = comparable.doubts({"rehearsal": planned.rehearsal, "oversubscribed": planned.oversubscribed})
    marked = f" ({', '.join(doubts)})" if doubts else ""
    return f"{planned.strategy}-{planned.workers}-{planned.model}-{planned.data}{marked}"


def _store(config: Config) -> dict[str, Any] | None:
    """Where a run is tracked, in the tracker's words; None for nowhere."""
    tracking, output = config.tracking, Path(config.output_dir).resolve()
    if tracking.store is Store.none:
        return None
    local = tracking.store is Store.sqlite
    return {
        "store": tracking.store.value,
        "uri": tracking.uri or f"sqlite:///{output / 'mlflow.db'}",
        "experiment": tracking.experiment,
        "artifacts": (output / "mlartifacts").as_uri() if local else None,
        "log_model": tracking.log_model,
    }


def _tags(planned: Plan, request: PointRequest) -> dict[str, str]:
    commit = None
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=2, check=True)
        commit = said.stdout.strip()
    tags = {
        "git_commit": commit,
        "host": os.uname().nodename,
        "device_kind": planned.kind,
        "machine": planned.machine,
        "sweep": request.sweep,
        "overrides": " ".join(request.overrides) or None,
        "rehearsal": str(planned.rehearsal).lower(),
        "oversubscribed": str(planned.oversubscribed).lower(),
    }
    return {name: value for name, value in tags.items() if value}

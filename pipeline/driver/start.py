"""Takes a requested run from its config to its result: validate it, plan it, then train, estimate or predict."""

import os
import tempfile
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config import instead, targets
from pipeline.config.offered import check_offer
from pipeline.config.parts import flat
from pipeline.config.schema import Config, Mode, Store
from pipeline.driver import RunResult, offered, run_folders
from pipeline.driver.session import RunRequest, Session
from pipeline.errors import UserError
from pipeline.launch import Cancelled, Cluster, outlives, reach
from pipeline.plan import planning
from pipeline.plan.backends import JAX, check_installed
from pipeline.plan.division import expect_batch
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan, as_long_as, with_rate_scale
from pipeline.record import log
from pipeline.record.files import read_links, slowest_link
from pipeline.worker.collective import check_collective
from pipeline.worker.engine import ENGINES

if TYPE_CHECKING:
    from pipeline.driver.run import Run
    from pipeline.plan.estimate import Estimate

AUTO, NEVER = "auto", "never"
# The function that reads what `python -m pipeline prepare` wrote.
PREPARED = "pipeline.data.tfrecord"
SYNTHETIC = "pipeline.data.synthetic"
SQLITE = "sqlite:///"


def validate(request: RunRequest, session: Session) -> RunRequest | RunResult:
    """The request with its plan, whose imports begin; the result of one that is refused, before any run starts."""
    config, trains = request.config, request.config.mode is Mode.run
    try:
        (plan, baseline), cluster = plan_run(config, session, begin=False), session.cluster(config)
        if trains and config.resume not in (AUTO, NEVER):
            from pipeline.driver import resume

            resume.only_named(config.resume, request.output)
        arrived = not trains or cluster.arrived()
        if arrived and not _may_be_held(config):
            reachable(plan, config, session)
    except UserError as error:
        return _refused(error, request)
    if trains and config.backend != JAX:
        # Its processes are forked from one that has TensorFlow.
        cluster.warm_up()
    if trains and config.tracking.store is not Store.none:
        session.tracker(request.output).begin()
    return replace(request, plan=plan, baseline=baseline) if arrived else request


def run(request: RunRequest, session: Session) -> RunResult:
    """The result of a run that was validated. Raises `Interrupted` if a signal ends the command."""
    began, config = time.monotonic(), request.config
    try:
        plan, one = (request.plan, request.baseline) if request.plan else plan_run(config, session)
        if config.mode is not Mode.run:
            plan = reachable(plan, config, session)
            # First, since whoever reads the output may close it in the middle.
            run_folders.remove(request.folder, request.output)
            session.screen.planned(plan, config.mode is Mode.plan, None)
            from pipeline.driver import forecast

            if config.mode is Mode.predict:
                return forecast.predicted(plan, request, session)
            if typed := session.cluster(config).describe(plan):
                session.screen.described(typed)
            return forecast.estimated(plan, request, session)
        plan, earlier, estimate = _to_train(request, plan, session)
    except Cancelled as cancelled:
        return request.unstarted("KILLED", str(cancelled))
    except UserError as error:
        return _refused(error, request)
    from pipeline.driver.run import Run
    from pipeline.driver.supervisor import Supervisor

    request = _in_its_folder(request, earlier, session)
    baseline = session.known_baseline(one, request.output)
    reused = None if baseline is None else str(log.from_here(Path(baseline.folder)))
    session.screen.planned(plan, False, reused, estimate)
    request = replace(request, plan=_with_folder(plan, request, earlier), baseline=one)
    return request.ended(Supervisor(request, earlier or Run(request.folder), session, baseline, began=began).train())


def _to_train(request: RunRequest, plan: Plan, session: Session) -> "tuple[Plan, Run | None, Estimate | None]":
    """The plan to train, the run that it resumes, and the estimate of a plan whose tables are cut."""
    # What drives processes takes a moment to import.
    from pipeline.driver import resume
    from pipeline.driver.forecast import expect_room

    config, output, own = request.config, request.output, request.folder if request.own else None
    cluster, attempts = session.cluster(config), [*run_folders.attempts(request.folder)]
    earlier = resume.find(config, plan, output, own, attempts, session.screen.say)
    with ExitStack() as stack:
        if earlier is not None:
            stack.callback(earlier.release)
            # Its processes have the ports that are needed, and write the same files.
            cluster.end_earlier(earlier.folder)
            plan = as_long_as(plan, earlier.plan)
        elif _may_be_held(config):
            for folder in resume.in_the_way(plan, config.cluster.base_port, output):
                cluster.end_earlier(folder)
        plan = reachable(plan, config, session)
        estimate = expect_room(plan, request, session)
        stack.pop_all()
    return plan, earlier, None if plan.strategy.min_shard_bytes is None else estimate


def _may_be_held(config: Config) -> bool:
    """True if a killed command's processes may have the ports that are named; `run` ends them first."""
    return config.cluster.base_port is not None and outlives(config.cluster.name, config.launch.detach)


def _refused(error: Exception, request: RunRequest) -> RunResult:
    result = request.unstarted("REFUSED", str(error))
    if request.sweep is None:
        run_folders.remove(request.folder, request.output)
    return result


def _in_its_folder(request: RunRequest, earlier: "Run | None", session: Session) -> RunRequest:
    """The request in the folder of the run that it resumes, or in another one if its own holds a run."""
    if earlier is None:
        holds_run = (request.folder / run_folders.EVENTS).exists()
        return replace(request, folder=run_folders.make_another(request.folder)) if holds_run else request
    if request.folder.resolve() != earlier.folder.resolve():
        run_folders.remove_empty(request.folder)
    session.screen.resumed(str(earlier.folder), earlier.status, earlier.step, earlier.saved_step)
    if (path := run_folders.newer_code(request.config, earlier.folder, session.search)) is not None:
        session.screen.say(f"{log.from_here(path)} was written after the run began, which goes on with what it says.")
    return replace(request, folder=earlier.folder.resolve())


def _with_folder(plan: Plan, request: RunRequest, earlier: "Run | None") -> Plan:
    root, folder, output = plan.checkpoint.folder, request.folder.resolve(), request.output.resolve()
    checkpoints = str(folder / "checkpoints")
    if root is not None:
        parts = (folder.relative_to(output) if folder.is_relative_to(output) else Path(folder.name)).parts
        checkpoints = f"{root if '://' in root else Path(root).resolve()}/{'_'.join(parts)}"
    before = None if earlier is None else earlier.saved_in or (earlier.plan.get("checkpoint") or {}).get("folder")
    before = None if before == checkpoints else before
    return replace(plan, checkpoint=replace(plan.checkpoint, folder=checkpoints, before=before))


def plan_run(config: Config, session: Session, begin: bool = True) -> tuple[Plan, Plan | None]:
    """A run's plan, without ports, and its baseline's, if any. Starts nothing, and asks nothing unless `begin`."""
    _check_targets(config, session.search)
    check_offer("engines", config.backend, "backend", ENGINES, "backend=tensorflow")
    check_installed(config.backend)
    check_collective(config.strategy.collective)
    offered(config.views)
    if config.mode is Mode.run:
        _expect_needed(config, session)
    cluster = session.cluster(config)
    plan = planned_on(config, cluster, config.mode is Mode.run, begin)
    if config.mode is Mode.run and (examples := _training_examples(config, session, plan)) is not None:
        expect_batch(examples, plan)
    baseline = None
    if plan.measurement.baseline != "none" and plan.measurement.steps != 0:
        baseline = planning.baseline_of(plan, machine_of(config, cluster, begin))
    return plan, baseline


def fewer(plan: Plan, config: Config, cluster: Cluster) -> Plan | None:
    """The plan over the most workers below its own that it can be laid over; None if there are too few."""
    for workers in range(plan.workers - 1, plan.launch.min_workers - 1, -1):
        with suppress(UserError):
            return relaid(plan, config, cluster, workers)
    return None


def relaid(plan: Plan, config: Config, cluster: Cluster, workers: int | None = None) -> Plan:
    """The plan over the hosts that are there now, with as many workers or others. Raises `UserError`."""
    config = replace(config, workers=workers or plan.workers)
    other = as_long_as(with_addresses(planned_on(config, cluster), cluster), flat(plan))
    # Held fixed, the global batch keeps its rate; a smaller one has a rate that is smaller in proportion.
    scale = plan.training.rate_scale * other.training.global_batch / plan.training.global_batch
    return replace(with_rate_scale(other, scale), checkpoint=plan.checkpoint)


def _expect_needed(config: Config, session: Session) -> None:
    data, folder, uri = config.data.build, config.checkpoint.folder, config.tracking.uri
    if _trains_here(config):
        if "path" in data and repr(data) not in session.examples:
            # Only for such data: it brings along NumPy, which a plan of others does without.
            from pipeline.data.errors import DataError
            from pipeline.data.folders import expect_data

            try:
                session.examples[repr(data)] = expect_data(data)
            except DataError as error:
                raise UserError(str(error)) from error
        if folder is not None and "://" not in folder:
            _expect_folder("checkpoint.folder", folder, Path(folder))
    if config.tracking.store is Store.sqlite and uri is not None and uri.startswith(SQLITE):
        file = Path(uri.removeprefix(SQLITE).partition("?")[0])
        if file.is_dir() or (file.exists() and not os.access(file, os.W_OK)):
            why = "a folder" if file.is_dir() else "one that cannot be written"
            raise UserError(f"a file that can be written for tracking.uri={uri}", why, "tracking.uri=null")
        _expect_folder("tracking.uri", uri, file.parent)


def _trains_here(config: Config) -> bool:
    return config.cluster.name == "local" or (config.cluster.name == "env" and not config.strategy.asynchronous)


def _training_examples(config: Config, session: Session, plan: Plan) -> int | None:
    """The number of examples that train; None if only processes know it, or little data are clearly enough."""
    build, least = config.data.build, plan.training.global_batch
    examples = build.get("train_examples") if build[targets.KEY] == SYNTHETIC else session.examples.get(repr(build))
    if "path" not in build or not _trains_here(config) or examples is not None:
        return examples if type(examples) is int else None
    few = repr((build, least))
    if few not in session.examples:
        from pipeline.data.folders import may_be_few

        is_few = may_be_few(build, least)
        session.examples[few] = targets.call(build, "data.build")[0].count if is_few else None
    return session.examples[few]


def _expect_folder(key: str, value: str, path: Path) -> None:
    missing = [folder for folder in (path.absolute(), *path.absolute().parents) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        text = f"Expected to be able to write {key}={value}, received: {error.strerror or error}. Try {key}=..."
        raise UserError(text) from error
    finally:
        for folder in missing:
            with suppress(OSError):
                folder.rmdir()


def planned_on(config: Config, cluster: Cluster, present: bool = True, begin: bool = True) -> Plan:
    """The plan, with the facts of the data from its manifest, if this machine has that."""
    data, files = config.data, list[int]()
    if data.build.get(targets.KEY) == PREPARED and data.path and "://" not in data.path:
        # Only for such data: it brings along NumPy, which a plan of others does without.
        from pipeline.data import records
        from pipeline.data.errors import DataError

        try:
            contents = records.load_manifest(data.path)
        except DataError as error:
            raise UserError(str(error)) from error
        shapes = {feature.name: feature.shape for feature in contents.features}
        facts: dict[str, Any] = {
            "num_classes": contents.num_classes,
            "input_shape": None if None in shapes.get("x", (None,)) else [size or 0 for size in shapes["x"]],
            "train_examples": contents.examples(records.TRAIN),
            "validation_examples": contents.examples(records.VALIDATION),
        }
        missing = {name: value for name, value in facts.items() if getattr(data, name) is None}
        config = replace(config, data=replace(data, **missing))
        files = [shard.examples for shard in contents.splits.get(records.TRAIN, ()) if shard.examples]
    return planning.make(config, machine_of(config, cluster, begin), present, files)


def machine_of(config: Config, cluster: Cluster, begin: bool = True) -> Machine:
    """The cluster's hosts, with the link between them that `doctor` measured; assumed where no process will start."""
    looks = config.mode is Mode.run and (begin or cluster.arrived())
    machine = cluster.inventory() if looks else cluster.assumed()
    if config.hardware.link_gbps is not None or machine.hosts == 1:
        return machine
    hostnames = [host.hostname for host in machine.members[: config.hardware.hosts]]
    return replace(machine, link_gbps=slowest_link(read_links(Path(config.output_dir)), hostnames))


def reachable(plan: Plan, config: Config, session: Session) -> Plan:
    """The plan with an address for each process. Raises `UserError` if its TPU or its data service does not respond."""
    if config.mode is Mode.run:
        tpu = str(plan.strategy.build.get("address"))
        if plan.hardware.kind == "tpu" and tpu.startswith("grpc://") and tpu not in session.tpus:
            # TensorFlow waits for minutes where none is.
            reach.expect_tpu(tpu)
            session.tpus.add(tpu)
        for address in plan.data.service:
            reach.expect_data_service(address)
    return with_addresses(plan, session.cluster(config))


def with_addresses(plan: Plan, cluster: Cluster) -> Plan:
    """The plan with an address for each of its processes, if there are several."""
    return planning.listening(plan, cluster.addresses(plan) if len(plan.processes) > 1 else ())


def _check_targets(config: Config, search: tuple[str, ...]) -> None:
    """Refuses functions that no config may call, that do not exist or do not fit; imports none, as that runs code."""
    allowed = config.allowed_targets
    targets.check_allowed(allowed)
    for key, build, arguments in (
        ("strategy.build", config.strategy.build, "devices addresses rank coordinator workers parameter_servers"),
        ("model.build", config.model.build, "input_shape num_classes"),
        ("data.build", config.data.build, "shard shards"),
    ):
        if targets.KEY not in build:
            raise UserError(f"{key}._target_ to name a function", "none", f"{key}._target_=package.function")
        targets.check(build, key, arguments.split(), search, allowed)
    for index, callback in enumerate(config.train.callbacks):
        if not isinstance(callback, dict) or targets.KEY not in callback:
            is_name = isinstance(callback, str) and all(part.isidentifier() for part in callback.split("."))
            one = f"'train.callbacks=[{instead.callback(str(callback) if is_name else '')}]'"
            raise UserError("train.callbacks to be functions with their arguments", f"{callback} at {index}", one)
    for key in ("optimizer", "loss", "metrics", "callbacks"):
        targets.check(getattr(config.train, key), f"train.{key}", (), search, allowed)

"""Plans a run and its baseline, with the facts of a manifest, and with addresses once its services respond."""

import dataclasses
import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.config import instead, targets
from pipeline.config.parts import flat
from pipeline.config.schema import Config, Mode, Store
from pipeline.driver import offered
from pipeline.driver.session import Planned, Session
from pipeline.errors import UserError
from pipeline.launch import Cluster, reach
from pipeline.plan import planning
from pipeline.plan.backends import check_installed
from pipeline.plan.division import expect_batch
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan, as_long_as, with_rate_scale
from pipeline.record.files import read_links, slowest_link
from pipeline.worker.collective import check_collective
from pipeline.worker.engine import check_engine

# The function that reads what `python -m pipeline prepare` wrote.
PREPARED = "pipeline.data.tfrecord"
SYNTHETIC = "pipeline.data.synthetic"
SQLITE = "sqlite:///"


def plan_run(config: Config, session: Session, begin: bool = True) -> Planned:
    """The plans of a run, without ports; nothing is started, nor, without `begin`, asked. Raises `UserError`."""
    _check_targets(config, session.search)
    check_engine(config.backend)
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
    return Planned(plan, baseline, cluster)


def fewer(plan: Plan, config: Config, cluster: Cluster) -> Plan | None:
    """The plan over the most workers below its own that it can be laid over; None if there are too few."""
    for workers in range(plan.workers - 1, plan.launch.min_workers - 1, -1):
        with suppress(UserError):
            return relaid(plan, config, cluster, workers)
    return None


def batch_rule(plan: Plan) -> str:
    """The batches that fewer workers train on, in words."""
    if plan.training.scaling == "strong":
        return f"on the same global batches of {plan.training.global_batch}"
    return f"on global batches of {plan.training.global_batch} and {plan.training.rate_scale:.3g} of the learning rate"


def relaid(plan: Plan, config: Config, cluster: Cluster, workers: int | None = None) -> Plan:
    """The plan over the hosts that are there now, with as many workers or others. Raises `UserError`."""
    config = dataclasses.replace(config, workers=workers or plan.workers)
    other = as_long_as(with_addresses(planned_on(config, cluster), cluster), flat(plan))
    # Held fixed, the global batch keeps its rate; a smaller one has a rate that is smaller in proportion.
    scale = plan.training.rate_scale * other.training.global_batch / plan.training.global_batch
    return dataclasses.replace(with_rate_scale(other, scale), checkpoint=plan.checkpoint)


def _expect_needed(config: Config, session: Session) -> None:
    """Refuses a run whose data, or whose folders, are not there or cannot be written."""
    data, folder, uri = config.data.build, config.checkpoint.folder, config.tracking.uri
    if _trains_here(config):
        if "path" in data and repr(data) not in session.examples:
            # Only for such data: it brings along NumPy, which a plan of others does without.
            from pipeline.data.errors import DataError
            from pipeline.data.needed import expect_data, training_examples

            try:
                expect_data(data)
                session.examples[repr(data)] = training_examples(data)
            except DataError as error:
                raise UserError(str(error)) from error
        if folder is not None and "://" not in folder:
            _expect_folder("checkpoint.folder", folder, Path(folder))
    if config.tracking.store is Store.sqlite and uri is not None and uri.startswith(SQLITE):
        _expect_store(uri, Path(uri.removeprefix(SQLITE).partition("?")[0]))


def _expect_store(uri: str, file: Path) -> None:
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
        from pipeline.data.needed import may_be_few

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
        from pipeline.data import manifest
        from pipeline.data.errors import DataError

        try:
            contents = manifest.load(data.path)
        except DataError as error:
            raise UserError(str(error)) from error
        shapes = {feature.name: feature.shape for feature in contents.features}
        facts: dict[str, Any] = {
            "num_classes": contents.num_classes,
            "input_shape": None if None in shapes.get("x", (None,)) else [size or 0 for size in shapes["x"]],
            "train_examples": contents.examples(manifest.TRAIN),
            "validation_examples": contents.examples(manifest.VALIDATION),
        }
        missing = {name: value for name, value in facts.items() if getattr(data, name) is None}
        config = dataclasses.replace(config, data=dataclasses.replace(data, **missing))
        files = [shard.examples for shard in contents.splits.get(manifest.TRAIN, ()) if shard.examples]
    return planning.make(config, machine_of(config, cluster, begin), present, files)


def machine_of(config: Config, cluster: Cluster, begin: bool = True) -> Machine:
    """The cluster's hosts, with the link between them that `doctor` measured; assumed where no process will start."""
    looks = config.mode is Mode.run and (begin or cluster.arrived())
    machine = cluster.inventory() if looks else cluster.assumed()
    if config.hardware.link_gbps is not None or machine.hosts == 1:
        return machine
    hostnames = [host.hostname for host in machine.members[: config.hardware.hosts]]
    return dataclasses.replace(machine, link_gbps=slowest_link(read_links(Path(config.output_dir)), hostnames))


def reachable(plan: Plan, cluster: Cluster, config: Config, session: Session) -> Plan:
    """The plan with an address for each process. Raises `UserError` if its TPU or its data service does not respond."""
    if config.mode is Mode.run:
        tpu = str(plan.strategy.build.get("address"))
        if plan.hardware.kind == "tpu" and tpu.startswith("grpc://") and tpu not in session.tpus:
            # TensorFlow waits for minutes where none is.
            reach.expect_tpu(tpu)
            session.tpus.add(tpu)
        for address in plan.data.service:
            reach.expect_data_service(address)
    return with_addresses(plan, cluster)


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

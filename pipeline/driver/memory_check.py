"""Finds out how large a plan's model is, and refuses a plan that its devices or its host lack the memory for."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

from pipeline.config.schema import Config, Exchange, Object, StrategyConfig
from pipeline.driver import RunResult
from pipeline.driver.planner import planned_on
from pipeline.driver.session import RunRequest, Session, own_code
from pipeline.driver.watch import RunFailed
from pipeline.errors import UserError
from pipeline.launch import Cluster
from pipeline.plan import size as sizes
from pipeline.plan.backends import COMPUTING, MODEL_PARALLEL
from pipeline.plan.estimate import Estimate, estimate
from pipeline.plan.plan import TENSORFLOW, Plan
from pipeline.plan.size import Size
from pipeline.record.log import read_json, write_json
from pipeline.record.results import Choices, Ending, Layout, Result

# Devices that a copy of the model is tried over.
PARTS = (2, 4, 8)
MOST_NAMED = 3


def estimated(plan: Plan, request: RunRequest, cluster: Cluster, session: Session) -> RunResult:
    """Shows what a plan needs. Builds its model once if its size is not known."""
    layout = Layout(workers=plan.workers, global_batch=plan.training.global_batch)
    point = request.ended(Result(Ending("PLANNED"), Choices.of(request.config), layout))
    size = learned_size(plan, request, session)
    if isinstance(size, str):
        session.screen.say(f"\nestimate   none, since the model could not be built: {size}")
        return point
    estimation = estimate(plan, size)
    session.screen.estimated(plan, estimation)
    if refusal := _refusal(plan, size, request, cluster):
        session.screen.say(f"\n{refusal}")
    return replace(point, estimate=estimation)


def expect_room(plan: Plan, request: RunRequest, cluster: Cluster, session: Session) -> None:
    """Refuses a plan with too little memory for its model, if the size of that is known. Raises `UserError`."""
    size = known_size(plan, size_file(plan, request.output, session.search))
    if size and (refusal := _refusal(plan, size, request, cluster)):
        raise UserError(refusal)


def cut(plan: Plan, request: RunRequest, session: Session) -> Estimate | None:
    """The estimate of a plan whose tables are cut, if the size of its model is known before that is built."""
    if plan.strategy.min_shard_bytes is None:
        return None
    size = known_size(plan, size_file(plan, request.output, session.search))
    return estimate(plan, size) if size else None


def known_size(plan: Plan, path: Path) -> Size | None:
    """The size that comes with the package, or that is in the file `path`; None if neither."""
    return sizes.shipped(plan) or read_json(Size, path)


def learned_size(plan: Plan, request: RunRequest, session: Session) -> Size | str:
    """The size, of a model that is built once if it is not known; why it could not be built, if so."""
    path = size_file(plan, request.output, session.search)
    if (size := known_size(plan, path)) is not None or path in session.unbuilt:
        return session.unbuilt[path] if size is None else size
    # What drives processes takes a moment to import.
    from pipeline.driver.timing import learn_size

    session.screen.say(f"\nBuilding the model once to know its size, which takes some seconds. {path} will keep it.")
    try:
        return keep_size(learn_size(plan, session.here(request.config)), path)
    except RunFailed as failure:
        session.unbuilt[path] = str(failure)
        return session.unbuilt[path]


def keep_size(size: Size, path: Path) -> Size:
    """The size, written to a file for later commands."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, size)
    return size


def size_file(plan: Plan, output: Path, search: Sequence[str]) -> Path:
    """The file for the size of a plan's model, named by all that it depends on."""
    from importlib import metadata

    versions = {name: metadata.version(name) for name in (*COMPUTING.get(plan.backend, ()), "keras")}
    code = own_code(plan, search) or hashlib.sha256().hexdigest()
    return output / "sizes" / f"{sizes.fingerprint(plan, code, versions)}.json"


def _refusal(plan: Plan, size: Size, request: RunRequest, cluster: Cluster) -> str | None:
    # On the same hosts, whatever devices they have.
    return too_large(plan, size, request.config, lambda config: planned_on(config, cluster, False, False))


def too_large(plan: Plan, size: Size, config: Config, replan: Callable[[Config], Plan]) -> str | None:
    """The refusal of a plan with too little memory, with what fits once `replan` has planned it; None if it fits."""
    estimation = estimate(plan, size)
    if estimation.fits:
        return None

    def fitting() -> Iterator[str]:
        for typed, changed in _others(plan, size, config):
            with suppress(UserError):
                if estimate(replan(changed), size).fits:
                    yield typed

    tried = ", or ".join(islice(fitting(), MOST_NAMED)) or (
        "a smaller model: no strategy, train.remat or batch tried holds it"
    )
    host, device, whose = estimation.host, estimation.device, "in all"
    if host is None or estimation.too_small:
        place, whose = f"{plan.hardware.memory_gib:g} GiB of a device of {plan.hardware.name}", "on each"
        needed = max(each.total for each in estimation.memory)
    else:
        place, needed = f"{host.gib:g} GiB of a host, which its CPU devices share,", host.total
    parts = (
        (device.parameters, "of parameters"), (device.gradients, "of gradients"), (device.slots, "of the optimizer"),
        (device.activations or 0, "of activations"), (device.batches, "of batches"),
    )  # fmt: skip
    of_device = ", ".join(f"{_amount(size)} {what}" for size, what in parts if size)
    return (
        f"Expected a model that fits the {place} under strategy={plan.strategy.name}, received one that takes "
        f"{_amount(needed)} {whose} ({of_device} on a device). Try {tried}."
    )


def without_room(plan: Plan, state_bytes: int) -> str | None:
    """The refusal of a built model whose weights, gradients and slots alone exceed the memory; None if they fit."""
    hardware, devices = plan.hardware, [len(process.devices) for process in plan.processes if process.host == 0]
    gib = hardware.memory_gib or hardware.host_memory_gib
    copies = sum(devices) // plan.strategy.devices_per_replica if hardware.memory_gib is None else 1
    if gib is None or plan.strategy.asynchronous or (plan.strategy.devices_per_replica > 1 and copies == 1):
        return None
    if copies * state_bytes <= gib * 2**30:
        return None
    return (
        f"Expected a model that fits {gib:g} GiB under strategy={plan.strategy.name}, received one whose weights, "
        f"gradients and optimizer take {copies * state_bytes / 2**30:.3g} GiB. "
        f"Try mode=plan, which names what holds it."
    )


def _others(plan: Plan, size: Size, config: Config) -> Iterator[tuple[str, Config]]:
    """Yields (what is typed, the config) of what may hold the model: several devices a copy, one copy, less a batch."""
    bases = [("", config)]
    if size.forgetful_step is not None and not config.train.remat:
        bases.append((" train.remat=true", replace(config, train=replace(config.train, remat=True))))
        yield "train.remat=true", bases[1][1]
    # As the size says how the model is laid over devices.
    cuttable = size.layers if plan.backend == TENSORFLOW else any(variable.cut for variable in size.variables)
    tried = [parts for parts in PARTS if cuttable and parts > plan.strategy.devices_per_replica]
    others: list[tuple[str, StrategyConfig]] = []
    for parts in () if plan.strategy.asynchronous else tried:
        build: Object = {"_target_": MODEL_PARALLEL, "layout": None}
        strategy = StrategyConfig("model_parallel", spans_devices=True, devices_per_replica=parts, build=build)
        others.append((f"strategy=model_parallel workers=1 strategy.devices_per_replica={parts}", strategy))
    for also, base in bases:
        yield from ((f"{typed}{also}", replace(base, workers=1, strategy=strategy)) for typed, strategy in others)
    if plan.workers > 1 and not plan.strategy.asynchronous:
        build = {"_target_": "pipeline.strategies.one_device"}
        one_device = StrategyConfig(name="one_device", exchange=Exchange.none, build=build)
        for also, base in bases:
            yield f"strategy=one_device workers=1{also}", replace(base, workers=1, strategy=one_device)
    batch = plan.training.replica_batch // 2
    while batch and not estimate(replace(plan, training=replace(plan.training, replica_batch=batch)), size).fits:
        batch //= 2
    if batch:
        train = replace(config.train, replica_batch=batch, global_batch=None)
        yield f"train.replica_batch={batch}", replace(config, train=train)


def _amount(size: int) -> str:
    """Bytes in words.

    >>> _amount(3 * 2**30), _amount(2**21)
    ('3 GiB', '2 MiB')
    """
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"

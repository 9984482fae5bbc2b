"""Refuses a plan that its devices, or its host, have no memory for, naming what would be held there."""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import islice

from pipeline.config.schema import Config, Exchange, StrategyConfig
from pipeline.errors import UserError
from pipeline.plan.backends import MODEL_PARALLEL
from pipeline.plan.estimate import Estimate, estimate
from pipeline.plan.plan import TENSORFLOW, Plan
from pipeline.plan.size import Size

# Devices that a copy of the model is tried over.
PARTS = (2, 4, 8)
# Of what would be held, so much is named.
MOST_NAMED = 3
# Planned anew under a changed config.
Planned = Callable[[Config], Plan]


def refuse_too_large(plan: Plan, size: Size, config: Config, planned: Planned) -> None:
    """Refuses a plan that there is too little memory for. Raises `UserError`."""
    if said := too_large(plan, size, config, planned):
        raise UserError(said)


def too_large(plan: Plan, size: Size, config: Config, planned: Planned) -> str | None:
    """What is said of a plan that there is too little memory for, and of what would be held; None where it fits.

    `planned` makes the plan of a changed config, and raises `UserError` where there is none.
    """
    made = estimate(plan, size)
    if made.fits:
        return None
    held = islice(_held(plan, size, config, planned), MOST_NAMED)
    tried = ", or ".join(held) or "a smaller model: no strategy, train.remat or batch tried holds it"
    expected, under = _expected(plan, made), f"under strategy={plan.strategy.name}"
    return f"Expected {expected} {under}, received {_received(made)}. Try {tried}."


def without_room(plan: Plan, state_bytes: int) -> str | None:
    """What is said of a model whose weights, gradients and slots alone have too little room; None where they have.

    It was built, and its size was not known before.
    """
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


def _held(plan: Plan, size: Size, config: Config, planned: Planned) -> Iterator[str]:
    """What is to be typed for plans that are held, those that change the least first."""
    for typed, changed in _others(plan, size, config):
        try:
            if estimate(planned(changed), size).fits:
                yield typed
        except UserError:
            continue


def _others(plan: Plan, size: Size, config: Config) -> Iterator[tuple[str, Config]]:
    """(what to type, the config that it makes)."""
    forgetful = dataclasses.replace(config, train=dataclasses.replace(config.train, remat=True))
    saves = size.forgetful_step is not None and not config.train.remat
    if saves:
        yield "train.remat=true", forgetful
    for typed, shared in _over_several(plan, size, config):
        yield typed, shared
    if saves:
        for typed, shared in _over_several(plan, size, forgetful):
            yield f"{typed} train.remat=true", shared
    if plan.workers > 1 and not plan.strategy.asynchronous:
        yield "strategy=one_device workers=1", _one_device(config)
        if saves:
            yield "strategy=one_device workers=1 train.remat=true", _one_device(forgetful)
    if (batch := _smaller(plan, size)) is not None:
        train = dataclasses.replace(config.train, replica_batch=batch, global_batch=None)
        yield f"train.replica_batch={batch}", dataclasses.replace(config, train=train)


def _over_several(plan: Plan, size: Size, config: Config) -> Iterator[tuple[str, Config]]:
    """Each copy of the model over several devices, where the size says how it is laid over them."""
    known = size.layers if plan.backend == TENSORFLOW else any(variable.cut for variable in size.variables)
    if plan.strategy.asynchronous or not known:
        return
    for parts in PARTS:
        if parts <= plan.strategy.devices_per_replica:
            continue
        strategy = StrategyConfig(
            name="model_parallel",
            spans_devices=True,
            devices_per_replica=parts,
            build={"_target_": MODEL_PARALLEL, "layout": None},
        )
        typed = f"strategy=model_parallel workers=1 strategy.devices_per_replica={parts}"
        yield typed, _of_one_worker(config, strategy)


def _one_device(config: Config) -> Config:
    return _of_one_worker(
        config,
        StrategyConfig(name="one_device", exchange=Exchange.none, build={"_target_": "pipeline.strategies.one_device"}),
    )


def _of_one_worker(config: Config, strategy: StrategyConfig) -> Config:
    """Under another strategy, with one copy of the model, which trains the batch that a replica had."""
    return dataclasses.replace(config, workers=1, strategy=strategy)


def _smaller(plan: Plan, size: Size) -> int | None:
    """The largest batch of a replica, of halves of the plan's, that is held; None where none is."""
    batch = plan.training.replica_batch // 2
    while batch:
        training = dataclasses.replace(plan.training, replica_batch=batch)
        if estimate(dataclasses.replace(plan, training=training), size).fits:
            return batch
        batch //= 2
    return None


def _expected(plan: Plan, made: Estimate) -> str:
    if made.too_small:
        return f"a model that fits the {plan.hardware.memory_gib:g} GiB of a device of {plan.hardware.name}"
    gib = None if made.host is None else made.host.gib
    return f"a model that fits the {gib:g} GiB of a host, which its CPU devices share,"


def _received(made: Estimate) -> str:
    needed = max(place.total for place in made.memory) if made.too_small or made.host is None else made.host.total
    whose = "on each" if made.too_small else "in all"
    device = made.device
    parts = (
        (device.parameters, "of parameters"),
        (device.gradients, "of gradients"),
        (device.slots, "of the optimizer"),
        (device.activations or 0, "of activations"),
    )
    of_device = ", ".join(f"{_amount(size)} {what}" for size, what in parts if size)
    return f"one that takes {_amount(needed)} {whose} ({of_device} on a device)"


def _amount(size: int) -> str:
    """In words.

    >>> _amount(3 * 2**30), _amount(2**21)
    ('3 GiB', '2 MiB')
    """
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"

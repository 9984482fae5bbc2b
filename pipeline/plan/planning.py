"""Turns a config and an inventory into a plan, and a plan into those of its baseline and of one worker."""

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from enum import Enum
from operator import attrgetter
from typing import Any, TypeVar

from pipeline.config.schema import Baseline, Cache, CheckpointConfig, Config, Object
from pipeline.errors import refuse
from pipeline.plan import machine as machines
from pipeline.plan import plan as plans
from pipeline.plan.backends import HOROVOD, JAX, OURS, check_backend, notes_on_sums, xla_of
from pipeline.plan.checks import check_of, check_ranges, class_weights, stays_here
from pipeline.plan.division import check_micro_batches, shared, split_batch
from pipeline.plan.machine import Layout, Machine, hosts_of, lay_out, processes_of, service_of
from pipeline.plan.plan import AUTO, BUILDER, Plan

Part = TypeVar("Part")
# Passes over the data of a training whose length nobody gave.
DEFAULT_EPOCHS = 2
# The share that a checkpoint after an epoch may take of the time since the last one, where nobody said how often.
CHECKPOINT_SHARE = 0.01
# How long processes go on without a driver by default: as a cut line or a slip takes; if it is meant to go, a week.
ORPHAN_SECONDS = {False: 300.0, True: 604_800.0}


def make(config: Config, machine: Machine, present: bool = True, files: Sequence[int] = ()) -> Plan:
    """The plan of `config` on `machine`; `listening` gives its processes their ports. Raises `UserError`.

    With `present`, devices that the machine lacks are refused, else noted. `files` has the examples of each file to
    train on, where that is known.
    """
    check_ranges(config)
    check_backend(config)
    config = replace(config, hardware=replace(config.hardware, hosts=hosts_of(config, machine)))
    machine = replace(machine, hosts=config.hardware.hosts or 1) if machine.grows else machine
    kind, devices_per_host, notes = machines.devices_of(config, machine, present)
    layout = lay_out(config, machine, kind, devices_per_host)
    # Asynchronous workers make each step alone, and read all files each.
    asynchronous = config.strategy.asynchronous
    batch = split_batch(config, 1 if asynchronous else layout.workers)
    check_micro_batches(config, batch[1])
    several_hosts = layout.hosts > 1 and layout.local and layout.workers > layout.per_host
    stands_for_hosts = several_hosts and present and not config.hardware.rehearse
    processes = processes_of(layout, config, machine)
    base_port, count = config.cluster.base_port, len(processes)
    expected = f"cluster.base_port to leave {count} processes a port each up to 65535"
    over = base_port is not None and count > 1 and base_port + count - 1 > 65535
    refuse((over, expected, base_port, f"cluster.base_port=null, or {65536 - count}"))
    hosts = max(process.host for process in processes) + 1
    xla, notes_on_xla = xla_of(config)
    notes += machines.notes_on_tpu(config, kind, layout.workers, batch[2]) + notes_on_xla
    notes += _notes(config, machine, layout, stands_for_hosts)
    build = config.strategy.build
    if kind == "tpu" and "address" in build:
        build = build | {"address": machines.tpu_address(config, machine)}
    launch, checkpoint, best = config.launch, config.checkpoint, config.checkpoint.keep_best
    usual = "min" if best and falls(best) else "max"
    plan = Plan(
        strategy=_taken(
            plans.StrategyPart,
            config.strategy,
            build=build,
            static_batches=config.strategy.on_tpu,
            devices_per_replica=layout.per_replica,
        ),
        hardware=_hardware(config, machine, layout, hosts, stands_for_hosts),
        model=plans.ModelPart(config.model.name, config.model.build),
        data=_data(config, files, 1 if asynchronous else layout.workers // layout.per_process),
        training=_training(config, batch, layout.workers, xla),
        measurement=_taken(
            plans.MeasurementPart,
            config.measure,
            baseline=machines.baseline_source(config, kind),
            system_metrics_seconds=config.tracking.system_metrics_seconds,
            profile=config.data.profile,
            explain=machines.is_explained(config, kind),
        ),
        launch=_taken(plans.LaunchPart, launch, orphan_timeout=launch.orphan_timeout or ORPHAN_SECONDS[launch.detach]),
        processes=processes,
        workers=layout.workers,
        checkpoint=_taken(
            plans.Checkpoints, checkpoint, best=best, best_is=checkpoint.best_is.value if checkpoint.best_is else usual
        ),
        output_dir=config.output_dir,
        backend=config.backend,
        notes=tuple(notes),
    )
    return replace(plan, notes=(*plan.notes, *notes_on_sums(plan)))


def _hardware(config: Config, machine: Machine, layout: Layout, hosts: int, rehearsal: bool) -> plans.HardwarePart:
    on_cpu = layout.kind == "cpu"
    gpus, tpus = ", ".join(machine.gpus) or "none", f", TPU chips: {len(machine.tpus)}" * bool(machine.tpus)
    return _taken(
        plans.HardwarePart,
        config.hardware,
        kind=layout.kind,
        hosts=hosts,
        link_gbps=config.hardware.link_gbps or (machine.link_gbps if hosts > 1 else None),
        threads_per_device=layout.threads if on_cpu else config.hardware.threads_per_device,
        rehearsal=config.hardware.rehearse or rehearsal,
        oversubscribed=layout.oversubscribed,
        machine=f"{machine.hostname}: {machine.cpu}, {len(machine.cores)} cores, GPUs: {gpus}{tpus}",
        host_memory_gib=machine.memory_gib if on_cpu else None,
        cache_bytes=machine.cache_bytes,
        host_names=tuple(host.hostname for host in machine.members),
    )


def _data(config: Config, files: Sequence[int], readers: int) -> plans.DataPart:
    data = config.data
    return _taken(
        plans.DataPart,
        data,
        input_shape=None if data.input_shape is None else tuple(data.input_shape),
        divided=shared(data.shard.value, files, readers) if files else None,
        train_files=len(files) or None,
        service=service_of(config)[1],
        cache=Cache.none.value if data.cache is Cache.auto else data.cache.value,
        keep_small=data.cache is Cache.auto,
    )


def _taken(part: type[Part], group: object, /, **own: Any) -> Part:
    """Returns a part of the plan: `own` values, and those that a group of the config has under the same names."""
    names = [field.name for field in fields(part) if hasattr(group, field.name)]  # type: ignore[arg-type]
    values = {name: getattr(group, name) for name in names}
    plain = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
    return part(**plain | own)


def _training(config: Config, batch: tuple[str, int, int], workers: int, xla: str | None) -> plans.TrainingPart:
    train, (scaling, replica_batch, global_batch) = config.train, batch
    usual_length = train.epochs is None and train.steps is None
    every = attrgetter("every_steps", "every_minutes", "every_epochs")
    compared = train.compare_weights_every or (None if config.strategy.collective in OURS else 100)
    return _taken(
        plans.TrainingPart,
        train,
        replica_batch=replica_batch,
        global_batch=global_batch,
        scaling=scaling,
        epochs=DEFAULT_EPOCHS if usual_length else train.epochs,
        usual_length=usual_length,
        checkpoint_share=CHECKPOINT_SHARE if every(config.checkpoint) == every(CheckpointConfig()) else None,
        callbacks=tuple(train.callbacks),
        precision=machines.precision_of(config),
        check=check_of(train),
        xla=xla,
        class_weight=class_weights(train.class_weight),
        compare_weights_every=None if workers == 1 else compared,
    )


def _notes(config: Config, machine: Machine, layout: Layout, stands_for_hosts: bool) -> list[str]:
    devices, threads, cores = layout.devices_here, layout.threads, len(machine.cores)
    with_baseline = machines.baseline_source(config, layout.kind) != "none" and config.measure.steps != 0
    notes = {
        f"{devices} CPU devices of {threads} thread{'s' * (threads > 1)} share {cores} core{'s' * (cores > 1)}: the "
        f"speedup says nothing about {devices} separate devices.": layout.oversubscribed,
        f"This machine stands for {layout.hosts} hosts: a rehearsal.": stands_for_hosts,
        f"Logical CPU devices stand for the devices of {config.hardware.name}: a rehearsal.": config.hardware.rehearse,
        "The baseline makes its batches itself, without a tf.data service.": config.data.service and with_baseline,
        "Asynchronous: each worker steps at its own pace, on weights that others may have changed meanwhile.":
            config.strategy.asynchronous and layout.workers > 1,
    }  # fmt: skip
    differences = [f"{unlike}: the slowest decides." for unlike in machines.differences(machine.members)]
    return [*differences, *(note for note, applies in notes.items() if applies)]


def listening(plan: Plan, new_addresses: Sequence[str]) -> Plan:
    """The plan with HOST:PORT for each of its processes that has an address; a note says what is open to others."""
    if not new_addresses:
        return plan
    processes = tuple(
        process if process.address is None else replace(process, address=address)
        for process, address in zip(plan.processes, new_addresses, strict=True)
    )
    addresses = [process.address.rpartition(":")[::2] for process in processes if process.address]
    if all(stays_here(host) for host, _ in addresses):
        return replace(plan, processes=processes)
    # Where others were given than was asked for, a cluster knows where its hosts are reached.
    asked_hosts = {process.address.rpartition(":")[0] for process in plan.processes if process.address}
    instead = ", or try cluster.host=127.0.0.1" if asked_hosts >= {host for host, _ in addresses} else ""
    ports = sorted(int(port) for _, port in addresses)
    which = f"ports {ports[0]} to {ports[-1]}" if ports[0] else "free ports"
    whose = "TensorFlow's and Horovod" if plan.strategy.collective == HOROVOD else "TensorFlow"
    note = (
        f"{'JAX' if plan.backend == JAX else whose}'s own transport is open, unauthenticated and unencrypted: whoever "
        f"reaches a port can read this training, change it and run code in it. It binds every network interface of "
        f"each host, not {addresses[0][0]} alone ({which}). Keep others out of this network{instead}."
    )
    return replace(plan, processes=processes, notes=(*plan.notes, note))


def on_one_device(config: Config) -> Config:
    """The config with one worker where its strategy trains on one device however many are asked for; else itself."""
    spans = config.strategy.spans_devices or config.strategy.spans_processes
    return config if spans or config.workers in (None, 1) else replace(config, workers=1)


def on_one_worker(config: Config, plan: Plan) -> Config:
    """The config of a plan's step on one device, under the same strategy; it trains for nothing and keeps nothing."""
    devices, batch = plan.strategy.devices_per_replica, plan.training.replica_batch
    threads = plan.hardware.threads_per_device or config.hardware.threads_per_device
    hardware = replace(config.hardware, hosts=1, devices_per_host=devices, threads_per_device=threads)
    train = replace(config.train, replica_batch=batch, global_batch=None, callbacks=[], save=False)
    measure = replace(config.measure, scaling=None, steps=None, baseline=Baseline.none, patience=0.0, explain=False)
    strategy, checkpoint = replace(config.strategy, devices_per_process=None), CheckpointConfig()
    return replace(
        config, workers=1, strategy=strategy, hardware=hardware, train=train, measure=measure, checkpoint=checkpoint
    )


def baseline_of(plan: Plan, machine: Machine) -> Plan:
    """The same model, data, precision, threads and batch rule on one device, with no strategy."""
    first = next(process for process in plan.processes if process.devices)
    threads, on_cpu = plan.hardware.threads_per_device or 0, plan.hardware.kind == "cpu"
    cores, intra = (machine.member(0).cores[:threads], threads) if on_cpu else ((), first.intra_op_threads)
    one = plans.Process(0, "chief", 0, None, first.devices[:1], (0,), cores, intra, first.inter_op_threads)
    training = replace(plan.training, callbacks=(), save=False, check="off", compare_weights_every=None)
    size = training.replica_batch if training.scaling == "weak" else training.global_batch
    build: Object = {"_target_": "pipeline.strategies.default"}
    static, bucket_bytes = plan.strategy.static_batches, plan.strategy.bucket_bytes
    strategy = plans.StrategyPart("default", build, False, None, "none", static, 1, AUTO, bucket_bytes)
    return replace(
        plan,
        strategy=strategy,
        hardware=replace(plan.hardware, hosts=1, rehearsal=False, oversubscribed=False),
        data=replace(plan.data, service=()),
        training=replace(training, replica_batch=size, global_batch=size),
        measurement=replace(plan.measurement, explain=False),
        processes=(one,),
        workers=1,
        checkpoint=plans.Checkpoints(),
        notes=(),
    )


def builder_of(plan: Plan, machine: Machine) -> Plan:
    """One process that builds the plan's model on this machine's CPU, and tells by batches of any size what is kept."""
    alone = baseline_of(plan, machine)
    # Under JAX a variable is cut over the devices of a replica, and so is what a step holds of it.
    each = plan.strategy.devices_per_replica if plan.backend == JAX else 1
    strategy = replace(plan.strategy if each > 1 else alone.strategy, static_batches=False)
    one = plans.Process(0, BUILDER, 0, None, tuple(f"CPU:{number}" for number in range(each)), (0,))
    hardware = replace(alone.hardware, kind="cpu")
    measurement = replace(alone.measurement, system_metrics_seconds=0.0)
    return replace(alone, strategy=strategy, hardware=hardware, measurement=measurement, processes=(one,))


def falls(metric: str) -> bool:
    """True if a smaller value of what Keras names so is the better one.

    >>> [falls(name) for name in ("val_loss", "mae", "size_mape", "val_mse_1", "mean_error", "accuracy", "mean_io_u")]
    [True, True, True, True, True, False, False]
    """
    return re.search(r"loss|error|divergence|(^|_)(m[as]p?l?e|rmse)(_|$)", metric) is not None

"""Turns a plan, and what it needs in bytes, into the lines that a person reads before anything starts."""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

from pipeline.analyze.comparable import grouped
from pipeline.driver import RunResult
from pipeline.plan.backends import other
from pipeline.plan.estimate import Estimate, Exchanged, Traffic
from pipeline.plan.host import HostMemory
from pipeline.plan.plan import REPEAT_SECONDS, Plan
from pipeline.record.results import Layout
from pipeline.views.terminal.result import batch_text
from pipeline.views.terminal.words import (
    MISSING,
    amount,
    cells,
    clean,
    columns,
    listed,
    marks,
    named,
    plural,
    ranges,
    spread,
)

# Hosts that are named where they are counted.
MOST_NAMES = 8
HEADER = ("memory", "parameters", "gradients", "optimizer", "activations", "total")
SWEEP_HEADER = ("", "strategy", "workers", "memory/device", "exchanged/step", "exchanged/example", "status")
RIGHT = (0, 2, 3, 4, 5)
# More servers than this are told as the fullest and the emptiest.
MOST_SERVERS = 4


def plan_lines(plan: Plan, full: bool, reused: str | None = None) -> list[str]:
    """The plan in lines; with `full`, each process too. `reused` is the folder of the run that has its baseline."""
    labelled = [
        ("plan", _headline(plan)),
        ("processes", _processes(plan)),
        ("batch", _batch(plan)),
        ("length", _length(plan)),
        *([("data", listed(_data(plan), _served(plan)))] if plan.data.divided or plan.data_servers else []),
        *([("training", _training(plan))] if full else []),
        ("baseline", _baseline(plan, reused)),
        *(("note", clean(note)) for note in plan.notes),
    ]
    lines = [f"{label:<11}{text}" for label, text in labelled]
    return [*lines, "", *_process_rows(plan)] if full else lines


def _headline(plan: Plan) -> str:
    model, data, strategy, hardware = (
        clean(part.name) for part in (plan.model, plan.data, plan.strategy, plan.hardware)
    )
    under, adds = clean(other(plan.backend)), clean(other(plan.collective))
    by = f" under {under}" * bool(under) + f" by {adds}" * bool(adds)
    workers = plural(plan.workers, f"{plan.hardware.kind.upper()} worker")
    return f"{model} on {data}, {strategy}{by} on {hardware}: {workers}{marks(Layout.of(plan))}"


def _processes(plan: Plan) -> str:
    roles = Counter(process.role for process in plan.processes)
    count = f"{len(plan.processes):,} ({listed(*(plural(many, role) for role, many in roles.items()))})"
    training = [process for process in plan.processes if process.replicas]
    of_process = listed(
        spread((len(process.devices) for process in training), "device", none="no device"),
        spread((len(process.cores) for process in training), "core", none="any core"),
        spread((process.intra_op_threads for process in training), "thread", none="default threads"),
    )
    who = "each" if len(training) == len(plan.processes) else "each worker"
    names = plan.hardware.host_names[: plan.hardware.hosts]
    hosts = plural(plan.hardware.hosts, "host")
    if names:
        hosts += " " + clean(f"({listed(*names[:MOST_NAMES])}{' and others' * (len(names) > MOST_NAMES)})")
    return f"{count} on {hosts}; {who}: {of_process}"


def _batch(plan: Plan) -> str:
    held = "global" if plan.training.scaling == "strong" else "replica"
    fixed = f" ({held} batch held fixed)" * (not plan.strategy.asynchronous)
    return f"{batch_text(Layout.of(plan))}; {plan.training.scaling} scaling{fixed}"


def _length(plan: Plan) -> str:
    length = plural(plan.training.steps, "step") or plural(plan.training.epochs, "epoch")
    why = " (the default; train.epochs=10 for more)" if plan.training.usual_length else ""
    if plan.data.train_examples is None:
        return f"{length}{why}; steps an epoch are known once the data is read"
    per_epoch = plan.steps_per_epoch(plan.data.train_examples)
    if plan.training.steps or not plan.training.epochs:
        return f"{length}, {per_epoch:,} of them an epoch"
    return f"{length} of {plural(per_epoch, 'step')}, {per_epoch * plan.training.epochs:,} in all{why}"


def _data(plan: Plan) -> str:
    if plan.data.divided is None:
        return ""
    files, readers = plural(plan.data.train_files, "file"), len(plan.leaders)
    if plan.strategy.asynchronous:
        return f"{files}; every worker reads all of them, and makes the examples of its own steps"
    if readers == 1:
        return f"{files}, read by one process"
    if plan.data.divided == "file":
        return f"{files}; each of {readers} processes reads its own"
    why = "as data.shard says" if plan.data.shard == "element" else "since they cannot be divided evenly"
    return f"{files}; each of {readers} processes reads all of them, {why}, and makes its own part of the examples"


def _served(plan: Plan) -> str:
    if plan.data.service:
        return f"batches made by the tf.data service at {listed(*map(clean, plan.data.service))}"
    return f"batches made by {plural(len(plan.data_servers), 'data server')}" if plan.data_servers else ""


def _training(plan: Plan) -> str:
    training = plan.training
    optimizer = training.optimizer.get("_target_") if isinstance(training.optimizer, dict) else training.optimizer
    return listed(
        f"optimizer {clean(optimizer)}" if optimizer else "the model's own optimizer, or adam",
        named("learning rate", training.learning_rate),
        training.precision,
        f"gradients of {training.gradient_bits} bits",
        "losses of the global batch" if training.gather else "",
        "blocks computed again on the way back" if training.remat else "",
        {None: "", "true": "steps compiled by XLA", "auto": "XLA where it is faster"}[training.xla],
        {
            "global": "",
            "host": "batch normalization by the batches of each process",
            "replica": "batch normalization by each replica's own batch",
        }[training.batch_statistics],
        f"seed {training.seed}",
        "deterministic" if training.deterministic else "",
    )


def _baseline(plan: Plan, reused: str | None) -> str:
    measurement = plan.measurement
    if measurement.steps == 0:
        return "none, since nothing is measured"
    size = f"about {REPEAT_SECONDS:g} s" if measurement.steps is None else plural(measurement.steps, "step")
    repeats = f"{plural(measurement.repeats, 'repeat')} of {size}"
    if measurement.baseline == "none":
        return f"none, so no speedup; throughput from {repeats}"
    batch = plan.training.global_batch if plan.training.scaling == "strong" else plan.training.replica_batch
    how = "reused if measured before, " if measurement.baseline == "auto" else "measured in turn, "
    if reused is not None:
        how = f"reused from {clean(reused)}; throughput from "
    return f"one device, no strategy, batch {batch:,}; {how}{repeats}"


def _process_rows(plan: Plan) -> list[str]:
    header = ("rank", "role", "host", "address", "devices", "replicas", "cores", "threads")
    rows = [
        (
            str(process.rank),
            process.role,
            plan.host_of(process),
            # Port 0 stands for one that is chosen at the start.
            re.sub(":0$", ":(free port)", process.address or "-"),
            _devices(process.devices),
            ranges(process.replicas) or "-",
            ranges(process.cores) or "any",
            f"{process.intra_op_threads or 'default'} + {process.inter_op_threads or 'default'}",
        )
        for process in plan.processes
    ]
    return [*columns([header, *rows], right=(0, 2)), "", "threads: within an operation + between operations"]


def _devices(devices: Sequence[str]) -> str:
    """Device names with their numbers drawn together.

    >>> _devices(("GPU:0", "GPU:1", "GPU:2", "GPU:5"))
    'GPU:0-2,5'
    """
    parts = [device.rpartition(":")[::2] for device in devices]
    if not all(kind and place.isdecimal() for kind, place in parts):
        return listed(*devices)
    numbers = grouped((kind, int(place)) for kind, place in parts)
    return listed(*(f"{kind}:{ranges(places)}" for kind, places in numbers.items())) or "-"


def estimate_lines(plan: Plan, estimate: Estimate) -> list[str]:
    """The estimate as a table of memory, and under it what travels and what is cut."""
    fed = any(memory.batches for memory in estimate.memory)
    header = (*HEADER[:-1], "batches", HEADER[-1]) if fed else HEADER
    rows = [header, *(_memory_row(memory, fed) for memory in _few(estimate.memory))]
    has, needs = plan.hardware.memory_gib, {memory.place: amount(memory.total) for memory in estimate.memory}
    labelled = [
        *_exchange(plan, estimate.exchanged),
        ("data", _data_held(plan, estimate)),
        *shard_lines(estimate),
        *(("placed", f"{' '.join(part.devices)}: {listed(*(clean(layer.name) for layer in part.layers))}")
          for part in estimate.placed),
        *[("note", f"Activations are not known: {clean(estimate.unknown)}.")] * bool(estimate.unknown),
        *_host(estimate),
        *(("note", f"Does not fit: {place} has {has:g} GiB, and needs {needs[place]}.")
          for place in estimate.too_small),
    ]  # fmt: skip
    return [*columns(rows, right=range(1, len(header))), "", *(f"{label:<11}{text}" for label, text in labelled)]


def _host(estimate: Estimate) -> list[tuple[str, str]]:
    host = estimate.host
    if host is None:
        return []
    unknown = "over " * any(place.activations is None for place in estimate.memory)
    has = "" if host.gib is None else f" of {host.gib:g} GiB"
    parts = f"{amount(host.devices)} of its devices, {amount(host.imported + host.computing)} of what computes"
    first = f"{unknown}{amount(host.total)}{has}: {parts}"
    copied = f"{amount(host.copied)} to copy while a checkpoint is written" if host.copied else ""
    rest = listed(f"{amount(host.data)} of data and batches" if host.data else "", copied)
    return [("host", first), ("", rest)] if rest else [("host", first)]


def shard_lines(estimate: Estimate) -> list[tuple[str, str]]:
    """A labelled line for each table that is cut, and for each large variable that is not."""
    return [
        *(("shards", f"{clean(path)}: {len(rows):,} of {_rows(rows)}") for path, rows in estimate.shards),
        *(("whole", f"{clean(path)} stays on one server: {clean(why)}") for path, why in estimate.whole),
    ]


def planned_rows(points: Sequence[RunResult]) -> list[str]:
    """A header, and for each planned point what one device keeps and what all exchange for one step."""
    return columns([SWEEP_HEADER, *map(_planned, points)], RIGHT)


def _planned(point: RunResult) -> list[str]:
    result, estimation = point.result, point.estimate
    memory = exchanged = of_example = MISSING
    if estimation is not None:
        memory = "over " * (estimation.device.activations is None) + amount(estimation.device.total)
        if estimation.exchanged is not None and (batch := result.layout.global_batch):
            exchanged, of_example = amount(estimation.exchanged.total), amount(estimation.exchanged.total / batch)
    others = {"memory/device": memory, "exchanged/step": exchanged, "exchanged/example": of_example}
    return cells(SWEEP_HEADER, result, {"": str(point.number)} | others)


def _memory_row(memory: HostMemory, fed: bool) -> tuple[str, ...]:
    columns = (memory.parameters, memory.gradients, memory.slots, memory.activations, *[memory.batches] * fed)
    texts = ("unknown" if count is None else amount(count) if count else MISSING for count in columns)
    return memory.place, *texts, "over " * (memory.activations is None) + amount(memory.total)


def _few(memory: Sequence[HostMemory]) -> list[HostMemory]:
    first, *others = memory
    if len(others) <= MOST_SERVERS:
        return [first, *others]
    by_size = sorted(others, key=lambda other: other.total)
    ends = ((by_size[-1], "the fullest"), (by_size[0], "the emptiest"))
    return [first, *(dataclasses.replace(end, place=f"{which} of {len(others):,} servers") for end, which in ends)]


def _data_held(plan: Plan, estimate: Estimate) -> str:
    size, count = estimate.example_bytes, plan.data.train_examples
    if size is None:
        return "read as it trains"
    all_of_it = "" if count is None else f", {amount(size * count)} for those that train"
    return f"{amount(size)} an example, in the memory of every process that trains{all_of_it}"


def _exchange(plan: Plan, exchanged: Exchanged | None) -> list[tuple[str, str]]:
    if exchanged is None:
        return [("exchange", "unknown for this strategy: strategy.exchange does not say what its devices exchange")]
    if not exchanged.total:
        return [("exchange", "nothing: one device trains alone")]
    step = "for a step of one worker" if plan.strategy.asynchronous else "a step"
    below = [_traffic(traffic) for traffic in _busiest(exchanged.traffic)]
    if exchanged.between:
        gbps = plan.hardware.link_gbps
        takes = f", {exchanged.busiest * 8e-6 / gbps:,.3g} ms at least at {gbps:g} Gbit/s" if gbps else ""
        all_step = " when each worker makes a step" if plan.strategy.asynchronous else ""
        busiest = f"the busiest host sends or receives {amount(exchanged.busiest)}{all_step}{takes}"
        below.append(f"{amount(exchanged.between)} of it between hosts; {busiest}")
    else:
        below.append("all of it within one host")
    if exchanged.bucket:
        bucket = f"buckets of {amount(exchanged.bucket)}"
        below.append(f"gradients leave for other hosts in {bucket} while others are computed")
    if exchanged.small:
        layers = plural(exchanged.small // 2, "batch normalization")
        waited = f"{exchanged.small} small ones a step, waited for one after the other"
        below.append(f"{waited}, for the statistics of {layers}")
    return [("exchange", f"{amount(exchanged.total)} {step}: {exchanged.how}"), *(("", text) for text in below)]


def _busiest(traffic: Sequence[Traffic]) -> Sequence[Traffic]:
    servers = [one for one in traffic if one.who.startswith("server ")]
    if len(servers) <= MOST_SERVERS:
        return traffic
    largest = max(servers, key=lambda server: server.sends + server.receives)
    busiest = dataclasses.replace(largest, who=f"the busiest of {len(servers):,} servers")
    return [*(one for one in traffic if one not in servers), busiest]


def _traffic(traffic: Traffic) -> str:
    both = (("sends", traffic.sends), ("receives", traffic.receives))
    parts = " and ".join(f"{verb} {amount(count)}" for verb, count in both if count)
    server = " when each worker makes a step" if "server" in traffic.who else ""
    return f"{traffic.who} {parts or 'has no part in it'}{server}"


def _rows(rows: Sequence[int]) -> str:
    """Returns the rows of the shards.

    >>> _rows((500, 500)), _rows((334, 333, 333))
    ('500 rows', '334 or 333 rows')
    """
    return f"{' or '.join(f'{row:,}' for row in sorted(set(rows), reverse=True))} rows"

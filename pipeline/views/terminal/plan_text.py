"""Turns a plan, and what it needs in bytes, into the lines that a person reads before anything starts."""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence

from pipeline.analyze.comparable import grouped
from pipeline.driver import RunResult
from pipeline.errors import amount
from pipeline.plan.backends import other
from pipeline.plan.estimate import Estimate, Exchanged, HostMemory
from pipeline.plan.plan import REPEAT_SECONDS, Plan
from pipeline.record.results import Layout
from pipeline.views.terminal import words
from pipeline.views.terminal.words import MISSING, clean, columns, listed, plural, ranges

MOST_NAMES = 8  # hosts that are named where they are counted
SWEEP_HEADER = ("", "strategy", "workers", "memory/device", "exchanged/step", "exchanged/example", "status")
MOST_SERVERS = 4  # more servers than this are told as the fullest and the emptiest


def plan_lines(plan: Plan, full: bool, reused: str | None = None) -> list[str]:
    """The plan in lines; with `full`, each process too. `reused` is the folder of the run that has its baseline."""
    named = (plan.model, plan.data, plan.strategy, plan.hardware)
    model, data, strategy, hardware = (clean(part.name) for part in named)
    under, adds = clean(other(plan.backend)), clean(other(plan.collective))
    by = f" under {under}" * bool(under) + f" by {adds}" * bool(adds)
    workers = plural(plan.workers, f"{plan.hardware.kind.upper()} worker")
    layout, scaling = Layout.of(plan), plan.training.scaling
    held = f" ({'global' if scaling == 'strong' else 'replica'} batch held fixed)" * (not plan.strategy.asynchronous)
    rows = [
        ("plan", f"{model} on {data}, {strategy}{by} on {hardware}: {workers}{words.marks(layout)}"),
        ("processes", _processes(plan)),
        ("batch", f"{batch_text(layout)}; {scaling} scaling{held}"),
        ("length", _length(plan)),
        ("data", _data(plan) if plan.data.divided or plan.data_servers else ""),
        ("training", _training(plan) if full else ""),
        ("baseline", _baseline(plan, reused)),
        *(("note", clean(note)) for note in plan.notes),
    ]
    return [*words.labelled(rows), "", *_process_rows(plan)] if full else words.labelled(rows)


def batch_text(layout: Layout) -> str:
    """Returns the examples of a step, on each replica and over all of them; empty where they are not known."""
    replicas = plural(layout.replicas, "replica")
    if layout.replica_batch is None or layout.global_batch is None or not replicas:
        return ""
    if layout.asynchronous:
        return f"{layout.replica_batch:,} a step, which one of {plural(layout.workers, 'worker')} makes"
    return f"{layout.replica_batch:,} x {replicas} = {layout.global_batch:,} a step"


def _processes(plan: Plan) -> str:
    roles = Counter(process.role for process in plan.processes)
    count = f"{len(plan.processes):,} ({listed(*(plural(many, role) for role, many in roles.items()))})"
    training = [process for process in plan.processes if process.replicas]
    of_process = listed(
        words.spread([len(process.devices) for process in training], "device", none="no device"),
        words.spread([len(process.cores) for process in training], "core", none="any core"),
        words.spread([process.intra_op_threads for process in training], "thread", none="default threads"),
    )
    who = "each" if len(training) == len(plan.processes) else "each worker"
    hosts, names = plural(plan.hardware.hosts, "host"), plan.hardware.host_names[: plan.hardware.hosts]
    if names:
        hosts += " " + clean(f"({listed(*names[:MOST_NAMES])}{' and others' * (len(names) > MOST_NAMES)})")
    return f"{count} on {hosts}; {who}: {of_process}"


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
    readers, each = len(plan.leaders), f"each of {len(plan.leaders)} processes reads"
    files = served = ""
    if plan.data.divided is not None:
        why = "as data.shard says" if plan.data.shard == "element" else "since they cannot be divided evenly"
        how = f"; {each} all of them, {why}, and makes its own part of the examples"
        if plan.strategy.asynchronous:
            how = "; every worker reads all of them, and makes the examples of its own steps"
        elif readers == 1:
            how = ", read by one process"
        elif plan.data.divided == "file":
            how = f"; {each} its own"
        files = f"{plural(plan.data.train_files, 'file')}{how}"
    if plan.data.service:
        served = f"batches made by the tf.data service at {listed(*map(clean, plan.data.service))}"
    elif plan.data_servers:
        served = f"batches made by {plural(len(plan.data_servers), 'data server')}"
    return listed(files, served)


def _training(plan: Plan) -> str:
    training = plan.training
    optimizer = training.optimizer.get("_target_") if isinstance(training.optimizer, dict) else training.optimizer
    by = {"host": "the batches of each process", "replica": "each replica's own batch"}.get(training.batch_statistics)
    return listed(
        f"optimizer {clean(optimizer)}" if optimizer else "the model's own optimizer, or adam",
        words.named("learning rate", training.learning_rate),
        training.precision,
        f"gradients of {training.gradient_bits} bits",
        "losses of the global batch" if training.gather else "",
        "blocks computed again on the way back" if training.remat else "",
        {None: "", "true": "steps compiled by XLA", "auto": "XLA where it is faster"}[training.xla],
        f"batch normalization by {by}" if by else "",
        f"seed {training.seed}",
        "deterministic" if training.deterministic else "",
    )


def _baseline(plan: Plan, reused: str | None) -> str:
    measurement, training = plan.measurement, plan.training
    if measurement.steps == 0:
        return "none, since nothing is measured"
    size = f"about {REPEAT_SECONDS:g} s" if measurement.steps is None else plural(measurement.steps, "step")
    repeats = f"{plural(measurement.repeats, 'repeat')} of {size}"
    if measurement.baseline == "none":
        return f"none, so no speedup; throughput from {repeats}"
    how = "reused if measured before, " if measurement.baseline == "auto" else "measured in turn, "
    if reused is not None:
        how = f"reused from {clean(reused)}; throughput from "
    batch = training.global_batch if training.scaling == "strong" else training.replica_batch
    return f"one device, no strategy, batch {batch:,}; {how}{repeats}"


def _process_rows(plan: Plan) -> list[str]:
    rows = [["rank", "role", "host", "address", "devices", "replicas", "cores", "threads"]]
    for process in plan.processes:
        # Port 0 stands for one that is chosen at the start.
        address = re.sub(":0$", ":(free port)", process.address or "-")
        within, between = process.intra_op_threads or "default", process.inter_op_threads or "default"
        of_kind = grouped((kind, int(place)) for kind, _, place in (one.partition(":") for one in process.devices))
        devices = listed(*(f"{kind}:{ranges(places)}" for kind, places in of_kind.items())) or "-"
        numbers = (devices, ranges(process.replicas) or "-", ranges(process.cores) or "any")
        rows.append(
            [str(process.rank), process.role, plan.host_of(process), address, *numbers, f"{within} + {between}"]
        )
    return [*columns(rows, right=(0, 2)), "", "threads: within an operation + between operations"]


def estimate_lines(plan: Plan, estimate: Estimate) -> list[str]:
    """The estimate as a table of memory, and under it what travels and what is cut."""
    has, needs = plan.hardware.memory_gib, {memory.place: amount(memory.total) for memory in estimate.memory}
    size, count, data = estimate.example_bytes, plan.data.train_examples, "read as it trains"
    if size is not None:
        all_of_it = "" if count is None else f", {amount(size * count)} for those that train"
        data = f"{amount(size)} an example, in the memory of every process that trains{all_of_it}"
    rows = [
        ("exchange", "\n".join(_exchange(plan, estimate.exchanged))),
        ("data", data),
        *shard_lines(estimate),
        *(("placed", f"{one.place}: {listed(*map(clean, one.layers))}") for one in estimate.memory if one.layers),
        ("note", f"Activations are not known: {clean(estimate.unknown)}." * bool(estimate.unknown)),
        ("host", "\n".join(_host(estimate))),
        *(("note", f"Does not fit: {place} has {has:g} GiB, and needs {needs[place]}.")
          for place in estimate.too_small),
    ]  # fmt: skip
    return [*_memory(estimate), "", *words.labelled(rows)]


def shard_lines(estimate: Estimate) -> list[tuple[str, str]]:
    """A labelled line for each table that is cut, and for each large variable that is not."""
    sizes = {path: " or ".join(f"{row:,}" for row in sorted(set(rows), reverse=True)) for path, rows in estimate.shards}
    cut = [("shards", f"{clean(path)}: {len(rows):,} of {sizes[path]} rows") for path, rows in estimate.shards]
    return cut + [("whole", f"{clean(path)} stays on one server: {clean(why)}") for path, why in estimate.whole]


def _memory(estimate: Estimate) -> list[str]:
    device, *servers = estimate.memory
    if len(servers) > MOST_SERVERS:
        emptiest, *_, fullest = sorted(servers, key=lambda server: server.total)
        ends, of_all = {"fullest": fullest, "emptiest": emptiest}, f"of {len(servers):,} servers"
        servers = [dataclasses.replace(server, place=f"the {end} {of_all}") for end, server in ends.items()]
    fed = any(memory.batches for memory in estimate.memory)
    table = [["memory", "parameters", "gradients", "optimizer", "activations", *["batches"] * fed, "total"]]
    for memory in (device, *servers):
        parts = (memory.parameters, memory.gradients, memory.slots, memory.activations, *[memory.batches] * fed)
        texts = ["unknown" if part is None else amount(part) if part else MISSING for part in parts]
        table.append([memory.place, *texts, _total(memory)])
    return columns(table, right=range(1, len(table[0])))


def _total(memory: HostMemory) -> str:
    return "over " * (memory.activations is None) + amount(memory.total)


def _host(estimate: Estimate) -> list[str]:
    host = estimate.host
    if host is None:
        return []
    unknown = "over " * any(place.activations is None for place in estimate.memory)
    has = "" if host.gib is None else f" of {host.gib:g} GiB"
    parts = f"{amount(host.devices)} of its devices, {amount(host.imported + host.computing)} of what computes"
    copied = f"{amount(host.copied)} to copy while a checkpoint is written" if host.copied else ""
    rest = listed(f"{amount(host.data)} of data and batches" if host.data else "", copied)
    return [f"{unknown}{amount(host.total)}{has}: {parts}", *[rest] * bool(rest)]


def _exchange(plan: Plan, exchanged: Exchanged | None) -> list[str]:
    if exchanged is None:
        return ["unknown for this strategy: strategy.exchange does not say what its devices exchange"]
    if not exchanged.total:
        return ["nothing: one device trains alone"]
    traffic, gbps = exchanged.traffic, plan.hardware.link_gbps
    step, all_step = "a step", ""
    if plan.strategy.asynchronous:
        step, all_step = "for a step of one worker", " when each worker makes a step"
    servers = [one for one in traffic if one.who.startswith("server ")]
    if len(servers) > MOST_SERVERS:
        largest = max(servers, key=lambda server: server.sends + server.receives)
        busiest = dataclasses.replace(largest, who=f"the busiest of {len(servers):,} servers")
        traffic = (*(one for one in traffic if one not in servers), busiest)
    lines = [f"{amount(exchanged.total)} {step}: {exchanged.how}"]
    for one in traffic:
        both = (("sends", one.sends), ("receives", one.receives))
        parts = " and ".join(f"{verb} {amount(count)}" for verb, count in both if count) or "has no part in it"
        lines.append(f"{one.who} {parts}{' when each worker makes a step' * ('server' in one.who)}")
    if exchanged.between:
        takes = f", {exchanged.busiest * 8e-6 / gbps:,.3g} ms at least at {gbps:g} Gbit/s" if gbps else ""
        busiest_host = f"the busiest host sends or receives {amount(exchanged.busiest)}{all_step}{takes}"
        lines.append(f"{amount(exchanged.between)} of it between hosts; {busiest_host}")
    else:
        lines.append("all of it within one host")
    if exchanged.bucket:
        bucket = f"buckets of {amount(exchanged.bucket)}"
        lines.append(f"gradients leave for other hosts in {bucket} while others are computed")
    if exchanged.small:
        layers = plural(exchanged.small // 2, "batch normalization")
        waited = f"{exchanged.small} small ones a step, waited for one after the other"
        lines.append(f"{waited}, for the statistics of {layers}")
    return lines


def planned_rows(points: Sequence[RunResult]) -> list[str]:
    """A header, and for each planned point what one device keeps and what all exchange for one step."""
    rows = [[*SWEEP_HEADER]]
    for point in points:
        memory = exchanged = of_example = MISSING
        if point.estimate is not None:
            memory = _total(point.estimate.device)
            if point.estimate.exchanged is not None and (batch := point.result.layout.global_batch):
                total = point.estimate.exchanged.total
                exchanged, of_example = amount(total), amount(total / batch)
        others = {"memory/device": memory, "exchanged/step": exchanged, "exchanged/example": of_example}
        rows.append(words.cells(SWEEP_HEADER, point.result, {"": str(point.number)} | others))
    return columns(rows, right=(0, 2, 3, 4, 5))

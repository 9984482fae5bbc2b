"""Turns what a plan needs, in bytes, into lines: a table of memory by place, and what a step exchanges."""

import dataclasses
from collections.abc import Sequence

from pipeline.plan.estimate import Estimate, Exchanged, Traffic
from pipeline.plan.host import HostMemory
from pipeline.plan.plan import Plan
from pipeline.run.views import RunResult
from pipeline.views.terminal.words import amount, clean, columns, listed, plural

HEADER = ("memory", "parameters", "gradients", "optimizer", "activations", "total")
SWEEP_HEADER = ("", "strategy", "workers", "memory/device", "exchanged/step", "exchanged/example", "status")
RIGHT = (0, 2, 3, 4, 5)
# More servers than this are told as the fullest and the emptiest.
MOST_SERVERS = 4
MISSING = "-"


def estimate_lines(plan: Plan, estimate: Estimate) -> list[str]:
    """The estimate as a table of memory, and under it what travels and what is cut."""
    rows = [HEADER, *(_memory_row(memory) for memory in _few(estimate.memory))]
    labelled = [
        *_exchange(plan, estimate.exchanged),
        *_data(plan, estimate),
        *shard_lines(estimate),
        *_placed(estimate),
    ]
    if estimate.unknown:
        labelled.append(("note", f"Activations are not known: {clean(estimate.unknown)}."))
    labelled += _host(estimate)
    labelled += [
        (
            "note",
            f"Does not fit: {place} has {plan.hardware.memory_gib:g} GiB, "
            f"and needs {amount(_of(estimate, place).total)}.",
        )
        for place in estimate.too_small
    ]
    return [*columns(rows, right=range(1, len(HEADER))), "", *(f"{label:<11}{text}" for label, text in labelled)]


def _host(estimate: Estimate) -> list[tuple[str, str]]:
    """Returns the memory of a host whose CPU devices share it."""
    host = estimate.host
    if host is None:
        return []
    unknown = "over " if any(place.activations is None for place in estimate.memory) else ""
    has = "" if host.gib is None else f" of {host.gib:g} GiB"
    first = (
        f"{unknown}{amount(host.total)}{has}: {amount(host.devices)} of its devices, "
        f"{amount(host.imported + host.computing)} of what computes"
    )
    copied = f"{amount(host.copied)} to copy while a checkpoint is written" if host.copied else ""
    rest = listed(f"{amount(host.data)} of data and batches" if host.data else "", copied)
    return [("host", first), ("", rest)] if rest else [("host", first)]


def shard_lines(estimate: Estimate) -> list[tuple[str, str]]:
    """A labelled line for each table that is cut, and for each large variable that is not."""
    return [
        *(("shards", f"{clean(path)}: {len(rows):,} of {_rows(rows)}") for path, rows in estimate.shards),
        *(("whole", f"{clean(path)} stays on one server: {clean(why)}") for path, why in estimate.whole),
    ]


def _placed(estimate: Estimate) -> list[tuple[str, str]]:
    """A labelled line for each part of a model that is laid over devices."""
    return [
        ("placed", f"{' '.join(part.devices)}: {', '.join(clean(layer.name) for layer in part.layers)}")
        for part in estimate.placed
    ]


def planned_rows(points: Sequence[RunResult]) -> list[str]:
    """A header, and for each planned point what one device keeps and what all exchange for one step."""
    return columns([SWEEP_HEADER, *(_planned(place, point) for place, point in enumerate(points))], RIGHT)


def _planned(place: int, point: RunResult) -> tuple[str, ...]:
    result, needs = point.result, point.needs
    memory = exchanged = of_example = MISSING
    if needs is not None:
        memory = ("" if needs.activations_known else "over ") + amount(needs.device_bytes)
        if needs.step_bytes is not None:
            exchanged, of_example = amount(needs.step_bytes), amount(needs.step_bytes / needs.step_examples)
    workers = result.layout.workers
    return (
        str(place),
        clean(result.choices.called) or MISSING,
        MISSING if workers is None else f"{workers:,}",
        memory,
        exchanged,
        of_example,
        clean(result.ending.status) or MISSING,
    )


def _memory_row(memory: HostMemory) -> tuple[str, ...]:
    unknown = memory.activations is None
    return (
        memory.place,
        *map(_amount, (memory.parameters, memory.gradients, memory.slots)),
        "unknown" if memory.activations is None else _amount(memory.activations),
        "over " * unknown + amount(memory.total),
    )


def _amount(count: int) -> str:
    return amount(count) if count else MISSING


def _few(memory: Sequence[HostMemory]) -> list[HostMemory]:
    """Every place, or of many servers the fullest and the emptiest."""
    first, *others = memory
    if len(others) <= MOST_SERVERS:
        return [first, *others]
    by_size = sorted(others, key=lambda other: other.total)
    ends = ((by_size[-1], "the fullest"), (by_size[0], "the emptiest"))
    return [first, *(_renamed(end, f"{which} of {len(others):,} servers") for end, which in ends)]


def _renamed(memory: HostMemory, place: str) -> HostMemory:
    return dataclasses.replace(memory, place=place)


def _of(estimate: Estimate, place: str) -> HostMemory:
    return next(memory for memory in estimate.memory if memory.place == place)


def _data(plan: Plan, estimate: Estimate) -> list[tuple[str, str]]:
    if estimate.example_bytes is None:
        return [("data", "read as it trains")]
    all_of_it = ""
    if plan.data.train_examples is not None:
        all_of_it = f", {amount(estimate.example_bytes * plan.data.train_examples)} for those that train"
    return [
        ("data", f"{amount(estimate.example_bytes)} an example, in the memory of every process that trains{all_of_it}")
    ]


def _exchange(plan: Plan, exchanged: Exchanged | None) -> list[tuple[str, str]]:
    if exchanged is None:
        return [("exchange", "unknown for this strategy: strategy.exchange does not say what its devices exchange")]
    if not exchanged.total:
        return [("exchange", "nothing: one device trains alone")]
    step = "for a step of one worker" if plan.strategy.asynchronous else "a step"
    lines = [("exchange", f"{amount(exchanged.total)} {step}: {exchanged.how}")]
    lines += [("", _traffic(traffic)) for traffic in _busiest(exchanged.traffic)]
    if exchanged.between:
        takes = ""
        if plan.hardware.link_gbps:
            seconds = exchanged.busiest * 8 / (plan.hardware.link_gbps * 1e9)
            takes = f", {1000 * seconds:,.3g} ms at least at {plan.hardware.link_gbps:g} Gbit/s"
        all_step = " when each worker makes a step" if plan.strategy.asynchronous else ""
        lines.append(
            (
                "",
                f"{amount(exchanged.between)} of it between hosts; the busiest host sends or receives "
                f"{amount(exchanged.busiest)}{all_step}{takes}",
            )
        )
    else:
        lines.append(("", "all of it within one host"))
    if exchanged.small:
        layers = plural(exchanged.small // 2, "batch normalization")
        lines.append(
            ("", f"{exchanged.small} small ones a step, waited for one after the other, for the statistics of {layers}")
        )
    return lines


def _busiest(traffic: Sequence[Traffic]) -> Sequence[Traffic]:
    """All of it, or of many servers the busiest."""
    servers = [one for one in traffic if one.who.startswith("server ")]
    if len(servers) <= MOST_SERVERS:
        return traffic
    largest = max(servers, key=lambda server: server.sends + server.receives)
    return [
        *(one for one in traffic if one not in servers),
        Traffic(f"the busiest of {len(servers):,} servers", largest.sends, largest.receives),
    ]


def _traffic(traffic: Traffic) -> str:
    parts = listed(
        f"sends {amount(traffic.sends)}" if traffic.sends else "",
        f"receives {amount(traffic.receives)}" if traffic.receives else "",
    )
    server = " when each worker makes a step" if "server" in traffic.who else ""
    return f"{traffic.who} {parts.replace(', ', ' and ') or 'has no part in it'}{server}"


def _rows(rows: Sequence[int]) -> str:
    """Returns the rows of the shards.

    >>> _rows((500, 500)), _rows((334, 333, 333))
    ('500 rows', '334 or 333 rows')
    """
    return f"{' or '.join(f'{row:,}' for row in sorted(set(rows), reverse=True))} rows"

"""Divides what is trained: a batch over replicas, files over processes, gradients into buckets, layers over devices."""

import difflib
import functools
import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from pipeline.config.schema import Config, Scaling
from pipeline.errors import UserError, first_of, refuse
from pipeline.plan.backends import JAX, MODEL_PARALLEL
from pipeline.plan.checks import MOST
from pipeline.plan.plan import Plan
from pipeline.plan.size import Layer

DEFAULT_BATCH = 64
# A process that reads files of its own may have so many times its share, so that none waits long at an epoch's end.
EVEN = 1.02
# About so many bytes more take as long between hosts as another message does: 1 ms, most of it a processor's.
MESSAGE_BYTES = 1 << 18
LAYOUT = "strategy.build.layout"
NAMED = 12


def shared(shard: str, files: Sequence[int], processes: int) -> str:
    """Returns how processes divide files of so many examples: "file" where all get nearly as many, or "element".

    >>> shared("auto", [100] * 8, processes=2), shared("auto", [100] * 3, processes=2)
    ('file', 'element')
    """
    if processes == 1 or shard == "element":
        return "element"
    expected = f"data.shard=file with a file for each of {processes} processes"
    instead = f"data.shard=element, or `python -m pipeline prepare` with shards={processes}"
    refuse((shard == "file" and len(files) < processes, expected, len(files), instead))
    largest = max(sum(files[place] for place in part) for part in dealt(files, processes))
    even = len(files) >= processes and largest <= EVEN * sum(files) / processes
    return "file" if shard == "file" or even else "element"


def dealt(files: Sequence[int], processes: int) -> list[list[int]]:
    """The places of files that have so many examples, the largest first, each dealt to the process with the fewest.

    >>> dealt([3, 5, 2], 2)
    [[1], [0, 2]]
    """
    parts: list[list[int]] = [[] for _ in range(processes)]
    for place in sorted(range(len(files)), key=lambda place: -files[place]):
        min(parts, key=lambda part: sum(files[file] for file in part)).append(place)
    return parts


def split_batch(config: Config, replicas: int) -> tuple[str, int, int]:
    """(scaling, replica batch, global batch) for `replicas` replicas; the batch that is named decides the scaling."""
    train, declared = config.train, config.measure.scaling
    scaling = declared or (Scaling.strong if train.global_batch else Scaling.weak)
    each, total = train.replica_batch or 0, train.global_batch or 0
    refuse(
        (each and total, "train.replica_batch or train.global_batch", f"both ({each} and {total})",
         "train.replica_batch=null or train.global_batch=null"),
        (scaling is Scaling.weak and total, "train.replica_batch with measure.scaling=weak, which holds it fixed",
         f"train.global_batch={total}",
         f"train.replica_batch={max(1, total // replicas)} train.global_batch=null, or measure.scaling=strong"),
        (scaling is Scaling.strong and each, "train.global_batch with measure.scaling=strong, which holds it fixed",
         f"train.replica_batch={each}",
         f"train.global_batch={each * replicas} train.replica_batch=null, or measure.scaling=weak"),
    )  # fmt: skip
    # Of little data, which an epoch's worth is known of, the batch that nobody named is smaller than usual.
    examples = config.data.train_examples or MOST
    if scaling is Scaling.weak:
        replica_batch = train.replica_batch or max(1, min(DEFAULT_BATCH, examples // replicas))
        return scaling.value, replica_batch, replica_batch * replicas
    usual = DEFAULT_BATCH if examples >= DEFAULT_BATCH else max(1, examples // replicas) * replicas
    global_batch = train.global_batch or usual
    if global_batch % replicas:
        nearest = f"train.global_batch={max(replicas, round(global_batch / replicas) * replicas)}"
        raise UserError(f"a global batch that divides evenly over {replicas} replicas", global_batch, nearest)
    return scaling.value, global_batch // replicas, global_batch


def check_micro_batches(config: Config, replica_batch: int) -> None:
    """Refuses micro-batches where there is nothing for them to go through, or nothing in some of them."""
    if config.strategy.build.get("_target_") != MODEL_PARALLEL:
        return
    key, count = "strategy.build.micro_batches", config.strategy.build.get("micro_batches", 1)
    if type(count) is not int or count < 1:
        raise UserError(f"{key} to be 1 or more", json.dumps(count), f"{key}=1")
    refuse(
        (count > 1 and config.backend == JAX,
         f"{key}=1 under backend=jax, which cuts layers, so that all devices compute at once", count,
         f"{key}=1, or backend=tensorflow"),
        (count > 1 and (config.strategy.devices_per_replica or 1) == 1,
         f"{key}=1 with strategy.devices_per_replica=1, where no device waits for another", count,
         "strategy.devices_per_replica=2"),
        (count > replica_batch, f"{key} to be at most the examples of a replica's batch ({replica_batch})", count,
         f"{key}={replica_batch}"),
    )  # fmt: skip


def expect_batch(examples: int, plan: Plan) -> None:
    """Refuses training data that have nothing, or not enough for one step. Raises `UserError`."""
    if examples == 0:
        raise UserError("Expected training data with examples, received none.")
    global_batch, each = plan.training.global_batch, examples // plan.workers
    batch = f"replica_batch={each}" if plan.training.scaling == "weak" else f"global_batch={each * plan.workers}"
    expected = f"training data for at least one global batch of {global_batch}"
    instead = f"{f'train.{batch}' if each else 'more data'}, or data.on_error=skip, which trains on a smaller one"
    refuse((examples < global_batch and plan.data.on_error != "skip", expected, f"{examples} examples", instead))


def left_out(examples: int, workers: int, global_batch: int) -> int:
    """Examples of an epoch that fill no whole global batch. Refuses data that fill none."""
    fitting = f"train.replica_batch={examples // workers}" if examples >= workers else f"workers={examples}"
    expected = f"training data for at least one whole batch of {global_batch}, since a TPU takes no other"
    refuse((examples < global_batch, expected, f"{examples} examples", fitting))
    return examples % global_batch


def bucket_of(gradient_bytes: int, bucket_bytes: int | None) -> int:
    """Bytes of a bucket of so many bytes of gradients, from `Plan.bucket_bytes`.

    >>> bucket_of(4_800_000, None), bucket_of(4_800_000, 0)
    (1121735, 4800000)
    """
    # In buckets of s bytes, D bytes take D / s messages, each of which costs as much as M bytes, and the last s bytes
    # are always waited for: D M / s + s is least at the square root of D M.
    usual = max(1, math.isqrt(gradient_bytes * MESSAGE_BYTES))
    return usual if bucket_bytes is None else bucket_bytes or gradient_bytes


def balanced(layers: Sequence[Layer], parts: int) -> list[int]:
    """The part of each layer: consecutive parts with the least sum of squared costs. Raises `UserError`."""
    starts = [place for place, layer in enumerate(layers) if layer.begins]
    expected = f"a model of at least {parts} layers with kernels or tables, one for each device that shares it"
    refuse((len(starts) < parts, expected, len(starts), f"strategy.devices_per_replica={max(1, len(starts))}"))
    # What comes before the first start is in the first part. A part's cost is its share of all bytes plus that of all
    # work (Skiena, The Algorithm Design Manual, 8.5).
    edges = [0, *starts[1:], len(layers)]
    total_bytes, total_work = max(1, sum(one.bytes for one in layers)), max(1, sum(one.work for one in layers))
    costs = [layer.bytes / total_bytes + layer.work / total_work for layer in layers]
    before = [sum(costs[:edge]) for edge in edges]

    @functools.cache
    def cut(end: int, count: int) -> tuple[float, tuple[int, ...]]:
        """(the least sum for the first groups in so many parts, the groups before the end of each part)."""
        if count == 1:
            return before[end] ** 2, (end,)
        sums = {at: cut(at, count - 1)[0] + (before[end] - before[at]) ** 2 for at in range(count - 1, end)}
        at = min(sums, key=sums.__getitem__)
        return sums[at], (*cut(at, count - 1)[1], end)

    firsts = itertools.pairwise(edges[end] for end in (0, *cut(len(edges) - 1, parts)[1]))
    return [part for part, (first, end) in enumerate(firsts) for _ in range(end - first)]


def written(layers: Sequence[Layer], layout: Mapping[str, int], parts: int) -> list[int]:
    """The part of each layer, by the pattern that matches its whole name, or else that of the layer before it."""
    by, parts_of = matched(layout, [layer.name for layer in layers], "a layer's whole name"), [0]
    for layer in layers:
        parts_of.append(layout[by[layer.name]] if layer.name in by else parts_of[-1])
    parts_of.pop(0)
    if empty := {*range(parts)} - {part for layer, part in zip(layers, parts_of, strict=True) if layer.bytes}:
        expected = f"{LAYOUT} to give weights to each of the {parts} devices"
        instead = f"a pattern for it, or strategy.devices_per_replica={parts - 1}"
        raise UserError(expected, f"one that leaves device {min(empty)} without", instead)
    return parts_of


def matched(patterns: Iterable[str], names: Sequence[str], whole: str) -> dict[str, str]:
    """The pattern that matches each name whole, where one does; `whole` says what a name is. Raises `UserError`."""
    by: dict[str, str] = {}
    for pattern in patterns:
        if not (matching := [name for name in names if re.fullmatch(pattern, name)]):
            # What was meant may stand for a part of a name, or be mistyped.
            near, wider = re.escape(difflib.get_close_matches(pattern, names, 1, 0)[0]), f".*{pattern}.*"
            near = wider if any(re.fullmatch(wider, name) for name in names) else near
            received = f"{pattern}, which matches none of {first_of(names, NAMED, ', ', ' and')}"
            raise UserError(f"each pattern of {LAYOUT} to match {whole}", received, f"{near}, or {LAYOUT}=null")
        for name in matching:
            if name in by:
                received = f"{by[name]} and {pattern}, which both match {name}"
                raise UserError(f"one pattern of {LAYOUT} to match {whole}", received, "a narrower pattern")
            by[name] = pattern
    return by

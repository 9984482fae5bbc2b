"""Divides what is trained: a batch over replicas, files over processes, gradients into buckets, layers over devices."""

import difflib
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
# A process may have so many times its share of the examples, where each reads files of its own.
EVEN = 1.02
# About so many bytes more take as long between hosts as another message does: 1 ms, most of it a processor's.
MESSAGE_BYTES = 1 << 18
LAYOUT = "strategy.build.layout"
NAMED = 12


def shared(shard: str, files: Sequence[int], processes: int) -> str:
    """Returns how processes divide files that have so many examples each: "file" or "element".

    By file where each process gets as many examples as the others, or nearly so: one with fewer waits at the end of
    each epoch while the others go on. Raises `UserError` where there are too few files to be divided as was asked.

    >>> shared("auto", [100] * 8, processes=2), shared("auto", [100] * 3, processes=2)
    ('file', 'element')
    """
    if processes == 1 or shard == "element":
        return "element"
    if shard == "file":
        if len(files) < processes:
            expected = f"data.shard=file with a file for each of {processes} processes"
            instead = f"data.shard=element, or `python -m pipeline prepare` with shards={processes}"
            raise UserError(expected, len(files), instead)
        return "file"
    largest = max(sum(files[place] for place in part) for part in dealt(files, processes))
    return "file" if len(files) >= processes and largest <= EVEN * sum(files) / processes else "element"


def dealt(files: Sequence[int], processes: int) -> list[list[int]]:
    """The places of files that have so many examples, dealt out to processes.

    The largest come first, each to the process that has the fewest examples so far.

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
    global_batch, workers = plan.training.global_batch, plan.workers
    if examples == 0:
        raise UserError("Expected training data with examples, received none.")
    if examples < global_batch and plan.data.on_error != "skip":
        each = examples // workers
        strong = plan.training.scaling == "strong"
        batch = f"train.global_batch={each * workers}" if strong else f"train.replica_batch={each}"
        fitting = batch if each else "more data"
        instead = f"{fitting}, or data.on_error=skip, which trains on a smaller one"
        expected = f"training data for at least one global batch of {global_batch}"
        raise UserError(expected, f"{examples} examples", instead)


def left_out(examples: int, workers: int, global_batch: int) -> int:
    """Examples of an epoch that fill no whole global batch. Refuses data that fill none.

    >>> left_out(examples=1_438, workers=8, global_batch=512)
    414
    """
    if examples < global_batch:
        fitting = f"train.replica_batch={examples // workers}" if examples >= workers else f"workers={examples}"
        expected = f"training data for at least one whole batch of {global_batch}, since a TPU takes no other"
        raise UserError(expected, f"{examples} examples", fitting)
    return examples % global_batch


def bucket_of(gradient_bytes: int, bucket_bytes: int | None) -> int:
    """Bytes of a bucket of so many bytes of gradients, from `Plan.bucket_bytes`.

    In buckets of s bytes, D bytes take D / s messages, each of which costs as much as M bytes, and the last s bytes are
    always waited for: D M / s + s is least at the square root of D M.

    >>> bucket_of(4_800_000, None), bucket_of(4_800_000, 0)
    (1121735, 4800000)
    """
    if bucket_bytes is None:
        return max(1, math.isqrt(gradient_bytes * MESSAGE_BYTES))
    return bucket_bytes or gradient_bytes


def balanced(layers: Sequence[Layer], parts: int) -> list[int]:
    """The part of each layer. A part's cost is its share of all bytes plus its share of all work.

    Of all cuts into consecutive parts it takes that with the least sum of squared costs, by dynamic programming, as
    for the linear partition problem (Skiena, The Algorithm Design Manual, 8.5). Raises `UserError`.

    >>> balanced([Layer(name, 4, 1, True) for name in "abcd"], 2)
    [0, 0, 1, 1]
    """
    starts = [place for place, layer in enumerate(layers) if layer.begins]
    if len(starts) < parts:
        expected = f"a model of at least {parts} layers with kernels or tables, one for each device that shares it"
        raise UserError(expected, len(starts), f"strategy.devices_per_replica={max(1, len(starts))}")
    # What comes before the first start is in the first part.
    edges = [0, *starts[1:], len(layers)]
    total_bytes, total_work = (
        max(1, sum(values)) for values in zip(*((one.bytes, one.work) for one in layers), strict=True)
    )
    costs = [layer.bytes / total_bytes + layer.work / total_work for layer in layers]
    before = [sum(costs[:edge]) for edge in edges]
    # By the group that ends what is laid out so far: the least sum, and where the last part begins.
    least, cuts = [(cost**2, 0) for cost in before], list[list[int]]()
    for part in range(2, parts + 1):
        sums = [
            [(least[cut][0] + (before[end] - before[cut]) ** 2, cut) for cut in range(part - 1, end)]
            for end in range(len(edges))
        ]
        least = [min(of_end, default=(math.inf, 0)) for of_end in sums]
        cuts.append([cut for _, cut in least])
    ends = [len(edges) - 1]
    for earlier in reversed(cuts):
        ends.append(earlier[ends[-1]])
    firsts = [edges[end] for end in (0, *reversed(ends))]
    return [part for part, (first, end) in enumerate(itertools.pairwise(firsts)) for _ in range(end - first)]


def laid_out(plan: Plan, layers: Sequence[Layer]) -> list[int]:
    """The part of each layer, as the plan says. Raises `UserError`."""
    parts, layout = plan.strategy.devices_per_replica, plan.strategy.build.get("layout")
    return written(layers, layout, parts) if isinstance(layout, dict) else balanced(layers, parts)  # type: ignore[arg-type] # checked beforehand


def written(layers: Sequence[Layer], layout: Mapping[str, int], parts: int) -> list[int]:
    """The part of each layer, by the pattern that matches its whole name; one that none matches follows the one before.

    Refused are patterns that match nothing, two that match one layer, and a part without weights. Raises `UserError`.

    >>> written([Layer(name, 4, 1, True) for name in ("a_0", "a_1", "b")], {"a_.": 1, "b": 0}, 2)
    [1, 1, 0]
    """
    names = [layer.name for layer in layers]
    by = matched(layout, names, "a layer's whole name")
    parts_of, last = [], 0
    for name in names:
        last = layout[by[name]] if name in by else last
        parts_of.append(last)
    held = [0] * parts
    for layer, part in zip(layers, parts_of, strict=True):
        held[part] += layer.bytes
    if 0 in held:
        expected = f"{LAYOUT} to give weights to each of the {parts} devices"
        instead = f"a pattern for it, or strategy.devices_per_replica={parts - 1}"
        raise UserError(expected, f"one that leaves device {held.index(0)} without", instead)
    return parts_of


def matched(patterns: Iterable[str], names: Sequence[str], whole: str) -> dict[str, str]:
    """The pattern that matches each name whole, without those that none matches; `whole` says what a name is.

    Refused are patterns that match nothing, and two that match one name. Raises `UserError`.

    >>> matched(["a_.", "b"], ["a_0", "b", "c"], "a layer's whole name")
    {'a_0': 'a_.', 'b': 'b'}
    """
    by: dict[str, str] = {}
    for pattern in patterns:
        if not (matching := [name for name in names if re.fullmatch(pattern, name)]):
            received = f"{pattern}, which matches none of {first_of(names, NAMED, ', ', ' and')}"
            instead = f"{_near(pattern, names)}, or {LAYOUT}=null"
            raise UserError(f"each pattern of {LAYOUT} to match {whole}", received, instead)
        for name in matching:
            if name in by:
                received = f"{by[name]} and {pattern}, which both match {name}"
                raise UserError(f"one pattern of {LAYOUT} to match {whole}", received, "a narrower pattern")
            by[name] = pattern
    return by


def _near(pattern: str, names: Sequence[str]) -> str:
    """A pattern that matches: what was meant may stand for a part of a name, or be mistyped."""
    wider = f".*{pattern}.*"
    if any(re.fullmatch(wider, name) for name in names):
        return wider
    return re.escape(difflib.get_close_matches(pattern, names, 1, 0)[0])

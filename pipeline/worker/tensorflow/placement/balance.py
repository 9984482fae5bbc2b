"""Lays layers over devices, each next to what comes before it: in parts of equal cost, or as written patterns say.

Arithmetic only: layers are names with bytes and work, in the order in which a model calls them.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.worker.model_error import ModelError

# How many layers an error names.
NAMED = 12


@dataclass(frozen=True)
class Load:
    """What a layer costs: bytes that it holds, and multiplications of one example. `begins`: may a part begin with it?

    A cut between a kernel and the normalization or activation of what it gives would keep TensorFlow from fusing them.
    """

    name: str
    bytes: int
    work: int
    begins: bool


def balanced(loads: Sequence[Load], parts: int) -> list[int]:
    """The part of each layer. A part's cost is its share of all bytes plus its share of all work.

    Of all cuts into consecutive parts it takes that with the least sum of squared costs, by dynamic programming, as
    for the linear partition problem (Skiena, The Algorithm Design Manual, 8.5). Raises `ModelError`.

    >>> balanced([Load(name, 4, 1, True) for name in "abcd"], 2)
    [0, 0, 1, 1]
    """
    starts = [place for place, load in enumerate(loads) if load.begins]
    if len(starts) < parts:
        raise ModelError(
            f"Expected a model of at least {parts} layers with kernels or tables, one for each device that shares it, "
            f"received {len(starts)}. Try strategy.devices_per_replica={max(1, len(starts))}."
        )
    # What comes before the first start is in the first part.
    edges = [0, *starts[1:], len(loads)]
    total_bytes, total_work = (
        max(1, sum(values)) for values in zip(*((one.bytes, one.work) for one in loads), strict=True)
    )
    costs = [load.bytes / total_bytes + load.work / total_work for load in loads]
    before = np.array([sum(costs[:edge]) for edge in edges])
    least, cut = before**2, list[np.ndarray]()
    for _ in range(parts - 1):
        # [first group that is not in the earlier parts, end of this part]
        sums = np.where(
            np.tri(len(edges), k=-1, dtype=bool).T, least[:, None] + (before - before[:, None]) ** 2, np.inf
        )
        cut.append(sums.argmin(axis=0))
        least = sums.min(axis=0)
    ends = [len(edges) - 1]
    for earlier in reversed(cut):
        ends.append(int(earlier[ends[-1]]))
    firsts = [edges[end] for end in (0, *reversed(ends))]
    return [part for part, (first, end) in enumerate(itertools.pairwise(firsts)) for _ in range(end - first)]


def written(loads: Sequence[Load], layout: Mapping[str, int], parts: int) -> list[int]:
    """The part of each layer, by the pattern that matches its whole name; one that none matches follows the one before.

    Refused are patterns that match nothing, two that match one layer, and a part without weights. Raises `ModelError`.

    >>> written([Load(name, 4, 1, True) for name in ("a_0", "a_1", "b")], {"a_.": 1, "b": 0}, 2)
    [1, 1, 0]
    """
    names = [load.name for load in loads]
    by: dict[str, str] = {}
    for pattern in layout:
        matched = [name for name in names if re.fullmatch(pattern, name)]
        if not matched:
            raise ModelError(
                f"Expected each pattern of strategy.build.layout to match a layer's whole name, received {pattern}, "
                f"which matches none of {_some(names)}. Try .*{re.escape(pattern)}.*, or strategy.build.layout=null."
            )
        for name in matched:
            if name in by:
                raise ModelError(
                    f"Expected one pattern of strategy.build.layout for a layer, received {by[name]} and {pattern}, "
                    f"which both match {name}. Try a narrower pattern."
                )
            by[name] = pattern
    found, last = [], 0
    for name in names:
        last = layout[by[name]] if name in by else last
        found.append(last)
    held = [
        sum(load.bytes for load, part in zip(loads, found, strict=True) if part == number) for number in range(parts)
    ]
    if 0 in held:
        raise ModelError(
            f"Expected strategy.build.layout to give weights to each of the {parts} devices, received one that leaves "
            f"device {held.index(0)} without. Try a pattern for it, or strategy.devices_per_replica={parts - 1}."
        )
    return found


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more

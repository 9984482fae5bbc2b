"""Lays layers over devices, each next to what comes before it: in parts of equal cost, or as written patterns say.

Layers are in the order in which a model calls them.
"""

import difflib
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

from pipeline.errors import UserError, first_of
from pipeline.plan.plan import Plan
from pipeline.plan.size import Layer

LAYOUT = "strategy.build.layout"
# How many names an error says.
NAMED = 12


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
        least = [
            min(
                ((least[cut][0] + (before[end] - before[cut]) ** 2, cut) for cut in range(part - 1, end)),
                default=(math.inf, 0),
            )
            for end in range(len(edges))
        ]
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
    held = [
        sum(layer.bytes for layer, part in zip(layers, parts_of, strict=True) if part == number)
        for number in range(parts)
    ]
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
        matching = [name for name in names if re.fullmatch(pattern, name)]
        if not matching:
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

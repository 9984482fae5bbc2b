"""Tells which of a sweep's engines pays, by what its verdict tells apart: so neither contradicts the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.analyze.comparable import engine_of

if TYPE_CHECKING:
    from pipeline.analyze.compare import Comparison, Contestant
    from pipeline.analyze.history import Run


@dataclass(frozen=True)
class Engines:
    """Which of several engines pays: the one that has the best and all that is not known to be slower, if there is one.

    The `first` are those that have the best or what is not known to be slower. Of a single one, `rival` is the best
    beside the fastest that another has, at the odds of the least sure of those to all that others have. Of the
    `unjudged` no point had a part in the verdict.
    """

    first: tuple[str, ...]
    rival: Comparison | None = None
    odds: float = 0.0
    unjudged: tuple[str, ...] = ()


def decide(runs: Sequence[Run], best: Contestant, against: Sequence[Comparison]) -> Engines | None:
    """Which engine pays, by what is known of the best beside all others; None where there is one."""
    asked = {engine: None for run in runs if (engine := engine_of(run.result))}
    if len(asked) < 2:
        return None
    others = [(each, engine_of(each.other.result)) for each in against if each.other]
    first = [engine_of(best.result), *(name for each, name in others if not each.is_faster)]
    at_the_top = dict.fromkeys(filter(None, first))
    rivals = [each for each, name in others if name not in at_the_top]
    judged = at_the_top | dict.fromkeys(name for _, name in others)
    unjudged = tuple(engine for engine in asked if engine not in judged)
    if len(at_the_top) > 1 or not rivals:
        return Engines(tuple(at_the_top), unjudged=unjudged)
    return Engines(tuple(at_the_top), rivals[0], min(each.odds for each in rivals), unjudged)

"""Tells which of a sweep's engines pays, by what its verdict tells apart: so neither contradicts the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.analyze.comparable import engine_of

if TYPE_CHECKING:
    from pipeline.analyze.history import Run
    from pipeline.analyze.verdict import Contestant, Difference


@dataclass(frozen=True)
class Engines:
    """Which of several engines pays: the one that has the best and all that ties with it, if there is one.

    The `first` are those that have the best or what ties with it. Of a single one, `rival` is the fastest that another
    has, and `difference` how many times as fast the best is, as sure as the least sure of those to all that others
    have. Of the `unjudged` no point had a part in the verdict.
    """

    first: tuple[str, ...]
    rival: Contestant | None = None
    difference: Difference | None = None
    unjudged: tuple[str, ...] = ()


def decide(
    runs: Sequence[Run],
    first: Sequence[Contestant],
    slower: Sequence[tuple[Contestant, float]],
    difference: Callable[[Contestant, float], Difference],
) -> Engines | None:
    """Which engine pays; None where there is one.

    The `first` are the best and what ties with it, the `slower`, the fastest first, what does not, with the probability
    that this is chance; `difference` is what such a pair differs by.
    """
    asked = {engine: None for run in runs if (engine := engine_of(run.result))}
    if len(asked) < 2:
        return None
    at_the_top = dict.fromkeys(filter(None, map(_engine, first)))
    rivals = [(other, p_value) for other, p_value in slower if _engine(other) not in at_the_top]
    judged = at_the_top | dict.fromkeys(_engine(other) for other, _ in slower)
    unjudged = tuple(engine for engine in asked if engine not in judged)
    if len(at_the_top) > 1 or not rivals:
        return Engines(tuple(at_the_top), unjudged=unjudged)
    rival = rivals[0][0]
    return Engines(tuple(at_the_top), rival, difference(rival, max(p for _, p in rivals)), unjudged)


def _engine(contestant: Contestant) -> str | None:
    return engine_of(contestant.runs[0].result)

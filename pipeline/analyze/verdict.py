"""Turns measured runs into who is faster, by how much and how sure that is; what cannot be told apart ties.

Repeats of one run share its luck: with memory, with cores, with what else the machine did just then. So a difference
is held against the spread between runs, not the spread within one. It is taken from runs that were asked for equally,
and from baselines that were measured again, as far as there are any; before that, from what was seen elsewhere.

A verdict is values: views put it into words.
"""

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pipeline.analyze import comparable, engines, measure, outlook
from pipeline.analyze.comparable import Marks, Unlike
from pipeline.analyze.engines import Engines
from pipeline.analyze.history import Run
from pipeline.record import results

# How far equal runs on a quiet machine lie apart, as a standard deviation of the logarithm, and how many degrees of
# freedom that is worth: of five runs each of six programs on 2 cores the ranges were 4% to 13%, divided by 2.33, the
# mean range of five normal values, 2% to 6%.
PRIOR_SPREAD, PRIOR_DEGREES = 0.04, 8
# A difference is one where equal runs would differ so with a smaller probability.
SIGNIFICANCE_LEVEL = 0.05


class Confidence(StrEnum):
    """How sure a difference is, if it is one."""

    VERY_SURE = "very sure"
    SURE = "sure"
    FAIRLY_SURE = "fairly sure"
    TIE = "tie"


# Of a probability below each of these.
CONFIDENCE = (
    (0.001, Confidence.VERY_SURE),
    (0.01, Confidence.SURE),
    (SIGNIFICANCE_LEVEL, Confidence.FAIRLY_SURE),
)


@dataclass(frozen=True)
class Contestant:
    """A configuration and the runs that measured it, by their places in what is compared."""

    places: tuple[int, ...]
    runs: tuple[Run, ...]

    @property
    def speeds(self) -> list[float]:
        """Examples per second of each run: the median of its repeats."""
        return [measure.interval(run.repeats)[0] for run in self.runs]

    @property
    def interval(self) -> tuple[float, float, float]:
        """(examples per second, lowest, highest): of the repeats of its one run, or of its runs."""
        return measure.interval(self.speeds if len(self.runs) > 1 else self.runs[0].repeats)

    @property
    def speedup(self) -> float | None:
        """Over one device: the median of its runs that have one."""
        speedups = [speedup for run in self.runs if (speedup := run.result.speed.speedup) is not None]
        return float(np.median(speedups)) if speedups else None


@dataclass(frozen=True)
class Spread:
    """How far equal runs lie apart: a standard deviation of the logarithm of their speeds, and its degrees."""

    deviation: float
    degrees: int


@dataclass(frozen=True)
class NotMeasured:
    """The one of a pair's runs that has no speed, by its place."""

    place: int


@dataclass(frozen=True)
class NotAlike:
    """A pair whose speeds say nothing of each other, since they are unlike."""

    unlike: Unlike


class Overlap(StrEnum):
    """Why a pair ties: what of them overlaps, or that equal runs may differ so, be it since repeats of one do."""

    REPEATS = "repeats"
    SPEEDUPS = "speedups"
    EQUAL_RUNS = "equal runs"
    UNSTEADY = "unsteady"


@dataclass(frozen=True)
class Tie:
    """A pair that cannot be told apart."""

    why: Overlap


@dataclass(frozen=True)
class Tied:
    """What cannot be told apart from the best, and why."""

    contestant: Contestant
    why: Overlap


@dataclass(frozen=True)
class Difference:
    """How many times as fast, the probability that equal runs differ so, and how sure that makes it.

    Without runs that were `repeated` it is as sure as one run of each can tell.
    """

    ratio: float
    p_value: float
    confidence: Confidence
    repeated: bool


@dataclass(frozen=True)
class Faster:
    """Which of a pair is faster, by its place, and by how much."""

    fast: int
    slow: int
    difference: Difference


@dataclass(frozen=True)
class Knee:
    """Where another worker under a strategy brings less than `share` of what one of the first does.

    From `few` to `many` workers each `brought` so much; None where each does up to the `most` that were measured.
    """

    strategy: str | None
    share: float
    most: int
    found: tuple[int, int, float] | None


@dataclass(frozen=True)
class LeftOut:
    """Places of measured points that a verdict leaves out, and why."""

    places: tuple[int, ...]
    why: Marks


@dataclass(frozen=True)
class Verdict:
    """What a sweep decides: the best, what ties with it, what is slower, the next first, and the knee.

    There is no best where no point was `measured`, or none with the speed of its hardware. `difference` is that to the
    next, as sure as the least sure of those to all that are slower. Points `without` a speed have no part in it. Which
    of the `engines` pays is said where there are several.
    """

    measured: bool
    best: Contestant | None = None
    ties: tuple[Tied, ...] = ()
    slower: tuple[Contestant, ...] = ()
    difference: Difference | None = None
    knee: Knee | None = None
    left_out: tuple[LeftOut, ...] = ()
    without: tuple[int, ...] = ()
    engines: Engines | None = None

    @property
    def confidence(self) -> Confidence | None:
        """How sure the best is; None where it is alone."""
        return Confidence.TIE if self.ties else None if self.difference is None else self.difference.confidence


Pair = NotMeasured | NotAlike | Tie | Faster


def spread(runs: Sequence[Run]) -> Spread:
    """How far equal ones among `runs` lie apart, pooled over all of them (Welch & Snedecor's pooled variance)."""
    alike: dict[Hashable, list[float]] = {}
    for run in runs:
        if run.repeats:
            alike.setdefault(_asked(run, "point"), []).append(math.log(measure.interval(run.repeats)[0]))
        one = run.result.speed.baseline_examples_per_second
        if one and run.result.speed.baseline_source == results.IN_THIS_RUN:
            alike.setdefault(_asked(run, "baseline"), []).append(math.log(one))
    squares = sum(float(np.var(logarithms)) * len(logarithms) for logarithms in alike.values())
    degrees = sum(len(logarithms) - 1 for logarithms in alike.values())
    return Spread(math.sqrt(squares / degrees) if degrees else 0.0, degrees)


def p_value_of(one: Contestant, two: Contestant, seen: Spread, within: float | None = None) -> float:
    """The probability that equal configurations differ as these do.

    A t-test on the logarithms of the runs' speeds, whose variance is drawn together from what was `seen` and what is to
    be expected, each by its degrees of freedom (the moderated t of Smyth, 2004). What disturbs a run's repeats may last
    for longer than that run, so their variance is added, and not divided by their number; `within` stands in its place.
    """
    from scipy.special import stdtr

    if within is None:
        variances = [np.var(np.log(run.repeats), ddof=1) for run in one.runs + two.runs if run.repeats[1:]]
        within = float(np.mean(variances)) if variances else 0.0
    expected = PRIOR_SPREAD**2 + within
    degrees = PRIOR_DEGREES + seen.degrees
    variance = (PRIOR_DEGREES * expected + seen.degrees * seen.deviation**2) / degrees
    apart = abs(np.mean(np.log(one.speeds)) - np.mean(np.log(two.speeds)))
    error = math.sqrt(variance * (1 / len(one.runs) + 1 / len(two.runs)))
    return float(2 * stdtr(degrees, -apart / error))


def told_apart(one: Contestant, two: Contestant, seen: Spread) -> float | None:
    """The probability that the difference is chance; None where the two tie.

    They tie where their intervals overlap, or those of their speedups over baselines measured in turn, or where equal
    runs may well differ so.
    """
    if _overlap(one.interval, two.interval) or _overlap_in_turn(one, two):
        return None
    p_value = p_value_of(one, two, seen)
    return p_value if p_value < SIGNIFICANCE_LEVEL else None


def between(number: int, other: int, one: Run, two: Run, seen: Spread) -> Pair:
    """Which of two runs is faster, by how much, and how sure that is."""
    if not one.repeats or not two.repeats:
        return NotMeasured(other if one.repeats else number)
    if unlike := comparable.unlike(one, two):
        return NotAlike(unlike[0])
    ours, theirs = Contestant((number,), (one,)), Contestant((other,), (two,))
    p_value = told_apart(ours, theirs, seen)
    if p_value is None:
        return Tie(_why_tied(ours, theirs, seen))
    fast, slow = (ours, theirs) if ours.interval[0] > theirs.interval[0] else (theirs, ours)
    return Faster(fast.places[0], slow.places[0], _difference(fast, slow, p_value, seen))


def _why_tied(one: Contestant, two: Contestant, seen: Spread) -> Overlap:
    if _overlap(one.interval, two.interval):
        return Overlap.REPEATS
    if _overlap_in_turn(one, two):
        return Overlap.SPEEDUPS
    # Were they as steady as runs are elsewhere, would they differ?
    steady = p_value_of(one, two, seen, within=0.0) < SIGNIFICANCE_LEVEL
    return Overlap.UNSTEADY if steady else Overlap.EQUAL_RUNS


def _difference(fast: Contestant, slow: Contestant, p_value: float, seen: Spread) -> Difference:
    ratio = fast.interval[0] / slow.interval[0]
    return Difference(ratio, p_value, confidence(p_value, seen), repeated=bool(seen.degrees))


def confidence(p_value: float, seen: Spread) -> Confidence:
    """How sure something is that is chance with this probability: fairly at most, where no run was repeated.

    >>> print(confidence(0.0004, Spread(0.02, degrees=4)), confidence(0.0004, Spread(0.0, degrees=0)), sep=", ")
    very sure, fairly sure
    """
    return next(
        level for below, level in CONFIDENCE if p_value < below and (seen.degrees or below == SIGNIFICANCE_LEVEL)
    )


def decide(runs: Sequence[Run], same: Sequence[Hashable], knee_share: float) -> Verdict:
    """What a sweep decides. `same` names the configuration of each run: runs with equal names repeat each other."""
    # One that was killed has repeats, and no result that says what it was.
    measured = [
        place for place, run in enumerate(runs) if run.repeats and run.result.speed.examples_per_second is not None
    ]
    if not measured:
        return Verdict(measured=False)
    group = [measured[at] for at in comparable.groups([runs[place] for place in measured])[0]]
    sound = [place for place in group if comparable.sound(runs[place])]
    left_out = _left_out(runs, measured, group)
    without = tuple(place for place in range(len(runs)) if place not in measured)
    if not sound:
        return Verdict(measured=True, left_out=left_out, without=without)
    by_name: dict[Hashable, list[int]] = {}
    for place in sound:
        by_name.setdefault(same[place], []).append(place)
    contestants = [Contestant(tuple(places), tuple(runs[place] for place in places)) for places in by_name.values()]
    best, *others = sorted(contestants, key=lambda contestant: -contestant.interval[0])
    seen = spread([runs[place] for place in measured])
    p_values = [(other, _of_several(told_apart(best, other, seen), len(others))) for other in others]
    slower = [(other, p_value) for other, p_value in p_values if p_value is not None]
    least_sure = max((p_value for _, p_value in slower), default=None)
    ties = tuple(Tied(other, _why_tied(best, other, seen)) for other, p_value in p_values if p_value is None)
    return Verdict(
        measured=True,
        best=best,
        ties=ties,
        slower=tuple(other for other, _ in slower),
        difference=None if least_sure is None else _difference(best, slower[0][0], least_sure, seen),
        knee=knee([run for contestant in contestants for run in contestant.runs], best.runs[0], knee_share),
        left_out=left_out,
        without=without,
        engines=engines.decide(
            runs,
            [best, *(tie.contestant for tie in ties)],
            slower,
            lambda other, p_value: _difference(best, other, p_value, seen),
        ),
    )


def _of_several(p_value: float | None, comparisons: int) -> float | None:
    """Of several comparisons one is by chance the more easily (Bonferroni); None where it may well be."""
    if p_value is None or p_value * comparisons >= SIGNIFICANCE_LEVEL:
        return None
    return p_value * comparisons


def knee(runs: Sequence[Run], best: Run, share: float) -> Knee | None:
    """The most workers under the best's strategy of which each brings at least `share` of what one alone does."""
    strategy = best.result.choices.called
    speeds: dict[int, list[float]] = {}
    for run in runs:
        workers = run.result.layout.workers
        if run.result.choices.called == strategy and workers is not None:
            speeds.setdefault(workers, []).append(measure.interval(run.repeats)[0])
    if len(speeds) < 2:
        return None
    middle = {count: float(np.median(of_count)) for count, of_count in speeds.items()}
    return Knee(strategy, share, max(speeds), outlook.knee(middle, share))


def _left_out(runs: Sequence[Run], measured: Sequence[int], group: Sequence[int]) -> tuple[LeftOut, ...]:
    """Which measured points the verdict leaves out, and why."""
    marks = dict(zip(measured, comparable.marks([runs[place] for place in measured]), strict=True))
    reasons: dict[Marks, list[int]] = {}
    for place in measured:
        if place not in group or not comparable.sound(runs[place]):
            doubts = tuple(doubt for doubt in marks[place].doubts if doubt in comparable.REFUSED)
            reasons.setdefault(Marks(doubts, marks[place].differs), []).append(place)
    return tuple(LeftOut(tuple(places), why) for why, places in reasons.items())


def _overlap(one: Sequence[float], two: Sequence[float]) -> bool:
    """Do two intervals overlap, of which the last two values are the ends?"""
    return one[-2] <= two[-1] and two[-2] <= one[-1]


def _overlap_in_turn(one: Contestant, two: Contestant) -> bool:
    """Do the speedups overlap, where the baseline of each was measured in turn with it and so had the same luck?

    Over one device of different engines they say nothing of each other.
    """
    if comparable.engines([*one.runs, *two.runs]):
        return False
    ends: list[tuple[float, float]] = []
    for contestant in (one, two):
        speeds = [run.result.speed for run in contestant.runs]
        if not all(speed.baseline_source == results.IN_THIS_RUN for speed in speeds):
            return False
        lows = [speed.speedup_low for speed in speeds if speed.speedup_low is not None]
        highs = [speed.speedup_high for speed in speeds if speed.speedup_high is not None]
        if not len(lows) == len(highs) == len(speeds):
            return False
        ends.append((min(lows), max(highs)))
    return _overlap(*ends)


def _asked(run: Run, group: str) -> Hashable:
    """What makes two runs the same, but for chance; for baselines, what they depend on."""
    engine = comparable.engine_of(run.result)
    asked: dict[str, object] = {"facts": comparable.facts(run), "engine": engine, "group": group}
    if group == "point":
        choices, layout = run.result.choices, run.result.layout
        asked["layout"] = [choices.called, layout.workers, layout.processes, choices.hardware]
        asked["build"] = run.settings.get("strategy_build")
    return json.dumps(asked, sort_keys=True, default=str)

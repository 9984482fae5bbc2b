"""Compares runs, with the odds of the answer, and turns those of a sweep into which of them to use.

Runs are judged by the ratio of each to one device, timed in turn with it, and by throughput only where there is none.
"""

import json
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from pipeline.analyze import comparable, measure
from pipeline.analyze.comparable import BUSY, MARGIN, Difference, Marks
from pipeline.analyze.history import LoggedRun
from pipeline.analyze.measure import Knee
from pipeline.record.results import IN_THIS_RUN, Result

# How far equal runs on a quiet machine lie apart, as a standard deviation of the logarithm: by throughput, by speedup
# measured in turn; and how many degrees of freedom that is worth.
PRIOR_SPREAD, PRIOR_SPREAD_IN_TURN, PRIOR_DEGREES = 0.05, 0.03, 8
# The distance from the median to an end of the repeats' range, in standard errors of the median. That of five normal
# repeats is 2.2; repeats that are disturbed for longer than one of them say less.
ERRORS_TO_END = 1.5
# What repeats may not have shown, as a standard error for one of them; it falls with their number squared.
UNSEEN = 0.2
# Odds from which there is an answer.
PROBABLE = 0.8
# The outcome of comparing a pair.
Answer = StrEnum("Answer", {"FASTER": "faster", "AS_FAST": "as fast", "NOT_KNOWN": "not known"})
# The recommendation: the best of a sweep, one device, or neither is known.
Use = StrEnum("Use", {"BEST": "best", "ONE_DEVICE": "one device", "NOT_KNOWN": "not known"})


@dataclass(frozen=True)
class Contestant:
    """A configuration and the runs that measured it, by their places in what is compared."""

    places: tuple[int, ...]
    runs: tuple[LoggedRun, ...]

    @property
    def result(self) -> Result:
        """The result of its first run."""
        return self.runs[0].result

    @property
    def devices(self) -> int:
        """The number of devices that it runs on."""
        return comparable.devices_of(self.result)

    @property
    def interval(self) -> tuple[float, float, float]:
        """(examples per second, lowest, highest): of the repeats of its one run, or of its runs."""
        figures = [_figures(run)[:3] for run in self.runs]
        return figures[0] if len(figures) == 1 else measure.interval([middle for middle, _, _ in figures])

    @property
    def speedup(self) -> tuple[float, float, float] | None:
        """The same of the speedup over one device; None where a run has none, or one that cannot be."""
        speeds = [run.result.speed for run in self.runs if not comparable.disturbed_baseline(run.result)]
        middles = [speed.speedup for speed in speeds if speed.speedup]
        if len(middles) < len(self.runs):
            return None
        low, high, one = speeds[0].speedup_low, speeds[0].speedup_high, middles[0]
        return (one, low or one, high or one) if len(middles) == 1 else measure.interval(middles)


@dataclass(frozen=True)
class Comparison:
    """A contestant beside the `other`, or one device: `ratio` times as fast, at odds of 95% from `low` to `high`."""

    answer: Answer
    ratio: float
    low: float
    high: float
    odds: float
    other: Contestant | None = None

    @property
    def is_faster(self) -> bool:
        """True if it is known to be the faster one."""
        return self.answer is Answer.FASTER and self.ratio > 1

    @property
    def is_slower(self) -> bool:
        """True if it is known to be the slower one."""
        return self.answer is Answer.FASTER and self.ratio < 1


@dataclass(frozen=True)
class _Estimate:
    """A logarithm of a speedup, how far below and above the truth may lie (standard errors), and the `most` it was."""

    middle: float = 0.0
    below: float = 0.0
    above: float = 0.0
    most: float = 0.0


class Judge:
    """Compares runs by how far equal ones lie apart, which have equal names, `same`, or were asked for equally."""

    def __init__(self, runs: Sequence[LoggedRun], same: Sequence[Hashable] | None = None) -> None:
        self.in_turn = not comparable.engines(runs)
        speeds = [run.result.speed for run in runs if not comparable.disturbed_baseline(run.result)]
        rates = [(speed.examples_per_second or 0.0) / (speed.speedup or math.inf) for speed in speeds]
        of_one = [speed.baseline_examples_per_second or rate for speed, rate in zip(speeds, rates, strict=True)]
        one = [rate for rate in of_one if rate > 0]
        # What brings a throughput to the scale of speedups: of several engines each has a device of its own.
        self._one = float(np.median(one)) if one and self.in_turn else None
        self._spreads = {in_turn: _spread(runs, same, in_turn) for in_turn in (False, True)}

    def score(self, contestant: Contestant) -> float:
        """The value that contestants are ranked by: speedup over one device, or examples per second."""
        return math.exp(self._estimate(contestant).middle)

    def over_one(self, contestant: Contestant, alone: Contestant | None, comparisons: int = 1) -> Comparison | None:
        """Compares it with one device: the baselines, or `alone`; None if there are neither."""
        if self._one is None and alone in (None, contestant):
            return None
        return self.compare(contestant, alone if self._one is None else None, comparisons)

    def is_no_faster(self, contestant: Contestant, alone: Contestant | None, comparisons: int) -> bool:
        """True if it is known to be at most as fast as one device, and was no faster in any repeat."""
        compared = self.over_one(contestant, alone, comparisons)
        one = _Estimate() if self._one is not None or alone is None else self._estimate(alone)
        is_known = compared is not None and (compared.answer is Answer.AS_FAST or compared.is_slower)
        return is_known and self._estimate(contestant).most <= one.middle + math.log1p(MARGIN)

    def between(self, one: LoggedRun, other: LoggedRun) -> Comparison | Difference | None:
        """Compares two runs; the reason why their speeds do not compare; None if one has no speed."""
        if not (_is_measured(one) and _is_measured(other)):
            return None
        if unlike := comparable.unlike(one, other):
            return unlike[0]
        return self.compare(Contestant((0,), (one,)), Contestant((1,), (other,)))

    def compare(self, one: Contestant, other: Contestant | None, comparisons: int = 1) -> Comparison:
        """Compares one with the other, or with the baselines, as one of several `comparisons` (Bonferroni).

        Faster where an interval of these odds does not hold 1; as fast where it lies in the margin (TOST). A difference
        is as unsure as the sides of both estimates that face each other (MOVER; Zou and Donner, 2008).
        """
        from scipy.special import stdtr, stdtrit

        ours, in_turn = self._estimate(one), all(map(self._is_in_turn, (one, other or one)))
        # Baselines that were not timed in turn lie apart, too.
        apart_too = 0.0 if in_turn else self._spreads[False][0]
        theirs = _Estimate(below=apart_too, above=apart_too) if other is None else self._estimate(other)
        degrees = min(self._spreads[True][1], self._spreads[in_turn][1])
        apart = ours.middle - theirs.middle
        less, more = math.hypot(ours.below, theirs.above), math.hypot(ours.above, theirs.below)
        margin, quantile = math.log1p(MARGIN), float(stdtrit(degrees, 0.975))
        faster = 1 - 2 * comparisons * stdtr(degrees, -abs(apart) / (less if apart > 0 else more))
        as_fast = 1 - 2 * max(stdtr(degrees, (apart - margin) / more), stdtr(degrees, (-apart - margin) / less))
        answer = Answer.NOT_KNOWN
        if max(faster, as_fast) >= PROBABLE:
            answer = Answer.AS_FAST if as_fast > faster else Answer.FASTER
        ratio, low, high = map(math.exp, (apart, apart - quantile * less, apart + quantile * more))
        odds = float(as_fast if answer is Answer.AS_FAST else max(0.0, faster))
        return Comparison(answer, ratio, low, high, odds, other)

    def _is_in_turn(self, contestant: Contestant) -> bool:
        return self.in_turn and all(map(_in_turn, contestant.runs))

    def _estimate(self, contestant: Contestant) -> _Estimate:
        """The median of its runs, as sure as their repeats, their number, and other work on the machine let it be."""
        in_turn = self._is_in_turn(contestant)
        scale, estimates = 1.0 if in_turn or self._one is None else self._one, []
        for run in contestant.runs:
            middle, low, high, repeats = _figures(run, in_turn)
            shared = self._spreads[in_turn][0] ** 2 + (UNSEEN / repeats**2) ** 2
            others = min(0.9, run.result.speed.other_work or 0.0)
            # One worker and its baseline are kept from the same core; several need what others took.
            busy = others >= BUSY and (contestant.devices > 1 or not in_turn)
            faster = -math.log(1 - others) if busy else 0.0
            estimates.append((
                math.log(middle / scale),
                shared + (math.log(middle / low) / ERRORS_TO_END) ** 2,
                shared + (math.log(high / middle) / ERRORS_TO_END) ** 2 + faster**2,
                math.log(high / scale) + faster,
            ))  # fmt: skip
        middles, below, above, fastest = zip(*estimates, strict=True)
        lower, upper = (math.sqrt(np.mean(squares) / len(estimates)) for squares in (below, above))
        return _Estimate(float(np.median(middles)), lower, upper, max(fastest))


def _figures(run: LoggedRun, in_turn: bool = False) -> tuple[float, float, float, int]:
    """(examples per second, lowest, highest, repeats) as its result has it, or else its log; or of its speedup."""
    speed = run.result.speed
    ends = speed.examples_per_second, speed.examples_per_second_low, speed.examples_per_second_high
    middle, low, high = (speed.speedup, speed.speedup_low, speed.speedup_high) if in_turn else ends
    # An interval's probability tells of how many repeats it is, too.
    confidence = speed.interval_confidence or 0.0
    repeats = speed.repeats or len(run.repeats) or (round(1 - math.log2(1 - confidence)) if 0 <= confidence < 1 else 1)
    if middle and low and high and 0 < low <= middle <= high:
        return middle, low, high, repeats
    return *measure.interval(run.repeats or [middle or math.nan]), max(1, len(run.repeats))


def _is_measured(run: LoggedRun) -> bool:
    return (run.result.speed.examples_per_second or 0.0) > 0 or bool(run.repeats)


def _in_turn(run: LoggedRun) -> bool:
    """True if its baseline was timed in turn with it, with a plausible speedup."""
    speed = run.result.speed
    plausible = 0 < (speed.speedup_low or 0.0) <= (speed.speedup or 0.0) <= (speed.speedup_high or 0.0)
    return plausible and speed.baseline_source == IN_THIS_RUN and not comparable.disturbed_baseline(run.result)


def _spread(runs: Sequence[LoggedRun], same: Sequence[Hashable] | None, in_turn: bool) -> tuple[float, int]:
    """The standard deviation of the logarithm of equal runs, baselines among them, and its degrees of freedom."""
    names = [_asked(run, "point") for run in runs] if same is None else same
    speeds = [
        (name, math.log(_figures(run, in_turn)[0]))
        for run, name in zip(runs, names, strict=True)
        if (_in_turn(run) if in_turn else _is_measured(run))
    ]
    for run in [] if in_turn else runs:
        one = run.result.speed.baseline_examples_per_second
        if one and run.result.speed.baseline_source == IN_THIS_RUN:
            speeds.append((_asked(run, "baseline"), math.log(one)))
    alike = comparable.grouped(speeds)
    squares = sum(float(np.var(logarithms)) * len(logarithms) for logarithms in alike.values())
    degrees = PRIOR_DEGREES + sum(len(logarithms) - 1 for logarithms in alike.values())
    # Drawn together with what is to be expected, each by its degrees of freedom (the moderated t of Smyth, 2004).
    prior = PRIOR_SPREAD_IN_TURN if in_turn else PRIOR_SPREAD
    return math.sqrt((PRIOR_DEGREES * prior**2 + squares) / degrees), degrees


def _asked(run: LoggedRun, group: str) -> Hashable:
    """A key that two runs share if they differ by chance alone; for baselines, all that they depend on."""
    choices, layout = run.result.choices, run.result.layout
    of_point = [choices.called, layout.workers, layout.processes, choices.hardware, run.settings.get("strategy_build")]
    parts = [comparable.facts(run), comparable.engine_of(run.result), of_point if group == "point" else None]
    return json.dumps(parts, sort_keys=True)


@dataclass(frozen=True)
class Engines:
    """The engines that pay: `first` have the best point, or one that is not known to be slower.

    If one is first, `rival` compares the best with the fastest of another, at the odds of the least sure of all such
    comparisons. The `unjudged` have no point in the verdict.
    """

    first: tuple[str, ...]
    rival: Comparison | None = None
    unjudged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The recommendation of a sweep, with the best compared with one device and `against` each other, fastest first.

    `best` seems best if that is not known, and is None if nothing was measured with its hardware's speed. Points are
    named by their places: those `disturbed`, with why, those `left_out`, by why, and those `without` a speed.
    """

    best: Contestant | None = None
    use: Use = Use.NOT_KNOWN
    over_one: Comparison | None = None
    against: tuple[Comparison, ...] = ()
    disturbed: tuple[tuple[int, str], ...] = ()
    knee: Knee | None = None
    left_out: Mapping[Marks, Sequence[int]] = field(default_factory=dict)
    without: tuple[int, ...] = ()
    engines: Engines | None = None


def decide(runs: Sequence[LoggedRun], same: Sequence[Hashable], knee_share: float) -> Verdict:
    """The verdict of a sweep. `same` names the configuration of each run: runs with equal names repeat each other."""
    # One that was killed has repeats, and no result that says what it was.
    measured = [place for place, run in enumerate(runs) if (run.result.speed.examples_per_second or 0.0) > 0]
    without = tuple(place for place in range(len(runs)) if place not in measured)
    if not measured:
        return Verdict()
    timed = [runs[place] for place in measured]
    sound = [measured[at] for at in comparable.groups(timed)[0] if comparable.sound(timed[at])]
    left_out = comparable.grouped(
        (Marks(tuple(doubt for doubt in marks.doubts if doubt in comparable.REFUSED), marks.differs), place)
        for place, marks in zip(measured, comparable.marks(timed), strict=True)
        if place not in sound
    )
    if not sound:
        return Verdict(left_out=left_out, without=without)
    by_name = comparable.grouped((same[place], place) for place in sound)
    contestants = [Contestant(tuple(places), tuple(runs[place] for place in places)) for places in by_name.values()]
    judge = Judge([runs[place] for place in sound], [same[place] for place in sound])
    ranked = sorted(contestants, key=judge.score, reverse=True)
    alone = next((each for each in ranked if each.devices == 1), None)
    best, against = _best(ranked, alone, judge)
    over_one = judge.over_one(best, alone)
    # It is one device only if nothing on several is faster, as far as all repeats tell.
    wider, use = [each for each in ranked if each.devices > 1], Use.NOT_KNOWN
    if not wider or (best.devices > 1 and (over_one is None or over_one.is_faster)):
        use = Use.BEST
    elif all(judge.is_no_faster(each, alone, len(wider)) for each in wider):
        use = Use.ONE_DEVICE
    alike = [each for each in ranked if each.result.choices.called == best.result.choices.called]
    knee = measure.knee([(each.result.layout.workers or 1, judge.score(each)) for each in alike], knee_share)
    disturbed = tuple((place, why) for place in sound for why in comparable.disturbed(runs[place].result))
    engines = _engines(runs, best, against)
    return Verdict(best, use, over_one, against, disturbed, knee, left_out, without, engines)


def _best(
    ranked: Sequence[Contestant], alone: Contestant | None, judge: Judge
) -> tuple[Contestant, tuple[Comparison, ...]]:
    """(the fastest known to beat one device, or as fast on fewer, else the one that seems fastest; its comparisons)."""

    def beside(one: Contestant) -> tuple[Comparison, ...]:
        return tuple(judge.compare(one, other, len(ranked) - 1) for other in ranked if other is not one)

    def is_beaten(one: Contestant) -> bool:
        return any(each.is_slower for each in beside(one))

    pays = [each for each in ranked if each.devices > 1 and (over := judge.over_one(each, alone)) and over.is_faster]
    best = next((each for each in pays if not is_beaten(each)), ranked[0])
    as_fast = [each.other for each in beside(best) if each.answer is Answer.AS_FAST and each.other]
    fewer = [each for each in as_fast if each.devices < best.devices and not is_beaten(each)]
    best = min(fewer, key=lambda each: each.devices, default=best)
    return best, beside(best)


def _engines(runs: Sequence[LoggedRun], best: Contestant, against: Sequence[Comparison]) -> Engines | None:
    """The engines that pay, by the best compared with all others; None if there is one."""
    engines = {engine: None for run in runs if (engine := comparable.engine_of(run.result))}
    if len(engines) < 2:
        return None
    others = [(each, comparable.engine_of(each.other.result)) for each in against if each.other]
    first = [comparable.engine_of(best.result), *(name for each, name in others if not each.is_faster)]
    at_the_top = dict.fromkeys(filter(None, first))
    rivals = [each for each, name in others if name not in at_the_top]
    judged = at_the_top | dict.fromkeys(name for _, name in others)
    unjudged = tuple(engine for engine in engines if engine not in judged)
    if len(at_the_top) > 1 or not rivals:
        return Engines(tuple(at_the_top), unjudged=unjudged)
    return Engines(tuple(at_the_top), replace(rivals[0], odds=min(each.odds for each in rivals)), unjudged)

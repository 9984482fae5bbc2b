"""Turns measured runs into who is faster, by how much and how sure that is; what cannot be told apart ties.

Repeats of one run share its luck: with memory, with cores, with what else the machine did just then. So a difference
is held against the spread between runs, not the spread within one. It is taken from runs that were asked for equally,
and from baselines that were measured again, as far as there are any; before that, from what was seen elsewhere.
"""

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.analyze import comparable, measure, outlook
from pipeline.analyze.history import Run
from pipeline.analyze.rounding import rate

# How far equal runs on a quiet machine lie apart, as a standard deviation of the logarithm, and how many degrees of
# freedom that is worth: of five runs each of six programs on 2 cores the ranges were 4% to 13%, divided by 2.33, the
# mean range of five normal values, 2% to 6%.
PRIOR_SPREAD, PRIOR_DEGREES = 0.04, 8
# A difference is one where equal runs would differ so with a smaller probability.
SIGNIFICANCE_LEVEL = 0.05
# What a probability below each of these is called.
CONFIDENCE = ((0.001, "very sure"), (0.01, "sure"), (SIGNIFICANCE_LEVEL, "fairly sure"))


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
    def name(self) -> str:
        """What a sentence calls it."""
        result = self.runs[0].result
        workers = result.get("workers")
        points = f"point{'s' * (len(self.places) > 1)} {' and '.join(map(str, self.places))}"
        return f"{result.get('strategy')} on {workers} worker{'s' * (workers != 1)} ({points})"


@dataclass(frozen=True)
class Spread:
    """How far equal runs lie apart: a standard deviation of the logarithm of their speeds, and its degrees."""

    deviation: float
    degrees: int


@dataclass(frozen=True)
class Verdict:
    """What a sweep decides, in sentences: the best and how sure that is, or that others tie with it."""

    lines: tuple[str, ...]
    best: Contestant | None = None
    confidence: str | None = None


def spread(runs: Sequence[Run]) -> Spread:
    """How far equal ones among `runs` lie apart, pooled over all of them (Welch & Snedecor's pooled variance)."""
    alike: dict[Hashable, list[float]] = {}
    for run in runs:
        if run.repeats:
            alike.setdefault(_asked(run, "point"), []).append(math.log(measure.interval(run.repeats)[0]))
        one = run.result.get("baseline_examples_per_second")
        if one and run.result.get("baseline_source") == "measured in this run":
            alike.setdefault(_asked(run, "baseline"), []).append(math.log(one))
    squares = sum(float(np.var(each)) * len(each) for each in alike.values())
    degrees = sum(len(each) - 1 for each in alike.values())
    return Spread(math.sqrt(squares / degrees) if degrees else 0.0, degrees)


def p_value_of(one: Contestant, two: Contestant, seen: Spread) -> float:
    """The probability that equal configurations differ as these do.

    A t-test on the logarithms of the runs' speeds, whose variance is drawn together from what was `seen` and what is to
    be expected, each by its degrees of freedom (the moderated t of Smyth, 2004). What disturbs a run's repeats may last
    for longer than that run, so their variance is added, and not divided by their number.
    """
    from scipy.special import stdtr

    within = [np.var(np.log(run.repeats), ddof=1) for run in one.runs + two.runs if run.repeats[1:]]
    expected = PRIOR_SPREAD**2 + (float(np.mean(within)) if within else 0.0)
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


def between(number: int, other: int, one: Run, two: Run, seen: Spread) -> str:
    """Which of two runs is faster, by how much, and how sure that is."""
    if not one.repeats or not two.repeats:
        return f"{number} and {other}: not compared, since {other if one.repeats else number} was not measured"
    if unlike := comparable.unlike(one, two):
        return f"{number} and {other}: not compared, since {unlike[0]}"
    ours, theirs = Contestant((number,), (one,)), Contestant((other,), (two,))
    p_value = told_apart(ours, theirs, seen)
    if p_value is None:
        why = "equal runs lie as far apart"
        if _overlap_in_turn(ours, theirs):
            why = "their speedups over baselines measured in turn overlap"
        if _overlap(ours.interval, theirs.interval):
            why = "the ranges of their repeats overlap"
        return f"{number} and {other}: a tie, since {why}"
    fast, slow = (ours, theirs) if ours.interval[0] > theirs.interval[0] else (theirs, ours)
    ratio = fast.interval[0] / slow.interval[0]
    return (
        f"{fast.places[0]} is {ratio:.2f} times as fast as {slow.places[0]}, {confidence(p_value, seen)}: "
        f"{_p_value_text(p_value, seen)}"
    )


def confidence(p_value: float, seen: Spread) -> str:
    """How sure something is that is chance with this probability: fairly at most, where no run was repeated.

    >>> confidence(0.0004, Spread(0.02, degrees=4)), confidence(0.0004, Spread(0.0, degrees=0))
    ('very sure', 'fairly sure')
    """
    return next(
        words for below, words in CONFIDENCE if p_value < below and (seen.degrees or below == SIGNIFICANCE_LEVEL)
    )


def _p_value_text(p_value: float, seen: Spread) -> str:
    return f"by chance with a probability of {p_value:.2g}{', as far as one run of each can tell' * (not seen.degrees)}"


def decide(runs: Sequence[Run], same: Sequence[Hashable], knee_share: float) -> Verdict:
    """What a sweep decides. `same` names the configuration of each run: runs with equal names repeat each other."""
    # One that was killed has repeats, and no result that says what it was.
    measured = [place for place, run in enumerate(runs) if run.repeats and "examples_per_second" in run.result]
    if not measured:
        return Verdict(("No verdict: no point was measured.",))
    group = [measured[at] for at in comparable.groups([runs[place] for place in measured])[0]]
    sound = [place for place in group if comparable.sound(runs[place])]
    left_out = _left_out(runs, measured, group)
    if not sound:
        return Verdict(("No verdict: no measured point has the speed of its hardware.", *left_out))
    places: dict[Hashable, list[int]] = {}
    for place in sound:
        places.setdefault(same[place], []).append(place)
    contestants = [Contestant(tuple(each), tuple(runs[place] for place in each)) for each in places.values()]
    best, *others = sorted(contestants, key=lambda contestant: -contestant.interval[0])
    seen = spread([runs[place] for place in measured])
    # Of several comparisons one is by chance the more easily (Bonferroni).
    p_values = {other.places: told_apart(best, other, seen) for other in others}
    p_values = {
        value: None if p_value is None or p_value * len(others) >= SIGNIFICANCE_LEVEL else p_value * len(others)
        for value, p_value in p_values.items()
    }
    ties = tuple(other for other in others if p_values[other.places] is None)
    slower = [(other, p_value) for other in others if (p_value := p_values[other.places]) is not None]
    came = "came out first" if ties else "is the fastest" if others else "is the only point to judge"
    lines, sure = [_first(best, came)], None
    if ties:
        names = _and([each.name for each in (best, *ties)])
        lines.insert(0, f"A tie: {names} cannot be told apart. Intervals overlap, or equal runs lie as far apart.")
    if slower:
        runner, p_value = slower[0]
        sure = confidence(max(p_value for _, p_value in slower), seen)
        ratio = best.interval[0] / runner.interval[0]
        lines.append(
            f"{sure.capitalize()}: {'the first' if ties else 'it'} is {ratio:.2f} times as fast as "
            f"{runner.name}{', the next' * (not ties)}, {_p_value_text(p_value, seen)}."
        )
    found = knee([run for contestant in contestants for run in contestant.runs], best.runs[0], knee_share)
    return Verdict((*lines, *filter(None, [found]), *left_out), best, "tie" if ties else sure)


def knee(runs: Sequence[Run], best: Run, share: float) -> str | None:
    """The most workers under the best's strategy of which each brings at least `share` of what one alone does."""
    speeds: dict[int, list[float]] = {}
    for run in runs:
        if run.result.get("strategy") == best.result.get("strategy"):
            speeds.setdefault(int(run.result["workers"]), []).append(measure.interval(run.repeats)[0])
    counts = sorted(speeds)
    if len(counts) < 2:
        return None
    middle = {count: float(np.median(speeds[count])) for count in counts}
    found = outlook.knee(middle, share)
    if found is None:
        return f"Up to {counts[-1]} workers, the most measured, each brought {share:.0%} of one alone or more."
    few, many, brought = found
    return (
        f"More than {few} worker{'s' * (few != 1)} did not pay under {best.result.get('strategy')}: from {few} "
        f"to {many} each brought {max(0.0, brought):.0%} of what one of the first did, below {share:.0%}."
    )


def _first(best: Contestant, came: str) -> str:
    speed, low, high = best.interval
    results = [run.result for run in best.runs]
    speedups = [result["speedup"] for result in results if result.get("speedup") is not None]
    faster = f", {float(np.median(speedups)):.2f} times one device" if speedups else ""
    marked = ", ".join(comparable.doubts(results[0]))
    return (
        f"{best.name} {came}: {rate(speed)} examples/s ({rate(low)} to {rate(high)}){faster}"
        f"{f' ({marked})' * bool(marked)}."
    )


def _left_out(runs: Sequence[Run], measured: Sequence[int], group: Sequence[int]) -> list[str]:
    """Which measured points the verdict leaves out, and why."""
    marks = dict(zip(measured, comparable.marks([runs[place] for place in measured]), strict=True))
    reasons: dict[str, list[str]] = {}
    for place in measured:
        why = [mark for mark in marks[place] if mark != "asynchronous"]
        if place not in group or not comparable.sound(runs[place]):
            reasons.setdefault(_and(why), []).append(str(place))
    told = [f"point{'s' * (len(places) > 1)} {_and(places)} ({why})" for why, places in reasons.items()]
    return [f"Left out of the verdict: {'; '.join(told)}."] if told else []


def _overlap(one: Sequence[float], two: Sequence[float]) -> bool:
    """Do two intervals overlap, of which the last two values are the ends?"""
    return one[-2] <= two[-1] and two[-2] <= one[-1]


def _overlap_in_turn(one: Contestant, two: Contestant) -> bool:
    """Do the speedups overlap, where the baseline of each was measured in turn with it and so had the same luck?"""
    ends: list[tuple[float, float]] = []
    for each in (one, two):
        results = [run.result for run in each.runs]
        if not all(result.get("baseline_source") == "measured in this run" for result in results):
            return False
        if any(result.get("speedup_low") is None for result in results):
            return False
        ends.append(
            (min(result["speedup_low"] for result in results), max(result["speedup_high"] for result in results))
        )
    return _overlap(*ends)


def _asked(run: Run, group: str) -> Hashable:
    """What makes two runs the same, but for chance; for baselines, what they depend on."""
    asked: dict[str, Any] = {"facts": comparable.facts(run), "group": group}
    if group == "point":
        asked["layout"] = [run.result.get(name) for name in ("strategy", "workers", "processes", "hardware")]
        asked["build"] = run.plan.get("strategy_build")
    return json.dumps(asked, sort_keys=True, default=str)


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""

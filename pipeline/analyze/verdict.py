"""Turns the measured runs of a sweep into which of them to use, how sure that is, and what is not known.

A verdict is values: views put it into words.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.analyze import comparable, outlook
from pipeline.analyze.comparable import Marks
from pipeline.analyze.compare import Answer, Comparison, Contestant, Judge
from pipeline.analyze.history import LoggedRun
from pipeline.analyze.outlook import Knee

# The recommendation: the best of a sweep, one device, or neither is known.
Use = StrEnum("Use", {"BEST": "best", "ONE_DEVICE": "one device", "NOT_KNOWN": "not known"})


@dataclass(frozen=True)
class Engines:
    """The engines that pay: `first` have the best point, or one that is not known to be slower.

    If one is first, `rival` compares the best with the fastest of another, at the odds of the least sure of all such
    comparisons. The `unjudged` have no point in the verdict.
    """

    first: tuple[str, ...]
    rival: Comparison | None = None
    odds: float = 0.0
    unjudged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The recommendation of a sweep, with the best compared with one device and `against` each other, fastest first.

    `best` seems best if that is not known, and is None if nothing was `measured` with its hardware's speed. Points are
    named by their places: those `disturbed`, with why, those `left_out`, by why, and those `without` a speed.
    """

    measured: bool
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
        return Verdict(measured=False)
    group = [measured[at] for at in comparable.groups([runs[place] for place in measured])[0]]
    sound = [place for place in group if comparable.sound(runs[place])]
    left_out = _left_out(runs, measured, group)
    if not sound:
        return Verdict(measured=True, left_out=left_out, without=without)
    by_name = comparable.grouped((same[place], place) for place in sound)
    contestants = [Contestant(tuple(places), tuple(runs[place] for place in places)) for places in by_name.values()]
    judge = Judge([runs[place] for place in sound], [same[place] for place in sound])
    ranked = sorted(contestants, key=judge.score, reverse=True)
    alone = next((each for each in ranked if each.devices == 1), None)
    best, against = _best(ranked, alone, judge)
    over_one = judge.over_one(best, alone)
    strategy = best.result.choices.called
    alike = [each for each in ranked if each.result.choices.called == strategy]
    speeds = [(each.result.layout.workers or 1, judge.score(each)) for each in alike]
    return Verdict(
        measured=True,
        best=best,
        use=_use(best, over_one, ranked, alone, judge),
        over_one=over_one,
        against=against,
        disturbed=tuple((place, why) for place in sound for why in comparable.disturbed(runs[place].result)),
        knee=outlook.knee_under(strategy, speeds, knee_share),
        left_out=left_out,
        without=without,
        engines=_engines(runs, best, against),
    )


def _best(
    ranked: Sequence[Contestant], alone: Contestant | None, judge: Judge
) -> tuple[Contestant, tuple[Comparison, ...]]:
    """The fastest that is known to beat one device, or one that is as fast on fewer devices; and its comparisons.

    If there is none, it is the one that seems fastest.
    """

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


def _use(
    best: Contestant, over_one: Comparison | None, ranked: Sequence[Contestant], alone: Contestant | None, judge: Judge
) -> Use:
    """The recommendation. It is one device only if nothing on several is faster, as far as all repeats tell."""
    wider = [each for each in ranked if each.devices > 1]
    if not wider or (best.devices > 1 and (over_one is None or over_one.is_faster)):
        return Use.BEST
    no_faster = all(judge.is_no_faster(each, alone, len(wider)) for each in wider)
    return Use.ONE_DEVICE if no_faster else Use.NOT_KNOWN


def _left_out(runs: Sequence[LoggedRun], measured: Sequence[int], group: Sequence[int]) -> dict[Marks, list[int]]:
    left_out = dict[Marks, list[int]]()
    for place, marks in zip(measured, comparable.marks([runs[place] for place in measured]), strict=True):
        if place not in group or not comparable.sound(runs[place]):
            refused = tuple(doubt for doubt in marks.doubts if doubt in comparable.REFUSED)
            left_out.setdefault(Marks(refused, marks.differs), []).append(place)
    return left_out


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
    return Engines(tuple(at_the_top), rivals[0], min(each.odds for each in rivals), unjudged)

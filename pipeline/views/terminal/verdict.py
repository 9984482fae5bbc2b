"""Turns verdicts, of a sweep and of pairs of runs, into sentences, and what is to be said of a speed into marks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.analyze import comparable
from pipeline.analyze.comparable import Marks, Unlike
from pipeline.views.terminal.words import bare_times, brackets, clean, enumerated, listed, percent, plural, rate

if TYPE_CHECKING:
    from pipeline.analyze.verdict import Contestant, Difference, Knee, LeftOut, Overlap, Pair, Tied, Verdict

# Why a doubt about one of two speeds keeps them from being compared.
REFUSED = {
    "rehearsal": "one of them is a rehearsal",
    "oversubscribed": "one of them is oversubscribed",
    "fewer workers": "one of them was timed with fewer workers than it was to have",
}
# Why two runs tie, by what `analyze.verdict.Overlap` says of them.
TIES = {
    "repeats": "the ranges of their repeats overlap",
    "speedups": "their speedups over baselines measured in turn overlap",
    "equal runs": "equal runs may well lie as far apart",
    "unsteady": "repeats within a run vary too much",
}
# What gives a sweep a verdict whose only speeds have one doubt.
INSTEAD = {
    "rehearsal": "Where that hardware is, the same without hardware.rehearse=true has one.",
    "oversubscribed": "Try workers=... with no more than there are cores.",
}
# Probabilities below this one are all called so.
ONE_IN_A_MILLION = 1e-6


def mark_texts(marks: Marks) -> list[str]:
    """What is to be written beside a speed.

    >>> mark_texts(Marks(("rehearsal",), ("scaling", "batch rule"), "jax"))
    ['engine jax', 'rehearsal', 'differs in scaling and batch rule']
    """
    engine = [f"engine {clean(marks.engine)}"] * bool(marks.engine)
    return [*engine, *marks.doubts, *[f"differs in {' and '.join(marks.differs)}"] * bool(marks.differs)]


def unlike_text(unlike: Unlike) -> str:
    """Why the speeds of two runs say nothing of each other.

    >>> unlike_text(Unlike("model", ("mlp", "cnn"))), unlike_text(Unlike("rehearsal"))
    ('model differs (mlp, cnn)', 'one of them is a rehearsal')
    """
    return REFUSED[unlike.name] if unlike.values is None else f"{unlike.name} differs ({', '.join(unlike.values)})"


def how_often(p_value: float) -> str:
    """How often chance alone does something, as a person says it.

    >>> how_often(0.043), how_often(6.9e-05), how_often(2e-9)
    ('about once in 23 times', 'about once in 14,000 times', 'less than once in a million times')
    """
    if p_value < ONE_IN_A_MILLION:
        return "less than once in a million times"
    times = 1 / p_value
    return f"about once in {round(times, 1 - math.floor(math.log10(times))):,.0f} times"


def pair_text(number: int, other: int, pair: Pair, engines: Mapping[int, str]) -> str:
    """Which of two runs is faster, by how much, and how sure that is; with their `engines`, by number, where they have
    different ones.
    """
    from pipeline.analyze.verdict import Faster, NotAlike, NotMeasured, Tie

    differ = engines.get(number) != engines.get(other)
    named = {at: f"{at}{brackets(clean(engines.get(at, '')) * differ)}" for at in (number, other)}
    both = " and ".join(named.values())
    match pair:
        case NotMeasured(place):
            return f"{both}: not compared, since {place} was not measured"
        case NotAlike(unlike):
            return f"{both}: not compared, since {unlike_text(unlike)}"
        case Tie(why):
            return f"{both}: a tie, since {TIES[why]}"
        case Faster(fast, slow, difference):
            limit = "" if difference.repeated else f" One run of each can tell no more: {_by_chance(difference)}."
            ratio = f"{bare_times(difference.ratio)} times as fast as {named[slow]}"
            return f"{named[fast]} is {ratio}, {_sure(difference)}.{limit}"


def verdict_lines(verdict: Verdict) -> list[str]:
    """What a sweep decides.

    First one sentence: which is the fastest, by how much, how sure that is and what makes it surer; or what ties, and
    why. Then what limits it, which of several engines pays, how many workers do, and which points have no part in it.
    """
    outside = [*_unjudged(verdict), *_left_out(verdict.left_out), *_without(verdict)]
    if verdict.best is None:
        if not verdict.measured:
            return ["No verdict: no point was measured."]
        doubts = {doubt for left in verdict.left_out for doubt in left.why.doubts}
        instead = [INSTEAD[doubt] for doubt in doubts if len(doubts) == 1 and doubt in INSTEAD]
        return ["No verdict: no measured point has the speed of its hardware.", *instead, *outside]
    first = _tie(verdict.best, verdict) if verdict.ties else [_fastest(verdict.best, verdict)]
    return [*first, *_limit(verdict), *_engines(verdict), *_workers(verdict.best, verdict), *outside]


def contestant_name(contestant: Contestant) -> str:
    """What a sentence calls it."""
    result = contestant.runs[0].result
    failed = "failed after it was timed" * any(run.result.ending.status == "FAILED" for run in contestant.runs)
    where = listed(_points(contestant.places), failed)
    return f"{result.choices.called} on {plural(result.layout.workers, 'worker')} ({where})"


def _fastest(best: Contestant, verdict: Verdict) -> str:
    speed, low, high = best.interval
    marked = brackets(", ".join(comparable.doubts(best.runs[0].result.layout)))
    figures = listed(
        f"{rate(speed)} examples/s ({rate(low)} to {rate(high)}){marked}", _over_one_device([best], verdict)
    )
    name, difference = contestant_name(best), verdict.difference
    if difference is None:
        return f"{name} is the only point to judge: {figures}; type more values, such as workers=1,2, to compare it."
    next_one = f"{bare_times(difference.ratio)} times as fast as {contestant_name(verdict.slower[0])}, the next"
    return f"{name} is the fastest: {figures}, and {next_one}; {_sure(difference)}{_surer(verdict)}."


def _tie(best: Contestant, verdict: Verdict) -> list[str]:
    """What ties at the top and why, and what is behind."""
    tied = [best, *(tie.contestant for tie in verdict.ties)]
    speeds = f"{enumerated([rate(contestant.interval[0]) for contestant in tied])} examples/s"
    figures = listed(speeds, _over_one_device(tied, verdict))
    names = enumerated([contestant_name(contestant) for contestant in tied])
    lines = [f"A tie: {names} cannot be told apart, at {figures}, since {_why(verdict.ties)}{_surer(verdict)}."]
    difference = verdict.difference
    if difference is not None:
        behind, ratio = verdict.slower[0], bare_times(difference.ratio)
        # What varies much may tie, and be slower than what does not.
        which = ", the next" * all(behind.interval[0] < contestant.interval[0] for contestant in tied)
        lines.append(
            f"The first of these is {ratio} times as fast as {contestant_name(behind)}{which}, {_sure(difference)}."
        )
    return lines


def _why(ties: Sequence[Tied]) -> str:
    """Why each of them ties, those with the same reason together."""
    places: dict[Overlap, list[int]] = {}
    for tie in ties:
        places.setdefault(tie.why, []).extend(tie.contestant.places)
    if len(places) == 1:
        return TIES[ties[0].why]
    return enumerated([f"{TIES[why]} (with {_points(of)})" for why, of in places.items()])


def _over_one_device(contestants: Sequence[Contestant], verdict: Verdict) -> str:
    """How many times as fast as one device they are, where all are known and any of them is another thing.

    Of several engines, as one device under the same.
    """
    known = [contestant.speedup for contestant in contestants]
    speedups = [speedup for speedup in known if speedup is not None]
    if all(map(_on_one_device, contestants)) or len(speedups) < len(known):
        return ""
    ends = dict.fromkeys(map(bare_times, (min(speedups), max(speedups))))
    only = "only " * (max(speedups) < 1)
    of_engine = "" if verdict.engines is None else f" under {_engine(contestants[0])}"
    if len(set(map(_engine, contestants))) > 1:
        of_engine = " under the same engine"
    return f"{only}{' to '.join(ends)} times one device{of_engine}"


def _sure(difference: Difference) -> str:
    # Where nothing was run again, that is what keeps it from being surer, and not how seldom chance would do it.
    why = f", since chance alone would make such a difference {how_often(difference.p_value)}"
    return f"{difference.confidence}{why * difference.repeated}"


def _by_chance(difference: Difference) -> str:
    often = how_often(difference.p_value)
    return f"if equal runs lie as far apart as elsewhere, chance alone would make such a difference {often}"


def _surer(verdict: Verdict) -> str:
    """What to type to be surer, where more can be had."""
    from pipeline.analyze.verdict import Confidence

    if verdict.best is None or verdict.confidence is Confidence.VERY_SURE:
        return ""
    runs = max(len(contestant.runs) for contestant in (verdict.best, *(tie.contestant for tie in verdict.ties)))
    what = "to tell them apart" if verdict.ties else "to be surer"
    return f"; type sweep.repeats={max(3, runs + 2)} {what}"


def _limit(verdict: Verdict) -> list[str]:
    """What one run of each point cannot tell."""
    if verdict.difference is None or verdict.difference.repeated:
        return []
    return [f"Each point was run once, so nothing here is surer: {_by_chance(verdict.difference)}."]


def _engines(verdict: Verdict) -> list[str]:
    """Which of several engines pays, or that this cannot be told."""
    engines = verdict.engines
    if engines is None:
        return []
    if len(engines.first) > 1:
        return [f"Which engine pays cannot be told: {enumerated(list(map(clean, engines.first)))} tie."]
    if engines.rival is None or engines.difference is None:
        return []
    ratio, rival = f"{bare_times(engines.difference.ratio)} times as fast as", engines.rival
    if rival is verdict.slower[0]:
        # How sure that is was just said.
        of_its_own = f"at its best it is {ratio} {_engine(rival)} at its best"
        return [f"So of the engines {clean(engines.first[0])} pays: {of_its_own}."]
    fastest = f"{ratio} {contestant_name(rival)}, the fastest under {_engine(rival)}, {_sure(engines.difference)}"
    return [f"Of the engines {clean(engines.first[0])} pays: its fastest point is {fastest}."]


def _engine(contestant: Contestant) -> str:
    return clean(comparable.engine_of(contestant.runs[0].result))


def _workers(best: Contestant, verdict: Verdict) -> list[str]:
    """How many workers pay, as far as that can be told from what was measured."""
    first, strategy = [best, *(tie.contestant for tie in verdict.ties)], best.runs[0].result.choices.called
    counts = {_count(contestant) for contestant in first if contestant.runs[0].result.choices.called == strategy}
    if len({_on_one_device(contestant) for contestant in first}) > 1:
        names = enumerated([contestant_name(contestant) for contestant in first if _on_one_device(contestant)])
        # "One device" would be said of the slower ones, and of each engine's, too.
        which = names if verdict.engines or any(map(_on_one_device, verdict.slower)) else "one device"
        return [f"So {which} does as well, as far as this tells."]
    if len(counts) > 1:
        texts = enumerated([f"{workers}" for workers in sorted(counts)])
        return [f"How many workers pay under {strategy} cannot be told: {texts} tie."]
    if verdict.knee is not None:
        return [_knee(verdict.knee, _count(best))]
    alone = _on_one_device(best) and not any(map(_on_one_device, verdict.slower))
    return ["No point with more workers was as fast as one device."] if alone and verdict.slower else []


def _on_one_device(contestant: Contestant) -> bool:
    return _count(contestant) == 1


def _count(contestant: Contestant) -> int:
    return contestant.runs[0].result.layout.workers or 1


def _knee(knee: Knee, count: int) -> str:
    """Up to how many workers each brings enough, beside the `count` of the fastest point."""
    if knee.found is None:
        return f"Up to {knee.most} workers, the most measured, each brought {percent(knee.share)} of one alone or more."
    few, many, brought = knee.found
    asked = f"and predict.knee_share asks for {percent(knee.share)}"
    if brought < 0:
        of_them = f"from {few} to {plural(many, 'worker')} it got slower"
    elif many == few + 1:
        of_them = f"worker {many} brought {percent(brought)} of what one of the first did, {asked}"
    else:
        of_them = f"from {few} to {many} workers each brought {percent(brought)} of what one of the first did, {asked}"
    if count > few:
        return f"{plural(count, 'worker')} are the fastest under {knee.strategy}, and not efficient: {of_them}."
    return f"More than {plural(few, 'worker')} did not pay under {knee.strategy}: {of_them}."


def _unjudged(verdict: Verdict) -> list[str]:
    """Of which engines nothing can be said, before the points that have no part in the verdict and why."""
    unjudged = () if verdict.engines is None else verdict.engines.unjudged
    return [f"Whether {clean(engine)} pays cannot be told: none of its points was judged." for engine in unjudged]


def _left_out(left_out: Sequence[LeftOut]) -> list[str]:
    told = [f"{_points(left.places)} ({enumerated(mark_texts(left.why))})" for left in left_out]
    return [f"Left out of the verdict: {'; '.join(told)}."] if told else []


def _without(verdict: Verdict) -> list[str]:
    return [f"Without a speed, and so not judged: {_points(verdict.without)}."] if verdict.without else []


def _points(places: Sequence[int]) -> str:
    return f"point{'s' * (len(places) > 1)} {enumerated(list(map(str, places)))}"

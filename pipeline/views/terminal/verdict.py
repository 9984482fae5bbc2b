"""Turns verdicts, of a sweep and of pairs of runs, into sentences, and what is to be said of a speed into marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.analyze import comparable
from pipeline.analyze.comparable import Marks, Unlike
from pipeline.views.terminal.words import rate

if TYPE_CHECKING:
    from pipeline.analyze.verdict import Contestant, Difference, Knee, LeftOut, Pair, Verdict

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
    "equal runs": "equal runs lie as far apart",
}


def mark_texts(marks: Marks) -> list[str]:
    """What is to be written beside a speed.

    >>> mark_texts(Marks(("rehearsal",), ("scaling", "batch rule")))
    ['rehearsal', 'differs in scaling and batch rule']
    """
    return [*marks.doubts, *[f"differs in {' and '.join(marks.differs)}"] * bool(marks.differs)]


def unlike_text(unlike: Unlike) -> str:
    """Why the speeds of two runs say nothing of each other.

    >>> unlike_text(Unlike("model", ("mlp", "cnn"))), unlike_text(Unlike("rehearsal"))
    ('model differs (mlp, cnn)', 'one of them is a rehearsal')
    """
    return REFUSED[unlike.name] if unlike.values is None else f"{unlike.name} differs ({', '.join(unlike.values)})"


def pair_text(number: int, other: int, pair: Pair) -> str:
    """Which of two runs is faster, by how much, and how sure that is."""
    from pipeline.analyze.verdict import Faster, NotAlike, NotMeasured, Tie

    match pair:
        case NotMeasured(place):
            return f"{number} and {other}: not compared, since {place} was not measured"
        case NotAlike(unlike):
            return f"{number} and {other}: not compared, since {unlike_text(unlike)}"
        case Tie(why):
            return f"{number} and {other}: a tie, since {TIES[why]}"
        case Faster(fast, slow, difference):
            return (
                f"{fast} is {difference.ratio:.2f} times as fast as {slow}, {difference.confidence}: "
                f"{_by_chance(difference)}"
            )


def verdict_lines(verdict: Verdict) -> list[str]:
    """What a sweep decides: the best and how sure that is, or that others tie with it; the knee; what is left out."""
    left_out = _left_out(verdict.left_out)
    if verdict.best is None:
        lacks = "no measured point has the speed of its hardware" if verdict.measured else "no point was measured"
        return [f"No verdict: {lacks}.", *left_out]
    lines = []
    if verdict.ties:
        names = _and([contestant_name(contestant) for contestant in (verdict.best, *verdict.ties)])
        lines.append(f"A tie: {names} cannot be told apart. Intervals overlap, or equal runs lie as far apart.")
    came = "came out first" if verdict.ties else "is the fastest" if verdict.runner else "is the only point to judge"
    lines.append(_first(verdict.best, came))
    if verdict.runner and verdict.difference:
        found, which = verdict.difference, "the first" if verdict.ties else "it"
        lines.append(
            f"{found.confidence.capitalize()}: {which} is {found.ratio:.2f} times as fast as "
            f"{contestant_name(verdict.runner)}{', the next' * (not verdict.ties)}, {_by_chance(found)}."
        )
    return [*lines, *([_knee(verdict.knee)] if verdict.knee else []), *left_out]


def contestant_name(contestant: Contestant) -> str:
    """What a sentence calls it."""
    result = contestant.runs[0].result
    workers = result.layout.workers
    points = f"point{'s' * (len(contestant.places) > 1)} {' and '.join(map(str, contestant.places))}"
    return f"{result.choices.strategy} on {workers} worker{'s' * (workers != 1)} ({points})"


def _first(best: Contestant, came: str) -> str:
    speed, low, high = best.interval
    speedup = best.speedup
    faster = "" if speedup is None else f", {speedup:.2f} times one device"
    marked = ", ".join(comparable.doubts(best.runs[0].result.layout))
    return (
        f"{contestant_name(best)} {came}: {rate(speed)} examples/s ({rate(low)} to {rate(high)}){faster}"
        f"{f' ({marked})' * bool(marked)}."
    )


def _knee(knee: Knee) -> str:
    if knee.found is None:
        return f"Up to {knee.most} workers, the most measured, each brought {knee.share:.0%} of one alone or more."
    few, many, brought = knee.found
    return (
        f"More than {few} worker{'s' * (few != 1)} did not pay under {knee.strategy}: from {few} "
        f"to {many} each brought {max(0.0, brought):.0%} of what one of the first did, below {knee.share:.0%}."
    )


def _left_out(left_out: Sequence[LeftOut]) -> list[str]:
    told = [
        f"point{'s' * (len(left.places) > 1)} {_and(list(map(str, left.places)))} ({_and(mark_texts(left.why))})"
        for left in left_out
    ]
    return [f"Left out of the verdict: {'; '.join(told)}."] if told else []


def _by_chance(difference: Difference) -> str:
    alone = ", as far as one run of each can tell" * (not difference.repeated)
    return f"by chance with a probability of {difference.p_value:.2g}{alone}"


def _and(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""

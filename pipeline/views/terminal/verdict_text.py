"""Turns verdicts, of a sweep and of compared runs, into sentences and a table, and doubts about a speed into marks."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pipeline.analyze import comparable
from pipeline.analyze.comparable import MARGIN, Difference, Marks
from pipeline.analyze.history import LoggedRun
from pipeline.record.results import Result
from pipeline.views.terminal import words
from pipeline.views.terminal.words import bare_times, brackets, clean, columns, listed, percent, plural, rate, span

if TYPE_CHECKING:
    from pipeline.analyze.compare import Comparison, Contestant, Verdict

# Why a doubt about one of two speeds keeps them from being compared.
REFUSED = {
    "rehearsal": "one of them is a rehearsal",
    "oversubscribed": "one of them is oversubscribed",
    "fewer workers": "one of them was timed with fewer workers than it was to have",
}
# What gives a sweep a verdict whose only speeds have one doubt.
INSTEAD = {
    "rehearsal": "Where that hardware is, the same without hardware.rehearse=true has one.",
    "oversubscribed": "Try workers=... with no more than there are cores.",
}
# How sure an answer is, by its odds; with less there is none.
SURE = ((0.99, "almost certainly"), (0.95, "very likely"), (0.0, "probably"))
HEADER = ("", "run", "strategy", "workers", "examples/s", "speedup", "status")
# Of a long value, such as a list of arguments; and of what a sentence names, while the table has the rest.
MOST_CHARACTERS, MOST_NAMED = 40, 5

Row = tuple[str, tuple[object, ...]]


def mark_texts(marks: Marks) -> list[str]:
    """Returns the marks to write beside a speed."""
    engine = [f"engine {clean(marks.engine)}"] * bool(marks.engine)
    return [*engine, *marks.doubts, *[f"differs in {' and '.join(marks.differs)}"] * bool(marks.differs)]


def unlike_text(unlike: Difference) -> str:
    """Returns why the speeds of two runs are not comparable."""
    name, values = unlike
    return f"{name} differs ({', '.join(values)})" if values else REFUSED[name]


def sure(odds: float) -> str:
    """Returns how sure an answer is, in words."""
    return next(words for least, words in SURE if odds >= least)


def pair_text(number: int, other: int, pair: "Comparison | Difference | None", engines: Mapping[int, str]) -> str:
    """Returns which of two runs is faster, by how much, and how surely; with their `engines` where they differ."""
    differ = engines.get(number) != engines.get(other)
    one, two = (f"{at}{brackets(clean(engines.get(at, '')) * differ)}" for at in (number, other))
    if pair is None:
        return f"{one} and {two}: not compared, since one was not measured"
    if isinstance(pair, tuple):
        return f"{one} and {two}: not compared, since {unlike_text(pair)}"
    if pair.answer == "not known":
        within = f"{bare_times(pair.low)} to {bare_times(pair.high)}"
        return f"{one} and {two}: not known which is faster; {one} is {within} times as fast"
    if pair.answer == "as fast":
        return f"{one} and {two}: as fast, {sure(pair.odds)}, within {percent(MARGIN)}"
    fast, slow, ratio = (one, two, pair.ratio) if pair.ratio > 1 else (two, one, 1 / pair.ratio)
    return f"{fast} is {bare_times(ratio)} times as fast as {slow}, {sure(pair.odds)}"


def compared_lines(
    runs: Sequence[LoggedRun], marks: Sequence[Marks], verdicts: Sequence[str], tables: Mapping[str, Sequence[Row]]
) -> list[str]:
    """A row for each run, then who is faster, and tables: what was asked for differently, and what came out of each."""
    places, table = [str(place) for place in range(len(runs))], [[*HEADER]]
    for place, run, remarks in zip(places, runs, marks, strict=True):
        speed, mark = run.result.speed, brackets(listed(*mark_texts(remarks)))
        others = {"": place, "run": clean(run.folder.name), "workers": words.or_missing(run.result.layout.workers, str)}
        if speed.examples_per_second is not None:
            others["examples/s"] = rate(speed.examples_per_second) + brackets(words.throughput_span(speed, "-")) + mark
        if speed.speedup is not None:
            others["speedup"] = words.times(speed.speedup) + brackets(words.speedup_span(speed, "-")) + mark
        table.append(words.cells(HEADER, run.result, others))
    lines = [*columns(table, (0, 3)), "", *verdicts]
    for title, rows in tables.items():
        if rows:
            lines += ["", *columns([(title, *places), *((key, *map(_value, values)) for key, values in rows)], ())]
    return lines


def verdict_lines(verdict: "Verdict") -> list[str]:
    """Returns a sweep's verdict: first which to use and how much faster than one device it is, last what it omits."""
    unjudged = map(clean, verdict.engines.unjudged if verdict.engines else ())
    outside = [f"Whether {engine} pays cannot be told: none of its points was judged." for engine in unjudged]
    if texts := [f"{_points(places)} ({enumerated(mark_texts(why))})" for why, places in verdict.left_out.items()]:
        outside.append(f"Left out of the verdict: {'; '.join(texts)}.")
    if verdict.without:
        outside.append(f"Not ranked, without a speed: {_points(verdict.without)}.")
    if verdict.best is None:
        if not verdict.left_out:
            return ["No verdict: no point was measured."]
        doubts = {doubt for why in verdict.left_out for doubt in why.doubts}
        instead = [INSTEAD[doubt] for doubt in doubts if len(doubts) == 1 and doubt in INSTEAD]
        return ["No verdict: no measured point has the speed of its hardware.", *instead, *outside]
    by_reason = comparable.grouped((why, place) for place, why in verdict.disturbed)
    disturbed = [f"{_points(by_reason[why])} ({why})" for why in comparable.DISTURBED if why in by_reason]
    busy = [f"Disturbed: {'; '.join(disturbed)}."] * bool(disturbed)
    others = [*_others(verdict), *busy, *_engines(verdict), *_workers(verdict.best, verdict)]
    lines = [_answer(verdict.best, verdict), *others]
    unknown = any(each.answer == "not known" for each in verdict.against)
    if not verdict.against:
        lines.append("To compare it, type more values, such as workers=1,2.")
    elif unknown or confidence(verdict) != SURE[0][1]:
        quiet = ", when the machine is quiet" * bool(verdict.disturbed)
        repeats = max(3, len(verdict.best.runs) + 2)
        lines.append(f"To know more, type it again with sweep.repeats={repeats}{quiet}.")
    return [*lines, *outside]


def contestant_name(contestant: "Contestant") -> str:
    """Returns a contestant's name in a sentence."""
    result = contestant.result
    failed = "failed after it was timed" * any(run.result.ending.status == "FAILED" for run in contestant.runs)
    where = listed(_points(contestant.places), failed)
    return f"{result.choices.called} on {plural(result.layout.workers, 'worker')} ({where})"


def confidence(verdict: "Verdict") -> str:
    """Returns how sure the verdict is, in words; "" where nothing was compared."""
    odds = [each.odds for each in (verdict.over_one, *verdict.against) if each and each.answer != "not known"]
    if verdict.best is not None and verdict.use == "not known":
        return "not known"
    return sure(min(odds)) if odds else ""


def single_line(result: Result) -> str:
    """That a run on several devices did not pay, or that this is not known, and what to try; "" where it did."""
    if result.speed.speedup is None or comparable.devices_of(result) == 1 or comparable.disturbed_baseline(result):
        return ""
    from pipeline.analyze import compare

    decided = compare.decide([LoggedRun(result)], [0], 0.0)
    if (over_one := decided.over_one) is None or decided.use == "best":
        return ""
    if decided.use == "not known":
        return "not known whether it pays: the repeats are too noisy to say. Try measure.repeats=15 on a quiet machine."
    layout = result.layout
    held, batch = ("global", layout.global_batch) if layout.scaling == "strong" else ("replica", layout.replica_batch)
    larger = f", or train.{held}_batch={4 * batch}" if batch else ""
    how = "as fast as one device" if over_one.answer == "as fast" else "slower than one device"
    return f"it did not pay: {sure(over_one.odds)} {how}. Try strategy=one_device workers=1{larger}."


def _answer(best: "Contestant", verdict: "Verdict") -> str:
    busy = words.marks(best.result.layout) + "; the machine was busy meanwhile" * bool(verdict.disturbed)
    name, over_one, several = contestant_name(best), verdict.over_one, best.devices > 1
    ratio, low, high = best.speedup or ((over_one.ratio, over_one.low, over_one.high) if over_one else best.interval)
    times_one = f"{bare_times(ratio)} times{brackets(span(low, high, bare_times, ' to '))}"
    if verdict.use == "not known" and several:
        return f"Not known whether {name} is faster than one device: {times_one} is too noisy to say{busy}."
    if verdict.use == "not known":
        return f"Not known whether more than one device pays: nothing is known to beat {name}{busy}."
    if verdict.use == "one device" and several and over_one is not None:
        no_faster = f"is {bare_times(over_one.ratio)} times as fast, {sure(over_one.odds)}"
        return f"Use one device: {name}, the fastest on several, {no_faster}{busy}."
    if verdict.use == "one device":
        return f"Use {name}: nothing on more devices is faster, {confidence(verdict)}{busy}."
    if over_one is not None and several:
        return f"Use {name}: it is {sure(over_one.odds)} faster than one device, {times_one}{busy}."
    speed, low, high = best.interval
    return f"Use {name}: {rate(speed)} examples/s{brackets(span(low, high, rate, ' to '))}{busy}."


def _others(verdict: "Verdict") -> list[str]:
    lines, against = [], verdict.against
    if slower := [each for each in against if each.is_faster]:
        first, odds = slower[0], min(each.odds for each in slower)
        more = f", the next, and faster than {len(slower) - 1} more" * (len(slower) > 1)
        lines.append(f"It is {bare_times(first.ratio)} times as fast as {_named([first])}{more}, {sure(odds)}.")
    if as_fast := [each for each in against if each.answer == "as fast"]:
        how = f"within {percent(MARGIN)}, {sure(min(each.odds for each in as_fast))}"
        lines.append(f"It is as fast as {_named(as_fast)}, {how}.")
    if others := [each for each in against if each not in [*slower, *as_fast]]:
        lines.append(f"It cannot be told from {_named(others)}.")
    return lines


def _named(compared: "Sequence[Comparison]") -> str:
    names = []
    for other in (each.other for each in compared[:MOST_NAMED] if each.other):
        figure = words.times(other.speedup[0]) if other.speedup else f"{rate(other.interval[0])} examples/s"
        names.append(f"{contestant_name(other)[:-1]}, {figure})")
    return enumerated([*names, *[f"{len(compared) - MOST_NAMED} more"] * (len(compared) > MOST_NAMED)])


def _engines(verdict: "Verdict") -> list[str]:
    engines = verdict.engines
    if engines is not None and engines.first[1:]:
        return [f"Which engine pays is not known: {enumerated([*map(clean, engines.first)])} cannot be told apart."]
    if engines is None or engines.rival is None or engines.rival.other is None:
        return []
    rival = clean(comparable.engine_of(engines.rival.other.result))
    ratio = f"{bare_times(engines.rival.ratio)} times as fast as {rival}"
    return [f"Of the engines {clean(engines.first[0])} pays: {ratio}, each at its best, {sure(engines.rival.odds)}."]


def _workers(best: "Contestant", verdict: "Verdict") -> list[str]:
    unknown = [each.other.result for each in verdict.against if each.other and each.answer == "not known"]
    called, count, knee = best.result.choices.called, best.result.layout.workers or 1, verdict.knee
    alike = any(other.choices.called == called and other.layout.workers != count for other in unknown)
    if knee is None or alike or verdict.use != "best":
        return []
    share = percent(knee.share)
    if knee.found is None:
        return [f"Up to {knee.most} workers, the most measured, each brought {share} of one alone or more."]
    few, many, brought = knee.found
    each = f"each brought {percent(brought)} of what one of the first did; predict.knee_share is {share}"
    of_them = f"from {few} to {plural(many, 'worker')} {'it got slower' if brought < 0 else each}"
    if count > few:
        return [f"{plural(count, 'worker')} are the fastest under {called}, and not efficient: {of_them}."]
    return [f"More than {plural(few, 'worker')} did not pay under {called}: {of_them}."]


def _points(places: Sequence[int]) -> str:
    return f"point{'s' * (len(places) > 1)} {enumerated(list(map(str, places)))}"


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return words.figure(value)
    return words.shortened(words.MISSING if value is None else clean(value) or str(value), MOST_CHARACTERS)


def enumerated(parts: Sequence[str]) -> str:
    """The parts, with commas between and "and" before the last."""
    return ", ".join(parts[:-1]) + " and " * (len(parts) > 1) + "".join(parts[-1:])

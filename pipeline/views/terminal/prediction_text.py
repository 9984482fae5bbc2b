"""Turns predictions into lines: of one point what it would do and how that is known, of many a table and the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.analyze import outlook
from pipeline.record.predictions import FittedOn
from pipeline.record.results import Result
from pipeline.run.views import Foreseen, RunResult
from pipeline.views.terminal.words import clean, columns, duration, listed, marks, percent, plural, ranges, rate, span

if TYPE_CHECKING:
    from pipeline.analyze.calibration import Score

HEADER = ("", "strategy", "workers", "batch", "examples/s", "interval", "to finish", "cost", "energy", "status")
RIGHT = (0, 2, 3, 4, 5, 6, 7, 8)
MISSING = "-"
BEST = {"time": "fastest", "cost": "cheapest for an example", "energy": "least energy for an example"}


def predicted_lines(point: RunResult) -> list[str]:
    """Returns the prediction for one point, the parts of its step, and what it is based on."""
    result, foreseen = point.result, point.foreseen
    labelled = [
        ("predicted", _throughput(result)),
        ("interval", _width(result, foreseen) if foreseen else ""),
        ("a step", _step(foreseen) if foreseen else ""),
        ("to finish", _finish(result)),
        ("energy", _energy(result)),
        ("fitted on", _fitted_on(foreseen.fitted_on) if foreseen else ""),
        ("earlier", score_text(foreseen.score) if foreseen else ""),
        *(("note", clean(note)) for note in result.notes),
    ]
    return [f"{label:<11}{text}" for label, text in labelled if text]


def _fitted_on(fitted: FittedOn) -> str:
    """The runs that a prediction stands on, in words."""
    parameters = [f"{count:,}" for count in fitted.parameters]
    batches = [f"{batch:,}" for batch in fitted.replica_batches]
    timed = fitted.timed_step_seconds
    return (
        f"{plural(fitted.runs, 'run')}: {listed(*map(clean, fitted.strategies))}, "
        f"{listed(*map(clean, fitted.models))} of {_few(parameters)} parameters, "
        f"workers {ranges(fitted.workers)}, replica batch {_few(batches)}; on {clean(fitted.machine)}"
        f"{_left_out(fitted.left_out)}"
        f"{'' if timed is None else f'; and steps of one worker, timed now: {rate(1000 * timed)} ms'}"
    )


def predicted_rows(results: Sequence[Result]) -> list[str]:
    """A header, and a row for each point."""
    return columns([HEADER, *(_row(place, result) for place, result in enumerate(results))], RIGHT)


def outlook_lines(points: Sequence[RunResult]) -> list[str]:
    """Returns the best point by time, cost and energy, and where another worker stops paying."""
    results = [point.result for point in points]
    share = next((point.foreseen.knee_share for point in points if point.foreseen), 0.5)
    prospect = outlook.look(results, share)
    best, knee, after = prospect.best, prospect.knee, prospect.after
    lines = [f"{BEST[what].capitalize()}: point {place}, {_name(results[place])}." for what, place in best.items()]
    if knee is not None and after is not None:
        lines.append(
            f"Knee: {plural(results[knee].layout.workers, 'worker')}. Beyond, another one brings "
            f"{percent(max(0.0, after))} of what one of the first does, which is less than "
            f"predict.knee_share={share:g}."
        )
    elif prospect.alike and len({result.layout.workers for result in results}) > 1:
        lines.append(f"Knee: none among these points, at predict.knee_share={share:g}.")
    return lines


def score_text(score: Score) -> str:
    """Returns how good earlier predictions were; empty where there were none."""
    if not score.count or score.median_error is None or score.held is None:
        return ""
    return (
        f"{plural(score.count, 'prediction')} scored: off by {percent(score.median_error)} (median), "
        f"{round(score.held * score.count)} of {score.count} intervals held."
    )


def _row(place: int, result: Result) -> tuple[str, ...]:
    layout, speed, cost = result.layout, result.speed, result.cost
    return (
        str(place),
        clean(result.choices.called) or MISSING,
        MISSING if layout.workers is None else f"{layout.workers:,}",
        MISSING if layout.replica_batch is None else f"{layout.replica_batch:,}",
        MISSING if speed.examples_per_second is None else rate(speed.examples_per_second),
        span(speed.examples_per_second_low, speed.examples_per_second_high, rate, "-") or MISSING,
        MISSING if cost.seconds_to_finish is None else duration(cost.seconds_to_finish),
        MISSING if cost.cost_to_finish is None else rate(cost.cost_to_finish),
        MISSING if cost.energy_joules is None else f"{rate(cost.energy_joules / 3600)} Wh",
        clean(result.ending.status) or MISSING,
    )


def _throughput(result: Result) -> str:
    speed = result.speed
    if speed.examples_per_second is None or speed.interval_confidence is None:
        return ""
    within = span(speed.examples_per_second_low, speed.examples_per_second_high, rate, " to ")
    interval = f"{percent(speed.interval_confidence)} interval {within}"
    return f"{rate(speed.examples_per_second)} examples/s, {interval}, {clean(result.layout.scaling)} scaling"


def _width(result: Result, foreseen: Foreseen) -> str:
    """Returns the interval's width beside what equal runs differ by."""
    speed = result.speed
    middle, low, high = speed.examples_per_second, speed.examples_per_second_low, speed.examples_per_second_high
    if not middle or low is None or high is None:
        return ""
    equal = foreseen.equal
    source = f"as {equal} of them tell" if equal else "as on other machines, since none was run again here"
    wide = f"{percent((high - low) / 2 / middle)} to either side"
    return f"{wide}; equal runs lie {percent(foreseen.spread)} apart (a standard deviation, {source})"


def _step(foreseen: Foreseen) -> str:
    shares = [f"{clean(name)} {percent(value)}" for name, value in foreseen.parts.items()]
    return f"{rate(1000 * foreseen.step_seconds)} ms: {listed(*shares)}"


def _finish(result: Result) -> str:
    cost = result.cost
    if cost.seconds_to_finish is None:
        return "not known, since the examples of an epoch are not"
    price = ""
    if cost.cost_to_finish is not None:
        hosts = plural(result.layout.hosts, "host")
        price = f"{rate(cost.cost_to_finish)} at hardware.price_per_hour={cost.price_per_hour:g} on {hosts}"
    return listed(f"{duration(cost.seconds_to_finish)} of steps", price)


def _energy(result: Result) -> str:
    joules = result.cost.energy_joules
    if result.cost.seconds_to_finish is None:
        return ""
    if joules is None:
        return "not known: no run that it is fitted on could read an energy counter"
    return f"{rate(joules / 3600)} Wh, at the power of a worker that was measured"


def _left_out(count: int) -> str:
    return f" ({plural(count, 'other run')} left out)" if count else ""


def _few(values: Sequence[str]) -> str:
    """All of a few values, or the ends of many."""
    return " and ".join(values) if len(values) < 3 else f"{values[0]} to {values[-1]}"


def _name(result: Result) -> str:
    return listed(clean(result.choices.called), plural(result.layout.workers, "worker")) + marks(result.layout)

"""Turns predictions into lines: of one point what it would do and how that is known, of many a table and the best."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.analyze import outlook
from pipeline.driver import Foreseen, RunResult
from pipeline.record.files import FittedOn
from pipeline.record.results import Result
from pipeline.views.terminal.words import (
    cells,
    clean,
    columns,
    duration,
    listed,
    marks,
    per_second,
    percent,
    plural,
    ranges,
    rate,
    throughput_span,
)

if TYPE_CHECKING:
    from pipeline.analyze.calibration import Score
    from pipeline.analyze.predict import Prediction

HEADER = ("", "strategy", "workers", "batch", "examples/s", "interval", "to finish", "cost", "energy", "status")
RIGHT = (0, 2, 3, 4, 5, 6, 7, 8)
BEST = {"time": "fastest", "cost": "cheapest for an example", "energy": "least energy for an example"}


def predicted_lines(result: Result, foreseen: Foreseen) -> list[str]:
    """Returns the prediction for one point, the parts of its step, and what it is based on."""
    prediction = foreseen.prediction
    labelled = [
        ("predicted", _throughput(result)),
        ("interval", _width(prediction)),
        ("a step", _step(prediction)),
        ("to finish", _finish(result)),
        ("energy", _energy(result)),
        ("fitted on", _fitted_on(prediction.fitted_on)),
        ("earlier", score_text(foreseen.score)),
        *(("note", clean(note)) for note in prediction.notes),
    ]
    return [f"{label:<11}{text}" for label, text in labelled if text]


def _fitted_on(fitted: FittedOn) -> str:
    parameters = [f"{count:,}" for count in fitted.parameters]
    batches = [f"{batch:,}" for batch in fitted.replica_batches]
    timed = fitted.timed_step_seconds
    left_out = f" ({plural(fitted.left_out, 'other run')} left out)" if fitted.left_out else ""
    return (
        f"{plural(fitted.runs, 'run')}: {listed(*map(clean, fitted.strategies))}, "
        f"{listed(*map(clean, fitted.models))} of {_few(parameters)} parameters, "
        f"workers {ranges(fitted.workers)}, replica batch {_few(batches)}; on {clean(fitted.machine)}"
        f"{left_out}{'' if timed is None else f'; and steps of one worker, timed now: {rate(1000 * timed)} ms'}"
    )


def predicted_rows(results: Sequence[Result]) -> list[str]:
    """A header, and a row for each point."""
    return columns([HEADER, *(cells(HEADER, one, {"": str(place)}) for place, one in enumerate(results))], RIGHT)


def outlook_lines(points: Sequence[RunResult]) -> list[str]:
    """Returns the best point by time, cost and energy, and where another worker stops paying."""
    results = [point.result for point in points]
    share = next((point.foreseen.knee_share for point in points if point.foreseen), 0.5)
    lines, knee = [], outlook.knee_of(results, share)
    for what, place in outlook.best(results).items():
        layout, strategy = results[place].layout, clean(results[place].choices.called)
        name = listed(strategy, plural(layout.workers, "worker")) + marks(layout)
        lines.append(f"{BEST[what].capitalize()}: point {place}, {name}.")
    if knee is not None and knee.found is not None:
        few, _, brought = knee.found
        lines.append(
            f"Knee: {plural(few, 'worker')}. Beyond, another one brings {percent(max(0.0, brought))} of what one of "
            f"the first does, which is less than predict.knee_share={share:g}."
        )
    elif knee is not None:
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


def _throughput(result: Result) -> str:
    speed = result.speed
    if speed.examples_per_second is None or speed.interval_confidence is None:
        return ""
    interval = f"{percent(speed.interval_confidence)} interval {throughput_span(speed)}"
    return f"{per_second(speed)}, {interval}, {clean(result.layout.scaling)} scaling"


def _width(prediction: Prediction) -> str:
    equal = prediction.equal
    source = f"as {equal} of them tell" if equal else "as on other machines, since none was run again here"
    wide = f"{percent((prediction.high - prediction.low) / 2 / prediction.examples_per_second)} to either side"
    return f"{wide}; equal runs lie {percent(prediction.spread)} apart (a standard deviation, {source})"


def _step(prediction: Prediction) -> str:
    shares = [f"{clean(name)} {percent(value)}" for name, value in prediction.parts.items()]
    return f"{rate(1000 * prediction.step_seconds)} ms: {listed(*shares)}"


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
    if result.cost.seconds_to_finish is None:
        return ""
    if (joules := result.cost.energy_joules) is None:
        return "not known: no run that it is fitted on could read an energy counter"
    return f"{rate(joules / 3600)} Wh, at the power of a worker that was measured"


def _few(values: Sequence[str]) -> str:
    return " and ".join(values) if len(values) < 3 else f"{values[0]} to {values[-1]}"

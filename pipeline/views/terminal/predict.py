"""Turns predictions into lines: of one point what it would do and how that is known, of many a table and the best."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.analyze import outlook
from pipeline.views.terminal.words import (
    clean,
    columns,
    duration,
    entries,
    items,
    listed,
    marks,
    number,
    percent,
    plural,
    ranges,
    rate,
    span,
    whole,
)

Result = Mapping[str, Any]

HEADER = ("", "strategy", "workers", "batch", "examples/s", "interval", "to finish", "cost", "energy", "status")
RIGHT = (0, 2, 3, 4, 5, 6, 7, 8)
MISSING = "-"
BEST = {"time": "fastest", "cost": "cheapest for an example", "energy": "least energy for an example"}


def predicted_lines(result: Result) -> list[str]:
    """What one point would do, what its step would be made of, and what that stands on."""
    labelled = [
        ("predicted", _throughput(result)),
        ("a step", _step(result)),
        ("to finish", _finish(result)),
        ("energy", _energy(result)),
        ("fitted on", _fitted_on(result.get("fitted_on"))),
        ("earlier", score_text(result.get("score") or {})),
        *(("note", clean(note)) for note in items(result.get("notes"))),
    ]
    return [f"{label:<11}{text}" for label, text in labelled if text]


def _fitted_on(fitted: object) -> str:
    """The runs that a prediction stands on, in words."""
    about = dict(entries(fitted))
    runs = whole(about.get("runs"))
    if not runs:
        return ""
    parameters = [f"{whole(item) or 0:,}" for item in items(about.get("parameters"))]
    batches = [f"{whole(item) or 0:,}" for item in items(about.get("replica_batches"))]
    workers = [whole(item) or 0 for item in items(about.get("workers"))]
    timed = number(about.get("timed_step_seconds"))
    return (
        f"{plural(runs, 'run')}: {listed(*map(clean, items(about.get('strategies'))))}, "
        f"{listed(*map(clean, items(about.get('models'))))} of {_few(parameters)} parameters, "
        f"workers {ranges(workers)}, replica batch {_few(batches)}; on {clean(about.get('machine'))}"
        f"{_left_out(whole(about.get('left_out')))}"
        f"{'' if timed is None else f'; and steps of one worker, timed now: {rate(1000 * timed)} ms'}"
    )


def predicted_rows(results: Sequence[Result]) -> list[str]:
    """A header, and a row for each point."""
    return columns([HEADER, *(_row(place, result) for place, result in enumerate(results))], RIGHT)


def outlook_lines(results: Sequence[Result]) -> list[str]:
    """Which point is the best at what, and where another worker stops paying."""
    share = next((result["knee_share"] for result in results if "knee_share" in result), 0.5)
    made = outlook.look(results, share)
    best, knee, after = made.best, made.knee, made.after
    lines = [f"{BEST[what].capitalize()}: point {place}, {_name(results[place])}." for what, place in best.items()]
    if knee is not None and after is not None:
        workers = whole(results[knee].get("workers")) or 0
        lines.append(
            f"Knee: {plural(workers, 'worker')}. Beyond, another one brings {percent(max(0.0, after))} of what one of "
            f"the first does, which is less than predict.knee_share={share:g}."
        )
    elif made.alike and len({whole(result.get("workers")) for result in results}) > 1:
        lines.append(f"Knee: none among these points, at predict.knee_share={share:g}.")
    return lines


def score_text(score: Result) -> str:
    """How good earlier predictions were; empty where there were none."""
    count, error, held = whole(score.get("count")), number(score.get("median_error")), number(score.get("held"))
    if not count or error is None or held is None:
        return ""
    return f"{plural(count, 'prediction')} scored: off by {percent(error)} (median), {percent(held)} of intervals held."


def _row(place: int, result: Result) -> tuple[str, ...]:
    speed, batch = number(result.get("examples_per_second")), whole(result.get("replica_batch"))
    workers = whole(result.get("workers"))
    seconds, price = number(result.get("seconds_to_finish")), number(result.get("cost_to_finish"))
    joules = number(result.get("energy_joules"))
    return (
        str(place),
        clean(result.get("strategy")) or MISSING,
        MISSING if workers is None else f"{workers:,}",
        MISSING if batch is None else f"{batch:,}",
        MISSING if speed is None else rate(speed),
        span(result.get("examples_per_second_low"), result.get("examples_per_second_high"), rate, "-") or MISSING,
        MISSING if seconds is None else duration(seconds),
        MISSING if price is None else rate(price),
        MISSING if joules is None else f"{rate(joules / 3600)} Wh",
        clean(result.get("status")) or MISSING,
    )


def _throughput(result: Result) -> str:
    speed, confidence = number(result.get("examples_per_second")), number(result.get("interval_confidence"))
    if speed is None or confidence is None:
        return ""
    within = span(result.get("examples_per_second_low"), result.get("examples_per_second_high"), rate, " to ")
    return f"{rate(speed)} examples/s, {percent(confidence)} interval {within}, {clean(result.get('scaling'))} scaling"


def _step(result: Result) -> str:
    seconds = number(result.get("step_seconds"))
    shares = [f"{name} {percent(value)}" for name, entry in entries(result.get("parts")) if (value := number(entry))]
    return "" if seconds is None else f"{rate(1000 * seconds)} ms: {listed(*shares)}"


def _finish(result: Result) -> str:
    seconds, price = number(result.get("seconds_to_finish")), number(result.get("cost_to_finish"))
    if seconds is None:
        return "not known, since the examples of an epoch are not"
    return listed(
        f"{duration(seconds)} of steps",
        "" if price is None else f"{rate(price)} at hardware.price_per_hour={result.get('price_per_hour'):g} on "
        f"{plural(whole(result.get('hosts')), 'host')}",
    )  # fmt: skip


def _energy(result: Result) -> str:
    joules = number(result.get("energy_joules"))
    if number(result.get("seconds_to_finish")) is None:
        return ""
    if joules is None:
        return "not known: no run that it is fitted on could read an energy counter"
    return f"{rate(joules / 3600)} Wh, at the power of a worker that was measured"


def _left_out(count: int | None) -> str:
    return f" ({plural(count, 'other run')} left out)" if count else ""


def _few(values: Sequence[str]) -> str:
    """All of a few values, or the ends of many."""
    return " and ".join(values) if len(values) < 3 else f"{values[0]} to {values[-1]}"


def _name(result: Result) -> str:
    return listed(clean(result.get("strategy")), plural(whole(result.get("workers")), "worker")) + marks(result)

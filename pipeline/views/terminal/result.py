"""Turns the result of one run, or what is predicted of it, into what a person reads."""

from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.analyze import comparable
from pipeline.config import offered
from pipeline.driver import Foreseen, RunResult
from pipeline.record.findings import Explanation, Pace
from pipeline.record.results import Result
from pipeline.views.terminal import words
from pipeline.views.terminal.plan_text import batch_text
from pipeline.views.terminal.verdict_text import single_line
from pipeline.views.terminal.words import clean, duration, listed, marks, named, percent, plural, ranges, rate, span

if TYPE_CHECKING:
    from rich.text import Text

    from pipeline.analyze.calibration import Score

LEAST_SHARE, LEAST_SAID = 0.01, 0.005  # that a sweep's table tells, and that is called negative or another efficiency
NEGATIVE = "A negative part takes less of a step here than on one device, and so makes up for others."
# Others: yellow.
STATUS_COLOURS = {"FINISHED": "green", "PLANNED": "", "PREDICTED": "", "FAILED": "red", "KILLED": "red"}


def result_table(point: RunResult, width: int) -> "Text":
    """Returns the table under a run: its speed, against what, how sure that is, and where to look."""
    from rich.text import Text

    rows, lines = [row for row in _rows(point) if row[1]], []
    left = max(len(label) for label, _ in rows) + 2
    for place, (label, text) in enumerate(rows):
        for number, line in enumerate(text.splitlines()):
            labelled = f"{'' if number else label:<{left}}{line}"
            lines.append(Text("\n".join(words.fitted(labelled, width, left)), "" if place else "bold"))
            if not number:
                lines[-1].stylize("dim" if place else STATUS_COLOURS.get(label, "yellow"), 0, len(label))
    return Text("\n").join(lines)


def _rows(point: RunResult) -> list[tuple[str, str]]:
    """(label, text) for each line of the table; what is not known has no text."""
    result, speed, training = point.result, point.result.speed, point.result.training
    chosen = result.choices
    model, data, strategy, hardware = map(clean, (chosen.model, chosen.data, chosen.called, chosen.hardware))
    workers, processes = plural(result.layout.workers, "worker"), plural(result.layout.processes, "process")
    parts = (" on ", model, data), (" on ", strategy, hardware), (" in ", workers, processes)
    headline = listed(*(between.join(filter(None, pair)) for between, *pair in parts)) + marks(result.layout)
    folder, finished = clean(point.folder) if point.folder.name else "", result.finished
    logs = f"{folder}: events.jsonl, and a .log of each process" if folder else ""
    epochs = plural(training.epochs, "epoch")
    if training.stopped_by is not None:
        epochs = f"{training.epochs} of {plural(training.planned_epochs, 'epoch')}"
    phases = (("start", training.seconds_startup), ("train", training.seconds_training))
    saved = ("model", training.saved), ("sample", training.sample)
    return [
        (clean(result.ending.status) or "UNKNOWN", headline.strip() or "a run"),
        ("error", "" if finished else "\n".join(words.lines_of(result.ending.error)) or "no reason was given"),
        ("look at", "" if finished else clean(result.ending.log) or logs),
        ("verdict", single_line(result)),
        *_speed_rows(result),
        ("profile", "\n".join(profile_lines(result.profile))),
        ("lost", "\n".join(explained_lines(result.explained, speed.efficiency))),
        *_asynchronous_rows(result),
        ("training", listed(epochs, named("loss", training.loss), words.pairs(training.metrics))),
        ("validation", listed(named("loss", training.val_loss), words.pairs(training.val_metrics))),
        ("time", listed(*(f"{duration(value)} to {what}" for what, value in phases if value is not None))),
        ("survived", _survived(result)),
        *(("note", clean(note)) for note in result.notes),
        ("folder", folder if finished else ""),
        *((name, f"{folder}/{path}" if folder else path) for name, value in saved if (path := clean(value))),
        ("MLflow", tracked(clean(result.mlflow_run_id))),
        ("tracking", clean(result.tracking_note)),
    ]


def profile_lines(profile: Pace | None) -> list[str]:
    """Returns which of the two sets the pace, what there is to gain, and their rates.

    >>> profile_lines(Pace(480.0, 9000.0, "input", 9000.0))
    ['input-bound: the model alone trains 9,000 examples/s', \
'input alone 480 examples/s, model alone 9,000 examples/s']
    """
    if profile is None:
        return []
    pace, ceiling = f"{profile.bound}-bound", profile.ceiling_examples_per_second
    if profile.bound == "neither":
        pace = "neither the input nor the model clearly sets the pace"
    elif ceiling is not None:
        other = "the input alone makes" if profile.bound == "model" else "the model alone trains"
        pace = f"{pace}: {other} {rate(ceiling)} examples/s"
    fed, trained = profile.input_examples_per_second, profile.model_examples_per_second
    return [pace, f"input alone {rate(fed)} examples/s, model alone {rate(trained)} examples/s"]


def explained_lines(explained: Explanation | None, efficiency: float | None = None) -> list[str]:
    """Returns the advice, the shares of a step that are lost, the largest first, and the straggler.

    Beside them stand what a negative part means, and how they fit the `efficiency` of training's first steps.
    """
    if explained is None:
        return []
    largest_first = sorted(explained.parts, key=lambda part: -part.share)
    parts = [f"{clean(part.name)} {_share(part.share, part.low, part.high)}" for part in largest_first]
    lost = _share(explained.lost, explained.lost_low, explained.lost_high)
    lines = [clean(explained.advice), f"Lost to scaling, as shares of a step's time: {lost} = {listed(*parts)}"]
    if any(part.share <= -LEAST_SAID for part in explained.parts):
        lines.append(NEGATIVE)
    left = 1 - explained.lost
    if efficiency is not None and abs(efficiency - left) >= LEAST_SAID:
        again = f"{percent(left)}, as timed once more after training"
        lines.append(f"That leaves an efficiency of {again}; its first steps had {percent(efficiency)}.")
    if straggler := clean(explained.straggler):
        lines.append(f"{straggler} is behind the others.")
    return [line for line in lines if line]


def explained_line(explained: Explanation | None) -> str:
    """Returns the largest shares of a step that are lost, in a line; empty where nothing was explained."""
    if explained is None:
        return ""
    shown = sorted((part for part in explained.parts if abs(part.share) >= LEAST_SHARE), key=lambda part: -part.share)
    parts = listed(*(f"{clean(part.name)} {percent(part.share)}" for part in shown))
    return f"lost {percent(explained.lost)}{' = ' * bool(parts)}{parts}"


def _share(share: float, low: float, high: float) -> str:
    return f"{percent(share)}{words.brackets(span(low, high, percent, ' to '))}"


def _speed_rows(result: Result) -> list[tuple[str, str]]:
    def interval(within: str) -> str:
        share = speed.interval_confidence
        return within if not within or share is None else f"{percent(share)} interval {within}"

    speed, layout = result.speed, result.layout
    percentiles = (("p50", speed.step_ms_p50), ("p95", speed.step_ms_p95), ("p99", speed.step_ms_p99))
    throughput, speedup = "not measured" * result.finished, "- (no baseline to compare with)" * result.finished
    efficiency = baseline = ""
    if speed.examples_per_second is not None:
        within = interval(words.throughput_span(speed))
        throughput = listed(words.per_second(speed), within, plural(speed.repeats, "repeat"))
    if speed.speedup is not None:
        within = interval(span(speed.speedup_low, speed.speedup_high, words.times, " to "))
        scaling = f"{clean(layout.scaling) or 'unknown'} scaling"
        speedup = listed(f"{words.times(speed.speedup)}{marks(layout)}", within, scaling)
    if comparable.disturbed_baseline(result):
        efficiency = "not known: the baseline was disturbed, since the speedup is more than there are devices"
    elif (share := speed.efficiency) is not None:
        ends = (speed.speedup_low, speed.speedup_high)
        low, high = (None if end is None or not speed.speedup else end * share / speed.speedup for end in ends)
        devices = plural(layout.devices or layout.replicas, "device")
        of_devices = f"{percent(share)}{f' of {devices}' * bool(devices)}{marks(layout)}"
        efficiency = listed(of_devices, interval(span(low, high, percent, " to ")))
    if (one := speed.baseline_examples_per_second) is not None:
        baseline = listed(f"{rate(one)} examples/s on one device, no strategy", clean(speed.baseline_source))
    wait = "" if (share := result.input.wait) is None else f"{percent(share)} of the step time"
    shares = [(value, clean(name)) for name, value in result.input.wait_by_worker.items()]
    longest = f"most of all {max(shares)[1]}" if len(shares) > 1 else ""
    return [
        ("throughput", throughput),
        ("speedup", speedup),
        ("efficiency", efficiency),
        ("baseline", baseline),
        ("batch", batch_text(layout)),
        ("step time", listed(*(f"{name} {rate(value)} ms" for name, value in percentiles if value is not None))),
        ("input wait", wait and listed(wait, longest, "input-bound" * bool(result.input.bound))),
    ]


def _asynchronous_rows(result: Result) -> list[tuple[str, str]]:
    rows, stale = [], result.staleness
    if stale.staleness_mean is not None and stale.staleness_max is not None:
        updates = f"{rate(stale.staleness_mean) if stale.staleness_mean else '0'} updates by others"
        between = f"between reading and updating, at most {stale.staleness_max:,}"
        rows.append(("staleness", f"asynchronous: {updates} {between}"))
    if stale.steps is not None and result.layout.asynchronous:
        shares = listed(*(f"{count:,} by {clean(worker)}" for worker, count in stale.worker_steps.items()))
        again = max(0, (stale.updates or 0) - stale.steps)
        made_again = f"{plural(again, 'update')} made again" * bool(again)
        rows.append(("steps", listed(f"{stale.steps:,}: {shares}", made_again)))
    return rows


def _survived(result: Result) -> str:
    survival, goodput, at_end = result.survival, result.survival.goodput, result.survival.workers_at_end
    events = listed(
        f"resumed {plural(survival.resumed, 'time')}" if survival.resumed else "",
        plural(survival.restarts or None, "restart"),
        plural(survival.rollbacks or None, "rollback"),
        f"{plural(survival.steps_repeated, 'step')} made twice" if survival.steps_repeated else "",
    )
    return events and listed(
        events,
        f"{plural(at_end, 'worker')} at the end" if at_end != result.layout.workers else "",
        "" if goodput is None else f"{percent(goodput)} of the time in steps that count",
    )


def tracked(run_id: str) -> str:
    """A run's id in MLflow, and how to look at it; empty without one."""
    is_checkout = offered.folder().parent == Path.cwd() and Path("Makefile").is_file()
    typed = "make ui" if is_checkout else "python -m pipeline ui"
    return f"run {run_id}; to browse and compare: {typed}" if run_id else ""


def predicted_lines(result: Result, foreseen: Foreseen) -> list[str]:
    """Returns the prediction for one point, the parts of its step, and what it is based on."""
    speed, cost, prediction = result.speed, result.cost, foreseen.prediction
    throughput = energy = price = ""
    finish = "not known, since the examples of an epoch are not"
    if speed.examples_per_second is not None and speed.interval_confidence is not None:
        within = f"{percent(speed.interval_confidence)} interval {words.throughput_span(speed)}"
        throughput = f"{words.per_second(speed)}, {within}, {clean(result.layout.scaling)} scaling"
    if cost.seconds_to_finish is not None:
        if cost.cost_to_finish is not None:
            hosts = plural(result.layout.hosts, "host")
            price = f"{rate(cost.cost_to_finish)} at hardware.price_per_hour={cost.price_per_hour:g} on {hosts}"
        finish = listed(f"{duration(cost.seconds_to_finish)} of steps", price)
        energy = "not known: no run that it is fitted on could read an energy counter"
        if cost.energy_joules is not None:
            energy = f"{rate(cost.energy_joules / 3600)} Wh, at the power of a worker that was measured"
    wide = f"{percent((prediction.high - prediction.low) / 2 / prediction.examples_per_second)} to either side"
    equal = prediction.equal
    source = f"as {equal} of them tell" if equal else "as on other machines, since none was run again here"
    parts = listed(*(f"{clean(name)} {percent(value)}" for name, value in prediction.parts.items()))
    return words.labelled([
        ("predicted", throughput),
        ("interval", f"{wide}; equal runs lie {percent(prediction.spread)} apart (a standard deviation, {source})"),
        ("a step", f"{rate(1000 * prediction.step_seconds)} ms: {parts}"),
        ("to finish", finish),
        ("energy", energy),
        ("fitted on", _fitted_on(foreseen)),
        ("earlier", score_text(foreseen.score)),
        *(("note", clean(note)) for note in prediction.notes),
    ])  # fmt: skip


def _fitted_on(foreseen: Foreseen) -> str:
    def few(values: tuple[int, ...]) -> str:
        texts = [f"{value:,}" for value in values]
        return " and ".join(texts) if len(texts) < 3 else f"{texts[0]} to {texts[-1]}"

    fitted, timed = foreseen.prediction.fitted_on, foreseen.prediction.fitted_on.timed_step_seconds
    left_out = f" ({plural(fitted.left_out, 'other run')} left out)" if fitted.left_out else ""
    return (
        f"{plural(fitted.runs, 'run')}: {listed(*map(clean, fitted.strategies))}, "
        f"{listed(*map(clean, fitted.models))} of {few(fitted.parameters)} parameters, "
        f"workers {ranges(fitted.workers)}, replica batch {few(fitted.replica_batches)}; on {clean(fitted.machine)}"
        f"{left_out}{'' if timed is None else f'; and steps of one worker, timed now: {rate(1000 * timed)} ms'}"
    )


def score_text(score: "Score") -> str:
    """Returns how good earlier predictions were; empty where there were none."""
    if not score.count or score.median_error is None or score.held is None:
        return ""
    return (
        f"{plural(score.count, 'prediction')} scored: off by {percent(score.median_error)} (median), "
        f"{round(score.held * score.count)} of {score.count} intervals held."
    )

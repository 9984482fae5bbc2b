"""Turns a run's result, the values of result.json, into what a person reads after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pipeline.analyze import comparable
from pipeline.config import offered
from pipeline.driver import RunResult
from pipeline.record.findings import Explanation, LostShare, Pace
from pipeline.record.results import Layout, Result, Speed, Training
from pipeline.views.terminal.verdict_text import single_line
from pipeline.views.terminal.words import (
    Fitted,
    brackets,
    clean,
    duration,
    lines_of,
    listed,
    marks,
    named,
    pairs,
    per_second,
    percent,
    plural,
    rate,
    span,
    texts,
    throughput_span,
    times,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

# Parts with a smaller share are not told in a sweep's table.
LEAST_SHARE = 0.01
# Smaller ones are not called negative, nor two efficiencies different.
LEAST_SAID = 0.005
NEGATIVE = "A negative part takes less of a step here than on one device, and so makes up for others."
STATUS_COLOURS = {"FINISHED": "green", "FAILED": "red", "KILLED": "red"}  # others: yellow


def result_table(point: RunResult) -> RenderableType:
    """Returns the table under a run: its speed, against what, how sure that is, and where to look."""
    return Fitted(partial(_labelled_texts, result_rows(point)))


def result_rows(point: RunResult) -> list[tuple[str, str]]:
    """(label, text) for each line of the table; the first label is the status. What is not known is left out."""
    result, speed, layout = point.result, point.result.speed, point.result.layout
    folder = clean(point.folder) if point.folder.name else ""
    status, finished, training = clean(result.ending.status) or "UNKNOWN", result.finished, result.training
    logs = f"{folder}: events.jsonl, and a .log of each process" if folder else ""
    trained = listed(_epochs(training), named("loss", training.loss), pairs(training.metrics))
    percentiles = (("p50", speed.step_ms_p50), ("p95", speed.step_ms_p95), ("p99", speed.step_ms_p99))
    phases = (("start", training.seconds_startup), ("train", training.seconds_training))
    rows = [
        ("error", "" if finished else "\n".join(lines_of(result.ending.error)) or "no reason was given"),
        ("look at", "" if finished else clean(result.ending.log) or logs),
        ("verdict", single_line(result)),
        ("throughput", _throughput(speed) or "not measured" * finished),
        ("speedup", _speedup(speed, layout) or "- (no baseline to compare with)" * finished),
        ("efficiency", _efficiency(result)),
        ("baseline", _baseline(speed)),
        ("batch", batch_text(layout)),
        ("step time", listed(*(f"{name} {rate(value)} ms" for name, value in percentiles if value is not None))),
        ("input wait", _input_wait(result)),
        *_labelled("profile", profile_lines(result.profile)),
        *_labelled("lost", explained_lines(result.explained, speed.efficiency)),
        ("staleness", _staleness(result)),
        ("steps", _steps_of_workers(result)),
        ("training", trained),
        ("validation", listed(named("loss", training.val_loss), pairs(training.val_metrics))),
        ("time", listed(*(f"{duration(value)} to {what}" for what, value in phases if value is not None))),
        ("survived", _survived(result)),
        *(("note", clean(note)) for note in result.notes),
        ("folder", folder if finished else ""),
        ("model", _joined(folder, clean(training.saved))),
        ("sample", _joined(folder, clean(training.sample))),
        ("MLflow", tracked(clean(result.tracked.mlflow_run_id))),
        ("tracking", clean(result.tracked.tracking_note)),
    ]
    return [(status, _what(result)), *((label, text) for label, text in rows if text)]


def profile_lines(profile: Pace | None) -> list[str]:
    """Returns which of the two sets the pace, what there is to gain, and their rates.

    >>> profile_lines(Pace(480.0, 9000.0, "input", 9000.0))
    ['input-bound: the model alone trains 9,000 examples/s', \
'input alone 480 examples/s, model alone 9,000 examples/s']
    """
    if profile is None:
        return []
    fed, trained = profile.input_examples_per_second, profile.model_examples_per_second
    return [profile_line(profile), f"input alone {rate(fed)} examples/s, model alone {rate(trained)} examples/s"]


def profile_line(profile: Pace | None) -> str:
    """The first of these lines; empty where nothing was profiled."""
    if profile is None:
        return ""
    if profile.bound == "neither":
        return "neither the input nor the model clearly sets the pace"
    if (ceiling := profile.ceiling_examples_per_second) is None:
        return f"{profile.bound}-bound"
    other = "the input alone makes" if profile.bound == "model" else "the model alone trains"
    return f"{profile.bound}-bound: {other} {rate(ceiling)} examples/s"


def explained_lines(explained: Explanation | None, efficiency: float | None = None) -> list[str]:
    """Returns the advice, the shares of a step that are lost, the largest first, and the straggler.

    Beside them stand what a negative part means, and how they fit the `efficiency` of training's first steps.

    >>> parts = [LostShare("contention", -0.05, -0.1, -0.01), LostShare("communication", 0.5, 0.48, 0.52)]
    >>> for line in explained_lines(Explanation(0.45, 0.4, 0.5, parts, None, "worker 1", "Try less."), 0.6):
    ...     print(line)
    Try less.
    Lost to scaling, as shares of a step's time: 45% (40% to 50%) = communication 50% (48% to 52%), contention -5.0% \
(-10% to -1.0%)
    A negative part takes less of a step here than on one device, and so makes up for others.
    That leaves an efficiency of 55%, as timed once more after training; its first steps had 60%.
    worker 1 is behind the others.
    """
    if explained is None:
        return []
    parts = [f"{clean(part.name)} {_share(part.share, part.low, part.high)}" for part in _largest_first(explained)]
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
    shown = [part for part in _largest_first(explained) if abs(part.share) >= LEAST_SHARE]
    parts = listed(*(f"{clean(part.name)} {percent(part.share)}" for part in shown))
    return f"lost {percent(explained.lost)}{' = ' * bool(parts)}{parts}"


def _labelled_texts(rows: Sequence[tuple[str, str]], width: int) -> Iterator[Text]:
    left = max(len(label) for label, _ in rows) + 2
    for place, (label, text) in enumerate(rows):
        for number, line in enumerate(text.splitlines() or [""]):
            labelled = f"{label * (not number):<{left}}{line}"
            for part, shown in enumerate(texts(labelled, width, "" if place else "bold", left)):
                if not part and not number:
                    shown.stylize("dim" if place else STATUS_COLOURS.get(label, "yellow"), 0, len(label))
                yield shown


def _epochs(training: Training) -> str:
    trained, planned = plural(training.epochs, "epoch"), plural(training.planned_epochs, "epoch")
    return trained if training.stopped_by is None else f"{training.epochs} of {planned}"


def _labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    return [("" if place else label, line) for place, line in enumerate(lines)]


def _what(result: Result) -> str:
    chosen = result.choices
    model, data, strategy, hardware = map(clean, (chosen.model, chosen.data, chosen.called, chosen.hardware))
    workers, processes = plural(result.layout.workers, "worker"), plural(result.layout.processes, "process")
    parts = (" on ", model, data), (" on ", strategy, hardware), (" in ", workers, processes)
    what = listed(*(between.join(filter(None, pair)) for between, *pair in parts))
    return f"{what}{marks(result.layout)}".strip() or "a run"


def _throughput(speed: Speed) -> str:
    if speed.examples_per_second is None:
        return ""
    return listed(per_second(speed), _interval(speed, throughput_span(speed)), plural(speed.repeats, "repeat"))


def _speedup(speed: Speed, layout: Layout) -> str:
    if speed.speedup is None:
        return ""
    within = span(speed.speedup_low, speed.speedup_high, times, " to ")
    scaling = f"{clean(layout.scaling) or 'unknown'} scaling"
    return listed(f"{times(speed.speedup)}{marks(layout)}", _interval(speed, within), scaling)


def _survived(result: Result) -> str:
    survival = result.survival
    if not any((survival.resumed, survival.restarts, survival.rollbacks, survival.steps_repeated)):
        return ""
    at_end = survival.workers_at_end
    return listed(
        f"resumed {plural(survival.resumed, 'time')}" if survival.resumed else "",
        plural(survival.restarts or None, "restart"),
        plural(survival.rollbacks or None, "rollback"),
        f"{plural(survival.steps_repeated, 'step')} made twice" if survival.steps_repeated else "",
        f"{plural(at_end, 'worker')} at the end" if at_end != result.layout.workers else "",
        "" if survival.goodput is None else f"{percent(survival.goodput)} of the time in steps that count",
    )


def _efficiency(result: Result) -> str:
    value, speed = result.speed.efficiency, result.speed
    if comparable.disturbed_baseline(result):
        return "not known: the baseline was disturbed, since the speedup is more than there are devices"
    if value is None:
        return ""
    ends = (speed.speedup_low, speed.speedup_high)
    low, high = (None if end is None or not speed.speedup else end * value / speed.speedup for end in ends)
    devices = plural(result.layout.devices or result.layout.replicas, "device")
    share = f"{percent(value)} of {devices}" if devices else percent(value)
    return listed(f"{share}{marks(result.layout)}", _interval(speed, span(low, high, percent, " to ")))


def _baseline(speed: Speed) -> str:
    if (value := speed.baseline_examples_per_second) is None:
        return ""
    return listed(f"{rate(value)} examples/s on one device, no strategy", clean(speed.baseline_source))


def batch_text(layout: Layout) -> str:
    """Returns the examples of a step, on each replica and over all of them; empty where they are not known."""
    replicas = plural(layout.replicas, "replica")
    if layout.replica_batch is None or layout.global_batch is None or not replicas:
        return ""
    if layout.asynchronous:
        return f"{layout.replica_batch:,} a step, which one of {plural(layout.workers, 'worker')} makes"
    return f"{layout.replica_batch:,} x {replicas} = {layout.global_batch:,} a step"


def _input_wait(result: Result) -> str:
    if (share := result.input.wait) is None:
        return ""
    shares = [(value, clean(name)) for name, value in result.input.wait_by_worker.items()]
    longest = f"most of all {max(shares)[1]}" if len(shares) > 1 else ""
    return listed(f"{percent(share)} of the step time", longest, "input-bound" * bool(result.input.bound))


def _staleness(result: Result) -> str:
    mean, largest = result.staleness.staleness_mean, result.staleness.staleness_max
    if mean is None or largest is None:
        return ""
    updates = f"{rate(mean) if mean else '0'} updates by others"
    return f"asynchronous: {updates} between reading and updating, at most {largest:,}"


def _steps_of_workers(result: Result) -> str:
    steps, updates, of_worker = result.staleness.steps, result.staleness.updates, result.staleness.worker_steps
    if steps is None or not result.layout.asynchronous:
        return ""
    shares = listed(*(f"{count:,} by {clean(worker)}" for worker, count in of_worker.items()))
    again = max(0, (updates or 0) - steps)
    return listed(f"{steps:,}: {shares}", f"{plural(again, 'update')} made again" * bool(again))


def _interval(speed: Speed, within: str) -> str:
    confidence = speed.interval_confidence
    return within if not within or confidence is None else f"{percent(confidence)} interval {within}"


def _joined(folder: str, path: str) -> str:
    return f"{folder}/{path}" if folder and path else path


def tracked(run_id: str) -> str:
    """A run's id in MLflow, and how to look at it; empty without one."""
    typed = "make ui" if offered.is_checkout_here() else "python -m pipeline ui"
    return f"run {run_id}; to browse and compare: {typed}" if run_id else ""


def _share(share: float, low: float, high: float) -> str:
    return f"{percent(share)}{brackets(span(low, high, percent, ' to '))}"


def _largest_first(explained: Explanation) -> list[LostShare]:
    return sorted(explained.parts, key=lambda part: part.share, reverse=True)

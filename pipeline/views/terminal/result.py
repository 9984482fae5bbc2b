"""Turns a run's result, the values of result.json, into what a person reads after it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.views.terminal.explained import explained_lines
from pipeline.views.terminal.profile import profile_lines
from pipeline.views.terminal.words import (
    clean,
    duration,
    entries,
    items,
    lines_of,
    listed,
    marks,
    named,
    number,
    pairs,
    percent,
    plural,
    rate,
    span,
    times,
    whole,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

STATUS_COLOURS = {"FINISHED": "green", "FAILED": "red", "KILLED": "red"}  # others: yellow


def result_table(result: Mapping[str, Any]) -> RenderableType:
    """What a run reached, against what, how sure that is, and where to look."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    (status, what), *rows = result_rows(result)
    grid.add_row(Text(status, style=f"bold {STATUS_COLOURS.get(status, 'yellow')}"), Text(what, style="bold"))
    for label, text in rows:
        grid.add_row(Text(label, style="dim"), Text(text))
    return grid


def result_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text) for each line of the table; the first label is the status. What is not known is left out.

    `log` and `saved`, the paths of the log to look at and of the trained model, may be missing.
    """
    status, folder = clean(result.get("status")) or "UNKNOWN", clean(result.get("folder"))
    finished = status == "FINISHED"
    trained = listed(
        plural(whole(result.get("epochs")), "epoch"),
        named("loss", result.get("loss")),
        pairs(result.get("metrics")),
    )
    rows = [
        ("error", "" if finished else "\n".join(lines_of(result.get("error"))) or "no reason was given"),
        ("look at", "" if finished else clean(result.get("log")) or _logs_in(folder)),
        ("throughput", _throughput(result) or "not measured" * finished),
        ("speedup", _speedup(result) or "- (no baseline to compare with)" * finished),
        ("efficiency", _efficiency(result)),
        ("baseline", _baseline(result)),
        ("batch", _batch(result)),
        ("step time", _step_times(result)),
        ("input wait", _input_wait(result)),
        *_labelled("profile", profile_lines(result.get("profile"))),
        *_labelled("lost", explained_lines(result.get("explained"))),
        ("staleness", _staleness(result)),
        ("steps", _steps_of_workers(result)),
        ("training", trained),
        ("validation", listed(named("loss", result.get("val_loss")), pairs(result.get("val_metrics")))),
        ("time", _seconds(result)),
        ("survived", _survived(result)),
        *(("note", clean(note)) for note in items(result.get("notes"))),
        ("folder", folder if finished else ""),
        ("model", _joined(folder, clean(result.get("saved")))),
        ("MLflow", _tracked(clean(result.get("mlflow_run_id")))),
        ("tracking", clean(result.get("tracking_note"))),
    ]
    return [(status, _what(result)), *((label, text) for label, text in rows if text)]


def _labelled(label: str, lines: Sequence[str]) -> list[tuple[str, str]]:
    return [("" if place else label, line) for place, line in enumerate(lines)]


def _what(result: Mapping[str, Any]) -> str:
    """What was trained on what, and how far its speed can be believed."""
    model, data, strategy, hardware = (clean(result.get(key)) for key in ("model", "data", "strategy", "hardware"))
    workers = plural(whole(result.get("workers")), "worker")
    processes = plural(whole(result.get("processes")), "process")
    return (
        listed(
            " on ".join(filter(None, (model, data))),
            " on ".join(filter(None, (strategy, hardware))),
            " in ".join(filter(None, (workers, processes))),
        )
        + marks(result)
    ).strip() or "a run"


def _throughput(result: Mapping[str, Any]) -> str:
    value = number(result.get("examples_per_second"))
    if value is None:
        return ""
    within = span(result.get("examples_per_second_low"), result.get("examples_per_second_high"), rate, " to ")
    repeats = plural(whole(result.get("repeats")), "repeat")
    return listed(f"{rate(value)} examples/s", _interval(result, within), repeats)


def _speedup(result: Mapping[str, Any]) -> str:
    value = number(result.get("speedup"))
    if value is None:
        return ""
    within = span(result.get("speedup_low"), result.get("speedup_high"), times, " to ")
    scaling = f"{clean(result.get('scaling')) or 'unknown'} scaling"
    return listed(f"{times(value)}{marks(result)}", _interval(result, within), scaling)


def _survived(result: Mapping[str, Any]) -> str:
    """How often it went on after an end or a loss, and what that cost; nothing where it never had to."""
    counts = {name: whole(result.get(name)) or 0 for name in ("resumed", "restarts", "rollbacks", "steps_repeated")}
    if not any(counts.values()):
        return ""
    at_end, planned = whole(result.get("workers_at_end")), whole(result.get("workers"))
    return listed(
        f"resumed {plural(counts['resumed'], 'time')}" if counts["resumed"] else "",
        *(plural(counts[name], name.rstrip("s")) if counts[name] else "" for name in ("restarts", "rollbacks")),
        f"{plural(counts['steps_repeated'], 'step')} made twice" if counts["steps_repeated"] else "",
        f"{plural(at_end, 'worker')} at the end" if at_end != planned else "",
        "" if (share := number(result.get("goodput"))) is None else f"{percent(share)} of the time in steps that count",
    )


def resumed_line(folder: str, status: str, step: int, saved: int | None) -> str:
    """Which run a command goes on with, and from where."""
    where = f"from the checkpoint of step {saved:,}" if saved else "from the beginning, since it has no checkpoint"
    return f"resuming   {folder}, {status} at step {step:,}, {where} (resume=never begins anew)"


def _efficiency(result: Mapping[str, Any]) -> str:
    """The speedup over the number of devices, and so its interval."""
    value, speedup = number(result.get("efficiency")), number(result.get("speedup"))
    if value is None:
        return ""
    ends = [number(result.get(f"speedup_{end}")) for end in ("low", "high")]
    low, high = (None if end is None or not speedup else end * value / speedup for end in ends)
    devices = plural(whole(result.get("replicas")), "device")
    share = f"{percent(value)} of {devices}" if devices else percent(value)
    return listed(f"{share}{marks(result)}", _interval(result, span(low, high, percent, " to ")))


def _baseline(result: Mapping[str, Any]) -> str:
    value = number(result.get("baseline_examples_per_second"))
    if value is None:
        return ""
    return listed(f"{rate(value)} examples/s on one device, no strategy", clean(result.get("baseline_source")))


def _batch(result: Mapping[str, Any]) -> str:
    replica_batch, global_batch = whole(result.get("replica_batch")), whole(result.get("global_batch"))
    replicas = plural(whole(result.get("replicas")), "replica")
    if replica_batch is None or global_batch is None or not replicas:
        return ""
    if result.get("asynchronous"):
        return f"{replica_batch:,} a step, which one of {plural(whole(result.get('workers')), 'worker')} makes"
    return f"{replica_batch:,} x {replicas} = {global_batch:,} a step"


def _step_times(result: Mapping[str, Any]) -> str:
    known = ((name, number(result.get(f"step_ms_{name}"))) for name in ("p50", "p95", "p99"))
    return listed(*(f"{name} {rate(value)} ms" for name, value in known if value is not None))


def _input_wait(result: Mapping[str, Any]) -> str:
    """How long steps waited for their batches, and who waited longest."""
    share = number(result.get("input_wait"))
    if share is None:
        return ""
    shares = [(value, name) for name, entry in entries(result.get("input_wait_by_worker")) if (value := number(entry))]
    most = f"most of all {max(shares)[1]}" if len(shares) > 1 else ""
    return listed(f"{percent(share)} of the step time", most, "input-bound" * bool(result.get("input_bound")))


def _staleness(result: Mapping[str, Any]) -> str:
    """How old the weights were that steps were made on, in an asynchronous training."""
    mean, most = number(result.get("staleness_mean")), whole(result.get("staleness_max"))
    if mean is None or most is None:
        return ""
    return (
        f"asynchronous: {rate(mean) if mean else '0'} updates by others between reading and updating, at most {most:,}"
    )


def _steps_of_workers(result: Mapping[str, Any]) -> str:
    """Whose steps they were, in an asynchronous training, and updates that were made more than once."""
    steps, updates = whole(result.get("steps")), whole(result.get("updates"))
    of_worker = result.get("worker_steps")
    if steps is None or not isinstance(of_worker, Mapping):
        return ""
    shares = listed(*(f"{whole(count) or 0:,} by {clean(worker)}" for worker, count in of_worker.items()))
    again = max(0, (updates or 0) - steps)
    return listed(f"{steps:,}: {shares}", f"{plural(again, 'update')} made again" * bool(again))


def _seconds(result: Mapping[str, Any]) -> str:
    known = (
        (what, number(result.get(f"seconds_{key}"))) for key, what in (("startup", "start"), ("training", "train"))
    )
    return listed(*(f"{duration(value)} to {what}" for what, value in known if value is not None))


def _interval(result: Mapping[str, Any], within: str) -> str:
    confidence = number(result.get("interval_confidence"))
    return within if not within or confidence is None else f"{percent(confidence)} interval {within}"


def _logs_in(folder: str) -> str:
    return f"{folder}: events.jsonl, and a .log of each process" if folder else ""


def _joined(folder: str, path: str) -> str:
    return f"{folder}/{path}" if folder and path else path


def _tracked(run_id: str) -> str:
    return f"run {run_id}; to browse and compare: make ui" if run_id else ""

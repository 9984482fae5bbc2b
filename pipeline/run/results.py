"""What `result.json` says of a run, beside its numbers, and the results of points that are not run."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.analyze import comparable, explain, measure
from pipeline.config.schema import Config
from pipeline.data.errors import first_of
from pipeline.plan.plan import Plan
from pipeline.record.log import write_whole
from pipeline.record.profile import Explanation
from pipeline.run.group import Preemption
from pipeline.run.session import PointRequest, Result
from pipeline.run.timing import Measured

# How many of the examples that were left out are named.
SKIPPED_NAMED = 3


def laid_out_as(planned: Plan) -> Result:
    """The choices of a plan, and how it is laid out."""
    return {
        "strategy": planned.strategy.name,
        "hardware": planned.hardware.name,
        "model": planned.model.name,
        "data": planned.data.name,
        "workers": planned.workers,
        "hosts": planned.hardware.hosts,
        "processes": len(planned.processes),
        "replicas": planned.workers,
        "replica_batch": planned.training.replica_batch,
        "global_batch": planned.training.global_batch,
        "scaling": planned.training.scaling,
        "precision": planned.training.precision,
        "rehearsal": planned.hardware.rehearsal,
        "oversubscribed": planned.hardware.oversubscribed,
    }


def speed_of(planned: Plan, measured: Measured, baseline: Sequence[float], source: str | None) -> Result:
    """Throughput, step times and speedup, with their intervals; None for what was not measured.

    `baseline` has examples per second of one device, which come from `source`.
    """
    points = [repeat.examples_per_second for repeat in measured.point]
    middle, low, high = measure.interval(points) if points else (None, None, None)
    faster: tuple[float | None, ...] = (None, None, None)
    if points and baseline:
        faster = measure.speedup(points, baseline)
    one = measure.interval(baseline)[0] if baseline else None
    quantiles: Mapping[str, float | None] = {f"step_ms_p{percent}": None for percent in (50, 95, 99)}
    return {
        "examples_per_second": middle,
        "examples_per_second_low": low,
        "examples_per_second_high": high,
        **(measure.step_ms(measured.point) if measured.point else quantiles),
        "baseline_examples_per_second": one,
        "baseline_source": source if one is not None else None,
        "speedup": faster[0],
        "speedup_low": faster[1],
        "speedup_high": faster[2],
        "efficiency": None if faster[0] is None else faster[0] / (measured.timed_workers or planned.workers),
        "interval_confidence": measure.confidence(len(points)) if points else None,
        "repeats": len(points),
    }


def timed_with(planned: Plan, measured: Measured) -> list[str]:
    """What is to be said of a throughput that is not that of all workers."""
    timed = measured.timed_workers
    return [] if timed in (None, planned.workers) else [f"The throughput is that of {timed} workers."]


def lost_of(measured: Measured, part: str) -> int:
    """Examples of a part of the data that were broken and left out."""
    return sum(broken.examples for broken in measured.lost.get(part, ()))


def skipped_notes(measured: Measured) -> list[str]:
    """What is to be said of examples that were left out."""
    notes = []
    for part, what in (("train", "training"), ("validation", "validation")):
        lost, count = measured.lost.get(part, ()), lost_of(measured, part)
        if count:
            named = first_of([f"{broken.name} {broken.why}" for broken in lost], SKIPPED_NAMED)
            more = ", all in events.jsonl" if len(lost) > SKIPPED_NAMED else ""
            notes.append(f"{count} {what} example{'s were' if count > 1 else ' was'} left out: {named}{more}.")
    return notes


def input_waits(planned: Plan, measured: Measured) -> Result:
    """The share of the step time that was spent waiting for input: of the worker that waited longest, and of each."""
    most, waits = measure.input_wait(measured.point)
    waiting = planned.ranks("worker") if planned.strategy.asynchronous else planned.leaders
    names = [f"{planned.processes[rank].role} {rank}" for rank in waiting]
    return {
        "input_wait": most,
        "input_wait_by_worker": dict(zip(names, waits, strict=False)),
        "input_bound": None if most is None else most >= measure.INPUT_BOUND,
    }


def bound_by_input(waits: Result) -> list[str]:
    """What is to be said of a training that waits for its input."""
    if not waits["input_bound"]:
        return []
    slowest = max(waits["input_wait_by_worker"], key=waits["input_wait_by_worker"].get)
    return [
        f"{comparable.WAITED} {slowest} waited for its batches for {waits['input_wait_by_worker'][slowest]:.0%} of the "
        f"step time. data.profile=true says which stage of the input costs most. Try data.cache=memory, "
        f"data.service=2, or to prepare the data once with python -m pipeline prepare."
    ]


def explained_otherwise(explained: Explanation | None, speedup: tuple[float | None, ...], workers: int) -> list[str]:
    """What is to be said where what was explained is not what training was timed with."""
    value, low, high = speedup
    if explained is None or value is None or low is None or high is None:
        return []
    return explain.disagreement(explained, (value / workers, low / workers, high / workers))


def unwritten(values: Result, problem: OSError) -> Result:
    """The result of a run whose folder cannot be written to any more."""
    error = values["error"] or f"The run's folder cannot be written to: {problem.strerror}."
    return values | {"status": "FAILED", "error": error}


def of_asynchronous(planned: Plan, measured: Measured) -> Result:
    """What only an asynchronous training has: staleness in updates, and who made its steps."""
    names = ("staleness_mean", "staleness_max", "steps", "examples", "updates")
    counts = measured.finished.worker_steps or []
    ranks = planned.ranks("worker")
    return {name: getattr(measured.finished, name) for name in names} | {
        "worker_steps": {f"worker {rank}": count for rank, count in zip(ranks, counts, strict=False)},
    }


def preempted(preemption: Preemption, measured: Measured) -> str:
    """What happened, and how to go on."""
    said = measured.saved_step
    where = "No checkpoint was written yet" if said is None else f"The last checkpoint is of step {said}"
    return f"The run was preempted by {preemption.asked}. {where}; the same command goes on from there."


def refused(error: str, request: PointRequest) -> Result:
    """The result of a point that cannot be laid out."""
    return unread(error, request.folder, chosen(request.config)) | request.about()


def chosen(config: Config) -> Result:
    """The choices of a config, as a result has them."""
    return {
        "strategy": config.strategy.name,
        "hardware": config.hardware.name,
        "model": config.model.name,
        "data": config.data.name,
        "workers": config.workers,
    }


def unread(error: str, folder: Path, chosen: Result) -> Result:
    """The result of a config that was refused, written into its folder where there is one."""
    values = {"status": "REFUSED", "error": error} | chosen
    with suppress(OSError):
        # A folder that was named may hold a run, whose result stays.
        if not (folder / "events.jsonl").exists():
            write_whole(folder / "result.json", json.dumps(values, indent=2))
    return values

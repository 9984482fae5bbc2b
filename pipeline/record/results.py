"""The result of a run, and result.json, where the fields of all parts stand side by side (docs/results.md)."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pipeline.record as record
from pipeline.config.parts import flat, leaves, part_of, unflat
from pipeline.config.schema import Config
from pipeline.plan.backends import other
from pipeline.plan.plan import AUTO, Plan
from pipeline.record.files import Scored
from pipeline.record.findings import Check, Explanation, Pace
from pipeline.record.log import read_whole, write_whole

FILE = "result.json"
# Of result.json. The first, which had none written, held the same values.
VERSION = 2

# What only the result of a training under `train.xla` has.
XLA = ("xla", "xla_speedup", "seconds_compiling")
# What only the result of a training has that a callback ended early, or whose weights one has put back.
ENDED_EARLY = ("stopped_by", "stopped_at", "planned_epochs", "restored_epoch")
# From here on an efficiency is none: something has slowed the baseline.
MOST_EFFICIENCY = 1.1
IN_THIS_RUN = "measured in this run"


@dataclass(frozen=True)
class Baseline:
    """A measured baseline, in a file of its own: examples per second of each repeat on one device, the run's folder."""

    examples_per_second: tuple[float, ...]
    folder: str
    time: float | None = None


@dataclass(frozen=True)
class Ending:
    """The end: FINISHED, FAILED, KILLED, PREEMPTED, REFUSED, PLANNED or PREDICTED, and the log of who failed."""

    status: str | None = None
    error: str | None = None
    log: str | None = None


@dataclass(frozen=True)
class Choices:
    """The choices of its config, by name."""

    strategy: str | None = None
    hardware: str | None = None
    model: str | None = None
    data: str | None = None
    # What trained and what added up, where it was not TensorFlow.
    backend: str | None = None
    collective: str | None = None

    @classmethod
    def of(cls, source: Config | Plan) -> "Choices":
        """The choices of a config or a plan."""
        collective = source.collective if isinstance(source, Plan) else source.strategy.collective
        parts = source.strategy, source.hardware, source.model, source.data
        strategy, hardware, model, data = (part.name for part in parts)
        other_collective = None if collective == AUTO else other(collective)
        return cls(strategy, hardware, model, data, other(source.backend), other_collective)

    @property
    def called(self) -> str | None:
        """The strategy as it is shown beside others.

        >>> Choices("mirrored").called, Choices("mirrored", backend="jax").called
        ('mirrored', 'mirrored/jax')
        """
        return "/".join(filter(None, [self.strategy, self.backend, self.collective])) if self.strategy else None


@dataclass(frozen=True)
class Layout:
    """Its devices, its batches in examples, and how to take its speed."""

    workers: int | None = None
    timed_workers: int | None = None
    hosts: int | None = None
    processes: int | None = None
    replicas: int | None = None
    replica_batch: int | None = None
    global_batch: int | None = None
    scaling: str | None = None
    precision: str | None = None
    rehearsal: bool = False
    oversubscribed: bool = False
    asynchronous: bool = False
    devices: int | None = None

    @classmethod
    def of(cls, plan: Plan, timed_workers: int | None = None) -> "Layout":
        """The layout of a plan, of which so many workers were timed."""
        each = plan.strategy.devices_per_replica
        own = {"timed_workers": timed_workers, "processes": len(plan.processes), "replicas": plan.workers}
        return unflat(cls, flat(plan) | own | {"devices": plan.workers * each if each > 1 else None})


@dataclass(frozen=True)
class Speed:
    """Throughput in examples per second, step times in ms, and the speedup over the baseline, with their intervals."""

    examples_per_second: float | None = None
    examples_per_second_low: float | None = None
    examples_per_second_high: float | None = None
    step_ms_p50: float | None = None
    step_ms_p95: float | None = None
    step_ms_p99: float | None = None
    baseline_examples_per_second: float | None = None
    baseline_source: str | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    efficiency: float | None = None
    interval_confidence: float | None = None
    repeats: int | None = None
    steps_per_call: int | None = None
    other_work: float | None = None


@dataclass(frozen=True)
class Input:
    """Shares of the step time that were spent waiting for batches, and examples that were broken and left out."""

    wait: float | None = part_of(default=None, name="input_wait")
    wait_by_worker: dict[str, float] = part_of(default_factory=dict, name="input_wait_by_worker")
    bound: bool | None = part_of(default=None, name="input_bound")
    train_examples_skipped: int | None = None
    validation_examples_skipped: int | None = None


@dataclass(frozen=True)
class Training:
    """The results of training, the size of its model, and its seconds."""

    epochs: int | None = None
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    val_loss: float | None = None
    val_metrics: dict[str, float] = field(default_factory=dict)
    parameters: int | None = None
    state_bytes: int | None = None
    seconds_startup: float | None = None
    seconds_training: float | None = None
    xla: bool | None = None
    xla_speedup: float | None = None
    seconds_compiling: float | None = None
    seconds_driver: float | None = None
    saved: str | None = None
    sample: str | None = None
    stopped_by: str | None = None
    stopped_at: int | None = None
    planned_epochs: int | None = None
    restored_epoch: int | None = None


@dataclass(frozen=True)
class Staleness:
    """The staleness of an asynchronous training in updates, and the steps of each worker."""

    staleness_mean: float | None = None
    staleness_max: int | None = None
    steps: int | None = None
    examples: int | None = None
    updates: int | None = None
    worker_steps: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Survival:
    """Restarts, resumes and repeated steps, and the goodput that was left."""

    workers_at_end: int | None = None
    resumed: int | None = None
    restarts: int | None = None
    rollbacks: int | None = None
    steps_repeated: int | None = None
    goodput: float | None = None
    checkpoint_step: int | None = None


@dataclass(frozen=True)
class Cost:
    """The seconds of the whole training at the measured throughput, their price, and energy in joules."""

    seconds_to_finish: float | None = None
    price_per_hour: float | None = None
    cost_to_finish: float | None = None
    energy_joules: float | None = None


@dataclass(frozen=True)
class Result:
    """The result of a run, in parts."""

    ending: Ending = Ending()
    choices: Choices = Choices()
    layout: Layout = Layout()
    speed: Speed = Speed()
    input: Input = Input()
    training: Training = Training()
    staleness: Staleness = Staleness()
    survival: Survival = Survival()
    cost: Cost = Cost()
    # Its run in MLflow, and a note on what is missing there.
    mlflow_run_id: str | None = None
    tracking_note: str | None = None
    machine: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    # Marked fields are taken whole.
    profile: Pace | None = part_of(default=None)
    explained: Explanation | None = part_of(default=None)
    predictions: tuple[Scored, ...] = ()
    notes: tuple[str, ...] = ()
    check: Check | None = part_of(default=None)

    @property
    def finished(self) -> bool:
        """True if it trained to its end."""
        return self.ending.status == "FINISHED"


def to_values(result: Result) -> dict[str, object]:
    """The values of result.json: of a refused run the known ones, else all but those that do not apply to it."""
    values, unknown = flat(result), flat(Result())
    absent = ("check", "backend", "collective", "devices", "sample", "seconds_driver", "other_work", *XLA, *ENDED_EARLY)
    left_out = {name for name in absent if values[name] is None}
    if result.ending.status == "REFUSED":
        left_out |= {name for name, value in values.items() if value == unknown[name]}
    elif not result.layout.asynchronous:
        left_out |= leaves(Staleness).keys()
    return {"version": VERSION} | {name: _as_json(value) for name, value in values.items() if name not in left_out}


def from_values(values: Mapping[str, object]) -> Result:
    """The result of result.json's values, of this version or an earlier one."""
    fields: dict[str, object] = {}
    for name, leaf in leaves(Result).items():
        with suppress(record.MismatchError, KeyError):
            value = record.from_plain(cast(Any, leaf.type), values[name])
            # A loss is NaN where training diverged; any other value that is no number is unknown.
            if not isinstance(value, float) or math.isfinite(value) or name in leaves(Training):
                fields[name] = value
    result: Result = unflat(Result, fields)
    return result


def _as_json(value: object) -> object:
    # A loss that is NaN stays so, alone and among metrics.
    if isinstance(value, Mapping):
        return {name: _as_json(inner) for name, inner in value.items()}
    return value if isinstance(value, float) else record.to_plain(value)


def read(folder: Path) -> Result | None:
    """The result of the run in a folder; None if it has none."""
    values = read_whole(folder / FILE)
    return from_values(values) if values else None


def write(folder: Path, result: Result) -> None:
    """Writes the result of the run in a folder, whole. Raises `OSError`."""
    write_whole(folder / FILE, json.dumps(to_values(result), indent=2))

"""Runs that never were: what a terminal shows of one, and what others have written, to compare and predict from."""

import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from pipeline.config.parts import leaves, unflat
from pipeline.driver import Ahead, RunResult
from pipeline.plan.plan import Plan, Process
from pipeline.record import events, results
from pipeline.record.log import stamped
from pipeline.views.terminal.live import Progress
from pipeline.views.terminal.result import result_table

Timed = tuple[float, events.Event]
VERSIONS = {"keras": "3", "tensorflow": "2"}
PARAMETERS = 1_000_000
ASKED = ("strategy=multi_worker", "model=mlp", "data=digits")
COMPARED = {"strategy": "mirrored", "workers": 2, "model_build": {"_target_": "pipeline.models.mlp", "hidden": [8]}}
RESULT = {
    "status": "FINISHED", "strategy": "mirrored", "workers": 2, "model": "mlp", "data": "digits", "scaling": "weak",
    "precision": "float32", "machine": "here", "versions": {"keras": "3"}, "replica_batch": 64, "global_batch": 128,
    "rehearsal": False, "oversubscribed": False, "val_metrics": {"accuracy": 0.9},
}  # fmt: skip


def a_plan(processes: int = 1, devices: int = 2, hosts: int = 1, **changes: Any) -> Plan:
    """Mirrored on two CPU devices, or whatever the arguments say."""
    workers = processes * devices
    values: dict[str, Any] = dict.fromkeys(leaves(Plan)) | {
        "strategy": "mirrored", "devices_per_replica": 1, "hardware": "2cpu", "kind": "cpu", "hosts": hosts,
        "host_names": (), "model": "cnn", "data": "mnist5k", "train_examples": 5_000,
        "processes": tuple(
            Process(
                rank=rank, role="worker" if rank else "chief", host=rank * hosts // processes,
                address=f"127.0.0.1:{40_000 + rank}" if processes > 1 else None,
                devices=tuple(f"CPU:{device}" for device in range(devices)), cores=tuple(range(devices)),
                replicas=tuple(range(rank * devices, (rank + 1) * devices)), intra_op_threads=1, inter_op_threads=2,
            )
            for rank in range(processes)
        ),
        "workers": workers, "replica_batch": 64, "global_batch": 64 * workers, "scaling": "weak", "epochs": 3,
        "seed": 0, "deterministic": False, "precision": "float32", "gradient_bits": 32, "batch_statistics": "global",
        "save": True, "repeats": 2, "baseline": "fresh", "rehearsal": False, "oversubscribed": False, "notes": (),
    }  # fmt: skip
    return unflat(Plan, values | changes)


def a_run(plan: Plan, baseline: bool = True, epochs: int = 3, seconds: float = 0.25) -> Iterator[Timed]:
    """(time, event) of an ordinary run, in the order in which the driver tells them."""
    now = 0.0
    groups = {"point": range(len(plan.processes))} | ({"baseline": range(1)} if baseline else {})

    def one(event: events.Event, after: float = 0.1, group: str = "point", rank: int = 0) -> Timed:
        nonlocal now
        now += after
        return now, stamped(event, 1.7e9 + now, group, rank)

    def all_of(group: str, event: events.Event, after: float = 0.1) -> Iterator[Timed]:
        return (one(event, after, group, rank) for rank in groups[group])

    yield now, events.Run("key", time=1.7e9)
    for group in groups:
        yield from all_of(group, events.Started(1, "worker", 0))
    for group in groups:
        yield from all_of(group, events.Beat(0, 1.0), 1.0)
        yield from all_of(group, events.Joined(["CPU:0"]))
    for group in groups:
        yield from all_of(group, events.Loaded({"train": False}, {"train": 5_120}))
        sizes = {"train_examples": 5_120, "validation_examples": 1_000, "steps_per_epoch": 40, "epochs": epochs}
        yield from all_of(group, events.Built(1_199_882, **sizes))
    for group in groups:
        yield from all_of(group, events.Calibrated(0.04))
    for repeat in range(plan.measurement.repeats):
        for group in groups:
            yield from all_of(group, events.Beat(1, 2.0), 0.5)
            examples = 20 * (plan.training.global_batch if group == "point" else plan.training.replica_batch)
            yield from all_of(group, events.Measured(repeat, examples, 0.8, 20, [events.TimedCall(20, 0.8)]))
    for epoch in range(1, epochs + 1):
        for call in range(1, 6):
            steps = events.Steps(
                40 * (epoch - 1) + 8 * call, [0.9 / epoch] * 8, epoch, {"accuracy": 0.9},
                examples=8 * plan.training.global_batch, seconds=seconds, learning_rate=0.1,
            )  # fmt: skip
            yield one(steps, seconds)
        yield one(events.Beat(validated=4))
        learnt = (0.6 / epoch, {"accuracy": 0.91}, 0.7 / epoch, {"accuracy": 0.89})
        yield one(events.Epoch(epoch, 40 * epoch, *learnt, 2.1))
    yield one(events.Beat(100, 9.0), 0.5)
    yield one(events.Saved("model.keras"))
    yield from all_of("point", events.Finished())
    yield one(events.Ended("FINISHED"))


def told(plan: Plan, timed: Iterable[Timed], console: Console | None = None, ahead: Ahead | None = None) -> str:
    """What Progress writes about the events; on no terminal, unless `console` is one."""
    console = console or Console(file=io.StringIO())
    with Progress(plan, console, 0.0, ahead) as progress:
        for now, event in timed:
            progress.update(event, now)
    # What was at which time is a test of its own.
    return re.sub(r"^\d\d:\d\d:\d\d ", "", written(console), flags=re.M)


def a_terminal(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=24, legacy_windows=False)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text)


def shown(table: Callable[[int], RenderableType], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(table(width), soft_wrap=True)
    return written(console)


def a_point(values: Mapping[str, Any]) -> RunResult:
    """What became of a point, of result.json's values, a folder and what was typed."""
    folder, overrides = values.get("folder"), values.get("overrides")
    return RunResult(
        results.from_values(values),
        Path(folder if isinstance(folder, str) else ""),
        tuple(overrides) if isinstance(overrides, list) else (),
    )


def table_of(values: Mapping[str, Any]) -> Callable[[int], RenderableType]:
    return partial(result_table, a_point(values))


def a_result(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "status": "FINISHED", "error": None, "strategy": "mirrored", "hardware": "2cpu", "model": "cnn",
        "data": "mnist5k", "workers": 2, "processes": 1, "replicas": 2, "replica_batch": 64, "global_batch": 128,
        "scaling": "weak", "examples_per_second": 3412.3, "examples_per_second_low": 3301.2,
        "examples_per_second_high": 3502.9, "step_ms_p50": 37.5, "step_ms_p95": 41.23, "step_ms_p99": 148.9,
        "baseline_examples_per_second": 1852.2, "baseline_source": "measured in this run", "speedup": 1.842,
        "speedup_low": 1.79, "speedup_high": 1.88, "efficiency": 0.921, "interval_confidence": 0.9375, "repeats": 5,
        "rehearsal": False, "oversubscribed": False, "notes": [], "epochs": 3, "loss": 0.12345,
        "metrics": {"accuracy": 0.9612}, "val_loss": 0.2, "val_metrics": {"accuracy": 0.9432},
        "seconds_startup": 4.23, "seconds_training": 75.0, "mlflow_run_id": "0123456789abcdef0123456789abcdef",
        "tracking_note": None, "folder": "outputs/runs/2026-11-21_mirrored", "versions": {},
    }  # fmt: skip
    return values | changes


def wrote(folder: Path, repeats: list[float], asked: dict[str, Any] | None = None, **result: Any) -> str:
    """What a run writes: two processes, of which the slower one decides; returns its folder."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(COMPARED | (asked or {})))
    (folder / "result.json").write_text(json.dumps(RESULT | result))
    events = [
        {"event": "measured", "time": 1.0, "group": group, "rank": rank, "repeat": repeat, "examples": speed,
         "seconds": 1.0 if group == "point" and rank == 0 else 0.5, "calls": [[1, 1.0]]}
        for repeat, speed in enumerate(repeats) for group in ("baseline", "point") for rank in (0, 1)
    ]  # fmt: skip
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return str(folder)


def ran(
    output: Path, plan: Plan, seconds: Sequence[float], parameters: int = PARAMETERS, began: float = 0.0, **result: Any
) -> dict[str, Any]:
    """Writes what a run of `plan` writes, whose repeats had steps of so many seconds."""
    folder = output / "runs" / f"{len(list(output.glob('runs/*')))}_{plan.strategy.name}"
    folder.mkdir(parents=True)
    examples = plan.workers * plan.training.replica_batch
    speeds = sorted(examples / each for each in seconds)
    wrote = {
        "status": "FINISHED", "parameters": parameters, "examples_per_second": speeds[len(speeds) // 2],
        "rehearsal": plan.hardware.rehearsal, "oversubscribed": plan.hardware.oversubscribed, "versions": VERSIONS,
    } | result  # fmt: skip
    measured = [
        {"event": "measured", "time": began + 0.5, "group": "point", "rank": rank, "repeat": repeat,
         "examples": examples, "seconds": each, "calls": [[1, each]]}
        for repeat, each in enumerate(seconds) for rank in plan.leaders
    ]  # fmt: skip
    events = [{"event": "built", "time": began, "group": "point", "rank": 0, "train_examples": 1_000_000}, *measured]
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "result.json").write_text(json.dumps(wrote))
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    return wrote

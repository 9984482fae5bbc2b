"""Measurements of runs that never were, to predict others from."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.plan.plan import Plan

VERSIONS = {"keras": "3", "tensorflow": "2"}
PARAMETERS = 1_000_000


ASKED = ("strategy=multi_worker", "model=mlp", "data=digits")


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

"""Results of runs that never were, as files to compare."""

import json
from pathlib import Path
from typing import Any

ASKED = {"strategy": "mirrored", "workers": 2, "model_build": {"_target_": "pipeline.models.mlp", "hidden": [8]}}
RESULT = {
    "status": "FINISHED", "strategy": "mirrored", "workers": 2, "model": "mlp", "data": "digits", "scaling": "weak",
    "precision": "float32", "machine": "here", "versions": {"keras": "3"}, "replica_batch": 64, "global_batch": 128,
    "rehearsal": False, "oversubscribed": False, "val_metrics": {"accuracy": 0.9},
}  # fmt: skip


def wrote(folder: Path, repeats: list[float], asked: dict[str, Any] | None = None, **result: Any) -> str:
    """What a run writes: two processes, of which the slower one decides; returns its folder."""
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(json.dumps(ASKED | (asked or {})))
    (folder / "result.json").write_text(json.dumps(RESULT | result))
    events = [
        {"event": "measured", "time": 1.0, "group": group, "rank": rank, "repeat": repeat, "examples": speed,
         "seconds": 1.0 if group == "point" and rank == 0 else 0.5, "calls": [[1, 1.0]]}
        for repeat, speed in enumerate(repeats) for group in ("baseline", "point") for rank in (0, 1)
    ]  # fmt: skip
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return str(folder)

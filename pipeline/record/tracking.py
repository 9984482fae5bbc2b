"""Turns what a run's folder knows of where it is tracked into `tracking.json`, and back."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.record.log import write_whole

LOG, STATE = "events.jsonl", "tracking.json"
# Nothing sent.
FRESH: Mapping[str, Any] = {"run_id": None, "experiment_id": None, "offset": 0, "closed": None, "killed_ms": None}


def recall(folder: Path) -> dict[str, Any]:
    """What `tracking.json` holds.

    `store` is where the run is tracked; `run_id`, `experiment_id`, `offset` (bytes of the log that are sent),
    `closed` (the status, once all is sent) and `killed_ms` are its copy there. `copies` has the same for
    other stores that it was sent to, by URI.
    """
    try:
        kept = json.loads((folder / STATE).read_text())
    except (OSError, ValueError):
        kept = None
    return {"store": None, **FRESH, **(kept if isinstance(kept, dict) else {})}


def run_id_of(folder: Path) -> str | None:
    """The id of a folder's run in the store that it is tracked in; None where there is none."""
    found = recall(folder)["run_id"]
    return None if found is None else str(found)


def write(folder: Path, kept: Mapping[str, Any]) -> None:
    """Makes `kept` what `recall` returns: a reader sees the old values or these."""
    write_whole(folder / STATE, json.dumps(kept, indent=2, default=str))

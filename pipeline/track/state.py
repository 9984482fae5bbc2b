"""Turns what a run's folder knows of its copies in MLflow into `tracking.json`, and back.

It leaves what the values mean to `pipeline.track.copies`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.events import write_whole
from pipeline.track.stores import Store, without_password

LOG, STATE = "events.jsonl", "tracking.json"
# Nothing sent.
FRESH: Mapping[str, Any] = {"run_id": None, "experiment_id": None, "offset": 0, "closed": None, "killed_ms": None}


def remember(folder: Path, store: Store) -> None:
    """Notes in the run's folder where it is tracked. How far it was sent to another store is forgotten."""
    kept, wanted = recall(folder), {**store, "uri": without_password(store.get("uri"))}
    if (kept["store"] or {}).get("uri") != wanted["uri"]:
        kept |= FRESH
    write(folder, kept | {"store": wanted})


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

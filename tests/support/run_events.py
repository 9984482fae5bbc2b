"""What a run has logged so far."""

import json
import time
from pathlib import Path
from typing import Any

import own

LONG = ("train.epochs=500", f"--config-dir={own.CONF}", "model=tiny", "data=digits", "train.check=off")


def events(folder: Path) -> list[dict[str, Any]]:
    logs = list(folder.glob("outputs/[rs]*/**/events.jsonl"))
    if not logs:
        return []
    return [json.loads(line) for line in logs[0].read_text().splitlines() if line.endswith("}")]


def wait_for(folder: Path, kind: str, timeout: float = 90.0, count: int = 1) -> list[dict[str, Any]]:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = [event for event in events(folder) if event["event"] == kind]
        if len(found) >= count:
            return found
        time.sleep(0.1)
    raise AssertionError(f"no {kind} in {timeout} s: {[event['event'] for event in events(folder)][-5:]}")

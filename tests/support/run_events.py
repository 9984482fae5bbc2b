"""What runs have logged, as far as it is written, and what they trained by it."""

import json
from glob import glob
from pathlib import Path
from typing import Any

CONF = Path(__file__).with_name("conf")
# Runs that version 0.1.0 wrote.
OLD = CONF.parents[1] / "from_0_1_0"
LONG = ("train.epochs=500", f"--config-dir={CONF}", "model=tiny", "data=digits", "train.check=off")


def runs(folder: Path) -> list[Path]:
    """The folders of the runs of the commands in a folder that have a log, as a sweep's report has."""
    # Unlike `Path.glob`, it passes over folders that go meanwhile, as that of a command that resumes another's run.
    logs = sorted(map(Path, glob(f"{folder}/outputs/[rs]*/**/events.jsonl", recursive=True)))
    return [log.parent for log in logs if log.parent.name != "report"]


def logged(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if line.endswith("}")]
    return [event for event in events if kind in (None, event["event"])]


def losses(run: Path) -> dict[int, float]:
    """The loss of each step, in order, from whichever command made it last."""
    found = {
        event["step"] - len(event["losses"]) + place + 1: loss
        for event in logged(run, "steps")
        if event["group"] == "point"
        for place, loss in enumerate(event["losses"])
    }
    return dict(sorted(found.items()))


def weights(run: Path) -> list[str]:
    return sorted({digest for event in logged(run, "finished") for digest in event["weights"]})


def events(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Those of the only run of the commands in a folder; none before it has a log."""
    found = runs(folder)
    return logged(found[0], kind) if found else []

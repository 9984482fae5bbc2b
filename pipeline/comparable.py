"""Tells which speeds say something about each other: same model, data, batch rule, precision, machine and versions."""

from collections.abc import Mapping
from typing import Any

from pipeline.history import Run

# What has to be the same for two throughputs to say something about each other, as result.json has it.
SAME = ("model", "data", "precision", "scaling", "machine", "versions")


def unlike(one: Run, two: Run) -> list[str]:
    """Why the speeds of two runs say nothing of each other."""
    found = [
        f"{name} differs ({_text(one.result.get(name))}, {_text(two.result.get(name))})"
        for name in SAME
        if one.result.get(name) != two.result.get(name)
    ]
    batches = [_batch_rule(run) for run in (one, two)]
    found += [f"the batch held fixed differs ({batches[0]}, {batches[1]})"] * (batches[0] != batches[1])
    for name in ("rehearsal", "oversubscribed"):
        found += [f"one of them is {'a rehearsal' if name == 'rehearsal' else name}"] * any(
            run.result.get(name) for run in (one, two)
        )
    return found


def _batch_rule(run: Run) -> str:
    held = "global_batch" if run.result.get("scaling") == "strong" else "replica_batch"
    return f"{held} {run.result.get(held)}"


def _text(value: Any) -> str:
    return ", ".join(f"{name} {each}" for name, each in value.items()) if isinstance(value, Mapping) else str(value)

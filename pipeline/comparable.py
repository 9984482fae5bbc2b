"""Tells which speeds say something about each other: same model, data, batch rule, precision, machine and versions."""

import json
from collections.abc import Mapping
from typing import Any

from pipeline.history import Run
from pipeline.size import of_shape

# What has to be the same for two throughputs to say something about each other, as result.json has it.
SAME = ("model", "data", "precision", "scaling", "machine", "versions")

# What the time of a step depends on beside the numbers that a model of it has: workers, batch, size, links.
OF_STEP = (
    "strategy_build", "asynchronous", "min_shard_bytes", "exchange", "kind", "data_build", "shuffle", "parallel_reads",
    "cache", "prefetch", "optimizer", "loss", "metrics", "precision", "gradient_bits", "static_batches",
    "deterministic", "steps_per_call", "threads_per_device",
)  # fmt: skip
SAID = {"strategy_build": "strategy", "data_build": "data", "kind": "kind of device"}


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


def of_step(plan: Mapping[str, Any]) -> dict[str, Any]:
    """What the time of a step depends on, from `Plan.to_json`'s values, beside workers, batch, size and links.

    Of the model it is the function: what its arguments come to are parameters.
    """
    facts = {name: plan.get(name) for name in OF_STEP}
    return facts | {
        "strategy_build": {key: value for key, value in (facts["strategy_build"] or {}).items() if key != "address"},
        "data_build": of_shape(facts["data_build"] or {}),
        "model": (plan.get("model_build") or {}).get("_target_"),
    }


def apart(one: Mapping[str, Any], two: Mapping[str, Any]) -> list[str]:
    """Why the step time of a plan says nothing of that of another, with the values of each."""
    ours, theirs = of_step(one), of_step(two)
    return [
        f"{SAID.get(name, name)} ({_text(ours[name])}; here {_text(theirs[name])})"
        for name in ours
        if json.dumps(ours[name], sort_keys=True) != json.dumps(theirs[name], sort_keys=True)
    ]


def _batch_rule(run: Run) -> str:
    held = "global_batch" if run.result.get("scaling") == "strong" else "replica_batch"
    return f"{held} {run.result.get(held)}"


def _text(value: Any) -> str:
    return ", ".join(f"{name} {each}" for name, each in value.items()) if isinstance(value, Mapping) else str(value)

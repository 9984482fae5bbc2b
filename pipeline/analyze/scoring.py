"""Predictions that were made, and how far off they were from the runs that followed."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.analyze.predict import Prediction
from pipeline.analyze.step_model import identity
from pipeline.plan.plan import Plan


def record(planned: Plan, parameters: int, made: Prediction, now: float) -> dict[str, Any]:
    """A prediction as a line of predictions.jsonl."""
    return {
        "time": now,
        "identity": identity(json.loads(planned.to_json())),
        "examples_per_second": made.examples_per_second,
        "low": made.low,
        "high": made.high,
        "confidence": made.confidence,
        "strategy": planned.strategy.name,
        "workers": planned.workers,
        "parameters": parameters,
        "fitted_on": {name: value for name, value in made.fitted_on.items() if name != "folders"},
    }


def scored(records: Sequence[Mapping[str, Any]], plan: Mapping[str, Any], measured: float) -> list[dict[str, Any]]:
    """The predictions that were made for a plan, each number once, with how far each was off and whether it held.

    >>> plan = {"workers": 2}
    >>> made = {"identity": identity(plan), "examples_per_second": 110.0, "low": 90.0, "high": 130.0}
    >>> [(each["error"], each["held"]) for each in scored([made, made], plan, measured=100.0)]
    [(0.1, True)]
    """
    wanted = identity(plan)
    found = {
        (each["examples_per_second"], each["low"], each["high"]): each
        for each in records
        if each.get("identity") == wanted
    }
    return [
        {name: value for name, value in each.items() if name != "identity"}
        | {
            "measured": measured,
            "error": round(each["examples_per_second"] / measured - 1, 6),
            "held": each["low"] <= measured <= each["high"],
        }
        for each in found.values()
    ]


def score(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How good the predictions of these runs were: how many, the median error, and the share of intervals that held.

    >>> score([{"predictions": [{"error": -0.1, "held": True}, {"error": 0.2, "held": False}]}, {}])
    {'count': 2, 'median_error': 0.15, 'held': 0.5}
    """
    every = [each for result in results for each in result.get("predictions") or ()]
    if not every:
        return {"count": 0, "median_error": None, "held": None}
    return {
        "count": len(every),
        "median_error": round(float(np.median([abs(each["error"]) for each in every])), 6),
        "held": sum(bool(each["held"]) for each in every) / len(every),
    }

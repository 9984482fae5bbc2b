"""Sweeps that never were, and the verdict that a report gives of them."""

import re
from pathlib import Path
from typing import Any

import pytest
from compared_runs import wrote

from pipeline.commands.results import report as main

# Each point: strategy, workers, examples a second, and what else its result says. One device makes 100.
Point = tuple[str, int, float, dict[str, Any]]


def point(strategy: str, workers: int, speed: float, **result: Any) -> Point:
    return strategy, workers, speed, result


def told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str], points: list[Point]) -> tuple[str, list[str], str]:
    """The table, the sentences, and the last line of what the report of a sweep of `points` prints."""
    for place, (strategy, workers, speed, others) in enumerate(points):
        result = dict(others)
        within = result.pop("within", 0.01)
        told = {"strategy": strategy, "workers": workers, "replicas": workers} | result
        repeats = [speed * (1 + off * within) for off in (-1, -0.5, 0, 0.5, 1)]
        if speed:
            told = {"examples_per_second": speed, "examples_per_second_low": repeats[0],
                    "examples_per_second_high": repeats[-1], "speedup": speed / 100} | told  # fmt: skip
        wrote(tmp_path / "sweeps" / "s" / f"{place}_{strategy}", repeats if speed else [], {"workers": workers}, **told)
    assert main(["s", f"output_dir={tmp_path}"]) == 0
    table, _, below = capsys.readouterr().out.partition("\n\n")
    lines = list(filter(None, below.splitlines()))
    first = next(at for at, line in enumerate(lines) if re.match("Use |Not known |No verdict", line))
    last = next(at for at, line in enumerate(lines) if line.startswith("report: "))
    return table, lines[first:last], lines[-1]

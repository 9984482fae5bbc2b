"""Two versions of the program in turn: the one that is checked out here, and another commit of it, in one run.

The same commands are typed in both, as a person would, so any two versions that have them can be compared.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parent.parent
COMMON = ("tracking=none", "measure.baseline=none", "measure.repeats=9", "hardware=2cpu")
CASES = {
    "cnn, mirrored": ("model=cnn", "strategy=mirrored", "workers=2"),
    "cnn, multi_worker": ("model=cnn", "strategy=multi_worker", "workers=2"),
    "mlp, one_device": ("model=mlp", "strategy=one_device", "workers=1", "train.replica_batch=32"),
    "mlp, mirrored": ("model=mlp", "strategy=mirrored", "workers=2", "train.replica_batch=32"),
    "mlp, multi_worker": ("model=mlp", "strategy=multi_worker", "workers=2", "train.replica_batch=32"),
}

SMALL = ("data=digits", "train.steps=5", "measure.repeats=1", "measure.steps=5")


class Ratios(TypedDict):
    """A case's medians over rounds, of this version's figure over the other one's, and all of them."""

    throughput: float
    throughput_range: list[float]
    startup: float
    ratios: list[dict[str, float]]


def compare(commit: str, rounds: int, smoke: bool) -> dict[str, Ratios]:
    """Prints, for each case, throughput here over throughput there, and seconds to start; returns all of them.

    Medians over rounds, each a command here and a command there, who goes first in turn. Exits where there is no such
    commit.
    """
    cases = {"mlp, one_device": (*CASES["mlp, one_device"], *SMALL)} if smoke else CASES
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory(prefix="against-") as folder:
        there = Path(folder) / "there"
        added = subprocess.run(
            ["git", "worktree", "add", "--detach", str(there), commit], cwd=ROOT, capture_output=True, text=True
        )
        if added.returncode:
            sys.exit(f"Expected --against to be a commit, received {commit}: {added.stderr.strip().splitlines()[-1]}.")
        try:
            for number in range(rounds):
                for name, overrides in cases.items():
                    trees = {"here": ROOT, "there": there}
                    order = list(trees) if number % 2 == 0 else list(trees)[::-1]
                    found = {
                        side: _run(trees[side], Path(folder) / f"{side}-{number}-{name}", overrides) for side in order
                    }
                    taken[name].append(
                        {part: found["here"][part] / found["there"][part] for part in ("throughput", "startup")}
                    )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(there)], cwd=ROOT, check=False)
    rows = {name: _middle(ratios) for name, ratios in taken.items()}
    for name, row in rows.items():
        low, high = row["throughput_range"]
        print(
            f"{name}: {row['throughput']:.2f} times the throughput of {commit} ({low:.2f} to {high:.2f}), "
            f"{row['startup']:.2f} times its seconds to start, {rounds} rounds",
            flush=True,
        )
    return rows


def _middle(ratios: list[dict[str, float]]) -> Ratios:
    speeds = [ratio["throughput"] for ratio in ratios]
    return {
        "throughput": statistics.median(speeds),
        "throughput_range": [min(speeds), max(speeds)],
        "startup": statistics.median(ratio["startup"] for ratio in ratios),
        "ratios": ratios,
    }


def _run(tree: Path, folder: Path, overrides: tuple[str, ...]) -> dict[str, float]:
    """Examples per second, and seconds until training begins, of a command of a version of the program."""
    folder.mkdir()
    ran = subprocess.run(
        [sys.executable, "-m", "pipeline", *COMMON, *overrides],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    found = list(folder.glob("outputs/runs/*/result.json"))
    if ran.returncode or not found:
        sys.exit(f"Expected {' '.join(overrides)} to train in {tree.name}, received: {ran.stderr.strip()[-400:]}")
    result = json.loads(found[0].read_text())
    if result["examples_per_second"] is None:
        sys.exit(f"Expected {' '.join(overrides)} to be measured, received no throughput.")
    return {"throughput": result["examples_per_second"], "startup": result["seconds_startup"]}

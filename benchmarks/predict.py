"""Measures how far off predictions are: fitted on two sizes of a model, compared with others, each run for real.

    python benchmarks/predict.py --rounds 3 train.replica_batch=512 train.steps=10

Sizes are widths of `mlp` under `mirrored`, on 1 and 2 workers. Seen and unseen points take turns, in rounds, each round
in another order, so that a machine's drift favours none; what is measured is the median over the rounds. Arguments with
`=` go to every command.

The sizes seen are powers of two, for which some CPUs take longer than for what is between them; unseen ones of both
kinds are summed up apart.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WORKERS = (1, 2)
SEEN, UNSEEN = (256, 2048), (384, 512, 768, 1024, 1536)
QUIET = ("strategy=mirrored", "model=mlp", "tracking=none", "measure.baseline=none", "train.save=false", "resume=never")


def main() -> int:
    """Prints predicted over measured for each unseen point, and how often the interval held; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="keeps the runs there; left out: they are removed")
    parser.add_argument("overrides", nargs="*", help="for every command, such as train.replica_batch=512")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = (arguments.folder or Path(made)).resolve()
        for number in range(arguments.rounds):
            widths = random.Random(number).sample(SEEN + UNSEEN, len(SEEN + UNSEEN))
            _run(folder, widths, WORKERS if number % 2 else WORKERS[::-1], *arguments.overrides)
            print(f"round {number + 1} of {arguments.rounds} done", flush=True)
        measured = _set_apart(folder)
        _run(folder, UNSEEN, WORKERS, "mode=predict", f"predict.sweep={folder / 'seen'}", *arguments.overrides)
        lines = (folder / "predictions.jsonl").read_text().splitlines()
        rows = [_compared(json.loads(line), measured) for line in lines[-len(UNSEEN) * len(WORKERS) :]]
    of_widths = [(width, *row) for width, row in zip([w for w in UNSEEN for _ in WORKERS], rows, strict=True)]
    for kind, wanted in (("powers of two", True), ("others", False)):
        found = [(abs(ratio - 1), held) for width, ratio, held in of_widths if (width.bit_count() == 1) is wanted]
        print(f"{kind}: median error {statistics.median(error for error, _ in found):.1%}, within 10%: "
              f"{sum(error <= 0.1 for error, _ in found)} of {len(found)}, "
              f"interval held: {sum(held for _, held in found)} of {len(found)}")  # fmt: skip
    return 0


def _set_apart(folder: Path) -> dict[tuple[int, int], list[float]]:
    """Moves the runs of sizes that are seen to a folder of their own; returns, by (parameters, workers), the others'
    throughput."""
    measured: dict[tuple[int, int], list[float]] = {}
    (folder / "seen").mkdir()
    for path in sorted(folder.glob("sweeps/*/*/result.json")):
        result = json.loads(path.read_text())
        hidden = json.loads((path.parent / "plan.json").read_text())["model_build"]["hidden"]
        if hidden[0] in SEEN:
            path.parent.rename(folder / "seen" / f"{path.parent.parent.name}_{path.parent.name}")
        else:
            place = (result["parameters"], result["workers"])
            measured.setdefault(place, []).append(result["examples_per_second"])
    return measured


def _compared(made: dict[str, Any], measured: dict[tuple[int, int], list[float]]) -> tuple[float, bool]:
    """(predicted over measured, whether the interval held) of one unseen point."""
    speeds = measured[made["parameters"], made["workers"]]
    middle = statistics.median(speeds)
    ratio, held = made["examples_per_second"] / middle, made["low"] <= middle <= made["high"]
    said = (
        f"{made['parameters']:9,} parameters, {made['workers']} workers",
        f"predicted {made['examples_per_second']:7,.0f} ({made['low']:,.0f} to {made['high']:,.0f})",
        f"measured {middle:7,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})",
        f"ratio {ratio:.3f}",
        "held" if held else "missed",
    )
    print(", ".join(said), flush=True)
    return ratio, held


def _run(folder: Path, widths: Sequence[int], workers: Sequence[int], *arguments: str) -> None:
    points = (
        f"model.build.hidden={','.join(f'[{width}]' for width in widths)}",
        f"workers={','.join(map(str, workers))}",
        f"output_dir={folder}",
    )
    ran = subprocess.run(
        [sys.executable, "-m", "pipeline", "-m", *QUIET, *points, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        sys.exit(f"pipeline {' '.join((*points, *arguments))} ended with {ran.returncode}:\n{ran.stderr}")


if __name__ == "__main__":
    sys.exit(main())

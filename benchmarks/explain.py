"""Explains what runs lose on this machine that are known to lose it to something, and prints what they are told to be.

    python benchmarks/explain.py --rounds 3

A model of 20 million parameters on small batches exchanges more than it computes; `resnet20` does not. On a machine
that others are at, workers wait for each other at every exchange, which is communication then.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import record

MANY = ("model=mlp", "model.build.hidden=[4096,4096]", "train.optimizer=sgd", "train.replica_batch=4")
CASES = {
    "20 million parameters, multi_worker": ("strategy=multi_worker", *MANY),
    "20 million parameters, mirrored": ("strategy=mirrored", *MANY),
    "resnet20, multi_worker": ("strategy=multi_worker", "model=resnet20"),
    "resnet20, mirrored": ("strategy=mirrored", "model=resnet20"),
}
COMMON = (
    "workers=2",
    "tracking=none",
    "measure.explain=true",
    "measure.repeats=3",
    "train.steps=12",
    "train.save=false",
)


def main() -> int:
    """Prints for each case what is lost, and to what; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", default="", help="the cases whose names hold this")
    parser.add_argument("overrides", nargs="*", help="for every run, such as train.replica_batch=32")
    arguments = record.parse(
        parser, smoke=["--only=20 million parameters, mirrored", "model.build.hidden=[64]", "train.steps=4"]
    )
    rows = []
    for _ in range(arguments.rounds):
        for name, overrides in CASES.items():
            if arguments.only not in name:
                continue
            with tempfile.TemporaryDirectory() as folder:
                found = _explained(Path(folder), [*overrides, *COMMON, *arguments.overrides])
            rows.append({"case": name} | found)
            parts = ", ".join(f"{part['name']} {part['share']:.0%}" for part in found["parts"])
            print(f"{name}: bound {found['bound']}; lost {found['lost']:.0%}: {parts}", flush=True)
    record.write(arguments, arguments.rounds, rows)
    return 0


def _explained(folder: Path, arguments: list[str]) -> dict[str, object]:
    record.typed(folder, *arguments)
    (result,) = folder.glob("outputs/runs/*/result.json")
    return dict(json.loads(result.read_text())["explained"])


if __name__ == "__main__":
    sys.exit(main())

"""Times a sweep and the same points as commands of their own, in turn: what a sweep saves by sharing.

    python benchmarks/sweep.py --rounds 3 train.steps=200

Arguments with `=` go to every command. Who goes first changes with the round; the ratio is the median over rounds.
"""

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STRATEGIES, WORKERS = ("one_device", "mirrored", "multi_worker"), (1, 2)


def main() -> int:
    """Prints each round's seconds and their ratio; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", help="for every command, such as model=mlp")
    arguments = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            both = (_sweep, _commands) if number % 2 == 0 else (_commands, _sweep)
            seconds = {each: each(Path(folder), arguments.overrides) for each in both}
            ratios.append(seconds[_sweep] / seconds[_commands])
            print(
                f"round {number + 1}: sweep {seconds[_sweep]:.1f} s, commands {seconds[_commands]:.1f} s, "
                f"ratio {ratios[-1]:.3f}",
                flush=True,
            )
    print(f"median ratio {statistics.median(ratios):.3f} of {len(ratios)} rounds")
    return 0


def _sweep(folder: Path, overrides: list[str]) -> float:
    return _run(
        folder, ["-m", f"strategy={','.join(STRATEGIES)}", f"workers={','.join(map(str, WORKERS))}", *overrides]
    )


def _commands(folder: Path, overrides: list[str]) -> float:
    points = itertools.product(STRATEGIES, WORKERS)
    return sum(_run(folder, [f"strategy={strategy}", f"workers={workers}", *overrides]) for strategy, workers in points)


def _run(folder: Path, arguments: list[str]) -> float:
    """Seconds that a command takes; 2 is the exit code of a point that makes no sense."""
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    if ran.returncode not in (0, 2):
        sys.exit(f"pipeline {' '.join(arguments)} ended with {ran.returncode}:\n{ran.stderr}")
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())

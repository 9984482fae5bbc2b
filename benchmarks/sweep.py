"""Times a sweep and the same points as commands of their own, in turn: what a sweep saves by sharing.

    python benchmarks/sweep.py --rounds 3 train.steps=200
    python benchmarks/sweep.py --rounds 3 --short       # twelve points of about a second each, of one small model

Arguments with `=` go to every command. Who goes first changes with the round; the ratio is the median over rounds.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import record

Points = Mapping[str, tuple[str, ...]]
POINTS = {"strategy": ("one_device", "mirrored", "multi_worker"), "workers": ("1", "2")}
SHORT = {"strategy": ("one_device", "mirrored"), "train.replica_batch": ("8", "16", "24", "32", "48", "64")}
SMOKE = {"train.replica_batch": ("8",)}
ONE_SECOND = (
    "workers=1", "model=mlp", "data=digits", "train.steps=16", "measure.repeats=1", "measure.steps=64",
    "measure.baseline=none",
)  # fmt: skip


def main() -> int:
    """Prints each round's seconds and their ratio; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", action="store_true", help="twelve points of about a second")
    parser.add_argument("overrides", nargs="*", help="for every command, such as model=mlp")
    arguments = record.parse(parser, smoke=["--rounds=1", "tracking=none", "measure.steps=16"])
    arguments.kept = arguments.kept and not arguments.short
    short = arguments.short or arguments.smoke
    overrides = [*(ONE_SECOND if short else ()), *arguments.overrides]
    points = SMOKE if arguments.smoke else SHORT if short else POINTS
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.rounds):
            both = (_sweep, _commands) if number % 2 == 0 else (_commands, _sweep)
            seconds = {way: way(Path(folder), points, overrides) for way in both}
            ratios.append(seconds[_sweep] / seconds[_commands])
            print(
                f"round {number + 1}: sweep {seconds[_sweep]:.1f} s, commands {seconds[_commands]:.1f} s, "
                f"ratio {ratios[-1]:.3f}",
                flush=True,
            )
    print(f"median ratio {statistics.median(ratios):.3f} of {len(ratios)} rounds")
    record.write(arguments, arguments.rounds, {"ratios": ratios})
    return 0


def _sweep(folder: Path, points: Points, overrides: list[str]) -> float:
    return _run(folder, ["-m", *(f"{key}={','.join(values)}" for key, values in points.items()), *overrides])


def _commands(folder: Path, points: Points, overrides: list[str]) -> float:
    typed = itertools.product(*([f"{key}={value}" for value in values] for key, values in points.items()))
    return sum(_run(folder, [*point, *overrides]) for point in typed)


def _run(folder: Path, arguments: list[str]) -> float:
    """Seconds that a command takes; 2 is the exit code of a point that makes no sense."""
    began = time.monotonic()
    record.typed(folder, *arguments, fine=(0, 2))
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())

"""Runs two identical points again and again: how often their report calls them a tie, and how far apart they lie.

    python benchmarks/ties.py --pairs 20 model=cnn strategy=mirrored

Arguments with `=` go to every command. At least 18 of 20 are to be ties.
"""

import argparse
import math
import statistics
import sys
import tempfile
from pathlib import Path

import record

from pipeline.analyze.compare import Answer
from pipeline.views import report

# What a pair has in common where nothing else is said: its speed, and as little as possible beside it.
COMMON = ("data=digits", "model=mlp", "train.steps=20", "measure.baseline=none", "tracking=none")


def main() -> int:
    """Prints each pair and the count; returns 1 where fewer than nine in ten tied."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("overrides", nargs="*", help="for every command, such as model=cnn")
    arguments = record.parse(parser, smoke=["--pairs=1", "measure.repeats=1", "measure.steps=20"])
    asked = dict(override.split("=", 1) for override in (*COMMON, "strategy=mirrored", *arguments.overrides))
    strategy = asked.pop("strategy")
    overrides = [f"strategy={strategy},{strategy}", *(f"{name}={value}" for name, value in asked.items())]
    ties, apart = 0, []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.pairs):
            written = _pair(Path(folder), f"outputs{number}", overrides)
            one, two = (point.result.speed.examples_per_second for point in written.sweep.measured)
            tie = all(each.answer != Answer.FASTER for each in written.verdict.against)
            ties, apart = ties + tie, [*apart, abs(math.log(one / two))]
            said = "a tie" if tie else "told apart"
            print(f"pair {number + 1}: {one:,.0f} and {two:,.0f} examples/s, {said}", flush=True)
    # The difference of two normal values has a median of 0.6745 sqrt(2) standard deviations.
    spread = statistics.median(apart) / (0.6745 * math.sqrt(2))
    print(f"{ties} of {arguments.pairs} tied; equal runs lie {spread:.1%} apart (a standard deviation)")
    record.write(arguments, arguments.pairs, {"ties": ties, "apart": apart, "deviation": spread})
    return 0 if arguments.smoke or ties >= 0.9 * arguments.pairs else 1


def _pair(folder: Path, output: str, overrides: list[str]) -> report.WrittenReport:
    record.typed(folder, "-m", *overrides, f"output_dir={output}")
    (sweep,) = (folder / output / "sweeps").iterdir()
    return report.write(sweep)


if __name__ == "__main__":
    sys.exit(main())

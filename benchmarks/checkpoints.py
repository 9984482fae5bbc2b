"""Times training with a checkpoint every 50 steps beside training without one, side by side in one run.

    python benchmarks/checkpoints.py --runs 3 model=cnn strategy=mirrored workers=2

A run writes a checkpoint every 100 steps: of each 100, the first 50 have one copied and written, the others have none.
The ratio of a pair is the time of the first 50 over that of the next 50; what is printed is the median over pairs, with
their quartiles. Time is that between the events of two calls, so that copying and all else in between is in it.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import record

# One long epoch without validation, in calls that end with each 50.
LONG = (
    "data=synthetic", "data.build.train_examples=64000", "data.build.validation_examples=0", "train.epochs=null",
    "train.steps_per_call=5", "checkpoint.every_minutes=null", "checkpoint.every_steps=100", "measure.steps=0",
    "measure.baseline=none", "tracking=none", "train.save=false",
)  # fmt: skip
WINDOW = 50


def main() -> int:
    """Prints each run's pairs and what they come to; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=3, help="in each run")
    parser.add_argument("overrides", nargs="*", help="for every run, such as model=mlp")
    arguments = record.parse(parser, smoke=["--runs=1", "--pairs=2", "model=mlp", "data.build.shape=[8]"])
    ratios: list[float] = []
    for number in range(arguments.runs):
        found, written = _run(arguments.pairs, arguments.overrides)
        ratios += found
        told = ", ".join(f"{ratio:.3f}" for ratio in found)
        print(f"run {number + 1}: {told}; a checkpoint took {statistics.median(written):.3f} s to write", flush=True)
    low, middle, high = statistics.quantiles(ratios, n=4)
    spread = f"quartiles {low:.3f} to {high:.3f}, {len(ratios)} pairs"
    print(f"steps with a checkpoint / without: median {middle:.3f}, {spread}")
    record.write(arguments, arguments.runs, {"ratios": ratios, "median": middle, "quartiles": [low, high]})
    return 0


def _run(pairs: int, overrides: list[str]) -> tuple[list[float], list[float]]:
    """(ratios of the pairs of windows, seconds that each checkpoint took to write)."""
    with tempfile.TemporaryDirectory() as folder:
        # The first hundred steps warm up.
        length = f"train.steps={2 * WINDOW * (1 + pairs)}"
        record.typed(folder, *LONG, length, *overrides)
        (log,) = Path(folder).glob("outputs/runs/*/events.jsonl")
        told = [json.loads(line) for line in log.read_text().splitlines()]
    at = {event["step"]: event["time"] for event in told if event["event"] == "steps"}
    seconds = [at[step + WINDOW] - at[step] for step in range(2 * WINDOW, 2 * WINDOW * (1 + pairs), WINDOW)]
    ratios = [with_one / without for with_one, without in zip(seconds[::2], seconds[1::2], strict=True)]
    return ratios, [event["seconds"] for event in told if event["event"] == "checkpoint"]


if __name__ == "__main__":
    sys.exit(main())

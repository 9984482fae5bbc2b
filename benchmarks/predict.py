"""Measures how far off predictions are: fitted on two sizes of a model, compared with others, each run for real.

    python benchmarks/predict.py --rounds 5 train.replica_batch=512 train.steps=10

Sizes are widths of `mlp` under `mirrored`, on 1 and 2 workers. A round runs the points that are seen, and then predicts
and runs each of the others in turn, from the runs of the seen ones so far; each round in another order. What counts is
the median over the rounds of predicted over measured, so that what a machine does for a moment decides nothing; an
interval is to hold the run that follows it. How near another run of the same point comes to the median of the rest is
the yardstick. Arguments with `=` go to every command, such as `predict.time_one=false`.

The sizes seen are powers of two, for which some CPUs take longer than for what is between them; unseen ones of both
kinds are summed up apart.
"""

import argparse
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import record

WORKERS = (1, 2)
SEEN, UNSEEN = (256, 2048), (384, 512, 768, 1024, 1536)
SMALL = ("data=digits", "train.replica_batch=8", "train.steps=5", "measure.repeats=1", "measure.steps=5")
QUIET = ("strategy=mirrored", "model=mlp", "tracking=none", "measure.baseline=none", "train.save=false", "resume=never")


def main() -> int:
    """Prints predicted over measured for each unseen point, and how often the interval held; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--unseen", type=int, nargs="+", default=UNSEEN, help="widths to predict: %(default)s")
    parser.add_argument("--folder", type=Path, help="keeps the runs there; left out: they are removed")
    parser.add_argument("overrides", nargs="*", help="for every command, such as train.replica_batch=512")
    arguments = record.parse(parser, smoke=["--rounds=1", "--unseen=512", *SMALL])
    with tempfile.TemporaryDirectory() as made:
        folder = (arguments.folder or Path(made)).resolve()
        (folder / "seen").mkdir(parents=True)
        for number in range(arguments.rounds):
            rng, workers = random.Random(number), WORKERS if number % 2 else WORKERS[::-1]
            _run(folder, rng.sample(SEEN, len(SEEN)), workers, *arguments.overrides)
            _set_apart(folder)
            for width in rng.sample(arguments.unseen, len(arguments.unseen)):
                _run(folder, [width], workers, "mode=predict", f"predict.sweep={folder / 'seen'}", *arguments.overrides)
                _run(folder, [width], workers, *arguments.overrides)
            print(f"round {number + 1} of {arguments.rounds} done", flush=True)
        measured, predicted = _measured(folder), _predicted(folder)
    widths = [width for width in sorted(arguments.unseen) for _ in WORKERS]
    rows = [
        (width, *_compared(predicted[place], measured[place]))
        for width, place in zip(widths, sorted(predicted), strict=True)
    ]
    for kind, wanted in (("powers of two", True), ("others", False)):
        found = [(abs(ratio - 1), held) for width, ratio, held in rows if (width.bit_count() == 1) is wanted]
        if not found:
            continue
        held = [whether for _, intervals in found for whether in intervals]
        print(f"{kind}: median error {statistics.median(error for error, _ in found):.1%}, within 10%: "
              f"{sum(error <= 0.1 for error, _ in found)} of {len(found)}, intervals held: {sum(held)} of {len(held)}"
        )  # fmt: skip
    again = [
        abs(speed / statistics.median(speeds[:place] + speeds[place + 1 :]) - 1)
        for speeds in measured.values()
        for place, speed in enumerate(speeds)
        if len(speeds) > 1
    ]
    if again:
        print(f"another run of the same point: median error {statistics.median(again):.1%}, within 10%: "
              f"{sum(error <= 0.1 for error in again)} of {len(again)}")  # fmt: skip
    wide, apart = _half_width(predicted), _spread(measured)
    print(f"intervals: {wide:.1%} to either side (median), beside equal runs that lie "
          f"{'an unknown way' if apart is None else f'{apart:.1%}'} apart (a standard deviation)")  # fmt: skip
    points = [
        {"width": width, "workers": place[1], "ratio": ratio, "held": held}
        for (width, ratio, held), place in zip(rows, sorted(predicted), strict=True)
    ]
    found = {"points": points, "another_run": again, "half_width": wide, "equal_runs_apart": apart}
    record.write(arguments, arguments.rounds, found)
    return 0


def _set_apart(folder: Path) -> None:
    """Moves the runs of sizes that are seen to a folder of their own."""
    for path in sorted(folder.glob("sweeps/*/*/plan.json")):
        if json.loads(path.read_text())["model_build"]["hidden"][0] in SEEN:
            path.parent.rename(folder / "seen" / f"{path.parent.parent.name}_{path.parent.name}")


def _measured(folder: Path) -> dict[tuple[int, int], list[float]]:
    """The throughput of each run of an unseen point, by (parameters, workers)."""
    found: dict[tuple[int, int], list[float]] = {}
    for path in sorted(folder.glob("sweeps/*/*/result.json")):
        result = json.loads(path.read_text())
        found.setdefault((result["parameters"], result["workers"]), []).append(result["examples_per_second"])
    return found


def _predicted(folder: Path) -> dict[tuple[int, int], list[dict[str, float]]]:
    """The predictions of each unseen point, by (parameters, workers)."""
    found: dict[tuple[int, int], list[dict[str, float]]] = {}
    for line in (folder / "predictions.jsonl").read_text().splitlines():
        made = json.loads(line)
        found.setdefault((made["parameters"], made["workers"]), []).append(made)
    return found


def _half_width(predicted: dict[tuple[int, int], list[dict[str, float]]]) -> float:
    """Half the width of an interval over its middle: the median of all."""
    every = [made for of_point in predicted.values() for made in of_point]
    return statistics.median((made["high"] - made["low"]) / 2 / made["examples_per_second"] for made in every)


def _spread(measured: dict[tuple[int, int], list[float]]) -> float | None:
    """The standard deviation of equal runs, relative and pooled over the points; None where none was run again."""
    several = [[math.log(speed) for speed in speeds] for speeds in measured.values() if len(speeds) > 1]
    squares = sum(statistics.variance(logs) * (len(logs) - 1) for logs in several)
    return math.sqrt(squares / sum(len(logs) - 1 for logs in several)) if several else None


def _compared(made: list[dict[str, float]], speeds: list[float]) -> tuple[float, list[bool]]:
    """(predicted over measured, whether each interval held) of one unseen point."""
    predicted = [prediction["examples_per_second"] for prediction in made]
    pairs = list(zip(made, speeds, strict=True))
    ratios = [pair["examples_per_second"] / speed for pair, speed in pairs]
    held = [pair["low"] <= speed <= pair["high"] for pair, speed in pairs]
    said = (
        f"{made[0]['parameters']:9,} parameters, {made[0]['workers']} workers",
        f"predicted {statistics.median(predicted):7,.0f} ({min(predicted):,.0f} to {max(predicted):,.0f})",
        f"measured {statistics.median(speeds):7,.0f} ({min(speeds):,.0f} to {max(speeds):,.0f})",
        f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})",
        f"{sum(held)} of {len(held)} intervals held",
    )
    print(", ".join(said), flush=True)
    return statistics.median(ratios), held


def _run(folder: Path, widths: Sequence[int], workers: Sequence[int], *arguments: str) -> None:
    points = (
        f"model.build.hidden={','.join(f'[{width}]' for width in widths)}",
        f"workers={','.join(map(str, workers))}",
        f"output_dir={folder}",
    )
    record.typed(folder, "-m", *QUIET, *points, *arguments)


if __name__ == "__main__":
    sys.exit(main())

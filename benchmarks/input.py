"""Profiles a training whose input has a slow `map`, and trains without that: the predicted ceiling beside what came.

    python benchmarks/input.py --rounds 3 strategy=multi_worker workers=2

The map sleeps, or burns a core with TensorFlow's operations; which of the two changes with the round. The ratio is that
of the throughput without the map, the mean of a run before and a run after, to the one predicted with it. Where these
two differ much, other work on the machine decides.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import record

COMMON = (
    "data.build._target_=costly.through", "data.num_classes=4", "model=mlp", "model.build.hidden=[1024,1024]",
    "train.replica_batch=64", "measure.baseline=none", "tracking=none", "train.save=false",
    "resume=never",
)  # fmt: skip
KINDS = ("sleep", "busy")
# Seconds of training, so that the machine's own ups and downs even out; and hardly any of what is slow.
FAST, SLOW = "train.steps=400", "train.steps=5"


def main() -> int:
    """Prints each round's prediction and what came; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("overrides", nargs="*", help="for every run, such as strategy=mirrored workers=2")
    arguments = record.parse(
        parser, smoke=["--rounds=1", "measure.repeats=1", "model.build.hidden=[64]", "train.steps=5"]
    )
    ratios = []
    for number in range(arguments.rounds):
        kind = KINDS[number % len(KINDS)]
        before = _run([FAST, *arguments.overrides])["examples_per_second"]
        slow = [SLOW, f"+data.build.slow={kind}", "data.profile=true", "measure.steps=0"]
        found = _run([*slow, *arguments.overrides])["profile"]
        after = _run([FAST, *arguments.overrides])["examples_per_second"]
        made = (before + after) / 2
        if found["ceiling_examples_per_second"] is None:
            print(f"round {number + 1}, {kind}: {found['bound']}, so nothing was predicted", flush=True)
            continue
        ratios.append(made / found["ceiling_examples_per_second"])
        print(
            f"round {number + 1}, {kind}: {found['bound']}-bound at {found['input_examples_per_second']:,.0f}/s, "
            f"predicted {found['ceiling_examples_per_second']:,.0f}, "
            f"came {before:,.0f} before and {after:,.0f} after, ratio {ratios[-1]:.3f}",
            flush=True,
        )
    if ratios:
        print(f"median ratio {statistics.median(ratios):.3f} of {len(ratios)} rounds")
    record.write(arguments, arguments.rounds, {"ratios": ratios})
    return 0


def _run(overrides: list[str]) -> dict[str, Any]:
    """What result.json says of a run."""
    with tempfile.TemporaryDirectory() as folder:
        record.typed(folder, *COMMON, *overrides)
        (path,) = Path(folder).glob("outputs/runs/*/result.json")
        return json.loads(path.read_text())


if __name__ == "__main__":
    sys.exit(main())

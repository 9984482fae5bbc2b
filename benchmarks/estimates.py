"""Compares the bytes that a step exchanges as `mode=plan` estimates them with what runs send; memory: `memory.py`.

    python benchmarks/estimates.py

Bytes are those that the loopback interface of a network namespace counts, of a longer run less those of a shorter one,
by the steps between them.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import record

from pipeline.plan import estimate, plan, size

COMMON = (
    "measure.baseline=none", "measure.steps=0", "tracking=none", "train.save=false", "resume=never",
    "checkpoint.every_minutes=null", "tracking.system_metrics_seconds=0",
)  # fmt: skip
TABLES = ("model=recommender", "data=clicks", "data.build.categories=[100000,50000]")
BYTES = {
    "`multi_worker workers=2`, a step": ("strategy=multi_worker", "workers=2", "strategy.collective=tensorflow"),
    "`parameter_server workers=1`, a step": ("strategy=parameter_server", "workers=1"),
    "`recommender`, tables of 100,000 and 50,000 rows, `parameter_server workers=1`, a step": (
        "strategy=parameter_server", "workers=1", *TABLES,
    ),
}  # fmt: skip
# The case of the smallest size, and the model for it.
FIRST = next(iter(BYTES))
SMOKE = ("model=mlp", "data=digits")


def main() -> int:
    """Prints each estimate beside what was measured; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="steps of the longer run; the other makes a third")
    parser.add_argument("--only", default="", help="the cases whose names hold this")
    arguments = record.parse(parser, smoke=["--rounds=1", "--steps=6"])
    cases = {name: overrides for name, overrides in BYTES.items() if arguments.only in name}
    if arguments.smoke:
        cases = {name: (*overrides, *SMOKE) for name, overrides in cases.items() if name == FIRST}
    record.in_a_network_of_its_own()
    rows = {}
    for name, overrides in cases.items():
        made = [_bytes(overrides, arguments.steps) for _ in range(arguments.rounds)]
        row = {"estimated": made[0][0], "measured": statistics.median(measured for _, measured in made)}
        rows[name] = row | {"unit": "bytes a step"}
        print(
            f"{name}: estimated {row['estimated']:,}, measured {row['measured']:,.0f} {rows[name]['unit']}", flush=True
        )
    record.write(arguments, arguments.rounds, rows)
    return 0


def _bytes(overrides: tuple[str, ...], steps: int) -> tuple[int, float]:
    """(estimated, counted) bytes that a step exchanges."""
    with tempfile.TemporaryDirectory() as folder:
        counted = {
            count: _travelled(Path(folder), [*overrides, f"train.steps={count}"]) for count in (steps // 3, steps)
        }
        needs = _estimated(next(Path(folder).glob("runs/*")), overrides)
    exchanged = needs.exchanged
    assert exchanged is not None
    return exchanged.total, (counted[steps] - counted[steps // 3]) / (steps - steps // 3)


def _travelled(folder: Path, arguments: list[str]) -> int:
    """Bytes that a run sends over the loopback interface, where nobody else sends any."""
    before = _over_loopback()
    record.typed(folder, *_typed(folder, arguments))
    return _over_loopback() - before


def _over_loopback() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(line.split()[1])


def _typed(folder: Path | str, arguments: Sequence[str]) -> list[str]:
    chosen = ["model=cnn", "data=mnist5k"]
    for given in arguments:
        chosen = [choice for choice in chosen if choice.partition("=")[0] != given.partition("=")[0]]
    return [*chosen, *COMMON, *arguments, f"output_dir={folder}"]


def _estimated(point: Path, arguments: Sequence[str]) -> estimate.Estimate:
    """What the plan of the run in `point` needs; a model whose size is not known is built once."""
    planned = plan.from_json((point / "plan.json").read_text())
    known = size.shipped(planned)
    if known is None:
        with tempfile.TemporaryDirectory() as folder:
            record.typed(folder, *_typed(folder, [*arguments, "mode=plan"]))
            (kept,) = Path(folder).glob("sizes/*.json")
            known = msgspec.json.decode(kept.read_bytes(), type=size.Size)
    return estimate.estimate(planned, known)


if __name__ == "__main__":
    sys.exit(main())

"""Throughput of the same training from memory, from TFRecord shards and from tf.data services, in turn.

    python benchmarks/reading.py strategy=mirrored workers=2 --rounds 4 --only shards

First `model=cnn` on the same 4,000 digits: arrays in memory, the shards that `python -m pipeline prepare` makes of
them, and these kept as arrays. Then one device on examples that burn a core, made by itself and by two data servers.
Ratios are of two runs that follow each other; which of them is first changes with the round.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

import record

COMMON = ("measure.baseline=none", "tracking=none", "train.save=false", "resume=never")
# Timed for some ten seconds, in which the machine's own ups and downs even out.
LONG = "measure.repeats=12"
PARTS = ("shards", "kept", "services")
SMALL = ("model=mlp", "train.replica_batch=8", "train.steps=3", "measure.repeats=1", "measure.steps=3")
SHARDS = ("data=tfrecord", "data.path=prepared")
COSTLY = (
    "strategy=one_device", "data.build._target_=costly.through", "+data.build.slow=busy", "data.num_classes=4",
    "model=mlp", "train.replica_batch=32", "train.steps=40", "measure.repeats=3", "data.shuffle=false",
)  # fmt: skip


def main() -> int:
    """Prints each round's throughputs and the median ratios; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("overrides", nargs="*", help="for the first part, such as strategy=multi_worker workers=2")
    arguments = record.parse(parser, smoke=["--rounds=1", "--only", "kept", "services"])
    small = SMALL if arguments.smoke else ()
    given, memory, costly = (LONG, *arguments.overrides, *small), "data=mnist5k", (*COSTLY, *small)
    pairs = {
        "shards": ("shards / memory", (memory, *given), (*SHARDS, *given)),
        "kept": ("shards kept in memory / memory", (memory, *given), (*SHARDS, "data.cache=memory", *given)),
        "services": ("two data servers / none", costly, (*costly, "data.service=2")),
    }
    with tempfile.TemporaryDirectory() as folder:
        record.typed(folder, "prepare", memory, "out=prepared", "workers=2")
        rows = {part: _compare(folder, *pairs[part], arguments.rounds) for part in arguments.only}
    record.write(arguments, arguments.rounds, rows)
    return 0


def _compare(folder: str, name: str, one: tuple[str, ...], other: tuple[str, ...], rounds: int) -> list[float]:
    ratios = []
    for number in range(rounds):
        order = (one, other) if number % 2 == 0 else (other, one)
        made = {command: _throughput(folder, *command) for command in order}
        ratios.append(made[other] / made[one])
        print(f"{name}: {made[other]:,.0f} / {made[one]:,.0f} examples/s = {ratios[-1]:.3f}", flush=True)
    print(f"{name}: median {statistics.median(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}, {rounds} rounds\n")
    return ratios


def _throughput(folder: str, *overrides: str) -> float:
    """Examples per second of a run, as its result.json has them."""
    before = set(Path(folder).glob("outputs/runs/*"))
    record.typed(folder, *COMMON, *overrides)
    (made,) = set(Path(folder).glob("outputs/runs/*")) - before
    return float(json.loads((made / "result.json").read_text())["examples_per_second"])


if __name__ == "__main__":
    sys.exit(main())

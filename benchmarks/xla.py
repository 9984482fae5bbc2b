"""Trains five models with and without XLA, and has `train.xla=auto` choose: how much faster it is, and which it chose.

    python benchmarks/xla.py --rounds 3

Each of a round's two runs is timed by itself, in turn. `apart` is how far the losses of two replicas that XLA compiles
are from those of one device without it, at most, under mirrored and multi_worker. Where two processes read a stream's
examples in another order than one does, with and without XLA, they are held against themselves without it.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import record

# Without dropout, of which two replicas draw other numbers than one device, with and without XLA.
MODELS = {
    "mlp": ("model=mlp", "data=digits"),
    "cnn": ("model=cnn", "model.build.dropout=0", "data=digits"),
    "resnet20": ("model=resnet20", "data=digits"),
    "transformer": ("model=transformer", "model.build.dropout=0", "data=text", "data.build.length=32"),
    "recommender": ("model=recommender", "data=clicks"),
}
STREAMS = ("recommender",)
COMMON = ("tracking=none", "train.save=false", "measure.baseline=none", "train.sample_tokens=0", "resume=never")
ONE = ("strategy=one_device", "workers=1")
MANY = (("strategy=mirrored", "workers=2"), ("strategy=multi_worker", "workers=2"))
# As many steps as losses are compared over: rounding grows from step to step, in a deep net with ReLU most of all.
STEPS = 2


def main() -> int:
    """Prints a line for each model; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=MODELS, help="these models alone")
    arguments = record.parse(parser, smoke=["--rounds=1", "--only=mlp"])
    rows: dict[str, Any] = {}
    for name in arguments.only or MODELS:
        rows[name] = row = _row(name, arguments.rounds)
        ratio, chosen = statistics.median(row["ratios"]), "XLA" if row["chosen"] else "TensorFlow"
        print(f"{name}: XLA / TensorFlow {ratio:.2f}; auto took {chosen} ({row['speedup']:.2f}); {row['apart']:.0e}")
    record.write(arguments, arguments.rounds, rows)
    return 0


def _row(name: str, rounds: int) -> dict[str, Any]:
    """Throughput with XLA over that without, what `auto` made of it, and how far losses are apart."""
    ratios = [_ratio(name, turn) for turn in range(rounds)]
    chosen = _run(name, *ONE, "train.xla=auto", "measure.steps=0", "train.steps=1")[0]
    untimed = ("measure.steps=0", f"train.steps={STEPS}", "train.global_batch=16", "train.steps_per_call=1")
    apart = [
        abs(one - other)
        for strategy in MANY
        for one, other in zip(
            _run(name, *strategy, *untimed, "train.xla=true")[1],
            _run(name, *(strategy if name in STREAMS else ONE), *untimed)[1],
            strict=True,
        )
    ]
    return {
        "ratios": ratios,
        "chosen": chosen["xla"],
        "speedup": chosen["xla_speedup"],
        "seconds_compiling": chosen["seconds_compiling"],
        "apart": max(apart),
    }


def _ratio(name: str, turn: int) -> float:
    """The throughput with XLA over that without; who goes first changes with the turn."""
    order = ("true", "false") if turn % 2 else ("false", "true")
    timed = (*ONE, "measure.repeats=3", "train.steps=5")
    rates = {xla: _run(name, *timed, f"train.xla={xla}")[0]["examples_per_second"] for xla in order}
    return float(rates["true"] / rates["false"])


def _run(name: str, *overrides: str) -> tuple[dict[str, Any], list[float]]:
    """What result.json says of a run, and the loss of each of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        record.typed(folder, *MODELS[name], *COMMON, *overrides)
        (path,) = Path(folder).glob("outputs/runs/*/result.json")
        lines = map(json.loads, (path.parent / "events.jsonl").read_text().splitlines())
        losses = [loss for event in lines if event["event"] == "steps" for loss in event["losses"]]
        return json.loads(path.read_text()), losses


if __name__ == "__main__":
    sys.exit(main())

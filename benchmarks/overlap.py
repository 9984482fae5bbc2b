"""What gradients that leave in buckets gain over a slow link: step, exposed communication and what was predicted.

    python benchmarks/overlap.py --rounds 2

Two network namespaces stand for hosts, with a core and a process each. `predict` is fitted on runs over the open link,
before the link is held to a rate; then `cnn` trains in turn with all gradients in one message at the end of a step
(`strategy.bucket_bytes=0`) and in buckets. Exposed communication is what a step takes longer than one without exchange,
which `measure.explain` times. Needs root, iproute2, openssh-client and openssh-server; without, it says so and ends.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import record

sys.path.append(str(record.ROOT / "tests" / "support"))

from namespaces import Hosts, made

PYTHON = """#!/bin/sh
case "$(ip -brief address)" in
    *{second}/*) exec taskset -c {last} {python} "$@" ;;
    *) exec taskset -c {first} {python} "$@" ;;
esac
"""
COMMON = (
    "strategy=multi_worker", "model=cnn", "data=mnist5k", "train.replica_batch=64", "train.steps=20",
    "train.save=false", "train.check=off", "hardware.devices_per_host=1", "hardware.threads_per_device=1",
    "tracking=none", "resume=never", "measure.repeats=3",
)  # fmt: skip
BUCKETS = {"at the end": "strategy.bucket_bytes=0", "in buckets": "strategy.bucket_bytes=null"}


def main() -> int:
    """Prints the step, exposed communication and prediction of each; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of the link, as `tc` takes it: %(default)s")
    parser.add_argument("overrides", nargs="*", help="for every command, such as train.replica_batch=128")
    arguments = record.parse(parser, smoke=["--rounds=1", "measure.repeats=1", "train.steps=2", "measure.steps=2"])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "ssh").mkdir()
        try:
            with made(Path(folder) / "ssh", 2) as hosts:
                rows = _measured(Path(folder), hosts, arguments)
        except pytest.skip.Exception as reason:
            print(f"not measured: {reason}")
            rows = {"not_measured": str(reason)}
    record.write(arguments, arguments.rounds, rows)
    return 0


def _measured(folder: Path, hosts: Hosts, arguments: argparse.Namespace) -> dict[str, Any]:
    first, *_, last = 2 * sorted(os.sched_getaffinity(0))
    python = folder / "python"
    python.write_text(PYTHON.format(second=hosts.addresses[1], first=first, last=last, python=sys.executable))
    python.chmod(0o755)
    on = (*hosts.options(), f"cluster.options.python={python}")

    def typed(*words: str, fine: tuple[int, ...] = (0,)) -> None:
        record.typed(folder, *words, *on, fine=fine)

    def trains(*words: str) -> None:
        typed(*words, *COMMON, *arguments.overrides)

    typed("doctor", "--only", "link", fine=(0, 1))
    trains("-m", "workers=1,2", "sweep.name=open", "measure.baseline=none")
    for number in (1, 2):
        # What waits for less than a second is not dropped.
        hosts.limit(number, arguments.rate, latency="1s")
    typed("doctor", "--only", "link", fine=(0, 1))
    for setting in BUCKETS.values():
        trains("mode=predict", "predict.sweep=open", "workers=2", setting)
    found: dict[str, list[dict[str, float]]] = {how: [] for how in BUCKETS}
    for number in range(arguments.rounds):
        for how in sorted(BUCKETS, reverse=number % 2 == 1):
            trains("workers=2", "measure.explain=true", BUCKETS[how])
            found[how].append(_latest(folder))
            print(f"round {number + 1}, {how}: {found[how][-1]}", flush=True)
    lines = (folder / "outputs" / "predictions.jsonl").read_text().splitlines()
    rows = {
        how: _row(how, float(json.loads(line)["examples_per_second"]), found[how])
        for how, line in zip(BUCKETS, lines, strict=True)
    }
    whole, overlapped = (row["exposed_ms"] for row in rows.values())
    print(f"exposed communication falls by {1 - overlapped / whole:.0%}")
    return {"rate": arguments.rate, "sends": rows}


def _latest(folder: Path) -> dict[str, float]:
    """The throughput, step and exposed communication of the last run."""
    path = max(folder.glob("outputs/runs/*/result.json"), key=lambda path: path.stat().st_mtime)
    result = json.loads(path.read_text())
    step_ms = 1000 * result["global_batch"] / result["examples_per_second"]
    (share,) = (part["share"] for part in result["explained"]["parts"] if part["name"] == "communication")
    return {"step_ms": step_ms, "exposed_ms": share * step_ms, "global_batch": result["global_batch"]}


def _row(how: str, predicted: float, runs: list[dict[str, float]]) -> dict[str, float]:
    """The medians of runs beside a predicted throughput."""
    step_ms, exposed_ms = (statistics.median(run[name] for run in runs) for name in ("step_ms", "exposed_ms"))
    predicted_ms = 1000 * runs[0]["global_batch"] / predicted
    print(f"{how}: a step takes {step_ms:.1f} ms, of which {exposed_ms:.1f} are exposed communication; predicted "
          f"{predicted_ms:.1f} ms, {predicted_ms / step_ms - 1:+.0%}", flush=True)  # fmt: skip
    return {"step_ms": step_ms, "exposed_ms": exposed_ms, "predicted_ms": predicted_ms}


if __name__ == "__main__":
    sys.exit(main())

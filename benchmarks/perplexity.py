"""Trains the smallest transformer with ours and with Keras's plain `fit`, as long each, and compares what they learnt.

    python benchmarks/perplexity.py --seconds 120

Both train in turn, for some seconds each, while the other is stopped; each has all cores. What counts is the perplexity
on held-out text once both have had their time, of which validation after each epoch is a part.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import record

BACKENDS = ("tensorflow", "jax")
SECONDS_BETWEEN_LOOKS = 0.1
# Until both have begun, and until both have ended.
PATIENCE = 600.0


def main() -> int:
    """Prints both perplexities for each backend; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0, help="that each trains")
    parser.add_argument("--slice", type=float, default=5.0, help="seconds that one trains before the other does")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--only", default="", help="the backends whose names hold this")
    arguments = record.parse(parser, smoke=["--seconds=1", "--slice=0.5", "--only=tensorflow"])
    rows = {}
    for backend in BACKENDS:
        if arguments.only in backend:
            with tempfile.TemporaryDirectory(prefix="perplexity_") as folder:
                rows[backend] = row = _compared(Path(folder), backend, arguments)
            ours, fit = row["ours"], row["fit"]
            print(
                f"{backend}: perplexity {ours['perplexity']:.2f} after {ours['steps']} steps; Keras's fit "
                f"{fit['perplexity']:.2f} after {fit['steps']} steps",
                flush=True,
            )
            record.write(arguments, 1, rows)
    return 0


def _compared(folder: Path, backend: str, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """What both came to in turn."""
    until = {name: folder / f"{name}.until" for name in ("ours", "fit")}
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(record.OWN), str(record.ROOT)))}
    ours = subprocess.Popen(
        [
            sys.executable, "-m", "pipeline", f"backend={backend}", "strategy=one_device", "hardware=1cpu",
            "model=transformer", "data=text", f"train.replica_batch={arguments.batch}", "train.epochs=10000",
            f"train.callbacks=[{{_target_: stopping.Until, path: {until['ours']}}}]", "measure.steps=0",
            "measure.baseline=none", "tracking=none", "tracking.system_metrics_seconds=0", "resume=never",
            "checkpoint.every_minutes=null", "train.save=false", "launch.heartbeat_timeout=600", f"output_dir={folder}",
        ],
        cwd=folder, env=environ, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    fit = subprocess.Popen(
        [sys.executable, record.OWN / "plain_fit.py", until["fit"], str(arguments.batch), folder / "fit.json"],
        cwd=folder, env=environ | {"KERAS_BACKEND": backend}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        pids = _begun(folder, until, ours, fit)
        _in_turn(pids, arguments.seconds, arguments.slice)
        for path in until.values():
            path.touch()
        _wait(lambda: ours.poll() is not None and fit.poll() is not None, ours, fit)
    finally:
        for process in (ours, fit):
            process.terminate()
            process.wait()
    (result,) = folder.glob("runs/*/result.json")
    found = json.loads(result.read_text())
    (log,) = folder.glob("runs/*/events.jsonl")
    steps = max(event["step"] for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "steps")
    return {
        "ours": {"perplexity": found["val_metrics"]["perplexity"], "steps": steps},
        "fit": json.loads((folder / "fit.json").read_text()),
    }


def _begun(
    folder: Path, until: dict[str, Path], ours: "subprocess.Popen[bytes]", fit: "subprocess.Popen[bytes]"
) -> dict[str, int]:
    """The processes that train, each of which is stopped as soon as it has made its first steps."""
    pids = dict[str, int]()

    def begun() -> bool:
        for name in set(until) - set(pids):
            if until[name].with_suffix(".began").exists():
                pids[name] = fit.pid if name == "fit" else _trains(folder)
                os.kill(pids[name], signal.SIGSTOP)
        return len(pids) == len(until)

    _wait(begun, ours, fit)
    return pids


def _in_turn(pids: dict[str, int], seconds: float, piece: float) -> None:
    """Lets both, which are stopped, go on for so many seconds each, in pieces, while the other is stopped."""
    left, order = dict.fromkeys(pids, seconds), sorted(pids)
    try:
        while any(value > 0 for value in left.values()):
            for name in order:
                os.kill(pids[name], signal.SIGCONT)
                began = time.monotonic()
                time.sleep(min(piece, left[name]))
                os.kill(pids[name], signal.SIGSTOP)
                left[name] = max(0.0, left[name] - (time.monotonic() - began))
            order.reverse()
    finally:
        for name in order:
            os.kill(pids[name], signal.SIGCONT)


def _trains(folder: Path) -> int:
    """The process that trains, as the log of the run has it."""
    (log,) = folder.glob("runs/*/events.jsonl")
    (pid,) = [event["pid"] for event in map(json.loads, log.read_text().splitlines()) if event["event"] == "started"]
    return int(pid)


def _wait(done: Callable[[], bool], *processes: subprocess.Popen[bytes]) -> None:
    """Returns once it is done; exits where one has failed, or it takes too long."""
    until = time.monotonic() + PATIENCE
    while not done():
        failed = [process.args for process in processes if process.poll() not in (None, 0)]
        if failed or time.monotonic() > until:
            sys.exit(f"{failed or 'Both'} did not train.")
        time.sleep(SECONDS_BETWEEN_LOOKS)


if __name__ == "__main__":
    sys.exit(main())

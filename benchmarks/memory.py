"""Compares the memory that `mode=plan` estimates with the most that the process which trains ever held.

    python benchmarks/memory.py
    python benchmarks/memory.py --only 100m

Both are beside what a process holds that has only imported its backend. Each case trains for a few steps, and writes no
checkpoint. A size that the package does not have is learnt first, by building the model once.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec
import record

from pipeline.plan import estimate, plan, size

COMMON = (
    "measure.baseline=none", "measure.steps=0", "tracking=none", "train.save=false", "resume=never", "train.check=off",
    "checkpoint.every_minutes=null", "tracking.system_metrics_seconds=0", "train.steps_per_call=1", "train.steps=3",
    "hardware=2cpu", "launch.startup_timeout=600", "launch.progress_timeout=600",
)  # fmt: skip
# Processes as they are without a fork server, whose memory a fork would share.
ALONE = ("cluster.start_method=spawn",)
BACKENDS = {"TensorFlow": "tensorflow", "JAX": "jax"}
ONE = "strategy=one_device"
# With little to validate, which takes as long as to train.
BIG = ("model=transformer", "data=text", "model.build.size=100m", "data.build.validation_fraction=0.01")
CASES = {
    "mlp, 64 examples": (ONE, "model=mlp", "data=mnist5k"),
    "cnn, 64 examples": (ONE, "model=cnn", "data=mnist5k"),
    "cnn, 512 examples": (ONE, "model=cnn", "data=mnist5k", "train.replica_batch=512"),
    "resnet20, 512 examples": (ONE, "model=resnet20", "data=mnist5k", "train.replica_batch=512"),
    "transformer tiny, 128 examples": (ONE, "model=transformer", "data=text", "train.replica_batch=128"),
    "transformer tiny, 128 examples, mixed_bfloat16": (
        ONE, "model=transformer", "data=text", "train.replica_batch=128", "train.precision=mixed_bfloat16",
    ),
    "transformer tiny, 128 examples, remat": (
        ONE, "model=transformer", "data=text", "train.replica_batch=128", "train.remat=true",
    ),
    "transformer 100m, 4 examples, one_device": (ONE, *BIG, "train.replica_batch=4"),
    "transformer 100m, 4 examples, mirrored 2": ("strategy=mirrored", "workers=2", *BIG, "train.replica_batch=4"),
    "transformer 100m, 4 examples, model_parallel 2": (
        "strategy=model_parallel", "workers=1", "strategy.devices_per_replica=2", *BIG, "train.replica_batch=4",
    ),
}  # fmt: skip
# What a case is at the smallest size.
SMOKE = ("model=mlp", "data=digits", "train.replica_batch=16")
SECONDS_BETWEEN_LOOKS = 0.03


def main() -> int:
    """Prints each estimate beside what was measured; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="the cases whose names hold this, such as JAX or 100m")
    arguments = record.parse(parser, smoke=["--only=TensorFlow: mlp"])
    rows = {}
    with tempfile.TemporaryDirectory(prefix="memory_") as folder:
        for name, backend in BACKENDS.items():
            for case, overrides in CASES.items():
                called = f"{name}: {case}"
                if arguments.only not in called:
                    continue
                less = SMOKE if arguments.smoke else ALONE
                rows[called] = _case(Path(folder), (*overrides, f"backend={backend}", *less), backend)
                print(_line(called, rows[called]), flush=True)
                record.write(arguments, 1, rows)
    return 0


def _case(folder: Path, overrides: tuple[str, ...], backend: str) -> dict[str, int]:
    """Bytes of a case beside what the backend takes alone: as they were estimated, and measured."""
    chosen = {given.partition("=")[0]: given for given in (*COMMON, *overrides)}
    typed = [*chosen.values(), f"output_dir={folder}"]
    before = set(folder.glob("runs/*"))
    record.typed(folder, *typed, "mode=plan")
    with _most_of(folder, before) as most:
        record.typed(folder, *typed)
    (run,) = set(folder.glob("runs/*")) - before
    return {"estimated": _estimated(folder, run), "measured": max(most) - base(backend), "base": base(backend)}


@cache
def base(backend: str) -> int:
    """The most bytes that a process ever holds which only imports a backend."""
    code = f"import keras, {backend}; print(open('/proc/self/status').read())"
    environ = os.environ | {"KERAS_BACKEND": backend}
    ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    return _peak(ran.stdout)


@contextlib.contextmanager
def _most_of(folder: Path, before: set[Path]) -> Iterator[list[int]]:
    """Inside, looks after the processes of a run that begins; the list has the most that these ever held together."""
    over, most, together = threading.Event(), dict[int, int](), [0]

    def look() -> None:
        while not over.wait(SECONDS_BETWEEN_LOOKS):
            for run in set(folder.glob("runs/*")) - before:
                for pid in _pids(run):
                    with contextlib.suppress(OSError, IndexError, ValueError):
                        most[pid] = _peak(Path(f"/proc/{pid}/status").read_text())
            together[0] = sum(most.values())

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield together
    finally:
        over.set()
        thread.join()


def _pids(run: Path) -> Sequence[int]:
    """The processes that train, as the log of a run has them."""
    try:
        lines = (run / "events.jsonl").read_text().splitlines()
        told = [json.loads(line) for line in lines if '"started"' in line]
    except (OSError, ValueError):
        return ()
    return [int(event["pid"]) for event in told if event["event"] == "started"]


def _peak(status: str) -> int:
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def _estimated(folder: Path, run: Path) -> int:
    """What the plan of a run needs on its host, beside processes that have only imported their backend."""
    planned = plan.from_json((run / "plan.json").read_text())
    known = size.shipped(planned)
    if known is None:
        newest = max(folder.glob("sizes/*.json"), key=lambda path: path.stat().st_mtime)
        known = msgspec.json.decode(newest.read_bytes(), type=size.Size)
    made = estimate.estimate(planned, known).host
    assert made is not None, "hardware=2cpu"
    return made.total - made.imported


def _line(name: str, row: dict[str, int]) -> str:
    ratio = row["estimated"] / row["measured"]
    return (
        f"{name}: estimated {row['estimated'] / 2**20:,.0f} MiB, measured {row['measured'] / 2**20:,.0f} MiB, "
        f"ratio {ratio:.2f}, beside {row['base'] / 2**20:,.0f} MiB of the backend alone"
    )


if __name__ == "__main__":
    sys.exit(main())

"""Compares what `mode=plan` estimates with what runs do: bytes that a step exchanges, and memory that a batch takes.

    python benchmarks/estimates.py

Bytes are those that the loopback interface of a network namespace counts, of a longer run less those of a shorter one,
by the steps between them. Memory is the most that the process which trains ever held, with the larger batch less with
the smaller. Namespaces need Linux with `unshare`, and rights to make them.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil
import record

from pipeline.plan import estimate, plan, size

COMMON = (
    "measure.baseline=none", "measure.steps=0", "tracking=none", "train.save=false", "resume=never",
    "checkpoint.every_minutes=null", "tracking.system_metrics_seconds=0",
)  # fmt: skip
TABLES = ("model=recommender", "data=clicks", "data.build.categories=[100000,50000]")
BYTES = {
    "`multi_worker workers=2`, a step": ("strategy=multi_worker", "workers=2"),
    "`parameter_server workers=1`, a step": ("strategy=parameter_server", "workers=1"),
    "`recommender`, tables of 100,000 and 50,000 rows, `parameter_server workers=1`, a step": (
        "strategy=parameter_server", "workers=1", *TABLES,
    ),
}  # fmt: skip
MEMORY = {
    "one device, peak memory of the process from 64 to 512 examples a step": ("strategy=one_device",),
    "`resnet20`, the same": ("strategy=one_device", "model=resnet20"),
}
SECONDS_BETWEEN_LOOKS = 0.05


def main() -> int:
    """Prints each estimate beside what was measured; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="steps of the longer run; the other makes a third")
    parser.add_argument("--only", default="", help="the cases whose names hold this")
    arguments = record.parse(parser, smoke=["--rounds=1", "--steps=30", "--only=parameter_server workers=1`, a"])
    rows = {}
    for name, overrides in (BYTES | MEMORY).items():
        if arguments.only not in name:
            continue
        made = [
            _bytes(overrides, arguments.steps) if name in BYTES else _memory(overrides) for _ in range(arguments.rounds)
        ]
        row = {"estimated": made[0][0], "measured": statistics.median(measured for _, measured in made)}
        rows[name] = row | {"unit": "bytes a step" if name in BYTES else "bytes more"}
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
        needs = _estimated(Path(folder), overrides)
    exchanged = needs.exchanged
    assert exchanged is not None
    return exchanged.total, (counted[steps] - counted[steps // 3]) / (steps - steps // 3)


def _memory(overrides: tuple[str, ...]) -> tuple[int, float]:
    """(estimated, seen) bytes that the process which trains holds more with 512 examples a step than with 64."""
    estimated, seen = [], []
    for batch in (64, 512):
        with tempfile.TemporaryDirectory() as folder:
            arguments = [*overrides, f"train.replica_batch={batch}", "train.steps=8"]
            with subprocess.Popen(
                _command(folder, arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            ) as ran:
                most = _Most(ran.pid)
                said, _ = ran.communicate()
            _succeeded(ran.returncode, arguments, said)
            seen.append(most.bytes_of(_pid(Path(folder))))
            estimated.append(_estimated(Path(folder), arguments).device.total)
    return estimated[1] - estimated[0], seen[1] - seen[0]


def _travelled(folder: Path, arguments: list[str]) -> int:
    """Bytes over the loopback interface of a namespace that a run has for itself."""
    inside = 'ip link set lo up && "$@" >&2 && cat /proc/net/dev'
    ran = subprocess.run(
        ["unshare", "--net", "--map-root-user", "sh", "-c", inside, "sh", *_command(folder, arguments)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    _succeeded(ran.returncode, arguments, ran.stderr)
    (line,) = [line for line in ran.stdout.splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[1])


def _command(folder: Path | str, arguments: Sequence[str]) -> list[str]:
    model = () if any(given.startswith("data=") for given in arguments) else ("data=mnist5k",)
    model = model if any(given.startswith("model=") for given in arguments) else (*model, "model=cnn")
    return [sys.executable, "-m", "pipeline", *model, *COMMON, *arguments, f"output_dir={folder}"]


class _Most:
    """The most memory that each process below one has ever held, in bytes, as far as the kernel said in time."""

    def __init__(self, pid: int) -> None:
        self._pid, self._most = pid, dict[int, int]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def bytes_of(self, pid: int) -> int:
        """The most that a process held; ends the looking."""
        self._over.set()
        self._thread.join()
        return self._most[pid]

    def _look(self) -> None:
        while not self._over.wait(SECONDS_BETWEEN_LOOKS):
            with contextlib.suppress(psutil.Error):
                for process in psutil.Process(self._pid).children(recursive=True):
                    with contextlib.suppress(OSError, IndexError):
                        status = Path(f"/proc/{process.pid}/status").read_text()
                        self._most[process.pid] = 1024 * int(status.split("VmHWM:")[1].split()[0])


def _estimated(folder: Path, arguments: Sequence[str]) -> estimate.Estimate:
    """What the plan of a run in `folder` needs; a model whose size is not known is built once."""
    planned = plan.from_json(next(folder.glob("runs/*/plan.json")).read_text())
    known = size.shipped(planned)
    if known is None:
        ran = subprocess.run(_command(folder, [*arguments, "mode=plan"]), capture_output=True, text=True, check=False)
        _succeeded(ran.returncode, arguments, ran.stderr)
        (kept,) = folder.glob("sizes/*.json")
        known = size.from_plain(json.loads(kept.read_text()))
    return estimate.estimate(planned, known)


def _pid(folder: Path) -> int:
    """The process that trained, as the log of the run in `folder` has it."""
    lines = next(folder.glob("runs/*/events.jsonl")).read_text().splitlines()
    (pid,) = [event["pid"] for event in map(json.loads, lines) if event["event"] == "started"]
    return int(pid)


def _succeeded(code: int, arguments: list[str], said: str) -> None:
    if code:
        sys.exit(f"pipeline {' '.join(arguments)} ended with {code}:\n{said}")


if __name__ == "__main__":
    sys.exit(main())

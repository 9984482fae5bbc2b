"""Compares what `mode=plan` estimates with what runs do: bytes that a step exchanges, and memory that a batch takes.

    python benchmarks/estimates.py

Bytes are those that the loopback interface of a network namespace counts, of a longer run less those of a shorter one,
by the steps between them. Memory is the most that the process which trains ever held, with the larger batch less with
the smaller.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

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
# One of each, and the model for it, at the smallest size.
FIRST_BYTES, FIRST_MEMORY = next(iter(BYTES)), next(iter(MEMORY))
SMOKE = ("model=mlp", "data=digits")
SECONDS_BETWEEN_LOOKS = 0.05


def main() -> int:
    """Prints each estimate beside what was measured; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="steps of the longer run; the other makes a third")
    parser.add_argument("--only", default="", help="the cases whose names hold this")
    arguments = record.parse(parser, smoke=["--rounds=1", "--steps=6"])
    cases = {name: overrides for name, overrides in (BYTES | MEMORY).items() if arguments.only in name}
    if arguments.smoke:
        cases = {name: (*overrides, *SMOKE) for name, overrides in cases.items() if name in (FIRST_BYTES, FIRST_MEMORY)}
    record.in_a_network_of_its_own()
    rows = {}
    for name, overrides in cases.items():
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
        needs = _estimated(next(Path(folder).glob("runs/*")), overrides)
    exchanged = needs.exchanged
    assert exchanged is not None
    return exchanged.total, (counted[steps] - counted[steps // 3]) / (steps - steps // 3)


def _memory(overrides: tuple[str, ...]) -> tuple[int, float]:
    """(estimated, seen) bytes that the process which trains holds more with 512 examples a step than with 64."""
    with tempfile.TemporaryDirectory() as folder:
        most = _Most(Path(folder))
        record.typed(folder, *_typed(folder, ["-m", *overrides, "train.replica_batch=64,512", "train.steps=8"]))
        held = most.bytes_by_point()
        small, large = held.values()
        estimated = [
            _estimated(point, [*overrides, f"train.replica_batch={batch}"]).device.total
            for point, batch in zip(held, (64, 512), strict=True)
        ]
    return estimated[1] - estimated[0], large - small


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


class _Most:
    """The most memory that the process of each point of a sweep has ever held, as far as the kernel said in time."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._most = folder, dict[Path, int]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def bytes_by_point(self) -> dict[Path, int]:
        """Bytes, by the point's folder, in the order of the points; ends the looking."""
        self._over.set()
        self._thread.join()
        return dict(sorted(self._most.items()))

    def _look(self) -> None:
        while not self._over.wait(SECONDS_BETWEEN_LOOKS):
            for log in self._folder.glob("sweeps/*/*/events.jsonl"):
                with contextlib.suppress(OSError, IndexError, ValueError):
                    status = Path(f"/proc/{_pid(log.parent)}/status").read_text()
                    self._most[log.parent] = 1024 * int(status.split("VmHWM:")[1].split()[0])


def _estimated(point: Path, arguments: Sequence[str]) -> estimate.Estimate:
    """What the plan of the run in `point` needs; a model whose size is not known is built once."""
    planned = plan.from_json((point / "plan.json").read_text())
    known = size.shipped(planned)
    if known is None:
        with tempfile.TemporaryDirectory() as folder:
            record.typed(folder, *_typed(folder, [*arguments, "mode=plan"]))
            (kept,) = Path(folder).glob("sizes/*.json")
            known = size.from_plain(json.loads(kept.read_text()))
    return estimate.estimate(planned, known)


def _pid(point: Path) -> int:
    """The process that trained, as the log of the run in `point` has it."""
    lines = (point / "events.jsonl").read_text().splitlines()
    (pid,) = [event["pid"] for event in map(json.loads, lines) if event["event"] == "started"]
    return int(pid)


if __name__ == "__main__":
    sys.exit(main())

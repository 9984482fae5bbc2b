"""Predictions from runs as runs write them: what is recovered, how sure that is, what it is said to stand on."""

import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran, start
from shipped_sizes import planned

from pipeline import history, outlook, predict
from pipeline.energy import Meter, counters
from pipeline.plan import Plan, from_json

VERSIONS = {"keras": "3", "tensorflow": "2"}
PARAMETERS = 1_000_000
ASKED = ("strategy=multi_worker", "model=mlp", "data=digits")


def ran(
    output: Path, plan: Plan, seconds: Sequence[float], parameters: int = PARAMETERS, **result: Any
) -> dict[str, Any]:
    """Writes what a run of `plan` writes, whose repeats had steps of so many seconds."""
    folder = output / "runs" / f"{len(list(output.glob('runs/*')))}_{plan.strategy}"
    folder.mkdir(parents=True)
    examples = plan.workers * plan.replica_batch
    speeds = sorted(examples / each for each in seconds)
    wrote = {
        "status": "FINISHED", "parameters": parameters, "examples_per_second": speeds[len(speeds) // 2],
        "rehearsal": plan.rehearsal, "oversubscribed": plan.oversubscribed, "versions": VERSIONS,
    } | result  # fmt: skip
    measured = [
        {"event": "measured", "time": 1.0, "group": "point", "rank": rank, "repeat": repeat, "examples": examples,
         "seconds": each, "calls": [[1, each]]}
        for repeat, each in enumerate(seconds) for rank in plan.leaders
    ]  # fmt: skip
    events = [{"event": "built", "time": 0.0, "group": "point", "rank": 0, "train_examples": 1_000_000}, *measured]
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "result.json").write_text(json.dumps(wrote))
    (folder / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    return wrote


@dataclasses.dataclass(frozen=True)
class Ring:
    """A cluster whose steps take as long as the ring's formula says."""

    step: float
    example: float
    latency: float
    gigabytes_per_second: float

    def seconds(self, workers: int, batch: int, parameters: int = PARAMETERS) -> float:
        sent = 2 * (workers - 1) / workers * 4 * parameters / (1e9 * self.gigabytes_per_second)
        return self.step + batch * self.example + 2 * (workers - 1) * self.latency + sent


RINGS = (
    (Ring(2e-3, 1e-4, 5e-6, 1.25), 64, 1),
    (Ring(1e-3, 2e-6, 2e-5, 12.5), 512, 1),
    (Ring(5e-4, 1e-5, 1e-6, 0.125), 32, 1),
    (Ring(1e-2, 3e-5, 5e-5, 25.0), 128, 8),
    (Ring(0.0, 1e-3, 0.0, 100.0), 16, 4),
)


def on_gpus(workers: int, per_host: int, batch: int) -> tuple[str, ...]:
    """The overrides of so many workers, on as many GPUs."""
    return (*ASKED, f"hardware={per_host}gpu", f"hardware.hosts={workers // per_host}", f"train.replica_batch={batch}")


@pytest.mark.parametrize(("ring", "batch", "per_host"), RINGS, ids=str)
def test_a_ring_of_8_to_1024_workers_is_recovered_from_its_first_three_points(
    tmp_path, pipeline, ring, batch, per_host
):
    for workers in (8, 16, 32):
        ran(tmp_path / "outputs", planned(*on_gpus(workers, per_host, batch)), [ring.seconds(workers, batch)] * 3)
    wanted = (64, 128, 256, 512, 1024)
    hosts = ",".join(str(workers // per_host) for workers in wanted)
    asked = [each for each in on_gpus(8, per_host, batch) if "hosts" not in each]
    shown = pipeline("-m", "mode=predict", *asked, f"hardware.hosts={hosts}")
    assert shown.code == 0, shown.err
    lines = [json.loads(line) for line in (tmp_path / "outputs" / "predictions.jsonl").read_text().splitlines()]
    assert [line["workers"] for line in lines] == list(wanted)
    for line in lines:
        truth = line["workers"] * batch / ring.seconds(line["workers"], batch)
        assert line["examples_per_second"] == pytest.approx(truth, rel=0.05)
        assert line["low"] <= truth <= line["high"]
    assert not list((tmp_path / "outputs").glob("sweeps/*"))
    assert "fitted on  3 runs: multi_worker, mlp of 1,000,000 parameters, workers 8,16,32" in shown.out
    assert "Extrapolated: workers are 32 times the most that was measured." in shown.out
    assert "Fastest: point 4, multi_worker, 1,024 workers." in shown.out

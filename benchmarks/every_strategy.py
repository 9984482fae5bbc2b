"""Trains three models of a person's own under every strategy, and prints how far each ends from one device.

    python benchmarks/every_strategy.py

Makes the first table under Equality in docs/measured.md. A cell is the largest difference of any weight from the same
model on one device after the same steps on the same global batches. Asynchronous workers make other steps: theirs is
the metric that they reach.
"""

import argparse
import io
import json
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import record

MODELS = {
    "functional, two inputs, two outputs": "functional",
    "subclassed, own call, added loss": "subclassed",
    "BatchNormalization": "normalised",
}
ONE = ("strategy=one_device", "workers=1")
# These make the steps that one device makes.
SAME_STEPS = {
    "default": ("strategy=default", "workers=1"),
    "mirrored, 2 workers": ("strategy=mirrored", "workers=2"),
    "central_storage, 2 workers": ("strategy=central_storage", "workers=2"),
    "multi_worker, 2 processes": ("strategy=multi_worker", "workers=2"),
    "parameter_server, 1 worker": ("strategy=parameter_server", "workers=1"),
    "tpu, rehearsed on 8 CPU devices": ("strategy=tpu", "hardware=tpu_v5e_8", "hardware.rehearse=true"),
}
OTHERS = {
    "parameter_server, 2 asynchronous workers": ("strategy=parameter_server", "workers=2"),
    "tpu, on this machine": ("strategy=tpu", "hardware=tpu_v5e_8"),
}
COMMON = (
    "train.epochs=5", "train.global_batch=64", "train.steps_per_call=2", "train.precision=float32", "measure.steps=0",
    "tracking=none",
)  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """What a run came to: its weights and held-out metrics by name, or the words it was refused with."""

    weights: Mapping[str, np.ndarray]
    metrics: Mapping[str, float]
    refusal: str = ""


def main() -> int:
    """Prints the table in Markdown; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS.values(), default=list(MODELS.values()))
    parser.add_argument("--only", default="", help="the strategies whose names hold this")
    arguments = record.parse(parser, smoke=["--models=functional", "--only=default"])
    one = {model: _trained(model, *ONE) for model in arguments.models}
    rows = {"one_device": [_reached(trained) for trained in one.values()]}
    for name, typed in _held(SAME_STEPS, arguments.only):
        rows[name] = [_compared(_trained(model, *typed), one[model]) for model in arguments.models]
    for name, typed in _held(OTHERS, arguments.only):
        rows[name] = [_reached(_trained(model, *typed)) for model in arguments.models]
    titles = [title for title, model in MODELS.items() if model in arguments.models]
    print(f"| strategy | {' | '.join(titles)} |")
    print(f"|---{'|---' * len(titles)}|")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")
    record.write(arguments, 1, {"models": titles, "strategies": rows})
    return 0


def _held(typed: Mapping[str, tuple[str, ...]], text: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(name, arguments) for name, arguments in typed.items() if text in name]


def _trained(model: str, *arguments: str) -> Trained:
    named = (f"model.build._target_=persons.{model}", "data.build._target_=persons.data", f"+data.build.kind={model}")
    with tempfile.TemporaryDirectory() as folder:
        ran = record.typed(folder, *arguments, *named, *COMMON, fine=(0, 2))
        if ran.returncode == 2:
            return Trained({}, {}, ran.stderr.removeprefix("pipeline: ").strip())
        (path,) = Path(folder).glob("outputs/runs/*/result.json")
        return Trained(_weights(path.parent / "model.keras"), json.loads(path.read_text())["val_metrics"])


def _weights(saved: Path) -> dict[str, np.ndarray]:
    """A saved model's weights, by where they are in its file, without those of its optimizer."""
    found: dict[str, np.ndarray] = {}

    def add(name: str, node: h5py.Dataset | h5py.Group) -> None:
        if isinstance(node, h5py.Dataset) and not name.startswith("optimizer/"):
            found[name] = np.asarray(node)

    with zipfile.ZipFile(saved) as archive, h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as file:
        file.visititems(add)
    return found


def _compared(trained: Trained, one: Trained) -> str:
    """The largest difference of a weight from one device, and of a metric on the held-out data."""
    assert trained.weights.keys() == one.weights.keys() != set()
    weights = max(float(np.abs(trained.weights[name] - one.weights[name]).max()) for name in one.weights)
    metrics = max(abs(value - one.metrics[name]) for name, value in trained.metrics.items())
    return f"{weights:.0e}, metrics {metrics:.0e}"


def _reached(trained: Trained) -> str:
    """The held-out metrics, or the refusal's first sentence."""
    if trained.refusal:
        return f"refused: {trained.refusal.partition('. ')[0]}"
    return ", ".join(f"{name} {value:.3f}" for name, value in trained.metrics.items())


if __name__ == "__main__":
    sys.exit(main())

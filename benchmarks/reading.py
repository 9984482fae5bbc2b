"""Throughput of the same training from memory, from TFRecord shards, pictures and tf.data services, in turn.

    python benchmarks/reading.py strategy=mirrored workers=2 --rounds 4 --only shards

First `model=cnn` on the same 4,000 digits: arrays in memory, the shards that `python -m pipeline prepare` makes of
them, these kept as arrays, and a PNG file for each. Then `model=resnet20` on 1,000 photographs of 96x96 pixels, arrays
and a JPEG file for each. Then one device on examples that burn a core, made by itself and by two data servers. Ratios
are of two runs that follow each other; which of them is first changes with the round.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import record
from PIL import Image
from sklearn.datasets import load_sample_images

from pipeline.data import mnist5k

COMMON = ("measure.baseline=none", "tracking=none", "train.save=false", "resume=never")
# Timed for some ten seconds, in which the machine's own ups and downs even out.
LONG = "measure.repeats=12"
PARTS = ("shards", "kept", "pictures", "photos", "services")
SMALL = ("model=mlp", "train.replica_batch=8", "train.steps=3", "measure.repeats=1", "measure.steps=3")
SHARDS = ("data=tfrecord", "data.path=prepared")
PICTURES = ("data=images", "data.path=pictures", "data.build.channels=1")
PHOTOS, PIXELS = 1000, 96
OF_PHOTOS = ("model=resnet20", "train.replica_batch=16")
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
    arguments = record.parse(parser, smoke=["--rounds=1", "--only", "kept", "pictures", "services"])
    small = SMALL if arguments.smoke else ()
    given, memory, costly = (LONG, *arguments.overrides, *small), "data=mnist5k", (*COSTLY, *small)
    pairs = {
        "shards": ("shards / memory", (memory, *given), (*SHARDS, *given)),
        "kept": ("shards kept in memory / memory", (memory, *given), (*SHARDS, "data.cache=memory", *given)),
        "pictures": ("pictures / memory", (memory, *given), (*PICTURES, *given)),
        "photos": (
            "photographs / memory",
            (
                "data=synthetic",
                f"data.build.shape=[{PIXELS},{PIXELS},3]",
                f"data.build.train_examples={PHOTOS}",
                "data.build.num_classes=2",
                *OF_PHOTOS,
                *given,
            ),
            ("data=images", "data.path=photos", *OF_PHOTOS, *given),
        ),
        "services": ("two data servers / none", costly, (*costly, "data.service=2")),
    }
    with tempfile.TemporaryDirectory() as folder:
        record.typed(folder, "prepare", memory, "out=prepared", "workers=2")
        _draw(Path(folder), arguments.only)
        rows = {part: _compare(folder, *pairs[part], arguments.rounds) for part in arguments.only}
    record.write(arguments, arguments.rounds, rows)
    return 0


def _draw(folder: Path, parts: Sequence[str]) -> None:
    """Writes the digits as PNG files, and parts of scikit-learn's two photographs as JPEG files, a folder a class."""
    (images, labels), _ = mnist5k()
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        pixels = (255 * image[:, :, 0]).round().astype(np.uint8)
        _save(pixels, folder / "pictures" / str(label) / f"{number}.png")
    random, photographs = np.random.default_rng(0), load_sample_images().images
    for number in range(PHOTOS if "photos" in parts else 0):
        photograph = photographs[number % 2]
        top, left = (random.integers(size - PIXELS) for size in photograph.shape[:2])
        cut = photograph[top : top + PIXELS, left : left + PIXELS]
        _save(cut, folder / "photos" / "ab"[number % 2] / f"{number}.jpg")


def _save(pixels: np.ndarray, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


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

"""Times backend=jax on a GPU beside Keras's `fit` and a loop written by hand, in turn, and checks its engine there.

    python benchmarks/gpu.py --bundle FOLDER [--for 3.12]
    PYTHONPATH=FOLDER python FOLDER/benchmarks/gpu.py --json gpu.json

The second is typed on a machine with a GPU, and JAX and no TensorFlow. FOLDER holds this checkout's programs and the
packages that such a machine lacks: copies of those that are installed here, and where they are compiled and for
another Python, what the package index has. Contestants train as a process each, of which all but one wait; of a model
that fits once, one begins after the other has ended. Where there is no GPU nothing is measured, but for --tiny.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import record
from packaging.requirements import Requirement

HERE = Path(__file__).resolve().parent

ROWS = [
    (model, precision)
    for model in ("transformer 100m", "transformer 1b", "ResNet-50")
    for precision in ("bfloat16", "float32")
]
CONTESTANTS = ("ours", "fit", "by hand")
# Too large for three of them in one GPU.
ALONE = ("transformer 1b",)
# What the engine and `python -m pipeline` import, beyond what comes with JAX.
NEEDED, THERE = ("keras", "hydra-core", "msgspec", "psutil", "google-crc32c", "nvidia-ml-py", "packaging"), "jax"
# Floating-point operations a second of dense products, by what a device is called and the precision, where float32's
# are TF32's, as JAX computes them: NVIDIA's data sheets, without sparsity.
PEAKS = {
    r"H[12]00": {"bfloat16": 989.4e12, "float32": 494.7e12},
    r"A100": {"bfloat16": 312e12, "float32": 156e12},
    r"L4$": {"bfloat16": 121e12, "float32": 60e12},
}
# Steps that are made first, for all that is compiled.
FIRST_STEPS = 5


class ContestantFailed(RuntimeError):
    """A contestant that has ended: the message is what it said last."""


class Contestant:
    """A process of `on_gpu.py`."""

    def __init__(self, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 # closed with the process
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "on_gpu.py"), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        self.said = self._answer()

    def train(self, steps: int) -> dict[str, Any]:
        """Trains so many steps: `seconds`, and the `peak_bytes` of the process so far."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            said = [line.strip() for line in self._errors if re.match(r"[\w.]*(Error|Exception)\b", line)]
            self.end()
            raise ContestantFailed(said[-1] if said else f"it ended with {self._process.returncode}")
        told: dict[str, Any] = json.loads(line)
        return told


def main() -> int:
    """Prints what each row came to, and writes all of it; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="gather there what a machine with JAX lacks, and measure nothing")
    parser.add_argument("--for", dest="python", metavar="VERSION", help="the Python of that machine, if another")
    parser.add_argument("--rows", default="", help="only rows with one of these in their names, as '100m;ResNet'")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further row begins")
    parser.add_argument("--rounds", type=int, default=5, help="windows of each contestant")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a window")
    parser.add_argument("--tiny", action="store_true", help="small models in place of those, on any device")
    smoke = ("--tiny", "--rounds", "1", "--seconds", "0.1", "--rows", "100m, bfloat16")
    given = record.parse(parser, smoke)
    if given.bundle:
        return bundle(given.bundle, given.python)
    began, device = time.monotonic(), Contestant("device")
    device.end()
    usable = given.tiny or device.said["platform"] == "gpu"
    print(f"{device.said['kind']}, JAX {device.said['jax']}{'' if usable else ': no GPU, so nothing is measured'}")
    checks = checked() if usable else None
    table: dict[str, Any] = {}
    for model, precision in ROWS:
        name = f"{model}, {precision}"
        wanted = not given.rows or any(part in name for part in given.rows.split(";"))
        late = time.monotonic() - began > given.limit
        table[name] = row(model, precision, given, device.said["kind"]) if usable and wanted and not late else None
        print(f"{name}: {told(table[name])}", flush=True)
    record.write(given, given.rounds, {"device": device.said, "checks": checks, "table": table})
    return 0


def checked() -> dict[str, float]:
    """What the engine's checks came to."""
    found = Contestant("checks")
    found.end()
    for name, apart in found.said.items():
        print(f"{name}: {apart:.1e} apart")
    return dict(found.said)


def row(model: str, precision: str, given: argparse.Namespace, kind: str) -> dict[str, Any]:
    """What the contestants came to with a model: units a second in each window, and the peak of their memory."""
    groups = [[name] for name in CONTESTANTS] if model in ALONE else [list(CONTESTANTS)]
    made: dict[str, Any] = {"rates": {}, "peak_bytes": {}, "mfu": None, "failed": {}}
    steps = 0
    for group in groups:
        running: dict[str, Contestant] = {}
        try:
            for name in group:
                try:
                    running[name] = Contestant(name, model, precision, *(["tiny"] if given.tiny else []))
                    running[name].train(FIRST_STEPS)
                    steps = steps or _steps(running[name].train(FIRST_STEPS)["seconds"], given.seconds)
                    running[name].train(steps)
                except ContestantFailed as failure:
                    running.pop(name, None)
                    made["failed"][name] = str(failure)
            for _ in range(given.rounds):
                for name, contestant in running.items():
                    found = contestant.train(steps)
                    made["rates"].setdefault(name, []).append(steps * contestant.said["per_step"] / found["seconds"])
                    made["peak_bytes"][name] = found["peak_bytes"]
            if "ours" in running and "ours" in made["rates"]:
                said = running["ours"].said
                made["mfu"] = mfu(
                    statistics.median(made["rates"]["ours"]) / said["per_step"], said["flops"], kind, precision
                )
        finally:
            for contestant in running.values():
                contestant.end()
    return {**made, "unit": "tokens" if model.startswith("transformer") else "examples"}


def mfu(steps_per_second: float, flops: float | None, kind: str, precision: str) -> float | None:
    """The share of a device's operations that the model's own are; None where either is not known.

    >>> mfu(2.0, 98.94e12, "NVIDIA H200", "bfloat16")
    0.2
    """
    peak = next((peaks[precision] for name, peaks in PEAKS.items() if re.search(name, kind)), None)
    return None if flops is None or peak is None else round(steps_per_second * flops / peak, 4)


def told(found: dict[str, Any] | None) -> str:
    """A row in words."""
    if found is None:
        return "not measured"
    failed = [f"{name} failed: {why}" for name, why in found["failed"].items()]
    rates = [f"{name} {statistics.median(many):,.0f} {found['unit']}/s" for name, many in found["rates"].items()]
    return "; ".join([*rates, f"MFU {found['mfu']:.0%}" if found["mfu"] else "MFU not known", *failed])


def bundle(folder: Path, python: str | None) -> int:
    """Gathers this checkout's programs and the packages that it needs beside JAX; returns the exit code."""
    folder.mkdir(parents=True)
    for name in ("pipeline", "conf", "benchmarks"):
        shutil.copytree(record.ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    (folder / "COMMIT").write_text(record.commit() or "")
    names = sorted(_needed(NEEDED) - _needed((THERE,)))
    for name in names:
        found = metadata.distribution(name)
        files = [file for file in found.files or () if file.parts[0] != ".." and "__pycache__" not in file.parts]
        if python is not None and any(file.suffix == ".so" for file in files):
            _download(f"{name}=={found.version}", python, folder)
            continue
        for file in files:
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(str(file.locate()), folder / file)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{', '.join(names)}: {size / 1e6:.0f} MB in {folder}.")
    return 0


def _download(wanted: str, python: str, folder: Path) -> None:
    """Unpacks the wheel of a package for that Python."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run([*pip, f"--python-version={python}", f"--dest={wheels}", wanted], check=True)
        for wheel in Path(wheels).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)


def _needed(names: Sequence[str]) -> set[str]:
    """Packages and what they need, as they are called."""
    found, left = set[str](), list(names)
    while left:
        name = re.sub(r"[-_.]+", "-", left.pop()).lower()
        if name in found:
            continue
        found.add(name)
        required = map(Requirement, metadata.requires(name) or ())
        left += [one.name for one in required if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def _steps(seconds: float, window: float) -> int:
    """Steps that fill a window, from what the first ones took."""
    return max(FIRST_STEPS, min(5000, round(window * FIRST_STEPS / seconds)))


if __name__ == "__main__":
    sys.exit(main())

"""Gives every benchmark the same two options, and writes what it measured with what it was measured on.

--smoke       the smallest size, which shows that the program runs and says nothing of speed
--json FILE   what was measured, as JSON; a full run writes it to benchmarks/results/ where nothing is said
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline.launch import machine

RESULTS = Path(__file__).resolve().parent / "results"


def parse(parser: argparse.ArgumentParser, smoke: Sequence[str]) -> argparse.Namespace:
    """The arguments of a benchmark; with --smoke, those in `smoke` count as typed behind the others."""
    parser.add_argument("--smoke", action="store_true", help="the smallest size, which only shows that it runs")
    parser.add_argument(
        "--json", type=Path, help="file for what was measured; left out: benchmarks/results/, but for --smoke"
    )
    given = sys.argv[1:]
    return parser.parse_intermixed_args([*given, *(smoke if "--smoke" in given else ())])


def write(arguments: argparse.Namespace, rounds: int, rows: Any) -> None:
    """Writes what a benchmark measured in so many rounds: any JSON values, one row a line of what it prints."""
    name = Path(sys.argv[0]).stem
    path = arguments.json or (None if arguments.smoke else RESULTS / f"{name}.json")
    if path is None:
        return
    here = machine.detect(os.environ)
    about = {
        "benchmark": name,
        "arguments": sys.argv[1:],
        "commit": _commit(),
        "time": time.time(),
        "machine": {"cpu": here.cpu, "cores": len(here.cores), "memory_gib": here.memory_gib, "gpus": list(here.gpus)},
        "versions": {package: metadata.version(package) for package in ("tensorflow", "keras", "numpy")},
        "rounds": rounds,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about, indent=2, default=str) + "\n")


def _commit() -> str | None:
    """The commit that is checked out, marked where files differ from it; None outside a checkout."""
    with suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=RESULTS.parent, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
        return said.stdout.strip()
    return None

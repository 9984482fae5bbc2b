"""Gives every benchmark the same two options, types the program's commands for it, and writes what it measured.

--smoke       the smallest size, which shows that the program runs and says nothing of speed
--json FILE   what was measured, as JSON; left out, a full run on a quiet machine writes it to benchmarks/results/
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil

from pipeline.launch import this_machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Where the functions are that benchmarks name in configs.
OWN = ROOT / "benchmarks" / "own"
# For so long the machine is looked at before a run that is kept, and so busy others may have it, in per cent.
LOOK_SECONDS, MOST_BUSY = 1.0, 10.0
# What JSON can hold.
Json = Mapping[str, "Json"] | Sequence["Json"] | str | float | bool | None


def parse(parser: argparse.ArgumentParser, smoke: Sequence[str]) -> argparse.Namespace:
    """The arguments of a benchmark; with --smoke, those in `smoke` count as typed behind the others."""
    parser.add_argument("--smoke", action="store_true", help="the smallest size, which only shows that it runs")
    parser.add_argument(
        "--json", type=Path, help="file for what was measured; left out: benchmarks/results/, of a full and quiet run"
    )
    given = sys.argv[1:]
    arguments = parser.parse_intermixed_args([*given, *(smoke if "--smoke" in given else ())])
    is_whole = not arguments.smoke and getattr(arguments, "only", None) == parser.get_default("only")
    arguments.kept = arguments.json is None and is_whole and _is_quiet()
    return arguments


def _is_quiet() -> bool:
    """True if others leave the machine alone as a benchmark begins; says so where they do not."""
    busy = psutil.cpu_percent(LOOK_SECONDS)
    if busy > MOST_BUSY:
        print(
            f"Expected a quiet machine, received one that is {busy:.0f}% busy, so that benchmarks/results/ stays as it "
            "is. Try --json FILE.",
            file=sys.stderr,
        )
    return busy <= MOST_BUSY


def in_a_network_of_its_own() -> None:
    """Starts the program anew in a network namespace, unless it is in one: what its loopback carries is its own.

    Needs Linux with `unshare` and `ip`, and rights to make namespaces.
    """
    if "OWN_NETWORK" not in os.environ:
        os.environ["OWN_NETWORK"] = "yes"
        inside = 'ip link set lo up && exec "$@"'
        command = ("unshare", "--net", "--map-root-user", "sh", "-c", inside, "sh", sys.executable, *sys.argv)
        os.execvp(command[0], command)


def types(folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Types `python -m pipeline ARGUMENTS` in a folder, as a person does, and waits until it ends."""
    search = os.pathsep.join(filter(None, (str(OWN), str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments],
        cwd=folder, env=os.environ | {"PYTHONPATH": search}, capture_output=True, text=True, check=False,
    )  # fmt: skip


# How commands are typed; `smoke.py` has another way.
typist: Callable[[Path, Sequence[str]], subprocess.CompletedProcess[str]] = types


def typed(folder: Path | str, *arguments: str, fine: Sequence[int] = (0,)) -> subprocess.CompletedProcess[str]:
    """Types a command of the program in a folder; exits with what it said where its exit code is not `fine`."""
    ran = typist(Path(folder), arguments)
    if ran.returncode not in fine:
        sys.exit(f"pipeline {' '.join(arguments)} ended with {ran.returncode}:\n{ran.stderr}")
    return ran


def write(arguments: argparse.Namespace, rounds: int, rows: Json, packages: Sequence[str] = ()) -> None:
    """Writes what a benchmark measured in so many rounds: any JSON values, one row a line of what it prints.

    With the versions of what computes, and of `packages` beside it.
    """
    name = Path(sys.argv[0]).stem
    path = arguments.json or (RESULTS / f"{name}.json" if arguments.kept else None)
    if path is None:
        return
    here = this_machine.detect(os.environ)
    about = {
        "benchmark": name,
        "arguments": sys.argv[1:],
        "commit": commit(),
        "time": time.time(),
        "machine": {"cpu": here.cpu, "cores": len(here.cores), "memory_gib": here.memory_gib, "gpus": list(here.gpus)},
        "versions": dict(_versions("tensorflow", *packages, "keras", "numpy")),
        "rounds": rounds,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about, indent=2, default=str) + "\n")


def commit() -> str | None:
    """The commit that is checked out, marked where what it measures differs from it; None outside a checkout.

    What other benchmarks have measured meanwhile is none of that. Of a bundle (`gpu.py`) it is the one it was made of.
    """
    if (bundled := ROOT / "COMMIT").is_file():
        return bundled.read_text()
    with suppress(OSError, subprocess.SubprocessError):
        head = _git("rev-parse", "HEAD")
        differs = _git("status", "--porcelain", "--untracked-files=no", "--", "pipeline", "conf", "benchmarks/*.py")
        return f"{head}-dirty" if differs else head
    return None


def _versions(*packages: str) -> Iterator[tuple[str, str]]:
    """The versions of those that are installed."""
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            yield package, metadata.version(package)


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
    ).stdout.strip()

"""Runs every benchmark at its smallest size, two at a time, in some minutes: that it runs, and nothing of speed.

    python benchmarks/smoke.py FOLDER [NAME ...]

Programs, and the commands that they type, are forks of this process, which has imported what they share and keeps one
fork server with TensorFlow for all of them. FOLDER gets NAME.json, what was measured, and NAME.log, what was said.
"""

import argparse
import importlib
import multiprocessing as mp
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO

import record

import pipeline.__main__
import pipeline.commands.train
from pipeline.commands import verbs
from pipeline.config.schema import ClusterConfig
from pipeline.driver import timing
from pipeline.launch.local import LocalCluster

HERE = Path(__file__).resolve().parent
PROGRAMS = sorted(path.stem for path in HERE.glob("*.py") if re.search(r"= record\.parse\(", path.read_text()))
# Programs that run beside each other: half of its time, one waits.
AT_ONCE = 2
# To make code faster takes longer than to run it so few times.
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# Verbs that train nothing, and so have no check before training.
WITHOUT_CHECK = ("prepare", "compare", "report", "clean")


def main() -> int:
    """Prints how each program ended; returns 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", choices=[[], *PROGRAMS])
    given = parser.parse_args()
    folder = given.folder.resolve()
    record.in_a_network_of_its_own()
    os.environ["XLA_FLAGS"] = QUICK
    # Processes that are started look what to import anew.
    sys.modules["__main__"] = pipeline.__main__
    LocalCluster(ClusterConfig(name="local"), os.environ).warm_up()
    _keep_the_server()
    record.typist = typist
    timing.EXPLAIN_SECONDS, timing.ENOUGH_ROUNDS = 0.0, 1
    codes = list(_ended(folder, given.names or PROGRAMS))
    return 1 if any(codes) else 0


def typist(folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Does what `python -m pipeline ARGUMENTS` does in a folder, in a fork, without the check before training."""
    less = () if arguments[0] in WITHOUT_CHECK else ("train.check=off",)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = forked(partial(_command, folder, (*arguments, *less)), out, err)
        for said in (out, err):
            said.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), err.read())


def forked(do: Callable[[], int | None], out: IO[str], err: IO[str]) -> int:
    """Calls `do` in a fork, which prints to files; returns its exit code."""
    process = begun(do, out, err)
    process.join()
    return int(process.exitcode or 0)


def begun(do: Callable[[], int | None], out: IO[str], err: IO[str]) -> BaseProcess:
    """The fork that calls `do`."""
    process = mp.get_context("fork").Process(target=_child, args=(do, out.fileno(), err.fileno()))
    process.start()
    return process


def _ended(folder: Path, names: Sequence[str]) -> Iterator[int]:
    """Runs programs; yields the exit code of each as it ends, which it prints."""
    left, running = list(names), dict[int, tuple[str, BaseProcess, float]]()
    while left or running:
        while left and len(running) < AT_ONCE:
            name = left.pop(0)
            with (folder / f"{name}.log").open("w") as log:
                process = begun(partial(_program, name, folder / f"{name}.json"), log, log)
            running[process.sentinel] = name, process, time.monotonic()
        for sentinel in wait(running):
            name, process, began = running.pop(sentinel)  # type: ignore[call-overload]
            process.join()
            print(f"{name}: {process.exitcode}, {time.monotonic() - began:.0f} s", flush=True)
            yield int(process.exitcode or 0)


def _child(do: Callable[[], int | None], out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    sys.exit(do())


def _program(name: str, written: Path) -> int | None:
    sys.argv = [str(HERE / f"{name}.py"), "--smoke", "--json", str(written)]
    return importlib.import_module(name).main()  # type: ignore[no-any-return]


def _command(folder: Path, arguments: Sequence[str]) -> int:
    os.chdir(folder)
    sys.path[:0] = ["", str(record.OWN)]
    sys.argv = [str(pipeline.__main__.__file__), *arguments]
    return verbs.main()


def _keep_the_server() -> None:
    """Has forks take the server as it is: none of them is its parent, which could wait for it or end it."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    forkserver.ensure_running = server.ensure_running = server._stop = lambda: None


if __name__ == "__main__":
    sys.exit(main())

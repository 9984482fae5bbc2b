"""Harms one process of a run at one moment, runs the same command until it finishes, and compares what it trained.

    python tests/kills.py [--only TEXT] [--seed SEED --count COUNT]

A cell is a strategy, a role, a signal and a moment. It holds if the run ends FINISHED with the weights of an unharmed
run, to the last bit (under parameter_server, whose steps are made in any order: with each example trained as often and
a loss within `RACING`), with no process left and nothing said twice in the events that MLflow gets.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

# As pyproject.toml has it for pytest.
sys.path.append(str(Path(__file__).resolve().parent / "support"))
from conftest import UnderWay, events, left_behind

# Small, but with a checkpoint and a model that take moments to write, and a validation that takes moments.
TINY = (
    "data=synthetic", "data.build.shape=[64]", "data.build.train_examples=640", "data.build.validation_examples=8000",
    "model=mlp", "model.build.hidden=[1500,1500]", "train.epochs=3", "train.global_batch=64", "train.steps_per_call=1",
    "train.learning_rate=0.0001", "checkpoint.every_steps=4", "measure.steps=0", "measure.baseline=none",
    "launch.heartbeat_timeout=6", "launch.startup_timeout=40", "tracking.system_metrics_seconds=0", "tracking=none",
    "train.check=off",
)  # fmt: skip
STRATEGIES = {
    "one_device": ("strategy=one_device", "workers=1", "train.deterministic=true"),
    "mirrored": ("strategy=mirrored", "workers=2", "train.deterministic=true"),
    "multi_worker": ("strategy=multi_worker", "workers=2", "train.deterministic=true"),
    "parameter_server": ("strategy=parameter_server", "workers=2"),
}
ROLES = {
    "one_device": ("chief", "conductor"),
    "mirrored": ("chief", "conductor"),
    "multi_worker": ("chief", "worker", "conductor"),
    "parameter_server": ("coordinator", "worker", "parameter server", "conductor"),
}
# When a moment has come, by the kinds of events, the last step, and files that are being written.
MOMENTS: dict[str, Callable[[list[str], int, Callable[[str], bool]], bool]] = {
    "joining": lambda kinds, step, writes: "started" in kinds,
    "first trace": lambda kinds, step, writes: "built" in kinds,
    "mid-epoch": lambda kinds, step, writes: kinds.count("epoch") == 1 and step % 10 == 6,
    "validation": lambda kinds, step, writes: kinds.count("epoch") == 1 and step >= 20,
    "checkpoint": lambda kinds, step, writes: "epoch" in kinds and writes("checkpoints/*.partial"),
    "saving": lambda kinds, step, writes: writes(".partial.model*"),
}
# How far the loss of a race may be from that of another, as a share of it.
RACING = 0.25


@dataclass(frozen=True)
class Cell:
    """Who gets which signal at which moment."""

    strategy: str
    role: str
    signal: str
    moment: str

    def __str__(self) -> str:
        return f"{self.strategy} · {self.role} · {self.signal} · {self.moment}"


def chosen(seed: int | str | None, count: int) -> list[Cell]:
    """So many cells, another choice for each seed; all without one.

    A driver that is stopped does nothing until it goes on, and so is none of them.
    """
    cells = [
        Cell(strategy, role, number, moment)
        for strategy in STRATEGIES
        for role, number, moment in product(ROLES[strategy], ("KILL", "STOP", "TERM"), MOMENTS)
        if not (role == "conductor" and number == "STOP")
    ]
    return cells if seed is None else random.Random(seed).sample(cells, count)


def trained(folder: Path, strategy: str) -> tuple[Any, ...]:
    """What a finished run trained, for comparison: a hash of the weights; in a race the examples and the loss."""
    last = events(folder, "finished")[-1]
    return (last["examples"], last["loss"]) if strategy == "parameter_server" else (last["weights"][0],)


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Is what two runs trained the same, as far as it can be?"""
    return one == other or (len(one) > 1 and one[0] == other[0] and abs(one[1] - other[1]) <= RACING * other[1])


def harm(cell: Cell, command: UnderWay, seconds: float = 60.0) -> bool:
    """Waits for the cell's moment, and sends its signal; false where the run ended before, or in vain."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        told = command.told()
        ranks = {event["role"]: event["rank"] for event in told if event["event"] == "started"}
        kinds, folders = [event["event"] for event in told], command.runs
        step = max((event["step"] for event in told if event["event"] == "steps"), default=0)
        writes = lambda name, folders=folders: any(True for folder in folders for _ in folder.glob(name))  # noqa: E731
        if (cell.role == "conductor" or cell.role in ranks) and MOMENTS[cell.moment](kinds, step, writes):
            with suppress(ProcessLookupError):
                command.harm(getattr(signal, f"SIG{cell.signal}"), ranks.get(cell.role))
                return True
            return False
        if kinds[-1:] == ["ended"]:
            return False
        time.sleep(0.002)
    return False


def run(cell: Cell, unharmed: Callable[[str], tuple[Any, ...]], folder: Path) -> str:
    """What came of a cell, in words; begins with "ok" where it held."""
    codes: list[int] = []
    came = True
    command = UnderWay(folder)
    for attempt in range(4):
        command.type(*STRATEGIES[cell.strategy], *TINY)
        if not attempt:
            came = harm(cell, command)
        ran = command.ended(120)
        codes.append(ran.code)
        if "Traceback" in ran.err + ran.out:
            return f"a traceback: {ran.err[-300:]}"
        if ran.code == 0:
            break
    said, ways = "" if came else "the moment never came; ", " then ".join(map(str, codes))
    if codes[-1] != 0:
        return f"{said}never finished: {ways}; {ran.err[-300:]}"
    if left := left_behind(folder):
        return f"{said}left behind: {left}"
    if len(command.runs) != 1:
        return f"{said}{len(command.runs)} runs in place of one; {ways}"
    if not same(trained(folder, cell.strategy), unharmed(cell.strategy)):
        return f"{said}trained {trained(folder, cell.strategy)} in place of {unharmed(cell.strategy)}; {ways}"
    result = ran.result
    if not result["restarts"] and not result["resumed"] and cell.signal != "TERM" and came:
        return f"harmed in vain; {ways}"
    return (
        f"{'' if came else '?? '}ok: {said}exit {ways}, {result['restarts']} restarts, resumed {result['resumed']}, "
        f"{result['steps_repeated']} steps again"
    )


@cache
def unharmed_in(folder: Path, strategy: str) -> tuple[Any, ...]:
    """What a strategy trains when nothing happens, learnt once."""
    UnderWay(folder / f"unharmed-{strategy}", *STRATEGIES[strategy], *TINY).ended(120).ok()
    return trained(folder / f"unharmed-{strategy}", strategy)


def main() -> int:
    """Runs the cells that were asked for, and prints a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--count", type=int, default=20)
    given = parser.parse_args()
    asked = [cell for cell in chosen(given.seed, given.count) if given.only in str(cell)]
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        unharmed = partial(unharmed_in, Path(name))
        for number, cell in enumerate(asked):
            began = time.monotonic()
            outcome = run(cell, unharmed, Path(name) / str(number))
            bad += not outcome.startswith("ok")
            print(f"| {cell} | {outcome} | {time.monotonic() - began:.0f} s |", flush=True)
    print(f"{len(asked) - bad} of {len(asked)} cells hold")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

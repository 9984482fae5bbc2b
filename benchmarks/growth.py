"""How what the program does grows with how much there is of it: seconds, or memory, by size, and the exponent of that.

    python benchmarks/growth.py
    python benchmarks/growth.py --rows planning report --most 1000

Each row has sizes from small to large. The exponent b is that of a * size^b through the larger half of them, where what
is the same at every size counts least. Folders of runs are copies of one that a run left, each with another seed. A
command is typed as a person types it; its seconds are those of the cores that it took, start included.
"""

import argparse
import json
import math
import multiprocessing as mp
import os
import resource
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import record
from rich.console import Console
from scale import config_of, planning_seconds

from pipeline.config import config as configs
from pipeline.config.composing import Composer
from pipeline.config.schema import Config
from pipeline.driver import resume
from pipeline.driver.requests import Requests
from pipeline.driver.run import Run as LoggedRun
from pipeline.driver.session import Session
from pipeline.plan import plan as plans
from pipeline.plan.plan import Plan
from pipeline.record import log
from pipeline.record.events import Event, Run, Steps
from pipeline.record.files import Entry, TrackingStore, write_sweep
from pipeline.views.mlflow import Tracker
from pipeline.views.terminal import live

# What is copied, and what the commands over its copies ask.
QUICK = (
    "strategy=one_device", "model=mlp", "data=digits", "tracking=none", "train.epochs=1", "train.steps_per_call=5",
    "train.check=off", "train.save=false", "measure.steps=5", "measure.warmup_steps=5", "measure.repeats=2",
)  # fmt: skip
COPIED = ("plan.json", "result.json", "events.jsonl")
FOREVER = 600.0


@dataclass(frozen=True)
class Row:
    """What was measured at each size: `unit` is s, or MiB."""

    of: str
    unit: str
    sizes: Sequence[int]
    values: Sequence[float]

    @property
    def exponent(self) -> float | None:
        """That of the power of size through the larger half of the sizes; None where there is only one.

        >>> round(Row("", "s", [1, 10, 100, 1000], [1.0, 1.1, 2.0, 20.0]).exponent, 6)
        1.0
        """
        half = len(self.sizes) // 2
        larger = [(math.log(size), math.log(value)) for size, value in zip(self.sizes, self.values, strict=True)]
        larger = larger[min(half, len(larger) - 2) :] if len(larger) > 1 else []
        return statistics.linear_regression(*zip(*larger, strict=True)).slope if larger else None


# Yields the value at each size.
Measure = Callable[[Sequence[int], Path], Iterator[float]]


def main() -> int:
    """Prints each row as it is measured; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--most", type=int, help="the largest size of any row; of one without such, its smallest")
    arguments = record.parse(parser, smoke=["--most=1"])
    rows: dict[str, dict[str, object]] = {}
    for name in arguments.rows:
        of, unit, sizes, measure = ROWS[name]
        sizes = [size for size in sizes if size <= (arguments.most or size)] or sizes[:1]
        with tempfile.TemporaryDirectory() as folder:
            row = Row(of, unit, sizes, list(measure(sizes, Path(folder))))
        about = (measure.__doc__ or "").partition("\n")[0]
        rows[name] = {"about": about, **asdict(row), "exponent": row.exponent}
        values = ", ".join(f"{size:,}: {value:.3g}" for size, value in zip(row.sizes, row.values, strict=True))
        print(f"{name}: {values} {unit}; exponent {row.exponent or math.nan:.2f}", flush=True)
    record.write(arguments, 1, rows)
    return 0


def planning(sizes: Sequence[int], folder: Path) -> Iterator[float]:
    """Plans a run of so many workers, each a process."""
    config = config_of(30.0)
    for size in sizes:
        yield min(planning_seconds(config, size) for _ in range(3))


def composing(sizes: Sequence[int], folder: Path) -> Iterator[float]:
    """Composes, checks and plans the runs of a sweep, and makes their folders."""
    for size in sizes:
        began = time.process_time()
        _composed(size, folder / str(size)).release()
        yield time.process_time() - began


def noting(sizes: Sequence[int], folder: Path) -> Iterator[float]:
    """Notes the end of one run of a sweep in `sweep.json`, which lists all, and gathers the table of all."""
    for size in sizes:
        requests = _composed(size, folder / str(size))
        key = next(iter(requests.to_run))
        result = requests.to_run[key].unended("FINISHED")
        assert requests.sweep is not None
        seconds = []
        for _ in range(5):
            began = time.process_time()
            requests.sweep.note(requests.entries[key], result, 1.0)
            requests.shown({key: result})
            seconds.append(time.process_time() - began)
        requests.release()
        yield statistics.median(seconds)


def _composed(size: int, output: Path) -> Requests:
    """A sweep's runs as its command has them before the first one starts; JAX's need no fork server."""
    configs.register(lambda: 2)
    words = [*QUICK, "backend=jax", f"output_dir={output}", "sweep.name=grown", f"train.seed=range({size})"]
    screen = live.Terminal(Console(file=open(os.devnull, "w")), time.time)  # noqa: SIM115
    requests = Requests(Session(tuple(sys.path), os.environ, lambda: screen, Tracker))
    requests.accept(Composer("config", Config, None).points(words, True))
    assert len(requests.to_run) == size
    return requests


def starting(sizes: Sequence[int], folder: Path) -> Iterator[float]:
    """Looks, as a run starts, among all runs for one that it resumes, and for one that holds its ports."""
    for output, plan in _grown(sizes, folder):
        # The first look reads what the index lacks.
        resume.find(Config(), plan, output)
        began = time.process_time()
        assert resume.find(Config(), plan, output) is None
        assert not [*resume.in_the_way(plan, 20_000, output)]
        yield time.process_time() - began


def predicting(sizes: Sequence[int], folder: Path) -> Iterator[float]:
    """Types `mode=predict` for a model that all runs have trained, and reads them all."""
    for output, _ in _grown(sizes, folder):
        yield _typed(output.parent, *QUICK, "mode=predict", "workers=1", "predict.time_one=false")


def comparing(sizes: Sequence[int], folder: Path) -> Iterator[float]:
    """Types `compare` for two of the runs, by their names."""
    for output, _ in _grown(sizes, folder):
        yield _typed(output.parent, "compare", "run-0", "run-1")


def cleaning(sizes: Sequence[int], folder: Path) -> Iterator[float]:
    """Types `clean`, which looks at all runs and removes none."""
    for output, _ in _grown(sizes, folder):
        yield _typed(output.parent, "clean")


def reporting(sizes: Sequence[int], folder: Path) -> Iterator[float]:
    """Types `report` for a sweep of so many runs, figures included."""
    left, _ = _left()
    for size in sizes:
        sweep = folder / str(size) / "outputs" / "sweeps" / "grown"
        for number in range(size):
            _copied(left, sweep / f"{number}_one_device", number)
        entries = [
            Entry(number, 0, str(number), f"{number}_one_device", (f"train.seed={number}",), "FINISHED")
            for number in range(size)
        ]
        write_sweep(sweep, entries)
        yield _typed(folder / str(size), "report", "grown")


def _grown(sizes: Sequence[int], folder: Path) -> Iterator[tuple[Path, Plan]]:
    """Yields (an output folder with so many runs, the plan of another) for each size."""
    left, plan = _left()
    output, there = folder / "outputs", 0
    for size in sizes:
        for number in range(there, size):
            _copied(left, output / "runs" / f"run-{number}", number)
        there = size
        yield output, replace(plan, training=replace(plan.training, seed=-1))


@cache
def _left() -> tuple[Mapping[str, str], Plan]:
    """(What a run leaves, by file; its plan)."""
    with tempfile.TemporaryDirectory() as folder:
        record.typed(folder, *QUICK)
        (run,) = Path(folder).glob("outputs/runs/*")
        files = {name: (run / name).read_text() for name in COPIED}
    return files, plans.from_values(json.loads(files["plan.json"]))


def _copied(left: Mapping[str, str], folder: Path, seed: int) -> None:
    """Writes what a run has left into another folder, as of a run of another seed."""
    folder.mkdir(parents=True)
    for name, text in left.items():
        (folder / name).write_text(text)
    values = json.loads(left["plan.json"])
    assert "seed" in values
    (folder / "plan.json").write_text(json.dumps(values | {"seed": seed}))


def _typed(folder: Path, *arguments: str) -> float:
    """Types a command; returns the seconds of cores that it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    record.typed(folder, *arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def tracking(sizes: Sequence[int], folder: Path) -> Iterator[float]:
    """Writes so many events at once, each of ten steps, into a log that is followed, until MLflow has them."""
    tracker = Tracker(os.environ, folder / "tracker.log")
    store = TrackingStore("sqlite", f"sqlite:///{folder}/mlflow.db", "growth", str(folder / "artifacts"))
    try:
        # Another run first, which makes the database.
        for size in (1, *sizes):
            run = folder / f"{size}-{uuid.uuid4().hex}"
            run.mkdir()
            written = log.EventLog(run / "events.jsonl")
            written.append(Run(key=uuid.uuid4().hex, name=run.name, folder=str(run), time=time.time()))
            tracker.follow(run, store)
            sent, problem = tracker.drain(run, FOREVER)
            assert sent, problem
            began = time.monotonic()
            for event in _steps(size):
                written.append(event)
            written.close()
            sent, problem = tracker.drain(run, FOREVER)
            assert sent, problem
            if run.name.partition("-")[0] != "1":
                yield time.monotonic() - began
    finally:
        tracker.close(FOREVER)


def _steps(count: int) -> Iterator[Event]:
    """Yields so many events of ten steps each, a millisecond apart."""
    began = time.time()
    for number in range(1, count + 1):
        losses, stamp = [1.0 / number] * 10, {"time": began + number / 1000, "group": "point"}
        yield Steps(10 * number, losses, 1, {"accuracy": 0.5}, 320.0, 0.001, 1e-3, **stamp)


def driver_memory(sizes: Sequence[int], folder: Path) -> Iterator[float]:
    """Holds more memory in a driver after so many steps: for the state of a run, its log and the terminal's bars."""
    _, plan = _left()
    for size in sizes:
        with _fork(_drive, plan, size, folder / str(size)) as answer:
            yield answer.recv()


def _drive(plan: Plan, steps: int, folder: Path, answer: Connection) -> None:
    folder.mkdir()
    run, (first, *others) = LoggedRun(folder), _steps(max(1, steps // 10))
    del others
    run.open()
    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, force_interactive=True, width=100, height=30)
        with live.Progress(plan, console, time.monotonic()) as progress:
            run.append(first)
            progress.update(first, time.monotonic())
            before = psutil.Process().memory_info().rss
            for event in _steps(max(1, steps // 10)):
                run.append(event)
                progress.update(event, time.monotonic())
            answer.send(max(psutil.Process().memory_info().rss - before, 2**16) / 2**20)


def checkpoints(sizes: Sequence[int], folder: Path) -> Iterator[float]:
    """Gathers a checkpoint and hands it to its writer, for which training waits."""
    for size in sizes:
        with _fork(_checkpoint, size, folder / str(size)) as answer:
            yield answer.recv()


def _checkpoint(size: int, folder: Path, answer: Connection) -> None:
    import keras

    from pipeline.plan.plan import Checkpoints
    from pipeline.worker.checkpoint import Checkpointer, State, grouped

    model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(250 * size, use_bias=False)])
    model.compile(optimizer="sgd")
    checkpointer, seconds = Checkpointer(Checkpoints(folder=str(folder)), lambda event: None), list[float]()
    values = {"step": 0, "epoch": 0, "in_epoch": 0, "examples": 0, "best": None}
    for step in range(3):
        began = time.monotonic()
        checkpointer.write(State(values | {"step": step}, grouped("trained", model.get_weights())))
        seconds.append(time.monotonic() - began)
        checkpointer.wait()
    answer.send(statistics.median(seconds))


@contextmanager
def _fork(do: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """A fork that does something, and the end of a pipe on which it answers."""
    forks = mp.get_context("fork")
    answer, question = forks.Pipe(duplex=False)
    process = forks.Process(target=do, args=(*arguments, question))
    process.start()
    question.close()
    try:
        yield answer
    finally:
        process.join()


def reading(sizes: Sequence[int], folder: Path) -> Iterator[float]:
    """Types a command that trains an epoch on data in so many files, of eight examples each."""
    here = [word for word in QUICK if not word.startswith(("data=", "measure."))]
    for size in sizes:
        there = folder / str(size)
        there.mkdir()
        source = ("data=synthetic", "data.build.shape=[8]", f"data.build.train_examples={8 * size}")
        record.typed(there, "prepare", *source, "data.build.validation_examples=0", f"shards={size}", "out=data")
        yield _typed(there, *here, "data=tfrecord", "data.path=data", "measure.steps=0", "measure.baseline=none")


ROWS: Mapping[str, tuple[str, str, Sequence[int], Measure]] = {
    "planning": ("workers", "s", (2, 16, 128, 1024, 8192, 65_536), planning),
    "composing": ("runs", "s", (10, 30, 100, 300, 1000), composing),
    "noting": ("runs", "s", (10, 30, 100, 300), noting),
    "starting": ("runs", "s", (10, 100, 1000, 10_000), starting),
    "predict": ("runs", "s", (10, 100, 1000, 10_000), predicting),
    "compare": ("runs", "s", (10, 100, 1000, 10_000), comparing),
    "clean": ("runs", "s", (10, 100, 1000, 10_000), cleaning),
    "report": ("runs", "s", (10, 100, 1000), reporting),
    "tracking": ("events", "s", (10, 100, 1000, 10_000), tracking),
    "memory": ("steps", "MiB", (1000, 10_000, 100_000, 1_000_000), driver_memory),
    "checkpoints": ("MB", "s", (1, 8, 64, 512, 2000), checkpoints),
    "reading": ("files", "s", (10, 100, 1000, 10_000), reading),
}


if __name__ == "__main__":
    sys.exit(main())

"""What a driver of many processes costs: its CPU, its memory, and how soon it notices one that is dead.

    python benchmarks/scale.py --processes 1000 4096 --seconds 60

Processes are pretended, by agents of up to 128 each, in one process beside the driver. All between them is real: TLS
and the token over loopback sockets, numbered messages, the watch, the event log, and the bars. For a minute they tell
what processes that train tell; then one is killed. They are started again, and one says no more, which is noticed once
`launch.heartbeat_timeout` has passed. Last, a plan is made for many workers.
"""

import argparse
import multiprocessing as mp
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import psutil
import record
from hydra import compose, initialize_config_dir
from pretended import NOBODY, Doom, Pretended, serve
from rich.console import Console

from pipeline.config import config as configs
from pipeline.config import offered
from pipeline.config.schema import Config
from pipeline.driver.group import Group, Preemption, RunFailed
from pipeline.launch.agents.messages import alike
from pipeline.plan.machine import Host, inventory
from pipeline.plan.plan import Plan
from pipeline.plan.planning import listening, make
from pipeline.record.commands import Train
from pipeline.record.events import PASSING, Event, Steps
from pipeline.record.log import EventLog
from pipeline.views.terminal.live import Progress

# Processes of an agent; seconds of training before a process says no more.
MOST_PER_HOST, SETTLE_SECONDS = 128, 2.0
# What a driver, and planning, are to stay below.
MOST_CORES, MOST_PLANNING_SECONDS = 1.0, 2.0


@dataclass(frozen=True)
class Driven:
    """What a driver of so many processes took while they told of training, and when it noticed a dead one."""

    processes: int
    hosts: int
    events_per_second: float
    cores: float
    memory_mib: float
    killed_seconds: float
    silent_seconds: float
    silent_limit: float


def main() -> int:
    """Prints what each number of processes takes; returns 1 where that is a core, or planning two seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1_000, 4_096])
    parser.add_argument("--seconds", type=float, default=60.0, help="for which they tell of training")
    parser.add_argument("--heartbeat", type=float, default=30.0, help="launch.heartbeat_timeout")
    parser.add_argument("--workers", type=int, default=65_536, help="that are planned")
    smallest = ["--seconds=1", "--heartbeat=4", "--workers=1024", "--processes", "16"]
    arguments = record.parse(parser, smoke=smallest)
    config = config_of(arguments.heartbeat)
    # What both ends show each other of this code is read once.
    alike()
    runs = []
    for processes in arguments.processes:
        runs.append(_in_processes(processes, config, arguments.seconds))
        print(_said(runs[-1]), flush=True)
    planning = planning_seconds(config, arguments.workers)
    print(f"{arguments.workers:,} workers are planned in {planning:.2f} s")
    rows = {
        "runs": [asdict(run) for run in runs],
        "plan": {"workers": arguments.workers, "seconds": planning},
    }
    record.write(arguments, 1, rows)
    holds = all(run.cores < MOST_CORES for run in runs) and planning < MOST_PLANNING_SECONDS
    return 0 if arguments.smoke or holds else 1


def _said(run: Driven) -> str:
    hosts = f"{run.hosts} host{'s' * (run.hosts > 1)}"
    return (
        f"{run.processes:,} processes on {hosts}: {run.events_per_second:,.0f} events/s, {run.cores:.2f} cores, "
        f"{run.memory_mib:.0f} MiB; one that was killed is noticed after {run.killed_seconds:.1f} s, one that "
        f"says nothing after {run.silent_seconds:.1f} s of {run.silent_limit:g}"
    )


def config_of(heartbeat: float) -> Config:
    configs.register()
    chosen = (
        "strategy=multi_worker", "strategy.devices_per_process=1", "model=mlp", "data=digits", "tracking=none",
        "measure.baseline=none", f"launch.heartbeat_timeout={heartbeat}",
    )  # fmt: skip
    with initialize_config_dir(str(offered.folder()), version_base="1.3"):
        return configs.typed_as(Config, compose("config", list(chosen)))


def _hosts(processes: int) -> int:
    """The fewest hosts that have the same number of processes each, and no more than an agent holds.

    >>> _hosts(1000), _hosts(4096)
    (8, 32)
    """
    least = -(-processes // MOST_PER_HOST)
    return next(hosts for hosts in range(least, processes + 1) if processes % hosts == 0)


def _in_processes(processes: int, config: Config, seconds: float) -> Driven:
    """Has the agents in one process, and a driver that is measured in another."""
    forks, doom, hosts = mp.get_context("fork"), Doom(), _hosts(processes)
    contacts, contact = forks.Pipe(duplex=False)
    agents = forks.Process(target=serve, args=(hosts, processes // hosts, contacts, doom))
    agents.start()
    told, tell = forks.Pipe(duplex=False)
    driver = forks.Process(target=_drive, args=(processes, hosts, config, seconds, contact, doom, tell))
    driver.start()
    tell.close()
    try:
        measured: Driven = told.recv()
    except EOFError:
        agents.kill()
        sys.exit(f"The driver of {processes:,} processes ended without a word.")
    finally:
        driver.join()
        agents.join()
    return measured


def _drive(
    processes: int, hosts: int, config: Config, seconds: float, contact: Connection, doom: Doom, tell: Connection
) -> None:
    """Is the driver, and sends what that took."""
    before, cluster = _memory_mib(), Pretended(hosts, contact)
    plan = make(replace(config, workers=processes), cluster.inventory())
    plan = listening(plan, cluster.addresses(plan))
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as terminal:
        folder = Path(name)
        log = EventLog(folder / "events.jsonl")
        console = Console(file=terminal, force_terminal=True, force_interactive=True, width=100, height=30)
        with Progress(plan, console, time.monotonic()) as progress:
            trained = _Meter(log, progress, seconds, doom.killed, processes - 1)
            killed = _noticed(cluster, plan, folder, trained)
            memory = _memory_mib() - before
            again = _Meter(log, progress, SETTLE_SECONDS, doom.silent, processes - 1)
            silent = _noticed(cluster, plan, folder, again)
        log.close()
    cluster.close(0)
    rate, limit = trained.events / seconds, config.launch.heartbeat_timeout
    tell.send(Driven(len(plan.processes), hosts, rate, trained.cores, memory, killed, silent, limit))


def _noticed(cluster: Pretended, plan: Plan, folder: Path, meter: "_Meter") -> float:
    """Starts all processes, and has them train until one is dead: seconds until the others are told to end."""
    group = _Watched(cluster, plan, "point", folder, meter.tell, Preemption())
    try:
        group.joined()
        group.request(Train(1, str(folder)))
    except RunFailed as failed:
        if not meter.died or failed.rank != meter.rank:
            raise
    meter.dead.value = NOBODY
    return group.ended - meter.died


class _Watched(Group):
    """A group that knows when it began to end its processes."""

    ended = 0.0

    def stop(self, grace: float = 0.0) -> None:
        self.ended = self.ended or time.monotonic()
        super().stop(grace)


class _Meter:
    """Does with events what a run does; counts them for so many seconds of training, and has a process die then.

    `cores` are those that this process took meanwhile.
    """

    def __init__(self, log: EventLog, progress: Progress, seconds: float, dead: "Synchronized[int]", rank: int) -> None:
        self._log, self._progress, self._seconds = log, progress, seconds
        self.dead, self.rank, self.died = dead, rank, 0.0
        self.events, self.cores = 0, 0.0
        # When training began, on the clock and on that of the cores.
        self._began: tuple[float, float] | None = None

    def tell(self, event: Event) -> None:
        """Takes the next event."""
        now = time.monotonic()
        self._progress.update(event, now)
        if not isinstance(event, PASSING):
            self._log.append(event)
        if self._began is None and isinstance(event, Steps):
            self._began = now, time.process_time()
        if self._began is None or self.died:
            return
        self.events += 1
        began, computed = self._began
        if now >= began + self._seconds:
            self.cores = (time.process_time() - computed) / (now - began)
            self.dead.value, self.died = self.rank, now


def planning_seconds(config: Config, workers: int) -> float:
    """Seconds of a core to plan so many workers, each a process, on hosts with names and cores of their own."""
    hosts = _hosts(workers)
    cores = tuple(range(workers // hosts))
    machine = inventory([Host(f"node{number}", cores, 512.0, "a processor") for number in range(hosts)])
    began = time.process_time()
    plan = make(replace(config, workers=workers), machine)
    took = time.process_time() - began
    assert len(plan.processes) == workers
    return took


def _memory_mib() -> float:
    return float(psutil.Process().memory_info().rss) / 2**20


if __name__ == "__main__":
    sys.exit(main())

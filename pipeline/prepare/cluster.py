"""Starts Dask workers here, or uses those of a scheduler that runs already, and gives them tasks.

Dask takes half a second to import. It imports this module in each worker that it starts, and calls `dask_setup`.
"""

import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from pipeline.errors import UserError, first_line
from pipeline.launch import LaunchError
from pipeline.launch.signals import DRIVER_PID, die_with_driver
from pipeline.prepare import folder as folders

if TYPE_CHECKING:
    import distributed

T = TypeVar("T")
CONNECT_SECONDS = 15.0
# Times that a task is given to another worker when its own has died.
RETRIES = 3
# The variable that names the file into which workers of this machine print.
LOG = "PIPELINE_PREPARE_LOG"


@contextmanager
def workers(processes: int, scheduler: str | None, folder: Path) -> Iterator["Workers"]:
    """Dask workers: so many on this machine, or those of a scheduler. Raises `LaunchError`."""
    import dask

    # What they say of workers that are ended in the middle of their work says nothing to a person.
    for name in ("distributed", "tornado", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # For good, since Dask's threads may read it to the very end.
    dask.config.set({
        "distributed.scheduler.allowed-failures": RETRIES,
        "distributed.comm.timeouts.connect": f"{CONNECT_SECONDS}s",
        "distributed.admin.log-format": "%(message)s",
        "distributed.logging.distributed": "critical",
        **{f"distributed.worker.memory.{limit}": False for limit in ("target", "spill", "pause")},
    })  # fmt: skip
    with warnings.catch_warnings():
        # Of a port that is taken, and of versions that differ a little.
        warnings.simplefilter("ignore")
        with _there(scheduler) if scheduler else _here(processes, folder) as client:
            yield Workers(client, scheduler)


@dataclass(frozen=True)
class Workers:
    """The workers of a Dask client, which are those of a scheduler or of this machine."""

    client: "distributed.Client"
    scheduler: str | None

    def on_each(self, function: Callable[..., T], *arguments: object) -> list[T]:
        """Calls the function on each worker. Raises its `UserError`, or `LaunchError`."""
        # Idle workers get one each. A task that is bound to a worker would wait for ever for one that has died.
        count = len(self.client.scheduler_info(n_workers=-1)["workers"])
        # Where all are just being started again, one task waits for them.
        return list(self.results(function, [arguments] * max(1, count)))

    def results(self, function: Callable[..., T], tasks: Sequence[tuple[object, ...]]) -> Iterator[T]:
        """Calls the function with the arguments of each task; yields results as they come. Raises as `on_each`."""
        from distributed import KilledWorker, as_completed

        futures = [self.client.submit(function, *task, pure=False) for task in tasks]
        try:
            for future in as_completed(futures, loop=self.client.loop):
                try:
                    result: T = future.result()
                except UserError:
                    raise
                except KilledWorker as error:
                    died = f"{RETRIES + 1} that died one after the other in the same task: out of memory, most likely"
                    instead = "fewer processes, or a smaller shard_mib"
                    raise LaunchError("Dask workers that live", died, instead) from error
                except Exception as error:
                    where = f"the scheduler at {self.scheduler}" if self.scheduler else "this machine's processes"
                    received = f"from {where}: {type(error).__name__}: {first_line(error)}"
                    instead = "the same Python packages on all of them, or scheduler=null"
                    raise LaunchError("Dask workers that can do this work", received, instead) from error
                yield result
        finally:
            with suppress(Exception):
                self.client.cancel(futures, force=True)


@contextmanager
def _here(processes: int, folder: Path) -> Iterator["distributed.Client"]:
    from distributed import Client, LocalCluster

    absolute = folder.absolute()
    environment = {DRIVER_PID: str(os.getpid()), LOG: str(absolute / folders.PRINTED), "TF_CPP_MIN_LOG_LEVEL": "3"}
    cluster = client = None
    try:
        # Without a limit of memory: a worker's data are not Dask's, which could not free any of them.
        cluster = LocalCluster(
            n_workers=processes, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None,
            memory_limit=0, local_directory=str(absolute / folders.HIDDEN / "dask"), silence_logs=logging.CRITICAL,
            preload=[__name__], env=environment,
        )  # fmt: skip
        client = Client(cluster, set_as_default=False)
        client.wait_for_workers(processes)
        yield client
    except BaseException:
        # A worker that is in the middle of a task would be waited for.
        for nanny in cluster.workers.values() if cluster is not None else ():
            nanny.auto_restart = False
        for child in multiprocessing.active_children():
            child.kill()
        raise
    finally:
        for opened in (client, cluster):
            if opened is not None:
                with suppress(Exception):
                    opened.close(timeout=2)
        # Those that Dask was interrupted in starting or ending, on which it would wait once more at the very end.
        for child in multiprocessing.active_children():
            child.kill()
        if cluster is not None:
            cluster.shutdown_on_close = False


@contextmanager
def _there(scheduler: str) -> Iterator["distributed.Client"]:
    from distributed import Client

    try:
        client = Client(scheduler, set_as_default=False, timeout=CONNECT_SECONDS)
    except Exception as error:
        received, instead = f"no answer ({first_line(error)})", "`dask scheduler` there, or scheduler=null"
        raise LaunchError(f"a Dask scheduler at {scheduler}", received, instead) from error
    try:
        try:
            client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        except Exception as error:
            instead = f"`dask worker {scheduler}` on the machines that are to work"
            raise LaunchError(f"a Dask scheduler with workers at {scheduler}", "one without", instead) from error
        yield client
    finally:
        with suppress(Exception):
            client.close(timeout=2)


def dask_setup(worker: object) -> None:
    """Makes a worker of this machine end with its driver, print to the log and see no GPU; Dask calls it in each."""
    # Dask has a thread see to it, which may come too late.
    die_with_driver()
    # The driver handles a Ctrl-C at the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    log = os.open(os.environ[LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)

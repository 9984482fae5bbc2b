"""Processes on this machine, forked from a server that holds TensorFlow, talking over pipes.

The server imports TensorFlow and Keras once and uses neither, so that a process forked from it starts in a tenth of
a second. It lives as long as the cluster, for all points of a multirun; see `standby` for `launch.keep`.
"""

import contextlib
import multiprocessing as mp
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from pipeline.config.schema import ClusterConfig, StartMethod
from pipeline.launch import Cluster, Helpers, LaunchError, line_to, this_machine
from pipeline.launch.signals import DRIVER_PID, STACKS
from pipeline.launch.standby import PRELOAD, Standby, seconds_of, state_of
from pipeline.plan.machine import Machine
from pipeline.plan.plan import Plan, Process
from pipeline.record.commands import Command
from pipeline.record.events import Event, EventBase, Exited, Started, Stopped, Warned
from pipeline.record.log import from_line, stamped

# How often to ask the system whether a process is stopped.
LOOK_SECONDS = 1.0
# Before a fork server that was killed is started again, which the system may not have told of yet.
AGAIN_SECONDS = 0.2
# What is raised where the fork server, or a process that it has just forked, is gone.
GONE = (EOFError, ConnectionError, ProcessLookupError)
# Backends whose processes are not forked from the server, which has Keras on TensorFlow.
STARTED_ANEW = ("jax",)
# For those, glibc asks for large pages. XLA asks for a step's temporary memory as one block and frees it after the
# step, which glibc then gives back to the system. To be handed it out anew by pages of 4 KiB in each step takes a fifth
# of the step of a small transformer; to keep it would double what some models hold at their peak.
TUNABLES = "glibc.malloc.hugetlb=1"

Context = ForkServerContext | SpawnContext
# The environment is the whole process's: one thread at a time has it changed.
ENVIRONMENT = threading.Lock()


class LocalCluster(Cluster):
    """This machine."""

    def __init__(self, config: ClusterConfig, environ: Mapping[str, str], keep: str | None = None) -> None:
        self._config, self._environ = config, environ
        self._standby = None if keep is None else Standby(seconds_of(keep))
        self._machine: Machine | None = None
        # Of each thread that lays out a plan.
        self._kept = threading.local()
        forks = config.start_method is StartMethod.forkserver
        self._context: Context = mp.get_context("forkserver") if forks else mp.get_context("spawn")
        if forks:
            self._context.set_forkserver_preload(PRELOAD)

    def inventory(self) -> Machine:
        """This machine, as far as a process with the given environment may use it, looked at once."""
        self._machine = self._machine or this_machine.detect(self._environ)
        return self._machine

    def helpers(self) -> Helpers:
        """This machine."""
        host = self.inventory().hostname
        return Helpers({host: line_to(self._environ)}, here=host)

    def warm_up(self) -> None:
        """Starts the server's imports, so that they run beside what the driver does next."""
        if self._config.start_method is StartMethod.forkserver:
            with _quiet_environment():
                forkserver.ensure_running() if self._standby is None else self._standby.ensure()

    def addresses(self, plan: Plan) -> Sequence[str]:
        """Free ports, or the configured ones, for the processes of a plan of several."""
        return [f"{self._config.host}:{port}" for port in self.free(len(plan.processes))]

    def free(self, count: int) -> Sequence[int]:
        """Free ports, or the configured ones, reserved until the next call. Raises `LaunchError`."""
        base = self._config.base_port
        return self.hold(self._config.host, [0] * count if base is None else range(base, base + count))

    def hold(self, host: str, ports: Sequence[int]) -> Sequence[int]:
        """The same for these ports, of which 0 is any, at an address of this machine."""
        self._release()
        until = time.monotonic() + this_machine.FREE_SECONDS
        for port in ports:
            self._kept.reserved.append(this_machine.reserve(host, port, until))
        return tuple(reserved.getsockname()[1] for reserved in self._kept.reserved)

    def start(self, plan: Plan, group: str, folder: Path, ranks: Sequence[int] | None = None) -> "LocalJob":
        """Forks a process for each of the plan's, or for some ranks of it."""
        return LocalJob(self._context, plan, group, folder, range(len(plan.processes)) if ranks is None else ranks)

    def close(self, code: int) -> None:
        """Ends the server, which does once its pipe closes, and waits until it has; or leaves it on standby."""
        self._release()
        if self._standby is not None:
            self._standby.close()
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        # A command that has failed or was interrupted waits for no import of TensorFlow.
        if code and server._forkserver_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()

    def _release(self) -> None:
        for reserved in getattr(self._kept, "reserved", ()):
            reserved.close()
        self._kept.reserved = []


class LocalJob:
    """Forked processes, with a pipe for events, one for commands, and one that says the driver lives."""

    def __init__(self, context: Context, plan: Plan, group: str, folder: Path, ranks: Sequence[int]) -> None:
        if plan.backend in STARTED_ANEW:
            context = mp.get_context("spawn")
        self._group, self._context, self._plan, self._folder = group, context, plan, folder
        self._processes = dict[int, BaseProcess]()
        self._events, self._commands, self._lifelines = (dict[int, Connection]() for _ in range(3))
        self._partial = dict[int, bytes]()
        self._waiting: list[Event] = []
        self._exited, self._next_look = set[int](), 0.0
        self._text = plan.to_json()
        again, limit = 0, plan.launch.max_restarts
        while len(self._processes) < len(ranks):
            try:
                for rank in ranks:
                    self._start(plan.processes[rank])
            except BaseException as error:
                self.stop(grace=0)
                if not isinstance(error, GONE):
                    raise
                if again == limit:
                    raise _server_lost(again) from error
                again += 1
                self._processes.clear()
                self._waiting.clear()
                time.sleep(AGAIN_SECONDS)
        if again:
            often = f"{again} of {limit} times (launch.max_restarts)"
            self._add(ranks[0], Warned(f"The fork server was lost. It was started again, {often}."))

    def sources(self) -> list[Connection | int]:
        """Returns what is ready, for `wait`, once there are events."""
        running = [process.sentinel for rank, process in self._processes.items() if rank not in self._exited]
        return [*self._events.values(), *running]

    def events(self, timeout: float) -> list[Event]:
        """Returns the events that have come in; waits up to `timeout` seconds for one."""
        if not self._waiting:
            readers = {connection: rank for rank, connection in self._events.items()}
            for ready in wait(self.sources(), timeout):
                if isinstance(ready, Connection):
                    self._read(readers[ready])
            for rank, process in self._processes.items():
                if rank not in self._exited and not process.is_alive():
                    while rank in self._events and self._read(rank):
                        pass
                    self._exited.add(rank)
                    self._add(rank, Exited(process.exitcode))
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_SECONDS
            for rank, process in self._processes.items():
                if rank not in self._exited and state_of(process.pid) == "T":
                    self._add(rank, Stopped())
        waiting, self._waiting = self._waiting, []
        return waiting

    def send(self, command: Command[EventBase]) -> None:
        """Gives every process a command; one that is gone is left to its `exited` event."""
        for connection in self._commands.values():
            with contextlib.suppress(OSError):
                connection.send_bytes(command.to_json().encode())

    def restart(self, rank: int) -> None:
        """Kills a process, if it still is one, and starts it anew, at the same address."""
        self._processes[rank].kill()
        self._processes[rank].join()
        for connections in (self._events, self._commands, self._lifelines):
            if rank in connections:
                connections.pop(rank).close()
        self._exited.discard(rank)
        try:
            self._start(self._plan.processes[rank])
        except GONE as error:
            raise _server_lost(0) from error

    def dump_stacks(self) -> None:
        """Makes every process write its stack to its log; one that is stopped does so when it goes on."""
        self._signal(STACKS)

    def stop(self, grace: float) -> None:
        """Gives the processes `grace` seconds to end by themselves, kills the others, and waits for their end."""
        deadline = time.monotonic() + grace
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        self._signal(signal.SIGKILL)
        for process in self._processes.values():
            process.join()
        for connections in (self._events, self._commands, self._lifelines):
            while connections:
                connections.popitem()[1].close()

    def _start(self, process: Process) -> None:
        from pipeline.launch import child

        context, rank = self._context, process.rank
        self._events[rank], event_writer = context.Pipe(duplex=False)
        command_reader, self._commands[rank] = context.Pipe(duplex=False)
        os.set_blocking(self._events[rank].fileno(), False)
        self._partial[rank] = b""
        lifeline, self._lifelines[rank] = context.Pipe(duplex=False)
        log = self._folder / f"{self._group}-{rank}.log"
        arguments = (self._text, rank, self._group, event_writer, command_reader, lifeline, str(log))
        started = context.Process(target=child.main, args=arguments, name=f"{self._group}-{rank}")
        try:
            # A process that is started and not yet known here ends when `stop` closes its pipe. It may take the server
            # to start anew, for one that is started again too.
            with _quiet_environment(self._plan.backend):
                started.start()
            assert started.pid is not None
            self._processes[rank] = started
            child.die_with(lifeline, started.pid)
        finally:
            for end in (event_writer, command_reader, lifeline):
                end.close()
        self._add(rank, Started(started.pid, process.role, process.host))

    def _read(self, rank: int) -> bool:
        """Takes in what a process has written; false at the end of it."""
        try:
            data = os.read(self._events[rank].fileno(), 1 << 20)
        except BlockingIOError:
            return False
        if not data:
            self._events.pop(rank).close()
            return False
        *lines, self._partial[rank] = (self._partial[rank] + data).split(b"\n")
        self._waiting += [event for line in lines if (event := from_line(line)) is not None]
        return True

    def _signal(self, number: int) -> None:
        for rank, process in self._processes.items():
            if rank not in self._exited and process.is_alive() and process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _add(self, rank: int, event: Event) -> None:
        self._waiting.append(stamped(event, time.time(), self._group, rank))


def _server_lost(again: int) -> LaunchError:
    often = f", after it was started again {again} time{'s' * (again > 1)} (launch.max_restarts)" if again else ""
    instead = "again, or cluster.start_method=spawn, which needs none"
    return LaunchError("a fork server that starts processes", f"one that was killed{often}", instead)


@contextlib.contextmanager
def _quiet_environment(backend: str = "tensorflow") -> Iterator[None]:
    """The environment that a process is started with, to compute by a backend; put back afterwards."""
    with ENVIRONMENT:
        values = {
            "TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "2"),
            "KERAS_BACKEND": backend if backend in STARTED_ANEW else "tensorflow",
            DRIVER_PID: str(os.getpid()),
        }
        if backend in STARTED_ANEW:
            # What a user has set comes last, and holds.
            values["GLIBC_TUNABLES"] = ":".join(filter(None, [TUNABLES, os.environ.get("GLIBC_TUNABLES")]))
        before = {name: os.environ[name] for name in (*values, "TF_CONFIG") if name in os.environ}
        os.environ.update(values)
        # By which TensorFlow takes it for one of others than its plan names.
        os.environ.pop("TF_CONFIG", None)
        # To start it lets Ctrl-C through again, which a terminal sends to the fork server too until that ignores it.
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for name in values.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)

"""The first and last moments of a process: its log, its signals, its pipes, and its end when the driver's comes.

Imports nothing slow, because the driver imports it too, to name `main` to the fork server.
"""

import contextlib
import faulthandler
import fcntl
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import NoReturn

from pipeline.launch.signals import PREEMPTING, STACKS
from pipeline.record.commands import Command, Leave, from_json
from pipeline.record.events import Beat, Event, EventBase, Failed, Signalled, System
from pipeline.record.log import AsFarAsItFits, stamped, to_line

BEAT_SECONDS = 0.5
# Linux's number for choosing the signal that a descriptor sends; Python's module has no name for it before 3.13.
F_SETSIG = 10
# A process that waits for cores counts as computing for so many times what it has used: of two cores that twenty
# others want as well, a thread gets a tenth. Threads that only wake now and then use too little to count.
MOST_WAITED = 10
# The shares of a core from which on there is nothing to ask about.
ENOUGH_SHARE = 0.5


def main(
    plan: str, rank: int, group: str, events: Connection, commands: Connection, lifeline: Connection, log: str
) -> None:
    """Runs process `rank` of a plan by `pipeline.worker.main`; it ends with 0, or 1 after telling why."""
    # A Ctrl-C at the terminal is the driver's to handle.
    os.setpgid(0, 0)
    # Before any else: the driver, which does the same, may have come to its end before it could.
    die_with(lifeline, os.getpid())
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # Neither what is printed nor a traceback ends it on a full disk.
    sys.stdout, sys.stderr = AsFarAsItFits(sys.stdout), AsFarAsItFits(sys.stderr)  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    # Before there is another thread, so that all of them, TensorFlow's too, leave these to the one that waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTING)
    # The fork server ignores them, and what is ignored is not waited for everywhere.
    for number in PREEMPTING:
        signal.signal(number, signal.SIG_DFL)
    faulthandler.enable()
    faulthandler.register(STACKS)
    line, inbox, leaves = EventWriter(events, group, rank), SimpleQueue[Command[EventBase]](), threading.Event()
    try:
        for target, arguments in ((_beat, (line,)), (_pass_on, (line,)), (_listen, (commands, inbox, leaves))):
            threading.Thread(target=target, args=arguments, daemon=True).start()
        from pipeline.worker.main import main as live

        live(plan, rank, line.tell, inbox.get, leaves.is_set, _leave)
    except BaseException as error:
        # Before the engine was there, which tells of all that comes later.
        traceback.print_exc()
        sys.stderr.flush()
        from pipeline.worker.model_error import told

        line.tell(Failed(told(error)))
        _leave(1)


def _leave(code: int) -> NoReturn:
    """Ends without TensorFlow's own shutdown, which can wait for peers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class EventWriter:
    """Writes events to the driver, whole lines, from any thread."""

    def __init__(self, connection: Connection, group: str, rank: int) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._group, self._rank = group, rank
        self.progress = 0

    def tell(self, event: Event, progresses: bool = True) -> None:
        """Sends one event, which counts as progress unless it is the machine's load."""
        self.progress += progresses and not isinstance(event, System)
        data = to_line(stamped(event, time.time(), self._group, self._rank))
        with self._lock:
            while data:
                data = data[os.write(self._connection.fileno(), data) :]


def die_with(lifeline: Connection, pid: int) -> None:
    """Makes the kernel kill a process when the driver's end of a pipe that it reads closes, however that came."""
    # No thread could: TensorFlow holds Python's lock while it waits for other processes to join. What is set belongs to
    # the pipe, not to who sets it: the driver does it too, for a process that is stopped before its first line.
    descriptor = lifeline.fileno()
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, pid)
    fcntl.fcntl(descriptor, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_ASYNC)
    if lifeline.poll(0):
        os.kill(pid, signal.SIGKILL)


def _listen(connection: Connection, inbox: SimpleQueue[Command[EventBase]], leaves: threading.Event) -> None:
    """Takes commands in, in order; `leaves` is set as soon as `leave` has come, before it is taken."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            command = from_json(connection.recv_bytes())
            if isinstance(command, Leave):
                leaves.set()
            inbox.put(command)


def _beat(line: EventWriter) -> None:
    computing = Computing()
    while True:
        with contextlib.suppress(OSError):
            line.tell(Beat(line.progress, computing.seconds()), progresses=False)
        time.sleep(BEAT_SECONDS)


def _pass_on(line: EventWriter) -> None:
    while True:
        number = signal.sigwait(PREEMPTING)
        with contextlib.suppress(OSError):
            line.tell(Signalled(int(number)), progresses=False)


class Computing:
    """Counts seconds of cores that this process has used, or waited for while others had them."""

    def __init__(self) -> None:
        self._seconds = self._used = time.process_time()
        self._waited, self._asked = _waited(), time.monotonic()

    def seconds(self) -> float:
        """So many until now."""
        used, now = time.process_time(), time.monotonic()
        more, passed = used - self._used, now - self._asked
        self._seconds, self._used, self._asked = self._seconds + more, used, now
        if more < ENOUGH_SHARE * passed:
            before, self._waited = self._waited, _waited()
            # Threads that have ended take their waits along.
            self._seconds += min(max(self._waited - before, 0.0), MOST_WAITED * more)
        return self._seconds


def _waited() -> float:
    """Seconds that the threads of this process have been ready to run without a core; 0 where the system tells none."""
    total = 0
    with contextlib.suppress(OSError, IndexError, ValueError):
        for counts in Path("/proc/self/task").glob("*/schedstat"):
            # In nanoseconds (Linux, Documentation/scheduler/sched-stats.rst).
            total += int(counts.read_text().split()[1])
    return total / 1e9

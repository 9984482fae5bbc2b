"""Signals that ask a command to end, made an exception in its main thread, and the one that ends what it started."""

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator

# What a scheduler sends before it takes the machine away: Slurm and Kubernetes SIGTERM, Slurm also what it is told to,
# which is USR2 where NCCL catches USR1.
PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Has a process write its stack to its log: none that a scheduler may send to all that it has started.
STACKS = signal.SIGRTMIN
ENDING = (signal.SIGINT, signal.SIGHUP, *PREEMPTING)
# linux/prctl.h
PR_SET_PDEATHSIG = 1
DRIVER_PID = "PIPELINE_DRIVER_PID"


class Interrupted(BaseException):
    """A signal that asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def interrupt(spared: Callable[[int], bool] = lambda number: False) -> Iterator[None]:
    """Inside, the first signal that is not `spared` raises `Interrupted`; later ones leave the cleaning up alone."""

    def end(number: int, frame: object) -> None:
        if spared(number):
            return
        for ending in ENDING:
            signal.signal(ending, signal.SIG_IGN)
        raise Interrupted(number)

    # The main thread alone gets signals.
    main = threading.current_thread() is threading.main_thread()
    handlers = {ending: signal.signal(ending, end) for ending in ENDING if main}
    try:
        yield
    finally:
        for ending, handler in handlers.items():
            signal.signal(ending, handler)


def die_with_driver() -> None:
    """Makes the kernel kill this process, a child of the driver's, when that ends, which may have been already."""
    # No thread could: an import of TensorFlow holds Python's lock.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ[DRIVER_PID]):
        os.kill(os.getpid(), signal.SIGKILL)

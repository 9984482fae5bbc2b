"""What a Dask worker of this machine does first: it ends with its conductor, prints to a log, and has no GPU."""

import os
import signal

from pipeline.launch.signals import die_with_conductor

LOG = "PIPELINE_PREPARE_LOG"


def dask_setup(worker: object) -> None:
    """Called by Dask in each of its workers."""
    # Dask has a thread see to it, which may come too late.
    die_with_conductor()
    # A Ctrl-C at the terminal is the conductor's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    log = os.open(os.environ[LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)

"""Imports what is slow and every process needs into the fork server, and uses nothing: a thread would bar all forks."""

import atexit
import gc
import os
import signal
import sys

from pipeline.launch.signals import DRIVER_PID, PREEMPTING, die_with_driver

# Left to itself, the server hears of its driver's end only once it has imported all this. One on standby has none.
if DRIVER_PID in os.environ:
    die_with_driver()
# A scheduler sends them to all that it has started, and a terminal its Ctrl-C. With this server processes would seem
# gone that write a checkpoint.
for _number in (signal.SIGINT, *PREEMPTING):
    signal.signal(_number, signal.SIG_IGN)
# The driver has held it back until here.
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

# What TensorFlow writes while it is imported would land in the driver's terminal; what is wrong with it, a process
# finds out again and writes into its own log.
_terminal = os.dup(2)
_nowhere = os.open(os.devnull, os.O_WRONLY)
os.dup2(_nowhere, 2)
# Nothing that is imported is garbage: to look for some again and again takes a sixth of the time.
gc.disable()
# Keras imports scikit-learn for wrappers that nothing here uses, which doubles its own time.
_absent = "sklearn" not in sys.modules
if _absent:
    sys.modules["sklearn"] = None  # type: ignore[assignment]
try:
    import pipeline.data
    import pipeline.models
    import pipeline.strategies
    import pipeline.worker.main
    import pipeline.worker.process
    import pipeline.worker.tensorflow.engine  # noqa: F401
finally:
    if _absent:
        del sys.modules["sklearn"]
    os.dup2(_terminal, 2)
    os.close(_terminal)
    os.close(_nowhere)
# Once it has no driver, it ends at once: to take all that apart takes a third of a second, for which that waits.
atexit.register(os._exit, 0)
# Nor is there any later, in the processes, which share this memory as long as they do not touch it.
gc.freeze()
gc.enable()

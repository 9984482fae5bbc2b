"""The command: `python -m pipeline [VERB] [-m] key=value ...`, see `verbs.py`."""

import gc
import signal
import sys

# New objects between two looks for garbage; Python has 700.
OBJECTS = 100_000

if __name__ == "__main__":
    # Until there is something to put in order, and once that was done, a Ctrl-C ends it without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # To look for garbage among what is imported, on the way and again at the end, takes a third of the time of --help.
    gc.set_threshold(OBJECTS)
    # Here, because processes that Dask starts import this module anew, and need nothing of it.
    from pipeline.commands.verbs import main

    code = main()
    gc.freeze()
    sys.exit(code)

"""The command: `python -m pipeline [VERB] [-m] key=value ...`, see `verbs.py`."""

import signal
import sys

if __name__ == "__main__":
    # Until there is something to put in order, and once that was done, a Ctrl-C ends it without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Here, because processes that Dask starts import this module anew, and need nothing of it.
    from pipeline.commands.verbs import main

    sys.exit(main())

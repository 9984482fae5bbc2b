"""The command: `python -m pipeline.prepare data=SOURCE out=FOLDER [key=value ...]`, see `command.py`."""

import signal
import sys

if __name__ == "__main__":
    # Until there is something to put in order, a Ctrl-C ends it without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Here, because each Dask process imports this module anew, and needs nothing of it.
    from pipeline.prepare.command import main

    sys.exit(main())

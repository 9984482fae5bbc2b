"""The command: `python -m pipeline [-m] key=value ...`, see `command.py`."""

import signal

if __name__ == "__main__":
    # Until there is something to put in order, and once that was done, a Ctrl-C ends it without a word.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from pipeline.command import main

    main()

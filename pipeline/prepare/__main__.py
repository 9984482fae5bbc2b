"""The command: `python -m pipeline.prepare data=SOURCE out=FOLDER [key=value ...]`, see `command.py`."""

import sys

if __name__ == "__main__":
    # Here, because each Dask process imports this module anew, and needs nothing of it.
    from pipeline.prepare.command import main

    sys.exit(main())

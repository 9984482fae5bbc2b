"""Says that a run, or a sweep, is being worked on."""

import fcntl
import os
from pathlib import Path

LOCK = "run.lock"


class Lock:
    """Says, as long as this process lives, that a folder is in use. The kernel lets go of it however it ends."""

    def __init__(self, folder: Path, name: str = LOCK) -> None:
        self._file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise

    def release(self) -> None:
        """Lets go of it."""
        os.close(self._file)

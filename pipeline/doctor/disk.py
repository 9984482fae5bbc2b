"""Writes some mebibytes into a folder that a run would write to, and takes them away again."""

import os
import tempfile
import time
from pathlib import Path

from pipeline.doctor.facts import Disk

# So much is made safe at a time, as a checkpoint is, and so often unless it takes too long.
PIECE_BYTES, PIECES = 8 << 20, 8
SECONDS = 2.0


def look(folder: str) -> Disk:
    """What fits into a folder, or into the one that it would be made in, and how fast it is written."""
    place = Path(folder).absolute()
    while not place.is_dir() and place != place.parent:
        if place.exists():
            return Disk(folder, error=f"{place} is no folder")
        place = place.parent
    try:
        room = os.statvfs(place)
        left, files = room.f_bavail * room.f_frsize, room.f_favail if room.f_files else None
    except OSError as error:
        return Disk(folder, error=error.strerror or str(error))
    try:
        return Disk(folder, left, files, write_mbps(place))
    except OSError as error:
        return Disk(folder, left, files, error=error.strerror or str(error))


def write_mbps(folder: Path, pieces: int = PIECES, seconds: float = SECONDS) -> float:
    """MB/s that are written into a folder and safe on its disk, in a file without a name. Raises `OSError`."""
    # Zeros might be stored as a hole.
    piece = os.urandom(PIECE_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        began = time.monotonic()
        for _ in range(pieces):
            file.write(piece)
            file.flush()
            os.fdatasync(file.fileno())
            if time.monotonic() - began > seconds:
                break
        return file.tell() / 1e6 / (time.monotonic() - began)

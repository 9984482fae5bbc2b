"""What was made for a run, noted in its folder: a command that is gone leaves pods that train on for a while."""

import json
from dataclasses import dataclass
from pathlib import Path

from pipeline.launch.kubernetes.manifest import Shape
from pipeline.record import plain
from pipeline.record.log import read_made, write_whole

FILE = "kubernetes.json"


@dataclass(frozen=True)
class Earlier:
    """What owns all of it, by its kind and name, and how many pods there are."""

    kind: str
    name: str
    shape: Shape

    @classmethod
    def read(cls, folder: Path) -> "Earlier | None":
        """That of the run in a folder; None where it has none."""
        return read_made(cls, folder / FILE)

    def write(self, folder: Path) -> None:
        """Notes it. Raises `OSError`."""
        write_whole(folder / FILE, json.dumps(plain.fields_of(self)))

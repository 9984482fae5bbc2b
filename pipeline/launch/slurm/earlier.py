"""Which job a run's processes are in, noted in its folder: a command that is killed leaves it running for a while."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.launch.slurm.queue import Slurm
from pipeline.record.log import read_json, write_json

FILE = "slurm.json"
# For it to end.
END_SECONDS, POLL_SECONDS = 120.0, 0.5


@dataclass(frozen=True)
class Earlier:
    """A job, the name of its agents' folder, and whether they are a step of an allocation that others go on with."""

    job: str
    name: str
    step: bool

    @classmethod
    def read(cls, folder: Path) -> "Earlier | None":
        """That of the run in a folder; None where it has none."""
        return read_json(cls, folder / FILE)

    def write(self, folder: Path) -> None:
        """Notes it. Raises `OSError`."""
        write_json(folder / FILE, self)

    def end(self, slurm: Slurm, say: Callable[[str], None]) -> None:
        """Ends it, if it still runs, and waits until it has: two that train one run would write each other's files."""
        until, said = time.monotonic() + END_SECONDS, False
        while (what := self._there(slurm)) is not None and time.monotonic() < until:
            if not said:
                said = True
                say(f"Slurm's job {what} is of an earlier command of this run, and is ended.")
                slurm.cancel(what)
            time.sleep(POLL_SECONDS)

    def _there(self, slurm: Slurm) -> str | None:
        """What is to be cancelled of it; None where there is nothing."""
        if self.step:
            return slurm.step(self.job, self.name)
        state = slurm.look(self.job)
        return None if state is None or state.over else self.job

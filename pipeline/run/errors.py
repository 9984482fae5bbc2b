"""What keeps a point from being run, or ends a run."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.run.watch import Failure


class RunFailed(RuntimeError):
    """A run that cannot go on; the message names the process, and `log` is its log."""

    def __init__(self, failure: "Failure", log: Path | None) -> None:
        super().__init__(failure.error)
        self.failure, self.log = failure, log

    @property
    def rank(self) -> int | None:
        """The process that is to blame."""
        return self.failure.rank

"""What most clusters have in common: their hosts are there when a command begins, and are the same until it ends."""

from pathlib import Path


class Steady:
    """The part of a `pipeline.launch.Cluster` that a scheduler has otherwise."""

    def arrived(self) -> bool:
        """Are hosts there that can be asked? Else they are asked for once a run needs them."""
        return True

    def moved(self) -> bool:
        """Are hosts others than were laid over last, so that what is started again is to be laid out anew?"""
        return False

    def returns(self, ends: bool) -> str | None:
        """How processes that a scheduler had leave can be started again, in words; None: the command is to end.

        `ends`: it was asked to itself.
        """
        return None

    def attach(self, folder: Path) -> bool:
        """Takes the place of the conductor of the run in a folder: is anything of it there? Processes ended with it."""
        return False

    def end_earlier(self, folder: Path) -> None:
        """Ends what a command that was killed has left of the run in a folder. Nothing: it has ended with it."""

    def leave(self) -> None:
        """Leaves processes to another conductor, where they outlive this one."""

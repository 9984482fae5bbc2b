"""Whether a scheduler, or a person, has asked for the machine."""

import signal

from pipeline.launch.signals import Interrupted

# For a checkpoint after Ctrl-C.
PERSON_SECONDS = 5.0


class Preempted(Exception):
    """A scheduler, or a person by Ctrl-C, asked for the machine.

    All processes have left, with a checkpoint where there was time for one.
    """


class Preemption:
    """Whether a scheduler, or a person by Ctrl-C, has asked for the machine, and how that was said.

    What holds for a command holds for all that runs in it: `command` is its, where this is that of one of its points.
    """

    def __init__(self, command: "Preemption | None" = None) -> None:
        self._asked: str | None = None
        self._by_person = False
        self._ended: int | None = None
        self._command = command
        self._of_command = False

    @property
    def of_command(self) -> bool:
        """Was it the command itself that was asked, which then ends?"""
        return self._of_command or (self._command is not None and self._command.of_command)

    @property
    def asked(self) -> str | None:
        """Which signal was sent to whom, in words; None where there was none."""
        return self._asked or (self._command.asked if self._command else None)

    @property
    def by_person(self) -> bool:
        """Was it a person who asked, by Ctrl-C?"""
        return self._by_person or (self._command is not None and self._command.by_person)

    def ask(self, number: int, whom: str, of_command: bool = False) -> None:
        """Notes the first signal that asked."""
        if self._asked is None:
            self._asked = f"{signal.Signals(number).name} to {whom}"
            self._by_person = number == signal.SIGINT
        self._of_command |= of_command

    def patience(self, limit: float) -> float:
        """Seconds for a last checkpoint: `limit`, or the few that a person waits for."""
        return min(limit, PERSON_SECONDS) if self.by_person else limit

    def forget(self) -> None:
        """Takes note of the next signal, once what was asked for is done."""
        self._asked = None

    def end(self, number: int) -> None:
        """Notes a signal that ends the command, for what does not run in the thread that gets it."""
        self._ended = number

    def heed(self) -> None:
        """Raises `Preempted` once a scheduler has asked, `Interrupted` once the command is to end."""
        ended = (self._command or self)._ended
        if ended is not None:
            raise Interrupted(ended)
        if self.asked:
            raise Preempted

"""What cannot be started."""

from pipeline.errors import UserError


class LaunchError(UserError):
    """Processes that cannot be started: the message says what was expected, received, and what to type instead."""


class Cancelled(LaunchError):
    """Hosts that somebody has taken away from a run, for good."""

"""What cannot be started."""


class LaunchError(RuntimeError):
    """Processes that cannot be started: the message says what was expected, received, and what to type instead."""


class Cancelled(LaunchError):
    """Hosts that somebody has taken away from a run, for good."""

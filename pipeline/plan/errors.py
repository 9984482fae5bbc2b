"""What cannot be planned."""


class PlanError(ValueError):
    """A config that cannot be planned: the message says what was expected, received, and what to type instead."""

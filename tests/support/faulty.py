"""Data and models of a person's own that fail in ways of their own. Nothing slow is imported here."""


def raising_data():
    """Data that cannot be read."""
    raise FileNotFoundError("no shelf 7 in the archive")


def one_part():
    """One part where two are expected."""
    return ([1.0], [0], [1.0])


# Not a function.
WIDTH = 3

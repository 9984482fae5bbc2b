"""What cannot be read, or predicted, of earlier runs."""


class HistoryError(ValueError):
    """A run that cannot be found or read: the message says what was expected, received, and what to type instead."""


class PredictError(ValueError):
    """What cannot be predicted: the message says what was expected, received, and what to type instead."""

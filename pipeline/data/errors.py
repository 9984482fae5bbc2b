"""The one error of the data sets, for whatever their user can put right."""


class DataError(ValueError):
    """A data set that is not there, cannot be read, or was asked for what it does not hold."""

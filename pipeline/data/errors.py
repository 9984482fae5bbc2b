"""The one error of the data sets, for whatever their user can put right."""

from collections.abc import Iterable


class DataError(ValueError):
    """A data set that is not there, cannot be read, or was asked for what it does not hold."""


def expect_at_least(data: str, limits: Iterable[tuple[str, float, float, float]]) -> None:
    """Refuses arguments that are too small, in words. Each limit is (argument, its value, the least, a usual one).

    >>> expect_at_least("synthetic", [("seed", 0, 0, 0)])
    """
    for name, value, least, usual in limits:
        if value < least:
            raise DataError(
                f"Expected {name} of at least {least} for data={data}, received {value}. Try data.build.{name}={usual}."
            )

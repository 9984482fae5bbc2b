"""Rounds a figure to the digits that people read of it."""


def rate(value: float) -> str:
    """A positive quantity in three or four digits, or all those before its point.

    >>> [rate(value) for value in (3412.4, 96.04, 3.207, 0.0312, 2_345_678.0)]
    ['3,412', '96.0', '3.21', '0.031', '2.346M']
    """
    if value >= 1e6:
        return f"{value / 1e6:,.3f}M"
    for least, digits in ((99.95, 0), (9.995, 1), (0.9995, 2), (0.001, 3)):
        if abs(value) >= least:
            return f"{value:,.{digits}f}"
    return f"{value:.2g}"

"""The one error of the data sets, for whatever their user can put right."""

from collections.abc import Iterable, Sequence

from pipeline.errors import UserError


class DataError(UserError):
    """A data set that is not there, cannot be read, or was asked for what it does not hold."""


def expect_at_least(data: str, limits: Iterable[tuple[str, float, float, float]]) -> None:
    """Refuses arguments that are too small, in words. Each limit is (argument, its value, the least, a usual one).

    >>> expect_at_least("synthetic", [("seed", 0, 0, 0)])
    """
    for name, value, least, usual in limits:
        if value < least:
            raise DataError(f"{name} of at least {least} for data={data}", value, f"data.build.{name}={usual}")


def expect_path(data: str, path: str | None, what: str, example: str) -> str:
    """The `path` that was given. Where none was, it says what to give.

    >>> expect_path("images", "photos", "a folder", "FOLDER")
    'photos'
    """
    if not path:
        raise DataError(f"data.path to be {what} for data={data}", "none", f"data.path={example}")
    return path


def first_of(names: Sequence[str], limit: int = 5, between: str = "; ", last: str = "; and") -> str:
    """The first of many names, with `between` between them, and how many more there are, with `last` before that.

    >>> first_of(["a", "b"]), first_of(["a", "b", "c"], limit=1), first_of(["a", "b", "c"], 2, ", ", " and")
    ('a; b', 'a; and 2 more', 'a, b and 1 more')
    """
    more = f"{last} {len(names) - limit} more" if len(names) > limit else ""
    return between.join(names[:limit]) + more

"""What can change in an MLflow run: points, parameters, tags, the data set, its beginning and its end."""

from typing import NamedTuple


class Point(NamedTuple):
    """One value of a metric, at a time in milliseconds since 1970."""

    name: str
    value: float
    time_ms: int
    step: int


class Param(NamedTuple):
    """A parameter, fixed for the run."""

    name: str
    value: str


class Tag(NamedTuple):
    """A tag, which a later one of its name replaces."""

    name: str
    value: str


class Data(NamedTuple):
    """The data set that the run read."""

    name: str
    digest: str
    schema: str
    profile: str


class Begin(NamedTuple):
    """The run goes on after all."""


class End(NamedTuple):
    """The run is over."""

    status: str
    time_ms: int


Change = Point | Param | Tag | Data | Begin | End

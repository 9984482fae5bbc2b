"""One line of what a doctor says, and what a command's exit code makes of all of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum


class Severity(IntEnum):
    """How bad a finding is; the number is the exit code of a command whose worst one it is. 2 is a refused command."""

    FINE = 0
    # A training works, and is slower than it need be, or close to a limit.
    WARNING = 1
    # A training fails, or something of it that was asked for does.
    FAULT = 3


@dataclass(frozen=True)
class Finding:
    """What was found of one thing on a host, or between two of them, beside what was expected, and what to type.

    `remedy` is empty where nothing is to be done. `figures` are what was measured, by name with its unit.
    """

    check: str
    host: str
    severity: Severity
    found: str
    expected: str
    remedy: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


def worst(findings: Iterable[Finding]) -> Severity:
    """That of the worst finding; fine where there is none.

    >>> [worst(Finding("disk", "a", level, "", "") for level in levels).name for levels in ((), (Severity.WARNING, 0))]
    ['FINE', 'WARNING']
    """
    return Severity(max((finding.severity for finding in findings), default=0))

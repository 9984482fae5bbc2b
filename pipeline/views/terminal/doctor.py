"""Turns findings into what a person reads: a line for each, the worst ones marked, and what to type below."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from pipeline.doctor.facts import CHECKS, Finding, Severity
from pipeline.views.terminal.words import clean, columns, listed, plural

MARKS = {Severity.FINE: "fine", Severity.WARNING: "WARNING", Severity.FAULT: "FAULT"}
HEADER = ("", "check", "host", "found", "expected")


def doctor_lines(findings: Sequence[Finding]) -> list[str]:
    """A row for each finding, hosts of which the same is to be said together, and how many there are of each kind."""
    joined = sorted(_joined(findings), key=lambda finding: CHECKS.index(finding.check))
    rows = [
        (MARKS[one.severity], *map(clean, (one.check, one.host, one.found, f"expected {one.expected}")))
        for one in joined
    ]
    lines = []
    for finding, line in zip(joined, columns(rows, ()) if rows else (), strict=True):
        lines.append(line)
        if finding.remedy:
            lines.append(f"{'':9}Try {clean(finding.remedy)}.")
    counts = Counter(finding.severity for finding in findings)
    told = (plural(counts[Severity.FAULT], "fault"), plural(counts[Severity.WARNING], "warning"))
    return [*lines, "", f"{listed(*told, f'{counts[Severity.FINE]:,} fine')}."]


def _joined(findings: Sequence[Finding]) -> list[Finding]:
    """Findings that differ in their host alone become one, with all of these hosts."""
    hosts: dict[Finding, list[str]] = {}
    for finding in findings:
        # Figures that came to the same words are told by them.
        key = dataclasses.replace(finding, host="", figures=())  # type: ignore[arg-type]
        hosts.setdefault(key, []).append(finding.host)
    return [dataclasses.replace(finding, host=", ".join(names), figures={}) for finding, names in hosts.items()]

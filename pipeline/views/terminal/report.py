"""Turns what a report says into the lines under a sweep's table."""

from collections.abc import Sequence

from pipeline.views.terminal.words import clean


def report_lines(verdict: Sequence[str], page: str, left_out: Sequence[tuple[str, str]] = ()) -> list[str]:
    """The verdict, then where the report is and which of its figures have nothing to show.

    >>> report_lines(["It ties."], "report.html", [("Time to accuracy", "no point has validated")])
    ['', 'It ties.', '', 'report: report.html', 'left out of it: Time to accuracy, since no point has validated']
    """
    missing = [f"left out of it: {title}, since {why}" for title, why in left_out]
    return ["", *map(clean, verdict), "", f"report: {page}", *missing]

"""Turns what a report says into the lines under a sweep's table."""

from collections.abc import Sequence

from pipeline.views.terminal.words import clean


def report_lines(
    verdict: Sequence[str], page: str, command: str = "", left_out: Sequence[tuple[str, str]] = ()
) -> list[str]:
    """The verdict, then where the report is and which of its figures have nothing to show; last the command to type.

    >>> report_lines(["Use it."], "report.html", "python -m pipeline", [("Time to accuracy", "no point has validated")])
    ['', 'Use it.', '', 'report: report.html', 'left out of it: Time to accuracy, since no point has validated', '', \
'python -m pipeline']
    """
    missing = [f"left out of it: {title}, since {why}" for title, why in left_out]
    return ["", *map(clean, verdict), "", f"report: {page}", *missing, *(["", clean(command)] if command else [])]

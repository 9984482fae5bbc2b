"""Turns what the lost efficiency is made of, the `explained` of result.json, into lines for a person."""

from collections.abc import Sequence

from pipeline.record.profile import Explanation, Part
from pipeline.views.terminal.words import brackets, clean, listed, percent, span

# Parts with a smaller share are not told in a sweep's table.
LEAST_SHARE = 0.01


def explained_lines(explained: Explanation | None) -> list[str]:
    """What to change; how much of the ideal is lost to what, the largest part first, with their ends; who is behind.

    >>> parts = [Part("contention", 0.05, -0.01, 0.1), Part("communication", 0.4, 0.38, 0.42)]
    >>> explained_lines(Explanation(0.45, 0.4, 0.5, parts, None, "worker 1", "Try less."))
    ['Try less.', '45% of the ideal is lost (40% to 50%): communication 40% (38% to 42%), \
contention 5.0% (-1.0% to 10%)', 'worker 1 is behind the others']
    """
    if explained is None:
        return []
    within = brackets(span(explained.lost_low, explained.lost_high, percent, " to "))
    parts = listed(
        *(
            f"{clean(part.name)} {percent(part.share)}{brackets(span(part.low, part.high, percent, ' to '))}"
            for part in _largest_first(explained.parts)
        )
    )
    straggler = clean(explained.straggler)
    told = (
        clean(explained.advice),
        f"{percent(explained.lost)} of the ideal is lost{within}: {parts}",
        f"{straggler} is behind the others" if straggler else "",
    )
    return [line for line in told if line]


def explained_line(explained: Explanation | None) -> str:
    """How much of the ideal is lost to what, in a line; empty where nothing was explained."""
    if explained is None:
        return ""
    shown = [part for part in _largest_first(explained.parts) if part.share >= LEAST_SHARE]
    parts = listed(*(f"{clean(part.name)} {percent(part.share)}" for part in shown))
    return f"lost {percent(explained.lost)}{': ' * bool(parts)}{parts}"


def _largest_first(parts: Sequence[Part]) -> list[Part]:
    return sorted(parts, key=lambda part: part.share, reverse=True)

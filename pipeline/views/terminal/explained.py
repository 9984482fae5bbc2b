"""Turns what the lost efficiency is made of, the `explained` of result.json, into lines for a person."""

from collections.abc import Mapping

from pipeline.views.terminal.words import brackets, clean, items, listed, number, percent, span

# Parts with a smaller share are not told in a sweep's table.
LEAST_SHARE = 0.01


def explained_lines(explained: object) -> list[str]:
    """What to change; how much of the ideal is lost to what, the largest part first, with their ends; who is behind.

    >>> parts = [{"name": "contention", "share": 0.05, "low": -0.01, "high": 0.1},
    ...          {"name": "communication", "share": 0.4, "low": 0.38, "high": 0.42}]
    >>> made = {"lost": 0.45, "lost_low": 0.4, "lost_high": 0.5, "parts": parts, "advice": "Try less."}
    >>> explained_lines(made | {"straggler": "worker 1"})
    ['Try less.', '45% of the ideal is lost (40% to 50%): communication 40% (38% to 42%), \
contention 5.0% (-1.0% to 10%)', 'worker 1 is behind the others']
    """
    if not isinstance(explained, Mapping) or (lost := number(explained.get("lost"))) is None:
        return []
    within = brackets(span(number(explained.get("lost_low")), number(explained.get("lost_high")), percent, " to "))
    parts = listed(*(f"{name} {percent(share)}{brackets(ends)}" for share, name, ends in _parts(explained)))
    straggler = clean(explained.get("straggler"))
    told = (
        clean(explained.get("advice")),
        f"{percent(lost)} of the ideal is lost{within}: {parts}",
        f"{straggler} is behind the others" if straggler else "",
    )
    return [line for line in told if line]


def explained_line(explained: object) -> str:
    """How much of the ideal is lost to what, in a line; empty where nothing was explained."""
    if not isinstance(explained, Mapping) or (lost := number(explained.get("lost"))) is None:
        return ""
    parts = listed(*(f"{name} {percent(share)}" for share, name, _ in _parts(explained) if share >= LEAST_SHARE))
    return f"lost {percent(lost)}{': ' * bool(parts)}{parts}"


def _parts(explained: Mapping[str, object]) -> list[tuple[float, str, str]]:
    """(share, name, range) of each part, the largest first."""
    return sorted(
        (
            (share, clean(item.get("name")), span(number(item.get("low")), number(item.get("high")), percent, " to "))
            for item in items(explained.get("parts"))
            if isinstance(item, Mapping) and (share := number(item.get("share"))) is not None
        ),
        reverse=True,
    )

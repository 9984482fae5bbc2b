"""Turns what the lost efficiency is made of, the `explained` of result.json, into lines for a person."""

from pipeline.record.findings import Explanation, Part
from pipeline.views.terminal.words import brackets, clean, listed, percent, span

# Parts with a smaller share are not told in a sweep's table.
LEAST_SHARE = 0.01
# Smaller ones are not called negative, nor two efficiencies different.
LEAST_SAID = 0.005
NEGATIVE = "A negative part takes less of a step here than on one device, and so makes up for others."


def explained_lines(explained: Explanation | None, efficiency: float | None = None) -> list[str]:
    """What to change; how much of a step is lost to what, the largest part first, with their ends; what a negative part
    means; how that goes with the `efficiency` of training's first steps; and who is behind.

    >>> parts = [Part("contention", -0.05, -0.1, -0.01), Part("communication", 0.5, 0.48, 0.52)]
    >>> for line in explained_lines(Explanation(0.45, 0.4, 0.5, parts, None, "worker 1", "Try less."), 0.6):
    ...     print(line)
    Try less.
    Lost to scaling, as shares of a step's time: 45% (40% to 50%) = communication 50% (48% to 52%), contention -5.0% \
(-10% to -1.0%)
    A negative part takes less of a step here than on one device, and so makes up for others.
    That leaves an efficiency of 55%, as timed once more after training; its first steps had 60%.
    worker 1 is behind the others.
    """
    if explained is None:
        return []
    parts = listed(
        *(f"{clean(part.name)} {_share(part.share, part.low, part.high)}" for part in _largest_first(explained))
    )
    lost = _share(explained.lost, explained.lost_low, explained.lost_high)
    straggler, left = clean(explained.straggler), 1 - explained.lost
    told = (
        clean(explained.advice),
        f"Lost to scaling, as shares of a step's time: {lost} = {parts}",
        NEGATIVE if any(part.share <= -LEAST_SAID for part in explained.parts) else "",
        ""
        if efficiency is None or abs(efficiency - left) < LEAST_SAID
        else f"That leaves an efficiency of {percent(left)}, as timed once more after training; its first steps had "
        f"{percent(efficiency)}.",
        f"{straggler} is behind the others." if straggler else "",
    )
    return [line for line in told if line]


def explained_line(explained: Explanation | None) -> str:
    """How much of a step is lost to what, in a line; empty where nothing was explained."""
    if explained is None:
        return ""
    shown = [part for part in _largest_first(explained) if abs(part.share) >= LEAST_SHARE]
    parts = listed(*(f"{clean(part.name)} {percent(part.share)}" for part in shown))
    return f"lost {percent(explained.lost)}{' = ' * bool(parts)}{parts}"


def _share(share: float, low: float, high: float) -> str:
    return f"{percent(share)}{brackets(span(low, high, percent, ' to '))}"


def _largest_first(explained: Explanation) -> list[Part]:
    return sorted(explained.parts, key=lambda part: part.share, reverse=True)

"""Turns a sweep into figures: each an SVG and a PNG, or the reason why there is none.

A strategy has one colour and one marker in all of them. How they are drawn is in `pipeline.views.report.canvas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.analyze.comparable import grouped
from pipeline.views.report import canvas
from pipeline.views.report.gather import ReportedRun, ReportedSweep
from pipeline.views.terminal.verdict_text import mark_texts
from pipeline.views.terminal.words import brackets, listed, percent, rate, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of what a step's time goes to, always the same hatching, as the same colour.
HATCHES = {
    "computing": "", "communication": "//", "input wait": "..", "batch statistics": "oo", "contention": "xx",
    "stragglers": "\\\\", "host overhead": "--", "other": "",
}  # fmt: skip
# More would not be told apart.
MOST_BARS, MOST_LINES = 40, 7

# A value that was measured, and the ends around it.
Ends = tuple[float, float, float]


def draw(sweep: ReportedSweep) -> list[canvas.Drawn | canvas.MissingFigure]:
    """Returns the report's figures, in its order."""
    import matplotlib as mpl

    with mpl.rc_context(canvas.STYLE):
        return [make(sweep) for make in (_scaling, _throughput, _learning, _steps)]


def look(place: int) -> canvas.StrategyLook:
    """Returns the look of the strategy with this place among others: where colours begin again, markers go on."""
    count, markers = len(canvas.STRATEGIES), canvas.MARKERS
    return {"color": canvas.STRATEGIES[place % count], "marker": markers[(place + place // count) % len(markers)]}


def _scaling(sweep: ReportedSweep) -> canvas.Drawn | canvas.MissingFigure:
    from matplotlib.lines import Line2D

    title = "Speedup and efficiency against workers"
    points = [point for point in sweep.measured if point.result.speed.speedup is not None]
    if not points:
        return canvas.MissingFigure(
            title, "no point has a speedup: it needs a baseline, and measure.steps other than 0"
        )
    if len({_workers(point) for point in points}) < 2:
        return canvas.MissingFigure(title, "all points have as many workers")
    series = grouped((_series(point, sweep), point) for point in points)
    foreseen = {point.number: ends for point in points if (ends := _foreseen(point))}
    figure, (above, below) = canvas.panels(2, len(series) + 1 + bool(foreseen) + bool(sweep.confidences))
    largest = max(map(_workers, points))
    ideal: dict[str, Any] = {"color": canvas.IDEAL, "lw": 1.2, "ls": (0, (2, 2))}
    above.plot([1, largest], [1, largest], **ideal, label="ideal: as many times as fast as workers")
    below.plot([1, largest], [1, 1], **ideal)
    # Beside each other, where they would lie on each other.
    apart = 0.012 * largest
    beside: dict[int, float] = {}
    dashes = _dashes([of_series[0] for of_series in series.values()])
    for place, (name, unsorted) in enumerate(series.items()):
        of_series = sorted(unsorted, key=_workers)
        shifted = [_workers(point) + apart * (place - (len(series) - 1) / 2) for point in of_series]
        beside |= {point.number: x + apart / 2 for point, x in zip(of_series, shifted, strict=True)}
        drawn = {**_look_of(of_series[0], sweep), "ls": dashes[place], "capsize": 3, "lw": 1.6, "ms": 6}
        speedups = list(map(_speedup, of_series))
        _intervals(above, shifted, speedups, [1] * len(speedups), label=name, **drawn)
        _intervals(below, shifted, speedups, list(map(_workers, of_series)), **drawn)
    for place, ends in foreseen.items():
        count = next(_workers(point) for point in points if point.number == place)
        for axes, over, label in ((above, 1, "predicted before" * (place == min(foreseen))), (below, count, "")):
            _intervals(axes, [beside[place]], [ends], [over], color=canvas.IDEAL, marker="D", mfc="none", ls="none",
                       capsize=2, lw=1, ms=8, label=label or None, zorder=1.5)  # fmt: skip
    above.set_ylabel("speedup")
    below.set_ylabel("efficiency")
    below.set_xlabel("workers")
    ticks = sorted(set(map(_workers, points)))
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.set_xticks(ticks if len(ticks) <= 8 else ticks[:: len(ticks) // 8 + 1], minor=False)
    below.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    texts = "; ".join(f"{_strategy(point)}, {_workers(point)} workers: {_speedup(point)[0]:.2f}" for point in points)
    handles = [*above.get_legend_handles_labels()[0]]
    if name := interval_name(sweep):
        handles.append(Line2D([], [], color=canvas.INK, marker="|", ms=9, mew=1.6, ls="none", label=name))
    return canvas.rendered("scaling", title, f"Speedup over one device, by workers. {texts}.", figure, handles)


def _intervals(axes: Axes, x: Sequence[float], ends: Sequence[Ends], over: Sequence[int], **drawn: Any) -> None:
    """Values with the ends around them, each divided by its part of `over`."""
    scaled = [[end / one for end in of_one] for of_one, one in zip(ends, over, strict=True)]
    beside = [[abs(middle - both[side]) for middle, *both in scaled] for side in (0, 1)]
    axes.errorbar(x, [middle for middle, *_ in scaled], beside, **drawn)


def _throughput(sweep: ReportedSweep) -> canvas.Drawn | canvas.MissingFigure:
    title = "Throughput by strategy"
    if not sweep.measured:
        return canvas.MissingFigure(title, "no point was measured")
    points = _first(sweep.measured)
    ends = list(map(_throughput_of, points))
    texts = [
        f"{_series(point, sweep, point.name)}: {rate(middle)}{brackets(span(low, high, rate, ' to '))}"
        for point, (middle, low, high) in zip(points, ends, strict=True)
    ]
    looks = [_look_of(point, sweep) for point in points]
    figure, axes, thick = canvas.bars([*zip(texts, looks, strict=True)])
    for place, (point, (middle, low, high)) in enumerate(zip(points, ends, strict=True)):
        colour, alpha = looks[place]["color"], 1.0 if point.marks.compares else 0.35
        axes.barh(place, middle, thick, color=colour, alpha=alpha, edgecolor=colour)
        axes.errorbar([middle], [place], xerr=[[middle - low], [high - middle]], color=canvas.INK, capsize=3, lw=1.2)
    axes.set_xlabel(f"training examples per second{brackets(interval_name(sweep))}")
    return canvas.rendered("throughput", title, f"Training examples per second. {'; '.join(texts)}.", figure)


def _learning(sweep: ReportedSweep) -> canvas.Drawn | canvas.MissingFigure:
    title = "Time to accuracy"
    points = [point for point in sweep.points if sweep.curve(point)]
    if not points or sweep.metric is None:
        return canvas.MissingFigure(title, "no point has validated: train.epochs of 1 or more does")
    shown = sorted(points, key=lambda point: (sweep.seconds_to_target(point) or 0.0, point.number))[:MOST_LINES]
    figure, (axes,) = canvas.panels(1, len(shown) + 1)
    for point, dashes in zip(shown, _dashes(shown), strict=True):
        curve = sweep.curve(point)
        axes.plot(*zip(*curve, strict=True), **_look_of(point, sweep), ls=dashes, ms=4.5, lw=1.6,
                  markevery=max(1, len(curve) // 10), label=_series(point, sweep, point.name))  # fmt: skip
    if sweep.target is not None:
        reached = f"{sweep.target:.4g}: what all of them reached"
        axes.axhline(sweep.target, color=canvas.IDEAL, lw=1, ls=(0, (2, 2)), label=reached)
    axes.set_xlabel("seconds of training, with tracing and validation")
    axes.set_ylabel(f"validation {sweep.metric}")
    seconds = ((point, sweep.seconds_to_target(point)) for point in shown)
    times = "; ".join(f"point {point.name}: {took:.1f} s" for point, took in seconds if took is not None)
    more = f" The first {len(shown)} of {len(points)} points." if len(shown) < len(points) else ""
    description = f"Seconds until validation {sweep.metric} {sweep.target:.4g}: {times}.{more}"
    return canvas.rendered("learning", title, description, figure, axes.get_legend_handles_labels()[0])


def _steps(sweep: ReportedSweep) -> canvas.Drawn | canvas.MissingFigure:
    from matplotlib.patches import Patch

    title = "Step time by cause"
    split = {point.number: milliseconds for point in sweep.measured if (milliseconds := causes(point))}
    if not split:
        return canvas.MissingFigure(title, "no point was explained: measure.explain=true looks for the causes")
    points = _first([point for point in sweep.points if point.number in split])
    names = [name for name in HATCHES if any(name in split[point.number] for point in points)]
    texts = [f"{_series(point, sweep, point.name)}: {rate(sum(split[point.number].values()))} ms" for point in points]
    looks = [_look_of(point, sweep) for point in points]
    figure, axes, thick = canvas.bars([*zip(texts, looks, strict=True)], len(names))
    for place, point in enumerate(points):
        left = 0.0
        for name in (name for name in names if name in split[point.number]):
            axes.barh(place, split[point.number][name], thick, left, **_cause(name))
            left += split[point.number][name]
    handles = [Patch(**_cause(name), label=name) for name in names]
    axes.set_xlabel("milliseconds of a step")
    each = {point.name: [f"{name} {rate(value)} ms" for name, value in split[point.number].items()] for point in points}
    causes_of_points = "; ".join(f"point {name}: {', '.join(texts)}" for name, texts in each.items())
    return canvas.rendered("steps", title, f"Where the time of a step goes. {causes_of_points}.", figure, handles)


def interval_name(sweep: ReportedSweep) -> str:
    """Returns the name of a sweep's intervals, in two words; points with more and with fewer repeats have several."""
    if not sweep.confidences:
        return ""
    return f"{' or '.join(map(percent, sweep.confidences))} interval{'s' * (len(sweep.confidences) > 1)}"


def _cause(name: str) -> dict[str, Any]:
    return {"facecolor": canvas.CAUSES[name], "hatch": HATCHES[name], "edgecolor": canvas.PAPER, "linewidth": 0.5}


def causes(point: ReportedRun) -> dict[str, float]:
    """Milliseconds of a step by cause: `computing` is the step of one device alone, the others what was lost to each.

    None of a point that was not explained. Of a share s of the ideal throughput that is lost, a step of t ms that takes
    t (1 - lost) alone has lost s t.
    """
    step, explained = point.result.speed.step_ms_p50, point.result.explained
    if step is None or explained is None:
        return {}
    shares = {part.name: max(0.0, part.share) for part in explained.parts}
    computing = max(0.0, 1 - sum(shares.values()))
    return {"computing": computing * step} | {
        name if name in HATCHES else "other": share * step for name, share in shares.items() if share
    }


def _series(point: ReportedRun, sweep: ReportedSweep, name: str = "") -> str:
    several = len({measured.group for measured in sweep.measured}) > 1
    group = f"group {point.group}" if several and point.group else ""
    return f"{name or _strategy(point)}{brackets(listed(group, *mark_texts(point.marks)))}"


def _workers(point: ReportedRun) -> int:
    return point.result.layout.workers or 1


def _speedup(point: ReportedRun) -> Ends:
    speed = point.result.speed
    return _ends(speed.speedup, speed.speedup_low, speed.speedup_high)


def _throughput_of(point: ReportedRun) -> Ends:
    speed = point.result.speed
    return _ends(speed.examples_per_second, speed.examples_per_second_low, speed.examples_per_second_high)


def _ends(middle: float | None, low: float | None, high: float | None) -> Ends:
    """A value that was measured and the ends around it, which are the value where they are not known."""
    middle = middle or 0.0
    return middle, min(middle, middle if low is None else low), max(middle, middle if high is None else high)


def _foreseen(point: ReportedRun) -> Ends | None:
    one, predictions = point.result.speed.baseline_examples_per_second, point.result.predictions
    if not one or not predictions:
        return None
    last = predictions[-1]
    return _ends(last.examples_per_second / one, last.low / one, last.high / one)


def _first(points: Sequence[ReportedRun]) -> Sequence[ReportedRun]:
    # Of too many the fastest, in their order.
    fastest = sorted(points, key=lambda point: -_throughput_of(point)[0])[:MOST_BARS]
    return sorted(fastest, key=lambda point: point.number)


def _strategy(point: ReportedRun) -> str:
    return str(point.result.choices.called)


def _look_of(point: ReportedRun, sweep: ReportedSweep) -> canvas.StrategyLook:
    return look([*dict.fromkeys(map(_strategy, sweep.points))].index(_strategy(point)))


def _dashes(points: Sequence[ReportedRun]) -> list[canvas.Dash]:
    names = list(map(_strategy, points))
    return [canvas.DASHES[names[:place].count(name) % len(canvas.DASHES)] for place, name in enumerate(names)]

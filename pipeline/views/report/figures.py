"""Turns a sweep into figures: each a PNG and SVGs for light and dark paper, or the reason why there is none.

A strategy has one colour and one marker in all of them. How they are drawn is in `pipeline.views.report.canvas`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.views.report.canvas import (
    DARK,
    DASHES,
    LIGHT,
    MARKERS,
    Dash,
    Drawn,
    Label,
    LeftOut,
    Sketch,
    Theme,
    bars,
    handles_of,
    interval_handle,
    on_paper,
    panels,
    rendered,
)
from pipeline.views.report.gather import Point, Sweep
from pipeline.views.terminal.verdict import mark_texts
from pipeline.views.terminal.words import brackets, percent, rate, span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of what a step's time goes to, always the same hatching, as the same colour.
HATCHES = {
    "computing": "", "communication": "//", "input wait": "..", "batch statistics": "oo", "contention": "xx",
    "stragglers": "\\\\", "host overhead": "--", "other": "",
}  # fmt: skip
# More would not be told apart.
MOST_BARS, MOST_LINES = 40, 7


@dataclass(frozen=True)
class Look:
    """How a strategy is drawn."""

    colour: str
    marker: str


def draw(sweep: Sweep) -> list[Drawn | LeftOut]:
    """The report's figures, in its order."""
    return [_drawn(partial(make, sweep)) for make in (_scaling, _throughput, _learning, _steps)]


def look(place: int, theme: Theme) -> Look:
    """How the strategy with this place among others is drawn: where colours begin again, markers go on."""
    colours = theme.strategies
    return Look(colours[place % len(colours)], MARKERS[(place + place // len(colours)) % len(MARKERS)])


def _drawn(make: Callable[[Theme], Sketch | LeftOut]) -> Drawn | LeftOut:
    """A figure on light and on dark paper."""
    with on_paper(LIGHT, "light"):
        light = make(LIGHT)
        if isinstance(light, LeftOut):
            return light
        svg, png = rendered(light, "svg"), rendered(light, "png")
    with on_paper(DARK, "dark"):
        dark = make(DARK)
        assert isinstance(dark, Sketch)
        return Drawn(light.name, light.title, light.told, svg, rendered(dark, "svg"), png)


def _scaling(sweep: Sweep, theme: Theme) -> Sketch | LeftOut:
    """Speedup and efficiency against workers."""
    title = "Speedup and efficiency against workers"
    points = [point for point in sweep.measured if point.result.speed.speedup is not None]
    if not points:
        return LeftOut(title, "no point has a speedup: it needs a baseline, and measure.steps other than 0")
    if len({_workers(point) for point in points}) < 2:
        return LeftOut(title, "all points have as many workers")
    series: dict[str, list[Point]] = {}
    for point in points:
        series.setdefault(_series(point, sweep), []).append(point)
    foreseen = {point.place: found for point in points if (found := _foreseen(point))}
    figure, (above, below) = panels(2, len(series) + 1 + bool(foreseen) + bool(sweep.confidences))
    most = max(map(_workers, points))
    above.plot(
        [1, most], [1, most], color=theme.ideal, lw=1.2, ls=(0, (2, 2)), label="ideal: as many times as fast as workers"
    )
    below.plot([1, most], [1, 1], color=theme.ideal, lw=1.2, ls=(0, (2, 2)))
    # Beside each other, where they would lie on each other.
    apart = 0.012 * most
    beside: dict[int, float] = {}
    dashes = _dashes([of_series[0] for of_series in series.values()])
    for place, (name, unsorted) in enumerate(series.items()):
        of_series = sorted(unsorted, key=_workers)
        shifted = [_workers(point) + apart * (place - (len(series) - 1) / 2) for point in of_series]
        beside |= {point.place: x + apart / 2 for point, x in zip(of_series, shifted, strict=True)}
        drawn = _looks(sweep, theme)[_strategy(of_series[0])]
        _lines(above, below, of_series, shifted, color=drawn.colour, marker=drawn.marker, ls=dashes[place], label=name)
    for place, (middle, low, high) in foreseen.items():
        count = next(_workers(point) for point in points if point.place == place)
        for axes, over, label in ((above, 1, "predicted before" * (place == min(foreseen))), (below, count, "")):
            axes.errorbar(
                [beside[place]], [middle / over], [[(middle - low) / over], [(high - middle) / over]],
                color=theme.ideal, marker="D", mfc="none", ls="none", capsize=2, lw=1, ms=8, label=label or None,
                zorder=1.5,
            )  # fmt: skip
    above.set_ylabel("speedup")
    below.set_ylabel("efficiency")
    below.set_xlabel("workers")
    ticks = sorted(set(map(_workers, points)))
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.set_xticks(ticks if len(ticks) <= 8 else ticks[:: len(ticks) // 8 + 1], minor=False)
    below.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    told = "; ".join(f"{_strategy(point)}, {_workers(point)} workers: {_speedup(point)[0]:.2f}" for point in points)
    intervals = [interval_handle(interval_name(sweep), theme)] if sweep.confidences else []
    handles = [*handles_of(above), *intervals]
    return Sketch("scaling", title, f"Speedup over one device, by workers. {told}.", figure, handles)


def _lines(above: Axes, below: Axes, points: Sequence[Point], shifted: Sequence[float], **drawn: Any) -> None:
    """Speedups above and efficiencies below, with their intervals."""
    ends, label = list(map(_speedup, points)), drawn.pop("label")
    for axes, scale in ((above, [1] * len(points)), (below, list(map(_workers, points)))):
        axes.errorbar(
            shifted,
            [middle / one for (middle, _, _), one in zip(ends, scale, strict=True)],
            [
                [(middle - low) / one for (middle, low, _), one in zip(ends, scale, strict=True)],
                [(high - middle) / one for (middle, _, high), one in zip(ends, scale, strict=True)],
            ],
            capsize=3, lw=1.6, ms=6, label=label if axes is above else None, **drawn,
        )  # fmt: skip


def _throughput(sweep: Sweep, theme: Theme) -> Sketch | LeftOut:
    """Throughput of each point."""
    title = "Throughput by strategy"
    if not sweep.measured:
        return LeftOut(title, "no point was measured")
    points, looks = _first(sweep.measured), _looks(sweep, theme)
    ends = list(map(_throughput_of, points))
    texts = [
        f"{_series(point, sweep, point.name)}: {rate(middle)}{brackets(span(low, high, rate, ' to '))}"
        for point, (middle, low, high) in zip(points, ends, strict=True)
    ]
    drawn = bars(_labels(points, texts, looks))
    for place, (point, (middle, low, high)) in enumerate(zip(points, ends, strict=True)):
        colour = looks[_strategy(point)].colour
        faint = not point.marks.compares
        drawn.axes.barh(place, middle, drawn.thick, color=colour, alpha=0.35 if faint else 1.0, edgecolor=colour)
        errors = [[middle - low], [high - middle]]
        drawn.axes.errorbar([middle], [place], xerr=errors, color=theme.ink, capsize=3, lw=1.2)
    drawn.axes.set_xlabel(f"training examples per second{brackets(interval_name(sweep))}")
    return Sketch("throughput", title, f"Training examples per second. {'; '.join(texts)}.", drawn.figure)


def _learning(sweep: Sweep, theme: Theme) -> Sketch | LeftOut:
    """The validation metric against seconds of training."""
    title = "Time to accuracy"
    points = [point for point in sweep.points if sweep.curve(point)]
    if not points or sweep.metric is None:
        return LeftOut(title, "no point has validated: train.epochs of 1 or more does")
    shown = sorted(points, key=lambda point: (sweep.seconds_to_target(point) or 0.0, point.place))[:MOST_LINES]
    figure, (axes,) = panels(1, len(shown) + 1)
    for point, dashes in zip(shown, _dashes(shown), strict=True):
        curve, drawn = sweep.curve(point), _looks(sweep, theme)[_strategy(point)]
        every = max(1, len(curve) // 10)
        axes.plot(*zip(*curve, strict=True), color=drawn.colour, marker=drawn.marker, ls=dashes, ms=4.5, lw=1.6,
                  markevery=every, label=_series(point, sweep, point.name))  # fmt: skip
    if sweep.target is not None:
        reached = f"{sweep.target:.4g}: what all of them reached"
        axes.axhline(sweep.target, color=theme.ideal, lw=1, ls=(0, (2, 2)), label=reached)
    axes.set_xlabel("seconds of training, with tracing and validation")
    axes.set_ylabel(f"validation {sweep.metric}")
    seconds = ((point, sweep.seconds_to_target(point)) for point in shown)
    told = "; ".join(f"point {point.name}: {took:.1f} s" for point, took in seconds if took is not None)
    more = f" The first {len(shown)} of {len(points)} points." if len(shown) < len(points) else ""
    said = f"Seconds until validation {sweep.metric} {sweep.target:.4g}: {told}.{more}"
    return Sketch("learning", title, said, figure, handles_of(axes))


def _steps(sweep: Sweep, theme: Theme) -> Sketch | LeftOut:
    """What a step's time goes to, of the points of which the causes were looked for."""
    from matplotlib.patches import Patch

    title = "Step time by cause"
    split = {point.place: found for point in sweep.measured if (found := causes(point))}
    if not split:
        return LeftOut(title, "no point was explained: measure.explain=true looks for the causes")
    points = _first([point for point in sweep.points if point.place in split])
    names = [name for name in HATCHES if any(name in split[point.place] for point in points)]
    texts = [f"{_series(point, sweep, point.name)}: {rate(sum(split[point.place].values()))} ms" for point in points]
    drawn = bars(_labels(points, texts, _looks(sweep, theme)), len(names))
    for place, point in enumerate(points):
        left = 0.0
        for name in (name for name in names if name in split[point.place]):
            drawn.axes.barh(place, split[point.place][name], drawn.thick, left, **_cause(name, theme))
            left += split[point.place][name]
    handles = [Patch(**_cause(name, theme), label=name) for name in names]
    drawn.axes.set_xlabel("milliseconds of a step")
    told = "; ".join(
        f"point {point.name}: {', '.join(f'{name} {rate(value)} ms' for name, value in split[point.place].items())}"
        for point in points
    )
    return Sketch("steps", title, f"Where the time of a step goes. {told}.", drawn.figure, handles)


def interval_name(sweep: Sweep) -> str:
    """What the intervals of a sweep are, in two words.

    Of points with more and with fewer repeats there are several.
    """
    if not sweep.confidences:
        return ""
    return f"{' or '.join(map(percent, sweep.confidences))} interval{'s' * (len(sweep.confidences) > 1)}"


def _cause(name: str, theme: Theme) -> dict[str, Any]:
    return {"facecolor": theme.causes[name], "hatch": HATCHES[name], "edgecolor": theme.paper, "linewidth": 0.5}


def causes(point: Point) -> dict[str, float]:
    """Milliseconds of a step by cause: `computing` is the step of one device alone, the others what was lost to each.

    None of a point that was not explained. Of a share s of the ideal throughput that is lost, a step of t ms that takes
    t (1 - lost) alone has lost s t.
    """
    step, explained = point.result.speed.step_ms_p50, point.result.explained
    if step is None or explained is None:
        return {}
    shares = {part.name: max(0.0, part.share) for part in explained.parts}
    kept = max(0.0, 1 - sum(shares.values()))
    return {"computing": kept * step} | {
        name if name in HATCHES else "other": share * step for name, share in shares.items() if share
    }


def _series(point: Point, sweep: Sweep, name: str = "") -> str:
    marked = _marked(point, sweep)
    return f"{name or _strategy(point)}{f' ({marked})' * bool(marked)}"


def _marked(point: Point, sweep: Sweep) -> str:
    """What is written beside a point: its group, where there are several, and what is to be said of its speed."""
    several = len({measured.group for measured in sweep.measured}) > 1
    return ", ".join([*([f"group {point.group}"] if several and point.group else []), *mark_texts(point.marks)])


def _workers(point: Point) -> int:
    return point.result.layout.workers or 1


def _speedup(point: Point) -> tuple[float, float, float]:
    speed = point.result.speed
    return _ends(speed.speedup, speed.speedup_low, speed.speedup_high)


def _throughput_of(point: Point) -> tuple[float, float, float]:
    speed = point.result.speed
    return _ends(speed.examples_per_second, speed.examples_per_second_low, speed.examples_per_second_high)


def _ends(middle: float | None, low: float | None, high: float | None) -> tuple[float, float, float]:
    """A value that was measured and the ends around it, which are the value where they are not known."""
    middle = middle or 0.0
    return middle, min(middle, middle if low is None else low), max(middle, middle if high is None else high)


def _foreseen(point: Point) -> tuple[float, float, float] | None:
    """The last prediction made of a point, as speedups."""
    one, predictions = point.result.speed.baseline_examples_per_second, point.result.predictions
    if not one or not predictions:
        return None
    last = predictions[-1]
    return _ends(last.examples_per_second / one, last.low / one, last.high / one)


def _first(points: Sequence[Point]) -> Sequence[Point]:
    """The points, of too many the fastest, in their order."""
    fastest = sorted(points, key=lambda point: -_throughput_of(point)[0])[:MOST_BARS]
    return sorted(fastest, key=lambda point: point.place)


def _strategy(point: Point) -> str:
    return str(point.result.choices.called)


def _looks(sweep: Sweep, theme: Theme) -> Mapping[str, Look]:
    """How each strategy of the sweep is drawn, in every figure."""
    return {name: look(place, theme) for place, name in enumerate(dict.fromkeys(map(_strategy, sweep.points)))}


def _dashes(points: Sequence[Point]) -> list[Dash]:
    """What tells lines of one strategy apart."""
    names = list(map(_strategy, points))
    return [DASHES[names[:place].count(name) % len(DASHES)] for place, name in enumerate(names)]


def _labels(points: Sequence[Point], texts: Sequence[str], looks: Mapping[str, Look]) -> list[Label]:
    drawn = [looks[_strategy(point)] for point in points]
    return [Label(text, of.colour, of.marker) for text, of in zip(texts, drawn, strict=True)]

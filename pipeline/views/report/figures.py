"""Turns a sweep into figures: each an SVG and a PNG, or the reason why there is none.

A strategy has one colour and one marker in all of them. Colours are those of Okabe & Ito (2008), which the colour-blind
tell apart; markers, dashes and hatching say the same again. A figure is drawn once, for light paper; CSS of the page
puts lighter colours of the same hues in their place on dark paper. Labels of bars stand above them and legends below
the axes, so that a figure reads on a phone.
"""

import re
from collections.abc import Sequence
from functools import partial
from html import escape
from io import BytesIO
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from pipeline.analyze.comparable import grouped
from pipeline.views.report.gather import ReportedRun, ReportedSweep
from pipeline.views.terminal.verdict_text import mark_texts
from pipeline.views.terminal.words import brackets, listed, percent, rate, span

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

StrategyLook = dict[str, Any]  # the colour and the marker of a strategy, as matplotlib takes them
Dash = str | tuple[float, tuple[float, ...]]
MARKERS = "osD^vPX"
DASHES: tuple[Dash, ...] = (
    "-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)), (0, (3, 1)), (0, (2, 3)),
)  # fmt: skip
# Inches. Every figure is as wide as a phone shows at a readable size.
WIDTH, PANEL, BETWEEN, THICK, LINE, ROW = 4.8, 2.4, 0.25, 0.19, 0.165, 0.185
LEFT, RIGHT, TOP, BOTTOM = 0.75, 0.2, 0.15, 0.6
FONT, SMALL, DPI = 11, 9.5, 144
# Of a text above a bar, in a line, and how far it is from the marker before it, in points.
MOST_CHARACTERS, AFTER_MARKER = 56, 11
MOST_BARS, MOST_LINES = 40, 7  # more would not be told apart
# The colours of light paper, each with what stands for it on dark paper.
DARK = {
    "#FFFFFF": "#16181C", "#1A1A1A": "#E6E6E6", "#767676": "#9A9A9A", "#DDDDDD": "#3A3D42",
    "#0072B2": "#3D9BE0", "#D55E00": "#F0803C", "#009E73": "#1FC79A", "#CC79A7": "#DE8FBA", "#E69F00": "#F5C542",
    "#56B4E9": "#9AD7FF", "#000000": "#FFFFFF", "#F0E442": "#F0E442", "#BBBBBB": "#8A8A8A",
}  # fmt: skip
PAPER, INK, IDEAL, GRID = "#FFFFFF", "#1A1A1A", "#767676", "#DDDDDD"
# Those of strategies, in their order, and the colour and the hatching of what a step's time goes to.
STRATEGIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
CAUSES = {
    "computing": ("#56B4E9", ""), "communication": ("#D55E00", "//"), "input wait": ("#E69F00", ".."),
    "batch statistics": ("#F0E442", "oo"), "contention": ("#009E73", "xx"), "stragglers": ("#CC79A7", "\\\\"),
    "host overhead": ("#0072B2", "--"), "other": ("#BBBBBB", ""),
}  # fmt: skip
STYLE: dict[Any, Any] = {
    "font.size": FONT, "font.family": "DejaVu Sans", "axes.spines.top": False, "axes.spines.right": False,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "grid.color": GRID, "hatch.color": PAPER, "axes.facecolor": PAPER, "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    # Texts as shapes: no font has to be there where the page is read.
    "svg.fonttype": "path", "svg.hashsalt": "report",
}  # fmt: skip

Ends = tuple[float, float, float]  # a value that was measured, and the ends around it


class Drawn(NamedTuple):
    """A figure: its name, what it shows in a sentence, and its files' contents."""

    name: str
    title: str
    description: str
    svg: bytes
    png: bytes

    @property
    def inline(self) -> str:
        """The picture as a part of a page whose CSS has the colours, which `css` makes for light or dark paper."""
        text = self.svg.decode().partition("<svg")[2]
        # HTML knows the names of SVG by itself.
        text = re.sub(r'<metadata>.*?</metadata>| xmlns(:\w+)?="[^"]*"', "", text, flags=re.DOTALL)
        for place, colour in enumerate(DARK):
            text = text.replace(colour.lower(), f"var(--figure-{place})")
        # A variable has a meaning in a style alone.
        text = re.sub(r'fill="(var[^"]+)"', r'style="fill: \1"', text)
        return f'<svg role="img" aria-label="{escape(self.description, quote=True)}"{text}'


class MissingFigure(NamedTuple):
    """A figure that has nothing to show, and why."""

    title: str
    why: str


def css(dark: bool) -> str:
    """Returns the colours of all inline figures as CSS variables."""
    colours = DARK.values() if dark else DARK
    return " ".join(f"--figure-{place}: {colour};" for place, colour in enumerate(colours))


def draw(sweep: ReportedSweep) -> list[Drawn | MissingFigure]:
    """Returns the report's figures, in its order."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        return [make(sweep) for make in (_scaling, _throughput, _learning, _steps)]


def look(place: int) -> StrategyLook:
    """Returns the look of the strategy with this place among others: where colours begin again, markers go on."""
    count = len(STRATEGIES)
    return {"color": STRATEGIES[place % count], "marker": MARKERS[(place + place // count) % len(MARKERS)]}


def _scaling(sweep: ReportedSweep) -> Drawn | MissingFigure:
    from matplotlib.lines import Line2D

    title = "Speedup and efficiency against workers"
    points = [point for point in sweep.measured if point.result.speed.speedup is not None]
    if not points:
        return MissingFigure(title, "no point has a speedup: it needs a baseline, and measure.steps other than 0")
    ticks = sorted(set(map(_workers, points)))
    if len(ticks) < 2:
        return MissingFigure(title, "all points have as many workers")
    series = grouped((_series(point, sweep), point) for point in points)
    is_foreseen = any(map(_foreseen, points))
    figure, (above, below) = _figure(PANEL, 2, len(series) + 1 + is_foreseen + bool(sweep.confidences))
    # Beside each other, where they would lie on each other.
    apart = 0.012 * ticks[-1]
    # How each is drawn, and of each point: where, its values, and its workers.
    curves: list[tuple[dict[str, Any], list[tuple[float, Ends, int]]]] = []
    foreseen: list[tuple[float, Ends, int]] = []
    for place, (name, dashes) in enumerate(zip(series, _dashes([each[0] for each in series.values()]), strict=True)):
        of_series, shift = sorted(series[name], key=_workers), apart * (place - (len(series) - 1) / 2)
        how = {**_look_of(of_series[0], sweep), "ls": dashes, "capsize": 3, "lw": 1.6, "ms": 6, "label": name}
        curves.append((how, [(_workers(point) + shift, _speedup(point), _workers(point)) for point in of_series]))
        both = ((point, ends) for point in of_series if (ends := _foreseen(point)))
        foreseen += ((_workers(point) + shift + apart / 2, ends, _workers(point)) for point, ends in both)
    hollow = dict[str, Any](color=IDEAL, marker="D", mfc="none", ls="none", capsize=2, lw=1, ms=8, zorder=1.5)
    curves += [(hollow | {"label": "predicted before"}, foreseen)] * bool(foreseen)
    for axes, name, top in ((above, "speedup", ticks[-1]), (below, "efficiency", 1)):
        ideal = "ideal: as many times as fast as workers"
        axes.plot([1, ticks[-1]], [1, top], color=IDEAL, lw=1.2, ls=(0, (2, 2)), label=ideal)
        for how, values in curves:
            heights = [[end / (workers if axes is below else 1) for end in ends] for _, ends, workers in values]
            beside = [[abs(middle - both[side]) for middle, *both in heights] for side in (0, 1)]
            axes.errorbar([x for x, *_ in values], [middle for middle, *_ in heights], beside, **how)
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.set_xticks(ticks if len(ticks) <= 8 else ticks[:: len(ticks) // 8 + 1], minor=False)
    below.set_xlabel("workers")
    below.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    texts = "; ".join(
        f"{_strategy(point)}, {_workers(point)} workers: {_speed(point, 'speedup')[0]:.2f}" for point in points
    )
    handles = [*above.get_legend_handles_labels()[0]]
    if name := interval_name(sweep):
        handles.append(Line2D([], [], color=INK, marker="|", ms=9, mew=1.6, ls="none", label=name))
    return _rendered("scaling", title, f"Speedup over one device, by workers. {texts}.", figure, handles)


def _throughput(sweep: ReportedSweep) -> Drawn | MissingFigure:
    title = "Throughput by strategy"
    if not sweep.measured:
        return MissingFigure(title, "no point was measured")
    points, texts = _first(sweep.measured), []
    for point in points:
        middle, low, high = _speed(point)
        texts.append(f"{_series(point, sweep, point.name)}: {rate(middle)}{brackets(span(low, high, rate, ' to '))}")
    figure, axes, thick = _bars([(text, _look_of(point, sweep)) for text, point in zip(texts, points, strict=True)])
    for place, point in enumerate(points):
        (middle, low, high), colour = _speed(point), _look_of(point, sweep)["color"]
        alpha = 1.0 if point.marks.compares else 0.35
        axes.barh(place, middle, thick, color=colour, alpha=alpha, edgecolor=colour)
        axes.errorbar([middle], [place], xerr=[[middle - low], [high - middle]], color=INK, capsize=3, lw=1.2)
    axes.set_xlabel(f"training examples per second{brackets(interval_name(sweep))}")
    return _rendered("throughput", title, f"Training examples per second. {'; '.join(texts)}.", figure)


def _learning(sweep: ReportedSweep) -> Drawn | MissingFigure:
    title = "Time to accuracy"
    points = [point for point in sweep.points if sweep.curve(point)]
    if not points or sweep.metric is None:
        return MissingFigure(title, "no point has validated: train.epochs of 1 or more does")
    shown = sorted(points, key=lambda point: (sweep.seconds_to_target(point) or 0.0, point.number))[:MOST_LINES]
    figure, (axes,) = _figure(PANEL, 1, len(shown) + 1)
    for point, dashes in zip(shown, _dashes(shown), strict=True):
        curve = sweep.curve(point)
        axes.plot(*zip(*curve, strict=True), **_look_of(point, sweep), ls=dashes, ms=4.5, lw=1.6,
                  markevery=max(1, len(curve) // 10), label=_series(point, sweep, point.name))  # fmt: skip
    if sweep.target is not None:
        reached = f"{sweep.target:.4g}: what all of them reached"
        axes.axhline(sweep.target, color=IDEAL, lw=1, ls=(0, (2, 2)), label=reached)
    axes.set_xlabel("seconds of training, with tracing and validation")
    axes.set_ylabel(f"validation {sweep.metric}")
    seconds = ((point, sweep.seconds_to_target(point)) for point in shown)
    times = "; ".join(f"point {point.name}: {took:.1f} s" for point, took in seconds if took is not None)
    more = f" The first {len(shown)} of {len(points)} points." if len(shown) < len(points) else ""
    description = f"Seconds until validation {sweep.metric} {sweep.target:.4g}: {times}.{more}"
    return _rendered("learning", title, description, figure, axes.get_legend_handles_labels()[0])


def _steps(sweep: ReportedSweep) -> Drawn | MissingFigure:
    from matplotlib.patches import Patch

    title = "Step time by cause"
    split = {point.number: milliseconds for point in sweep.measured if (milliseconds := causes(point))}
    if not split:
        return MissingFigure(title, "no point was explained: measure.explain=true looks for the causes")
    points = _first([point for point in sweep.points if point.number in split])
    names = [name for name in CAUSES if any(name in split[point.number] for point in points)]
    looks = {name: dict[str, Any](facecolor=CAUSES[name][0], hatch=CAUSES[name][1], ec=PAPER, lw=0.5) for name in names}
    totals = (f"{_series(point, sweep, point.name)}: {rate(sum(split[point.number].values()))} ms" for point in points)
    figure, axes, thick = _bars(
        [(total, _look_of(point, sweep)) for total, point in zip(totals, points, strict=True)], len(names)
    )
    description = []
    for place, point in enumerate(points):
        left, of_point = 0.0, split[point.number]
        for name in (name for name in names if name in of_point):
            axes.barh(place, of_point[name], thick, left, **looks[name])
            left += of_point[name]
        each = ", ".join(f"{name} {rate(value)} ms" for name, value in of_point.items())
        description.append(f"point {point.name}: {each}")
    axes.set_xlabel("milliseconds of a step")
    handles = [Patch(**looks[name], label=name) for name in names]
    return _rendered("steps", title, f"Where the time of a step goes. {'; '.join(description)}.", figure, handles)


def interval_name(sweep: ReportedSweep) -> str:
    """Returns the name of a sweep's intervals, in two words; points with more and with fewer repeats have several."""
    shares = sweep.confidences
    return f"{' or '.join(map(percent, shares))} interval{'s' * (len(shares) > 1)}" if shares else ""


def causes(point: ReportedRun) -> dict[str, float]:
    """Milliseconds of a step by cause: `computing` is the step of one device alone, the others what was lost to each.

    None of a point that was not explained. Of a share s of the ideal throughput that is lost, a step of t ms that takes
    t (1 - lost) alone has lost s t.
    """
    step, explained = point.result.speed.step_ms_p50, point.result.explained
    if step is None or explained is None:
        return {}
    shares = {part.name: max(0.0, part.share) for part in explained.parts}
    lost = {name if name in CAUSES else "other": share * step for name, share in shares.items() if share}
    return {"computing": max(0.0, 1 - sum(shares.values())) * step} | lost


def _series(point: ReportedRun, sweep: ReportedSweep, name: str = "") -> str:
    group = f"group {point.group}" if len({one.group for one in sweep.measured}) > 1 and point.group else ""
    return f"{name or _strategy(point)}{brackets(listed(group, *mark_texts(point.marks)))}"


def _workers(point: ReportedRun) -> int:
    return point.result.layout.workers or 1


def _strategy(point: ReportedRun) -> str:
    return str(point.result.choices.called)


def _speed(point: ReportedRun, name: str = "examples_per_second") -> Ends:
    """Returns a speed that was measured and the ends around it, which are the speed where they are not known."""
    middle, low, high = (getattr(point.result.speed, f"{name}{end}") for end in ("", "_low", "_high"))
    middle = middle or 0.0
    return middle, min(middle, middle if low is None else low), max(middle, middle if high is None else high)


_speedup = partial(_speed, name="speedup")


def _foreseen(point: ReportedRun) -> Ends | None:
    one, predictions = point.result.speed.baseline_examples_per_second, point.result.predictions
    if not one or not predictions:
        return None
    last = predictions[-1]
    return last.examples_per_second / one, last.low / one, last.high / one


def _first(points: Sequence[ReportedRun]) -> Sequence[ReportedRun]:
    # Of too many the fastest, in their order.
    fastest = sorted(points, key=lambda point: -_speed(point)[0])[:MOST_BARS]
    return sorted(fastest, key=lambda point: point.number)


def _look_of(point: ReportedRun, sweep: ReportedSweep) -> StrategyLook:
    return look([*dict.fromkeys(map(_strategy, sweep.points))].index(_strategy(point)))


def _dashes(points: Sequence[ReportedRun]) -> list[Dash]:
    names = list(map(_strategy, points))
    return [DASHES[names[:place].count(name) % len(DASHES)] for place, name in enumerate(names)]


def _rendered(name: str, title: str, description: str, figure: "Figure", handles: "Sequence[Artist]" = ()) -> Drawn:
    if handles:
        figure.legend(
            handles=handles, loc="lower left", bbox_to_anchor=(0.02, 0.0), frameon=False, fontsize=SMALL,
            handlelength=3.2, labelspacing=0.35, borderaxespad=0.3,
        )  # fmt: skip
    svg, png = BytesIO(), BytesIO()
    # No date: an unchanged report stays the same.
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.savefig(png, format="png", dpi=DPI)
    return Drawn(name, title, description, svg.getvalue(), png.getvalue())


def _bars(labels: Sequence[tuple[str, StrategyLook]], rows: int = 0) -> "tuple[Figure, Axes, float]":
    """Returns (a figure, its axes, how thick a bar is) for bars at 0, 1, ... from the top, each under text and look."""
    from matplotlib.ticker import EngFormatter, MaxNLocator
    from matplotlib.transforms import ScaledTranslation

    wrapped = [fill(text, MOST_CHARACTERS) for text, _ in labels]
    row = THICK + 0.12 + LINE * max(text.count("\n") + 1 for text in wrapped)
    figure, (axes,) = _figure(len(labels) * row, 1, rows, left=0.2, top=0.1)
    thick = THICK / row
    axes.set_ylim(len(labels) - 1 + thick, thick - 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for place, ((_, look), text) in enumerate(zip(labels, wrapped, strict=True)):
        above = place - 0.6 * thick
        axes.annotate(text, (0, above), (AFTER_MARKER, 0), textcoords="offset points", ha="left", va="bottom",
                      fontsize=SMALL, linespacing=1.1, annotation_clip=False)  # fmt: skip
        beside = ScaledTranslation(4 / 72, 5 / 72 + text.count("\n") * LINE, figure.dpi_scale_trans)
        axes.plot([0], [above], **look, ms=6, ls="none", clip_on=False, transform=axes.transData + beside)
    return figure, axes, thick


def _figure(panel: float, count: int, rows: int, left: float = LEFT, top: float = TOP) -> "tuple[Figure, list[Axes]]":
    """A figure of `count` panels so high under each other, and below them room for a legend of so many rows."""
    from matplotlib.figure import Figure

    below = BOTTOM + (ROW * rows + 0.1) * bool(rows)
    height = top + count * panel + (count - 1) * BETWEEN + below
    figure = Figure((WIDTH, height))
    panels: list[Axes] = [*figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]]
    adjusted = (left / WIDTH, below / height, 1 - RIGHT / WIDTH, 1 - top / height)
    figure.subplots_adjust(*adjusted, hspace=BETWEEN / panel)
    for axes in panels:
        axes.grid(lw=0.6)
        axes.set_axisbelow(True)
    return figure, panels

"""Turns a sweep into figures: each a PNG and an SVG, or the reason why there is nothing to draw.

Colours are those of Okabe & Ito (2008), which the colour-blind tell apart; markers and dashes say the same again. Texts
stand where nothing else is: labels of bars above them, legends below the axes, so that a figure reads on a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from textwrap import fill
from typing import TYPE_CHECKING, Any

from pipeline.analyze.comparable import Marks
from pipeline.views.report.gather import Point, Sweep
from pipeline.views.terminal.verdict import mark_texts
from pipeline.views.terminal.words import brackets, rate, span

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, GREY = "#000000", "#767676"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", BLACK)
MARKERS = "osD^vPX"
Dash = str | tuple[float, tuple[float, ...]]
DASHES: tuple[Dash, ...] = (
    "-",
    (0, (5, 2)),
    (0, (1, 1.5)),
    (0, (5, 1.5, 1, 1.5)),
    (0, (8, 2)),
    (0, (3, 1)),
    (0, (2, 3)),
)
# Of what a step's time goes to, always the same colour and hatching.
CAUSES = {
    "computing": ("#56B4E9", ""), "communication": ("#D55E00", "//"), "input wait": ("#E69F00", ".."),
    "batch statistics": ("#F0E442", "oo"), "contention": ("#009E73", "xx"), "stragglers": ("#CC79A7", "\\\\"),
    "host overhead": ("#0072B2", "--"), "other": ("#BBBBBB", ""), "all else": ("#999999", ""),
}  # fmt: skip
# Inches. Every figure is as wide as a phone shows at a readable size.
WIDTH, PANEL, THICK, LINE, ROW, LEFT, RIGHT, TOP, BOTTOM = 4.8, 2.4, 0.19, 0.165, 0.185, 0.75, 0.2, 0.15, 0.6
FONT, SMALL, DPI = 11, 9.5, 144
# Of a text above a bar, in a line.
MOST_CHARACTERS = 58
# More would not be told apart.
MOST_BARS, MOST_LINES = 40, 7


@dataclass(frozen=True)
class Drawn:
    """A figure: its name, what it shows in a sentence, and its files' contents."""

    name: str
    title: str
    told: str
    svg: bytes
    png: bytes


@dataclass(frozen=True)
class LeftOut:
    """A figure that has nothing to show, and why."""

    title: str
    why: str


def draw(sweep: Sweep) -> list[Drawn | LeftOut]:
    """The report's figures, in its order."""
    return [make(sweep) for make in (_scaling, _throughput, _learning, _steps)]


def _scaling(sweep: Sweep) -> Drawn | LeftOut:
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
    rows = len(series) + 1 + bool(foreseen)
    figure, (above, below) = _axes(2, rows)
    most = max(map(_workers, points))
    above.plot(
        [1, most], [1, most], color=GREY, lw=1.2, ls=(0, (2, 2)), label="ideal: as many times as fast as workers"
    )
    below.plot([1, most], [1, 1], color=GREY, lw=1.2, ls=(0, (2, 2)))
    # Beside each other, where they would lie on each other.
    apart = 0.012 * most
    beside: dict[int, float] = {}
    for place, (name, unsorted) in enumerate(series.items()):
        of_series = sorted(unsorted, key=_workers)
        workers = list(map(_workers, of_series))
        colour, marker, dashes = _look(place)
        ends = list(map(_speedup, of_series))
        shifted = [count + apart * (place - (len(series) - 1) / 2) for count in workers]
        beside |= {point.place: x + apart / 2 for point, x in zip(of_series, shifted, strict=True)}
        for axes, scale in ((above, [1] * len(of_series)), (below, workers)):
            axes.errorbar(
                shifted,
                [middle / one for (middle, _, _), one in zip(ends, scale, strict=True)],
                [
                    [(middle - low) / one for (middle, low, _), one in zip(ends, scale, strict=True)],
                    [(high - middle) / one for (middle, _, high), one in zip(ends, scale, strict=True)],
                ],
                color=colour, marker=marker, ls=dashes, capsize=3, lw=1.6, ms=6, label=name if axes is above else None,
            )  # fmt: skip
    for place, (middle, low, high) in foreseen.items():
        count = next(_workers(point) for point in points if point.place == place)
        for axes, over, label in ((above, 1, "predicted before" * (place == min(foreseen))), (below, count, "")):
            axes.errorbar(
                [beside[place]], [middle / over], [[(middle - low) / over], [(high - middle) / over]], color=GREY,
                marker="D", mfc="none", ls="none", capsize=2, lw=1, ms=8, label=label or None, zorder=1.5,
            )  # fmt: skip
    above.set_ylabel("speedup")
    below.set_ylabel("efficiency")
    below.set_xlabel("workers")
    ticks = sorted(set(map(_workers, points)))
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.set_xticks(ticks if len(ticks) <= 8 else ticks[:: len(ticks) // 8 + 1], minor=False)
    below.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    told = "; ".join(
        f"{point.result.choices.strategy}, {_workers(point)} workers: {_speedup(point)[0]:.2f}" for point in points
    )
    return _drawn("scaling", title, f"Speedup over one device, by workers. {told}.", figure, _handles(above))


def _throughput(sweep: Sweep) -> Drawn | LeftOut:
    """Throughput of each point."""
    title = "Throughput by strategy"
    if not sweep.measured:
        return LeftOut(title, "no point was measured")
    points = _first(sweep.measured)
    names = list(dict.fromkeys(str(point.result.choices.strategy) for point in points))
    ends = list(map(_throughput_of, points))
    texts = [
        f"{_series(point, sweep, point.name)}: {rate(middle)}{brackets(span(low, high, rate, ' to '))}"
        for point, (middle, low, high) in zip(points, ends, strict=True)
    ]
    bars = _bars(texts)
    for place, (point, (middle, low, high)) in enumerate(zip(points, ends, strict=True)):
        colour = _look(names.index(str(point.result.choices.strategy)))[0]
        faint = point.marks not in (Marks(), Marks(("asynchronous",)))
        bars.axes.barh(place, middle, bars.thick, color=colour, alpha=0.35 if faint else 1.0, edgecolor=colour)
        bars.axes.errorbar([middle], [place], xerr=[[middle - low], [high - middle]], color=BLACK, capsize=3, lw=1.2)
    bars.axes.set_xlabel("training examples per second")
    return _drawn("throughput", title, f"Training examples per second. {'; '.join(texts)}.", bars.figure)


def _learning(sweep: Sweep) -> Drawn | LeftOut:
    """The validation metric against seconds of training."""
    title = "Time to accuracy"
    points = [point for point in sweep.points if sweep.curve(point)]
    if not points or sweep.metric is None:
        return LeftOut(title, "no point has validated: train.epochs of 1 or more does")
    shown = sorted(points, key=lambda point: (sweep.seconds_to_target(point) or 0.0, point.place))[:MOST_LINES]
    figure, (axes,) = _axes(1, len(shown) + 1)
    for place, point in enumerate(shown):
        colour, marker, dashes = _look(place)
        curve = sweep.curve(point)
        every = max(1, len(curve) // 10)
        axes.plot(*zip(*curve, strict=True), color=colour, marker=marker, ls=dashes, ms=4.5, lw=1.6, markevery=every,
                  label=_series(point, sweep, point.name))  # fmt: skip
    if sweep.target is not None:
        axes.axhline(
            sweep.target, color=GREY, lw=1, ls=(0, (2, 2)), label=f"{sweep.target:.4g}: what all of them reached"
        )
    axes.set_xlabel("seconds of training, with tracing and validation")
    axes.set_ylabel(f"validation {sweep.metric}")
    reached = ((point, sweep.seconds_to_target(point)) for point in shown)
    told = "; ".join(f"point {point.name}: {seconds:.1f} s" for point, seconds in reached if seconds is not None)
    more = f" The first {len(shown)} of {len(points)} points." if len(shown) < len(points) else ""
    return _drawn(
        "learning",
        title,
        f"Seconds until validation {sweep.metric} {sweep.target:.4g}: {told}.{more}",
        figure,
        _handles(axes),
    )


def _steps(sweep: Sweep) -> Drawn | LeftOut:
    """What a step's time goes to: the causes where they were looked for, else the wait for input and all else."""
    from matplotlib.patches import Patch

    title = "Step time by cause"
    split = {point.place: found for point in sweep.measured if (found := causes(point))}
    if not split:
        return LeftOut(title, "no step was timed: measure.steps=0 measures nothing")
    points = _first([point for point in sweep.points if point.place in split])
    names = [name for name in CAUSES if any(name in split[point.place] for point in points)]
    texts = [f"{_series(point, sweep, point.name)}: {rate(sum(split[point.place].values()))} ms" for point in points]
    bars = _bars(texts, len(names))
    for place, point in enumerate(points):
        left = 0.0
        for name in (name for name in names if name in split[point.place]):
            bars.axes.barh(place, split[point.place][name], bars.thick, left, **_cause(name))
            left += split[point.place][name]
    handles = [Patch(**_cause(name), label=name) for name in names]
    bars.axes.set_xlabel("milliseconds of a step")
    told = "; ".join(
        f"point {point.name}: {', '.join(f'{name} {rate(value)} ms' for name, value in split[point.place].items())}"
        for point in points
    )
    return _drawn("steps", title, f"Where the time of a step goes. {told}.", bars.figure, handles)


def _cause(name: str) -> dict[str, Any]:
    colour, hatch = CAUSES[name]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}


def causes(point: Point) -> dict[str, float]:
    """Milliseconds of a step by cause: `computing` is the step of one device alone, the others what was lost to each.

    Of a share s of the ideal throughput that is lost, a step of t ms that takes t (1 - lost) alone has lost s t.
    """
    step, wait = point.result.speed.step_ms_p50, point.result.input.wait
    if step is None:
        return {}
    if explained := point.result.explained:
        shares = {part.name: max(0.0, part.share) for part in explained.parts}
        kept = max(0.0, 1 - sum(shares.values()))
        return {"computing": kept * step} | {
            name if name in CAUSES else "other": share * step for name, share in shares.items() if share
        }
    return {"all else": step} if wait is None else {"input wait": wait * step, "all else": (1 - wait) * step}


def _series(point: Point, sweep: Sweep, name: str = "") -> str:
    marked = _marked(point, sweep)
    return f"{name or point.result.choices.strategy}{f' ({marked})' * bool(marked)}"


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


def _look(place: int) -> tuple[str, str, Dash]:
    # Where the colours begin again, markers and dashes go on.
    other = place + place // len(COLOURS)
    return COLOURS[place % len(COLOURS)], MARKERS[other % len(MARKERS)], DASHES[other % len(DASHES)]


def _axes(count: int, rows: int) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels under each other and room for a legend of so many rows below."""
    below = BOTTOM + ROW * rows + 0.1
    height = TOP + count * PANEL + (count - 1) * 0.25 + below
    return _figure(height, count, below, 0.25 / PANEL)


@dataclass(frozen=True)
class Bars:
    """Horizontal bars at 0, 1, ... from the top, so `thick`, each with its text above it."""

    figure: Figure
    axes: Axes
    thick: float


def _bars(texts: Sequence[str], rows: int = 0) -> Bars:
    """A figure for a bar under each of `texts`, with room for a legend of so many rows."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    wrapped = [fill(text, MOST_CHARACTERS) for text in texts]
    row = THICK + 0.12 + LINE * max(text.count("\n") + 1 for text in wrapped)
    below = BOTTOM + (ROW * rows + 0.1 if rows else 0.0)
    figure, (axes,) = _figure(0.1 + len(texts) * row + below, 1, below, 0, left=0.2, top=0.1)
    thick = THICK / row
    axes.set_ylim(len(texts) - 1 + thick, thick - 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for place, text in enumerate(wrapped):
        axes.text(0, place - 0.6 * thick, text, ha="left", va="bottom", fontsize=SMALL, linespacing=1.1)
    return Bars(figure, axes, thick)


def _figure(
    height: float, count: int, below: float, between: float, left: float = LEFT, top: float = TOP
) -> tuple[Figure, list[Axes]]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(
        {"font.size": FONT, "font.family": "DejaVu Sans", "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure = Figure((WIDTH, height), facecolor="white")
        grid = figure.subplots(count, 1, sharex=True, squeeze=False)
    figure.subplots_adjust(left / WIDTH, below / height, 1 - RIGHT / WIDTH, 1 - top / height, hspace=between)
    panels: list[Axes] = list(grid[:, 0])
    for axes in panels:
        axes.grid(color="#DDDDDD", lw=0.6)
        axes.set_axisbelow(True)
    return figure, panels


def _handles(axes: Axes) -> list[Artist]:
    return list(axes.get_legend_handles_labels()[0])


def _drawn(name: str, title: str, told: str, figure: Figure, handles: Sequence[Artist] = ()) -> Drawn:
    import matplotlib as mpl

    if handles:
        figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.02, 0.0), frameon=False, fontsize=SMALL,
                      handlelength=3.2, labelspacing=0.35, borderaxespad=0.3)  # fmt: skip
    files: dict[str, bytes] = {}
    # Texts as shapes: no font has to be there where the page is read. No date: an unchanged report stays the same.
    with mpl.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
        for kind, about in (("svg", {"Date": None}), ("png", None)):
            made = BytesIO()
            figure.savefig(made, format=kind, dpi=DPI, metadata=about)
            files[kind] = made.getvalue()
    return Drawn(name, title, told, files["svg"], files["png"])

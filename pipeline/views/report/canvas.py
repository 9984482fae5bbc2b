"""Turns what a figure shows into its files: panels and bars to draw on, and their colours.

Colours are those of Okabe & Ito (2008), which the colour-blind tell apart. A figure is drawn once, for light paper; CSS
of the page puts lighter colours of the same hues in their place on dark paper. Markers, dashes and hatching say the
same again. Texts stand where nothing else is: labels of bars above them, legends below the axes, so that a figure reads
on a phone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


# The colour and the marker of a strategy, as matplotlib takes them.
StrategyLook = dict[str, Any]
Dash = str | tuple[float, tuple[float, ...]]
MARKERS = "osD^vPX"
DASHES: tuple[Dash, ...] = (
    "-", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 1.5, 1, 1.5)), (0, (8, 2)), (0, (3, 1)), (0, (2, 3)),
)  # fmt: skip
# Inches. Every figure is as wide as a phone shows at a readable size.
WIDTH, PANEL, THICK, LINE, ROW, LEFT, RIGHT, TOP, BOTTOM = 4.8, 2.4, 0.19, 0.165, 0.185, 0.75, 0.2, 0.15, 0.6
FONT, SMALL, DPI = 11, 9.5, 144
# Of a text above a bar, in a line, and how far it is from the marker before it, in points.
MOST_CHARACTERS, AFTER_MARKER = 56, 11


# The colours of light paper, each with what stands for it on dark paper.
DARK = {
    "#FFFFFF": "#16181C", "#1A1A1A": "#E6E6E6", "#767676": "#9A9A9A", "#DDDDDD": "#3A3D42",
    "#0072B2": "#3D9BE0", "#D55E00": "#F0803C", "#009E73": "#1FC79A", "#CC79A7": "#DE8FBA", "#E69F00": "#F5C542",
    "#56B4E9": "#9AD7FF", "#000000": "#FFFFFF", "#F0E442": "#F0E442", "#BBBBBB": "#8A8A8A",
}  # fmt: skip
PAPER, INK, IDEAL, GRID = "#FFFFFF", "#1A1A1A", "#767676", "#DDDDDD"
# Those of strategies, in their order, and of what a step's time goes to.
STRATEGIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
CAUSES = {
    "computing": "#56B4E9", "communication": "#D55E00", "input wait": "#E69F00", "batch statistics": "#F0E442",
    "contention": "#009E73", "stragglers": "#CC79A7", "host overhead": "#0072B2", "other": "#BBBBBB",
}  # fmt: skip
STYLE: dict[Any, Any] = {
    "font.size": FONT, "font.family": "DejaVu Sans", "axes.spines.top": False, "axes.spines.right": False,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "grid.color": GRID, "hatch.color": PAPER, "axes.facecolor": PAPER, "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    # Texts as shapes: no font has to be there where the page is read.
    "svg.fonttype": "path", "svg.hashsalt": "report",
}  # fmt: skip


@dataclass(frozen=True)
class Drawn:
    """A figure: its name, what it shows in a sentence, and its files' contents."""

    name: str
    title: str
    description: str
    svg: bytes
    png: bytes

    @property
    def inline(self) -> str:
        """The picture as a part of a page whose CSS has the colours, which `css` makes for light or dark paper."""
        text = self.svg.decode()
        text = text[text.index("<svg ") :]
        # HTML knows the names of SVG by itself.
        text = re.sub(r'<metadata>.*?</metadata>| xmlns(:\w+)?="[^"]*"', "", text, flags=re.DOTALL)
        for place, colour in enumerate(DARK):
            text = text.replace(colour.lower(), f"var(--figure-{place})")
        # A variable has a meaning in a style alone.
        text = re.sub(r'fill="(var[^"]+)"', r'style="fill: \1"', text)
        return text.replace("<svg ", f'<svg role="img" aria-label="{escape(self.description, quote=True)}" ', 1)


def css(dark: bool) -> str:
    """Returns the colours of all inline figures as CSS variables."""
    colours = DARK.values() if dark else DARK
    return " ".join(f"--figure-{place}: {colour};" for place, colour in enumerate(colours))


@dataclass(frozen=True)
class MissingFigure:
    """A figure that has nothing to show, and why."""

    title: str
    why: str


def rendered(name: str, title: str, description: str, figure: Figure, handles: Sequence[Artist] = ()) -> Drawn:
    """Returns the figure with its files; its legend has the `handles`."""
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


def panels(count: int, rows: int) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels under each other and room for a legend of so many rows below."""
    below = BOTTOM + ROW * rows + 0.1
    return _figure(TOP + count * PANEL + (count - 1) * 0.25 + below, count, below, 0.25 / PANEL)


def bars(labels: Sequence[tuple[str, StrategyLook]], rows: int = 0) -> tuple[Figure, Axes, float]:
    """Returns (a figure, its axes, how thick a bar is) for bars at 0, 1, ... from the top, each under its label.

    A label is a text with a look before it. There is room for a legend of so many rows.
    """
    from matplotlib.ticker import EngFormatter, MaxNLocator
    from matplotlib.transforms import ScaledTranslation

    wrapped = [fill(text, MOST_CHARACTERS) for text, _ in labels]
    row = THICK + 0.12 + LINE * max(text.count("\n") + 1 for text in wrapped)
    below = BOTTOM + (ROW * rows + 0.1 if rows else 0.0)
    figure, (axes,) = _figure(0.1 + len(labels) * row + below, 1, below, 0, left=0.2, top=0.1)
    thick = THICK / row
    axes.set_ylim(len(labels) - 1 + thick, thick - 1)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    for place, ((_, look), text) in enumerate(zip(labels, wrapped, strict=True)):
        above = (0, place - 0.6 * thick)
        axes.annotate(text, above, (AFTER_MARKER, 0), textcoords="offset points", ha="left", va="bottom",
                      fontsize=SMALL, linespacing=1.1, annotation_clip=False)  # fmt: skip
        lines = text.count("\n")
        beside = ScaledTranslation(4 / 72, 5 / 72 + lines * LINE, figure.dpi_scale_trans)
        axes.plot(*([at] for at in above), **look, ms=6, ls="none", clip_on=False,
                  transform=axes.transData + beside)  # fmt: skip
    return figure, axes, thick


def _figure(
    height: float, count: int, below: float, between: float, left: float = LEFT, top: float = TOP
) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, height))
    grid = figure.subplots(count, 1, sharex=True, squeeze=False)
    figure.subplots_adjust(left / WIDTH, below / height, 1 - RIGHT / WIDTH, 1 - top / height, hspace=between)
    panels: list[Axes] = list(grid[:, 0])
    for axes in panels:
        axes.grid(lw=0.6)
        axes.set_axisbelow(True)
    return figure, panels

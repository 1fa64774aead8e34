"""Draws figures as SVG with matplotlib: the same figure gives the same bytes, readable in grey and by the colour-blind.

matplotlib is imported here and nowhere else, on the first figure. Series differ in colour (Okabe and Ito's palette),
in lightness, in marker and dash or hatch; intervals are drawn; axes say their units.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from gpuctl.document.blocks import Figure, Point, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class CannotDraw(RuntimeError):
    """matplotlib is not installed; the message says how to get it."""


# Okabe and Ito (2008), ordered so that neighbours differ in lightness as well. The first is for the first series.
COLOURS = ("#3d3d3d", "#0072b2", "#e69f00", "#d55e00", "#56b4e9", "#009e73", "#cc79a7")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (1.5, 1.2)),
    (0, (6, 1.5, 1.5, 1.5)),
    (0, (3, 1)),
    (0, (8, 2)),
    (0, (1, 2)),
)
HATCHES = ("", "///", "\\\\\\", "xxx", "---", "|||", "+++")
LEGEND_COLUMNS = 4
INK = "#1b1f24"  # text and frame
FAINT = "#d0d3d8"  # grid
PAPER = "#ffffff"

_STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: it can be searched, read aloud and restyled
    "text.parse_math": False,  # a dollar in a name is a dollar
    "text.usetex": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.linewidth": 0.8,
    "hatch.linewidth": 0.7,
    "path.simplify": False,
    "axes.unicode_minus": True,
}


@dataclass(frozen=True)
class Drawing:
    """An SVG document and its size in points."""

    svg: str
    width: float
    height: float


def check() -> None:
    """Raises CannotDraw when figures cannot be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CannotDraw("figures are drawn with matplotlib: pip install 'gpuctl-llm[report]'") from error


def svg(figure: Figure) -> Drawing:
    """The figure as an SVG document. Raises CannotDraw."""
    check()
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": figure.id}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the reader's font may well have it
        width, height = 6.6, 3.3
        canvas = Canvas(figsize=(width, height))
        FigureCanvasSVG(canvas)
        axes = canvas.subplots()
        rows = -(-len(figure.series) // LEGEND_COLUMNS)
        canvas.subplots_adjust(
            left=0.115, right=0.985, bottom=0.16 if str(figure.x) else 0.09, top=0.985 - 0.062 * rows
        )
        {"bars": _bars, "lines": _lines, "path": _path}[figure.kind](axes, figure)
        _frame(axes, figure)
        out = io.StringIO()
        canvas.savefig(
            out, format="svg", facecolor="none", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", out.getvalue())  # a hundredth of a point is finer than any eye
    return Drawing(text[text.index("<svg") :], width * 72, height * 72)


def standalone(drawing: Drawing) -> bytes:
    """The drawing as a file: on white, so that it reads on a dark page too, with fonts that are likely to be there."""
    head, _, body = drawing.svg.partition(">")
    body = body.replace("font-family: 'DejaVu Sans'", "font-family: 'DejaVu Sans', Verdana, sans-serif")
    paper = f'<rect width="100%" height="100%" fill="{PAPER}"/>'
    return f'<?xml version="1.0" encoding="utf-8"?>\n{head}>{paper}{body}'.encode()


def inline(drawing: Drawing, id: str, title: str, colours: Mapping[str, str]) -> str:
    """The drawing to stand inside an HTML page: ids made unique, colours as the page's custom properties.

    `title` is raw; `colours` maps a colour of the drawing to what the page calls it.
    """
    body = drawing.svg.partition(">")[2]
    used = dict.fromkeys(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    short = {name: f"{id}-{i}" for i, name in enumerate(used)}
    body = re.sub(r' id="([^"]*)"', lambda m: f' id="{short[m[1]]}"' if m[1] in short else "", body)
    body = re.sub(r'(href="#|url\(#)([^")]+)', lambda m: m[1] + short[m[2]], body)
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)  # would style the page
    body = re.sub(r"font-family: '[^']*'; ", "", body)
    for colour, name in colours.items():
        body = body.replace(f": {colour}", f": {name}").replace(f'fill="{colour}"', f'style="fill: {name}"')
    body = re.sub(r"\n *", "\n", body)
    size = f"0 0 {drawing.width:g} {drawing.height:g}"
    return (
        f'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="{size}" role="img" aria-label="{escape(title)}">'
        f"{body.strip()}"
    )


# Few artists a figure, each for many points: a bar or an error bar of its own would take ten times as long to draw.


def _bars(axes: Axes, figure: Figure) -> None:
    from matplotlib.collections import PolyCollection

    categories = list(dict.fromkeys(str(p.x) for s in figure.series for p in s.points))
    place = {name: i for i, name in enumerate(categories)}
    width = 0.82 / len(figure.series)
    half = width * 0.46
    drawn: list[tuple[float, Point, str]] = []
    for i, series in enumerate(figure.series):
        offset = (i - (len(figure.series) - 1) / 2) * width
        xs = [place[str(p.x)] + offset for p in series.points]
        boxes = [
            ((x - half, 0.0), (x - half, p.y), (x + half, p.y), (x + half, 0.0))
            for x, p in zip(xs, series.points, strict=True)
        ]
        style: Any = {"facecolor": COLOURS[i], "hatch": HATCHES[i], "edgecolor": PAPER, "linewidth": 0.5, "zorder": 2}
        axes.add_collection(PolyCollection(boxes, **style))
        drawn += [(x, p, INK) for x, p in zip(xs, series.points, strict=True)]
    _errors(axes, drawn)
    axes.set_xlim(-0.6, len(categories) - 0.4)
    axes.set_xticks(range(len(categories)), [_short(name) for name in categories])
    axes.tick_params(axis="x", length=0)
    if len(categories) > 6 or max(map(len, categories)) > 14:
        for tick in axes.get_xticklabels():
            tick.set(rotation=30, horizontalalignment="right", rotation_mode="anchor")
        axes.figure.subplots_adjust(bottom=0.3)


def _lines(axes: Axes, figure: Figure) -> None:
    _curves(axes, figure)
    seen = sorted({float(p.x) for s in figure.series for p in s.points})
    if figure.x.doubling and seen[0] > 0:
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_xticks(seen, [f"{x:g}" for x in seen])
    else:
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}".replace(",", "\u2009"))


def _path(axes: Axes, figure: Figure) -> None:
    _curves(axes, figure)
    for series in figure.series:
        for p in series.points:
            # At its capacity a server stays where it was: its label goes below, not onto the one before.
            way: Any = {"xytext": (-4, -9), "ha": "right"} if p.hollow else {"xytext": (4, 4)}
            axes.annotate(p.label, (float(p.x), p.y), textcoords="offset points", fontsize=7, zorder=5, **way)


def _curves(axes: Axes, figure: Figure) -> None:
    drawn: list[tuple[float, Point, str]] = []
    for i, series in enumerate(figure.series):
        style: Any = {"linestyle": DASHES[i], "marker": MARKERS[i], "color": COLOURS[i], "markersize": 5, "zorder": 3}
        axes.plot([float(p.x) for p in series.points], [p.y for p in series.points], linewidth=1.6, **style)
        hollow = [p for p in series.points if p.hollow]
        if hollow:
            style |= {"linestyle": "none", "markerfacecolor": PAPER, "zorder": 4}
            axes.plot([float(p.x) for p in hollow], [p.y for p in hollow], **style)
        drawn += [(float(p.x), p, COLOURS[i]) for p in series.points]
    _errors(axes, drawn)


def _errors(axes: Axes, drawn: Sequence[tuple[float, Point, str]]) -> None:
    """The 95 % intervals, as lines that end in caps."""
    known = [(x, p.low, p.high, colour) for x, p, colour in drawn if p.low is not None and p.high is not None]
    if known:
        where, lows, highs, colours = (list(column) for column in zip(*known, strict=True))
        axes.vlines(where, lows, highs, colours, linewidth=0.9, zorder=4)
        axes.scatter(where + where, lows + highs, c=colours + colours, marker="_", s=16, linewidths=0.9, zorder=4)


def _frame(axes: Axes, figure: Figure) -> None:
    axes.autoscale_view()
    axes.set_ylim(bottom=0)
    axes.set_ylabel(str(figure.y))
    if str(figure.x):
        axes.set_xlabel(str(figure.x))
    axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}".replace(",", "\u2009"))
    axes.grid(axis="y", color=FAINT, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles = [_key(figure.kind, i) for i in range(len(figure.series))]
    axes.figure.legend(
        handles,
        [_name(series) for series in figure.series],
        loc="upper left",
        borderaxespad=0.2,
        ncols=min(len(handles), LEGEND_COLUMNS),
        frameon=False,
        fontsize=8,
        handlelength=2.6,
        handleheight=1.1,
        columnspacing=1.4,
    )


def _key(kind: str, i: int) -> Any:
    """The sample beside a name in the legend: line and marker, or a hatched box."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    if kind == "bars":
        return Patch(facecolor=COLOURS[i], hatch=HATCHES[i], edgecolor=PAPER, linewidth=0.5)
    return Line2D([], [], linestyle=DASHES[i], color=COLOURS[i], marker=MARKERS[i], markersize=5, linewidth=1.6)


def _name(series: Series) -> str:
    """A name for the legend; matplotlib would leave out one that begins with an underscore."""
    name = _short(series.name)
    return f"\u2060{name}" if name.startswith("_") else name  # a word joiner: takes no room


def _short(text: str) -> str:
    return text if len(text) <= 28 else text[:27] + "…"

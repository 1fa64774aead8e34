"""Draws figures as SVG with matplotlib: the same figure gives the same bytes, readable in grey and by the colour-blind.

matplotlib is imported here and nowhere else, on the first figure. Series differ in colour (Okabe and Ito's palette),
in lightness, in marker and dash or hatch; intervals are drawn; axes say their units.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from gpuctl.document import labels
from gpuctl.document.blocks import Figure, Point, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas
    from matplotlib.transforms import Transform


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
_BOX = (1, 2, 2, 2, 79)  # matplotlib's codes of a closed path: MOVETO, LINETO, CLOSEPOLY
HATCHES = ("", "///", "\\\\\\", "xxx", "---", "|||", "+++")
LEGEND_COLUMNS = 4
_LONG_NAME = 16  # characters: longer ones have two columns in the legend, not four
INK = "#1b1f24"  # text and frame
FAINT = "#d0d3d8"  # grid
PAPER = "#ffffff"

_WIDTH, _HEIGHT = 6.6, 3.3  # inches
# Of the drawing: where the axes begin and end, and how high a row of the legend is. Nothing is measured to be placed:
# that every text is laid out several times for it is half of what matplotlib takes its time for.
_LEFT, _RIGHT, _LEGEND_ROW = 0.115, 0.985, 0.062

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
        raise CannotDraw("figures are drawn with matplotlib: pip install matplotlib") from error


def svg(figure: Figure) -> Drawing:
    """The figure as an SVG document. Raises CannotDraw."""
    check()
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure as Canvas

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": figure.id}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # the reader's font may well have it
        names = [_name(series) for series in figure.series]
        columns = LEGEND_COLUMNS if max(map(len, names)) <= _LONG_NAME else LEGEND_COLUMNS // 2
        bottom = 0.3 if _slanted(figure) else 0.16 if str(figure.x) else 0.09
        top = 0.97 - _LEGEND_ROW * -(-len(names) // columns)
        canvas = Canvas(figsize=(_WIDTH, _HEIGHT), dpi=72, facecolor="none")
        left = _LEFT if figure.kind != "timeline" else 0.3 if any(len(r) > 8 for r in _rows(figure)) else 0.13
        axes = canvas.add_axes((left, bottom, _RIGHT - left, top - bottom))
        {"bars": _bars, "lines": _lines, "path": _path, "timeline": _timeline}[figure.kind](axes, figure)
        _frame(axes, figure)
        _legend(canvas, figure.kind, names, columns)
        out = io.StringIO()
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        FigureCanvasSVG(canvas)
        canvas.savefig(out, format="svg", facecolor="none", metadata=metadata)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", out.getvalue())  # a hundredth of a point is finer than any eye
    return Drawing(text[text.index("<svg") :], _WIDTH * 72, _HEIGHT * 72)


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


# Few artists a figure, each for many points: what matplotlib takes its time for is artists, not points.


def _bars(axes: Axes, figure: Figure) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    categories = list(dict.fromkeys(str(p.x) for s in figure.series for p in s.points))
    place = {name: i for i, name in enumerate(categories)}
    width = 0.82 / len(figure.series)
    half = width * 0.46
    drawn: list[tuple[float, Point]] = []
    for i, series in enumerate(figure.series):
        offset = (i - (len(figure.series) - 1) / 2) * width
        xs = [place[str(p.x)] + offset for p in series.points]
        boxes = [
            Path([(x - half, 0.0), (x - half, p.y), (x + half, p.y), (x + half, 0.0), (x - half, 0.0)], _BOX)
            for x, p in zip(xs, series.points, strict=True)
        ]
        style: Any = {"facecolor": COLOURS[i], "hatch": HATCHES[i], "edgecolor": PAPER, "linewidth": 0.5, "zorder": 2}
        axes.add_patch(PathPatch(Path.make_compound_path(*boxes), **style))
        drawn += zip(xs, series.points, strict=True)
    _errors(axes, drawn, INK)
    axes.set_xlim(-0.6, len(categories) - 0.4)
    axes.tick_params(axis="x", bottom=False)
    axes.set_xticks(range(len(categories)), [_short(name) for name in categories])
    if _slanted(figure):
        for tick in axes.get_xticklabels():
            tick.set(rotation=30, horizontalalignment="right", rotation_mode="anchor")


def _slanted(figure: Figure) -> bool:
    """Whether the names below the bars are too many or too long to stand side by side."""
    if figure.kind != "bars":
        return False
    categories = dict.fromkeys(str(p.x) for s in figure.series for p in s.points)
    return len(categories) > 6 or max(map(len, categories)) > 14


def _lines(axes: Axes, figure: Figure) -> None:
    seen = sorted({float(p.x) for s in figure.series for p in s.points})
    if figure.x.doubling and seen[0] > 0:
        _curves(axes, figure, math.log2)
        axes.set_xticks([math.log2(x) for x in seen], [f"{x:g}" for x in seen])
    else:
        _curves(axes, figure)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}".replace(",", "\u2009"))


def _path(axes: Axes, figure: Figure) -> None:
    from matplotlib.transforms import IdentityTransform, ScaledTranslation

    _curves(axes, figure)
    ways: dict[str, Any] = {
        side: {
            # A point of the drawing is a pixel of it.
            "transform": axes.transData + ScaledTranslation(4 * right, 4 if above > 0 else -9, IdentityTransform()),
            "horizontalalignment": "left" if right > 0 else "right",
        }
        for side, (right, above) in labels.SIDES.items()
    }
    for p, side in labels.sides(figure):
        axes.text(float(p.x), p.y, p.label, fontsize=7, zorder=5, **ways[side])


def _rows(figure: Figure) -> list[str]:
    """The rows of a timeline, from above."""
    return list(dict.fromkeys(p.label for s in figure.series for p in s.points))


def _timeline(axes: Axes, figure: Figure) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    rows = _rows(figure)
    for i, series in enumerate(figure.series):
        boxes = [
            Path([(x, y - 0.32), (x, y + 0.32), (x + p.y, y + 0.32), (x + p.y, y - 0.32), (x, y - 0.32)], _BOX)
            for p in series.points
            for x, y in [(float(p.x), rows.index(p.label))]
        ]
        path = Path.make_compound_path(*boxes)
        axes.add_patch(PathPatch(path, facecolor=COLOURS[i], hatch=HATCHES[i], edgecolor=PAPER, linewidth=0, zorder=2))
        # An edge of its colour as well: what lasted a moment is seen.
        axes.add_patch(PathPatch(path, fill=False, edgecolor=COLOURS[i], linewidth=1, zorder=3))
    axes.set_yticks(range(len(rows)), [_short(row) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _curves(axes: Axes, figure: Figure, place: Callable[[float], float] = float) -> None:
    from matplotlib.lines import Line2D

    for i, series in enumerate(figure.series):
        points = [(place(float(p.x)), p) for p in series.points]
        style: Any = {"linestyle": DASHES[i], "marker": MARKERS[i], "color": COLOURS[i], "markersize": 5, "zorder": 3}
        axes.add_line(Line2D([x for x, _ in points], [p.y for _, p in points], linewidth=1.6, **style))
        hollow = [(x, p) for x, p in points if p.hollow]
        if hollow:
            style |= {"linestyle": "none", "markerfacecolor": PAPER, "zorder": 4}
            axes.add_line(Line2D([x for x, _ in hollow], [p.y for _, p in hollow], **style))
        _errors(axes, points, COLOURS[i])


def _errors(axes: Axes, drawn: Sequence[tuple[float, Point]], colour: str) -> None:
    """The 95 % intervals of one colour, as lines that end in caps: one line, interrupted after each interval."""
    from matplotlib.lines import Line2D

    known = [(x, p.low, p.high) for x, p in drawn if p.low is not None and p.high is not None]
    if known:
        nothing = float("nan")
        xs = [x for where, _, _ in known for x in (where, where, nothing)]
        ys = [y for _, low, high in known for y in (low, high, nothing)]
        style: Any = {"linestyle": "-", "linewidth": 0.9, "marker": "_", "markersize": 4, "markeredgewidth": 0.9}
        axes.add_line(Line2D(xs, ys, color=colour, zorder=4, **style))


def _frame(axes: Axes, figure: Figure) -> None:
    if figure.kind == "timeline":
        axes.set_xlim(0, max(float(p.x) + p.y for s in figure.series for p in s.points) * 1.02 or 1)
        axes.grid(axis="x", color=FAINT, linewidth=0.6, zorder=0)
    else:
        axes.autoscale_view()
        axes.set_ylim(bottom=0)
        axes.set_ylabel(str(figure.y))
        axes.yaxis.set_label_coords(0.03, 0.5, transform=_beside(axes))
        axes.locator_params(axis="y", nbins=5)
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:,.10g}".replace(",", "\u2009"))
        axes.grid(axis="y", color=FAINT, linewidth=0.6, zorder=0)
    if str(figure.x):
        axes.set_xlabel(str(figure.x))
        axes.xaxis.set_label_coords(0.5, 0.06, transform=_below(axes))
    axes.tick_params(axis="y", left=False)  # the grid says where
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for tick in (*axes.xaxis.get_major_ticks(), *axes.yaxis.get_major_ticks()):
        tick.label1.set_in_layout(False)  # nothing is placed by how large they are


def _beside(axes: Axes) -> Transform:
    """Across in shares of the drawing, up in shares of the axes."""
    from matplotlib.transforms import blended_transform_factory

    return blended_transform_factory(axes.figure.transFigure, axes.transAxes)


def _below(axes: Axes) -> Transform:
    """Across in shares of the axes, up in shares of the drawing."""
    from matplotlib.transforms import blended_transform_factory

    return blended_transform_factory(axes.transAxes, axes.figure.transFigure)


def _legend(canvas: Canvas, kind: str, names: Sequence[str], columns: int) -> None:
    """Sample and name of each series above the axes, row by row."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    for i, name in enumerate(names):
        row, column = divmod(i, columns)
        x, y = 0.02 + 0.97 * column / columns, 0.962 - _LEGEND_ROW * row
        style: Any
        if kind in ("bars", "timeline"):
            style = {"facecolor": COLOURS[i], "hatch": HATCHES[i], "edgecolor": PAPER, "linewidth": 0.5}
            canvas.add_artist(Rectangle((x, y - 0.018), 0.042, 0.036, **style))
        else:
            style = {"linestyle": DASHES[i], "color": COLOURS[i], "marker": MARKERS[i], "markersize": 5}
            canvas.add_artist(Line2D((x, x + 0.021, x + 0.042), (y, y, y), linewidth=1.6, markevery=(1, 9), **style))
        canvas.text(x + 0.052, y, name, fontsize=8, verticalalignment="center_baseline")


def _name(series: Series) -> str:
    """A name for the legend; matplotlib would leave out one that begins with an underscore."""
    name = _short(series.name)
    return f"\u2060{name}" if name.startswith("_") else name  # a word joiner: takes no room


def _short(text: str) -> str:
    return text if len(text) <= 28 else text[:27] + "…"

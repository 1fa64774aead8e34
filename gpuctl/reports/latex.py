"""The report as a LaTeX document with pgfplots figures, its data inside: for pdflatex, lualatex and xelatex.

Figures stand between `% figure: ID` comments, ready to be taken into a paper; their colours and styles are in the
preamble (latex.preamble.tex). `escape` is the only way for a text from outside to get into the document.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gpuctl import plots
from gpuctl.document import labels as placed
from gpuctl.document.blocks import Block, Cell, Column, Figure, Fold, Listing, Paragraph, Point, Section, Table
from gpuctl.document.outline import Report
from gpuctl.document.wording import reading

SUFFIX = "tex"
_PREAMBLE = Path(__file__).with_name("latex.preamble.tex")

# What LaTeX would act on, and what its fonts would join into another character (-- into a dash, ,, into a quote).
_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "'": r"\textquotesingle{}",
    "`": r"\textasciigrave{}",
    "-": "{-}",
    ",": "{,}",
    "!": "{!}",
    "?": "{?}",
    "[": "{[}",
    "]": "{]}",
    "*": "{*}",
    "±": r"\ensuremath{\pm}",
    "×": r"\ensuremath{\times}",
    "–": r"\textendash{}",
    "—": r"\textemdash{}",
    "…": r"\textellipsis{}",
    "“": r"\textquotedblleft{}",
    "”": r"\textquotedblright{}",
    "’": r"\textquoteright{}",
    "†": r"\textdagger{}",
    "‡": r"\textdaggerdbl{}",
    "▲": r"\ensuremath{\uparrow}",
    "▼": r"\ensuremath{\downarrow}",
    "≤": r"\ensuremath{\leq}",
    "≥": r"\ensuremath{\geq}",
    "µ": r"\textmu{}",
    "°": r"\textdegree{}",
}
_BREAK = frozenset("-_/.,=:;")  # a long name may be broken after these
_MOST_FIGURES = 6  # columns of figures that fit beside a name
_MOST_ROWS = 24  # of a table that is kept on one page
_ROOM = 104  # characters of a table's width


def escape(text: str, *, breaks: bool = False) -> str:
    """The text as LaTeX that prints it: nothing in it acts, and each character shows, whatever fonts there are.

    Letters outside Latin-1 are left to `\\gpuctlchar`, which prints their code where the font has no such letter.
    """
    out = []
    for c in text:
        special = _SPECIAL.get(c)
        if special is not None:
            out.append(special)
        elif " " <= c <= "~" or ("À" <= c <= "ÿ" and c not in "×÷"):
            out.append(c)
        else:
            out.append(rf"\gpuctlchar{{{ord(c):X}}}")
        if breaks and c in _BREAK:
            out.append(r"\allowbreak{}")
    return re.sub(r" (?= )", r"\\ ", "".join(out))


def render(report: Report) -> bytes:
    return ("\n".join(_lines(report)) + "\n").encode()


def _lines(report: Report) -> Iterator[str]:
    document = report.document
    yield "% Written by `gpuctl report`. Compile with: latexmk -pdf FILE, or pdflatex/lualatex three times."
    yield _PREAMBLE.read_text(encoding="utf-8").rstrip()
    title = escape(document.title)
    yield rf"\hypersetup{{pdftitle={{{title}}}}}"
    yield r"\begin{document}"
    yield rf"{{\LARGE\bfseries\raggedright {title}\par}}"
    yield r"\begin{gpuctlsummary}"
    for sentence in document.summary:
        yield rf"\item {escape(sentence)}"
    yield r"\end{gpuctlsummary}"
    for section in document.sections:
        yield from _block(section, 0)
    yield r"\end{document}"


_LEVELS = ("section", "subsection", "subsubsection")


def _block(block: Block, level: int) -> Iterator[str]:
    yield ""
    if isinstance(block, Section):
        yield rf"\{_LEVELS[min(level, 2)]}{{{escape(block.title)}}}\label{{{block.id}}}"
        for inner in block.blocks:
            yield from _block(inner, level + 1)
    elif isinstance(block, Paragraph):
        yield rf"\gpuctlwarning{{{escape(block.text)}}}" if block.warning else escape(block.text)
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Figure):
        yield from _figure(block)
    elif isinstance(block, Listing):
        yield from _listing(block)
    elif isinstance(block, Fold):
        yield rf"\gpuctlfold{{{escape(block.title)}}}"
        for inner in block.blocks:
            yield from _block(inner, level)


def _listing(listing: Listing) -> Iterator[str]:
    if listing.caption:
        yield rf"{escape(listing.caption)}:"
    yield r"\begin{gpuctllisting}"
    for line in listing.lines:
        yield rf"\item {' '.join(_whole(word) for word in line.split(' '))}"
    yield r"\end{gpuctllisting}"


_LONGEST_WORD = 72  # characters of a listing's line that are kept together: a flag broken at its dash is another flag


def _whole(word: str) -> str:
    return rf"\mbox{{{escape(word)}}}" if len(word) <= _LONGEST_WORD else escape(word, breaks=True)


# --- tables --------------------------------------------------------------------------------------


def _table(table: Table) -> Iterator[str]:
    """One longtable, or several when there are more columns of figures than fit."""
    figures = [i for i, column in enumerate(table.columns) if not column.text]
    leading = [i for i, column in enumerate(table.columns) if column.text]
    if len(figures) <= _MOST_FIGURES or leading != list(range(len(leading))):
        yield from _part(table, table.caption, list(range(len(table.columns))), table.id)
        return
    parts = -(-len(figures) // _MOST_FIGURES)
    size = -(-len(figures) // parts)
    for part in range(parts):
        chosen = [*leading, *figures[part * size : (part + 1) * size]]
        label = table.id if part == 0 else f"{table.id}-part{part + 1}"
        yield from _part(table, f"{table.caption} ({part + 1} of {parts})", chosen, label, notes=part == parts - 1)


def _part(table: Table, caption: str, chosen: Sequence[int], label: str, *, notes: bool = True) -> Iterator[str]:
    columns = [table.columns[i] for i in chosen]
    rows = [[row[i] for i in chosen] for row in table.rows]
    wrapped = _wrapped(columns, rows)
    spec = f"@{{}}{_widths(columns, wrapped)}@{{}}"
    head = " & ".join(_head(column) for column in columns) + r" \\ \midrule"
    said = r"\\ ".join(escape(note) for note in table.notes) if notes else ""
    if len(rows) <= _MOST_ROWS:  # stays on one page, with its caption
        yield r"\begin{gpuctltable}"
        yield rf"\captionof{{table}}{{{escape(caption)}}}\label{{{label}}}"
        yield rf"\begin{{tabular}}{{{spec}}}"
        yield rf"\toprule {head}"
        yield from _rows(columns, rows, wrapped)
        yield r"\bottomrule"
        yield r"\end{tabular}"
        if said:
            yield rf"\gpuctlnotes{{{said}}}"
        yield r"\end{gpuctltable}"
    else:
        yield r"\begingroup\footnotesize"
        yield rf"\begin{{longtable}}{{{spec}}}"
        yield rf"\caption{{{escape(caption)}}}\label{{{label}}}\\"
        yield rf"\toprule {head} \endfirsthead"
        yield rf"\toprule {head} \endhead"
        yield r"\bottomrule \endfoot"
        yield from _rows(columns, rows, wrapped)
        yield r"\end{longtable}"
        if said:
            yield rf"\nopagebreak\gpuctlnotes{{{said}}}"
        yield r"\endgroup"


def _rows(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], wrapped: Mapping[int, int]) -> Iterator[str]:
    """A line a row; what stands below its figures is a line of its own that never begins a page.

    Unless a text of the row takes several lines: far below those nobody sees what it belongs to.
    """
    for row in rows:
        long = {i for i, most in wrapped.items() if len(row[i].text) > most}
        stacked = [
            bool(cell.below) and i not in long and (bool(long) or _stacks(cell, column))
            for i, (cell, column) in enumerate(zip(row, columns, strict=True))
        ]
        texts = [
            _stacked(cell, column) if stack else _cell(cell, column)
            for cell, column, stack in zip(row, columns, stacked, strict=True)
        ]
        below = ["" if stack else cell.below for cell, stack in zip(row, stacked, strict=True)]
        yield " & ".join(texts) + (r" \\*" if any(below) else r" \\[.4ex]")
        if any(below):
            yield " & ".join(rf"\gpuctlbelow{{{escape(text)}}}" if text else "" for text in below) + r" \\[.4ex]"


_STACKED = 20  # characters: a moment


def _stacks(cell: Cell, column: Column) -> bool:
    """Whether the second line stays with the first: beside a long text a row's own second line is far away."""
    return column.text and not column.code and len(cell.text) <= _STACKED


def _stacked(cell: Cell, column: Column) -> str:
    lines = rf"{_cell(cell, column)}\\\gpuctlbelow{{{escape(cell.below)}}}"
    return rf"\begin{{tabular}}[t]{{@{{}}{'l' if column.text else 'r'}@{{}}}}{lines}\end{{tabular}}"


def _wrapped(columns: Sequence[Column], rows: Sequence[Sequence[Cell]]) -> dict[int, int]:
    """The columns that are paragraphs, with the characters they have: the longest texts, where not all columns fit."""
    longest = [
        max([len(column.title) + len(column.unit) + 2, *(len(row[i].text) + 2 for row in rows)])
        for i, column in enumerate(columns)
    ]
    wrapped: dict[int, int] = {}
    texts = sorted((i for i, column in enumerate(columns) if column.text), key=lambda i: longest[i])
    room = _ROOM - sum(size for i, size in enumerate(longest) if not columns[i].text)
    for place, i in enumerate(texts):
        fair = max(8, room // (len(texts) - place))
        if longest[i] > fair:
            wrapped[i] = fair
        room -= min(longest[i], fair)
    return wrapped


def _widths(columns: Sequence[Column], wrapped: Mapping[int, int]) -> str:
    """What a longtable is told of its columns."""
    spec = []
    for i, column in enumerate(columns):
        if i in wrapped:
            width = rf"\dimexpr {wrapped[i] / _ROOM:.3f}\linewidth-2\tabcolsep\relax"
            spec.append(rf">{{\raggedright\arraybackslash}}p{{{width}}}")
        else:
            spec.append("l" if column.text else "r")
    return "".join(spec)


def _head(column: Column) -> str:
    title = escape(f"{column.title} ({column.unit})" if column.unit else column.title)
    return rf"\textbf{{{title}}}"


def _cell(cell: Cell, column: Column) -> str:
    text = escape(cell.text, breaks=column.text)
    if column.code and cell.text:
        text = rf"\texttt{{{text}}}"
    if cell.strong:
        text = rf"\textbf{{{text}}}"
    if cell.mark:
        text += rf"\rlap{{\textsuperscript{{{escape(cell.mark)}}}}}"
    # Braces: a row that begins with a bracket would be an argument of the line before it.
    return f"{{{text}}}"


# --- figures -------------------------------------------------------------------------------------

# As large as they are drawn, a pentagon or a circle with a cross is a circle: the triangle turns instead.
_MARKS = (
    ("*", ""),
    ("square*", ""),
    ("triangle*", ""),
    ("diamond*", ""),
    ("triangle*", ",rotate=180"),
    ("triangle*", ",rotate=90"),
    ("triangle*", ",rotate=270"),
)
_APART = "enlarge x limits=.04"  # no mark or label on the frame
_DASHES = ("solid", "dashed", "densely dotted", "dash dot", "densely dashed", "loosely dashed", "dotted")
_PATTERNS = ("", "north east lines", "north west lines", "crosshatch", "horizontal lines", "vertical lines", "grid")


def _figure(figure: Figure) -> Iterator[str]:
    yield r"\begin{gpuctlfigure}"
    yield f"% figure: {figure.id}"
    yield r"\begin{tikzpicture}"
    yield from {"bars": _bars, "lines": _lines_of, "path": _path, "timeline": _timeline}[figure.kind](figure)
    yield r"\end{axis}"
    yield r"\end{tikzpicture}"
    yield "% end of figure"
    yield rf"\captionof{{figure}}{{{escape(reading(figure))} Table~\ref{{{figure.table}}} has the numbers.}}"
    yield rf"\label{{{figure.id}}}"
    yield r"\end{gpuctlfigure}"


def _axis(figure: Figure, *more: str) -> str:
    x = [f"xlabel={{{escape(str(figure.x))}}}"] if str(figure.x) else []
    return "\\begin{axis}[" + ", ".join(["gpuctl", *x, f"ylabel={{{escape(str(figure.y))}}}", *more]) + "]"


def _bars(figure: Figure) -> Iterator[str]:
    categories = list(dict.fromkeys(str(p.x) for series in figure.series for p in series.points))
    place = {name: i for i, name in enumerate(categories)}
    ticks = ",".join(str(i) for i in range(len(categories)))
    labels = ",".join(f"{{{escape(_short(name))}}}" for name in categories)
    slanted = ["x tick label style={rotate=30,anchor=north east}"] if len("".join(categories)) > 70 else []
    yield _axis(
        figure,
        "ybar=.6pt",
        f"bar width={0.8 / len(figure.series):.4f}",
        f"xmin=-0.6, xmax={len(categories) - 0.4:.1f}",
        f"xtick={{{ticks}}}",
        f"xticklabels={{{labels}}}",
        "xtick style={draw=none}",
        "area legend",
        *slanted,
    )
    for i, series in enumerate(figure.series):
        hatch = rf",postaction={{pattern={_PATTERNS[i]},pattern color=white}}" if _PATTERNS[i] else ""
        style = f"fill=gpuctl{i},draw=none{hatch}"
        yield _plot(style, ((float(place[str(p.x)]), p) for p in series.points))
        yield _legend(series.name)


def _lines_of(figure: Figure) -> Iterator[str]:
    more = []
    seen = sorted({float(p.x) for series in figure.series for p in series.points})
    if figure.x.doubling and seen[0] > 0:
        ticks = ",".join(f"{x:g}" for x in seen)
        more = ["xmode=log", "log basis x=2", f"xtick={{{ticks}}}", f"xticklabels={{{ticks}}}", "xminorticks=false"]
    yield _axis(figure, _APART, *more)
    yield from _curves(figure)


def _path(figure: Figure) -> Iterator[str]:
    yield _axis(figure, _APART)
    yield from _curves(figure)
    for p, side in placed.sides(figure):
        yield rf"\node[gpuctl {side}] at (axis cs:{float(p.x):.6g},{p.y:.6g}) {{{escape(p.label)}}};"


def _timeline(figure: Figure) -> Iterator[str]:
    rows = list(dict.fromkeys(p.label for series in figure.series for p in series.points))
    ends = [float(p.x) + p.y for series in figure.series for p in series.points]
    ticks = ",".join(str(i) for i in range(len(rows)))
    labels = ",".join(f"{{{escape(_short(name))}}}" for name in rows)
    style = ["ylabel={}", "y dir=reverse", f"ymin=-0.6, ymax={len(rows) - 0.4:.1f}", "ymajorgrids=false, xmajorgrids"]
    style += [f"ytick={{{ticks}}}", f"yticklabels={{{labels}}}", "enlarge y limits=false", "area legend"]
    yield _axis(figure, *style, "ytick style={draw=none}", f"xmin=0, xmax={max(ends) * 1.01:.6g}", "height=4.6cm")
    for i, series in enumerate(figure.series):
        hatch = rf",postaction={{pattern={_PATTERNS[i]},pattern color=white}}" if _PATTERNS[i] else ""
        style_ = f"fill=gpuctl{i},draw=gpuctl{i},line width=.6pt{hatch}"
        yield rf"\addlegendimage{{{style_}}}"
        yield _legend(series.name)
        for p in series.points:
            x, y = float(p.x), rows.index(p.label)
            yield rf"\path[{style_}] (axis cs:{x:.6g},{y - 0.3:.1f}) rectangle (axis cs:{x + p.y:.6g},{y + 0.3:.1f});"


def _curves(figure: Figure) -> Iterator[str]:
    for i, series in enumerate(figure.series):
        mark, turned = _MARKS[i]
        style = f"gpuctl{i},{_DASHES[i]},mark={mark},mark options={{solid{turned}}}"
        yield _plot(style, ((float(p.x), p) for p in series.points))
        yield _legend(series.name)
    for i, series in enumerate(figure.series):
        hollow = [(float(p.x), p) for p in series.points if p.hollow]
        if hollow:
            mark, turned = _MARKS[i]
            style = f"gpuctl{i},only marks,mark={mark},mark options={{solid,fill=white{turned}}},forget plot"
            yield _plot(style, hollow)


def _plot(style: str, points: Iterator[tuple[float, Point]] | Sequence[tuple[float, Point]]) -> str:
    rows = []
    for x, p in points:
        up = 0.0 if p.high is None else p.high - p.y
        down = 0.0 if p.low is None else p.y - p.low
        rows.append(f"{x:.6g} {p.y:.6g} {up:.4g} {down:.4g}")
    data = r" \\ ".join(rows)
    return (
        rf"\addplot[{style}] table [x index=0, y index=1, y error plus index=2, y error minus index=3, "
        rf"header=false, row sep=\\] {{{data} \\}};"
    )


def _legend(name: str) -> str:
    return rf"\addlegendentry{{{escape(_short(name))}}}"


def _short(text: str) -> str:
    return text if len(text) <= 28 else text[:27] + "…"


def colours() -> str:
    """The palette of the drawings, as the preamble defines it (held against it by a test)."""
    return "\n".join(rf"\definecolor{{gpuctl{i}}}{{HTML}}{{{c[1:].upper()}}}" for i, c in enumerate(plots.COLOURS))

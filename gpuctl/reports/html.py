"""The report as one HTML page: no network, no script, light and dark, prints, reads aloud.

Everything that comes from outside goes through `html.escape`; the page forbids scripts and connections by policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from gpuctl import plots
from gpuctl.document.blocks import Block, Cell, Column, Figure, Fold, Listing, Paragraph, Section, Table
from gpuctl.document.outline import Report
from gpuctl.document.wording import reading

SUFFIX = "html"
_SHORT = 36  # names up to here are kept on one line
_STYLE = Path(__file__).with_suffix(".css")

# What the drawings call their colours, and what the page does, so that a drawing is light or dark with the page.
_INK = {plots.INK: "var(--ink)", plots.FAINT: "var(--rule)", plots.PAPER: "var(--paper)"}
_INK |= {colour: f"var(--series-{i})" for i, colour in enumerate(plots.COLOURS)}


def render(report: Report) -> bytes:
    return "\n".join(_page(report)).encode()


def _page(report: Report) -> Iterator[str]:
    document = report.document
    missing = _cannot_draw(report)
    yield "<!DOCTYPE html>"
    yield '<html lang="en">'
    yield "<head>"
    yield '<meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    yield '<meta name="color-scheme" content="light dark">'
    yield '<meta name="generator" content="gpuctl report">'
    yield f"<title>{escape(document.title)}</title>"
    yield f"<style>\n{_STYLE.read_text(encoding='utf-8')}</style>"
    yield "</head>"
    yield "<body>"
    yield '<a class="skip" href="#main">Skip to the results</a>'
    yield "<header>"
    yield f"<h1>{escape(document.title)}</h1>"
    yield '<ul class="summary">'
    for sentence in document.summary:
        yield f"<li>{escape(sentence)}</li>"
    yield "</ul>"
    if missing:
        yield f'<p class="warning" role="note">{escape(missing)}</p>'
    yield "</header>"
    yield from _contents(document.sections)
    yield '<main id="main">'
    for section in document.sections:
        yield from _block(section, 2, not missing)
    yield "</main>"
    yield "<footer><p>Written by gpuctl report. This page is complete: it loads nothing.</p></footer>"
    yield "</body>"
    yield "</html>\n"


def _cannot_draw(report: Report) -> str:
    """Why there are no figures, where there should be some."""
    first = next((block for block in report.document.walk() if isinstance(block, Figure)), None)
    if first is None:
        return ""
    try:
        plots.check()
    except plots.CannotDraw as error:
        return f"The figures are missing; {error}. Their numbers are in the tables."
    return ""


def _contents(sections: tuple[Section, ...]) -> Iterator[str]:
    yield '<nav aria-label="Contents">'
    yield "<ul>"
    for section in sections:
        yield f'<li><a href="#{section.id}">{escape(section.title)}</a></li>'
    yield "</ul>"
    yield "</nav>"


def _block(block: Block, level: int, draw: bool) -> Iterator[str]:
    if isinstance(block, Section):
        yield f'<section aria-labelledby="{block.id}">'
        yield f'<h{level} id="{block.id}">{escape(block.title)}</h{level}>'
        for inner in block.blocks:
            yield from _block(inner, min(6, level + 1), draw)
        yield "</section>"
    elif isinstance(block, Paragraph):
        yield (
            f'<p class="warning" role="note">{escape(block.text)}</p>'
            if block.warning
            else f"<p>{escape(block.text)}</p>"
        )
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Figure):
        if draw:
            yield from _figure(block)
    elif isinstance(block, Listing):
        if block.caption:
            yield f"<p>{escape(block.caption)}:</p>"
        yield f'<pre tabindex="0"><code>{escape(chr(10).join(block.lines))}</code></pre>'
    elif isinstance(block, Fold):
        yield f"<details><summary>{escape(block.title)}</summary>"
        for inner in block.blocks:
            yield from _block(inner, level, draw)
        yield "</details>"


def _table(table: Table) -> Iterator[str]:
    yield f'<div class="table" id="{table.id}" tabindex="0" role="region" aria-label="{escape(table.caption)}">'
    yield f"<table><caption>{escape(table.caption)}</caption>"
    yield "<thead><tr>" + "".join(_head(column) for column in table.columns) + "</tr></thead>"
    yield "<tbody>"
    for row in table.rows:
        yield (
            "<tr>"
            + "".join(_cell(i, c, column) for i, (c, column) in enumerate(zip(row, table.columns, strict=True)))
            + "</tr>"
        )
    yield "</tbody></table>"
    if table.notes:
        yield '<p class="notes">' + "<br>".join(escape(note) for note in table.notes) + "</p>"
    yield "</div>"


def _head(column: Column) -> str:
    unit = f' <span class="unit">({escape(column.unit)})</span>' if column.unit else ""
    return f'<th scope="col"{_class(column)}>{escape(column.title)}{unit}</th>'


def _class(column: Column) -> str:
    return ' class="text"' if column.text else ""


def _cell(place: int, cell: Cell, column: Column) -> str:
    text = escape(cell.text)
    if column.code and text:
        text = f'<code class="short">{text}</code>' if len(cell.text) <= _SHORT else f"<code>{text}</code>"
    if cell.strong:
        text = f"<strong>{text}</strong>"
    if cell.mark:
        text += f"<sup>{escape(cell.mark)}</sup>"
    if cell.below:
        text += f'<span class="below">{escape(cell.below)}</span>'
    if place == 0:
        return f'<th scope="row"{_class(column)}>{text}</th>'
    return f"<td{_class(column)}>{text}</td>"


def _figure(figure: Figure) -> Iterator[str]:
    names = ", ".join(series.name for series in figure.series)
    title = f"{figure.caption}. {figure.y} by {str(figure.x) or 'point'}, for {names}. The table has its numbers."
    yield f'<figure id="{figure.id}">'
    yield plots.inline(plots.svg(figure), figure.id, title, _INK)
    yield f'<figcaption>{escape(reading(figure))} <a href="#{figure.table}">The numbers</a></figcaption>'
    yield "</figure>"

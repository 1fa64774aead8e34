"""The report as Markdown (GitHub's dialect), for a README, an issue or a wiki."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote

from gpuctl import plots
from gpuctl.document.blocks import Block, Cell, Column, Figure, Fold, Listing, Paragraph, Section, Table
from gpuctl.document.outline import Report
from gpuctl.document.wording import reading

SUFFIX = "md"


def code(text: str) -> str:
    """The text as a code span; its own backticks survive by a longer fence."""
    if not text.strip():
        return text
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if text[0] in "` " or text[-1] in "` " else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def render(report: Report) -> bytes:
    """The document alone, without figures."""
    return _text(report, "")


def files(report: Report, name: str) -> dict[str, bytes]:
    """The document under that name, with its figures as SVG in a folder beside it, where they can be drawn."""
    figures = [block for block in report.document.walk() if isinstance(block, Figure)]
    try:
        plots.check()
    except plots.CannotDraw:
        figures = []
    folder = f"{name.rpartition('.')[0] or name}-figures"
    drawn = {f"{folder}/{figure.id}.svg": plots.standalone(plots.svg(figure)) for figure in figures}
    return {name: _text(report, folder if drawn else ""), **drawn}


def _text(report: Report, folder: str) -> bytes:
    return ("\n".join(_lines(report, folder)).rstrip() + "\n").encode()


def _lines(report: Report, folder: str) -> Iterator[str]:
    document = report.document
    yield f"# {_words(document.title)}"
    yield ""
    for sentence in document.summary:
        yield f"- {_words(sentence)}"
    for section in document.sections:
        yield from _block(section, 2, folder)


def _words(text: str) -> str:
    """Running text: only what would be read as markup is escaped, so that the source stays readable."""
    return re.sub(
        r"([\\`*_\[\]<>|~$&@#])", lambda m: {"<": "&lt;", ">": "&gt;", "&": "&amp;"}.get(m[1], "\\" + m[1]), text
    )


def _block(block: Block, level: int, folder: str) -> Iterator[str]:
    yield ""
    if isinstance(block, Section):
        yield f"{'#' * level} {_words(block.title)}"
        for inner in block.blocks:
            yield from _block(inner, level + 1, folder)
    elif isinstance(block, Paragraph):
        yield f"> **Note.** {_words(block.text)}" if block.warning else _words(block.text)
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Listing):
        yield from _listing(block)
    elif isinstance(block, Fold):
        yield f"<details><summary>{_words(block.title)}</summary>"
        for inner in block.blocks:
            yield from _block(inner, level + 1, folder)
        yield ""
        yield "</details>"
    elif isinstance(block, Figure) and folder:
        where = quote(f"{folder.rpartition('/')[2]}/{block.id}.svg")
        yield f"![{_words(reading(block))}]({where})"
        yield ""
        yield f"<sub>{_words(reading(block))}</sub>"


def _table(table: Table) -> Iterator[str]:
    yield f"**{_words(table.caption)}**"
    yield ""
    yield "| " + " | ".join(_head(column) for column in table.columns) + " |"
    yield "|" + "|".join("---" if column.text else "---:" for column in table.columns) + "|"
    for row in table.rows:
        yield "| " + " | ".join(_cell(cell, column) for cell, column in zip(row, table.columns, strict=True)) + " |"
    for note in table.notes:
        yield ""
        yield f"<sub>{_words(note)}</sub>"


def _head(column: Column) -> str:
    return _words(f"{column.title} ({column.unit})" if column.unit else column.title)


def _cell(cell: Cell, column: Column) -> str:
    # A pipe ends a cell even inside a code span, so a name with one is not shown as code.
    text = code(cell.text) if column.code and cell.text and "|" not in cell.text else _words(cell.text)
    if cell.strong:
        text = f"**{text}**"
    if cell.mark:
        text += f" {cell.mark}"
    return f"{text} {_words(cell.below)}" if cell.below else text


def _listing(listing: Listing) -> Iterator[str]:
    if listing.caption:
        yield f"{_words(listing.caption)}:"
        yield ""
    longest = max((len(run) for line in listing.lines for run in re.findall(r"`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    yield f"{fence}text"
    yield from listing.lines
    yield fence
